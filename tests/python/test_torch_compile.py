# SPDX-License-Identifier: Apache-2.0
"""The operators as torch.compile and torch.library see them."""

from __future__ import annotations

import pytest
import torch

from logitless import _torch_ops, linear_cross_entropy

MODES = ["auto", "one_pass", "recompute", "store_softmax"]


def case(BT=13, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(BT, 64, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(301, 64, generator=g) * 0.3).to(dtype).requires_grad_()
    t = torch.randint(0, 301, (BT,), generator=g)
    t[1] = -100
    return x, w, t


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_opcheck_of_the_forward(mode, dtype):
    x, w, t = case(dtype=dtype)
    weights, normalizer = torch.rand(13), torch.tensor(3.0)
    for more in ((None, None, "mean"), (weights, normalizer, "sum"), (None, None, "none")):
        if mode == "one_pass" and more[2] == "none":
            continue
        torch.library.opcheck(
            torch.ops.logitless.linear_cross_entropy.default,
            (x, w, t, *more, -100, "recompute" if more[2] == "none" else mode, False, True, True, 0,
             0.0, None),
        )


@pytest.mark.parametrize("mode", ["recompute", "store_softmax"])
def test_opcheck_of_the_backward(mode):
    x, w, t = (a.detach() for a in case())
    softmax = torch.rand(13, 301) if mode == "store_softmax" else None
    torch.library.opcheck(
        torch.ops.logitless.linear_cross_entropy_backward.default,
        (torch.tensor(1.0), None, torch.rand(13), x, w, t, None, None, "mean", -100, False,
         torch.rand(13), torch.rand(13) + 300, softmax, True, True, 0, 0.0, None),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_in_one_graph_it_computes_the_same(mode, dynamic):
    torch._dynamo.reset()
    f = lambda x, w, t: linear_cross_entropy(x * 2, w, t, mode=mode) * 3  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    x, w, t = case(40)
    for BT in (13, 9, 40):
        found = []
        for function in (f, compiled):
            x.grad = w.grad = None
            loss = function(x[:BT], w, t[:BT])
            loss.backward()
            found.append((loss.detach(), x.grad, w.grad))
        for eager, graph in zip(*found):
            torch.testing.assert_close(graph, eager, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_compiled_under_autocast_and_with_logsumexp():
    def f(x, w, t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, lse = linear_cross_entropy(x, w, t, return_logsumexp=True)
        return loss + 1e-3 * lse.square().mean()

    x, w, t = case()
    found = []
    for function in (f, torch.compile(f, fullgraph=True)):
        x.grad = w.grad = None
        loss = function(x, w, t)
        loss.backward()
        found.append((loss.detach(), x.grad, w.grad))
    for eager, graph in zip(*found):
        torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_main_grad_is_refused_in_a_graph():
    x, w, t = case()
    w.main_grad = torch.zeros(301, 64)
    f = torch.compile(lambda: linear_cross_entropy(x, w, t, main_grad=True), fullgraph=True)
    # torch 2.4 hides the sentence.
    with pytest.raises(Exception, match="main_grad is not supported under torch.compile|Observed exception"):
        f()


def test_what_auto_means_while_tracing_fits_what_it_means_in_eager():
    for V, H in ((1000, 64), (32000, 2048), (128256, 4096), (151936, 1024)):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            traced = _torch_ops.settled_mode("auto", V, H, dtype, False, True, True, 0)
            for BT in (1, 512, 8192):
                eager = _torch_ops.fits_one_pass(BT, V, H, dtype, False, True, True, 0)
                assert not (traced == "one_pass" and not eager), (V, H, dtype, BT)
    assert _torch_ops.settled_mode("auto", 32000, 2048, torch.bfloat16, False, True, True, 0) == "one_pass"
