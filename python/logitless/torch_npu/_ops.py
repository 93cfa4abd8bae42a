# SPDX-License-Identifier: Apache-2.0
"""The functions, and the operators torch.ops.npu.* that they are."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import warnings
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .. import _core
from .._torch_ops import matrix, options, packed_mask, vector
from .._types import integer

OPERAND_ROUNDING, INFER_ROUNDING = 1, 2
_LARGEST_H = 65534


# ---- arguments ----------------------------------------------------------------------------------


def _dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        names = [str(d).removeprefix("torch.") for d in allowed]
        came = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: dtype is {came}, must be {' or '.join(names)}")


def _shape(name: str, tensor: Tensor, sizes: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != tuple(sizes):
        raise ValueError(
            f"{name}: shape is {list(tensor.shape)}, must be {meaning} = {list(sizes)}"
        )


def _rank(name: str, tensor: Tensor, rank: int) -> None:
    if tensor.dim() != rank:
        raise ValueError(f"{name}: shape is {list(tensor.shape)}, must have {rank} dimension"
                         + ("s" if rank > 1 else ""))  # fmt: skip


def _operands(input: Tensor, weight: Tensor) -> tuple[int, int, int]:
    _dtype("input", input, torch.float16, torch.bfloat16)
    _dtype("weight", weight, input.dtype)
    _rank("input", input, 2)
    _rank("weight", weight, 2)
    BT, H = input.shape
    if weight.shape[1] != H:
        raise ValueError(
            f"weight: shape is {list(weight.shape)}, must be [V, H] with H = {H}, that of input"
        )
    return BT, weight.shape[0], H


def _no_smoothing(label_smoothing: float) -> None:
    if math.isnan(label_smoothing) or label_smoothing != 0.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, must be 0.0")


_warned = False


def _check_range(start: int, end: int, V: int) -> None:
    global _warned
    if start < 0:
        raise ValueError(f"vocab_start_index is {start}, must be >= 0")
    if end < start:
        raise ValueError(f"vocab_end_index is {end}, must be >= vocab_start_index = {start}")
    if end == start + V - 1 and not _warned:
        _warned = True
        warnings.warn(
            f"vocab_end_index is {end} for a weight of {V} rows from {start}: the end is exclusive, so "
            f"the last row, id {end}, counts as outside this shard. It is obeyed; "
            f"{start + V} covers every row. (Said once.)",
            stacklevel=2,
        )


# ---- kernels ------------------------------------------------------------------------------------


def _online(
    input: Tensor, weight: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    BT, V, H = _check_online(input, weight, target)
    _check_range(vocab_start_index, vocab_end_index, V)
    out = _online_outputs(input, weight, target, return_logits)
    logits_max, sum_exp_logits, predicted, target_mask, masked_target, logits = out
    _core.forward(
        matrix(input), matrix(weight), vector(target), vocab_start_index, vocab_end_index, None,
        None, None, OPERAND_ROUNDING, vector(logits_max), vector(sum_exp_logits),
        vector(predicted), packed_mask(target_mask, BT), vector(masked_target),
        None if logits is None else matrix(logits), options(),
    )  # fmt: skip
    return out


def _check_online(input: Tensor, weight: Tensor, target: Tensor) -> tuple[int, int, int]:
    BT, V, H = _operands(input, weight)
    _dtype("target", target, torch.int32, torch.int64)
    _shape("target", target, (BT,), "[BT]")
    if V == 0:
        raise ValueError("weight: shape is [0, H], must have at least one row")
    if H > _LARGEST_H:
        raise ValueError(f"input: H is {H}, must be <= {_LARGEST_H}")
    return BT, V, H


def _online_outputs(
    input: Tensor, weight: Tensor, target: Tensor, return_logits: bool
) -> tuple[Any, ...]:
    BT, V = input.shape[0], weight.shape[0]
    return (
        *(input.new_empty(BT, dtype=torch.float32) for _ in range(3)),
        input.new_empty((BT + 7) // 8, dtype=torch.uint8),
        target.new_empty(BT),
        input.new_empty((BT, V)) if return_logits else None,
    )


def _online_fake(
    input: Tensor, weight: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    return _online_outputs(input, weight, target, return_logits)


def _loss(
    logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor,
    label_smoothing: float = 0.0, input: Optional[Tensor] = None, weight: Optional[Tensor] = None,
    vocab_parallel_logits: Optional[Tensor] = None,
) -> tuple[Any, ...]:  # fmt: skip
    _rank("logits_max", logits_max, 1)
    BT = logits_max.shape[0]
    for name, tensor in (("logits_max", logits_max), ("sum_exp_logits", sum_exp_logits),
                         ("predicted_logits", predicted_logits)):  # fmt: skip
        _dtype(name, tensor, torch.float32)
        _shape(name, tensor, (BT,), "[BT]")
    if vocab_parallel_logits is not None:
        _dtype("vocab_parallel_logits", vocab_parallel_logits, torch.float32, torch.float16,
               torch.bfloat16)  # fmt: skip
        _rank("vocab_parallel_logits", vocab_parallel_logits, 2)
        if vocab_parallel_logits.shape[0] != BT:
            raise ValueError(
                f"vocab_parallel_logits: shape is {list(vocab_parallel_logits.shape)}, must be "
                f"[BT, V] with BT = {BT}, that of logits_max"
            )
    _no_smoothing(label_smoothing)
    loss, softmax = _loss_outputs(logits_max, vocab_parallel_logits)
    _core.loss(
        vector(logits_max), vector(sum_exp_logits), vector(predicted_logits),
        None if vocab_parallel_logits is None else matrix(vocab_parallel_logits), None,
        vector(loss), None, None if softmax is None else matrix(softmax), options(),
    )  # fmt: skip
    return loss, softmax


def _loss_outputs(logits_max: Tensor, vocab_parallel_logits: Optional[Tensor]) -> tuple[Any, ...]:
    softmax = None
    if vocab_parallel_logits is not None:
        softmax = logits_max.new_empty(tuple(vocab_parallel_logits.shape))
    return logits_max.new_empty(logits_max.shape[0]), softmax


def _loss_fake(
    logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor,
    label_smoothing: float = 0.0, input: Optional[Tensor] = None, weight: Optional[Tensor] = None,
    vocab_parallel_logits: Optional[Tensor] = None,
) -> tuple[Any, ...]:  # fmt: skip
    return _loss_outputs(logits_max, vocab_parallel_logits)


def _gradient(
    grad: Tensor, input: Tensor, weight: Tensor, target_mask: Tensor, masked_target: Tensor,
    label_smoothing: float = 0.0, logits_max: Optional[Tensor] = None,
    sum_exp_logits: Optional[Tensor] = None, softmax: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if softmax is None and (logits_max is None or sum_exp_logits is None):
        raise ValueError(
            "softmax is None, so logits_max and sum_exp_logits must both be given (memory-saving mode)"
        )
    BT, V, _ = _operands(input, weight)
    _dtype("grad", grad, torch.float32)
    _shape("grad", grad, (BT,), "[BT], input's first dimension,")
    _dtype("target_mask", target_mask, torch.uint8, torch.bool)
    _rank("target_mask", target_mask, 1)
    if target_mask.dtype is torch.bool:
        _shape("target_mask", target_mask, (BT,), "[BT]")
    elif target_mask.shape[0] * 8 < BT:
        raise ValueError(
            f"target_mask: {target_mask.shape[0]} bytes hold {target_mask.shape[0] * 8} bits, must be "
            f">= BT = {BT}"
        )
    _dtype("masked_target", masked_target, torch.int32, torch.int64)
    _shape("masked_target", masked_target, (BT,), "[BT]")
    if softmax is not None:
        _dtype("softmax", softmax, torch.float32)
        _shape("softmax", softmax, (BT, V), "[BT, V]")
    else:
        for name, tensor in (("logits_max", logits_max), ("sum_exp_logits", sum_exp_logits)):
            assert tensor is not None
            _dtype(name, tensor, torch.float32)
            _shape(name, tensor, (BT,), "[BT]")
    _no_smoothing(label_smoothing)
    grad_input, grad_weight = _gradient_fake(grad, input, weight, target_mask, masked_target)
    _core.gradient(
        vector(grad), None, matrix(input), matrix(weight), packed_mask(target_mask, BT),
        vector(masked_target), None if softmax is not None else vector(logits_max),  # type: ignore[arg-type]
        None if softmax is not None else vector(sum_exp_logits),  # type: ignore[arg-type]
        None if softmax is None else matrix(softmax), None, None,
        0 if softmax is not None else INFER_ROUNDING, matrix(grad_input), False,
        matrix(grad_weight), False, options(),
    )  # fmt: skip
    return grad_input, grad_weight


def _gradient_fake(
    grad: Tensor, input: Tensor, weight: Tensor, target_mask: Tensor, masked_target: Tensor,
    label_smoothing: float = 0.0, logits_max: Optional[Tensor] = None,
    sum_exp_logits: Optional[Tensor] = None, softmax: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return input.new_empty(tuple(input.shape)), weight.new_empty(tuple(weight.shape))


# ---- operators and functions --------------------------------------------------------------------

_ONLINE = (
    "(Tensor input, Tensor weight, Tensor target, int vocab_start_index, int vocab_end_index, "
    "bool return_logits=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LOSS = (
    "(Tensor logits_max, Tensor sum_exp_logits, Tensor predicted_logits, float label_smoothing=0.0, "
    "Tensor? input=None, Tensor? weight=None, Tensor? vocab_parallel_logits=None) -> "
    "(Tensor, Tensor)"
)
_GRADIENT = (
    "(Tensor grad, Tensor input, Tensor weight, Tensor target_mask, Tensor masked_target, "
    "float label_smoothing=0.0, Tensor? logits_max=None, Tensor? sum_exp_logits=None, "
    "Tensor? softmax=None) -> (Tensor, Tensor)"
)
_FAMILIES: tuple[tuple[tuple[str, ...], str, Callable[..., Any], Callable[..., Any], str], ...] = (
    (("npu_fused_linear_online_max_sum", "fused_linear_online_max_sum"), _ONLINE, _online,
     _online_fake,
     """Statistics of each token over the vocabulary rows of one shard.

    input [BT, H] and weight [V, H] fp16 or bf16; target [BT] int32 or int64, global ids; the shard is
    [vocab_start_index, vocab_end_index), the end exclusive. Returns (logits_max, sum_exp_logits,
    predicted_logits, target_mask, masked_target, vocab_parallel_logits or None).
    predicted_logits is relative to this shard's logits_max; target_mask is packed, least significant
    bit first, 1 = the target is outside this shard."""),
    (("npu_fused_cross_entropy_loss_with_max_sum", "fused_cross_entropy_loss_with_max_sum"), _LOSS,
     _loss, _loss_fake,
     """(loss [BT], softmax [BT, V] or None) from statistics merged over the shards.

    softmax is computed if vocab_parallel_logits are given; input and weight are not looked at."""),
    (("npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
      "fused_linear_cross_entropy_loss_with_max_sum_backward",
      "npu_fused_linear_cross_entropy_loss_with_max_sum_grad",
      "fused_linear_cross_entropy_loss_with_max_sum_grad"), _GRADIENT, _gradient, _gradient_fake,
     """(grad_input, grad_weight) of one shard, for the gradient `grad` [BT] of each token's loss.

    From softmax, or, if it is None, from merged logits_max and sum_exp_logits (logits are then
    multiplied again). grad_input is partial: to be summed over the shards."""),
)  # fmt: skip

# A real torch_npu defines the operators itself, which must not come after us.
if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is not None:
    try:
        import torch_npu as _  # type: ignore[import-not-found]  # noqa: F401
    except Exception as error:  # whatever it lacks on this machine
        warnings.warn(f"torch_npu is installed but cannot be imported: {error}", stacklevel=2)

_library = torch.library.Library("npu", "FRAGMENT")


def _registered(name: str) -> bool:
    try:
        getattr(torch.ops.npu, name)
    except AttributeError:
        return False
    return True


def _check_value(name: str, value: Any, kind: str) -> None:
    """Of an argument that is no tensor; kind: its annotation."""
    came = f"{name} is a {type(value).__name__}, must be "
    if kind == "int":
        if not torch.compiler.is_compiling():
            integer(name, value)
    elif kind == "float":
        if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
            raise TypeError(came + "a number")
    elif kind == "Tensor" or kind == "Optional[Tensor]" and value is not None:
        raise TypeError(came + ("a torch.Tensor" if kind == "Tensor" else "a torch.Tensor or None"))


def _function(name: str, kernel: Callable[..., Any], documentation: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.npu, name).default

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        devices: dict[str, str] = {}
        for argument, value in bound.arguments.items():
            if not isinstance(value, Tensor):
                _check_value(argument, value, signature.parameters[argument].annotation)
                continue
            if value.device.type not in ("cpu", "meta"):
                raise ValueError(f"{argument} is on {value.device}, must be on the CPU")
            devices.setdefault(value.device.type, argument)
        if len(devices) > 1:
            raise ValueError(
                f"{devices['meta']} is on meta, where tensors have no values, must be on the CPU like "
                f"{devices['cpu']}"
            )
        return operator(*bound.args, **bound.kwargs)

    signature = inspect.signature(kernel)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = documentation
    function.__module__ = "logitless.torch_npu"
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


exports: dict[str, Callable[..., Any]] = {}
for _names, _schema, _kernel, _fake, _documentation in _FAMILIES:
    for _name in _names:
        if not _registered(_name):  # a real torch_npu's operators get our CPU kernel beside theirs
            _library.define(_name + _schema)
            torch.library.register_fake(f"npu::{_name}", _fake, lib=_library)
        _library.impl(_name, _kernel, "CPU")
        exports[_name] = _function(_name, _kernel, _documentation)
NAMES = tuple(exports)
