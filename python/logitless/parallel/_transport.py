# SPDX-License-Identifier: Apache-2.0
"""What moves between ranks, and by whom: torch.distributed, mpi4py, or an object of the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, cast

from .. import _core


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> None:
        """Returns when it is done. Called once, and also where the call has failed meanwhile."""


class Transport(Protocol):
    """Collective calls: all ranks make the same ones, in the same order, with the same sizes.

    Buffers are memoryviews of bytes, which must not be used after the call (or after wait);
    sums are of float32. Every rank gets the same bits. What a verb raises ends this rank's call with a
    RuntimeError that carries its text; nobody tells the other ranks, whose transport must notice.

    A fourth verb is optional: ``start_all_gather(mine, all) -> Pending``, for gathers that overlap.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather(self, mine: memoryview, all: memoryview) -> None:
        """all: what the ranks gave, in rank order."""

    def start_all_reduce_sum(self, values: memoryview) -> Pending:
        """values become the sums over all ranks, in place."""

    def start_reduce_scatter_sum(
        self, values: memoryview, counts: list[int], mine: memoryview
    ) -> Pending:
        """values: counts[0] floats for rank 0, then counts[1] for rank 1, ..., not to be changed.
        mine: the sums of this rank's part."""


_VERBS = ("all_gather", "start_all_reduce_sum", "start_reduce_scatter_sum")


def open_transport(group: Any) -> Transport:
    """The transport that `group` means."""
    if all(callable(getattr(group, verb, None)) for verb in _VERBS):
        return cast(Transport, group)
    if type(group).__module__.split(".")[0] == "mpi4py" or hasattr(group, "Iallreduce"):
        from ._mpi import MpiTransport

        return MpiTransport(group)
    try:
        from ._torch_distributed import TorchTransport
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        came = "None" if group is None else f"a {type(group).__name__}"
        raise TypeError(
            f"group is {came}, must be an mpi4py communicator or a Transport where torch is not installed"
        ) from None
    return TorchTransport(group)


@contextlib.contextmanager
def all_told(transport: Transport) -> Iterator[None]:
    """What is raised inside ends every rank's call: the others wait in its first collective, and learn
    of it there."""
    try:
        yield
    except BaseException as error:
        _core.vocab_parallel_fail(transport, error)
        raise
