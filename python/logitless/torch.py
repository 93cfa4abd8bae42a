# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model's head for torch: loss and gradients without the logits."""

from __future__ import annotations

import math
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._sparse import as_int64, tolerance, whole_seed
from ._torch_ops import (
    AUTO,
    AUTO_ONE_PASS,
    MODES,
    ONE_PASS,
    RECOMPUTE,
    STORE_SOFTMAX,
    apply,
    check_gradient_fits,
    fits_one_pass,
    gradient_output,
    refuse_double_backward,
    run_backward,
)
from ._types import integer

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]

_OPERANDS = (torch.bfloat16, torch.float16, torch.float32)
_LATER = "is not supported yet: {} must be {} (torch.nn.functional.linear_cross_entropy has it)"


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    reduction: str = "mean",
    ignore_index: Optional[int] = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    token_weights: Optional[Tensor] = None,
    normalizer: Union[float, Tensor, None] = None,
    mode: str = AUTO,
    workspace_limit: Optional[int] = None,
    return_logsumexp: bool = False,
    main_grad: bool = False,
    grad_tolerance: float = 0.0,
    seed: Union[int, Tensor, None] = None,
) -> Any:
    """Cross-entropy of ``input @ linear_weight.T`` against `target`, the logits never built.

    The arguments of `torch.nn.functional.linear_cross_entropy`, and the same loss, but that it is
    always float32, and that a batch without any target that counts has loss 0 and zero gradients
    (torch: NaN).

    Args:
        input: [..., H] bfloat16, float16 or float32, any strides, on the CPU.
        linear_weight: [V, H], the same type. Under autocast float32 operands are rounded while
            they are packed, and their gradients are float32.
        target: [...] int64 or int32, in [0, V), or `ignore_index`: such tokens cost nothing.
        reduction: "mean" (over the targets that count), "sum" or "none".
        ignore_index: None means -100.
        token_weights: [...], each token's factor in the loss. No gradient flows into it.
        normalizer: what the sum is divided by; None: the number of targets that count ("mean"), 1
            ("sum", "none").
        mode: "one_pass" makes loss and gradients in the forward; "recompute" keeps three numbers
            per token and multiplies the logits again in the backward; "store_softmax" keeps the
            softmax; "auto" takes one pass when gradients are wanted, the reduction is mean or sum,
            logsumexp is not asked for and one pass fits the limit, else recompute.
        workspace_limit: bytes of scratch memory that one call may use; None: the default
            (docs/memory.md), never a function of tokens times V.
        return_logsumexp: also return the logsumexp of each token's logits, float32 [...], 0 where
            ignored, differentiable: ``loss + 1e-4 * logsumexp.square().mean()`` adds a z-loss.
        main_grad: add linear_weight's gradient to ``linear_weight.main_grad`` (float32, as
            Megatron-LM keeps it) in the backward, and set ``grad_added_to_main_grad``; its own
            gradient is then None.
        grad_tolerance: 0: exact gradients. Else, between 2^-16 and 0.5: gradients that are right on
            average, each token's with a relative error of about so much, and far cheaper where the
            softmax is peaked (docs/sparse-gradient.md). Not with mode "store_softmax".
        seed: of the sparse gradient's choice, an int or a tensor of one; None: drawn from torch's
            default generator, anew for each call that wants gradients, as dropout draws. Never the same
            one for every step: errors would add up instead of averaging out.

    linear_bias, weight, label_smoothing and options are not supported yet and must be left alone.
    """
    if linear_bias is not None:
        raise NotImplementedError("linear_bias " + _LATER.format("it", "None"))
    if weight is not None:
        raise NotImplementedError("weight (of classes) " + _LATER.format("it", "None"))
    if label_smoothing != 0.0:
        raise NotImplementedError("label_smoothing " + _LATER.format("it", "0.0"))
    if options is not None:
        raise NotImplementedError(
            "options (of torch's chunks) is not supported: it must be None; see mode and "
            "workspace_limit"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, must be 'mean', 'sum' or 'none'")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, must be one of {', '.join(map(repr, MODES))}")
    if mode == ONE_PASS and reduction == "none":
        raise ValueError(
            'mode is "one_pass" with reduction "none", must be "recompute" or "store_softmax": what '
            "each token's loss is multiplied by is not known in the forward (token_weights with "
            'reduction "sum" say it there)'
        )
    grad_tolerance = tolerance(grad_tolerance)
    if grad_tolerance and mode == STORE_SOFTMAX:
        raise ValueError(
            f'grad_tolerance is {grad_tolerance:g} with mode "store_softmax", must be 0: from a stored '
            'softmax gradients are exact ("one_pass" and "recompute" make sparse ones)'
        )
    limit = 0 if workspace_limit is None else integer("workspace_limit", workspace_limit, 0)
    ignored = -100 if ignore_index is None else integer("ignore_index", ignore_index)
    _check_tensors(input, linear_weight, target)
    parameter = linear_weight
    input, linear_weight, bf16 = _operands(input, linear_weight)

    BT = math.prod(input.shape[:-1])
    V, H = linear_weight.shape
    flat_input = input if input.dim() == 2 else input.reshape(BT, H)
    flat_target = target if target.dim() == 1 else target.reshape(BT)
    if token_weights is not None:
        token_weights = _token_weights(token_weights, target).reshape(BT)
    if normalizer is not None:
        normalizer = _normalizer(normalizer)

    recording = torch.is_grad_enabled()
    grad_input = recording and flat_input.requires_grad
    grad_weight = recording and linear_weight.requires_grad
    chosen = _seed(seed, draw=grad_tolerance != 0.0 and (grad_input or grad_weight))
    if chosen is None:
        grad_tolerance = 0.0
    if main_grad and grad_weight:
        return _with_main_grad(
            flat_input, linear_weight, parameter, flat_target, target.shape, token_weights, normalizer,
            reduction, ignored, mode, bf16, limit, return_logsumexp, grad_tolerance, chosen,
        )  # fmt: skip
    if mode == AUTO:
        if not (grad_input or grad_weight) or reduction == "none" or return_logsumexp:
            mode = RECOMPUTE
        elif not torch.compiler.is_compiling():
            # While tracing, BT may be unknown; the operator then settles it.
            mode = _fitting_mode(
                BT, V, H, flat_input, bf16, grad_input, grad_weight, limit, grad_tolerance
            )
    elif mode == ONE_PASS and not (grad_input or grad_weight):
        mode = RECOMPUTE
    if limit and chosen is not None and mode == RECOMPUTE and not torch.compiler.is_compiling():
        # A sparse gradient needs more than the forward: said here, not in the backward.
        check_gradient_fits(
            BT, V, H, flat_input.dtype, bf16, grad_input, grad_weight, limit, grad_tolerance
        )
    per_token_weights = reduction == "none" and token_weights is not None
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        _refuse_forward_mode(input, linear_weight)
    total, loss, logsumexp, *_ = apply(
        grad_input or grad_weight,
        flat_input, linear_weight, flat_target, None if per_token_weights else token_weights,
        normalizer, reduction, ignored, mode, bf16, grad_input, grad_weight, limit, grad_tolerance,
        chosen,
    )  # fmt: skip
    if reduction == "none":
        if token_weights is not None:
            loss = loss * token_weights.masked_fill(flat_target == ignored, 0.0)
        if normalizer is not None:
            loss = loss / normalizer.to(loss.dtype)
        total = loss.reshape(target.shape)
    return (total, logsumexp.reshape(target.shape)) if return_logsumexp else total


def _refuse_forward_mode(*tensors: Tensor) -> None:
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "linear_cross_entropy has no forward-mode derivative (torch.func.jvp, jacfwd): use "
                "reverse mode, or torch.nn.functional.cross_entropy there"
            )


def _fitting_mode(
    BT: int, V: int, H: int, input: Tensor, bf16: bool, grad_input: bool, grad_weight: bool,
    limit: int, grad_tolerance: float,
) -> str:  # fmt: skip
    if not isinstance(BT, int) or not isinstance(V, int):  # symbolic: the operator settles it
        return AUTO
    fits = fits_one_pass(
        BT, V, H, input.dtype, bf16, grad_input, grad_weight, limit, grad_tolerance
    )
    return AUTO_ONE_PASS if fits else RECOMPUTE


# ---- arguments ----------------------------------------------------------------------------------


def _check_tensors(input: Tensor, linear_weight: Tensor, target: Tensor) -> None:
    _check_kinds(input, linear_weight, target, "linear_weight")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target: shape is {list(target.shape)}, must be input's without its last dimension: "
            f"{list(input.shape[:-1])}"
        )


def _check_kinds(input: Tensor, weight: Tensor, target: Tensor, weight_name: str) -> None:
    """All but how many tokens there are."""
    for name, tensor in (("input", input), (weight_name, weight), ("target", target)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{name} is on {tensor.device}, must be on the CPU, which is all that logitless "
                "runs on for now: move it there (tensor.cpu())"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise TypeError(f"{name} is a {kind} tensor, must be a plain dense one")
        if type(tensor) is not Tensor and type(tensor).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor, must be a plain tensor: call this inside the module that "
                "FSDP gathers (make the loss part of it), or pass tensor.full_tensor()"
            )
    if not input.device.type == weight.device.type == target.device.type:
        raise ValueError(
            f"input is on {input.device}, {weight_name} on {weight.device} and target on "
            f"{target.device}, must all be on the CPU (meta tensors have no values)"
        )
    if input.dim() == 0:
        raise ValueError("input: shape is [], must be [..., H]")
    if weight.dim() != 2:
        raise ValueError(f"{weight_name}: shape is {list(weight.shape)}, must be [V, H]")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{weight_name}: shape is {list(weight.shape)}, must be [V, H] with H = "
            f"{input.shape[-1]}, the last dimension of input {list(input.shape)}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target: dtype is {_name(target.dtype)}, must be int64 or int32")
    for name, tensor in (("input", input), (weight_name, weight)):
        if tensor.dtype not in _OPERANDS:
            raise TypeError(
                f"{name}: dtype is {_name(tensor.dtype)}, must be bfloat16, float16 or float32"
            )


def _operands(
    input: Tensor, linear_weight: Tensor, weight_name: str = "linear_weight"
) -> tuple[Tensor, Tensor, bool]:
    """The operands of one type, and whether float32 ones are multiplied as bfloat16."""
    if not torch.compiler.is_compiling() and (input.is_neg() or linear_weight.is_neg()):
        # Views like .conj().imag, whose memory holds the opposite sign.
        input, linear_weight = input.resolve_neg(), linear_weight.resolve_neg()
    if torch.is_autocast_enabled("cpu"):
        autocast = torch.get_autocast_dtype("cpu")
        if autocast is torch.bfloat16:
            if linear_weight.dtype is torch.float32:
                # The weight stays as it is; a 16-bit input is far smaller.
                return input.to(torch.float32), linear_weight, True
            return input.to(autocast), linear_weight.to(autocast), False
        if autocast is torch.float16:
            return input.to(autocast), linear_weight.to(autocast), False
    if input.dtype is not linear_weight.dtype:
        raise TypeError(
            f"input is {_name(input.dtype)} and {weight_name} is {_name(linear_weight.dtype)}, must "
            'be the same without autocast (torch.autocast("cpu", dtype=torch.bfloat16) multiplies '
            "float32 parameters as bfloat16)"
        )
    return input, linear_weight, False


def _token_weights(token_weights: Tensor, target: Tensor) -> Tensor:
    if not isinstance(token_weights, Tensor):
        raise TypeError(f"token_weights is a {type(token_weights).__name__}, must be a torch.Tensor")
    if token_weights.shape != target.shape:
        raise ValueError(
            f"token_weights: shape is {list(token_weights.shape)}, must be target's "
            f"{list(target.shape)}"
        )
    if token_weights.device.type != target.device.type:
        raise ValueError(
            f"token_weights is on {token_weights.device}, must be on {target.device} like target"
        )
    if token_weights.requires_grad:
        raise NotImplementedError(
            "token_weights requires a gradient, which is not supported: detach it, or multiply the "
            'losses of reduction="none" by it'
        )
    if not torch.compiler.is_compiling() and token_weights.is_neg():
        token_weights = token_weights.resolve_neg()
    return token_weights.to(torch.float32)


def _normalizer(normalizer: Union[float, Tensor]) -> Tensor:
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise ValueError(
                f"normalizer: shape is {list(normalizer.shape)}, must be one number"
            )
        if normalizer.is_complex() or normalizer.dtype is torch.bool:
            raise TypeError(f"normalizer: dtype is {_name(normalizer.dtype)}, must be a real number's")
        if normalizer.requires_grad:
            raise NotImplementedError(
                "normalizer requires a gradient, which is not supported: detach it, or divide the "
                'loss of reduction="sum" by it'
            )
        return normalizer.reshape(())
    if isinstance(normalizer, bool) or not isinstance(normalizer, (int, float)):
        raise TypeError(f"normalizer is a {type(normalizer).__name__}, must be a number or a tensor")
    return torch.tensor(float(normalizer), dtype=torch.float64, device="cpu")


def _seed(seed: Union[int, Tensor, None], draw: bool) -> Optional[Tensor]:
    """The seed of a sparse gradient as the operators take it; not draw: it only has to be a valid one."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1:
            raise ValueError(f"seed: shape is {list(seed.shape)}, must be one number")
        if seed.dtype is not torch.int64:
            raise TypeError(f"seed: dtype is {_name(seed.dtype)}, must be int64")
        return seed.reshape(()) if draw else None
    if seed is not None:
        number = as_int64(whole_seed(seed))
        return torch.tensor(number, dtype=torch.int64, device="cpu") if draw else None
    if not draw:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- Megatron's main_grad -----------------------------------------------------------------------


def _with_main_grad(
    input: Tensor, linear_weight: Tensor, parameter: Tensor, target: Tensor, shape: Any,
    token_weights: Optional[Tensor], normalizer: Optional[Tensor], reduction: str,
    ignore_index: int, mode: str, bf16: bool, limit: int, return_logsumexp: bool,
    grad_tolerance: float, seed: Optional[Tensor],
) -> Any:  # fmt: skip
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "main_grad is not supported under torch.compile: it changes a tensor in the backward"
        )
    if mode == ONE_PASS:
        raise ValueError(
            'mode is "one_pass" with main_grad, must be "recompute", "store_softmax" or "auto": what '
            "is added to main_grad is known in the backward only"
        )
    _check_main_grad(parameter, "linear_weight")
    mode = STORE_SOFTMAX if mode == STORE_SOFTMAX else RECOMPUTE
    total, loss, logsumexp = _MainGrad.apply(
        input, linear_weight, target, None if reduction == "none" else token_weights, normalizer,
        reduction, ignore_index, mode, bf16, limit, parameter, grad_tolerance, seed,
    )  # fmt: skip
    if reduction == "none":
        if token_weights is not None:
            loss = loss * token_weights.masked_fill(target == ignore_index, 0.0)
        if normalizer is not None:
            loss = loss / normalizer.to(loss.dtype)
        total = loss.reshape(shape)
    return (total, logsumexp.reshape(shape)) if return_logsumexp else total


def _check_main_grad(weight: Tensor, name: str) -> None:
    main = getattr(weight, "main_grad", None)
    if not isinstance(main, Tensor):
        raise ValueError(
            f"{name}.main_grad is missing, must be a float32 tensor of {name}'s shape"
        )
    if main.dtype is not torch.float32 or main.shape != weight.shape:
        raise ValueError(
            f"{name}.main_grad is {_name(main.dtype)} {list(main.shape)}, must be float32 "
            f"{list(weight.shape)}"
        )


class _MainGrad(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, linear_weight: Tensor, target: Tensor,
        token_weights: Optional[Tensor], normalizer: Optional[Tensor], reduction: str,
        ignore_index: int, mode: str, bf16: bool, limit: int, parameter: Tensor,
        grad_tolerance: float, seed: Optional[Tensor],
    ) -> Any:  # fmt: skip
        total, loss, logsumexp, logits_max, sum_exp_logits, _, _, softmax = (
            torch.ops.logitless.linear_cross_entropy.default(
                input, linear_weight, target, token_weights, normalizer, reduction, ignore_index,
                mode, bf16, False, False, limit, 0.0, None,
            )
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            input, linear_weight, target, token_weights, normalizer, logits_max, sum_exp_logits,
            softmax, seed,
        )  # fmt: skip
        ctx.settings = (reduction, ignore_index, mode, bf16, limit, grad_tolerance)
        ctx.parameter = parameter  # linear_weight may be a copy of it in autocast's type
        return total, loss, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_total: Any, grad_loss: Any, grad_logsumexp: Any) -> Any:  # type: ignore[override]
        (input, linear_weight, target, token_weights, normalizer, logits_max, sum_exp_logits,
         softmax, seed) = ctx.saved_tensors  # fmt: skip
        reduction, ignore_index, mode, bf16, limit, grad_tolerance = ctx.settings
        upstream = (grad_total, grad_loss, grad_logsumexp)
        grad_input = None
        if any(g is not None for g in upstream):
            with torch.no_grad():
                if ctx.needs_input_grad[0]:
                    grad_input = gradient_output(input.shape[0], input.shape[1], input.dtype)
                run_backward(
                    *upstream, input, linear_weight, target, token_weights, normalizer, reduction,
                    ignore_index, bf16, logits_max, sum_exp_logits,
                    softmax if mode == STORE_SOFTMAX else None, limit, grad_input,
                    ctx.parameter.main_grad, (False, True), grad_tolerance, seed,
                )  # fmt: skip
            ctx.parameter.grad_added_to_main_grad = True
        return (*refuse_double_backward((*upstream, input), (grad_input, None)), *(None,) * 11)


# ---- the module ---------------------------------------------------------------------------------


class LinearCrossEntropyLoss(torch.nn.Module):
    """`linear_cross_entropy` with its own ``linear``, like `torch.nn.LinearCrossEntropyLoss`: the same
    constructor and the same keys in its state_dict ("linear.weight"). Further arguments as for the
    function. To tie it to an embedding: ``loss.linear.weight = embedding.weight``."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        reduction: str = "mean",
        weight: Optional[Tensor] = None,
        ignore_index: Optional[int] = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        mode: str = AUTO,
        workspace_limit: Optional[int] = None,
        return_logsumexp: bool = False,
        main_grad: bool = False,
        grad_tolerance: float = 0.0,
    ) -> None:
        super().__init__()
        if tuple(out_features) != ():
            raise NotImplementedError("out_features " + _LATER.format("it", "()"))
        if bias:
            raise NotImplementedError("bias " + _LATER.format("it", "False"))
        if weight is not None:
            raise NotImplementedError("weight (of classes) " + _LATER.format("it", "None"))
        if label_smoothing != 0.0:
            raise NotImplementedError("label_smoothing " + _LATER.format("it", "0.0"))
        if options is not None:
            raise NotImplementedError(
                "options (of torch's chunks) is not supported: it must be None; see mode and "
                "workspace_limit"
            )
        self.num_classes = num_classes
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.mode = mode
        self.workspace_limit = workspace_limit
        self.return_logsumexp = return_logsumexp
        self.main_grad = main_grad
        self.grad_tolerance = tolerance(grad_tolerance)
        self.linear = torch.nn.Linear(
            in_features, num_classes, bias=False, device=device, dtype=dtype
        )

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weights: Optional[Tensor] = None,
        normalizer: Union[float, Tensor, None] = None,
        seed: Union[int, Tensor, None] = None,
    ) -> Any:
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            token_weights=token_weights,
            normalizer=normalizer,
            mode=self.mode,
            workspace_limit=self.workspace_limit,
            return_logsumexp=self.return_logsumexp,
            main_grad=self.main_grad,
            grad_tolerance=self.grad_tolerance,
            seed=seed,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, "
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, mode={self.mode!r}"
        )
