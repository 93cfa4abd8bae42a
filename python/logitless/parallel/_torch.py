# SPDX-License-Identifier: Apache-2.0
"""The loss of a head whose vocabulary is split over ranks, for torch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union, cast

import torch
from torch import Tensor

from .. import _core
from .._torch_ops import (
    AUTO,
    F32_T,
    ONE_PASS,
    RECOMPUTE,
    STORE_SOFTMAX,
    _divisor,
    gradient_output,
    held_dtype,
    matrix,
    optional_vector,
    options,
    refuse_double_backward,
    row_output,
    scale_held,
    vector,
)
from .._sparse import for_core, tolerance
from .._types import BF16, STRATEGY, integer
from ..torch import _check_kinds, _check_main_grad, _normalizer, _operands, _seed, _token_weights
from ._arrays import MOST_ROWS
from ._transport import Transport, all_told, open_transport

_NAME = "linear_weight_shard"
_STRATEGIES = {
    AUTO: STRATEGY["automatic"],
    ONE_PASS: STRATEGY["one_pass"],
    RECOMPUTE: STRATEGY["recompute"],
}


_Function = TypeVar("_Function", bound=Callable[..., Any])
_breaks_the_graph = cast(Callable[[_Function], _Function], torch.compiler.disable)


# Collectives on memory that the compiler does not see.
@_breaks_the_graph
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight_shard: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    vocab_start: Optional[int] = None,
    sequence_parallel: bool = False,
    reduction: str = "mean",
    ignore_index: Optional[int] = None,
    token_weights: Optional[Tensor] = None,
    normalizer: Union[float, Tensor, None] = None,
    mode: str = "auto",
    workspace_limit: Optional[int] = None,
    chunk_tokens: Optional[int] = None,
    main_grad: bool = False,
    grad_tolerance: float = 0.0,
    seed: Union[int, Tensor, None] = None,
) -> Tensor:
    """`logitless.linear_cross_entropy` of a weight whose rows are split over ranks. Collective, and
    so is its backward (in one pass the first one is not): every rank makes the same calls in the same order.

    Every rank gets the same bits of the loss; the gradient of its own rows of the weight; and the
    gradient of input summed over the ranks, where Megatron's layers expect it: nothing is left to reduce.

    Args:
        input: [..., H], the same on every rank; with sequence_parallel this rank's slice of it.
        linear_weight_shard: [rows of this rank, H]. Shards may be uneven or empty, and cover the
            vocabulary without gap or overlap. Or a DTensor sharded on dimension 0 of a mesh of one
            dimension, which says group and vocab_start too.
        target: [...] int64 or int32, ids of the whole vocabulary, the same on every rank, of all tokens.
        group: a process group or a DeviceMesh of one dimension of torch.distributed, on gloo or another
            backend that takes CPU tensors; None: the default group. Also an mpi4py communicator or a
            `logitless.parallel.Transport`.
        vocab_start: the global id of the shard's first row; None (on every rank): shards lie in rank
            order.
        sequence_parallel: input is this rank's slice of the tokens along its first dimension and is
            all-gathered, in the forward and again in the backward; its gradient is reduce-scattered
            instead of all-reduced. Flattened, the slice is balanced_shard(tokens, ranks, rank).
        reduction, ignore_index, token_weights, normalizer: as of `linear_cross_entropy`, the same on
            every rank. "mean" counts the tokens of this group.
        mode: "one_pass" makes loss and gradients in the forward; "recompute" keeps three numbers per
            token and multiplies the logits again in the backward; "auto" takes one pass when gradients
            are wanted, the reduction is mean or sum and one pass fits the limit of every rank, else
            recompute. "store_softmax" is not there yet.
        workspace_limit: bytes of scratch memory that one call may use, on this rank; None: the default.
        chunk_tokens: tokens whose sum over the ranks runs while the next ones are computed, even;
            None: automatic.
        main_grad: add the weight's gradient to ``linear_weight_shard.main_grad`` (float32).
        grad_tolerance, seed: as of `linear_cross_entropy`, the same on every rank, which keeps its part of
            what a whole vocabulary would keep. seed None: drawn from torch's default generator, which the
            ranks must have seeded alike. Their data-parallel neighbours had better be seeded otherwise.

    An error on one rank, or something in which ranks differ, is the same exception on every rank. Where
    the transport fails it is a RuntimeError. torch.compile: a graph break, so not with fullgraph=True.
    """
    weight, group, vocab_start = _local(linear_weight_shard, group, vocab_start)
    transport = open_transport(group)
    with all_told(transport):
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is {reduction!r}, must be 'mean', 'sum' or 'none'")
        _check_mode(mode, reduction, main_grad)
        grad_tolerance = tolerance(grad_tolerance)
        ignored = -100 if ignore_index is None else integer("ignore_index", ignore_index)
        limit = 0 if workspace_limit is None else integer("workspace_limit", workspace_limit, 0)
        chunk = 0 if chunk_tokens is None else integer("chunk_tokens", chunk_tokens)
        if vocab_start is not None:
            vocab_start = integer("vocab_start", vocab_start, 0, MOST_ROWS)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "vocab_parallel_linear_cross_entropy is not supported inside torch.func transforms"
            )
        _check_tensors(input, weight, target, transport, sequence_parallel)
        input, weight, bf16 = _operands(input, weight, _NAME)
        flat_input = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
        flat_target = target.reshape(-1)
        weights = None
        if token_weights is not None:
            weights = _token_weights(token_weights, target).reshape(-1)
        number = None if normalizer is None else _normalizer(normalizer)
        count = 0
        if number is None and reduction == "mean":
            count = int((flat_target != ignored).sum())
        recording = torch.is_grad_enabled()
        wanted = (recording and flat_input.requires_grad, recording and weight.requires_grad)
        if main_grad and wanted[1]:
            _check_main_grad(linear_weight_shard, _NAME)
        if not any(wanted) or reduction == "none" or main_grad:
            mode = RECOMPUTE
        chosen = _seed(seed, draw=grad_tolerance != 0.0 and any(wanted))
        sparse = () if chosen is None else for_core(grad_tolerance, int(chosen))
        call = _Call(
            transport, vocab_start, bool(sequence_parallel), reduction, ignored,
            _divisor(reduction, number, count), bf16, wanted, mode, limit, chunk,
            linear_weight_shard if main_grad and wanted[1] else None, sparse,
        )  # fmt: skip
    arguments = (flat_input, weight, flat_target, None if reduction == "none" else weights, call)
    if any(wanted):
        out: Tensor = _VocabParallel.apply(*arguments)
    else:
        out = _forward(*arguments).out
    if reduction != "none":
        return out
    # Ignored tokens have loss 0, whatever they weigh.
    if weights is not None:
        out = out * weights.masked_fill(flat_target == ignored, 0.0)
    if number is not None:
        out = out / number.to(out.dtype)
    return out.reshape(target.shape)


# ---- arguments ----------------------------------------------------------------------------------


def _local(weight: Any, group: Any, vocab_start: Optional[int]) -> tuple[Any, Any, Optional[int]]:
    """The shard on this rank, and what a DTensor says of the others."""
    if type(weight) is Tensor or type(weight).__name__ != "DTensor":
        return weight, group, vocab_start
    placements, mesh = weight.placements, weight.device_mesh
    # A _StridedShard says something else of which rows it has.
    shards = mesh.ndim == 1 and type(placements[0]).__name__ == "Shard" and placements[0].dim == 0
    if not shards:
        raise ValueError(
            f"{_NAME} is a DTensor placed as {tuple(placements)} on a mesh of {mesh.ndim} "
            "dimension(s), must be (Shard(dim=0),) on a mesh of one dimension"
        )
    if vocab_start is not None:
        raise ValueError(
            f"vocab_start is {vocab_start} beside a DTensor, which says it itself: must be None"
        )
    from ._torch_distributed import process_group

    own = mesh.get_group()
    if group is not None and not _same_ranks(process_group(group), own):
        raise ValueError(
            f"group is not that of {_NAME}'s mesh {mesh}: must be the same ranks in the same order, or None"
        )
    # In a mesh's order a rank's rows follow those of the rank before.
    return weight.to_local(), own, None


def _same_ranks(a: Any, b: Any) -> bool:
    import torch.distributed as dist

    return dist.get_process_group_ranks(a) == dist.get_process_group_ranks(b)


def _check_mode(mode: str, reduction: str, main_grad: bool) -> None:
    if mode not in _STRATEGIES and mode != STORE_SOFTMAX:
        raise ValueError(f"mode is {mode!r}, must be one of {', '.join(map(repr, _STRATEGIES))}")
    if mode == STORE_SOFTMAX:
        raise NotImplementedError(
            f"mode {mode!r} is not there yet for a vocabulary split over ranks: must be one of "
            f"{', '.join(map(repr, _STRATEGIES))}"
        )
    if mode == ONE_PASS and (reduction == "none" or main_grad):
        beside = "main_grad" if main_grad else 'reduction "none"'
        raise ValueError(
            f'mode is "one_pass" with {beside}, must be "recompute" or "auto": what each token\'s loss '
            "is multiplied by is not known in the forward"
        )


def _check_tensors(
    input: Tensor, weight: Tensor, target: Tensor, transport: Transport, sequence_parallel: bool
) -> None:
    for name, tensor in (("input", input), ("target", target)):
        if type(tensor).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor, must be a plain tensor: pass {name}.to_local() (of what every "
                "rank has whole, or of its slice of the tokens for sequence_parallel)"
            )
    _check_kinds(input, weight, target, _NAME)
    if input.device.type != "cpu":
        raise ValueError(f"input is on {input.device}, must be on the CPU: ranks exchange its values")
    if not sequence_parallel:
        if target.shape != input.shape[:-1]:
            raise ValueError(
                f"target: shape is {list(target.shape)}, must be input's without its last dimension: "
                f"{list(input.shape[:-1])}"
            )
        return
    if input.dim() < 2 or target.dim() < 1 or target.shape[1:] != input.shape[1:-1]:
        raise ValueError(
            f"target: shape is {list(target.shape)}, must be [tokens of all ranks, ...] where input's "
            f"is [tokens of this rank, ..., H]: {list(input.shape)}"
        )
    begin, end = _core.balanced_shard(target.numel(), transport.size, transport.rank)
    rows = math.prod(input.shape[:-1])
    if rows != end - begin:
        raise ValueError(
            f"input: shape is {list(input.shape)}, {rows} tokens, must be this rank's slice of the "
            f"{target.numel()} tokens of target: [{begin}, {end})"
        )


# ---- autograd -----------------------------------------------------------------------------------


class _Call(NamedTuple):
    transport: Transport
    vocab_start: Optional[int]
    sequence_parallel: bool
    reduction: str
    ignore_index: int
    divisor: float
    bf16: bool
    wanted: tuple[bool, bool]  # gradients: of input, of the weight
    mode: str
    limit: int
    chunk_tokens: int
    parameter: Any  # whose main_grad gets the weight's gradient
    sparse: Any  # the core's last argument, or none


class _Forward(NamedTuple):
    out: Tensor
    logits_max: Tensor
    sum_exp_logits: Tensor
    vocab_start: int  # where this rank's rows begin
    held: Optional[tuple[Optional[Tensor], Optional[Tensor]]]  # the gradients, if made in one pass


def _optional_matrix(t: Optional[Tensor]) -> Any:
    return None if t is None else matrix(t)


def _gradients(
    input: Tensor, weight: Tensor, wanted: tuple[bool, bool], dtype: torch.dtype
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    grad_input, grad_weight = (
        gradient_output(t.shape[0], t.shape[1], dtype) if want else None
        for t, want in zip((input, weight), wanted)
    )
    return grad_input, grad_weight


def _forward(
    input: Tensor, weight: Tensor, target: Tensor, token_weights: Optional[Tensor], call: _Call
) -> _Forward:
    with all_told(call.transport):
        loss, logits_max, sum_exp_logits = (
            row_output(target.shape[0]) for _ in range(3)
        )
        held: tuple[Optional[Tensor], Optional[Tensor]] = (None, None)
        if call.mode != RECOMPUTE:
            held = _gradients(input, weight, call.wanted, held_dtype(input.dtype))
        run = partial(
            _core.vocab_parallel, call.transport, matrix(input), matrix(weight), vector(target),
            call.vocab_start, call.sequence_parallel, call.ignore_index, None,
            optional_vector(token_weights), call.divisor, BF16 if call.bf16 else None, call.wanted,
            None, vector(loss), vector(logits_max), vector(sum_exp_logits), None,
            _optional_matrix(held[0]), False, _optional_matrix(held[1]), False, call.chunk_tokens,
            _STRATEGIES[call.mode], call.mode == AUTO, options(call.limit), *call.sparse,
        )  # fmt: skip
    total, start, with_gradients = run()
    out = loss if call.reduction == "none" else torch.tensor(total, dtype=F32_T, device="cpu")
    return _Forward(
        out, logits_max, sum_exp_logits, start,
        held if call.mode != RECOMPUTE and with_gradients else None,
    )  # fmt: skip


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, target: Tensor, token_weights: Optional[Tensor],
        call: _Call,
    ) -> Tensor:  # fmt: skip
        forward = _forward(input, weight, target, token_weights, call)
        ctx.save_for_backward(
            input, weight, target, token_weights, forward.logits_max, forward.sum_exp_logits,
            *(forward.held or ()),
        )  # fmt: skip
        ctx.call = call._replace(vocab_start=forward.vocab_start)
        ctx.spent = False
        return forward.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        input, weight, target, token_weights, *statistics = ctx.saved_tensors
        logits_max, sum_exp_logits, *held = statistics
        call: _Call = ctx.call
        gradients: tuple[Optional[Tensor], Optional[Tensor]]
        if held and not ctx.spent:
            with torch.no_grad():
                gradients = tuple(
                    None if h is None else scale_held(h, grad, input.dtype) for h in held
                )  # type: ignore[assignment]
            ctx.spent = True
        elif ctx.spent and call.mode == ONE_PASS:
            raise RuntimeError(
                "vocab_parallel_linear_cross_entropy: Trying to backward through the graph a second "
                'time, but mode="one_pass" made the gradients in the forward and has handed them over. '
                'Specify mode="recompute" if you need to backward through the graph a second time'
            )
        else:
            gradients = _backward(
                grad, input, weight, target, token_weights, logits_max, sum_exp_logits, call
            )
        return (*refuse_double_backward((grad, input, weight), gradients), None, None, None)


def _backward(
    grad: Tensor, input: Tensor, weight: Tensor, target: Tensor, token_weights: Optional[Tensor],
    logits_max: Tensor, sum_exp_logits: Tensor, call: _Call,
) -> tuple[Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    main = None if call.parameter is None else call.parameter.main_grad
    with all_told(call.transport), torch.no_grad():
        each = grad.to(F32_T).contiguous() if call.reduction == "none" else None
        factors = row_output(target.shape[0])
        _core.token_gradients(
            vector(target), call.ignore_index, 0.0 if each is not None else float(grad),
            optional_vector(token_weights), call.divisor, optional_vector(each), vector(factors),
        )  # fmt: skip
        grad_input, grad_weight = _gradients(
            input, weight, (call.wanted[0], call.wanted[1] and main is None), input.dtype
        )
        run = partial(
            _core.vocab_parallel, call.transport, matrix(input), matrix(weight), vector(target),
            call.vocab_start, call.sequence_parallel, call.ignore_index, None, vector(factors), 1.0,
            BF16 if call.bf16 else None, call.wanted, (vector(logits_max), vector(sum_exp_logits)),
            None, None, None, None, _optional_matrix(grad_input), False,
            _optional_matrix(grad_weight if main is None else main), main is not None,
            call.chunk_tokens, _STRATEGIES[AUTO if call.sparse else RECOMPUTE], False,
            options(call.limit), *call.sparse,
        )  # fmt: skip
    run()
    if main is not None:
        call.parameter.grad_added_to_main_grad = True
    return grad_input, grad_weight
