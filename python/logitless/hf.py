# SPDX-License-Identifier: Apache-2.0
"""Hugging Face causal language models and trainers.

    logitless.hf.patch(model)      before transformers.Trainer trains it
    logitless.hf.patch(trainer)    after TRL's SFTTrainer was made, which replaces the forward itself

In training, a call with labels computes its loss without logits, and returns ``logits=None``. Calls
without labels, and in eval, run the model's own forward. A head that is more than ``weight . hidden`` (a
scale, a softcap, a bias, an adapter, quantised) is refused.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _core
from ._sparse import tolerance
from ._torch_ops import AUTO, gradient_output, options, row_output, run_backward, vector
from ._torch_ops import matrix as _matrix
from ._types import BF16
from .torch import _operands, _seed, linear_cross_entropy

__all__ = ["patch", "unpatch"]

# What models call a factor or a bound of their logits; the value that changes nothing.
_CONFIGURED = {
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "output_multiplier_scale": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
}
_TOKENS_AT_ONCE = 256  # whose logits are held while their entropy is computed


class _Patch:
    """What one model's patch knows."""

    def __init__(
        self, model: Any, mode: str, workspace_limit: Optional[int], grad_tolerance: float
    ) -> None:
        self.mode = mode
        self.workspace_limit = workspace_limit
        self.grad_tolerance = grad_tolerance
        self.original_forward = model.forward
        self.own_forward = "forward" in vars(model)  # replaced by somebody before us
        self.compared = False
        self.ran = False
        self.warned = False
        self.hooks: list[Any] = []


def patch(
    model: Any, *, mode: str = AUTO, workspace_limit: Optional[int] = None, grad_tolerance: float = 0.0
) -> Any:
    """Lets a causal language model compute its training loss without logits; returns `model`.

    model: a `transformers.PreTrainedModel` with a language-model head, the same inside a PEFT model, or a
    trainer (its model is patched). For TRL's SFTTrainer patch the trainer after making it.
    mode, workspace_limit, grad_tolerance: as for `logitless.linear_cross_entropy`; seeds are drawn from
    torch's default generator.
    """
    target = _model_of(model)
    unpatch(target)
    _check_head(target)
    _check_config(target)
    state = _Patch(target, mode, workspace_limit, tolerance(grad_tolerance))

    # wraps: trainers look at the signature for what a model takes.
    @functools.wraps(type(target).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, state, args, kwargs)

    target.forward = types.MethodType(forward, target)
    target._logitless_patch = state
    state.hooks = [
        target.register_forward_pre_hook(lambda *_: setattr(state, "ran", False)),
        target.register_forward_hook(functools.partial(_warn_if_bypassed, state), with_kwargs=True),
    ]
    return model


def unpatch(model: Any) -> Any:
    """Gives a model its own forward back; returns `model`."""
    target = _model_of(model)
    state = vars(target).pop("_logitless_patch", None)
    if state is not None:
        for hook in state.hooks:
            hook.remove()
        if state.own_forward:
            target.forward = state.original_forward
        else:
            vars(target).pop("forward", None)
    return model


def _model_of(model: Any) -> Any:
    if not isinstance(model, torch.nn.Module) and isinstance(
        getattr(model, "model", None), torch.nn.Module
    ):
        model = model.model  # a trainer
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, must be a model or a trainer")
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]  # PEFT
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a transformers model with a language-model head"
        )
    return model


# ---- heads that are more than weight . hidden ---------------------------------------------------


def _check_head(model: Any) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    name = type(model).__name__
    if head is None:
        raise ValueError(f"{name} has no language-model head")
    if type(head) is not torch.nn.Linear:
        raise NotImplementedError(
            f"{name}'s head is a {type(head).__module__}.{type(head).__name__}, must be a plain "
            "torch.nn.Linear: adapters and quantised weights are not supported (leave lm_head out of "
            "target_modules)"
        )
    if head.bias is not None:
        raise NotImplementedError(f"{name}'s head has a bias, which is not supported")
    return head


def _check_config(model: Any) -> None:
    config = model.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for attribute, harmless in _CONFIGURED.items():
        value = getattr(config, attribute, None)
        if value not in harmless:
            raise NotImplementedError(
                f"{type(model).__name__} changes its logits after the head ({attribute} = {value}), "
                "which is not supported: its loss would be wrong"
            )


def _compare_with_own_logits(model: Any, state: _Patch, kwargs: dict[str, Any]) -> None:
    """One token's weight . hidden beside the logits that the model's own forward returns."""
    given = {
        key: kwargs[key][:1, :8]
        for key in ("input_ids", "inputs_embeds")
        if isinstance(kwargs.get(key), Tensor)
    }
    if not given:
        return
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            hidden = model.base_model(**given).last_hidden_state[0, -1].float()
            logits = type(model).forward(model, **given).logits[0, -1].float()
            head = _weight(_check_head(model)).float()
            own = head @ hidden
            size = (head.abs() @ hidden.abs()).max()
    finally:
        for module in training:
            module.training = True
    allowed = 8 * torch.finfo(model.dtype).eps * size + 1e-5 * own.abs().max()
    if own.shape != logits.shape or not (own - logits).abs().max() <= allowed:
        raise NotImplementedError(
            f"{type(model).__name__}'s logits are not its head's weight . hidden (off by "
            f"{(own - logits).abs().max().item():.3g} where {allowed.item():.3g} is rounding): something "
            "changes them, so its loss would be wrong"
        )


def _weight(head: torch.nn.Linear) -> Tensor:
    weight = head.weight
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # FSDP2


# ---- the forward --------------------------------------------------------------------------------


def _forward(model: Any, state: _Patch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state.ran = True
    kwargs = {**_by_name(model, args), **kwargs}
    fused = kwargs.pop("fused_lm_head", False)  # TRL
    if not fused and not _is_ours(model, kwargs):
        return state.original_forward(**kwargs)
    if kwargs.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
        raise NotImplementedError(
            f"{type(model).__name__} adds a loss of its router (output_router_logits), which is not "
            "supported"
        )
    if not state.compared:
        _compare_with_own_logits(model, state, kwargs)
        state.compared = True
    labels = kwargs.pop("labels", None)
    shift_labels = kwargs.pop("shift_labels", None)
    items = kwargs.pop("num_items_in_batch", None)
    ignore_index = kwargs.pop("ignore_index", -100)
    return_dict = kwargs.pop("return_dict", None)
    kwargs.pop("logits_to_keep", None)
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        kwargs["use_cache"] = False
    outputs = model.base_model(**kwargs)
    hidden = outputs[0] if not hasattr(outputs, "last_hidden_state") else outputs.last_hidden_state
    weight = _weight(_check_head(model))
    if fused:
        return _fused_outputs(hidden, weight, labels, shift_labels, items, state.grad_tolerance)
    if shift_labels is None:
        # Labels move, not hidden states: nothing is copied.
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
    if hidden.dtype is not weight.dtype and not torch.is_autocast_enabled("cpu"):
        hidden = hidden.to(weight.dtype)
    loss = linear_cross_entropy(
        hidden, weight, shift_labels, ignore_index=ignore_index, mode=state.mode,
        workspace_limit=state.workspace_limit, grad_tolerance=state.grad_tolerance, reduction="mean" if items is None else "sum",
        normalizer=None if items is None else _at_least_one(items),
    )  # fmt: skip
    if return_dict is False:
        return (loss,)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(
        loss=loss,
        logits=None,
        hidden_states=getattr(outputs, "hidden_states", None),
        attentions=getattr(outputs, "attentions", None),
    )


def _is_ours(model: Any, kwargs: dict[str, Any]) -> bool:
    if not model.training:
        return False
    if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
        return False
    keep = kwargs.get("logits_to_keep", 0)
    return not isinstance(keep, Tensor) and keep in (0, None)


def _by_name(model: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return dict(zip(names, args))


def _at_least_one(items: Any) -> Any:
    return items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1)


def _warn_if_bypassed(state: _Patch, model: Any, args: Any, kwargs: dict[str, Any], _: Any) -> None:
    if state.ran or state.warned or not model.training:
        return
    if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
        return
    state.warned = True
    warnings.warn(
        f"logitless.hf.patch is bypassed: something replaced {type(model).__name__}.forward after it "
        "(TRL's trainers do), so logits or other kernels are used. Call logitless.hf.patch(trainer) after "
        "making the trainer.",
        stacklevel=2,
    )


# ---- TRL ----------------------------------------------------------------------------------------


def _fused_outputs(
    hidden: Tensor, weight: Tensor, labels: Optional[Tensor], shift_labels: Optional[Tensor], items: Any,
    grad_tolerance: float,
) -> Any:  # fmt: skip
    """What TRL's trainers ask their fused head for: values per token, 0 where the label is -100."""
    from trl.trainer.utils import FusedCausalLMOutput  # type: ignore[import-not-found]

    if shift_labels is None:
        if labels is None:
            raise ValueError("labels are None, must be given with fused_lm_head=True")
        hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
    mask = shift_labels != -100
    rows = hidden[mask]  # as TRL does: a copy of what counts
    if rows.dtype is not weight.dtype and not torch.is_autocast_enabled("cpu"):
        rows = rows.to(weight.dtype)
    rows, weight, bf16 = _operands(rows, weight)
    wanted = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    seed = _seed(None, draw=wanted and grad_tolerance != 0.0)
    loss, entropy, is_top1 = _PerToken.apply(
        rows, weight, shift_labels[mask], bf16, 0.0 if seed is None else grad_tolerance, seed
    )

    def in_place(values: Tensor) -> Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    log_probs = in_place(-loss)
    count = mask.sum().clamp(min=1) if items is None else items
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / count,
        log_probs=log_probs,
        entropy=in_place(entropy),
        is_top1=in_place(is_top1),
        label_mask=mask,
    )


class _PerToken(torch.autograd.Function):
    """Loss, entropy and whether the target is the likeliest token; the loss has a gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, target: Tensor, bf16: bool,
        grad_tolerance: float = 0.0, seed: Optional[Tensor] = None,
    ) -> Any:  # fmt: skip
        BT, V = input.shape[0], weight.shape[0]
        _core.count_rows(vector(target), V, -100)
        loss, entropy, logits_max, sum_exp_logits, predicted = (
            row_output(BT) for _ in range(5)
        )
        logits = torch.empty((min(BT, _TOKENS_AT_ONCE), V), dtype=torch.float32, device="cpu")
        for begin in range(0, BT, _TOKENS_AT_ONCE):
            at = slice(begin, min(begin + _TOKENS_AT_ONCE, BT))
            z = logits[: at.stop - begin]
            _core.forward(
                _matrix(input[at]), _matrix(weight), vector(target[at]), 0, V, None, None,
                BF16 if bf16 else None, 0, vector(logits_max[at]), vector(sum_exp_logits[at]),
                vector(predicted[at]), None, None, _matrix(z), options(),
            )  # fmt: skip
            # H = log(sum) - sum_v p_v (z_v - max), with 0 * -inf = 0.
            z -= logits_max[at, None]
            mean = torch.nan_to_num(torch.exp(z) * z, nan=0.0).sum(1) / sum_exp_logits[at]
            torch.sub(sum_exp_logits[at].log(), mean, out=entropy[at])
        torch.sub(sum_exp_logits.log(), predicted, out=loss)
        ctx.save_for_backward(input, weight, target, logits_max, sum_exp_logits, seed)
        ctx.settings = (bf16, grad_tolerance)
        is_top1 = predicted == 0
        ctx.mark_non_differentiable(entropy, is_top1)
        ctx.set_materialize_grads(False)
        return loss, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, grad_loss: Any, *_: Any) -> Any:  # type: ignore[override]
        input, weight, target, logits_max, sum_exp_logits, seed = ctx.saved_tensors
        bf16, grad_tolerance = ctx.settings
        others = (None,) * (len(ctx.needs_input_grad) - 2)
        if grad_loss is None:
            return (None, None, *others)
        with torch.no_grad():
            BT, H = input.shape
            want_input, want_weight = ctx.needs_input_grad[:2]
            grad_input = gradient_output(BT, H, input.dtype) if want_input else None
            grad_weight = gradient_output(weight.shape[0], H, input.dtype) if want_weight else None
            run_backward(
                None, grad_loss.contiguous(), None, input, weight, target, None, None, "none", -100,
                bf16, logits_max, sum_exp_logits, None, 0, grad_input, grad_weight,
                grad_tolerance=grad_tolerance, seed=seed,
            )  # fmt: skip
        return (grad_input, grad_weight, *others)
