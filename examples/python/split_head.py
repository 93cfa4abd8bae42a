# SPDX-License-Identifier: Apache-2.0
"""The head of a language model split over ranks: one call for the loss, on a process group or a mesh.

    torchrun --nproc-per-node 2 examples/python/split_head.py               # Megatron's way: a process group
    torchrun --nproc-per-node 2 examples/python/split_head.py --sequence    # each rank has a slice of the tokens
    torchrun --nproc-per-node 4 examples/python/split_head.py --mesh        # data parallel (FSDP2) x split head

All three train the same head on the same tokens, and print the same losses.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from logitless.parallel import balanced_shard, vocab_parallel_linear_cross_entropy

V, H, BT, STEPS, RATE = 5003, 128, 256, 5, 20.0


def whole_head() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(V, H) * 0.1


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and targets of a step; in training the former come from the model's layers."""
    g = torch.Generator().manual_seed(step % 2)
    return torch.randn(BT, H, generator=g), torch.randint(0, V, (BT,), generator=g)


def on_a_process_group(sequence: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start, end = balanced_shard(V, ranks, rank)  # or any other cover; pass vocab_start=start then
    weight = torch.nn.Parameter(whole_head()[start:end].clone())
    optimiser = torch.optim.SGD([weight], lr=RATE)
    tokens = slice(*balanced_shard(BT, ranks, rank)) if sequence else slice(None)
    for step in range(STEPS):
        hidden, target = batch(step)
        hidden = hidden[tokens].requires_grad_()
        loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, sequence_parallel=sequence)
        optimiser.zero_grad()
        loss.backward()  # hidden.grad: of all ranks, of this rank's tokens; weight.grad: of this rank's rows
        optimiser.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f} over {ranks} ranks", flush=True)


class Head(torch.nn.Module):
    """The head and its loss in one module, so that FSDP gathers its weight for the loss."""

    def __init__(self, mesh) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.weight = torch.nn.Parameter(distribute_tensor(whole_head(), mesh, [Shard(0)]))

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # The DTensor says which group it is split over, and where this rank's rows begin.
        return vocab_parallel_linear_cross_entropy(hidden, self.weight, target)


def on_a_mesh() -> None:
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "vocabulary"))
    head = fully_shard(Head(mesh["vocabulary"]), mesh=mesh["data"])
    optimiser = torch.optim.SGD(head.parameters(), lr=RATE, foreach=False)
    replica = mesh.get_local_rank("data")
    for step in range(STEPS):
        hidden, target = batch(step)
        loss = head(hidden[replica::2], target[replica::2])  # half of the tokens each
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        dist.all_reduce(mean := loss.detach().clone(), op=dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / ranks:.4f} over {ranks} ranks", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence", action="store_true", help="each rank has a slice of the tokens")
    parser.add_argument("--mesh", action="store_true", help="FSDP2 beside the split head")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    on_a_mesh() if arguments.mesh else on_a_process_group(arguments.sequence)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
