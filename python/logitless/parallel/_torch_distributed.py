# SPDX-License-Identifier: Apache-2.0
"""The transport over torch.distributed: a process group whose backend takes CPU tensors (gloo)."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def process_group(group: Any) -> Any:
    """The process group that None, a group, or a DeviceMesh of one dimension means."""
    if not dist.is_available():
        raise RuntimeError("torch was built without torch.distributed")
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group is None and torch.distributed is not initialised: call "
                'torch.distributed.init_process_group("gloo"), or pass a group'
            )
        return dist.group.WORLD
    if type(group).__name__ == "DeviceMesh":
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions, must have 1: name one of them "
                '(mesh["tp"])'
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}, must be a process group or a DeviceMesh of "
            "torch.distributed, an mpi4py communicator or a Transport"
        )
    return group


# gloo's threads let go of a tensor a moment after its collective has ended. The last to do so needs the
# GIL, which torch 2.4 holds while destroy_process_group waits for those threads: a hang, one time in four.
# So that it is never they, the views of the last collectives stay here (which keeps no memory).
_recent: deque[Tensor] = deque(maxlen=64)


def _tensor(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    if buffer.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    tensor = torch.frombuffer(buffer, dtype=dtype)
    _recent.append(tensor)
    return tensor


class _Done:
    def wait(self) -> None:
        pass


class _Work:
    def __init__(self, work: Any) -> None:
        self.work = work  # keeps the tensors

    def wait(self) -> None:
        self.work.wait()


class _ReduceScatter:
    def __init__(self, work: Any, values: Tensor, parts: Tensor, mine: Tensor) -> None:
        self.work, self.values, self.parts, self.mine = work, values, parts, mine

    def wait(self) -> None:
        self.work.wait()
        with torch.no_grad():
            self.mine.copy_(self.parts[0])
            for part in self.parts[1:]:
                self.mine.add_(part)


class TorchTransport:
    """Collectives of the group the caller gave, on views of the operators' buffers."""

    def __init__(self, group: Any) -> None:
        self._group = process_group(group)
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        if self.rank < 0:
            raise ValueError("group: this process is no rank of it")

    def all_gather(self, mine: memoryview, all: memoryview) -> None:
        self.start_all_gather(mine, all).wait()

    def start_all_gather(self, mine: memoryview, all: memoryview) -> Any:
        gather = getattr(dist, "all_gather_single", None)  # torch 2.13's name
        if gather is None:
            gather = dist.all_gather_into_tensor
        work = gather(
            _tensor(all, torch.uint8), _tensor(mine, torch.uint8), group=self._group, async_op=True
        )
        return _Work(work)

    def start_all_reduce_sum(self, values: memoryview) -> Any:
        if values.nbytes == 0:
            return _Done()
        work = dist.all_reduce(
            _tensor(values, torch.float32), group=self._group, async_op=True
        )
        return _Work(work)

    def start_reduce_scatter_sum(
        self, values: memoryview, counts: list[int], mine: memoryview
    ) -> Any:
        """Each rank is sent its part by all others and adds them in rank order: the bytes of a
        reduce-scatter, which gloo does not have (torch's stand-in all-reduces everything)."""
        if values.nbytes == 0:
            return _Done()
        sent, own = _tensor(values, torch.float32), _tensor(mine, torch.float32)
        parts = torch.empty((self.size, own.numel()), dtype=torch.float32)
        work = dist.all_to_all_single(
            parts.view(-1), sent, [own.numel()] * self.size, counts, group=self._group,
            async_op=True,
        )  # fmt: skip
        return _ReduceScatter(work, sent, parts, own)
