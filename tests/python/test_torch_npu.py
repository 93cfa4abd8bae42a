# SPDX-License-Identifier: Apache-2.0
"""The torch_npu functions: semantics, names, the stand-in package, and the vocabulary-parallel example."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from judge import UNIT, assert_within, expected

import logitless.numpy as ln
import logitless.torch_npu as npu
from logitless import reference
from logitless.torch_npu import _ops

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ONLINE = npu.npu_fused_linear_online_max_sum
LOSS = npu.npu_fused_cross_entropy_loss_with_max_sum
BACKWARD = npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward


def case(BT=13, V=301, H=64, dtype="bf16", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(BT, H, generator=g).to(TYPES[dtype])
    w = (torch.randn(V, H, generator=g) * 0.3).to(TYPES[dtype])
    return x, w, torch.randint(0, V, (BT,), generator=g)


def as_double(t: torch.Tensor) -> np.ndarray:
    return t.double().numpy()


# ---- semantics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("int32", [False, True])
def test_statistics_are_those_of_rounded_logits(dtype, int32):
    x, w, t = case(dtype=dtype)
    t = t.int() if int32 else t
    logits_max, sum_exp, predicted, mask, masked_target, logits = ONLINE(x, w, t, 40, 200, True)
    whole = reference.forward(x, w, t.numpy(), vocab_start_index=40, vocab_end_index=200,
                              logits_rounding=dtype, return_logits=True)  # fmt: skip
    # A logit near the middle of two neighbours may fall either way.
    near = UNIT[dtype] * 2.01 * np.abs(whole.logits) + 2.0**-20
    assert_within("logits", as_double(logits), whole.logits, near)
    assert logits.dtype == x.dtype and masked_target.dtype == t.dtype
    shifted = as_double(logits) - as_double(logits_max)[:, None]
    assert (shifted.max(axis=1) == 0).all()
    np.testing.assert_allclose(sum_exp.numpy(), np.exp(shifted).sum(1), rtol=1e-5)
    outside = (t.numpy() < 40) | (t.numpy() >= 200)
    np.testing.assert_array_equal(reference.unpack(mask.numpy(), 13), outside)
    np.testing.assert_array_equal(masked_target.numpy(), np.where(outside, 0, t.numpy() - 40))
    hit = np.where(outside, 0, shifted[np.arange(13), masked_target.numpy()])
    np.testing.assert_allclose(predicted.numpy(), hit, rtol=0, atol=1e-6)
    again = ONLINE(x, w, t, 40, 200)
    assert again[5] is None and all(torch.equal(a, b) for a, b in zip(again[:5], (logits_max, sum_exp, predicted, mask, masked_target)))


@pytest.mark.parametrize(("start", "padding"), [(0, False), (3, True)])
def test_the_mask_is_packed_lsb_first_and_padded_as_if_target_were_0(start, padding):
    x, w, _ = case(BT=11)
    t = torch.tensor([2, 3, 0, 400, 5, 304, 2, 303, 3, 1, 304])
    mask = ONLINE(x, w, t, start, start + 301)[3]
    bits = np.unpackbits(mask.numpy(), bitorder="little")
    outside = (t.numpy() < start) | (t.numpy() >= start + 301)
    assert len(bits) == 16
    np.testing.assert_array_equal(bits, [*outside, *[padding] * 5])


def test_targets_are_compared_exactly_beyond_2_to_the_24():
    x, w, _ = case(BT=2)
    for big in (2**24, 2**40):
        mask, masked = ONLINE(x, w, torch.tensor([big + 1, big + 302]), big + 1, big + 302)[3:5]
        assert mask.item() & 3 == 2 and masked.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ["memory_saving", "high_performance"])
@pytest.mark.parametrize("mask_type", ["packed", "bool"])
def test_loss_and_gradients_agree_with_float64(dtype, mode, mask_type):
    x, w, t = case(33, 301, 64, dtype)
    logits_max, sum_exp, predicted, mask, masked_target, logits = ONLINE(x, w, t, 0, 301, True)
    loss, softmax = LOSS(logits_max, sum_exp, predicted, vocab_parallel_logits=logits)
    assert loss.dtype == softmax.dtype == torch.float32
    grad = torch.rand(33) - 0.2
    grad[4] = 0.0
    rounded = as_double(logits)
    lse = np.log(np.exp(rounded).sum(1))
    np.testing.assert_allclose(loss.numpy(), lse - rounded[np.arange(33), t], rtol=1e-5, atol=2e-5)
    given = {"softmax": softmax} if mode == "high_performance" else {"logits_max": logits_max, "sum_exp_logits": sum_exp}
    if mask_type == "bool":
        mask = torch.from_numpy(reference.unpack(mask.numpy(), 33))
    before = softmax.clone()
    gi, gw = BACKWARD(grad, x, w, mask, masked_target, **given)
    assert gi.dtype == gw.dtype == x.dtype and torch.equal(softmax, before)
    value = reference.gradient(grad.numpy(), x, w, masked_target.numpy(),
                               softmax=np.exp(rounded - lse[:, None]))  # fmt: skip
    e = expected(as_double(x), as_double(w), t.numpy(), grad.double().numpy(), multiply=dtype, output=dtype)
    # A logit that rounds the other way changes its softmax by an ulp of the logit.
    flips = UNIT[dtype] * 2 * np.abs(rounded).max() if mode == "memory_saving" else 0.0
    for name, found, v, allowed in (("grad_input", gi, value.grad_input, e.allowed_grad_input),
                                    ("grad_weight", gw, value.grad_weight, e.allowed_grad_weight)):  # fmt: skip
        assert_within(name, as_double(found), v, allowed + flips * 1e-3)
    assert gi[4].eq(0).all()


def test_a_token_predicted_with_certainty_gets_no_spurious_gradient():
    x = torch.full((1, 64), 1.0, dtype=torch.bfloat16)
    w = torch.zeros(200, 64, dtype=torch.bfloat16)
    w[7] = 0.4737  # a logit of 30.3, which bf16 rounds
    s = ONLINE(x, w, torch.tensor([7]), 0, 200)
    gi, gw = BACKWARD(torch.ones(1), x, w, s[3], s[4], logits_max=s[0], sum_exp_logits=s[1])
    assert gw.abs().max() < 1e-6 and gi.abs().max() < 1e-6


def test_rows_of_grad_0_poison_nothing_and_empty_inputs_are_answered():
    x, w, t = case(4)
    s = ONLINE(x, w, t, 0, 301)
    x = x.clone()
    x[1] = float("nan")
    gi, gw = BACKWARD(torch.tensor([1.0, 0.0, 1.0, -0.0]), x, w, s[3], s[4], 0.0, s[0], s[1])
    assert torch.isfinite(gw).all() and gi[[1, 3]].eq(0).all()
    empty = ONLINE(x[:0], w, t[:0], 0, 301, True)
    assert [tuple(a.shape) for a in empty] == [(0,), (0,), (0,), (0,), (0,), (0, 301)]
    gi, gw = BACKWARD(torch.ones(0), x[:0], w, empty[3], empty[4], 0.0, empty[0], empty[1])
    assert gi.shape == (0, 64) and gw.eq(0).all()
    assert LOSS(*empty[:3])[0].shape == (0,)


def test_views_are_read_where_they_lie():
    x, w, t = case()
    plain = ONLINE(x, w, t, 0, 301)
    wide = torch.stack([w, w], 1).reshape(301, 128)[:, :64]
    turned = x.T.contiguous().T
    assert all(torch.equal(a, b) for a, b in zip(plain[:5], ONLINE(turned, torch.cat([w, w], 1)[:, :64], t, 0, 301)[:5]))
    assert wide.shape == w.shape


def test_results_agree_with_the_numpy_face():
    x, w, t = case()
    a = ONLINE(x, w, t, 10, 120)
    b = ln.forward(x, w, t, vocab_start_index=10, vocab_end_index=120, logits_rounding="operand")
    for name in ("logits_max", "sum_exp_logits", "predicted_logits", "target_mask", "masked_target"):
        np.testing.assert_array_equal(a[ln.Statistics._fields.index(name)].numpy(), getattr(b, name))


# ---- names, schemas -----------------------------------------------------------------------------


def test_every_spelling_is_there_as_function_and_operator():
    assert set(npu.NAMES) == {
        "npu_fused_linear_online_max_sum", "fused_linear_online_max_sum",
        "npu_fused_cross_entropy_loss_with_max_sum", "fused_cross_entropy_loss_with_max_sum",
        "npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
        "fused_linear_cross_entropy_loss_with_max_sum_backward",
        "npu_fused_linear_cross_entropy_loss_with_max_sum_grad",
        "fused_linear_cross_entropy_loss_with_max_sum_grad",
    }  # fmt: skip
    x, w, t = case()
    by_name = dict(input=x, weight=w, target=t, vocab_start_index=0, vocab_end_index=301, return_logits=False)
    for name in ("npu_fused_linear_online_max_sum", "fused_linear_online_max_sum"):
        a = getattr(npu, name)(**by_name)
        b = getattr(torch.ops.npu, name)(x, w, t, 0, 301)
        assert all(torch.equal(p, q) for p, q in zip(a[:5], b[:5]))


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (("npu_fused_linear_online_max_sum", "fused_linear_online_max_sum"),
         ["Tensor input", "Tensor weight", "Tensor target", "int vocab_start_index", "int vocab_end_index", "bool return_logits"]),
        (("npu_fused_cross_entropy_loss_with_max_sum",),
         ["Tensor logits_max", "Tensor sum_exp_logits", "Tensor predicted_logits", "float label_smoothing",
          "Tensor? input", "Tensor? weight", "Tensor? vocab_parallel_logits"]),
        (("npu_fused_linear_cross_entropy_loss_with_max_sum_backward", "npu_fused_linear_cross_entropy_loss_with_max_sum_grad"),
         ["Tensor grad", "Tensor input", "Tensor weight", "Tensor target_mask", "Tensor masked_target",
          "float label_smoothing", "Tensor? logits_max", "Tensor? sum_exp_logits", "Tensor? softmax"]),
    ],
)  # fmt: skip
def test_schemas_carry_names_and_types(names, arguments):
    for name in names:
        schema = str(getattr(torch.ops.npu, name).default._schema)
        position = 0
        for argument in arguments:
            position = schema.index(argument, position) + 1


def test_opcheck():
    x, w, t = case()
    s = ONLINE(x, w, t, 0, 301, True)
    torch.library.opcheck(torch.ops.npu.npu_fused_linear_online_max_sum.default, (x, w, t, 0, 301))
    torch.library.opcheck(torch.ops.npu.npu_fused_linear_online_max_sum.default, (x, w, t, 0, 301, True))
    torch.library.opcheck(torch.ops.npu.npu_fused_cross_entropy_loss_with_max_sum.default, s[:3])
    torch.library.opcheck(
        torch.ops.npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward.default,
        (torch.ones(13), x, w, s[3], s[4], 0.0, s[0], s[1]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph_they_compute_the_same(dynamic):
    def f(x, w, t, end):
        s = ONLINE(x, w, t, 0, end)
        loss = LOSS(s[0], s[1], s[2])[0]
        return loss, *BACKWARD(torch.ones_like(loss), x, w, s[3], s[4], logits_max=s[0], sum_exp_logits=s[1])

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    for BT in (13, 9):
        x, w, t = case(BT)
        for found, value in zip(compiled(x, w, t, 301), f(x, w, t, 301)):
            assert torch.equal(found, value)


# ---- errors -------------------------------------------------------------------------------------


def arguments(**change):
    x, w, t = case()
    return {"input": x, "weight": w, "target": t, "vocab_start_index": 0, "vocab_end_index": 301, **change}


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "input: dtype is float32, must be float16 or bfloat16", {"input": torch.zeros(13, 64)}),
        (TypeError, "weight: dtype is float16, must be bfloat16", {"weight": torch.zeros(301, 64).half()}),
        (TypeError, "target: dtype is float32, must be int32 or int64", {"target": torch.zeros(13)}),
        (ValueError, r"target: shape is \[3\], must be \[BT\] = \[13\]", {"target": torch.zeros(3).long()}),
        (ValueError, r"weight: shape is \[5, 3\], must be \[V, H\] with H = 64", {"weight": torch.zeros(5, 3).bfloat16()}),
        (ValueError, r"input: shape is \[13\], must have 2 dimensions", {"input": torch.zeros(13).bfloat16()}),
        (ValueError, "weight: .* at least one row", {"weight": torch.zeros(0, 64).bfloat16()}),
        (TypeError, "input is a NoneType, must be a torch.Tensor", {"input": None}),
        (TypeError, "weight is a list, must be a torch.Tensor", {"weight": [1.0]}),
        (TypeError, "vocab_start_index is a float, must be an int", {"vocab_start_index": 0.5}),
        (ValueError, "vocab_end_index is .*, must be between", {"vocab_end_index": 2**70}),
        (ValueError, "weight is on meta, .* must be on the CPU like input", {"weight": torch.zeros(301, 64, device="meta")}),
        (ValueError, "vocab_start_index is -1, must be >= 0", {"vocab_start_index": -1}),
        (ValueError, "vocab_end_index is 4, must be >= vocab_start_index = 5", {"vocab_start_index": 5, "vocab_end_index": 4}),
        (ValueError, "input: H is 65535, must be <= 65534",
         {"input": torch.zeros(13, 65535).bfloat16(), "weight": torch.zeros(2, 65535).bfloat16()}),
    ],
)  # fmt: skip
def test_errors_of_the_forward(error, message, change):
    with pytest.raises(error, match=message):
        ONLINE(**arguments(**change))


def test_errors_of_loss_and_gradient():
    x, w, t = case()
    s = ONLINE(x, w, t, 0, 301)
    with pytest.raises(ValueError, match="label_smoothing is 0.1, must be 0.0"):
        LOSS(*s[:3], 0.1)
    with pytest.raises(ValueError, match="label_smoothing is nan"):
        LOSS(*s[:3], float("nan"))
    with pytest.raises(ValueError, match=r"vocab_parallel_logits: shape is \[4, 5\], must be \[BT, V\] with BT = 13"):
        LOSS(*s[:3], vocab_parallel_logits=torch.zeros(4, 5))
    with pytest.raises(TypeError, match="label_smoothing is a NoneType, must be a number"):
        LOSS(*s[:3], None)
    with pytest.raises(TypeError, match="vocab_parallel_logits is a int, must be a torch.Tensor or None"):
        LOSS(*s[:3], vocab_parallel_logits=3)
    LOSS(*s[:3], input=torch.zeros(3), weight=torch.zeros(2, 2))  # not looked at
    grad = torch.ones(13)
    with pytest.raises(ValueError, match="softmax is None, so logits_max and sum_exp_logits must both"):
        BACKWARD(grad, x, w, s[3], s[4])
    with pytest.raises(TypeError, match="grad: dtype is bfloat16, must be float32"):
        BACKWARD(grad.bfloat16(), x, w, s[3], s[4], 0.0, s[0], s[1])
    with pytest.raises(ValueError, match="target_mask: 1 bytes hold 8 bits, must be >= BT = 13"):
        BACKWARD(grad, x, w, s[3][:1], s[4], 0.0, s[0], s[1])
    with pytest.raises(ValueError, match=r"target_mask: shape is \[2\], must be \[BT\]"):
        BACKWARD(grad, x, w, s[3].bool(), s[4], 0.0, s[0], s[1])
    with pytest.raises(ValueError, match=r"softmax: shape is \[13, 5\]"):
        BACKWARD(grad, x, w, s[3], s[4], softmax=torch.zeros(13, 5))
    bad = s[4].clone()
    bad[6] = 301
    with pytest.raises(IndexError, match=r"masked_target\[6\] is 301"):
        BACKWARD(grad, x, w, s[3], bad, 0.0, s[0], s[1])
    with pytest.raises(TypeError, match="missing a required argument: 'weight'"):
        ONLINE(x)


def test_an_inclusive_end_is_obeyed_and_warned_about_once(monkeypatch):
    x, w, t = case()
    monkeypatch.setattr(_ops, "_warned", False)
    t[0] = 300
    with pytest.warns(UserWarning, match="vocab_end_index is 300 .* the end is exclusive"):
        mask = ONLINE(x, w, t, 0, 300)[3]
    assert reference.unpack(mask.numpy(), 13)[0]
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ONLINE(x, w, t, 0, 300)


# ---- the stand-in package -----------------------------------------------------------------------


def test_install_makes_a_package_that_libraries_do_not_mistake_for_an_npu(script):
    out = script("""
    import importlib.util, torch
    import logitless.torch_npu
    logitless.torch_npu.install()
    import torch_npu
    import torch_npu.utils.custom_ops
    from torch_npu.utils import custom_ops
    assert torch_npu.__version__.startswith(torch.__version__.split("+")[0])
    assert importlib.util.find_spec("torch_npu") is torch_npu.__spec__
    assert custom_ops.fused_linear_online_max_sum is torch_npu.fused_linear_online_max_sum
    assert not hasattr(torch, "npu")
    assert logitless.torch_npu.install() is torch_npu
    try:
        torch_npu.npu_format_cast
    except AttributeError as error:
        print(error)
    try:
        import torch_npu.contrib
    except ModuleNotFoundError as error:
        print(error)
    try:
        from transformers.utils import is_torch_npu_available
        assert is_torch_npu_available() is False
        import accelerate.utils
        assert accelerate.utils.is_npu_available() is False
        assert accelerate.utils.is_npu_available(check_device=True) is False
        print("asked")
    except ImportError:
        print("not asked: transformers or accelerate is not installed")
    """)  # fmt: skip
    lines = out.splitlines()
    assert lines[0] == (
        "module 'torch_npu' is logitless's stand-in on the CPU: it has the three fused linear "
        "cross-entropy functions and nothing else of torch_npu, no 'npu_format_cast'"
    )
    assert "torch_npu.contrib" in lines[1]
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"):
        assert lines[2] == "asked"


def test_an_installed_torch_npu_is_left_alone_unless_asked(script, tmp_path):
    (tmp_path / "torch_npu.py").write_text("mine = 1\n")
    out = script(f"""
    import sys; sys.path.insert(0, {str(tmp_path)!r})
    import logitless.torch_npu
    assert logitless.torch_npu.install().mine == 1
    import torch_npu
    assert torch_npu.mine == 1
    assert logitless.torch_npu.install(force=True) is not torch_npu
    import torch_npu
    print(callable(torch_npu.npu_fused_linear_online_max_sum))
    """)  # fmt: skip
    assert out == "True\n"


def test_scripts_written_for_an_npu_run_unchanged(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent("""
        import sys
        import torch
        import torch_npu

        assert sys.argv[1:] == ["--steps", "3"] and __name__ == "__main__"
        torch.npu.set_device(0)
        torch.manual_seed(0)
        x = torch.randn(128, 64, dtype=torch.float16).npu()
        w = torch.randn(256, 64, dtype=torch.float16).to("npu:0")
        t = torch.randint(0, 256, (128,), dtype=torch.int32, device="npu")
        device = torch.device("npu:0")
        s = torch_npu.npu_fused_linear_online_max_sum(x, w, t, 0, 256, return_logits=True)
        loss, softmax = torch_npu.npu_fused_cross_entropy_loss_with_max_sum(
            *s[:3], label_smoothing=0.0, vocab_parallel_logits=s[5])
        grad = torch.ones(128, device=device)
        gi, gw = torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            grad, x, w, s[3], s[4], softmax=softmax)
        torch.npu.synchronize()
        layer = torch.nn.Linear(4, 4, device="npu").npu().to(device).to("npu:0", torch.float32)
        assert layer.weight.device.type == "cpu" and x.to(device).device.type == "cpu"
        try:
            torch.npu.graph
        except AttributeError as error:
            print(error)
        print(tuple(gi.shape), gw.dtype, bool(loss.isfinite().all()))
    """))  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "logitless.torch_npu", str(path), "--steps", "3"],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "torch.npu is logitless's stand-in on the CPU" in lines[0]
    assert lines[1] == "(128, 64) torch.float16 True"


# ---- vocabulary parallel ------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples/python/vocab_parallel.py"
CUTS = {1: [0, 509], 2: [0, 130, 509], 4: [0, 7, 300, 381, 509]}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def load_example():
    spec = importlib.util.spec_from_file_location("vocab_parallel", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rank(rank: int, ranks: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_WAIT_POLICY="passive")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    example = load_example()
    start, end = CUTS[ranks][rank : rank + 2]
    for dtype in TYPES:
        for temperature in (1.0, 0.7):
            for chunk in (0, 13):
                for keep in (False, True):
                    x, w, t = case(45, 509, 64, dtype)
                    x.requires_grad_()
                    mine = w[start:end].clone().requires_grad_()
                    loss = example.VocabParallelCrossEntropy.apply(
                        x, mine, t, start, end, None, temperature, chunk, keep
                    )
                    (loss * torch.linspace(-1, 1, 45)).sum().backward()
                    name = f"{dtype}-{temperature}-{chunk}-{keep}-{rank}.pt"
                    torch.save((loss.detach(), x.grad, mine.grad), Path(folder) / name)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_vocabulary_parallel_training_matches_the_unsharded_run(ranks, tmp_path):
    torch.multiprocessing.spawn(_rank, (ranks, free_port(), str(tmp_path)), nprocs=ranks)
    for dtype in TYPES:
        x, w, t = case(45, 509, 64, dtype)
        grad = torch.linspace(-1, 1, 45)
        for temperature in (1.0, 0.7):
            scaled = x if temperature == 1.0 else x / temperature
            s = ONLINE(scaled, w, t, 0, 509)
            loss = LOSS(*s[:3])[0]
            _, gw = BACKWARD(grad, scaled, w, s[3], s[4], 0.0, s[0], s[1])
            e = expected(as_double(scaled), as_double(w), t.numpy(), grad.double().numpy(),
                         multiply=dtype, output=dtype)  # fmt: skip
            logits = as_double(scaled) @ as_double(w).T
            ulp = 2 * UNIT[dtype] * np.abs(logits).max()  # logits are rounded before the softmax
            for chunk in (0, 13):
                for keep in (False, True):
                    for rank in range(ranks):
                        file = tmp_path / f"{dtype}-{temperature}-{chunk}-{keep}-{rank}.pt"
                        found, gi, gw_mine = torch.load(file, weights_only=True)
                        assert (found - loss).abs().max() <= 2e-5
                        cut = slice(*CUTS[ranks][rank : rank + 2])
                        # Rounded once more per chunk and shard than the unsharded run.
                        more = 4 * UNIT[dtype] * np.abs(e.grad_weight).max()
                        unrounded = ulp * np.abs(e.grad_weight).max()
                        assert_within("grad_weight", as_double(gw_mine), as_double(gw[cut]),
                                      2 * e.allowed_grad_weight[cut] + more)  # fmt: skip
                        assert_within("grad_weight", as_double(gw_mine), e.grad_weight[cut],
                                      e.allowed_grad_weight[cut] + more + unrounded)  # fmt: skip
                        more = 4 * UNIT[dtype] * np.abs(e.grad_input / temperature).max()
                        unrounded = ulp * np.abs(e.grad_input).max()
                        assert_within("grad_input", as_double(gi), e.grad_input / temperature,
                                      e.allowed_grad_input / temperature + more + unrounded)  # fmt: skip


def test_the_example_trains():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_port())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines()]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
