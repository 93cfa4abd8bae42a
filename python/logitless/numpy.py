# SPDX-License-Identifier: Apache-2.0
"""The operators on arrays, without torch.

Every argument may be a NumPy array, or anything with DLPack or the buffer protocol, with any strides,
read-only too; nothing is copied (but arrays with negative strides). bfloat16 comes as ml_dtypes'
type, or as uint16 that holds the bits; it leaves as it came. Shapes: input [BT, H], weight [V, H],
target [BT]. What is computed, and how exactly, stands in docs/numerics.md; `logitless.reference`
computes the same in float64, under the same names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from . import _core
from ._arrays import BOOL, Array, as_dtype, mask, matrix, numpy_dtype, overlap, vector, view
from ._sparse import for_core, tolerance, whole_seed
from ._threads import wanted_threads
from ._types import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    LOGITS_ROUNDING,
    NAMES,
    STRATEGY,
    U8,
    choice,
    integer,
)  # fmt: skip

__all__ = [
    "Gradient",
    "Loss",
    "LossAndGradient",
    "Statistics",
    "forward",
    "gradient",
    "load_case",
    "loss",
    "loss_and_gradient",
    "merge",
    "save_case",
]


class Statistics(NamedTuple):
    """What the forward says about each token; of one shard, or merged."""

    logits_max: np.ndarray  # [BT] f32
    sum_exp_logits: np.ndarray  # [BT] f32
    predicted_logits: np.ndarray  # [BT] f32: target's logit - logits_max; 0 where masked
    target_mask: np.ndarray  # [(BT + 7) // 8] u8, LSB first; 1 = the target is outside this shard
    masked_target: Optional[np.ndarray] = None  # [BT], dtype of target: local index, 0 where masked
    logits: Optional[np.ndarray] = None  # [BT, V], on request


class Loss(NamedTuple):
    loss: np.ndarray  # [BT] f32
    logsumexp: np.ndarray  # [BT] f32
    softmax: Optional[np.ndarray] = None  # [BT, V] f32, on request


class Gradient(NamedTuple):
    grad_input: Optional[np.ndarray]  # [BT, H]
    grad_weight: Optional[np.ndarray]  # [V, H]


class LossAndGradient(NamedTuple):
    total: float  # sum_b token_weights[b] / normalizer * loss[b]
    loss: np.ndarray  # [BT] f32, unweighted
    grad_input: Optional[np.ndarray]
    grad_weight: Optional[np.ndarray]
    logits_max: np.ndarray
    sum_exp_logits: np.ndarray
    predicted_logits: np.ndarray


def forward(
    input: Any,
    weight: Any,
    target: Any,
    *,
    vocab_start_index: int = 0,
    vocab_end_index: int | None = None,
    ignore_index: int | None = None,
    counts: Any = None,
    multiply: Any = None,
    logits_rounding: str = "none",
    return_logits: Any = False,
    threads: int = 0,
    isa: str = "",
    workspace_limit: int = 0,
    out: Mapping[str, Any] | None = None,
) -> Statistics:
    """Statistics of each token over one vocabulary shard; logits are not stored.

    vocab_start_index, vocab_end_index (exclusive): the global ids of this shard's rows.
    ignore_index: tokens whose target equals it do not count; counts [BT] u8 or bool, 0: ditto.
    multiply: "bf16" with f32 operands rounds them while packing.
    logits_rounding: "none", or "operand" to round logits to the operands' type first.
    return_logits: True (operands' type) or a dtype.
    out: arrays to write to, by the names of Statistics.
    """
    i, w, t = _operand("input", input), _operand("weight", weight), _targets("target", target)
    im, wm, tv = matrix("input", i), matrix("weight", w), vector("target", t)
    _same_type(i, w)
    BT, V = i.shape[0], w.shape[0]
    c = _counts(counts)
    made = _Outputs(out, ("logits_max", "sum_exp_logits", "predicted_logits", "target_mask",
                          "masked_target", "logits"), input=i, weight=w, target=t, counts=c)  # fmt: skip
    stats = [made.array(n, (BT,), F32) for n in ("logits_max", "sum_exp_logits", "predicted_logits")]
    target_mask = made.array("target_mask", ((BT + 7) // 8,), U8, kinds=(U8, BOOL))
    masked_target = made.array("masked_target", (BT,), t.dtype if t.dtype in (I32, I64) else I64)
    logits = None
    if return_logits is not False and return_logits is not None or "logits" in made.given:
        dtype = i.dtype if return_logits in (True, False, None) else as_dtype("return_logits", return_logits)
        logits = made.array("logits", (BT, V), dtype, kinds=(i.dtype, F32), like=input)
    top, sums, hit = _vectors(Statistics._fields, stats)
    _core.forward(
        im, wm, tv, integer("vocab_start_index", vocab_start_index),
        _optional_integer("vocab_end_index", vocab_end_index),
        _optional_integer("ignore_index", ignore_index), _optional_vector("counts", c),
        _multiply(multiply), choice("logits_rounding", logits_rounding, LOGITS_ROUNDING),
        top, sums, hit,
        mask("target_mask", target_mask, BT), vector("masked_target", masked_target),
        None if logits is None else matrix("logits", logits), _options(threads, isa, workspace_limit),
    )  # fmt: skip
    return Statistics(stats[0].owner, stats[1].owner, stats[2].owner, target_mask.owner, masked_target.owner,
                      None if logits is None else logits.owner)  # fmt: skip


def merge(shards: Sequence[Statistics], *, out: Mapping[str, Any] | None = None) -> Statistics:
    """Statistics of the whole vocabulary from those of its shards, in the order given."""
    if isinstance(shards, Statistics) or not isinstance(shards, Sequence):
        raise TypeError(f"shards is a {type(shards).__name__}, must be a sequence of Statistics")
    if len(shards) == 0:
        raise ValueError("shards: none came, must be at least one")
    views: list[Any] = []
    keep: list[Array] = []
    BT = 0
    for r, shard in enumerate(shards):
        arrays = _statistics(f"shards[{r}]", shard)
        if r == 0:
            BT = arrays[0].shape[0] if arrays[0].shape else 0
        arrays.append(view(f"shards[{r}].target_mask", shard.target_mask))
        names = [f"shards[{r}].{n}" for n in Statistics._fields[:4]]
        keep += arrays
        views.append((*_vectors(names[:3], arrays[:3]), mask(names[3], arrays[3], BT)))
    made = _Outputs(out, Statistics._fields[:4])  # may be the very arrays of a shard
    stats = [made.array(n, (BT,), F32) for n in Statistics._fields[:3]]
    target_mask = made.array("target_mask", ((BT + 7) // 8,), U8, kinds=(U8, BOOL))
    top, sums, hit = _vectors(Statistics._fields, stats)
    _core.merge(views, top, sums, hit,
                mask("target_mask", target_mask, BT))  # fmt: skip
    return Statistics(stats[0].owner, stats[1].owner, stats[2].owner, target_mask.owner)


def loss(
    statistics: Statistics,
    *,
    logits: Any = None,
    counts: Any = None,
    threads: int = 0,
    isa: str = "",
    out: Mapping[str, Any] | None = None,
) -> Loss:
    """Loss and logsumexp of each token from merged statistics; softmax if logits are given.

    counts [BT] u8 or bool, 0: the token does not count, its loss and logsumexp are 0.
    """
    arrays = _statistics("", statistics)
    top, sums, hit = _vectors(Statistics._fields, arrays)
    BT = arrays[0].shape[0]
    c = _counts(counts)
    made = _Outputs(out, Loss._fields)
    values = made.array("loss", (BT,), F32)
    logsumexp = made.array("logsumexp", (BT,), F32)
    softmax = None
    logits_view = None
    if logits is not None:
        logits_view = view("logits", logits, bf16=True)
        softmax = made.array("softmax", logits_view.shape, F32)
    _core.loss(
        top, sums, hit, None if logits_view is None else matrix("logits", logits_view),
        _optional_vector("counts", c),
        vector("loss", values), vector("logsumexp", logsumexp),
        None if softmax is None else matrix("softmax", softmax), _options(threads, isa, 0),
    )  # fmt: skip
    return Loss(values.owner, logsumexp.owner, None if softmax is None else softmax.owner)


def gradient(
    grad: Any,
    input: Any,
    weight: Any,
    masked_target: Any,
    *,
    target_mask: Any = None,
    logits_max: Any = None,
    sum_exp_logits: Any = None,
    softmax: Any = None,
    grad_logsumexp: Any = None,
    counts: Any = None,
    multiply: Any = None,
    logits_rounding: str = "none",
    grad_tolerance: float = 0.0,
    seed: int = 0,
    token_ids: Any = None,
    vocab_start_index: int = 0,
    grad_input: Any = True,
    grad_weight: Any = True,
    accumulate: bool | tuple[bool, bool] = False,
    threads: int = 0,
    isa: str = "",
    workspace_limit: int = 0,
    out: Mapping[str, Any] | None = None,
) -> Gradient:
    """Gradients of sum_b grad[b] * loss[b] + grad_logsumexp[b] * logsumexp[b] on one shard.

    Give logits_max and sum_exp_logits (merged): logits are recomputed; or softmax [BT, V] f32.
    target_mask absent: every target is inside.
    grad_input, grad_weight: True (operands' type), a dtype, or False: not wanted, costs nothing.
    accumulate: add to what the arrays in `out` hold; a pair says it for each.
    grad_tolerance, seed, token_ids: as for `loss_and_gradient`; from logits_max and sum_exp_logits only.
    vocab_start_index: the global id of weight's first row, which the sparse gradient's choice goes by.
    """
    s, ids = _sparse(grad_tolerance, seed, token_ids, vocab_start_index)
    i, w = _operand("input", input), _operand("weight", weight)
    g, t = view("grad", grad, kinds=(F32,)), _targets("masked_target", masked_target)
    im, wm = matrix("input", i), matrix("weight", w)
    _same_type(i, w)
    BT = i.shape[0]
    row_arrays = {
        name: None if array is None else view(name, array, kinds=(F32,))
        for name, array in (("grad_logsumexp", grad_logsumexp), ("logits_max", logits_max),
                            ("sum_exp_logits", sum_exp_logits))
    }  # fmt: skip
    c = _counts(counts)
    mask_view = None if target_mask is None else view("target_mask", target_mask)
    softmax_view = None if softmax is None else view("softmax", softmax, kinds=(F32,))
    made = _Outputs(out, Gradient._fields, input=i, weight=w, grad=g, masked_target=t, counts=c,
                    target_mask=mask_view, softmax=softmax_view, token_ids=ids, **row_arrays)  # fmt: skip
    gi = _gradient_output(made, "grad_input", grad_input, i.shape, i.dtype, input)
    gw = _gradient_output(made, "grad_weight", grad_weight, w.shape, i.dtype, weight)
    add = _accumulate(accumulate, made)
    lse, top, sums = (_optional_vector(name, array) for name, array in row_arrays.items())
    _core.gradient(
        vector("grad", g), lse, im, wm,
        None if mask_view is None else mask("target_mask", mask_view, BT),
        vector("masked_target", t), top, sums,
        None if softmax_view is None else matrix("softmax", softmax_view),
        _optional_vector("counts", c),
        _multiply(multiply), choice("logits_rounding", logits_rounding, LOGITS_ROUNDING),
        None if gi is None else matrix("grad_input", gi), add[0],
        None if gw is None else matrix("grad_weight", gw), add[1],
        _options(threads, isa, workspace_limit), *s,
    )  # fmt: skip
    return Gradient(None if gi is None else gi.owner, None if gw is None else gw.owner)


def loss_and_gradient(
    input: Any,
    weight: Any,
    target: Any,
    *,
    ignore_index: int | None = None,
    counts: Any = None,
    token_weights: Any = None,
    normalizer: float | None = None,
    multiply: Any = None,
    strategy: str = "automatic",
    grad_tolerance: float = 0.0,
    seed: int = 0,
    token_ids: Any = None,
    grad_input: Any = True,
    grad_weight: Any = True,
    accumulate: bool | tuple[bool, bool] = False,
    threads: int = 0,
    isa: str = "",
    workspace_limit: int = 0,
    out: Mapping[str, Any] | None = None,
) -> LossAndGradient:
    """A training step's loss and both gradients, in one pass where the workspace limit allows.

    total = sum_b token_weights[b] / normalizer * loss[b]. Without token_weights the normalizer is the
    number of tokens that count (the mean), with them it is 1.
    strategy: "automatic", "one_pass" or "recompute". The rest as for `forward` and `gradient`.
    grad_tolerance: 0: exact gradients. Else, between 2^-16 and 0.5: gradients that are right on average,
        each token's with a relative error of about so much (docs/sparse-gradient.md);
        `logitless.sparse_counts()` then says what was kept.
    seed: of that choice, an int in [0, 2^64): a new one for every step, or errors add up.
    token_ids [BT] int64: what the choice goes by; None: the token's place in the batch.
    """
    s, ids = _sparse(grad_tolerance, seed, token_ids)
    i, w, t = _operand("input", input), _operand("weight", weight), _targets("target", target)
    im, wm, tv = matrix("input", i), matrix("weight", w), vector("target", t)
    _same_type(i, w)
    BT = i.shape[0]
    names = ("loss", "logits_max", "sum_exp_logits", "predicted_logits")
    weights = None if token_weights is None else view("token_weights", token_weights, kinds=(F32,))
    c = _counts(counts)
    made = _Outputs(out, (*names, "grad_input", "grad_weight"), input=i, weight=w, target=t,
                    token_weights=weights, counts=c, token_ids=ids)  # fmt: skip
    rows = [made.array(n, (BT,), F32) for n in names]
    gi = _gradient_output(made, "grad_input", grad_input, i.shape, i.dtype, input)
    gw = _gradient_output(made, "grad_weight", grad_weight, w.shape, i.dtype, weight)
    add = _accumulate(accumulate, made)
    losses, top, sums, hit = _vectors(names, rows)
    total = _core.loss_and_gradient(
        im, wm, tv, _optional_integer("ignore_index", ignore_index), _optional_vector("counts", c),
        None if weights is None else vector("token_weights", weights), _number("normalizer", normalizer),
        _multiply(multiply), choice("strategy", strategy, STRATEGY),
        losses, top, sums, hit,
        None if gi is None else matrix("grad_input", gi), add[0],
        None if gw is None else matrix("grad_weight", gw), add[1],
        _options(threads, isa, workspace_limit), *s,
    )  # fmt: skip
    return LossAndGradient(
        total, rows[0].owner, None if gi is None else gi.owner, None if gw is None else gw.owner,
        rows[1].owner, rows[2].owner, rows[3].owner,
    )  # fmt: skip


# ---- cases of the command line ------------------------------------------------------------------

_SAFETENSORS = {F32: "F32", F16: "F16", BF16: "BF16", I32: "I32", I64: "I64", U8: "U8"}
_CASE_NAMES = ("input", "weight", "target", "grad", "grad_logsumexp")


def load_case(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arrays of a safetensors file as the `logitless` program writes and reads them, and its
    scalars (vocab_start_index, vocab_end_index, ignore_index) as ints."""
    path = os.fspath(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > 100_000_000:
            raise ValueError(f"{path}: no safetensors file: a header of {length} bytes in {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: no safetensors file: {error}") from None
        data = file.read()
    case: dict[str, Any] = {}
    for key, value in (header.pop("__metadata__", None) or {}).items():
        if key in ("vocab_start_index", "vocab_end_index", "ignore_index"):
            case[key] = int(value)
    numbers = {spelled: number for number, spelled in _SAFETENSORS.items()}
    for name, entry in header.items():
        number = numbers.get(entry["dtype"])
        if number is None:
            raise TypeError(f"{path}: {name} has dtype {entry['dtype']}, must be one of "
                            f"{', '.join(numbers)}")  # fmt: skip
        begin, end = entry["data_offsets"]
        dtype = numpy_dtype(number)
        count = int(np.prod(entry["shape"], dtype=np.int64))
        if not 0 <= begin <= end <= len(data) or end - begin != count * dtype.itemsize:
            raise ValueError(f"{path}: {name} has bytes {begin} to {end} of {len(data)} for "
                             f"{entry['shape']} of {entry['dtype']}")  # fmt: skip
        case[name] = np.frombuffer(data, dtype, count, begin).reshape(entry["shape"])
    return case


def save_case(path: str | os.PathLike[str], **tensors: Any) -> None:
    """Writes arrays (input, weight, target, grad, … any name) and the scalars vocab_start_index,
    vocab_end_index and ignore_index as a safetensors file that the `logitless` program reads."""
    header: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    blocks: list[bytes] = []
    offset = 0
    for name, value in tensors.items():
        if value is None:
            continue
        if isinstance(value, (int, np.integer)):
            metadata[name] = str(int(value))
            continue
        array = view(name, value, bf16=True)
        if array.dtype not in _SAFETENSORS:
            raise TypeError(f"{name}: dtype is bool, must be one of {', '.join(NAMES)}")
        block = _bytes_of(array)
        header[name] = {
            "dtype": _SAFETENSORS[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(block)],
        }
        offset += len(block)
        blocks.append(block)
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for block in blocks:
            file.write(block)


# ---- helpers ------------------------------------------------------------------------------------


def _bytes_of(array: Array) -> bytes:
    if isinstance(array.owner, np.ndarray):
        return array.owner.tobytes()
    import ctypes

    size = numpy_dtype(array.dtype).itemsize
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, array.strides))
    if 0 in array.shape:
        return b""
    memory = (ctypes.c_uint8 * (span * size)).from_address(array.address)
    flat: Any = np.frombuffer(memoryview(memory).cast("B"), numpy_dtype(array.dtype))
    strided = np.lib.stride_tricks.as_strided(flat, array.shape, [s * size for s in array.strides])
    return strided.tobytes()


class _Outputs:
    """Arrays given by the caller, else fresh ones."""

    def __init__(
        self, out: Mapping[str, Any] | None, names: Sequence[str], **inputs: Array | None
    ) -> None:
        if out is not None and not isinstance(out, Mapping):
            raise TypeError(f"out is a {type(out).__name__}, must be a dict of arrays by name")
        self.given: dict[str, Any] = dict(out or {})
        self.inputs = {n: a for n, a in inputs.items() if a is not None} if out else {}
        self.written: dict[str, Array] = {}
        for name in self.given:
            if name not in names:
                raise ValueError(f"out: {name!r} came, must be one of {', '.join(names)}")

    def array(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: int,
        kinds: tuple[int, ...] | None = None,
        like: Any = None,
    ) -> Array:
        array = self.given.get(name)
        if array is None:
            return view(name, np.empty(shape, numpy_dtype(dtype, like)), bf16=True)
        found = view(f"out[{name!r}]", array, bf16=True, output=True, kinds=kinds or (dtype,))
        for other, read in self.inputs.items():
            if overlap(found, read):
                raise ValueError(f"out[{name!r}]: lies in the memory of {other}, which is read meanwhile")
        for other, written in self.written.items():
            if overlap(found, written):
                raise ValueError(f"out[{name!r}]: lies in the memory of out[{other!r}]")
        self.written[name] = found
        return found._replace(owner=array)


def _gradient_output(
    made: _Outputs, name: str, wanted: Any, shape: tuple[int, ...], operand: int, like: Any
) -> Array | None:
    if name in made.given:
        return made.array(name, shape, operand, kinds=(operand, F32))
    if wanted is False or wanted is None:
        return None
    dtype = operand if wanted is True else as_dtype(name, wanted)
    return made.array(name, shape, dtype, like=like)


def _accumulate(accumulate: bool | tuple[bool, bool], made: _Outputs) -> tuple[bool, bool]:
    pair = accumulate if isinstance(accumulate, tuple) else (accumulate, accumulate)
    if len(pair) != 2:
        raise ValueError(f"accumulate has {len(pair)} elements, must be a bool or a pair of them")
    for name, add in zip(Gradient._fields, pair):
        if add and isinstance(accumulate, tuple) and name not in made.given:
            raise ValueError(f"accumulate: {name} is to be added to, must come in out")
    if accumulate is True and not any(n in made.given for n in Gradient._fields):
        raise ValueError("accumulate: what is to be added to must come in out")
    return tuple(bool(add and n in made.given) for n, add in zip(Gradient._fields, pair))  # type: ignore[return-value]


def _operand(name: str, array: Any) -> Array:
    found = view(name, array, bf16=True)
    if found.dtype not in (F32, F16, BF16):
        came = "bool" if found.dtype == BOOL else NAMES[found.dtype]
        raise TypeError(f"{name}: dtype is {came}, must be f32, f16 or bf16")
    return found


def _same_type(input: Array, weight: Array) -> None:
    if input.dtype != weight.dtype:
        raise TypeError(f"weight: dtype is {NAMES[weight.dtype]}, must be input's "
                        f"{NAMES[input.dtype]}")  # fmt: skip


def _vectors(names: Sequence[str], arrays: Sequence[Array]) -> Any:
    return [vector(n, a) for n, a in zip(names, arrays)]


def _targets(name: str, array: Any) -> Array:
    return view(name, array, kinds=(I32, I64))


def _statistics(of: str, statistics: Any) -> list[Array]:
    if not isinstance(statistics, tuple) or len(statistics) < 3:
        raise TypeError(f"{of or 'statistics'} is a {type(statistics).__name__}, must be Statistics")
    dot = f"{of}." if of else ""
    return [view(dot + n, a, kinds=(F32,)) for n, a in zip(Statistics._fields[:3], statistics)]


def _counts(counts: Any) -> Array | None:
    return None if counts is None else view("counts", counts, kinds=(U8, BOOL))


def _optional_vector(name: str, array: Array | None) -> tuple[int, int, int, int] | None:
    """Addresses alone keep nothing alive: who calls must hold the array, which may be a copy."""
    return None if array is None else vector(name, array)


def _sparse(grad_tolerance: Any, seed: Any, token_ids: Any, start: Any = 0) -> tuple[Any, Array | None]:
    """The core's last argument, and the array that must live as long as the call."""
    eps, number, first = tolerance(grad_tolerance), whole_seed(seed), integer("vocab_start_index", start, 0)
    ids = None if token_ids is None else view("token_ids", token_ids, kinds=(I64,))
    return for_core(eps, number, _optional_vector("token_ids", ids), first), ids


def _optional_integer(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value)


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a number")
    return float(value)


def _multiply(multiply: Any) -> int | None:
    return None if multiply is None else as_dtype("multiply", multiply)


def _options(threads: int, isa: str, workspace_limit: int) -> tuple[int, str, int]:
    if not isinstance(isa, str):
        raise TypeError(f"isa is a {type(isa).__name__}, must be a str")
    return (
        integer("threads", threads, 0, 4096) or wanted_threads(), isa,
        integer("workspace_limit", workspace_limit, 0),
    )  # fmt: skip
