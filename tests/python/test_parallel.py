# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over ranks, on arrays; the ranks are threads. Processes: test_parallel_mpi.py and
test_torch_parallel.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from judge import assert_within, expected
from thread_ranks import ThreadRanks, run_ranks, same_error

import logitless
import logitless.numpy as ln
from logitless.parallel import (
    balanced_shard,
    padded_shard,
    vocab_parallel_loss_and_gradient,
)

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
STATEMENT = 512  # bytes in which a rank says how it is


def case(BT=37, V=203, H=24, dtype="f32", ignored=5, seed=3):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BT, H), np.float32).astype(TYPES[dtype])
    w = (rng.standard_normal((V, H), np.float32) * 0.3).astype(TYPES[dtype])
    t = rng.integers(0, max(V, 1), BT)
    t[rng.permutation(BT)[:ignored]] = -100
    return x, w, t


def balanced(V, ranks):
    return [balanced_shard(V, ranks, r) for r in range(ranks)]


def padded(V, ranks):
    return [padded_shard(V, ranks, r, 16) for r in range(ranks)]


def backwards(V, ranks):  # uneven, and ranks in reverse order of the vocabulary
    cuts = [V * r * (r + 1) // (ranks * (ranks + 1)) for r in range(ranks + 1)]
    return list(zip(cuts, cuts[1:]))[::-1]


def with_empty(V, ranks):  # all rows on the last rank
    return [(0, 0)] * (ranks - 1) + [(0, V)]


COVERS = {f.__name__: f for f in (balanced, padded, backwards, with_empty)}


def step(ranks, x, w, t, cover, **options):
    """The step of `ranks` ranks, put together again; checks that all have the same bits."""
    in_order = options.pop("in_order", False)
    sliced = options.get("sequence_parallel", False)
    options = {"ignore_index": -100, "threads": 1, **options}

    def body(transport: ThreadRanks):
        begin, end = cover[transport.rank]
        part = slice(*balanced_shard(len(t), ranks, transport.rank)) if sliced else slice(None)
        return vocab_parallel_loss_and_gradient(
            x[part], w[begin:end], t, group=transport, vocab_start=None if in_order else begin,
            **options,
        )  # fmt: skip

    results = run_ranks(ranks, body)
    for r in results:
        if isinstance(r, BaseException):
            raise r
        assert r.total == results[0].total
        names = ("loss", "logits_max", "sum_exp_logits", "predicted_logits")
        for name in names if sliced else (*names, "grad_input"):
            np.testing.assert_array_equal(getattr(r, name), getattr(results[0], name))
    order = np.argsort([c[0] for c in cover], kind="stable")
    whole = results[0]._replace(grad_weight=np.concatenate([results[r].grad_weight for r in order]))
    if sliced:
        whole = whole._replace(grad_input=np.concatenate([r.grad_input for r in results]))
    return whole


def judge(result, x, w, t, dtype, coefficient=None, output=None):
    count = max(1, (t != -100).sum())
    coefficient = np.full(len(t), 1 / count) if coefficient is None else coefficient
    e = expected(np.float64(x), np.float64(w), t, coefficient, multiply=dtype, output=output or dtype)
    assert_within("loss", result.loss, e.loss, e.allowed_loss)
    assert_within("grad_input", result.grad_input, e.grad_input, e.allowed_grad_input)
    assert_within("grad_weight", result.grad_weight, e.grad_weight, e.allowed_grad_weight)
    assert result.total == pytest.approx(
        (e.loss * np.where(t == -100, 0, coefficient)).sum(),
        abs=(e.allowed_loss * np.abs(coefficient)).sum() + 1e-12,
    )


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cover", COVERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("strategy", ["one_pass", "recompute"])
def test_a_split_vocabulary_agrees_with_float64(ranks, cover, sequence_parallel, strategy):
    for dtype in TYPES:
        x, w, t = case(dtype=dtype)
        result = step(ranks, x, w, t, COVERS[cover](203, ranks), chunk_tokens=8, strategy=strategy,
                      sequence_parallel=sequence_parallel)  # fmt: skip
        judge(result, x, w, t, dtype)


@pytest.mark.parametrize("strategy", ["one_pass", "recompute", "automatic"])
def test_one_rank_has_the_bits_of_the_plain_step(strategy):
    x, w, t = case(dtype="bf16")
    one = step(1, x, w, t, [(0, 203)], strategy=strategy)
    plain = ln.loss_and_gradient(x, w, t, ignore_index=-100, strategy=strategy)
    for a, b in zip(one, plain):
        np.testing.assert_array_equal(a, b)


def test_without_vocab_start_shards_lie_in_rank_order():
    x, w, t = case()
    for cover in ([(0, 0), (0, 150), (150, 203)], [(0, 1), (1, 203), (203, 203)]):
        a = step(3, x, w, t, cover, in_order=True)
        b = step(3, x, w, t, cover)
        for name, left, right in zip(a._fields, a, b):
            np.testing.assert_array_equal(left, right, err_msg=name)


@pytest.mark.parametrize("shape", [(0, 10, 4), (1, 10, 4), (9, 2, 4), (9, 10, 0), (9, 1, 1)])
def test_edges_are_defined(shape):
    x, w, t = case(*shape, ignored=0)
    result = step(3, x, w, t, balanced(shape[1], 3))
    judge(result, x, w, t, "f32")


def test_no_token_counts():
    x, w, t = case()
    t[:] = -100
    result = step(3, x, w, t, balanced(203, 3))
    assert result.total == 0
    for array in (result.loss, result.grad_input, result.grad_weight):
        assert not array.any()


def test_every_option_counts():
    x, w, t = case()
    cover = backwards(203, 3)
    weights = np.linspace(0.5, 2, 37, dtype=np.float32)
    plain = step(3, x, w, t, cover, strategy="recompute")
    judge(step(3, x, w, t, cover, token_weights=weights, normalizer=7), x, w, t, "f32", weights / 7)
    judge(step(3, x, w, t, cover, normalizer=3), x, w, t, "f32", np.full(37, 1 / 3))
    some = np.arange(37) % 3 > 0
    only = np.where(some, t, -100)
    judge(step(3, x, w, t, cover, counts=some), x, w, only, "f32")
    rounded = step(3, x, w, t, cover, multiply="bf16")
    x16, w16 = (np.float32(a.astype(TYPES["bf16"])) for a in (x, w))
    judge(rounded, x16, w16, t, "bf16", output="f32")
    assert not np.array_equal(rounded.loss, plain.loss)
    for options in ({"chunk_tokens": 6}, {"threads": 2}, {"workspace_limit": 1 << 24}):
        for a, b in zip(step(3, x, w, t, cover, strategy="recompute", **options), plain):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"^(rank 0: )?workspace_limit_bytes is 1, the least possible"):
        step(3, x, w, t, cover, workspace_limit=1, strategy="recompute")


def test_gradients_not_wanted_are_not_computed_and_may_be_added_to():
    x, w, t = case()

    def body(transport: ThreadRanks):
        begin, end = balanced_shard(203, 2, transport.rank)
        frozen = vocab_parallel_loss_and_gradient(
            x, w[begin:end], t, group=transport, ignore_index=-100, grad_weight=False)  # fmt: skip
        assert frozen.grad_weight is None
        loss = vocab_parallel_loss_and_gradient(
            x, w[begin:end], t, group=transport, ignore_index=-100, grad_input=False, grad_weight=False)  # fmt: skip
        assert loss.grad_input is None and loss.total == frozen.total
        sums = [c for c in transport.calls if "gather" not in c[0]]
        assert sums == [("start_all_reduce_sum", 32 * 24 * 4)]
        main = np.ones((end - begin, 24), np.float32)
        added = vocab_parallel_loss_and_gradient(
            x, w[begin:end], t, group=transport, ignore_index=-100, grad_input=False,
            out={"grad_weight": main}, accumulate=True)  # fmt: skip
        assert added.grad_weight is main
        return main

    results = run_ranks(2, body)
    whole = ln.loss_and_gradient(x, w, t, ignore_index=-100, grad_input=False)
    np.testing.assert_allclose(np.concatenate(results) - 1, whole.grad_weight, atol=1e-6)


def test_no_more_is_sent_than_the_documentation_says():
    x, w, t = case(BT=64, V=100, H=16, ignored=0)

    def body(transport: ThreadRanks, sliced: bool, strategy: str):
        part = slice(*balanced_shard(64, 4, transport.rank)) if sliced else slice(None)
        seen = []
        for _ in range(3):
            vocab_parallel_loss_and_gradient(
                x[part], w[slice(*balanced_shard(100, 4, transport.rank))], t, group=transport,
                chunk_tokens=16, sequence_parallel=sliced, strategy=strategy)  # fmt: skip
            seen.append(list(transport.calls))
            transport.calls.clear()
        return seen

    said = [("all_gather", STATEMENT)]
    for sliced in (False, True):
        sums = [("start_reduce_scatter_sum" if sliced else "start_all_reduce_sum", 16 * 16 * 4)] * 4
        gathered = [("all_gather", 16 * 16 * 4)] if sliced else []
        statistics = [("all_gather", STATEMENT + 12 * 64)]
        for first, *later in run_ranks(4, lambda t_: body(t_, sliced, "recompute")):
            # What ranks were given, the plan's agreement, run's; then the plan is kept.
            assert first == said * 3 + gathered + statistics + sums
            assert later == [said * 2 + gathered + statistics + sums] * 2
        for first, *later in run_ranks(4, lambda t_: body(t_, sliced, "one_pass")):
            # Blocks: a statement's head of 64 bytes each.
            blocks = [("start_all_gather", 64 + 12 * 16)] * 4
            assert sorted(first) == sorted(said * 3 + gathered + blocks + sums)
            assert all(sorted(c) == sorted(said * 2 + gathered + blocks + sums) for c in later)
            # The next block's statistics are under way before this one's sums.
            assert [v for v, _ in first if v.startswith("start")][:3] == ["start_all_gather"] * 2 + [sums[0][0]]


# ---- the sparse gradient ------------------------------------------------------------------------


def peaked(BT=12, V=300, seed=5):
    """Softmax by Zipf's law, the most likely anywhere; an identity makes grad_input grad_logits itself."""
    rng = np.random.default_rng(seed)
    rank = rng.permuted(np.tile(np.arange(V), (BT, 1)), axis=1)
    x = (-2.5 * np.log1p(rank) + 0.1 * rng.standard_normal((BT, V))).astype(np.float32)
    x[3] = 0.0  # flat: exact
    t = np.argmax(rank == rng.integers(0, 5, (BT, 1)), axis=1)
    t[7] = -100
    return x, np.eye(V, dtype=np.float32), t


@pytest.mark.parametrize("cover", COVERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sequence_parallel"])
def test_a_sparse_gradient_keeps_what_a_whole_vocabulary_keeps(ranks, cover, sliced):
    x, w, t = peaked()
    shards = COVERS[cover](300, ranks)
    how = dict(grad_tolerance=2.0**-7, seed=2**63 + 9, token_ids=np.arange(40, 52), ignore_index=-100)
    plain = ln.loss_and_gradient(x, w, t, **how)
    kept_there = logitless.sparse_counts()
    assert kept_there.dense_rows == 1 and kept_there.kept < 0.2 * kept_there.elements

    def body(transport):
        begin, end = shards[transport.rank]
        part = slice(*balanced_shard(12, ranks, transport.rank)) if sliced else slice(None)
        made = vocab_parallel_loss_and_gradient(
            x[part], w[begin:end], t, group=transport, vocab_start=begin, threads=1,
            sequence_parallel=sliced, **how,
        )  # fmt: skip
        return made, logitless.sparse_counts()

    results = run_ranks(ranks, body)
    for r in results:
        assert not isinstance(r, BaseException), r
    grad_input = (
        np.concatenate([r[0].grad_input for r in results]) if sliced else results[0][0].grad_input
    )
    np.testing.assert_array_equal(grad_input != 0, plain.grad_input != 0)
    np.testing.assert_allclose(grad_input, plain.grad_input, rtol=1e-5, atol=1e-8)
    grad_weight = np.concatenate([results[r][0].grad_weight for r in np.argsort([c[0] for c in shards], kind="stable")])
    np.testing.assert_allclose(grad_weight, plain.grad_weight, rtol=1e-4, atol=1e-6)
    assert {(r[1].rows, r[1].dense_rows) for r in results} == {(11, 1)}
    assert sum(r[1].kept for r in results) == kept_there.kept
    assert [r[1].elements for r in results] == [10 * (end - begin) for begin, end in shards]
    exact = step(ranks, x, w, t, shards)
    for name in ("loss", "logits_max", "sum_exp_logits", "predicted_logits"):
        np.testing.assert_array_equal(getattr(results[0][0], name), getattr(exact, name))


def test_ranks_agree_on_a_sparse_gradient():
    x, w, t = peaked()
    shards = balanced(300, 3)

    def call(transport, changes):
        begin, end = shards[transport.rank]
        how = {"grad_tolerance": 2.0**-7, "seed": 4, **changes.get(transport.rank, {})}
        return vocab_parallel_loss_and_gradient(
            x, w[begin:end], t, group=transport, ignore_index=-100, **how
        )  # fmt: skip

    for changes, kind, text in [
        ({2: {"seed": 2**64 - 1}}, ValueError,
         "seed: ranks 0 and 2 were given 4 and 18446744073709551615, must be the same"),
        ({1: {"grad_tolerance": 0.25}}, ValueError,
         "grad_tolerance: ranks 0 and 1 were given 0.007812 and 0.250000, must be the same"),
        ({0: {"grad_tolerance": 0.75}}, ValueError,
         "rank 0: grad_tolerance is 0.75, must be 0, or between 2^-16 and 0.5"),
        ({1: {"seed": -1}}, ValueError, "rank 1: seed is -1, must be between 0 and 18446744073709551615"),
        ({1: {"token_ids": np.arange(12)}}, ValueError,
         "token_ids: ranks 0 and 1 were given none and one, must be the same"),
        ({2: {"token_ids": np.arange(11)}}, ValueError, "rank 2: token_ids: size is 11, must be BT = 12"),
        ({r: {"strategy": "recompute"} for r in range(3)}, ValueError,
         "grad_tolerance is 0.007812, must be 0 with the strategy recompute: a sparse gradient is one pass"),
    ]:  # fmt: skip
        same_error(run_ranks(3, lambda transport: call(transport, changes)), kind, text)
    assert all(r.total == r.total for r in run_ranks(3, lambda transport: call(transport, {})))  # they go on


# ---- errors -------------------------------------------------------------------------------------


def errors(changes, ranks=3):
    """What each rank's call ends with; changes: arguments of some ranks that differ."""
    x, w, t = case()

    def body(transport: ThreadRanks):
        begin, end = balanced_shard(203, ranks, transport.rank)
        arguments = {"input": x, "weight_shard": w[begin:end], "target": t, "vocab_start": begin,
                     "ignore_index": -100, **changes.get(transport.rank, {})}  # fmt: skip
        return vocab_parallel_loss_and_gradient(group=transport, **arguments)

    return run_ranks(ranks, body)


def test_ranks_that_disagree_get_the_same_error():
    x, w, t = case()
    other = t.copy()
    other[7] += 1
    weights = np.ones(37, np.float32)
    for change, text in [
        ({"target": t[:30], "input": x[:30]}, "target's size: ranks 0 and 1 were given 37 and 30"),
        ({"input": x[:, :20], "weight_shard": w[68:136, :20]}, "H: ranks 0 and 1 were given 24 and 20"),
        ({"vocab_start": None}, "vocab_start: ranks 0 and 1 were given one and none"),
        ({"grad_input": False}, "gradient of input: ranks 0 and 1 were given True and False"),
        ({"grad_weight": False}, "gradient of weight: ranks 0 and 1 were given True and False"),
        ({"sequence_parallel": True}, "sequence_parallel: ranks 0 and 1 were given False and True"),
        ({"chunk_tokens": 4}, "chunk_tokens: ranks 0 and 1 were given 0 and 4"),
        ({"strategy": "one_pass"}, "strategy: ranks 0 and 1 were given automatic and one_pass"),
        ({"multiply": "bf16"}, "multiply: ranks 0 and 1 were given none and bf16"),
        ({"target": t.astype(np.int32)}, "target's dtype: ranks 0 and 1 were given i64 and i32"),
        ({"target": other}, "target: ranks 0 and 1 hold different contents"),
        ({"normalizer": 2.0}, "normalizer: ranks 0 and 1 were given none and one"),
        ({"token_weights": weights}, "token_weights: ranks 0 and 1 were given none and one"),
        ({"counts": weights > 0}, "counts: ranks 0 and 1 were given none and one"),
    ]:
        same_error(errors({1: change}), ValueError, text + ", must be the same")
    none_ignored = {"target": np.abs(t) % 203}
    results = errors({0: none_ignored, 1: {**none_ignored, "ignore_index": -1}, 2: none_ignored})
    same_error(results, ValueError, "ignore_index: ranks 0 and 1 were given -100 and -1, must be the same")
    sixteen = {"input": x.astype(np.float16), "weight_shard": w[68:136].astype(np.float16)}
    same_error(errors({1: sixteen}), ValueError,
               "input's dtype: ranks 0 and 1 were given f32 and f16, must be the same")  # fmt: skip


def test_a_bad_argument_on_one_rank_is_everybody_s_error():
    x, w, t = case()
    for change, kind, text in [
        ({"input": x.tolist()}, TypeError, "input is a list, must be an array (NumPy, DLPack or a buffer)"),
        ({"weight_shard": w[:9].astype(np.float16)}, TypeError, "weight: dtype is f16, must be input's f32"),
        ({"vocab_start": -1}, ValueError, "vocab_start is -1, must be between 0 and 281474976710656"),
        ({"normalizer": 0.0}, ValueError, "normalizer is 0.000000, must not be 0 or NaN"),
        ({"isa": "vax"}, ValueError, None),
        ({"out": {"loss": np.empty(3, np.float32)}}, ValueError, "loss: size is 3, must be BT = 37"),
    ]:  # fmt: skip
        results = errors({2: change})
        text = str(results[0]).removeprefix("rank 2: ") if text is None else text
        same_error(results, kind, f"rank 2: {text}")


def test_shards_must_cover_the_vocabulary():
    rule = "; shards must cover [0, V) = [0, 203) without gap or overlap"
    _, w, t = case()
    same_error(errors({1: {"vocab_start": 60}}), ValueError,
               "rows: rank 0 has [0, 68) and rank 1 has [60, 128)" + rule)  # fmt: skip
    same_error(errors({1: {"vocab_start": 68, "weight_shard": w[:60]}}), ValueError,
               "rows: no rank has [128, 136)" + rule)  # fmt: skip
    beyond = t.copy()
    beyond[11] = 203
    same_error(errors({r: {"target": beyond} for r in range(3)}), IndexError,
               "target[11] is 203, must be in [0, V) = [0, 203) where the row counts")  # fmt: skip
    # Ignored, it is nobody's.
    results = errors({r: {"target": beyond, "ignore_index": 203} for r in range(3)})
    same_error(results, IndexError, str(results[0]))  # -100 counts now
    assert str(results[0]).endswith("is -100, must be in [0, V) = [0, 203) where the row counts")
    results = errors({r: {"target": np.where(t < 0, 203, t), "ignore_index": 203} for r in range(3)})
    assert all(r.total > 0 for r in results)


def test_after_an_error_the_same_ranks_go_on():
    x, w, t = case()

    def body(transport: ThreadRanks):
        begin, end = balanced_shard(203, 3, transport.rank)
        for _ in range(2):
            with pytest.raises(ValueError, match="normalizer"):
                vocab_parallel_loss_and_gradient(x, w[begin:end], t, group=transport, vocab_start=begin,
                                                 ignore_index=-100, normalizer=transport.rank)  # fmt: skip
        return vocab_parallel_loss_and_gradient(x, w[begin:end], t, group=transport, vocab_start=begin,
                                                ignore_index=-100).total  # fmt: skip

    totals = run_ranks(3, body)
    assert totals == [step(3, x, w, t, balanced(203, 3)).total] * 3


class Broken(Exception):
    pass


@pytest.mark.parametrize("verb", ["all_gather", "start_all_reduce_sum", "start_reduce_scatter_sum"])
def test_a_transport_that_raises_is_a_runtime_error_with_its_text(verb):
    x, w, t = case()

    def body(transport: ThreadRanks):
        transport.fail_at = (verb, Broken("the wire is cut"))
        sliced = verb == "start_reduce_scatter_sum"
        part = slice(*balanced_shard(37, 2, transport.rank)) if sliced else slice(None)
        try:
            vocab_parallel_loss_and_gradient(
                x[part], w[slice(*balanced_shard(203, 2, transport.rank))], t, group=transport,
                ignore_index=-100, sequence_parallel=sliced)  # fmt: skip
        except RuntimeError as error:
            assert type(error.__cause__) is Broken
            raise

    same_error(run_ranks(2, body), RuntimeError, f"{verb}: Broken: the wire is cut")


def test_a_sum_that_fails_while_the_next_is_under_way_is_waited_for():
    x, w, t = case()
    waited: list[str] = []

    class Late:
        def __init__(self, sum_, fails):
            self.sum, self.fails = sum_, fails

        def wait(self):
            self.sum.wait()
            waited.append(threading.current_thread().name)
            if self.fails:
                raise Broken

    class Transport(ThreadRanks):
        def start_all_reduce_sum(self, values):
            first = not any(c[0] == "start_all_reduce_sum" for c in self.calls)
            return Late(super().start_all_reduce_sum(values), first)

    def body(transport: ThreadRanks):
        transport.__class__ = Transport
        vocab_parallel_loss_and_gradient(
            x, w[slice(*balanced_shard(203, 2, transport.rank))], t, group=transport,
            ignore_index=-100, chunk_tokens=8)  # fmt: skip

    same_error(run_ranks(2, body), RuntimeError, "wait: Broken")
    assert sorted(waited.count(name) for name in set(waited)) == [2, 2]


def test_ctrl_c_in_a_transport_comes_through_as_it_is():
    x, w, t = case()

    def body(transport: ThreadRanks):
        transport.fail_at = ("all_gather", KeyboardInterrupt())
        vocab_parallel_loss_and_gradient(x, w, t, group=transport, ignore_index=-100)

    assert [type(r) for r in run_ranks(2, body)] == [KeyboardInterrupt] * 2


def test_what_is_no_group_is_refused():
    x, w, t = case()
    for group in (7, "world"):
        with pytest.raises(TypeError, match=rf"^group is a {type(group).__name__}, must be "):
            vocab_parallel_loss_and_gradient(x, w, t, group=group)

    class Nobody(ThreadRanks):
        def __init__(self):
            self.rank, self.size = 2, 2

    with pytest.raises(ValueError, match=r"^transport: rank is 2 of size 2, must be in \[0, size\)"):
        vocab_parallel_loss_and_gradient(x, w, t, group=Nobody())


def test_shards_are_those_of_the_core():
    for V in (0, 1, 7, 203, 50257):
        for ranks in (1, 2, 3, 7):
            for cut in (balanced_shard, padded_shard):
                rows = [cut(V, ranks, r) for r in range(ranks)]
                assert rows[0][0] == 0 and rows[-1][1] == V
                assert all(a[1] == b[0] for a, b in zip(rows, rows[1:]))
    assert padded_shard(50257, 4, 0) == (0, 12672) and padded_shard(200, 4, 3) == (200, 200)
    with pytest.raises(ValueError, match=r"^rank is 2, must be in \[0, ranks\) = \[0, 2\)"):
        balanced_shard(5, 2, 2)
    with pytest.raises(TypeError, match="^V is a float"):
        balanced_shard(5.0, 2, 1)


def test_importing_it_imports_neither_torch_nor_mpi(script):
    assert script("""
    import sys, logitless.parallel
    logitless.parallel.balanced_shard(9, 2, 1)
    print({"torch", "mpi4py"} & set(sys.modules))
    """) == "set()\n"  # fmt: skip
    assert "parallel" in dir(logitless)
