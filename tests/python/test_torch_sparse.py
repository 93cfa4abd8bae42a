# SPDX-License-Identifier: Apache-2.0
"""The sparse gradient in torch: where its seeds come from, and that every way of training takes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sparse import off_by

import logitless
import logitless.numpy as ln
from logitless import linear_cross_entropy

EPS = 2.0**-6
MODES = ["auto", "one_pass", "recompute"]


def case(BT=20, V=600, H=48, dtype=torch.float32, ignored=2):
    g = torch.Generator().manual_seed(4)
    x, w = torch.randn(BT, H, generator=g), torch.randn(V, H, generator=g)
    t = (x @ w.T).argmax(1)
    t[:ignored] = -100
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), t


def gradients(x, w, t, function=linear_cross_entropy, **arguments):
    x.grad = w.grad = None
    arguments = {"grad_tolerance": EPS, **arguments}
    function(x, w, t, **arguments).backward()
    return x.grad, w.grad


def same(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b))


# ---- seeds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_torch_s_generator_is_drawn_from_once_for_each_call_with_gradients(mode):
    x, w, t = case()
    torch.manual_seed(11)
    first, second = (gradients(x, w, t, mode=mode) for _ in range(2))
    assert not same(first, second)
    torch.manual_seed(11)
    assert same(gradients(x, w, t, mode=mode), first)
    torch.manual_seed(11)
    seed = torch.randint(2**63 - 1, ())
    assert same(gradients(x, w, t, mode=mode, seed=seed), first)
    assert same(gradients(x, w, t, mode=mode, seed=int(seed)), first)
    after = torch.get_rng_state()
    torch.manual_seed(11)
    torch.randint(2**63 - 1, ())
    assert torch.equal(after, torch.get_rng_state())


def test_nothing_is_drawn_where_nothing_is_chosen():
    x, w, t = case()
    before = torch.get_rng_state()
    gradients(x, w, t, grad_tolerance=0.0)
    gradients(x, w, t, seed=5)
    linear_cross_entropy(x.detach(), w.detach(), t, grad_tolerance=EPS)
    with torch.no_grad():
        linear_cross_entropy(x, w, t, grad_tolerance=EPS)
    linear_cross_entropy(x, w, t, grad_tolerance=0.0, seed=5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("mode", MODES)
def test_it_is_that_of_the_arrays_with_the_same_seed(mode):
    x, w, t = case()
    found = gradients(x, w, t, mode=mode, seed=2**64 - 3)
    counts = logitless.sparse_counts()
    value = ln.loss_and_gradient(
        x.detach().numpy(), w.detach().numpy(), t.numpy(), ignore_index=-100, grad_tolerance=EPS, seed=2**64 - 3,
    )  # fmt: skip
    np.testing.assert_allclose(found[0].numpy(), value.grad_input, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found[1].numpy(), value.grad_weight, rtol=1e-5, atol=1e-8)
    assert counts == logitless.sparse_counts() and counts.rows == 18 and counts.dense_rows < 9


def test_the_loss_keeps_its_bits_and_the_mean_over_seeds_is_the_exact_gradient():
    x, w, t = case()
    assert linear_cross_entropy(x, w, t) == linear_cross_entropy(x, w, t, grad_tolerance=0.25)
    exact = gradients(x.double().float().detach().requires_grad_(), w, t, grad_tolerance=0.0)
    torch.manual_seed(3)
    made = [gradients(x, w, t, grad_tolerance=0.25) for _ in range(64)]
    for i in range(2):
        values = np.array([m[i].double().numpy() for m in made])
        assert off_by(values, exact[i].double().numpy()) < 5


def test_a_retained_graph_keeps_its_choice():
    x, w, t = case()
    for mode in ("auto", "recompute"):
        loss = linear_cross_entropy(x, w, t, mode=mode, grad_tolerance=EPS)
        x.grad = None
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        x.grad = None
        loss.backward()
        torch.testing.assert_close(x.grad, once, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_makes_the_same_choice_again(mode, reentrant):
    from torch.utils.checkpoint import checkpoint

    x, w, t = case()
    f = lambda a, b, t, **k: linear_cross_entropy(a * 2, b, t, mode=mode, **k)  # noqa: E731
    again = lambda *a, **k: checkpoint(lambda *b: f(*b, **k), *a, use_reentrant=reentrant)  # noqa: E731
    torch.manual_seed(21)
    plain = gradients(x, w, t, f)
    torch.manual_seed(21)
    recomputed = gradients(x, w, t, again)
    assert same(plain, recomputed)


# ---- every way of training ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_and_autocast(mode, dtype):
    x, w, t = case(dtype=dtype)
    exact = gradients(x, w, t, grad_tolerance=0.0)
    for found, value in zip(gradients(x, w, t, mode=mode, grad_tolerance=2.0**-8, seed=1), exact):
        assert found.dtype == dtype and not torch.equal(found, value)
        assert (found.double() - value.double()).norm() <= 0.02 * value.double().norm()
    if dtype is torch.float32:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = gradients(x, w, t, mode=mode, grad_tolerance=2.0**-8, seed=1)
        for one, value in zip(found, exact):
            assert one.dtype == torch.float32
            assert (one - value).norm() <= 0.03 * value.norm()


def test_only_what_requires_a_gradient_gets_one():
    x, w, t = case()
    both = gradients(x, w, t, seed=1)
    for i, frozen in enumerate((w, x)):
        frozen.requires_grad_(False)
        for mode in MODES:
            found = gradients(x, w, t, seed=1, mode=mode)
            torch.testing.assert_close(found[i], both[i], rtol=1e-5, atol=1e-8)
            assert found[1 - i] is None
        frozen.requires_grad_(True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_weights_and_logsumexp(reduction):
    x, w, t = case()
    weights = torch.rand(20)

    def total(x, w, t, **arguments):
        loss, lse = linear_cross_entropy(
            x, w, t, reduction=reduction, token_weights=weights, return_logsumexp=True, **arguments
        )
        return loss.sum() + 1e-2 * lse.square().sum()

    exact = gradients(x, w, t, total, grad_tolerance=0.0)
    modes = ("auto", "recompute") if reduction == "none" else MODES
    for mode in modes:
        for found, value in zip(gradients(x, w, t, total, grad_tolerance=2.0**-8, mode=mode), exact):
            assert not torch.equal(found, value)
            assert (found - value).norm() <= 0.03 * value.norm()


def test_a_limit_is_kept_or_refused_in_the_forward():
    x, w, t = case(64, 4000, 128, torch.bfloat16)
    loss = linear_cross_entropy(x, w, t, grad_tolerance=EPS, workspace_limit=8 << 20)
    assert loss.grad_fn.settings[2] == "one_pass"
    for mode in MODES:
        with pytest.raises(ValueError, match="workspace_limit_bytes.*the least possible workspace is"):
            linear_cross_entropy(x, w, t, grad_tolerance=EPS, workspace_limit=512 << 10, mode=mode)


def test_main_grad_is_added_to():
    x, w, t = case()
    value = gradients(x, w, t, seed=6, mode="recompute")[1]
    w.main_grad = torch.ones(w.shape)
    w.grad = None
    linear_cross_entropy(x, w, t, main_grad=True, grad_tolerance=EPS, seed=6).backward()
    assert w.grad is None
    torch.testing.assert_close(w.main_grad - 1, value, rtol=1e-4, atol=1e-6)


def test_the_module_takes_a_tolerance_and_its_forward_a_seed():
    x, w, t = case()
    loss = logitless.LinearCrossEntropyLoss(48, 600, grad_tolerance=EPS)
    loss.linear.weight = torch.nn.Parameter(w.detach().clone())
    loss(x, t, seed=8).backward()
    assert same((x.grad, loss.linear.weight.grad), gradients(x, w, t, seed=8))
    with pytest.raises(ValueError, match="grad_tolerance is 2, must be 0"):
        logitless.LinearCrossEntropyLoss(48, 600, grad_tolerance=2)


def test_counters_are_those_of_this_thread():
    import threading

    x, w, t = case()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(logitless.sparse_counts()))
    gradients(x, w, t)
    thread.start()
    thread.join()
    assert seen == [None] and logitless.sparse_counts().rows == 18


def test_transforms_of_torch_func():
    x, w, t = case()
    f = lambda a, b: linear_cross_entropy(a, b, t, grad_tolerance=EPS, seed=2)  # noqa: E731
    found = torch.func.grad(f, argnums=(0, 1))(x.detach(), w.detach())
    for a, b in zip(found, gradients(x, w, t, seed=2)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


# ---- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode):
    x, w, t = case()
    torch.library.opcheck(
        torch.ops.logitless.linear_cross_entropy.default,
        (x, w, t, None, None, "mean", -100, mode, False, True, True, 0, EPS, torch.tensor(3)),
    )
    with torch.no_grad():
        _, _, _, top, sums, *_ = torch.ops.logitless.linear_cross_entropy.default(
            x, w, t, None, None, "mean", -100, "recompute", False, False, False, 0, 0.0, None
        )
    torch.library.opcheck(
        torch.ops.logitless.linear_cross_entropy_backward.default,
        (torch.tensor(1.0), None, None, x.detach(), w.detach(), t, None, None, "mean", -100, False,
         top, sums, None, True, True, 0, EPS, torch.tensor(3)),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_in_one_graph_it_draws_once_and_computes_the_same(mode, dynamic):
    torch._dynamo.reset()

    def f(x, w, t, seed):
        return linear_cross_entropy(x, w, t, mode=mode, grad_tolerance=EPS, seed=seed)

    def draws(x, w, t, seed):
        return f(x, w, t, None)

    x, w, t = case()
    given = torch.compile(f, fullgraph=True, dynamic=dynamic)
    for number in (5, 6):
        seed = torch.tensor(number)
        eager = gradients(x, w, t, lambda *a, grad_tolerance, seed=seed: f(*a, seed))
        graph = gradients(x, w, t, lambda *a, grad_tolerance, seed=seed: given(*a, seed))
        for a, b in zip(graph, eager):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    drawn = torch.compile(draws, fullgraph=True, dynamic=dynamic)
    torch.manual_seed(1)
    made = [gradients(x, w, t, lambda *a, grad_tolerance: drawn(*a, None)) for _ in range(3)]
    assert not same(made[0], made[1])
    torch.manual_seed(1)
    assert same(gradients(x, w, t, lambda *a, grad_tolerance: drawn(*a, None)), made[0])
    exact = gradients(x, w, t, grad_tolerance=0.0)
    for found in made:
        for a, b in zip(found, exact):
            assert (a - b).norm() <= 8 * EPS * b.norm()
    module = logitless.LinearCrossEntropyLoss(48, 600, mode=mode, grad_tolerance=EPS)
    w = module.linear.weight = torch.nn.Parameter(w.detach())
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for rows in (20, 11):
        value, found = (
            gradients(x, w, t, lambda x, w, t, grad_tolerance, m=m, r=rows: m(x[:r], t[:r], seed=seed))
            for m in (module, compiled)
        )
        for a, b in zip(found, value):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "grad_tolerance is 0.7, must be 0, or between 2\\^-16 and 0.5", {"grad_tolerance": 0.7}),
        (TypeError, "grad_tolerance is a str, must be a number", {"grad_tolerance": "0.1"}),
        (ValueError, 'grad_tolerance is 0.015625 with mode "store_softmax", must be 0', {"mode": "store_softmax"}),
        (TypeError, "seed is a float, must be an int", {"seed": 1.0}),
        (ValueError, "seed is -1, must be between 0", {"seed": -1}),
        (TypeError, "seed: dtype is float32, must be int64", {"seed": torch.tensor(1.0)}),
        (ValueError, r"seed: shape is \[2\], must be one number", {"seed": torch.tensor([1, 2])}),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, message, change):
    x, w, t = case()
    with pytest.raises(error, match=message):
        linear_cross_entropy(x, w, t, **{"grad_tolerance": EPS, **change})


# ---- Hugging Face -------------------------------------------------------------------------------


def test_a_patched_model_takes_it():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import logitless.hf as hf

    torch.manual_seed(1)
    sizes = dict(
        vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    with torch.no_grad():
        model.lm_head.weight.mul_(60)  # a softmax that is not flat
    ids = torch.randint(0, 199, (2, 17))
    made = []
    for eps in (0.0, 2.0**-7):
        hf.patch(model, grad_tolerance=eps)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        made.append((loss.detach(), model.lm_head.weight.grad.clone()))
    assert made[0][0] == made[1][0] and not torch.equal(made[0][1], made[1][1])
    assert (made[0][1] - made[1][1]).norm() <= 0.05 * made[0][1].norm()
    assert logitless.sparse_counts().rows == 32
    x, w = torch.randn(30, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    t = (x @ w.T).argmax(1)
    seed = torch.tensor(3)
    hf._PerToken.apply(x, w, t, False, EPS, seed)[0].sum().backward()
    assert same((x.grad, w.grad), gradients(x, w, t, seed=seed, reduction="sum", mode="recompute"))
    with pytest.raises(ValueError, match="grad_tolerance is 3, must be 0"):
        hf.patch(model, grad_tolerance=3)
