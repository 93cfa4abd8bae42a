# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks: FSDP2 with the loss as part of the module that is gathered, and DDP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import logitless

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    pytest.skip(f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard", allow_module_level=True)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(16, 16)
        self.loss = logitless.LinearCrossEntropyLoss(16, 51)

    def forward(self, x, target):
        return self.loss(torch.tanh(self.body(x)), target)


def inputs(rank: int):
    g = torch.Generator().manual_seed(rank)
    return torch.randn(9, 16, generator=g), torch.randint(0, 51, (9,), generator=g)


def make() -> Model:
    torch.manual_seed(5)
    return Model()


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    model = make()
    fully_shard(model.loss, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(*inputs(rank))
    loss.backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    refused = ""
    try:
        logitless.linear_cross_entropy(torch.zeros(1, 16), model.loss.linear.weight, torch.zeros(1).long())
    except TypeError as error:
        refused = str(error)
    torch.save((loss.detach(), gradients, refused), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_fsdp2_gathers_the_head_for_the_loss(tmp_path):
    from test_torch_npu import free_port

    torch.multiprocessing.spawn(_rank, (free_port(), str(tmp_path)), nprocs=2)
    model = make()
    losses = [model(*inputs(rank)) for rank in range(2)]
    (sum(losses) / 2).backward()
    for rank in range(2):
        loss, gradients, refused = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(loss, losses[rank].detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
        assert refused.startswith("linear_weight is a DTensor, must be a plain tensor")


def _ddp_rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(make(), gradient_as_bucket_view=True)
    with model.no_sync():
        model(*inputs(rank)).backward()
    model(*inputs(rank + 2)).backward()
    gradients = {n: p.grad.clone() for n, p in model.module.named_parameters()}
    torch.save(gradients, Path(folder) / f"ddp{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ddp_averages_accumulated_gradients(tmp_path):
    from test_torch_npu import free_port

    torch.multiprocessing.spawn(_ddp_rank, (free_port(), str(tmp_path)), nprocs=2)
    model = make()
    (sum(model(*inputs(i)) for i in range(4)) / 2).backward()
    for rank in range(2):
        gradients = torch.load(tmp_path / f"ddp{rank}.pt")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
