# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a language model's head split over ranks, with the three torch_npu functions.

    torchrun --nproc-per-node 2 examples/python/vocab_parallel.py

The same code runs on an NPU (delete `install`). What the ranks exchange: a maximum, a sum and the
target's logit per token in the forward, and the gradient of the hidden states in the backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import logitless.torch_npu

logitless.torch_npu.install()
import torch_npu  # noqa: E402


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The loss of each token, float32 [BT], the same on every rank.

    input [BT, H] is the same on every rank, weight [V_local, H] holds the rows [start, end) of the
    whole. tokens_at_once bounds the tokens that one call of an operator sees. keep_softmax: the
    backward takes the softmax (BT * V_local * 4 bytes) instead of multiplying the logits again.
    """

    @staticmethod
    def forward(ctx, input, weight, target, start, end, group=None, temperature=1.0,
                tokens_at_once=0, keep_softmax=False):  # fmt: skip
        BT = input.shape[0]
        step = tokens_at_once or max(BT, 1)
        scaled = input if temperature == 1.0 else input / temperature
        chunks = [slice(b, min(b + step, BT)) for b in range(0, BT, step)]
        local = [
            torch_npu.npu_fused_linear_online_max_sum(
                scaled[c], weight, target[c], start, end, keep_softmax
            )
            for c in chunks
        ]
        local_max, local_sum, local_predicted = (torch.cat(s) for s in list(zip(*local))[:3])

        # One maximum for all: every rank's numbers are relative to its own.
        logits_max = local_max.clone()
        dist.all_reduce(logits_max, dist.ReduceOp.MAX, group=group)
        shift = local_max - logits_max
        owned = (target >= start) & (target < end)
        both = torch.stack([
            local_sum * torch.exp(shift),
            torch.where(owned, local_predicted + shift, 0.0),  # a 0 of others is not a logit
        ])  # fmt: skip
        dist.all_reduce(both, group=group)
        sum_exp_logits, predicted_logits = both

        softmax = []
        if keep_softmax:
            results = [
                torch_npu.npu_fused_cross_entropy_loss_with_max_sum(
                    logits_max[c], sum_exp_logits[c], predicted_logits[c],
                    vocab_parallel_logits=statistics[5],
                )
                for c, statistics in zip(chunks, local)
            ]  # fmt: skip
            loss = torch.cat([r[0] for r in results])
            softmax = [r[1] for r in results]
        else:
            loss, _ = torch_npu.npu_fused_cross_entropy_loss_with_max_sum(
                logits_max, sum_exp_logits, predicted_logits
            )
        masks = [statistics[3] for statistics in local]
        masked_targets = [statistics[4] for statistics in local]
        ctx.save_for_backward(scaled, weight, logits_max, sum_exp_logits, *masks, *masked_targets,
                              *softmax)  # fmt: skip
        ctx.chunks, ctx.group, ctx.temperature, ctx.keep_softmax = chunks, group, temperature, keep_softmax
        return loss

    @staticmethod
    def backward(ctx, grad):
        scaled, weight, logits_max, sum_exp_logits, *per_chunk = ctx.saved_tensors
        n = len(ctx.chunks)
        masks, masked_targets, softmax = per_chunk[:n], per_chunk[n : 2 * n], per_chunk[2 * n :]
        grad = grad.contiguous()
        grad_input = torch.zeros_like(scaled, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i, c in enumerate(ctx.chunks):
            statistics = (
                {"softmax": softmax[i]}
                if ctx.keep_softmax
                else {"logits_max": logits_max[c], "sum_exp_logits": sum_exp_logits[c]}
            )
            partial_input, partial_weight = (
                torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
                    grad[c], scaled[c], weight, masks[i], masked_targets[i], **statistics
                )
            )
            grad_input[c] = partial_input.float()
            grad_weight += partial_weight.float()
        dist.all_reduce(grad_input, group=ctx.group)
        grad_input /= ctx.temperature
        return (grad_input.to(scaled.dtype), grad_weight.to(weight.dtype), *(None,) * 7)


def shard_of(rank: int, ranks: int, vocabulary: int) -> tuple[int, int]:
    """Rows [start, end) of a rank; sizes differ by at most one."""
    return rank * vocabulary // ranks, (rank + 1) * vocabulary // ranks


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same hidden states and targets on every rank
    V, H, BT = 5003, 128, 256
    start, end = shard_of(rank, ranks, V)
    hidden = torch.randn(BT, H).bfloat16().requires_grad_()
    target = torch.randint(0, V, (BT,))
    master = (torch.randn(V, H) * 0.1)[start:end].clone()  # float32; the operators see bf16
    for step in range(5):
        weight = master.bfloat16().requires_grad_()
        loss = VocabParallelCrossEntropy.apply(
            hidden, weight, target, start, end, None, 1.0, 100
        ).mean()
        loss.backward()
        master -= 20.0 * weight.grad.float()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f} over {ranks} rank(s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
