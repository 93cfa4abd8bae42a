# SPDX-License-Identifier: Apache-2.0
"""What may be expected of the operators: values in float64 and the error that the arithmetic of
docs/numerics.md allows beside them. The same model as reference/tolerance.h, coarser: a rounding to
nearest is uniform in half an ulp, independent roundings add in variance, the largest of n such errors
stays below sqrt(2 ln(1e4 n)) deviations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNIT = {"f32": 2.0**-24, "bf16": 2.0**-9, "f16": 2.0**-11}  # half an ulp of 1


def spread(n: int) -> float:
    return float(np.sqrt(2 * np.log(1e4 * max(n, 1))))


@dataclass
class Expected:
    loss: np.ndarray  # [BT]
    logsumexp: np.ndarray  # [BT]
    grad_input: np.ndarray
    grad_weight: np.ndarray
    allowed_loss: np.ndarray
    allowed_grad_input: np.ndarray
    allowed_grad_weight: np.ndarray


def expected(
    x: np.ndarray,
    w: np.ndarray,
    target: np.ndarray,
    coefficient: np.ndarray,
    *,
    coefficient_lse: np.ndarray | None = None,
    ignore_index: int = -100,
    multiply: str = "f32",
    output: str = "f32",
    equal_tokens: bool = False,
) -> Expected:
    """x, w: float64 values of the operands (as multiplied). coefficient[b]: d total / d loss[b].
    equal_tokens: rows of x are alike, so that their errors do not average out."""
    rows = target != ignore_index
    x = np.where(rows[:, None], x, 0.0)
    H, V = x.shape[1], w.shape[0]
    logits = x @ w.T
    top = logits.max(axis=1, keepdims=True)
    exp = np.exp(logits - top)
    p = exp / exp.sum(axis=1, keepdims=True)
    logsumexp = np.log(exp.sum(axis=1)) + top[:, 0]
    index = np.where(rows, target, 0)
    loss = np.where(rows, logsumexp - logits[np.arange(len(x)), index], 0.0)
    c = np.where(rows, coefficient, 0.0)
    c_lse = np.zeros(len(x)) if coefficient_lse is None else np.where(rows, coefficient_lse, 0.0)
    g = p * (c + c_lse)[:, None]
    g[np.arange(len(x)), index] -= c

    # A float dot product of H terms: each partial sum rounds, of size up to sqrt(sum of squares).
    u = UNIT["f32"]
    size = np.sqrt((x**2) @ (w**2).T) + np.abs(logits)
    logit_deviation = u * np.sqrt(H / 3) * size
    # A row's statistics carry the error of the logits that matter, and of the sum of V terms.
    row_deviation = (p * logit_deviation).max(axis=1) + logit_deviation.max(axis=1) * 0.1
    row_deviation = row_deviation + u * (np.abs(top[:, 0]) + np.sqrt(V) + 8)
    allowed_loss = spread(len(x)) * 2 * row_deviation + 4 * u * np.abs(loss)
    # grad_logits: rounded to the multiplied type (twice: one pass keeps exponentials in 16 bits),
    # with softmax off by the logit's and the row's error.
    relative = np.sqrt(2 / 3) * UNIT[multiply]
    scale = (np.abs(c) + np.abs(c_lse))[:, None]
    g_deviation = relative * np.abs(g) + (relative * (multiply != "f32") + 8 * u) * p * scale
    g_deviation = g_deviation + p * scale * (logit_deviation + row_deviation[:, None])
    if multiply == "f16":  # scaled so that the coefficient is near 1; the least spacing is 2^-24
        g_deviation = g_deviation + 2.0**-25 * scale
    # A row's own statistics are wrong for all of it at once: a bias, not a deviation.
    bias = p * scale * row_deviation[:, None]

    def product(
        deviation: np.ndarray, b: np.ndarray, a: np.ndarray, value: np.ndarray, alike: bool = False
    ) -> np.ndarray:
        terms = a.shape[1]
        own = deviation @ np.abs(b) if alike else np.sqrt((deviation**2) @ (b**2))
        sums = u * np.sqrt(terms / 3) * (np.sqrt((a**2) @ (b**2)) + np.abs(value))
        return spread(value.size) * (own + sums) + 1.5 * UNIT[output] * np.abs(value)

    grad_input, grad_weight = g @ w, g.T @ x
    # fp16 outputs: the smallest spacing.
    floor = 2.0**-24 if output == "f16" else 2.0**-104
    return Expected(
        loss, np.where(rows, logsumexp, 0.0), grad_input, grad_weight, allowed_loss,
        product(g_deviation, w, g, grad_input) + bias @ np.abs(w) + floor,
        product(g_deviation.T, x, g.T, grad_weight, equal_tokens) + bias.T @ np.abs(x) + floor,
    )  # fmt: skip


def assert_within(name: str, found: np.ndarray, value: np.ndarray, allowed: np.ndarray) -> None:
    found = np.asarray(found, np.float64)
    assert found.shape == value.shape, f"{name}: shape {found.shape}, expected {value.shape}"
    beyond = ~(np.abs(found - value) <= allowed)
    if beyond.any():
        at = np.unravel_index(np.argmax(np.where(beyond, np.abs(found - value) / allowed, 0)), value.shape)
        raise AssertionError(
            f"{name}: {beyond.sum()} of {beyond.size} beyond; at {tuple(map(int, at))} found "
            f"{found[at]!r}, expected {value[at]!r}, allowed error {allowed[at]!r}"
        )
