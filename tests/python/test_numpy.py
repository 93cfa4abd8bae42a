# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import array
import importlib.util

import numpy as np
import pytest
from judge import assert_within, expected

import logitless.numpy as ln
import logitless.reference as reference

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
rng = np.random.default_rng(7)


def case(BT: int, V: int, H: int, dtype: str = "f32", ignored: int = 0):
    x = rng.standard_normal((BT, H), np.float32).astype(TYPES[dtype])
    w = (rng.standard_normal((V, H), np.float32) * 0.3).astype(TYPES[dtype])
    t = rng.integers(0, V, BT)
    t[rng.permutation(BT)[:ignored]] = -100
    return x, w, t


def judge(result, x, w, t, dtype, **kwargs):
    count = max(1, (t != -100).sum())
    e = expected(np.float64(x), np.float64(w), t, np.full(len(t), 1 / count), multiply=dtype,
                 output=kwargs.pop("output", dtype), **kwargs)  # fmt: skip
    assert_within("loss", result.loss, e.loss, e.allowed_loss)
    assert_within("grad_input", result.grad_input, e.grad_input, e.allowed_grad_input)
    assert_within("grad_weight", result.grad_weight, e.grad_weight, e.allowed_grad_weight)
    assert result.total == pytest.approx((e.loss[t != -100] / count).sum(), abs=e.allowed_loss.max())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("strategy", ["one_pass", "recompute"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 127, 33), (65, 509, 96)])
def test_a_training_step_agrees_with_float64(dtype, strategy, shape):
    x, w, t = case(*shape, dtype, ignored=shape[0] // 4)
    result = ln.loss_and_gradient(x, w, t, ignore_index=-100, strategy=strategy)
    assert result.grad_weight.dtype == w.dtype
    judge(result, x, w, t, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_shards_merged_agree_with_the_reference(dtype):
    x, w, t = case(37, 301, 64, dtype)
    cuts = [0, 100, 100, 173, 301]  # an empty shard, too
    shards = [
        ln.forward(x, w[a:b], t, vocab_start_index=a) for a, b in zip(cuts, cuts[1:])
    ]  # fmt: skip
    merged = ln.merge(shards)
    whole = reference.forward(x, w, t)
    found, value = ln.loss(merged), reference.loss(whole)
    e = expected(np.float64(x), np.float64(w), t, np.ones(37), multiply=dtype)
    assert_within("loss", found.loss, value.loss, e.allowed_loss)
    assert_within("logsumexp", found.logsumexp, value.logsumexp, e.allowed_loss)
    by_reference = reference.loss(reference.merge([
        reference.forward(x, w[a:b], t, vocab_start_index=a) for a, b in zip(cuts, cuts[1:])
    ]))  # fmt: skip
    np.testing.assert_allclose(by_reference.loss, value.loss, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(
        shards[3].target_mask, reference.forward(x, w[173:], t, vocab_start_index=173).target_mask
    )
    np.testing.assert_array_equal(shards[1].logits_max, np.full(37, -np.inf))


def test_the_gradient_recomputes_or_takes_a_softmax():
    x, w, t = case(29, 211, 48, ignored=5)
    counts = t != -100
    s = ln.forward(x, w, t, ignore_index=-100, return_logits=True)
    softmax = ln.loss(s, logits=s.logits, counts=counts).softmax
    grad = np.where(counts, rng.standard_normal(29), 0).astype(np.float32)
    lse = np.where(counts, rng.standard_normal(29), 0).astype(np.float32)
    e = expected(np.float64(x), np.float64(w), t, grad, coefficient_lse=lse)
    for given in ({"softmax": softmax}, {"logits_max": s.logits_max, "sum_exp_logits": s.sum_exp_logits}):
        g = ln.gradient(grad, x, w, s.masked_target, target_mask=s.target_mask,
                        grad_logsumexp=lse, **given)  # fmt: skip
        r = reference.gradient(grad, x, w, s.masked_target, target_mask=s.target_mask,
                               grad_logsumexp=lse, **given)  # fmt: skip
        assert_within("grad_input", g.grad_input, e.grad_input, e.allowed_grad_input)
        assert_within("grad_weight", g.grad_weight, e.grad_weight, e.allowed_grad_weight)
        assert_within("reference", r.grad_weight, e.grad_weight, e.allowed_grad_weight)


def test_softmax_may_take_the_place_of_fp32_logits():
    x, w, t = case(29, 1211, 48)
    s = ln.forward(x, w, t, return_logits=True)
    apart = ln.loss(s, logits=s.logits).softmax
    assert ln.loss(s, logits=s.logits, out={"softmax": s.logits}).softmax is s.logits
    np.testing.assert_array_equal(s.logits, apart)


def test_fp32_operands_multiplied_as_bf16_are_those_rounded():
    x, w, t = case(19, 131, 40)
    mixed = ln.loss_and_gradient(x, w, t, multiply="bf16", strategy="recompute")
    bf16 = ln.loss_and_gradient(
        x.astype(TYPES["bf16"]), w.astype(TYPES["bf16"]), t, strategy="recompute",
        grad_input="f32", grad_weight="f32",
    )  # fmt: skip
    assert mixed.total == bf16.total
    np.testing.assert_array_equal(mixed.grad_weight, bf16.grad_weight)
    rounded = reference.float64(x, "bf16")
    np.testing.assert_array_equal(rounded, np.float64(x.astype(TYPES["bf16"])))


def test_outputs_given_are_written_and_accumulated_into():
    x, w, t = case(23, 77, 32)
    fresh = ln.loss_and_gradient(x, w, t)
    out = {
        "loss": np.full(23, np.nan, np.float32),
        "grad_input": np.full((32, 23), np.nan, np.float32).T,
        "grad_weight": np.zeros((77, 64), np.float32)[:, ::2],
    }
    result = ln.loss_and_gradient(x, w, t, out=out)
    assert result.loss is out["loss"] and result.grad_weight is out["grad_weight"]
    np.testing.assert_array_equal(out["grad_input"], fresh.grad_input)
    np.testing.assert_array_equal(out["grad_weight"], fresh.grad_weight)
    ln.loss_and_gradient(x, w, t, out={"grad_weight": out["grad_weight"]}, accumulate=True, grad_input=False)
    np.testing.assert_allclose(out["grad_weight"], 2 * fresh.grad_weight, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(out["grad_weight"].base[:, 1::2], 0)


def test_views_are_read_where_they_lie_and_stay_as_they_are():
    x, w, t = case(16, 90, 24)
    plain = ln.loss_and_gradient(x, w, t)
    wide = np.full((32, 50), np.nan, np.float32)
    wide[::2, 1:49:2] = x
    turned = np.asfortranarray(w)
    for a in (wide, turned, t):
        a.flags.writeable = False
    strided = ln.loss_and_gradient(wide[::2, 1:49:2], turned, t)
    np.testing.assert_array_equal(strided.grad_input, plain.grad_input)
    flipped = ln.loss_and_gradient(x[::-1], w, t[::-1])
    np.testing.assert_array_equal(flipped.grad_input[::-1], plain.grad_input)


def test_bf16_comes_as_uint16_or_by_ml_dtypes():
    x, w, t = case(9, 50, 16, "bf16")
    a = ln.loss_and_gradient(x, w, t)
    b = ln.loss_and_gradient(x.view(np.uint16), w.view(np.uint16), t)
    assert a.grad_weight.dtype == TYPES["bf16"] and b.grad_weight.dtype == np.uint16
    np.testing.assert_array_equal(a.grad_weight.view(np.uint16), b.grad_weight)


def test_the_buffer_protocol_will_do():
    x, w, t = case(4, 10, 3)
    flat = memoryview(array.array("f", w.ravel())).cast("B").cast("f", shape=[10, 3])
    a, b = ln.loss_and_gradient(x, w, t), ln.loss_and_gradient(x, flat, array.array("q", t))
    np.testing.assert_array_equal(a.grad_weight, b.grad_weight)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_dlpack_will_do():
    import torch

    x, w, t = case(4, 10, 3)
    a = ln.loss_and_gradient(x, w, t)
    b = ln.loss_and_gradient(torch.tensor(x, requires_grad=True), torch.tensor(w), torch.tensor(t))
    np.testing.assert_array_equal(a.grad_weight, b.grad_weight)
    c = ln.loss_and_gradient(torch.tensor(x).bfloat16(), torch.tensor(w).bfloat16(), torch.tensor(t))
    assert c.grad_weight.dtype == TYPES["bf16"]


def test_bits_do_not_depend_on_threads_or_the_limit():
    x, w, t = case(61, 700, 80, "bf16")
    one = ln.loss_and_gradient(x, w, t, threads=1, strategy="recompute")
    two = ln.loss_and_gradient(x, w, t, threads=2, strategy="recompute", workspace_limit=1 << 20)
    np.testing.assert_array_equal(one.grad_weight.view(np.uint16), two.grad_weight.view(np.uint16))


def test_nothing_valid_is_a_loss_of_zero():
    x, w, t = case(8, 20, 6)
    result = ln.loss_and_gradient(x, w, np.full(8, -100), ignore_index=-100)
    assert result.total == 0 and not result.grad_weight.any() and not result.grad_input.any()
    empty = ln.loss_and_gradient(x[:0], w, t[:0])
    assert empty.total == 0 and empty.grad_input.shape == (0, 6) and not empty.grad_weight.any()


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"weight: shape is \[10, 4\], must be \[V, H\] = \[10, 3\]",
         lambda x, w, t: ln.forward(x, np.zeros((10, 4), np.float32), t)),
        (ValueError, "target: size is 3, must be BT = 4", lambda x, w, t: ln.forward(x, w, t[:3])),
        (ValueError, r"input: shape is \[12\], must have 2 dimensions", lambda x, w, t: ln.forward(x.ravel(), w, t)),
        (TypeError, "input: dtype is float64, must be one of", lambda x, w, t: ln.forward(x.astype(float), w, t)),
        (TypeError, "target: dtype is f32, must be i32 or i64", lambda x, w, t: ln.forward(x, w, t.astype("f"))),
        (TypeError, "weight: dtype is f16, must be input's f32", lambda x, w, t: ln.forward(x, w.astype("e"), t)),
        (TypeError, "input is a list", lambda x, w, t: ln.forward(x.tolist(), w, t)),
        (TypeError, "multiply: bf16 came with operands of f16",
         lambda x, w, t: ln.forward(x.astype("e"), w.astype("e"), t, multiply="bf16")),
        (IndexError, r"target\[2\] is 10, must be in \[0, V\) = \[0, 10\)",
         lambda x, w, t: ln.loss_and_gradient(x, w, np.array([1, 2, 10, 3]))),
        (ValueError, "workspace_limit_bytes is 64, the least possible",
         lambda x, w, t: ln.forward(x, w, t, workspace_limit=64)),
        (ValueError, "logits_rounding is 'x', must be one of 'none'",
         lambda x, w, t: ln.forward(x, w, t, logits_rounding="x")),
        (ValueError, "isa: 'mmx' is not an instruction set usable here", lambda x, w, t: ln.forward(x, w, t, isa="mmx")),
        (ValueError, "normalizer", lambda x, w, t: ln.loss_and_gradient(x, w, t, normalizer=0.0)),
        (ValueError, "out: 'grad' came, must be one of", lambda x, w, t: ln.loss_and_gradient(x, w, t, out={"grad": x})),
        (TypeError, r"out\['loss'\]: dtype is f16, must be f32",
         lambda x, w, t: ln.loss_and_gradient(x, w, t, out={"loss": np.zeros(4, "e")})),
        (ValueError, "accumulate: what is to be added to must come in out",
         lambda x, w, t: ln.loss_and_gradient(x, w, t, accumulate=True)),
        (ValueError, "shards: none came", lambda x, w, t: ln.merge([])),
        (TypeError, "shards is a NoneType, must be a sequence of Statistics", lambda x, w, t: ln.merge(None)),
        (TypeError, "statistics is a NoneType, must be Statistics", lambda x, w, t: ln.loss(None)),
        (TypeError, "vocab_start_index is a str, must be an int", lambda x, w, t: ln.forward(x, w, t, vocab_start_index="a")),
        (TypeError, "ignore_index is a float, must be an int", lambda x, w, t: ln.forward(x, w, t, ignore_index=1.5)),
        (ValueError, "ignore_index is .*, must be between", lambda x, w, t: ln.forward(x, w, t, ignore_index=2**70)),
        (TypeError, "threads is a bool, must be an int", lambda x, w, t: ln.forward(x, w, t, threads=True)),
        (ValueError, "threads is 5000, must be between 0 and 4096", lambda x, w, t: ln.forward(x, w, t, threads=5000)),
        (TypeError, "isa is a int, must be a str", lambda x, w, t: ln.forward(x, w, t, isa=3)),
        (TypeError, "normalizer is a str, must be a number", lambda x, w, t: ln.loss_and_gradient(x, w, t, normalizer="a")),
        (TypeError, "token_weights: dtype is float64, must be f32",
         lambda x, w, t: ln.loss_and_gradient(x, w, t, token_weights=np.ones(4))),
        (TypeError, "counts: dtype is f32, must be u8 or bool", lambda x, w, t: ln.forward(x, w, t, counts=np.ones(4, "f"))),
        (TypeError, "target: dtype is u8, must be i32 or i64", lambda x, w, t: ln.forward(x, w, t.astype(np.uint8))),
        (TypeError, "input is a masked array", lambda x, w, t: ln.forward(np.ma.array(x, mask=x > 0), w, t)),
        (TypeError, "out is a list, must be a dict", lambda x, w, t: ln.forward(x, w, t, out=[x])),
        (ValueError, "accumulate has 1 elements", lambda x, w, t: ln.loss_and_gradient(x, w, t, accumulate=(True,))),
        (TypeError, "logits: dtype is bf16, must be f32 or the operand type f32",
         lambda x, w, t: ln.forward(x, w, t, return_logits="bf16")),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error, message, call):
    x, w, t = case(4, 10, 3)
    with pytest.raises(error, match=message):
        call(x, w, t)


def test_outputs_in_the_memory_of_what_is_read_are_refused():
    x, w, t = case(4, 10, 3)
    both = np.concatenate([x, x], axis=1)
    for out in (x, both[:, :3]):
        with pytest.raises(ValueError, match=r"out\['grad_input'\]: lies in the memory of input"):
            ln.loss_and_gradient(x if out is x else both[:, 1:4], w, t, out={"grad_input": out})
    beside = ln.loss_and_gradient(both[:, :3], w, t, out={"grad_input": both[:, 3:]})
    np.testing.assert_array_equal(beside.grad_input, ln.loss_and_gradient(x, w, t).grad_input)


def test_outputs_in_each_other_s_memory_are_refused():
    x, w, t = case(10, 10, 3)
    one = np.zeros((10, 3), np.float32)
    with pytest.raises(ValueError, match=r"out\['grad_weight'\]: lies in the memory of out\['grad_input'\]"):
        ln.loss_and_gradient(x, w, t, out={"grad_input": one, "grad_weight": one})
    rows = np.zeros(15, np.float32)
    with pytest.raises(ValueError, match=r"out\['sum_exp_logits'\]: lies in the memory of out\['logits_max'\]"):
        ln.forward(x, w, t, out={"logits_max": rows[:10], "sum_exp_logits": rows[5:]})


def test_merged_statistics_may_take_the_place_of_a_shard_s():
    x, w, t = case(9, 30, 8)
    shards = [ln.forward(x, w[a:b], t, vocab_start_index=a) for a, b in ((0, 13), (13, 30))]
    apart = ln.merge(shards)
    first = shards[0]
    merged = ln.merge(shards, out=dict(zip(first._fields[:4], first[:4])))
    assert merged.logits_max is first.logits_max
    for found, value in zip(merged[:4], apart[:4]):
        np.testing.assert_array_equal(found, value)


def test_copies_of_reversed_arrays_live_as_long_as_the_call():
    # Negative strides are copied. Freed too early, large copies are unmapped: the core would fault.
    BT = 1 << 18
    x, w, t = np.ones((BT, 1), np.float32), rng.standard_normal((3, 1)).astype("f"), np.zeros(BT, np.int64)
    counts = np.arange(BT) % 3 == 0
    for call in (ln.forward, ln.loss_and_gradient):
        turned = call(x, w, t, counts=counts[::-1])
        plain = call(x, w, t, counts=np.ascontiguousarray(counts[::-1]))
        np.testing.assert_array_equal(turned.sum_exp_logits, plain.sum_exp_logits)
    s = [ln.forward(x, w[r : r + 1], t, vocab_start_index=r) for r in range(3)]
    turned = [ln.Statistics(*(np.ascontiguousarray(a[::-1])[::-1] for a in one[:4])) for one in s]
    for found, value in zip(ln.merge(turned)[:3], ln.merge(s)[:3]):
        np.testing.assert_array_equal(found, value)
    merged = ln.merge(s)
    losses = ln.loss(merged, counts=counts[::-1]).loss
    np.testing.assert_array_equal(losses == 0, ~counts[::-1])


def test_read_only_outputs_are_refused():
    x, w, t = case(4, 10, 3)
    out = np.zeros(4, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"out\['loss'\]: the array is read-only"):
        ln.loss_and_gradient(x, w, t, out={"loss": out})


def test_cases_of_the_command_line_are_written_and_read(tmp_path):
    x, w, t = case(5, 11, 4, "bf16")
    path = tmp_path / "case.safetensors"
    ln.save_case(path, input=x[:, ::-1], weight=w, target=t, vocab_start_index=3, ignore_index=-100)
    loaded = ln.load_case(path)
    np.testing.assert_array_equal(loaded["input"].view(np.uint16), x[:, ::-1].view(np.uint16))
    np.testing.assert_array_equal(loaded["target"], t)
    assert loaded["vocab_start_index"] == 3 and loaded["ignore_index"] == -100
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match="no safetensors file"):
        ln.load_case(path)
