# SPDX-License-Identifier: Apache-2.0
"""Small random models of Hugging Face's through real Trainer and SFTTrainer steps."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import logitless.hf as hf  # noqa: E402

SIZES = dict(
    vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def make(kind: str, **more):
    torch.manual_seed(1)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8, **more))


def batch(B=3, T=17, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 199, (B, T), generator=g)
    labels = ids.clone()
    labels[0, :5] = -100
    labels[2, -4:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def close(name, found, value, relative):
    error = (found.float() - value.float()).norm()
    assert error <= relative * value.float().norm() + 1e-7, (name, float(error), float(value.norm()))


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def agree(plain, patched, exact=None):
    """Gradients of every step; in bf16 (exact: the same in fp32) those of the first, and no further from
    fp32's than twice what the unpatched model's are."""
    if exact is None:
        for a, b in zip(plain, patched):
            assert set(a) == set(b)
            for name in a:
                close(name, b[name], a[name], 1e-4)
        return
    assert set(plain[0]) == set(patched[0]) == set(exact[0])
    for name, value in exact[0].items():
        theirs, ours = ((step[0][name] - value).norm() for step in (plain, patched))
        assert ours <= 2 * theirs + 1e-3 * value.norm(), (name, float(ours), float(theirs))


# ---- the forward --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_loss_and_all_gradients_are_the_unpatched_model_s(kind, tied, items):
    plain = make(kind, tie_word_embeddings=tied).train()
    patched = hf.patch(copy.deepcopy(plain))
    more = {} if items is None else {"num_items_in_batch": items}
    a, b = plain(**batch(), **more), patched(**batch(), **more)
    assert b.logits is None and b.loss.dtype == torch.float32
    close("loss", b.loss.detach(), a.loss.detach(), 1e-6)
    a.loss.backward()
    b.loss.backward()
    expected, found = gradients(plain), gradients(patched)
    assert set(expected) == set(found)
    for name, value in expected.items():
        close(name, found[name], value, 2e-5)


def test_shift_labels_are_taken_as_they_are():
    plain = make("llama").train()
    patched = hf.patch(copy.deepcopy(plain))
    inputs = batch()
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    a = plain(**inputs).loss
    b = patched(**{**inputs, "shift_labels": shifted}).loss
    close("loss", b.detach(), a.detach(), 1e-6)


def test_eval_and_calls_without_labels_run_the_model_s_own_forward():
    model = hf.patch(make("llama"))
    inputs = batch()
    assert model.eval()(**inputs).logits.shape == (3, 17, 199)
    del inputs["labels"]
    assert model.train()(**inputs).logits.shape == (3, 17, 199)
    assert model.train()(inputs["input_ids"]).logits is not None
    out = model.eval().generate(inputs["input_ids"][:1], max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 20)
    hf.unpatch(model)
    assert model.train()(**batch()).logits is not None and "forward" not in vars(model)


def test_a_batch_without_labels_that_count_has_loss_zero_and_gradients():
    model = hf.patch(make("llama").train())
    inputs = batch()
    inputs["labels"].fill_(-100)
    loss = model(**inputs, num_items_in_batch=torch.tensor(0)).loss
    loss.backward()
    assert loss.item() == 0 and model.lm_head.weight.grad.eq(0).all()


# ---- heads that are refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Gemma2", "Gemma2ForCausalLM changes its logits after the head .final_logit_softcapping = 30.0"),
        ("Cohere", "CohereForCausalLM changes its logits after the head .logit_scale"),
        ("Granite", "GraniteForCausalLM changes its logits after the head .logits_scaling = 4.0"),
        ("MiniCPM3", "MiniCPM3ForCausalLM changes its logits after the head .logits_scaling"),
        ("Phi", "PhiForCausalLM's head has a bias"),
    ],
)
def test_heads_that_are_more_than_a_product_are_refused_by_name(kind, message):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this transformers has no {kind}")
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **({"logits_scaling": 4.0} if kind == "Granite" else {}),
        **({"head_dim": 8} if kind == "Gemma2" else {}),
        **({"hidden_size_": 0, "dim_model_base": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8} if kind == "MiniCPM3" else {}),
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises(NotImplementedError, match=message):
        hf.patch(model)


def test_a_change_of_the_logits_that_no_name_tells_is_found_on_the_first_batch():
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.01
            return out

    torch.manual_seed(1)
    model = hf.patch(Scaled(transformers.LlamaConfig(**SIZES)).train())
    with pytest.raises(NotImplementedError, match="Scaled's logits are not its head's weight . hidden"):
        model(**batch())


def test_an_adapter_or_another_kind_of_head_is_refused():
    class Adapted(torch.nn.Linear):
        pass

    model = make("llama")
    model.lm_head = Adapted(32, 199, bias=False)
    with pytest.raises(NotImplementedError, match="head is a .*Adapted, must be a plain torch.nn.Linear"):
        hf.patch(model)
    with pytest.raises(TypeError, match="model is a Linear, must be a transformers model"):
        hf.patch(torch.nn.Linear(3, 3))
    with pytest.raises(TypeError, match="model is a int, must be a model or a trainer"):
        hf.patch(3)


# ---- Trainer ------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        one = batch(3, 17, seed=i)
        return {k: v[i % 3] for k, v in one.items()}


class Keep(transformers.TrainerCallback):
    """The gradients of every optimiser step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(gradients(model))


def train(model, folder, bf16, trainer_type=None, config_type=None, patch_trainer=False, **more):
    keep = Keep()
    arguments = (config_type or transformers.TrainingArguments)(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-2, bf16=bf16, use_cpu=True, report_to=[],
        logging_steps=1, save_strategy="no", disable_tqdm=True, seed=3, max_grad_norm=1e9,
        remove_unused_columns=False, dataloader_num_workers=0, **more.pop("config", {}),
    )  # fmt: skip
    trainer = (trainer_type or transformers.Trainer)(
        model=model, args=arguments, train_dataset=more.pop("train_dataset", None) or Rows(),
        callbacks=[keep], **more,
    )  # fmt: skip
    if patch_trainer:
        hf.patch(trainer)
    trainer.train()
    return [h["loss"] for h in trainer.state.log_history if "loss" in h], keep.steps, trainer


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_trainer_steps_are_those_of_the_unpatched_model(kind, bf16, tmp_path):
    plain = make(kind)
    patched = hf.patch(copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="logitless.hf.patch is bypassed")
        a, b = train(plain, tmp_path, bf16), train(patched, tmp_path, bf16)
    assert len(a[0]) == len(b[0]) == 2
    for x, y in zip(a[0], b[0]):
        assert x == pytest.approx(y, rel=2e-3 if bf16 else 1e-5)
    exact = train(make(kind), tmp_path, False) if bf16 else None
    agree(a[1], b[1], exact and exact[1])


# ---- TRL ----------------------------------------------------------------------------------------


def sft(model, folder, bf16, patch_trainer):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(198)} | {"[UNK]": 198}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")),
        unk_token="[UNK]", pad_token="w0", eos_token="w1",
    )  # fmt: skip
    rows = [Rows()[i] for i in range(8)]
    data = datasets.Dataset.from_list(
        [{"input_ids": r["input_ids"].tolist(), "labels": r["labels"].tolist()} for r in rows]
    )
    return train(
        model, folder, bf16, trl.SFTTrainer, trl.SFTConfig, patch_trainer, train_dataset=data,
        processing_class=tokenizer, config={"dataset_kwargs": {"skip_prepare_dataset": True}},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_sft_trainer_gets_what_it_asks_for(bf16, tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    plain = make("llama")
    patched = copy.deepcopy(plain)
    a = sft(plain, tmp_path, bf16, False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="logitless.hf.patch is bypassed")
        b = sft(patched, tmp_path, bf16, True)
    for x, y in zip(a[0], b[0]):
        assert x == pytest.approx(y, rel=2e-3 if bf16 else 1e-5)
    exact = sft(make("llama"), tmp_path, False, False) if bf16 else None
    agree(a[1], b[1], exact and exact[1])
    for key, tolerance in (("entropy", 1e-2 if bf16 else 1e-4), ("mean_token_accuracy", 0.06 if bf16 else 1e-6)):
        x, y = ([h[key] for h in t[2].state.log_history if key in h] for t in (a, b))
        assert len(x) == len(y) == 2 and x == pytest.approx(y, abs=tolerance)


@pytest.mark.slow
def test_a_patch_that_was_bypassed_warns(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    with pytest.warns(UserWarning, match="logitless.hf.patch is bypassed"):
        sft(hf.patch(make("llama")), tmp_path, False, False)


def test_entropy_and_top_1_of_each_token():
    torch.manual_seed(0)
    x, w = torch.randn(300, 32), torch.randn(199, 32)
    t = torch.randint(0, 199, (300,))
    t[::3] = (x @ w.T).argmax(1)[::3]
    x.requires_grad_()
    loss, entropy, top1 = hf._PerToken.apply(x, w, t, False)
    logits = x.double() @ w.double().T
    p = torch.softmax(logits, 1)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(top1, logits.argmax(1) == t) and not entropy.requires_grad
    reference = torch.nn.functional.cross_entropy(logits, t, reduction="none")
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    (loss * torch.arange(300)).sum().backward()
    mine, x.grad = x.grad, None
    (torch.nn.functional.cross_entropy(x @ w.T, t, reduction="none") * torch.arange(300)).sum().backward()
    torch.testing.assert_close(mine, x.grad, rtol=1e-3, atol=1e-2)
