# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from judge import assert_within, expected, spread

import logitless
from logitless import _torch_ops, linear_cross_entropy

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
MODES = ["auto", "one_pass", "recompute", "store_softmax"]
REDUCTIONS = ["mean", "sum", "none"]
COMBINATIONS = [(m, r) for m in MODES for r in REDUCTIONS if (m, r) != ("one_pass", "none")]


def case(BT=13, V=301, H=64, dtype="f32", ignored=2, seed=0, shape=None, requires_grad=True):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(BT, H, generator=g).to(DTYPES[dtype])
    w = (torch.randn(V, H, generator=g) * 0.3).to(DTYPES[dtype])
    t = torch.randint(0, V, (BT,), generator=g)
    t[torch.randperm(BT, generator=g)[:ignored]] = -100
    if shape is not None:
        x, t = x.reshape(*shape, H), t.reshape(shape)
    return x.requires_grad_(requires_grad), w.requires_grad_(requires_grad), t


def settled(loss: torch.Tensor) -> str:
    return loss.grad_fn.settings[2]


def judge(x, w, t, dtype, coefficient, loss=None, ignore_index=-100, output=None, **kwargs):
    """The gradients in x.grad and w.grad (and a loss per token) against float64."""
    H = x.shape[-1]
    coefficient = np.broadcast_to(np.asarray(coefficient, np.float64), (t.numel(),))
    e = expected(
        x.detach().double().reshape(-1, H).numpy(), w.detach().double().numpy(),
        t.reshape(-1).numpy(), coefficient, multiply=dtype, output=output or dtype,
        ignore_index=ignore_index, **kwargs,
    )  # fmt: skip
    if loss is not None:
        assert_within("loss", loss.detach().reshape(-1).numpy(), e.loss, e.allowed_loss)
    for name, tensor, value, allowed in (
        ("grad_input", x, e.grad_input, e.allowed_grad_input),
        ("grad_weight", w, e.grad_weight, e.allowed_grad_weight),
    ):
        if tensor.requires_grad:
            assert tensor.grad is not None and tensor.grad.dtype == tensor.dtype
            found = tensor.grad.double().reshape(-1, H).numpy()
            assert_within(name, found, value, allowed)
    return e


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "reduction"), COMBINATIONS)
def test_loss_and_gradients_agree_with_float64(dtype, mode, reduction):
    x, w, t = case(26, dtype=dtype, shape=(2, 13))
    loss = linear_cross_entropy(x, w, t, reduction=reduction, mode=mode)
    assert loss.dtype == torch.float32 and loss.shape == (t.shape if reduction == "none" else ())
    upstream = torch.rand(loss.shape) + 0.5
    loss.backward(upstream)
    count = int((t != -100).sum())
    scale = upstream.double().reshape(-1).numpy() / (count if reduction == "mean" else 1)
    per_token = linear_cross_entropy(x, w, t, reduction="none")
    e = judge(x, w, t, dtype, scale, per_token)
    if reduction != "none":
        total = e.loss.sum() / (count if reduction == "mean" else 1)
        assert abs(loss.item() - total) <= e.allowed_loss.sum() + 2**-23 * abs(total)


def test_fp32_is_within_1e_5_of_float64():
    x, w, t = case(128, 2000, 256)
    linear_cross_entropy(x, w, t).backward()
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    F.cross_entropy(xd @ wd.T, t).backward()
    for a, b in ((x, xd), (w, wd)):
        assert (a.grad - b.grad).abs().max() <= 1e-5 * b.grad.abs().max()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_error_is_at_most_twice_that_of_torch_in_the_same_type(dtype):
    x, w, t = case(64, 1500, 128, dtype)
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    F.cross_entropy(xd @ wd.T, t).backward()
    linear_cross_entropy(x, w, t).backward()
    ours = x.grad, w.grad
    x.grad = w.grad = None
    F.cross_entropy((x @ w.T).float(), t).backward()
    for mine, eager, exact in ((ours[0], x.grad, xd.grad), (ours[1], w.grad, wd.grad)):
        error = (mine.double() - exact).norm() / exact.norm()
        assert error <= 2 * (eager.double() - exact).norm() / exact.norm() + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    BT=st.integers(0, 40), V=st.integers(1, 200), H=st.integers(1, 70),
    dtype=st.sampled_from(list(DTYPES)), mode=st.sampled_from(MODES),
    reduction=st.sampled_from(["mean", "sum", "none"]), ignored=st.integers(0, 40),
    layout=st.sampled_from(["plain", "transposed", "gaps", "expanded"]),
    int32=st.booleans(), seed=st.integers(0, 5),
)  # fmt: skip
def test_any_shape_type_layout_and_mode(BT, V, H, dtype, mode, reduction, ignored, layout, int32, seed):
    if mode == "one_pass" and reduction == "none":
        mode = "recompute"
    x, w, t = case(BT, V, H, dtype, min(ignored, BT), seed, requires_grad=False)
    if layout == "transposed":
        x, w = x.T.contiguous().T, w.T.contiguous().T
    elif layout == "gaps":
        x = torch.cat([x, x], 1)[:, :H]
        w = torch.stack([w, w], 2)[:, :, 0]
    elif layout == "expanded" and BT:
        x = x[:1].expand(BT, H)
    if int32:
        t = t.int()
    x.requires_grad_()
    w.requires_grad_()
    loss = linear_cross_entropy(x, w, t, reduction=reduction, mode=mode)
    loss.sum().backward()
    count = max(1, int((t != -100).sum()))
    scale = 1 / count if reduction == "mean" else 1.0
    per_token = loss if reduction == "none" else None
    judge(x, w, t, dtype, scale, per_token, equal_tokens=layout == "expanded")


def test_one_token_without_a_batch_dimension():
    x, w, t = case(1, ignored=0)
    flat = x.detach()[0].requires_grad_()
    loss = linear_cross_entropy(flat, w, t[0], reduction="none")
    assert loss.shape == ()
    loss.backward()
    assert flat.grad.shape == (64,)


# ---- against torch's own function and module ----------------------------------------------------

has_torch_s = hasattr(torch.nn, "LinearCrossEntropyLoss")
needs_torch_s = pytest.mark.skipif(
    not has_torch_s, reason=f"torch {torch.__version__} has no linear_cross_entropy of its own"
)


@needs_torch_s
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_module_loads_torch_s_state_and_agrees(reduction):
    import inspect

    theirs = torch.nn.LinearCrossEntropyLoss(64, 301, reduction=reduction)
    ours = logitless.LinearCrossEntropyLoss(64, 301, reduction=reduction)
    assert set(ours.state_dict()) == set(theirs.state_dict()) == {"linear.weight"}
    ours.load_state_dict(theirs.state_dict())
    x, _, t = case()
    a, b = ours(x, t), theirs(x, t)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for loss, module in ((a, ours), (b, theirs)):
        x.grad = None
        loss.sum().backward()
        module.kept = (x.grad, module.linear.weight.grad)
    for mine, their in zip(ours.kept, theirs.kept):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-6)
    for function, reference in (
        (linear_cross_entropy, F.linear_cross_entropy),
        (logitless.LinearCrossEntropyLoss, torch.nn.LinearCrossEntropyLoss),
    ):
        names = list(inspect.signature(reference).parameters)
        assert [n for n in inspect.signature(function).parameters if n in names] == names


@needs_torch_s
def test_ignore_index_and_int_targets_mean_what_torch_means():
    x, w, t = case(ignored=0)
    t[3] = 7
    a = linear_cross_entropy(x, w, t, ignore_index=7, reduction="none")
    b = F.linear_cross_entropy(x, w, t, ignore_index=7, reduction="none")
    assert a[t == 7].eq(0).all()
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_tied_embedding_gets_both_gradients():
    embedding = torch.nn.Embedding(50, 16)
    loss = logitless.LinearCrossEntropyLoss(16, 50)
    loss.linear.weight = embedding.weight
    ids = torch.tensor([1, 2, 3, 1])
    loss(embedding(ids[:-1]), ids[1:]).backward()
    mine, embedding.weight.grad = embedding.weight.grad, None
    F.cross_entropy(embedding(ids[:-1]) @ embedding.weight.T, ids[1:]).backward()
    torch.testing.assert_close(mine, embedding.weight.grad, rtol=1e-4, atol=1e-6)


# ---- what is wanted, what counts ----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_gradients_only_for_what_requires_them(mode, frozen, monkeypatch):
    asked = []
    for name in ("gradient", "loss_and_gradient"):
        real = getattr(_torch_ops._core, name)

        def spy(*a, real=real, name=name):
            asked.append((name, a[12] is not None, a[14] is not None) if name == "gradient"
                         else (name, a[13] is not None, a[15] is not None))  # fmt: skip
            return real(*a)

        monkeypatch.setattr(_torch_ops._core, name, spy)
    x, w, t = case()
    (x if frozen == "input" else w).requires_grad_(False)
    linear_cross_entropy(x, w, t, mode=mode).backward()
    assert [a[1:] for a in asked] == [(frozen != "input", frozen != "weight")]
    judge(x, w, t, "f32", 1 / 11)


@pytest.mark.parametrize("mode", MODES)
def test_ignored_tokens_poison_nothing(mode):
    x, w, t = case()
    with torch.no_grad():
        x[t == -100] = float("nan")
    linear_cross_entropy(x, w, t, mode=mode).backward()
    assert x.grad[t == -100].eq(0).all()
    assert torch.isfinite(w.grad).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_valid_is_a_loss_of_zero_with_its_graph(mode, reduction):
    x, w, t = case()
    loss = linear_cross_entropy(x, w, torch.full_like(t, -100), mode=mode, reduction=reduction)
    assert loss.item() == 0 and loss.requires_grad
    loss.backward()
    assert x.grad.eq(0).all() and w.grad.eq(0).all()
    empty = linear_cross_entropy(x[:0], w, t[:0], mode=mode, reduction=reduction)
    assert empty.item() == 0
    empty.backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_target_outside_the_vocabulary_is_an_index_error(mode):
    x, w, t = case(ignored=0)
    t[5] = 301
    with pytest.raises(IndexError, match=r"target\[5\] is 301, must be in \[0, V\) = \[0, 301\)"):
        linear_cross_entropy(x, w, t, mode=mode)
    t[5] = -1
    with pytest.raises(IndexError, match=r"target\[5\] is -1"):
        linear_cross_entropy(x, w, t, mode=mode, reduction="none" if mode == "recompute" else "mean")


@pytest.mark.parametrize(("mode", "reduction"), COMBINATIONS)
def test_token_weights_and_a_normalizer(mode, reduction):
    x, w, t = case()
    weights = torch.rand(13) - 0.3
    for normalizer in (None, 5.0, torch.tensor(5)):
        x.grad = w.grad = None
        loss = linear_cross_entropy(
            x, w, t, mode=mode, reduction=reduction, token_weights=weights, normalizer=normalizer
        )
        loss.sum().backward()
        divisor = 5.0 if normalizer is not None else (11.0 if reduction == "mean" else 1.0)
        e = judge(x, w, t, "f32", weights.double().numpy() / divisor)
        weighted = (weights.double().numpy() / divisor) * e.loss
        assert loss.sum().item() == pytest.approx(weighted.sum(), abs=e.allowed_loss.sum())


# ---- logsumexp ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_z_loss_through_logsumexp(mode, dtype):
    x, w, t = case(dtype=dtype)
    loss, lse = linear_cross_entropy(x, w, t, mode=mode, return_logsumexp=True)
    assert lse.shape == t.shape and lse.dtype == torch.float32 and lse[t == -100].eq(0).all()
    (loss + 1e-2 * lse.square().sum()).backward()
    exact = torch.logsumexp(x.detach().double() @ w.detach().double().T, 1)
    e = judge(x, w, t, dtype, 1 / 11, coefficient_lse=2e-2 * exact.numpy())
    assert_within("logsumexp", lse.detach().numpy(), e.logsumexp, e.allowed_loss + 1e-6)


def test_logsumexp_alone_has_a_gradient():
    x, w, t = case()
    _, lse = linear_cross_entropy(x, w, t, mode="one_pass", return_logsumexp=True)
    lse.sum().backward()
    judge(x, w, t, "f32", 0.0, coefficient_lse=np.ones(13))


# ---- mixed precision ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_autocast_multiplies_fp32_parameters_as_bf16_without_a_copy(mode):
    x, w, t = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, t, mode=mode)
    loss.backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    rounded = x.detach().bfloat16().float(), w.detach().bfloat16().float()
    for tensor, value in zip((x, w), rounded):
        tensor.data = value
    judge(x, w, t, "bf16", 1 / 11, output="f32")


def test_autocast_takes_a_bf16_input_beside_fp32_parameters():
    x, w, t = case()
    h = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(h, w, t, mode="recompute")
    loss.backward()
    assert h.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert linear_cross_entropy(x, w, t).item() == pytest.approx(loss.item(), rel=1e-2)


def test_mixed_types_without_autocast_are_a_type_error_that_names_both():
    x, w, t = case()
    with pytest.raises(TypeError, match="input is bfloat16 and linear_weight is float32"):
        linear_cross_entropy(x.bfloat16(), w, t)


def test_a_loss_scale_saves_what_fp16_would_lose():
    x, w, t = case(64, dtype="f16", ignored=0)
    scale = 2.0**14
    tiny = torch.full((64,), 2.0**-16)
    for mode in ("one_pass", "recompute"):
        x.grad = w.grad = None
        loss = linear_cross_entropy(x, w, t, mode=mode, reduction="sum", token_weights=tiny)
        (loss * scale).backward()
        judge(x, w, t, "f16", tiny.numpy() * scale)


# ---- autograd -----------------------------------------------------------------------------------


def test_a_second_backward_raises_as_torch_does():
    for mode in ("one_pass", "recompute"):
        x, w, t = case()
        loss = linear_cross_entropy(x, w, t, mode=mode)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    loss = linear_cross_entropy(x, w, t, mode="one_pass")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='a second time, but mode="one_pass"'):
        loss.backward()
    x.grad = None
    loss = linear_cross_entropy(x, w, t, mode="recompute")
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_a_graph_that_is_retained_may_be_used_again_unless_one_pass_was_asked_for():
    x, w, t = case(64, 4000, 128, "bf16")
    loss = linear_cross_entropy(x, w, t)
    assert settled(loss) == "one_pass"
    (gx,) = torch.autograd.grad(loss, x, retain_graph=True)
    (gw,) = torch.autograd.grad(loss * 2, w)
    x.grad, w.grad = gx, gw / 2
    judge(x, w, t, "bf16", 1 / 62)


@pytest.mark.parametrize("factor", [1, 2])
def test_what_is_done_to_a_gradient_does_not_spoil_a_graph_that_is_retained(factor):
    x, w, t = case(64, 4000, 128, "bf16")
    loss = linear_cross_entropy(x, w, t)
    assert settled(loss) == "one_pass"
    (loss * factor).backward(retain_graph=True)
    for tensor in (x, w):
        tensor.grad.zero_()  # as zero_grad(set_to_none=False), clipping and averaging do, in place
    (loss * factor).backward()
    judge(x, w, t, "bf16", factor / 62)


@pytest.mark.parametrize("mode", MODES)
def test_double_backward_is_refused_in_words(mode):
    x, w, t = case()
    (g,) = torch.autograd.grad(linear_cross_entropy(x, w, t, mode=mode), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        g.sum().backward()


def test_the_gradient_handed_over_is_the_one_held():
    x, w, t = case()
    loss = linear_cross_entropy(x, w, t, mode="one_pass")
    held = {k.data_ptr() for k in loss.grad_fn.saved_tensors if k is not None}
    loss.backward()
    assert w.grad.data_ptr() in held and x.grad.data_ptr() in held


def test_no_copy_of_a_contiguous_operand(monkeypatch):
    seen = []
    real = _torch_ops._core.forward
    monkeypatch.setattr(_torch_ops._core, "forward", lambda *a: (seen.append(a), real(*a))[1])
    x, w, t = case(26, shape=(2, 13))
    for context in (torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad()):
        with context:
            linear_cross_entropy(x, w, t, mode="recompute")
    for arguments in seen:
        assert arguments[0][0] == x.data_ptr() and arguments[1][0] == w.data_ptr()
        assert arguments[2][0] == t.data_ptr()
    assert len(seen) == 3


@pytest.mark.parametrize("mode", MODES)
def test_views_whose_memory_holds_the_opposite_sign(mode):
    x, w, t = case()
    linear_cross_entropy(x, w, t, mode=mode).backward()

    def turned(tensor):
        view = torch.complex(torch.zeros(tensor.shape), -tensor.detach()).conj().imag
        assert view.is_neg()
        return view

    for change in ({"input": turned(x).requires_grad_()}, {"linear_weight": turned(w).requires_grad_()},
                   {"token_weights": turned(torch.ones(13))}):  # fmt: skip
        operands = {"input": x.detach().requires_grad_(), "linear_weight": w.detach().requires_grad_(), **change}
        linear_cross_entropy(**operands, target=t, mode=mode, normalizer=11).backward()
        torch.testing.assert_close(operands["input"].grad, x.grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(operands["linear_weight"].grad, w.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_another_default_device_changes_nothing(mode):
    x, w, t = case()
    plain = linear_cross_entropy(x, w, t, mode=mode)
    with torch.device("meta"):
        loss = linear_cross_entropy(x, w, t, mode=mode, normalizer=11.0)
        loss.backward()
    assert loss == plain
    judge(x, w, t, "f32", 1 / 11)


def test_without_gradients_nothing_is_held():
    x, w, t = case()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            loss = linear_cross_entropy(x, w, t, mode="one_pass")
            assert not loss.requires_grad
    frozen = linear_cross_entropy(x.detach(), w.detach(), t)
    assert not frozen.requires_grad and frozen == loss


def test_torch_func_grad_and_vjp():
    x, w, t = case()
    linear_cross_entropy(x, w, t, mode="recompute").backward()
    for mode in ("auto", "recompute"):
        f = lambda a, b: linear_cross_entropy(a, b, t, mode=mode)  # noqa: E731
        gx, gw = torch.func.grad(f, argnums=(0, 1))(x.detach(), w.detach())
        torch.testing.assert_close(gx, x.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(gw, w.grad, rtol=1e-4, atol=1e-7)
        _, vjp = torch.func.vjp(f, x.detach(), w.detach())
        torch.testing.assert_close(vjp(torch.tensor(1.0))[0], x.grad, rtol=1e-4, atol=1e-7)
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            torch.func.jvp(lambda a: f(a, w.detach()), (x.detach(),), (x.detach(),))
        with pytest.raises(RuntimeError, match="double backward is not implemented"):
            torch.func.grad(lambda a: torch.func.grad(f)(a, w.detach()).sum())(x.detach())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    x, w, t = case()
    linear_cross_entropy(x * 2, w, t).backward()
    plain, x.grad, w.grad = (x.grad, w.grad), None, None
    for mode in ("one_pass", "recompute"):
        f = lambda a, b: linear_cross_entropy(a * 2, b, t, mode=mode)  # noqa: E731
        checkpoint(f, x, w, use_reentrant=reentrant).backward()
        torch.testing.assert_close(x.grad, plain[0], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(w.grad, plain[1], rtol=1e-4, atol=1e-7)
        x.grad = w.grad = None


def test_backward_in_another_thread():
    import threading

    x, w, t = case()
    loss = linear_cross_entropy(x, w, t)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    judge(x, w, t, "f32", 1 / 11)


def test_a_dispatch_mode_sees_the_operator_though_plain_calls_go_past_the_dispatcher():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, w, t = case()
    plain = linear_cross_entropy(x, w, t)
    with Watch():
        watched = linear_cross_entropy(x, w, t)
        with torch.no_grad():
            linear_cross_entropy(x, w, t)
    assert seen.count("logitless.linear_cross_entropy.default") == 2 and plain == watched


# ---- main_grad ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mode", ["auto", "recompute", "store_softmax"])
def test_main_grad_is_added_to_in_place(dtype, mode):
    x, w, t = case(dtype=dtype)
    start = torch.rand(w.shape)
    w.main_grad = start.clone()
    address = w.main_grad.data_ptr()
    linear_cross_entropy(x, w, t, mode=mode, main_grad=True).backward()
    assert w.grad is None and w.grad_added_to_main_grad and w.main_grad.data_ptr() == address
    added, w.grad = w.main_grad - start, None
    w.requires_grad_(False)
    e = judge(x, w, t, dtype, 1 / 11)
    onto_one = 2.0**-24 * spread(added.numel()) * 13**0.5  # 13 additions to a number near 1
    assert_within("main_grad", added.double().numpy(), e.grad_weight, e.allowed_grad_weight + onto_one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_main_grad_under_autocast_is_that_of_the_parameter(dtype):
    x, w, t = case()
    w.main_grad = torch.zeros(w.shape)
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(x, w, t, main_grad=True)
    loss.backward()
    assert w.grad is None and w.grad_added_to_main_grad
    with torch.autocast("cpu", dtype=dtype):
        linear_cross_entropy(x, w, t, mode="recompute").backward()
    torch.testing.assert_close(w.main_grad, w.grad, rtol=1e-2, atol=1e-5)


def test_main_grad_errors():
    x, w, t = case()
    with pytest.raises(ValueError, match="linear_weight.main_grad is missing"):
        linear_cross_entropy(x, w, t, main_grad=True)
    w.main_grad = torch.zeros(w.shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="linear_weight.main_grad is bfloat16"):
        linear_cross_entropy(x, w, t, main_grad=True)
    w.main_grad = torch.zeros(w.shape)
    with pytest.raises(ValueError, match='mode is "one_pass" with main_grad'):
        linear_cross_entropy(x, w, t, main_grad=True, mode="one_pass")


# ---- modes and limits ---------------------------------------------------------------------------


def test_auto_takes_one_pass_where_it_may_and_fits():
    x, w, t = case(64, 4000, 128, "bf16")
    assert settled(linear_cross_entropy(x, w, t)) == "one_pass"
    assert settled(linear_cross_entropy(x, w, t, reduction="sum", token_weights=torch.ones(64))) == "one_pass"
    by_limit = [
        settled(linear_cross_entropy(x, w, t, workspace_limit=limit << 10)) for limit in (8192, 384)
    ]
    assert by_limit == ["one_pass", "recompute"]
    none = linear_cross_entropy(x, w, t, reduction="none")
    assert none.grad_fn.next_functions[0][0].settings[2] == "recompute"
    with pytest.raises(ValueError, match="workspace_limit_bytes"):
        linear_cross_entropy(x, w, t, mode="one_pass", workspace_limit=1 << 16)
    with pytest.raises(ValueError, match="the least possible workspace is"):
        linear_cross_entropy(x, w, t, workspace_limit=100)


def test_a_limit_is_kept():
    x, w, t = case(64, 4000, 128, "bf16")
    for mode, limit in (("auto", 1 << 20), ("auto", 8 << 20), ("recompute", 1 << 20)):
        logitless.empty_cache()
        linear_cross_entropy(x, w, t, mode=mode, workspace_limit=limit).backward()
        assert logitless.info()["workspace_bytes_held"] <= max(limit, 2 << 20)


def test_results_do_not_depend_on_torch_s_threads():
    x, w, t = case(64, 3000, 96, "bf16")
    usual = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x.grad = w.grad = None
            loss = linear_cross_entropy(x, w, t, mode="recompute")
            loss.backward()
            found.append((loss.item(), x.grad, w.grad))
    finally:
        torch.set_num_threads(usual)
    for other in found[1:]:
        assert other[0] == found[0][0]
        assert torch.equal(other[1], found[0][1]) and torch.equal(other[2], found[0][2])


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (NotImplementedError, "linear_bias is not supported yet", {"linear_bias": torch.zeros(301)}),
        (NotImplementedError, "weight .of classes. is not supported yet", {"weight": torch.ones(301)}),
        (NotImplementedError, "label_smoothing is not supported yet", {"label_smoothing": 0.1}),
        (NotImplementedError, "options .of torch's chunks. is not supported", {"options": object()}),
        (ValueError, "reduction is 'max', must be", {"reduction": "max"}),
        (ValueError, "mode is 'fast', must be one of 'auto'", {"mode": "fast"}),
        (ValueError, 'mode is "one_pass" with reduction "none"', {"mode": "one_pass", "reduction": "none"}),
        (ValueError, r"target: shape is \[12\], must be .* \[13\]", {"target": torch.zeros(12).long()}),
        (TypeError, "target: dtype is float32, must be int64 or int32", {"target": torch.zeros(13)}),
        (TypeError, "target is a list", {"target": [1] * 13}),
        (TypeError, "input: dtype is float64", {"input": torch.zeros(13, 64).double()}),
        (ValueError, r"linear_weight: shape is \[301, 64\], must be \[V, H\] with H = 32", {"input": torch.zeros(13, 32)}),
        (ValueError, r"linear_weight: shape is \[64\], must be \[V, H\]", {"linear_weight": torch.zeros(64)}),
        (ValueError, r"input: shape is \[\], must be", {"input": torch.tensor(1.0)}),
        (ValueError, r"token_weights: shape is \[3\]", {"token_weights": torch.zeros(3)}),
        (ValueError, "token_weights is on meta, must be on cpu like target", {"token_weights": torch.ones(13, device="meta")}),
        (TypeError, "token_weights is a list", {"token_weights": [1.0] * 13}),
        (NotImplementedError, "token_weights requires a gradient", {"token_weights": torch.ones(13, requires_grad=True)}),
        (TypeError, "normalizer is a str", {"normalizer": "x"}),
        (ValueError, r"normalizer: shape is \[2\]", {"normalizer": torch.ones(2)}),
        (ValueError, "normalizer is 0, must not be 0 or NaN", {"normalizer": 0.0, "mode": "recompute"}),
        (ValueError, "normalizer is 0, must not be 0 or NaN", {"normalizer": 0.0, "reduction": "none"}),
        (ValueError, "normalizer is nan", {"normalizer": torch.tensor(float("nan"))}),
        (TypeError, "normalizer: dtype is complex64", {"normalizer": torch.tensor(1j)}),
        (NotImplementedError, "normalizer requires a gradient", {"normalizer": torch.tensor(2.0, requires_grad=True)}),
        (TypeError, "ignore_index is a str, must be an int", {"ignore_index": "x"}),
        (TypeError, "ignore_index is a float, must be an int", {"ignore_index": 1.5}),
        (ValueError, "ignore_index is 1180591620717411303424, must be between", {"ignore_index": 2**70}),
        (TypeError, "workspace_limit is a float, must be an int", {"workspace_limit": 1e9}),
        (ValueError, "workspace_limit is -1, must be between 0", {"workspace_limit": -1}),
        (TypeError, "input is a sparse_coo tensor, must be a plain dense one", {"input": torch.zeros(13, 64).to_sparse()}),
        (TypeError, "input is a nested tensor", {"input": torch.nested.nested_tensor([torch.zeros(3, 64)])}),
        (ValueError, "linear_weight on meta .* must all be on the CPU", {"linear_weight": torch.zeros(301, 64, device="meta")}),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, message, change):
    x, w, t = case()
    arguments = {"input": x, "linear_weight": w, "target": t, **change}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("message", "change"),
    [("bias", {"bias": True}), ("out_features", {"out_features": (2,)}),
     ("weight", {"weight": torch.ones(5)}), ("label_smoothing", {"label_smoothing": 0.1}),
     ("options", {"options": object()})],
)  # fmt: skip
def test_the_module_refuses_what_is_not_there_yet(message, change):
    with pytest.raises(NotImplementedError, match=message):
        logitless.LinearCrossEntropyLoss(4, 5, **change)


def test_another_device_is_an_error_that_says_so():
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:0")  # type: ignore[assignment]

    x, w, t = case()
    with pytest.raises(ValueError, match="input is on cuda:0, must be on the CPU"):
        linear_cross_entropy(x.detach().as_subclass(Elsewhere), w, t)


def test_nothing_is_leaked():
    def tensors() -> int:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    x, w, t = case(32, 1000, 64)
    for mode in MODES:
        for _ in range(3):
            linear_cross_entropy(x, w, t, mode=mode).backward()
        before = tensors()
        for _ in range(5):
            linear_cross_entropy(x, w, t, mode=mode).backward()
        assert tensors() <= before


@pytest.mark.parametrize("mode", ["one_pass", "recompute"])
def test_pages_of_a_large_gradient_serve_the_next_step(mode):
    logitless.empty_cache()
    x, w, t = case(8, 20000, 128)
    seen = set()
    for step in range(4):
        x.grad = w.grad = None
        linear_cross_entropy(x, w, t, mode=mode).backward()
        seen.add(w.grad.data_ptr())
        judge(x, w, t, "f32", 1 / 6)
    assert len(seen) == 1 and logitless.info()["gradient_bytes_held"] == 0
    kept, w.grad = w.grad, None
    linear_cross_entropy(x, w, t, mode=mode).backward()  # the kept one is not touched
    assert torch.equal(kept, w.grad) and kept.data_ptr() != w.grad.data_ptr()
    del kept
    w.grad = None
    assert logitless.info()["gradient_bytes_held"] >= 2 * 20000 * 128 * 4
    logitless.empty_cache()
    assert logitless.info()["gradient_bytes_held"] == 0
