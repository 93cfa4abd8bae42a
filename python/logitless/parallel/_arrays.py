# SPDX-License-Identifier: Apache-2.0
"""A training step of a head whose vocabulary is split over ranks, on arrays, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .. import _core
from .._arrays import matrix, vector, view
from .._types import F32, STRATEGY, choice, integer
from ..numpy import (
    LossAndGradient,
    _accumulate,
    _counts,
    _gradient_output,
    _multiply,
    _number,
    _operand,
    _optional_integer,
    _optional_vector,
    _options,
    _Outputs,
    _same_type,
    _sparse,
    _targets,
)
from ._transport import all_told, open_transport

_ROWS = ("loss", "logits_max", "sum_exp_logits", "predicted_logits")
MOST_ROWS = 2**48


def vocab_parallel_loss_and_gradient(
    input: Any,
    weight_shard: Any,
    target: Any,
    *,
    group: Any,
    vocab_start: int | None = None,
    sequence_parallel: bool = False,
    ignore_index: int | None = None,
    counts: Any = None,
    token_weights: Any = None,
    normalizer: float | None = None,
    multiply: Any = None,
    grad_input: Any = True,
    grad_weight: Any = True,
    accumulate: bool | tuple[bool, bool] = False,
    strategy: str = "automatic",
    grad_tolerance: float = 0.0,
    seed: int = 0,
    token_ids: Any = None,
    chunk_tokens: int = 0,
    threads: int = 0,
    isa: str = "",
    workspace_limit: int = 0,
    out: Mapping[str, Any] | None = None,
) -> LossAndGradient:
    """`logitless.numpy.loss_and_gradient` where each rank has some rows of the weight. Collective.

    group: an mpi4py communicator, a process group of torch.distributed, or a `Transport`.
    weight_shard: [rows of this rank, H]; shards may be uneven or empty, and cover the vocabulary.
    vocab_start: the global id of the first of them; None (on every rank): shards lie in rank order.
    input, target: all tokens, the same on every rank. sequence_parallel: input is this rank's slice,
        balanced_shard(BT, ranks, rank), and so is grad_input; target is of all tokens.
    strategy: "automatic", "one_pass" or "recompute".
    grad_tolerance, seed, token_ids: as for `loss_and_gradient`, the same on every rank, token_ids of all
        tokens. Each rank keeps its part of what a whole vocabulary would keep, and `sparse_counts` tells
        of its part. Not with "recompute".
    chunk_tokens: tokens whose sum over the ranks runs while the next ones are computed, even; 0: automatic.

    What is returned has the same bits on every rank, but grad_weight, which is of this rank's rows, and
    a sliced grad_input. An error on one rank, or something in which ranks differ, is the same exception on all.
    """
    transport = open_transport(group)
    with all_told(transport):
        sparse, ids = _sparse(grad_tolerance, seed, token_ids)
        i, w = _operand("input", input), _operand("weight_shard", weight_shard)
        t = _targets("target", target)
        im, wm, tv = matrix("input", i), matrix("weight_shard", w), vector("target", t)
        _same_type(i, w)
        BT = t.shape[0]
        weights = None if token_weights is None else view("token_weights", token_weights, kinds=(F32,))
        c = _counts(counts)
        made = _Outputs(out, (*_ROWS, "grad_input", "grad_weight"), input=i, weight_shard=w, target=t,
                        token_weights=weights, counts=c, token_ids=ids)  # fmt: skip
        rows = [made.array(n, (BT,), F32) for n in _ROWS]
        gi = _gradient_output(made, "grad_input", grad_input, i.shape, i.dtype, input)
        gw = _gradient_output(made, "grad_weight", grad_weight, w.shape, i.dtype, weight_shard)
        add = _accumulate(accumulate, made)
        losses, top, sums, hit = (vector(n, r) for n, r in zip(_ROWS, rows))
        run = partial(
            _core.vocab_parallel, transport, im, wm, tv,
            None if vocab_start is None else integer("vocab_start", vocab_start, 0, MOST_ROWS),
            bool(sequence_parallel), _optional_integer("ignore_index", ignore_index),
            _optional_vector("counts", c),
            None if weights is None else vector("token_weights", weights),
            _number("normalizer", normalizer), _multiply(multiply), (gi is not None, gw is not None),
            None, losses, top, sums, hit,
            None if gi is None else matrix("grad_input", gi), add[0],
            None if gw is None else matrix("grad_weight", gw), add[1],
            integer("chunk_tokens", chunk_tokens), choice("strategy", strategy, STRATEGY), False,
            _options(threads, isa, workspace_limit), *sparse,
        )  # fmt: skip
    total, _, _ = run()
    return LossAndGradient(
        total, rows[0].owner, None if gi is None else gi.owner, None if gw is None else gw.owner,
        rows[1].owner, rows[2].owner, rows[3].owner,
    )  # fmt: skip
