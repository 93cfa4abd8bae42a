# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over ranks that torch.distributed joins by gloo."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GlooRanks, free_port, join
from judge import assert_within, expected
from thread_ranks import same_error

import logitless
from logitless.parallel import (
    balanced_shard,
    padded_shard,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_loss_and_gradient,
)

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples/python"
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
needs_new = pytest.mark.skipif(not NEW, reason=f"torch {torch.__version__} lacks torch.distributed.tensor or fully_shard")


@pytest.fixture(scope="module")
def gloo():
    ranks = GlooRanks()
    yield ranks
    ranks.close()


def case(BT=37, V=203, H=24, dtype="f32", ignored=5, seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(BT, H, generator=g).to(TYPES[dtype])
    w = (torch.randn(V, H, generator=g) * 0.3).to(TYPES[dtype])
    t = torch.randint(0, max(V, 1), (BT,), generator=g)
    t[torch.randperm(BT, generator=g)[:ignored]] = -100
    return x, w, t


def balanced(V, ranks):
    return [balanced_shard(V, ranks, r) for r in range(ranks)]


def padded(V, ranks):
    return [padded_shard(V, ranks, r, 16) for r in range(ranks)]


def backwards(V, ranks):
    cuts = [V * r * (r + 1) // (ranks * (ranks + 1)) for r in range(ranks + 1)]
    return list(zip(cuts, cuts[1:]))[::-1]


def with_empty(V, ranks):
    return [(0, 0)] * (ranks - 1) + [(0, V)]


COVERS = {f.__name__: f for f in (balanced, padded, backwards, with_empty)}


def leaves(x, w, t, cover, rank, sliced):
    part = slice(*balanced_shard(len(t), len(cover), rank)) if sliced else slice(None)
    begin, end = cover[rank]
    return x[part].clone().requires_grad_(), w[begin:end].clone().requires_grad_()


# ---- values -------------------------------------------------------------------------------------


WAYS = [("mean", "one_pass"), ("mean", "recompute"), ("sum", "auto"), ("sum", "recompute"), ("none", "auto")]


def _steps(group, cover_name, sliced):
    """All types, reductions and modes with one cover: (loss, grad_input, grad_weight) of this rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = {}
    for dtype in TYPES:
        for reduction, mode in WAYS:
            x, w, t = case(dtype=dtype)
            cover = COVERS[cover_name](203, ranks)
            xi, wi = leaves(x, w, t, cover, rank, sliced)
            loss = vocab_parallel_linear_cross_entropy(
                xi, wi, t, group=group, vocab_start=cover[rank][0], sequence_parallel=sliced,
                reduction=reduction, mode=mode, chunk_tokens=8,
            )  # fmt: skip
            assert loss.dtype is torch.float32
            upstream = torch.linspace(-1, 1, 37) if reduction == "none" else torch.tensor(0.5)
            loss.backward(upstream)
            assert xi.grad.dtype is wi.grad.dtype is TYPES[dtype]
            found[dtype, reduction, mode] = (loss.detach().numpy(), xi.grad.double().numpy(),
                                       wi.grad.double().numpy())  # fmt: skip
    return found


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("cover", COVERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_has_the_loss_and_its_gradients(gloo, ranks, cover, sliced):
    results = gloo.all(ranks, _steps, cover, sliced)
    order = np.argsort([c[0] for c in COVERS[cover](203, ranks)], kind="stable")
    for dtype in TYPES:
        x, w, t = (a.double().numpy() if a.is_floating_point() else a.numpy() for a in case(dtype=dtype))
        for reduction, mode in WAYS:
            step = [r[dtype, reduction, mode] for r in results]
            coefficient = {"mean": np.full(37, 0.5 / 32), "sum": np.full(37, 0.5),
                           "none": torch.linspace(-1, 1, 37).double().numpy()}[reduction]  # fmt: skip
            e = expected(x, w, t, coefficient, multiply=dtype, output=dtype)
            for s in step[1:]:
                np.testing.assert_array_equal(s[0], step[0][0])
                if not sliced:
                    np.testing.assert_array_equal(s[1], step[0][1])
            grad_input = np.concatenate([s[1] for s in step]) if sliced else step[0][1]
            grad_weight = np.concatenate([step[r][2] for r in order])
            if reduction == "none":
                assert_within("loss", step[0][0], e.loss, e.allowed_loss)
            else:
                total = (e.loss * coefficient * 2).sum()
                assert abs(step[0][0] - total) <= (e.allowed_loss * coefficient * 2).sum() + 2e-7 * abs(total)
            assert_within("grad_input", grad_input, e.grad_input, e.allowed_grad_input)
            assert_within("grad_weight", grad_weight, e.grad_weight, e.allowed_grad_weight)


# ---- the sparse gradient ------------------------------------------------------------------------

SPARSE_WAYS = [("mean", "one_pass"), ("sum", "auto"), ("mean", "recompute"), ("none", "auto")]
EPS = 2.0**-6


def peaked_case():
    x, w, t = case(V=400)
    return x, w * 12, t


def _sparse_steps(group, sliced):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    x, w, t = peaked_case()
    cover = backwards(400, ranks)
    found = []
    for reduction, mode in SPARSE_WAYS:
        xi, wi = leaves(x, w, t, cover, rank, sliced)
        torch.manual_seed(17)  # as every rank of the group
        loss = vocab_parallel_linear_cross_entropy(
            xi, wi, t, group=group, vocab_start=cover[rank][0], sequence_parallel=sliced,
            reduction=reduction, mode=mode, grad_tolerance=EPS,
        )  # fmt: skip
        drawn = torch.randint(100, (3,)).tolist()
        upstream = torch.linspace(0.5, 1, 37) if reduction == "none" else torch.tensor(0.5)
        loss.backward(upstream, retain_graph=True)
        counts = logitless.sparse_counts()
        first = xi.grad.numpy().copy(), wi.grad.numpy().copy()
        if mode != "one_pass":  # a retained graph makes the same choice again
            xi.grad = wi.grad = None
            loss.backward(upstream)
            for again, before in zip((xi, wi), first):
                np.testing.assert_allclose(again.grad.numpy(), before, rtol=1e-5, atol=1e-8)
        found.append((*first, tuple(counts), drawn))
    return found


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sparse_gradient_is_that_of_one_rank(gloo, ranks, sliced):
    results = gloo.all(ranks, _sparse_steps, sliced)
    order = np.argsort([c[0] for c in backwards(400, ranks)], kind="stable")
    for i, (reduction, mode) in enumerate(SPARSE_WAYS):
        x, w, t = (a.requires_grad_() if a.is_floating_point() else a for a in peaked_case())
        torch.manual_seed(17)
        loss = logitless.linear_cross_entropy(
            x, w, t, reduction=reduction, mode=mode if reduction != "none" else "recompute", grad_tolerance=EPS
        )
        drawn = torch.randint(100, (3,)).tolist()
        loss.backward(torch.linspace(0.5, 1, 37) if reduction == "none" else torch.tensor(0.5))
        one = logitless.sparse_counts()
        assert one.dense_rows < one.rows and one.kept < one.elements
        step = [r[i] for r in results]
        grad_input = np.concatenate([s[0] for s in step]) if sliced else step[0][0]
        np.testing.assert_allclose(grad_input, x.grad.numpy(), rtol=1e-4, atol=1e-6)
        grad_weight = np.concatenate([step[r][1] for r in order])
        np.testing.assert_allclose(grad_weight, w.grad.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(grad_weight.any(1), w.grad.numpy().any(1))
        for s in step:
            assert s[2][:2] == one[:2] and s[3] == drawn
        assert sum(s[2][2] for s in step) == one.kept and sum(s[2][3] for s in step) == one.elements


def _seeded_apart(group):
    torch.manual_seed(dist.get_rank(group))
    x, w, t = peaked_case()
    xi, wi = leaves(x, w, t, balanced(400, 2), dist.get_rank(group), False)
    loss = None
    try:
        loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, grad_tolerance=EPS)
    except ValueError as error:
        return str(error)
    return loss.item()


def test_ranks_must_be_seeded_alike_for_a_sparse_gradient(gloo):
    messages = gloo.all(2, _seeded_apart)
    assert messages[0] == messages[1]
    assert messages[0].startswith("seed: ranks 0 and 1 were given ")


def _options(group):
    rank = dist.get_rank(group)
    cover = backwards(203, 3)
    begin = cover[rank][0]
    x, w, t = case()
    weights = torch.linspace(0.5, 2, 37)

    def step(**options):
        xi, wi = leaves(x, w, t, cover, rank, False)
        loss = vocab_parallel_linear_cross_entropy(
            xi, wi, t, group=group, vocab_start=begin, ignore_index=-100, **options
        )  # fmt: skip
        loss.sum().backward()
        return loss.detach(), xi.grad, wi.grad

    def plain(mode="recompute", **options):
        xi, wi = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = logitless.linear_cross_entropy(xi, wi, t, mode=mode, **options)
        loss.sum().backward()
        return loss.detach(), xi.grad, wi.grad[slice(*cover[rank])]

    for options in (
        {}, {"mode": "recompute"}, {"reduction": "sum", "token_weights": weights}, {"normalizer": 7}, {"reduction": "none"},
        {"token_weights": weights, "normalizer": torch.tensor(3.0)},
        {"reduction": "none", "token_weights": weights, "normalizer": 3},
    ):  # fmt: skip
        for a, b in zip(step(**options), plain(**options)):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
    # The order of [batch, tokens] is kept, as are int32 targets.
    xi, wi = leaves(x[:36], w, t, cover, rank, False)
    shaped = vocab_parallel_linear_cross_entropy(
        xi.view(4, 9, 24), wi, t[:36].view(4, 9).int(), group=group, vocab_start=begin, reduction="none")
    flat = vocab_parallel_linear_cross_entropy(
        xi, wi, t[:36], group=group, vocab_start=begin, reduction="none")
    assert shaped.shape == (4, 9) and torch.equal(shaped.view(-1), flat)
    # A frozen head, frozen hidden states, no gradient at all.
    xi, wi = leaves(x, w, t, cover, rank, False)
    vocab_parallel_linear_cross_entropy(xi, wi.detach(), t, group=group, vocab_start=begin).backward()
    assert wi.grad is None and xi.grad is not None
    first, xi.grad = xi.grad, None
    vocab_parallel_linear_cross_entropy(xi.detach(), wi, t, group=group, vocab_start=begin).backward()
    assert xi.grad is None and wi.grad is not None
    with torch.no_grad():
        assert not vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, vocab_start=begin).requires_grad
    # A retained graph; a limit that only recomputing meets.
    for mode, limit in (("auto", None), ("recompute", None), ("auto", 60_000)):
        xi.grad = None
        loss = vocab_parallel_linear_cross_entropy(
            xi, wi.detach(), t, group=group, vocab_start=begin, mode=mode, workspace_limit=limit)
        loss.backward(retain_graph=True)
        loss.backward()
        torch.testing.assert_close(xi.grad, 2 * first)
    loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, vocab_start=begin, mode="one_pass")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time, but mode=\"one_pass\" made the gradients"):
        loss.backward()
    # Under autocast float32 operands are multiplied as bfloat16.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, vocab_start=begin)
    rounded = vocab_parallel_linear_cross_entropy(
        xi.bfloat16(), wi.bfloat16(), t, group=group, vocab_start=begin)
    assert torch.equal(mixed, rounded)
    # main_grad.
    xi, wi = leaves(x, w, t, cover, rank, False)
    wi.main_grad = torch.ones_like(wi)
    vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, vocab_start=begin, main_grad=True).backward()
    assert wi.grad is None and wi.grad_added_to_main_grad
    torch.testing.assert_close(wi.main_grad - 1, plain()[2], rtol=1e-4, atol=1e-6)
    # NumPy's face over the same group.
    arrays = vocab_parallel_loss_and_gradient(x, w[slice(*cover[rank])], t, group=group,
                                              vocab_start=begin, ignore_index=-100)  # fmt: skip
    assert np.float32(arrays.total) == step(mode="recompute")[0].item()
    return True


def test_every_option_counts(gloo):
    assert gloo.all(3, _options) == [True] * 3


def _edges(group):
    rank = dist.get_rank(group)
    for BT, V, H in ((0, 10, 4), (1, 10, 4), (9, 2, 4), (9, 10, 0), (9, 1, 1)):
        for sliced in (False, True):
            x, w, t = case(BT, V, H, ignored=0)
            xi, wi = leaves(x, w, t, balanced(V, 3), rank, sliced)
            loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, sequence_parallel=sliced)
            loss.backward()
            xf, wf = x.clone().requires_grad_(), w.clone().requires_grad_()
            whole = logitless.linear_cross_entropy(xf, wf, t, mode="recompute")
            whole.backward()
            torch.testing.assert_close(loss, whole)
            part = slice(*balanced_shard(BT, 3, rank)) if sliced else slice(None)
            torch.testing.assert_close(xi.grad, xf.grad[part])
            torch.testing.assert_close(wi.grad, wf.grad[slice(*balanced_shard(V, 3, rank))])
    x, w, t = case()
    t[:] = -100
    xi, wi = leaves(x, w, t, balanced(203, 3), rank, False)
    loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group)
    loss.backward()
    assert loss.item() == 0 and not xi.grad.any() and not wi.grad.any()
    return True


def test_edges_are_defined(gloo):
    assert gloo.all(3, _edges) == [True] * 3


def _same_bits(group):
    x, w, t = case(dtype="bf16")
    rank = dist.get_rank(group)
    found = []
    for repeat in range(3):
        for sliced in (False, True):
            if rank == repeat % 4:
                time.sleep(0.05)
            xi, wi = leaves(x, w, t, balanced(203, 4), rank, sliced)
            loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, sequence_parallel=sliced,
                                                       chunk_tokens=8)  # fmt: skip
            loss.backward()
            found.append((sliced, loss.item(), xi.grad, wi.grad))
    for sliced, loss, gx, gw in found[2:]:
        _, first, fx, fw = found[int(sliced)]
        assert loss == first and torch.equal(gx, fx) and torch.equal(gw, fw)
    return True


def test_every_run_has_the_same_bits_however_late_a_rank_is(gloo):
    assert gloo.all(4, _same_bits) == [True] * 4


# ---- errors -------------------------------------------------------------------------------------


def _call(group, changes):
    rank = dist.get_rank(group)
    x, w, t = case()
    arguments = {"input": x, "linear_weight_shard": w[slice(*balanced(203, 3)[rank])], "target": t,
                 **changes.get(rank, {})}  # fmt: skip
    if isinstance(arguments["input"], str):
        arguments["input"] = x.to(arguments["input"])
    return vocab_parallel_linear_cross_entropy(group=group, **arguments)


def test_an_error_is_the_same_on_every_rank(gloo):
    x, w, t = case()
    other, beyond = t.clone(), t.clone()
    at = int(torch.nonzero(t >= 0)[7])
    other[at] = (t[at] + 1) % 203
    beyond[11] = 203
    same = ", must be the same"
    for changes, kind, text in [
        ({1: {"target": other}}, ValueError, "target: ranks 0 and 1 hold different contents" + same),
        ({1: {"input": x[:30], "target": t[:30]}}, ValueError,
         "target's size: ranks 0 and 1 were given 37 and 30" + same),
        ({2: {"reduction": "sum"}}, ValueError,
         "normalizer: ranks 0 and 2 were given 32.000000 and 1.000000" + same),
        ({1: {"input": x.clone().requires_grad_()}}, ValueError,
         "gradient of input: ranks 0 and 1 were given False and True" + same),
        ({0: {"vocab_start": 0}}, ValueError, "vocab_start: ranks 0 and 1 were given one and none" + same),
        ({1: {"linear_weight_shard": w[:9].half()}}, TypeError,
         "rank 1: input is float32 and linear_weight_shard is float16, must be the same without autocast "
         '(torch.autocast("cpu", dtype=torch.bfloat16) multiplies float32 parameters as bfloat16)'),
        ({2: {"input": x[0]}}, ValueError,
         "rank 2: target: shape is [37], must be input's without its last dimension: []"),
        ({1: {"mode": "store_softmax"}}, NotImplementedError,
         "rank 1: mode 'store_softmax' is not there yet for a vocabulary split over ranks: must be one of "
         "'auto', 'one_pass', 'recompute'"),
        ({1: {"mode": "one_pass", "reduction": "none"}}, ValueError,
         'rank 1: mode is "one_pass" with reduction "none", must be "recompute" or "auto": what each token\'s '
         "loss is multiplied by is not known in the forward"),
        ({0: {"reduction": "max"}}, ValueError, "rank 0: reduction is 'max', must be 'mean', 'sum' or 'none'"),
        ({0: {"input": "meta"}}, ValueError,
         "rank 0: input is on meta, linear_weight_shard on cpu and target on cpu, must all be on the CPU "
         "(meta tensors have no values)"),
        ({2: {"sequence_parallel": True}}, ValueError,
         "rank 2: input: shape is [37, 24], 37 tokens, must be this rank's slice of the 37 tokens of "
         "target: [25, 37)"),
        ({r: {"target": beyond} for r in range(3)}, IndexError,
         "target[11] is 203, must be in [0, V) = [0, 203) where the row counts"),
    ]:  # fmt: skip
        same_error(gloo.run(3, _call, changes), kind, text)
    assert len({r.item() for r in gloo.all(3, _call, {})}) == 1  # and the ranks go on


def _backward_errors(group):
    rank = dist.get_rank(group)
    x, w, t = case()
    xi, wi = leaves(x, w, t, balanced(203, 2), rank, False)
    loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, mode="recompute")
    messages = []
    try:
        (loss * (rank + 1)).backward(retain_graph=True)
    except ValueError as error:
        messages.append(str(error))
    (g,) = torch.autograd.grad(loss, xi, create_graph=True)
    try:
        g.sum().backward()
    except RuntimeError as error:
        messages.append(str(error).split(":")[0])
    try:
        torch.func.grad(lambda a: vocab_parallel_linear_cross_entropy(a, wi, t, group=group))(x)
    except NotImplementedError as error:
        messages.append(str(error))
    return messages


def test_errors_of_the_backward(gloo):
    for found in gloo.all(2, _backward_errors):
        assert found == [
            "token_weights: ranks 0 and 1 hold different contents, must be the same",
            "linear_cross_entropy",
            "vocab_parallel_linear_cross_entropy is not supported inside torch.func transforms",
        ]


class Cut:
    """A transport whose n-th collective raises."""

    def __init__(self, group, verb):
        from logitless.parallel._transport import open_transport

        self.inner, self.verb = open_transport(group), verb
        self.rank, self.size = self.inner.rank, self.inner.size

    def _call(self, verb, *arguments):
        if verb == self.verb:
            raise ConnectionError("the wire is cut")
        return getattr(self.inner, verb)(*arguments)

    def all_gather(self, *a):
        return self._call("all_gather", *a)

    def start_all_reduce_sum(self, *a):
        return self._call("start_all_reduce_sum", *a)

    def start_reduce_scatter_sum(self, *a):
        return self._call("start_reduce_scatter_sum", *a)


def _cut(group, verb):
    x, w, t = case()
    sliced = verb == "start_reduce_scatter_sum"
    xi, wi = leaves(x, w, t, balanced(203, 2), dist.get_rank(group), sliced)
    loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=Cut(group, verb), sequence_parallel=sliced)
    loss.backward()


def test_a_transport_that_raises_is_a_runtime_error_with_its_text(gloo):
    for verb in ("all_gather", "start_all_reduce_sum", "start_reduce_scatter_sum"):
        same_error(gloo.run(2, _cut, verb), RuntimeError, f"{verb}: ConnectionError: the wire is cut")


def test_without_a_group_there_is_a_sentence():
    x, w, t = case()
    with pytest.raises(ValueError, match="^group is None and torch.distributed is not initialised"):
        vocab_parallel_linear_cross_entropy(x, w, t)
    with pytest.raises(TypeError, match="^group is a int, must be a process group or a DeviceMesh"):
        vocab_parallel_linear_cross_entropy(x, w, t, group=3)


# ---- with the rest of torch ---------------------------------------------------------------------


def _dtensor(group, port):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank = dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    x, w, t = case(V=202)  # chunks of 68, 68, 66 rows
    dw = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    xi = x.clone().requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(xi, dw, t)
    loss.backward()
    assert dw.grad.placements == (Shard(0),)
    begin = 68 * rank
    xp, wp = x.clone().requires_grad_(), w[begin : begin + 68].clone().requires_grad_()
    plain = vocab_parallel_linear_cross_entropy(xp, wp, t, group=mesh)
    plain.backward()
    assert torch.equal(loss, plain) and torch.equal(xi.grad, xp.grad)
    assert torch.equal(dw.grad.to_local(), wp.grad)
    few = distribute_tensor(w[:2].clone(), mesh, [Shard(0)])  # the last rank has none
    assert vocab_parallel_linear_cross_entropy(x, few, t % 2, group=group).item() > 0
    messages = []
    for weight, options in (
        (distribute_tensor(w, mesh, [Shard(1)]), {}),
        (distribute_tensor(w, mesh, [Replicate()]), {}),
        (dw, {"vocab_start": 0}),
        (dw, {"group": dist.group.WORLD}),
    ):
        try:
            vocab_parallel_linear_cross_entropy(x, weight, t, **options)
        except ValueError as error:
            messages.append(str(error))
    try:
        vocab_parallel_linear_cross_entropy(dw, dw, t)
    except TypeError as error:
        messages.append(str(error))
    return messages


@needs_new
def test_a_dtensor_says_where_its_shards_are(gloo):
    for found in gloo.all(3, _dtensor, 0):
        assert len(found) == 5
        for message, start in zip(found, (
            "linear_weight_shard is a DTensor placed as (Shard(dim=1),) on a mesh of 1 dimension(s), must be "
            "(Shard(dim=0),) on a mesh of one dimension",
            "linear_weight_shard is a DTensor placed as (Replicate(),) on a mesh",
            "vocab_start is 0 beside a DTensor, which says it itself: must be None",
            "group is not that of linear_weight_shard's mesh",
            "rank 0: input is a DTensor, must be a plain tensor: pass input.to_local()",
        )):  # fmt: skip
            assert message.startswith(start) or message.removeprefix("rank 0: ").startswith(
                start.removeprefix("rank 0: ")
            )


class Head(torch.nn.Module):
    """A head whose weight is split over the ranks of a mesh, and its loss."""

    def __init__(self, weight: torch.Tensor, mesh=None) -> None:
        super().__init__()
        if mesh is not None:
            from torch.distributed.tensor import Shard, distribute_tensor

            weight = distribute_tensor(weight, mesh, [Shard(0)])
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden, target):
        if isinstance(self.weight, torch.distributed.tensor.DTensor):
            return vocab_parallel_linear_cross_entropy(hidden, self.weight, target)
        return logitless.linear_cross_entropy(hidden, self.weight, target, mode="recompute")


class Model(torch.nn.Module):
    def __init__(self, mesh=None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = torch.nn.Linear(16, 16)
        self.head = Head(torch.randn(52, 16) * 0.3, mesh)

    def forward(self, x, target):
        return self.head(torch.tanh(self.body(x)), target)


def _data(replica):
    g = torch.Generator().manual_seed(replica)
    return torch.randn(9, 16, generator=g), torch.randint(0, 52, (9,), generator=g)


def _fsdp2(group):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(mesh["tp"])
    fully_shard(model.head, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    losses = []
    for _ in range(2):
        loss = model(*_data(mesh.get_local_rank("dp")))
        optimiser.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
    return losses, {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@needs_new
@pytest.mark.slow
def test_fsdp2_beside_a_vocabulary_split_by_another_dimension_of_the_mesh(gloo):
    model = Model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        both = [model(*_data(replica)) for replica in range(2)]
        optimiser.zero_grad()
        (sum(both) / 2).backward()
        losses.append([b.item() for b in both])
        optimiser.step()
    for rank, (found, gradients) in enumerate(gloo.all(4, _fsdp2)):
        np.testing.assert_allclose(found, [step[rank // 2] for step in losses], rtol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def _compiled(group):
    x, w, t = case()
    rank = dist.get_rank(group)
    xi, wi = leaves(x, w, t, balanced(203, 2), rank, False)

    def step(x, w, t):
        return vocab_parallel_linear_cross_entropy(torch.tanh(x), w * 2, t, group=group) * 3

    plain = step(xi, wi, t)
    plain.backward()
    expect = xi.grad.clone(), wi.grad.clone()
    xi.grad = wi.grad = None
    loss = torch.compile(step)(xi, wi, t)
    loss.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close((xi.grad, wi.grad), expect)
    torch._dynamo.reset()  # forget the graphs in pieces
    try:
        torch.compile(step, fullgraph=True)(xi, wi, t)
    except Exception as error:
        return type(error).__name__
    return "compiled in one graph"


@pytest.mark.slow
def test_torch_compile_breaks_the_graph_around_it(gloo):
    for found in gloo.all(2, _compiled):
        assert found in ("Unsupported", "InternalTorchDynamoError")


def _dies(rank: int, port: int) -> None:
    join(rank, 3, port, timeout=30)
    x, w, t = case(BT=512, V=6000, H=64)
    for i in range(10_000):
        xi, wi = leaves(x, w, t, balanced(6000, 3), rank, False)
        try:
            loss = vocab_parallel_linear_cross_entropy(xi, wi, t)
            loss.backward()
        except RuntimeError as error:
            print(f"rank {rank}: {error}", flush=True)
            os._exit(3)
        if i == 3:
            print(f"rank {rank} computes", flush=True)
        if rank == 1 and i == 8:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_within_gloo_s_time_out():
    port = free_port()
    source = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_torch_parallel as t; t._dies({{}}, {port})"
    ranks = [subprocess.Popen([sys.executable, "-c", source.format(r)], stdout=subprocess.PIPE, text=True)
             for r in range(3)]  # fmt: skip
    try:
        out = [r.communicate(timeout=300)[0] for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    assert [r.returncode for r in ranks] == [3, -signal.SIGKILL, 3], out
    for rank in (0, 2):
        # "Connection closed by peer", or what it was waiting for has timed out.
        assert f"rank {rank} computes" in out[rank] and "RuntimeError" in out[rank]


class Interrupting(Cut):
    """A transport in whose first such collective Ctrl-C is pressed."""

    def _call(self, verb, *arguments):
        if verb == self.verb:
            self.verb = None
            os.kill(os.getpid(), signal.SIGINT)
        return getattr(self.inner, verb)(*arguments)


def _interrupted(rank: int, port: int, mode: str) -> None:
    join(rank, 2, port)
    x, w, t = case(BT=4096, V=40_000, H=256)
    xi, wi = leaves(x, w, t, balanced(40_000, 2), rank, False)
    group = Interrupting(None, "start_all_reduce_sum") if rank == 1 else None
    try:
        vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, mode=mode, chunk_tokens=512).backward()
    except KeyboardInterrupt as error:
        print(f"interrupted: {error}", flush=True)
    # The ranks are still in step.
    print(vocab_parallel_linear_cross_entropy(xi[:9], wi, t[:9]).item(), flush=True)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_pass", "recompute"])
def test_ctrl_c_on_one_rank_interrupts_all_of_them(mode):
    port = free_port()
    source = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_torch_parallel as t; t._interrupted({{}}, {port}, {mode!r})"
    # What runs in the background has inherited a SIGINT that is ignored.
    ranks = [subprocess.Popen([sys.executable, "-c", source.format(r)], stdout=subprocess.PIPE, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
             for r in range(2)]  # fmt: skip
    try:
        out = [r.communicate(timeout=900)[0].splitlines() for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    assert [r.returncode for r in ranks] == [0, 0]
    assert out[0][0].startswith("interrupted: rank 1: ") and out[1][0].startswith("interrupted:")
    assert out[0][1] == out[1][1]


# ---- beside Megatron-core -----------------------------------------------------------------------


def _megatron(group, tensor_parallel):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    try:
        group = parallel_state.get_tensor_model_parallel_group()
        rank = dist.get_rank(group)
        found = []
        for dtype in TYPES:
            x, w, t = case(BT=64, V=512, H=48, dtype=dtype, ignored=0)
            begin, end = padded_shard(512, tensor_parallel, rank)
            for ours in (True, False):
                xi, wi = x.clone().requires_grad_(), w[begin:end].clone().requires_grad_()
                if ours:
                    loss = vocab_parallel_linear_cross_entropy(xi, wi, t, group=group, reduction="none")
                else:
                    # What ColumnParallelLinear does; in fp32, so that logits are not rounded here either.
                    logits = (xi.float() @ wi.float().T).unsqueeze(1)
                    loss = vocab_parallel_cross_entropy(logits, t.unsqueeze(1)).squeeze(1)
                loss.backward(torch.linspace(0.1, 1, 64))
                grad = xi.grad.float()
                if not ours:
                    dist.all_reduce(grad, group=group)
                found.append((loss.detach().numpy(), grad.numpy(), wi.grad.float().numpy()))
        return found
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None,
                    reason="megatron-core is not installed (pip install --no-deps megatron-core==0.16.1)")  # fmt: skip
@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_beside_megatron_s_vocab_parallel_cross_entropy(gloo, tensor_parallel):
    results = gloo.all(4, _megatron, tensor_parallel)[:tensor_parallel]
    for i, dtype in enumerate(TYPES):
        x, w, t = case(BT=64, V=512, H=48, dtype=dtype, ignored=0)
        coefficient = torch.linspace(0.1, 1, 64).double().numpy()
        e = expected(x.double().numpy(), w.double().numpy(), t.numpy(), coefficient, multiply=dtype,
                     output=dtype)  # fmt: skip
        ours, theirs = ([r[2 * i + who] for r in results] for who in (0, 1))
        np.testing.assert_allclose(ours[0][0], theirs[0][0], rtol=0, atol=2e-5)
        assert_within("grad_input", ours[0][1], e.grad_input, e.allowed_grad_input)
        whole = np.concatenate([r[2] for r in ours])
        assert_within("grad_weight", whole, e.grad_weight, e.allowed_grad_weight)
        for name, own, other, allowed in (
            ("grad_input", ours[0][1], theirs[0][1], e.allowed_grad_input),
            ("grad_weight", whole, np.concatenate([r[2] for r in theirs]), e.allowed_grad_weight),
        ):  # fmt: skip
            # Theirs rounds each rank's part of grad_input.
            assert_within(name, own, np.float64(other), (2 + tensor_parallel) * allowed)


# ---- the example --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_prints_the_same_losses_in_every_way():
    def losses(ranks, *options):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
             "--master-port", str(free_port()), EXAMPLES / "split_head.py", *options],
            capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
        assert len(lines) == 5
        return [float(line[3]) for line in lines]

    plain = losses(2)
    assert plain[4] < plain[0]
    ways = [losses(3, "--sequence")] + ([losses(4, "--mesh")] if NEW else [])
    for way in ways:
        np.testing.assert_allclose(way, plain, atol=2e-4)
