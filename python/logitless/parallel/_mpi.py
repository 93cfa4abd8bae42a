# SPDX-License-Identifier: Apache-2.0
"""The transport over mpi4py.

Non-blocking collectives of MPI advance only inside calls of MPI, so while the operators compute (without
the GIL) a thread looks at the pending ones. It and the caller take turns, as MPI_THREAD_SERIALIZED asks.
"""

from __future__ import annotations

import threading
from typing import Any

_LOOK_EVERY = 200e-6  # seconds; a look costs some 10 us
_UNIT = 64  # bytes of the type that long gathers count in: counts of MPI are ints


class _Progress:
    """The thread that looks; one for all communicators."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.pending: list[Any] = []
        self.failed: dict[int, BaseException] = {}
        self.thread: threading.Thread | None = None

    def add(self, request: Any) -> None:
        with self.turn:
            if self.thread is None:
                self.thread = threading.Thread(target=self._look, name="logitless-mpi", daemon=True)
                self.thread.start()
            self.pending.append(request)
            self.turn.notify()

    def wait(self, request: Any) -> None:
        with self.turn:
            if request in self.pending:
                self.pending.remove(request)
            error = self.failed.pop(id(request), None)
            if error is not None:
                raise error
            request.Wait()  # at once where it is done

    def _look(self) -> None:
        with self.turn:
            while True:
                while not self.pending:
                    self.turn.wait()
                for request in list(self.pending):
                    try:
                        done = request.Test()
                    except Exception as error:
                        self.failed[id(request)] = error
                        done = True
                    if done:
                        self.pending.remove(request)
                self.turn.wait(_LOOK_EVERY)


_progress = _Progress()
_unit: Any = None


class _Pending:
    def __init__(self, request: Any, buffers: tuple[Any, ...], looked_at: bool) -> None:
        self.request, self.buffers, self.looked_at = request, buffers, looked_at
        if looked_at:
            _progress.add(request)

    def wait(self) -> None:
        if self.looked_at:
            _progress.wait(self.request)
        else:
            self.request.Wait()
        self.buffers = ()


class MpiTransport:
    """Over an mpi4py communicator. Needs MPI_THREAD_FUNNELED or higher, and MPI_THREAD_SERIALIZED (or
    MULTIPLE, mpi4py's default) for collectives that go on while the next tokens are computed."""

    def __init__(self, communicator: Any) -> None:
        from mpi4py import MPI

        if not isinstance(communicator, MPI.Intracomm):
            raise TypeError(
                f"group is a {type(communicator).__name__}, must be an intra-communicator of mpi4py"
            )
        if communicator == MPI.COMM_NULL:
            raise ValueError("group is MPI.COMM_NULL: this process is no rank of it")
        level = MPI.Query_thread()
        if level < MPI.THREAD_FUNNELED:
            raise ValueError(
                "group: MPI was initialised with MPI_THREAD_SINGLE, must be MPI_THREAD_FUNNELED or "
                "higher (mpi4py.rc.thread_level): operators compute on several threads"
            )
        self._mpi, self._comm = MPI, communicator
        self._looked_at = level >= MPI.THREAD_SERIALIZED
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()

    def _bytes(self, mine: memoryview) -> Any:
        global _unit
        if mine.nbytes % _UNIT != 0:
            return self._mpi.BYTE
        if _unit is None:
            _unit = self._mpi.BYTE.Create_contiguous(_UNIT).Commit()
        return _unit

    def all_gather(self, mine: memoryview, all: memoryview) -> None:
        kind = self._bytes(mine)
        with _progress.turn:
            self._comm.Allgather([mine, kind], [all, kind])

    def start_all_gather(self, mine: memoryview, all: memoryview) -> _Pending:
        kind = self._bytes(mine)
        with _progress.turn:
            request = self._comm.Iallgather([mine, kind], [all, kind])
        return _Pending(request, (mine, all), self._looked_at)

    def start_all_reduce_sum(self, values: memoryview) -> _Pending:
        with _progress.turn:
            request = self._comm.Iallreduce(
                self._mpi.IN_PLACE, [values, self._mpi.FLOAT], op=self._mpi.SUM
            )
        return _Pending(request, (values,), self._looked_at)

    def start_reduce_scatter_sum(
        self, values: memoryview, counts: list[int], mine: memoryview
    ) -> _Pending:
        with _progress.turn:
            request = self._comm.Ireduce_scatter(
                [values, self._mpi.FLOAT], [mine, self._mpi.FLOAT], recvcounts=counts,
                op=self._mpi.SUM,
            )  # fmt: skip
        return _Pending(request, (values, mine, counts), self._looked_at)
