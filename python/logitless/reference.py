# SPDX-License-Identifier: Apache-2.0
"""The definition, in float64, in plain NumPy: slow, whole logits in memory, written to be read.

Same names and arguments as `logitless.numpy`, less what does not change a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .numpy import Gradient, Loss, LossAndGradient, Statistics

__all__ = ["forward", "gradient", "loss", "loss_and_gradient", "merge"]


def float64(array: Any, multiply: str | None = None) -> np.ndarray:
    """The values of an array; of uint16, those of the bfloat16 it holds. multiply="bf16": rounded
    to bfloat16 first."""
    if hasattr(array, "detach"):  # torch
        array = array.detach()
        return np.asarray(array.bfloat16().double() if multiply else array.double())
    values = np.asarray(array)
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return _round_to(values.astype(np.float64), multiply)


def _round_to(values: np.ndarray, dtype: str | None) -> np.ndarray:
    if dtype in (None, "f32"):
        return values
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float64)
    if dtype != "bf16":
        raise ValueError(f"multiply is {dtype!r}, must be 'bf16', 'f16', 'f32' or None")
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    rounded = np.where(np.isnan(values), bits, rounded)
    return rounded.view(np.float32).astype(np.float64)


def _pack(target_mask: np.ndarray, start: int, end: int) -> np.ndarray:
    padding = -len(target_mask) % 8
    outside = bool(0 < start or 0 >= end)  # as if the target were id 0
    padded = np.concatenate([target_mask, np.full(padding, outside)])
    return np.packbits(padded, bitorder="little")


def unpack(target_mask: Any, tokens: int) -> np.ndarray:
    """One bool per token from a packed mask, or a bool mask as it is."""
    mask = np.asarray(target_mask)
    if mask.dtype == np.bool_:
        return mask
    return np.unpackbits(mask, bitorder="little")[:tokens].astype(bool)


def _rows(target: np.ndarray, ignore_index: int | None, counts: Any) -> np.ndarray:
    rows = np.ones(len(target), bool) if counts is None else np.asarray(counts).astype(bool)
    return rows if ignore_index is None else rows & (target != ignore_index)


# ---- the sparse gradient: docs/sparse-gradient.md ------------------------------------------------


def _mix64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def _hash(seed: int, stream: int, ids: np.ndarray) -> np.ndarray:
    start = np.array([(seed + stream * 0x9E3779B97F4A7C15) % 2**64], np.uint64)
    with np.errstate(over="ignore"):
        return (_mix64(_mix64(start) + ids.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def uniform(seed: int, token_ids: Any, vocab_ids: Any) -> np.ndarray:
    """[tokens, vocabulary]: the number in [0, 1) that each element of grad_logits is chosen by."""
    token_hash = _hash(seed, 1, np.asarray(token_ids, np.int64))
    vocab_hash = _hash(seed, 2, np.asarray(vocab_ids, np.int64))
    with np.errstate(over="ignore"):
        x = (token_hash[:, None] ^ vocab_hash[None, :]) * np.uint32(0x9E3779B1)
    halved = (x >> np.uint32(1)).astype(np.int32).astype(np.float32)
    u: np.ndarray = halved.astype(np.float64) * 2.0**-31
    return u


def row_tau(others: np.ndarray, grad_tolerance: float) -> np.ndarray:
    """[tokens]: what an element that is below it is rounded to, up or to 0. others: softmax without
    the target's."""
    allowed = (grad_tolerance * others.sum(axis=1)) ** 2
    tau = np.ones(len(others))
    while True:
        below = np.where(others < tau[:, None], others, 0).sum(axis=1)
        too_large = tau * below > allowed
        if not too_large.any():
            return tau
        tau[too_large] /= 2


def sparse_softmax(
    softmax: np.ndarray, masked_target: np.ndarray, inside: np.ndarray, grad_tolerance: float,
    seed: int, token_ids: Any, vocab_start_index: int,
) -> np.ndarray:  # fmt: skip
    """Softmax with all small elements but the target's rounded to 0 or to the row's tau, right on
    average; rows of which more than a tenth would stay are as they were."""
    others = softmax.copy()
    rows = np.flatnonzero(inside)
    others[rows, masked_target[rows]] = 0
    tau = row_tau(others, grad_tolerance)[:, None]
    V = softmax.shape[1]
    sparse = np.minimum(others / tau, 1).sum(axis=1) <= V / 10
    ids = np.arange(len(softmax)) if token_ids is None else token_ids
    u = uniform(seed, ids, vocab_start_index + np.arange(V))
    kept = np.where(others >= tau, others, np.where(u * tau < others, tau, 0))
    kept[rows, masked_target[rows]] = softmax[rows, masked_target[rows]]
    return np.where(sparse[:, None], kept, softmax)


# ---- the operators ------------------------------------------------------------------------------


def forward(
    input: Any,
    weight: Any,
    target: Any,
    *,
    vocab_start_index: int = 0,
    vocab_end_index: int | None = None,
    ignore_index: int | None = None,
    counts: Any = None,
    multiply: str | None = None,
    logits_rounding: str | None = "none",
    return_logits: bool = False,
) -> Statistics:
    """logits_rounding: "none", or the type that logits are rounded to: "bf16" or "f16"."""
    target = np.asarray(target)
    x, w = float64(input, multiply), float64(weight, multiply)
    end = vocab_start_index + len(w) if vocab_end_index is None else vocab_end_index
    rows = _rows(target, ignore_index, counts)
    logits = np.zeros((len(x), len(w)))
    logits[rows] = x[rows] @ w.T
    if logits_rounding != "none":
        logits = _round_to(logits, logits_rounding)
    with np.errstate(invalid="ignore"):
        logits_max = logits.max(axis=1, initial=-np.inf)
        shifted = logits - np.where(np.isneginf(logits_max), 0, logits_max)[:, None]
        sum_exp_logits = np.exp(shifted).sum(axis=1)
        outside = (target < vocab_start_index) | (target >= end) | ~rows
        masked_target = np.where(outside, 0, target - vocab_start_index)
        predicted = -logits_max
        hit = ~outside & (masked_target < len(w))
        predicted[hit] += logits[hit, masked_target[hit]]
        predicted[outside | np.isneginf(logits_max)] = 0
    logits_max[~rows], sum_exp_logits[~rows] = -np.inf, 0
    return Statistics(
        logits_max, sum_exp_logits, predicted, _pack(outside, vocab_start_index, end),
        masked_target.astype(target.dtype), logits if return_logits else None,
    )  # fmt: skip


def merge(shards: Sequence[Statistics]) -> Statistics:
    tokens = len(shards[0].logits_max)
    maxima = np.array([s.logits_max for s in shards], np.float64)
    sums = np.array([s.sum_exp_logits for s in shards], np.float64)
    logits_max = maxima.max(axis=0)
    with np.errstate(invalid="ignore"):
        shift = np.where(maxima == logits_max, 0, maxima - logits_max)
        sum_exp_logits = (sums * np.exp(shift)).sum(axis=0)
    predicted, nobody = np.zeros(tokens), np.ones(tokens, bool)
    for r, shard in enumerate(shards):
        owned = ~unpack(shard.target_mask, tokens) & nobody
        predicted[owned] = np.asarray(shard.predicted_logits, np.float64)[owned] + shift[r][owned]
        nobody &= ~owned
    return Statistics(logits_max, sum_exp_logits, predicted, np.packbits(nobody, bitorder="little"))


def loss(statistics: Statistics, *, logits: Any = None, counts: Any = None) -> Loss:
    logits_max, sum_exp_logits, predicted = (
        np.asarray(a, np.float64) for a in statistics[:3]
    )  # fmt: skip
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(np.isneginf(logits_max), np.nan, np.log(sum_exp_logits) - predicted)
        logsumexp = np.log(sum_exp_logits) + logits_max
        softmax = None
        if logits is not None:
            softmax = np.exp(float64(logits) - logits_max[:, None]) / sum_exp_logits[:, None]
    if counts is not None:
        rows = np.asarray(counts).astype(bool)
        values, logsumexp = np.where(rows, values, 0), np.where(rows, logsumexp, 0)
        if softmax is not None:
            softmax = np.where(rows[:, None], softmax, 0)
    return Loss(values, logsumexp, softmax)


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
    multiply: str | None = None,
    logits_rounding: str | None = "none",
    grad_tolerance: float = 0.0,
    seed: int = 0,
    token_ids: Any = None,
    vocab_start_index: int = 0,
) -> Gradient:
    x, w = float64(input, multiply), float64(weight, multiply)
    tokens = len(x)
    g = np.asarray(grad, np.float64)
    g_lse = np.zeros(tokens) if grad_logsumexp is None else np.asarray(grad_logsumexp, np.float64)
    rows = (g != 0) | (g_lse != 0)
    if counts is not None:
        rows &= np.asarray(counts).astype(bool)
    x = np.where(rows[:, None], x, 0)
    if softmax is None:
        logits = x @ w.T
        if logits_rounding != "none":
            logits = _round_to(logits, logits_rounding)
        with np.errstate(invalid="ignore", over="ignore"):
            p = np.exp(logits - np.asarray(logits_max, np.float64)[:, None])
        p = p / np.asarray(sum_exp_logits, np.float64)[:, None]
    else:
        p = np.asarray(softmax, np.float64)
    inside = np.ones(tokens, bool) if target_mask is None else ~unpack(target_mask, tokens)
    if grad_tolerance != 0.0:
        p = np.where(rows[:, None], p, 0)
        p = sparse_softmax(
            p, np.asarray(masked_target), rows & inside, grad_tolerance, seed, token_ids,
            vocab_start_index,
        )  # fmt: skip
    grad_logits = np.where(rows[:, None], p, 0) * np.where(rows, g + g_lse, 0)[:, None]
    hit = np.flatnonzero(rows & inside)
    grad_logits[hit, np.asarray(masked_target)[hit]] -= g[hit]
    return Gradient(grad_logits @ w, grad_logits.T @ x)


def loss_and_gradient(
    input: Any,
    weight: Any,
    target: Any,
    *,
    ignore_index: int | None = None,
    counts: Any = None,
    token_weights: Any = None,
    normalizer: float | None = None,
    multiply: str | None = None,
    grad_tolerance: float = 0.0,
    seed: int = 0,
    token_ids: Any = None,
) -> LossAndGradient:
    target = np.asarray(target)
    rows = _rows(target, ignore_index, counts)
    statistics = forward(input, weight, target, counts=rows, multiply=multiply)
    losses = loss(statistics, counts=rows).loss
    if normalizer is None:
        normalizer = 1 if token_weights is not None else max(1, rows.sum())
    weights = np.ones(len(target)) if token_weights is None else np.asarray(token_weights, np.float64)
    weights = np.where(rows, weights / normalizer, 0)
    gradients = gradient(
        weights, input, weight, np.where(rows, target, 0), logits_max=statistics.logits_max,
        sum_exp_logits=statistics.sum_exp_logits, multiply=multiply, counts=rows,
        grad_tolerance=grad_tolerance, seed=seed, token_ids=token_ids,
    )  # fmt: skip
    total = float((weights * losses)[rows].sum())
    return LossAndGradient(total, losses, *gradients, *statistics[:3])
