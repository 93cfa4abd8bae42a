# SPDX-License-Identifier: Apache-2.0
"""The sparse gradient on arrays. With weight the identity matrix, a float32 grad_input is grad_logits
itself: what was kept can be read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logitless
import logitless.numpy as ln
import logitless.reference as reference

EPS = 2.0**-7


def peaked(BT: int, V: int, seed: int = 0, decay: float = 2.5):
    """Softmax by Zipf's law, rank^-decay, the ranks in another order in each row; the target among the
    first."""
    rng = np.random.default_rng(seed)
    rank = rng.permuted(np.tile(np.arange(V), (BT, 1)), axis=1)
    logits = (-decay * np.log1p(rank) + 0.1 * rng.standard_normal((BT, V))).astype(np.float32)
    target = np.argmax(rank == rng.integers(0, min(V, 5), (BT, 1)), axis=1)
    return logits, np.eye(V, dtype=np.float32), target


def grad_logits(logits, identity, target, **arguments):
    arguments = {"grad_tolerance": EPS, "seed": 7, **arguments}
    return ln.loss_and_gradient(logits, identity, target, grad_weight=False, **arguments).grad_input


def two_pass(x, w, t, *, token_weights=None, ignore_index=None, normalizer=None, **arguments):
    """loss_and_gradient by its parts."""
    counts = np.ones(len(t), bool) if ignore_index is None else t != ignore_index
    s = ln.forward(x, w, t, ignore_index=ignore_index)
    if normalizer is None:
        normalizer = max(1, counts.sum()) if token_weights is None else 1
    grad = np.ones(len(t)) if token_weights is None else token_weights
    grad = np.where(counts, grad / normalizer, 0).astype(np.float32)
    return ln.gradient(
        grad, x, w, np.where(counts, t, 0), logits_max=s.logits_max, sum_exp_logits=s.sum_exp_logits, **arguments
    )  # fmt: skip


FORMS = [ln.loss_and_gradient, two_pass]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [2.0**-4, 2.0**-9])
def test_what_is_kept_and_as_what_is_the_reference_s(form, eps):
    x, w, t = peaked(24, 1000)
    found = form(x, w, t, grad_tolerance=eps, normalizer=1.0, seed=2**63 + 5, grad_weight=False).grad_input
    value = reference.loss_and_gradient(
        x, w, t, grad_tolerance=eps, normalizer=1.0, seed=2**63 + 5
    ).grad_input
    # An element whose test falls within the last ulps of a float32 softmax may go the other way.
    assert ((found != 0) != (value != 0)).sum() <= 2
    both = (found != 0) & (value != 0)
    assert both.sum() > 24
    # p - 1 of a target has the absolute error of p.
    np.testing.assert_allclose(found[both], value[both], rtol=2e-5, atol=2e-7)


def test_statistics_and_loss_keep_their_bits():
    x, w, t = peaked(24, 1000)
    exact, sparse = ln.loss_and_gradient(x, w, t), ln.loss_and_gradient(x, w, t, grad_tolerance=EPS)
    assert exact.total == sparse.total
    for name in ("loss", "logits_max", "sum_exp_logits", "predicted_logits"):
        np.testing.assert_array_equal(getattr(exact, name), getattr(sparse, name))
    assert (exact.grad_input != sparse.grad_input).any()


def test_bits_depend_on_the_seed_and_on_nothing_else():
    x, w, t = peaked(40, 900)
    usual = ln.loss_and_gradient(x, w, t, grad_tolerance=EPS, seed=3)
    for other in ({"threads": 1}, {"threads": 2}, {"threads": 3}, {"workspace_limit": 8 << 20}):
        same = ln.loss_and_gradient(x, w, t, grad_tolerance=EPS, seed=3, **other)
        np.testing.assert_array_equal(same.grad_input, usual.grad_input)
        np.testing.assert_array_equal(same.grad_weight, usual.grad_weight)
    another = ln.loss_and_gradient(x, w, t, grad_tolerance=EPS, seed=4)
    assert (another.grad_input != usual.grad_input).any()


def test_token_ids_make_a_row_independent_of_its_batch():
    x, w, t = peaked(12, 800)
    plain = grad_logits(x, w, t, normalizer=1.0)
    ids = np.arange(12) + 100
    named = grad_logits(x, w, t, normalizer=1.0, token_ids=ids)
    assert (named != plain).any()
    np.testing.assert_array_equal(plain, grad_logits(x, w, t, normalizer=1.0, token_ids=np.arange(12)))
    order = np.random.default_rng(1).permutation(12)
    turned = grad_logits(x[order], w, t[order], normalizer=1.0, token_ids=ids[order])
    np.testing.assert_array_equal(turned, named[order])
    alone = grad_logits(x[5:6], w, t[5:6], normalizer=1.0, token_ids=ids[5:6])
    np.testing.assert_array_equal(alone[0], named[5])
    # The row's number is the one before rows that do not count are left out.
    counts = np.arange(12) % 3 != 0
    some = grad_logits(x, w, t, normalizer=1.0, counts=counts)
    np.testing.assert_array_equal(some[counts], plain[counts])
    assert not some[~counts].any()


def test_the_error_of_each_row_is_what_was_asked_for():
    x, w, t = peaked(16, 1500)
    exact = reference.loss_and_gradient(x, w, t, normalizer=1.0).grad_input
    for eps in (2.0**-4, 2.0**-7):
        errors = [
            np.linalg.norm(grad_logits(x, w, t, grad_tolerance=eps, normalizer=1.0, seed=s) - exact, axis=1)
            for s in range(48)
        ]  # fmt: skip
        rms = np.sqrt(np.mean(np.square(errors), axis=0)) / np.linalg.norm(exact, axis=1)
        assert (rms <= 1.5 * eps).all() and rms.max() > eps / 16


def off_by(gradients: np.ndarray, exact: np.ndarray) -> float:
    """The largest deviation of the mean in standard errors of it, over random projections."""
    directions = np.random.default_rng(2).standard_normal((40, exact.size))
    values = (gradients.reshape(len(gradients), -1) - exact.reshape(-1)) @ directions.T
    standard = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return float(np.abs(values.mean(axis=0) / standard).max())


def test_the_mean_over_seeds_is_the_exact_gradient():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((20, 48)).astype(np.float32)
    w = rng.standard_normal((700, 48)).astype(np.float32)
    t = (x @ w.T).argmax(axis=1)
    exact = reference.loss_and_gradient(x, w, t)
    made = [ln.loss_and_gradient(x, w, t, grad_tolerance=2.0**-3, seed=s) for s in range(64)]
    for name in ("grad_input", "grad_weight"):
        gradients = np.array([getattr(m, name) for m in made], np.float64)
        assert off_by(gradients, getattr(exact, name)) < 5
        # The same test sees a bias as large as the error of one gradient.
        assert off_by(gradients + gradients.std(axis=0), getattr(exact, name)) > 5


def test_counters_say_what_was_kept():
    x, w, t = peaked(30, 1000)
    x[3], x[17] = 0, 0.25  # flat rows
    counts = np.arange(30) != 8
    found = grad_logits(x, w, t, counts=counts)
    exact = grad_logits(x, w, t, counts=counts, grad_tolerance=0)
    seen = logitless.sparse_counts()
    assert isinstance(seen, logitless.SparseCounts)
    assert seen.rows == 29 and seen.dense_rows == 2 and seen.elements == 27 * 1000
    sparse = np.delete(found, [3, 8, 17], axis=0)
    assert seen.kept == (sparse != 0).sum() and seen.kept_share == seen.kept / 27000 < 0.1
    np.testing.assert_array_equal(found[[3, 17]], exact[[3, 17]])


def test_the_two_pass_form_takes_statistics_and_weights():
    x, w, t = peaked(14, 600)
    s = ln.forward(x, w, t)
    grad = np.random.default_rng(3).standard_normal(14).astype(np.float32)
    grad[4] = 0
    arguments = dict(logits_max=s.logits_max, sum_exp_logits=s.sum_exp_logits, grad_tolerance=EPS, seed=9)
    found = ln.gradient(grad, x, w, t, **arguments)
    value = reference.gradient(grad, x, w, t, **arguments)
    np.testing.assert_allclose(found.grad_input, value.grad_input, rtol=2e-5, atol=1e-6)
    assert not found.grad_input[4].any() and logitless.sparse_counts().rows == 13
    step = ln.loss_and_gradient(x, w, t, token_weights=grad, grad_tolerance=EPS, seed=9)
    np.testing.assert_allclose(step.grad_weight, found.grad_weight, rtol=1e-4, atol=1e-7)
    elsewhere = ln.gradient(grad, x, w, t, vocab_start_index=600, **arguments)
    value = reference.gradient(grad, x, w, t, vocab_start_index=600, **arguments)
    np.testing.assert_allclose(elsewhere.grad_input, value.grad_input, rtol=2e-5, atol=1e-6)
    assert (elsewhere.grad_input != found.grad_input).any()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    BT=st.integers(0, 30), V=st.integers(1, 300), decay=st.sampled_from([0.0, 1.0, 2.5, 8.0]),
    eps=st.sampled_from([2.0**-16, 2.0**-10, 2.0**-5, 0.5]), form=st.sampled_from(FORMS),
    ignored=st.integers(0, 30), weighted=st.booleans(), seed=st.integers(0, 2**64 - 1),
    odd=st.sampled_from(["", "nan", "-inf", "one giant"]),
)  # fmt: skip
def test_each_row_is_the_sparse_or_the_exact_one(BT, V, decay, eps, form, ignored, weighted, seed, odd):
    x, w, t = peaked(BT, V, seed % 1000, decay)
    t[: min(ignored, BT)] = -100
    if odd and BT:
        x[-1, 0] = {"nan": np.nan, "-inf": -3e38, "one giant": 3000}[odd]
    weights = np.random.default_rng(seed % 99).standard_normal(BT).astype(np.float32) if weighted else None
    arguments = dict(token_weights=weights, ignore_index=-100)
    found = form(x, w, t, grad_tolerance=eps, seed=seed, **arguments)
    counted = logitless.sparse_counts()
    exact = reference.loss_and_gradient(x, w, t, **arguments)
    sparse = reference.loss_and_gradient(x, w, t, grad_tolerance=eps, seed=seed, **arguments)
    has = (t != -100) & (True if weights is None else weights != 0)
    assert counted.rows == has.sum() and 0 <= counted.dense_rows <= counted.rows
    assert counted.elements == (counted.rows - counted.dense_rows) * V >= counted.kept
    factor = 1 / max(1, has.sum()) if weights is None else np.abs(weights)
    bound = 2e-5 * np.abs(exact.grad_input).max(axis=1, initial=0) + 2.0**-21 * factor
    with np.errstate(invalid="ignore"):
        ok = [
            np.abs(found.grad_input - r.grad_input).max(axis=1, initial=0) <= bound for r in (exact, sparse)
        ]
    assert (ok[0] | ok[1] | np.isnan(exact.grad_input).any(axis=1)).all()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sixteen_bits_multiply_the_same_choice(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    kind = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal((30, 64)).astype(kind), rng.standard_normal((800, 64)).astype(kind)
    t = (np.float32(x) @ np.float32(w).T).argmax(axis=1)
    found = ln.loss_and_gradient(
        x, w, t, grad_tolerance=2.0**-9, seed=1, grad_input="f32", grad_weight="f32"
    )
    value = reference.loss_and_gradient(x, w, t, grad_tolerance=2.0**-9, seed=1)
    for name in ("grad_input", "grad_weight"):
        error = np.linalg.norm(getattr(found, name) - getattr(value, name))
        assert error <= 2.0**-9 * np.linalg.norm(getattr(value, name))
    assert 0 < logitless.sparse_counts().kept_share < 0.1


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "grad_tolerance is 0.7, must be 0, or between 2\\^-16 and 0.5", {"grad_tolerance": 0.7}),
        (ValueError, "grad_tolerance is -0.01, must be 0", {"grad_tolerance": -0.01}),
        (ValueError, "grad_tolerance is 1e-06, must be 0", {"grad_tolerance": 1e-6}),
        (ValueError, "grad_tolerance is nan, must be 0", {"grad_tolerance": float("nan")}),
        (TypeError, "grad_tolerance is a str, must be a number", {"grad_tolerance": "0.1"}),
        (TypeError, "grad_tolerance is a bool, must be a number", {"grad_tolerance": True}),
        (TypeError, "seed is a float, must be an int", {"seed": 1.0}),
        (ValueError, "seed is -1, must be between 0 and 18446744073709551615", {"seed": -1}),
        (ValueError, "seed is 18446744073709551616, must be between 0", {"seed": 2**64}),
        (TypeError, "token_ids: dtype is i32, must be i64", {"token_ids": np.zeros(4, np.int32)}),
        (ValueError, "token_ids: size is 3, must be BT = 4", {"token_ids": np.zeros(3, np.int64)}),
        (ValueError, "grad_tolerance is 0.0078.*, must be 0 with the strategy recompute", {"strategy": "recompute"}),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, message, change):
    x, w, t = peaked(4, 10)
    with pytest.raises(error, match=message):
        ln.loss_and_gradient(x, w, t, **{"grad_tolerance": EPS, **change})


def test_a_softmax_that_is_given_makes_exact_gradients_only():
    x, w, t = peaked(4, 10)
    s = ln.forward(x, w, t, return_logits=True)
    softmax = ln.loss(s, logits=s.logits).softmax
    with pytest.raises(ValueError, match="grad_tolerance"):
        ln.gradient(np.ones(4, np.float32), x, w, t, softmax=softmax, grad_tolerance=EPS)
