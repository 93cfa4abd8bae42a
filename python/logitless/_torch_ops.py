# SPDX-License-Identifier: Apache-2.0
"""torch.ops.logitless.*: the operators behind `logitless.torch`, with fake kernels and autograd, so
that torch.compile, FakeTensor and autocast treat them as its own."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from . import _core
from ._sparse import for_core
from ._threads import wanted_threads
from ._types import BF16, F16, F32, I32, I64, U8

DTYPES = {
    torch.float32: F32,
    torch.float16: F16,
    torch.bfloat16: BF16,
    torch.int32: I32,
    torch.int64: I64,
    torch.uint8: U8,
    torch.bool: U8,
}
F32_T = torch.float32

RECOMPUTE, ONE_PASS, STORE_SOFTMAX, AUTO = "recompute", "one_pass", "store_softmax", "auto"
_WORTH_KEEPING = 4 << 20  # bytes

MODES = (AUTO, ONE_PASS, RECOMPUTE, STORE_SOFTMAX)
# One pass that nobody asked for by name: a second backward recomputes instead of raising.
AUTO_ONE_PASS = "auto_one_pass"


# ---- tensors as the core's views ----------------------------------------------------------------


def matrix(t: Tensor) -> tuple[int, int, int, int, int, int]:
    rows, cols = t.shape
    row_stride, col_stride = t.stride()
    return (t.data_ptr(), DTYPES[t.dtype], rows, cols, row_stride, col_stride)


def vector(t: Tensor) -> tuple[int, int, int, int]:
    return (t.data_ptr(), DTYPES[t.dtype], t.shape[0], t.stride(0))


def optional_vector(t: Optional[Tensor]) -> Any:
    return None if t is None else vector(t)


def packed_mask(t: Tensor, tokens: int) -> tuple[int, int, bool, int]:
    """A uint8 mask is packed, a bool mask has an element per token."""
    return (t.data_ptr(), tokens, t.dtype is torch.uint8, t.stride(0))


def sparse(grad_tolerance: float, seed: Optional[Tensor]) -> Any:
    """What the core takes of a sparse gradient, if it is one."""
    if grad_tolerance == 0.0:
        return ()
    if seed is None:
        raise ValueError(f"seed is None with grad_tolerance {grad_tolerance:g}, must be given")
    return for_core(grad_tolerance, int(seed))


def options(limit: int = 0) -> tuple[int, str, int]:
    return (wanted_threads(torch.get_num_threads()), "", limit)


def gradient_output(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised. Every training step makes it anew; the pages of a large one would cost more than
    writing it, so they are kept for the next step."""
    if rows * cols * dtype.itemsize < _WORTH_KEEPING:
        return torch.empty((rows, cols), dtype=dtype, device="cpu")
    kept: Tensor = _core.kept_matrix(rows, cols, DTYPES[dtype])
    return kept


# Always on the CPU, whatever torch.set_default_device says: the core writes to them.
def row_output(rows: int) -> Tensor:
    return torch.empty(rows, dtype=F32_T, device="cpu")


def nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def new_output(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


# ---- the mode -----------------------------------------------------------------------------------


def held_dtype(operand: torch.dtype) -> torch.dtype:
    """Of gradients that wait for backward. fp16 would lose what a loss scale comes to save, so
    these wait in fp32 and are rounded once, after scaling."""
    return F32_T if operand is torch.float16 else operand


_fits: dict[tuple[Any, ...], bool] = {}


def fits_one_pass(
    BT: int, V: int, H: int, operand: torch.dtype, bf16: bool, grad_input: bool, grad_weight: bool,
    limit: int, grad_tolerance: float = 0.0,
) -> bool:  # fmt: skip
    key = (BT, V, H, operand, bf16, grad_input, grad_weight, limit, grad_tolerance,
           torch.get_num_threads(), wanted_threads())  # fmt: skip
    known = _fits.get(key)
    if known is None:
        held = DTYPES[held_dtype(operand)]
        known = _core.takes_one_pass(
            BT, V, H, DTYPES[operand], BF16 if bf16 else None, I64, held if grad_input else None,
            held if grad_weight else None, options(limit), grad_tolerance,
        )  # fmt: skip
        if len(_fits) >= 1024:
            _fits.clear()
        _fits[key] = known
    return known


def check_gradient_fits(
    BT: int, V: int, H: int, operand: torch.dtype, bf16: bool, grad_input: bool, grad_weight: bool,
    limit: int, grad_tolerance: float,
) -> None:  # fmt: skip
    """An error that names the least possible limit if the backward of "recompute" does not fit."""
    dtype = DTYPES[operand]
    _core.plan_text(
        "gradient", BT, V, H, dtype, BF16 if bf16 else None, 0, grad_input, grad_weight, dtype,
        options(limit), grad_tolerance,
    )  # fmt: skip


def settled_mode(
    mode: str, V: int, H: int, operand: torch.dtype, bf16: bool, grad_input: bool,
    grad_weight: bool, limit: int, grad_tolerance: float = 0.0,
) -> str:  # fmt: skip
    """What "auto" means where the number of tokens is not known (while tracing): one pass if it
    fits for very many of them within what the limit is for very few."""
    if mode == AUTO_ONE_PASS:
        return ONE_PASS
    if mode != AUTO:
        return mode
    grad_tolerance = float(grad_tolerance)  # symbolic where torch.compile is dynamic
    if limit == 0:
        held = 2 if held_dtype(operand) is torch.bfloat16 else 4
        limit = max(256 << 20, int(1.25 * V * H * (operand.itemsize + held * grad_weight)))
    fits = fits_one_pass(
        1 << 16, V, H, operand, bf16, grad_input, grad_weight, limit, grad_tolerance
    )
    return ONE_PASS if fits else RECOMPUTE


# ---- forward ------------------------------------------------------------------------------------

_lib = torch.library.Library("logitless", "DEF")

_lib.define(
    "linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? token_weights, "
    "Tensor? normalizer, str reduction, int ignore_index, str mode, bool bf16, bool grad_input, "
    "bool grad_weight, int workspace_limit, float grad_tolerance, Tensor? seed) -> (Tensor total, Tensor loss, Tensor logsumexp, "
    "Tensor logits_max, Tensor sum_exp_logits, Tensor held_input, Tensor held_weight, "
    "Tensor softmax)"
)
_lib.define(
    "linear_cross_entropy_backward(Tensor? grad_total, Tensor? grad_loss, Tensor? grad_logsumexp, "
    "Tensor input, Tensor weight, Tensor target, Tensor? token_weights, Tensor? normalizer, "
    "str reduction, int ignore_index, bool bf16, Tensor logits_max, Tensor sum_exp_logits, "
    "Tensor? softmax, bool grad_input, bool grad_weight, int workspace_limit, float grad_tolerance, "
    "Tensor? seed) -> (Tensor, Tensor)"
)


def _forward(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weights: Optional[Tensor],
    normalizer: Optional[Tensor],
    reduction: str,
    ignore_index: int,
    mode: str,
    bf16: bool,
    grad_input: bool,
    grad_weight: bool,
    workspace_limit: int,
    grad_tolerance: float,
    seed: Optional[Tensor],
) -> tuple[Tensor, ...]:
    BT, H = input.shape
    V = weight.shape[0]
    mode = settled_mode(
        mode, V, H, input.dtype, bf16, grad_input, grad_weight, workspace_limit, grad_tolerance
    )
    multiply = BF16 if bf16 else None
    loss, logsumexp, logits_max, sum_exp_logits = (row_output(BT) for _ in range(4))
    rows_v = [vector(r) for r in (loss, logsumexp, logits_max, sum_exp_logits)]
    predicted = row_output(BT)
    in_m, weight_m, target_v = matrix(input), matrix(weight), vector(target)
    weights_v = optional_vector(token_weights)
    opts = options(workspace_limit)
    count = _core.count_rows(target_v, V, ignore_index)
    divisor = _divisor(reduction, normalizer, count)
    held_input = held_weight = softmax = None
    held = held_dtype(input.dtype) if mode == ONE_PASS else input.dtype
    if mode == ONE_PASS:
        if grad_input:
            held_input = gradient_output(BT, H, held)
        if grad_weight:
            held_weight = gradient_output(V, H, held)
        total = _core.loss_and_gradient(
            in_m, weight_m, target_v, ignore_index, None, weights_v, divisor, multiply, 1,
            rows_v[0], rows_v[2], rows_v[3], vector(predicted),
            None if held_input is None else matrix(held_input), False,
            None if held_weight is None else matrix(held_weight), False, opts,
            *sparse(grad_tolerance, seed),
        )  # fmt: skip
        _core.row_logsumexp(target_v, ignore_index, rows_v[2], rows_v[3], rows_v[1])
    else:
        counts = None
        if count < BT:
            marks = torch.empty(BT, dtype=torch.uint8, device="cpu")
            counts = vector(marks)
            _core.mark_rows(target_v, ignore_index, counts)
        if mode == STORE_SOFTMAX:
            softmax = torch.empty((BT, V), dtype=F32_T, device="cpu")
        softmax_m = None if softmax is None else matrix(softmax)
        _core.forward(
            in_m, weight_m, target_v, 0, V, ignore_index, None, multiply, 0, rows_v[2], rows_v[3],
            vector(predicted), None, None, softmax_m, opts,
        )  # fmt: skip
        # Logits become softmax in place, block by block.
        _core.loss(
            rows_v[2], rows_v[3], vector(predicted), softmax_m, counts, rows_v[0], rows_v[1],
            softmax_m, (opts[0], "", 0),
        )  # fmt: skip
        total = 0.0
        if reduction != "none":
            total = _core.weighted_total(rows_v[0], target_v, ignore_index, weights_v, divisor)
    return (
        torch.tensor(total, dtype=F32_T, device="cpu"),
        loss, logsumexp, logits_max, sum_exp_logits,
        nothing(held) if held_input is None else held_input,
        nothing(held) if held_weight is None else held_weight,
        nothing(F32_T) if softmax is None else softmax,
    )  # fmt: skip


def _divisor(reduction: str, normalizer: Optional[Tensor], count: int) -> float:
    if normalizer is not None:
        divisor = float(normalizer)
        if divisor == 0 or math.isnan(divisor):
            raise ValueError(f"normalizer is {divisor:g}, must not be 0 or NaN")
        return divisor
    return float(max(count, 1)) if reduction == "mean" else 1.0


def _forward_fake(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weights: Optional[Tensor],
    normalizer: Optional[Tensor],
    reduction: str,
    ignore_index: int,
    mode: str,
    bf16: bool,
    grad_input: bool,
    grad_weight: bool,
    workspace_limit: int,
    grad_tolerance: float,
    seed: Optional[Tensor],
) -> tuple[Tensor, ...]:
    BT, H = input.shape
    V = weight.shape[0]
    if mode in (AUTO, AUTO_ONE_PASS):
        mode = settled_mode(
            mode, int(V), int(H), input.dtype, bf16, grad_input, grad_weight, workspace_limit,
            grad_tolerance,
        )
    held = held_dtype(input.dtype) if mode == ONE_PASS else input.dtype
    return (
        new_output(input, (), F32_T),
        *(new_output(input, (BT,), F32_T) for _ in range(4)),
        new_output(input, (BT, H) if mode == ONE_PASS and grad_input else (0,), held),
        new_output(input, (V, H) if mode == ONE_PASS and grad_weight else (0,), held),
        new_output(input, (BT, V) if mode == STORE_SOFTMAX else (0,), F32_T),
    )


# ---- backward -----------------------------------------------------------------------------------


def _backward(
    grad_total: Optional[Tensor],
    grad_loss: Optional[Tensor],
    grad_logsumexp: Optional[Tensor],
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weights: Optional[Tensor],
    normalizer: Optional[Tensor],
    reduction: str,
    ignore_index: int,
    bf16: bool,
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    softmax: Optional[Tensor],
    grad_input: bool,
    grad_weight: bool,
    workspace_limit: int,
    grad_tolerance: float,
    seed: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    BT, H = input.shape
    V = weight.shape[0]
    out_input = gradient_output(BT, H, input.dtype) if grad_input else None
    out_weight = gradient_output(V, H, input.dtype) if grad_weight else None
    run_backward(
        grad_total, grad_loss, grad_logsumexp, input, weight, target, token_weights, normalizer,
        reduction, ignore_index, bf16, logits_max, sum_exp_logits, softmax, workspace_limit,
        out_input, out_weight, grad_tolerance=grad_tolerance, seed=seed,
    )  # fmt: skip
    return (
        nothing(input.dtype) if out_input is None else out_input,
        nothing(input.dtype) if out_weight is None else out_weight,
    )


def run_backward(
    grad_total: Optional[Tensor],
    grad_loss: Optional[Tensor],
    grad_logsumexp: Optional[Tensor],
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weights: Optional[Tensor],
    normalizer: Optional[Tensor],
    reduction: str,
    ignore_index: int,
    bf16: bool,
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    softmax: Optional[Tensor],
    workspace_limit: int,
    out_input: Optional[Tensor],
    out_weight: Optional[Tensor],
    accumulate: tuple[bool, bool] = (False, False),
    grad_tolerance: float = 0.0,
    seed: Optional[Tensor] = None,
) -> None:
    """Gradients of grad_total * total + sum_b grad_loss[b] * loss[b] + grad_logsumexp[b] *
    logsumexp[b] into the tensors given."""
    if out_input is None and out_weight is None:
        return
    V = weight.shape[0]
    target_v = vector(target)
    grad = row_output(input.shape[0])
    count = 0
    if normalizer is None and reduction == "mean":
        count = _core.count_rows(target_v, V, ignore_index)
    _core.token_gradients(
        target_v, ignore_index, 0.0 if grad_total is None else float(grad_total),
        optional_vector(token_weights), _divisor(reduction, normalizer, count),
        optional_vector(grad_loss), vector(grad),
    )  # fmt: skip
    lse = None
    if grad_logsumexp is not None:
        # Ignored rows have a constant logsumexp.
        lse = torch.where(target == ignore_index, 0.0, grad_logsumexp).contiguous()
    _core.gradient(
        vector(grad), optional_vector(lse), matrix(input), matrix(weight), None, target_v,
        None if softmax is not None else vector(logits_max),
        None if softmax is not None else vector(sum_exp_logits),
        None if softmax is None else matrix(softmax), None, BF16 if bf16 else None, 0,
        None if out_input is None else matrix(out_input), accumulate[0],
        None if out_weight is None else matrix(out_weight), accumulate[1],
        options(workspace_limit), *sparse(grad_tolerance, seed),
    )  # fmt: skip


def _backward_fake(
    grad_total: Optional[Tensor],
    grad_loss: Optional[Tensor],
    grad_logsumexp: Optional[Tensor],
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weights: Optional[Tensor],
    normalizer: Optional[Tensor],
    reduction: str,
    ignore_index: int,
    bf16: bool,
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    softmax: Optional[Tensor],
    grad_input: bool,
    grad_weight: bool,
    workspace_limit: int,
    grad_tolerance: float,
    seed: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    return (
        new_output(input, tuple(input.shape) if grad_input else (0,), input.dtype),
        new_output(weight, tuple(weight.shape) if grad_weight else (0,), input.dtype),
    )


# ---- autograd -----------------------------------------------------------------------------------

_TWICE = (
    "linear_cross_entropy: its gradients cannot be differentiated again (create_graph=True, "
    "torch.autograd.grad of a gradient, hessians): double backward is not implemented. Use "
    "torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, linear_weight), target) there"
)


class _Once(torch.autograd.Function):
    """Passes gradients on and refuses to be differentiated with respect to what they depend on."""

    @staticmethod
    def forward(depends_on: int, *tensors: Any) -> tuple[Tensor, ...]:
        return tuple(g.view_as(g) for g in tensors[depends_on:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_TWICE)


def refuse_double_backward(depends_on: tuple[Any, ...], gradients: tuple[Any, Any]) -> Any:
    """Marks gradients that were made while a graph of them is recorded."""
    kept = [g for g in gradients if g is not None]
    if not kept or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients
    sources = [t for t in depends_on if t is not None]
    marked = iter(_Once.apply(len(sources), *sources, *kept))
    return tuple(None if g is None else next(marked) for g in gradients)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (input, weight, target, token_weights, normalizer, reduction, ignore_index, mode, bf16,
     grad_input, grad_weight, limit, grad_tolerance, seed) = inputs  # fmt: skip
    total, loss, logsumexp, logits_max, sum_exp_logits, held_input, held_weight, softmax = output
    ctx.by_name = mode == ONE_PASS
    mode = settled_mode(
        mode, int(weight.shape[0]), int(weight.shape[1]), input.dtype, bf16, grad_input,
        grad_weight, limit, grad_tolerance,
    )  # fmt: skip
    ctx.set_materialize_grads(False)
    constants = [logits_max, sum_exp_logits, held_input, held_weight, softmax]
    if mode == ONE_PASS:
        constants.append(loss)
    if reduction == "none":
        constants.append(total)
    ctx.mark_non_differentiable(*constants)
    ctx.save_for_backward(
        input, weight, target, token_weights, normalizer, seed, logits_max, sum_exp_logits,
        *((held_input, held_weight) if mode == ONE_PASS else ()),
        *((softmax,) if mode == STORE_SOFTMAX else ()),
    )  # fmt: skip
    ctx.settings = (reduction, ignore_index, mode, bf16, limit, grad_tolerance)
    ctx.spent = False


def scale_held(held: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """held * grad, in place where the tensors are real and the type stays."""
    if type(held) is not Tensor or type(grad) is not Tensor or torch.compiler.is_compiling():
        return (held * grad).to(dtype)
    # Without its version: what is done to the gradient must not spoil what is saved for a second backward.
    held = held.data
    if held.dtype is not dtype:
        return gradient_output(held.shape[0], held.shape[1], dtype).copy_(held.mul_(grad))
    return held if grad.item() == 1.0 else held.mul_(grad)


def _autograd(ctx: Any, grad_total: Any, grad_loss: Any, grad_logsumexp: Any, *_: Any) -> Any:
    reduction, ignore_index, mode, bf16, limit, grad_tolerance = ctx.settings
    want_input, want_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    others = (None,) * 12
    upstream = (grad_total, grad_loss, grad_logsumexp)
    if all(g is None for g in upstream):
        return (None, None, *others)
    if ctx.spent and ctx.by_name:
        raise RuntimeError(
            "linear_cross_entropy: Trying to backward through the graph a second time, but "
            'mode="one_pass" made the gradients in the forward and has handed them over. Specify '
            'mode="recompute" if you need to backward through the graph a second time'
        )
    (input, weight, target, token_weights, normalizer, seed, logits_max, sum_exp_logits,
     *kept) = ctx.saved_tensors  # fmt: skip
    gradients: tuple[Any, Any] = (None, None)
    held = mode == ONE_PASS and not ctx.spent
    if held and grad_total is not None:
        held_input, held_weight = kept
        with torch.no_grad():
            gradients = (
                scale_held(held_input, grad_total, input.dtype) if want_input else None,
                scale_held(held_weight, grad_total, input.dtype) if want_weight else None,
            )
        ctx.spent = type(held_input) is Tensor and not torch.compiler.is_compiling()
    if not held or grad_logsumexp is not None:
        with torch.no_grad():
            more = torch.ops.logitless.linear_cross_entropy_backward.default(
                None if held else grad_total, grad_loss, grad_logsumexp, input, weight,
                target, token_weights, normalizer, reduction, ignore_index, bf16, logits_max,
                sum_exp_logits, kept[0] if mode == STORE_SOFTMAX else None, want_input,
                want_weight, limit, grad_tolerance, seed,
            )  # fmt: skip
            wanted = (want_input, want_weight)
            gradients = tuple(
                None if not w else (m if g is None else g + m)
                for w, g, m in zip(wanted, gradients, more)
            )  # type: ignore[assignment]
    return (*refuse_double_backward((*upstream, input, weight), gradients), *others)


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_plain(input: Tensor, weight: Tensor, target: Tensor) -> bool:
    """Nobody is to see the operator: the dispatcher would only cost time, 10 us."""
    return (
        type(input) in _PLAIN and type(weight) in _PLAIN and type(target) in _PLAIN and input.is_cpu
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
    )  # fmt: skip


def _run_forward(*arguments: Any) -> Any:
    if _is_plain(*arguments[:3]):
        return _forward(*arguments)
    return torch.ops.logitless.linear_cross_entropy.default(*arguments)


class LinearCrossEntropy(torch.autograd.Function):
    """The operator with the same gradient, quicker than through the dispatcher's autograd."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = _run_forward(*arguments)
        _setup_context(ctx, arguments, output)
        return output

    backward = staticmethod(_autograd)


class Transformed(torch.autograd.Function):
    """The same in the style that torch.func.grad and vjp want."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.logitless.linear_cross_entropy.default(*arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_autograd)


def apply(grad: bool, *arguments: Any) -> Any:
    """The operator; grad: gradients are wanted."""
    if torch.compiler.is_compiling():
        return torch.ops.logitless.linear_cross_entropy.default(*arguments)
    if torch._C._are_functorch_transforms_active():
        if grad:
            return Transformed.apply(*arguments)
        return torch.ops.logitless.linear_cross_entropy.default(*arguments)
    if not grad:
        return _run_forward(*arguments)
    return LinearCrossEntropy.apply(*arguments)


_lib.impl("linear_cross_entropy", _forward, "CPU")
_lib.impl("linear_cross_entropy_backward", _backward, "CPU")
torch.library.register_fake("logitless::linear_cross_entropy", _forward_fake, lib=_lib)
torch.library.register_fake("logitless::linear_cross_entropy_backward", _backward_fake, lib=_lib)
torch.library.register_autograd(
    "logitless::linear_cross_entropy", _autograd, setup_context=_setup_context, lib=_lib
)


def _backward_autograd(*arguments: Any) -> Any:
    # By hand, since torch 2.4's register_autograd does not work under torch.func.
    with torch._C._AutoDispatchBelowAutograd():
        gradients = torch.ops.logitless.linear_cross_entropy_backward.default(*arguments)
    tensors = tuple(a for a in arguments if isinstance(a, Tensor))
    if any(t.requires_grad for t in tensors):
        return refuse_double_backward(tensors, gradients)
    return gradients


_lib.impl("linear_cross_entropy_backward", _backward_autograd, "Autograd")
