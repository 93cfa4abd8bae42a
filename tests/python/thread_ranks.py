# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: a strict transport, written as a user would write one."""

from __future__ import annotations

import threading
from typing import Any, Callable

import numpy as np

PATIENCE = 600  # seconds, after which a rank that waits for others gives up


class _World:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.slots: list[Any] = [None] * size


class _Sum:
    """Made when it is waited for; until then the buffer holds NaN, so that whoever reads or writes it
    meanwhile is found out."""

    def __init__(self, ranks: ThreadRanks, given: np.ndarray, into: np.ndarray, part: slice) -> None:
        self.ranks, self.given, self.into, self.part = ranks, given.copy(), into, part
        into.fill(np.nan)

    def wait(self) -> None:
        assert np.isnan(self.into).all(), "the buffer of a sum was written while it was under way"
        everything = self.ranks.exchange("sum", self.given)
        total = everything[0][self.part].copy()
        for more in everything[1:]:
            total += more[self.part]
        self.into[:] = total


class _Gather:
    """Likewise: made when it is waited for."""

    def __init__(self, ranks: ThreadRanks, mine: memoryview, all: memoryview) -> None:
        self.ranks, self.mine, self.all = ranks, mine, all
        self.given = bytes(mine)
        all[:] = b"\xff" * all.nbytes

    def wait(self) -> None:
        assert bytes(self.mine) == self.given, "what is gathered was written while it was under way"
        self.all[:] = b"".join(self.ranks.exchange("gather", self.given))


class ThreadRanks:
    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, len(world.slots)
        self.calls: list[tuple[str, int]] = []  # verb, bytes of this rank
        self.fail_at: tuple[str, BaseException] | None = None

    def _called(self, verb: str, count: int) -> None:
        self.calls.append((verb, count))
        if self.fail_at is not None and self.fail_at[0] == verb:
            raise self.fail_at[1]

    def exchange(self, verb: str, mine: Any) -> list[Any]:
        self.world.slots[self.rank] = (verb, mine)
        self.world.barrier.wait()
        slots = list(self.world.slots)
        self.world.barrier.wait()
        assert {s[0] for s in slots} == {verb}, f"ranks are in different collectives: {slots}"
        return [s[1] for s in slots]

    def all_gather(self, mine: memoryview, all: memoryview) -> None:
        self._called("all_gather", mine.nbytes)
        everything = self.exchange("gather", bytes(mine))
        assert {len(b) for b in everything} == {mine.nbytes}, "ranks gather different sizes"
        assert all.nbytes == self.size * mine.nbytes
        all[:] = b"".join(everything)

    def start_all_gather(self, mine: memoryview, all: memoryview) -> _Gather:
        self._called("start_all_gather", mine.nbytes)
        return _Gather(self, mine, all)

    def start_all_reduce_sum(self, values: memoryview) -> _Sum:
        self._called("start_all_reduce_sum", values.nbytes)
        array = np.frombuffer(values, np.float32)
        return _Sum(self, array, array, slice(None))

    def start_reduce_scatter_sum(
        self, values: memoryview, counts: list[int], mine: memoryview
    ) -> _Sum:
        self._called("start_reduce_scatter_sum", values.nbytes)
        assert 4 * sum(counts) == values.nbytes and 4 * counts[self.rank] == mine.nbytes
        begin = sum(counts[: self.rank])
        return _Sum(self, np.frombuffer(values, np.float32), np.frombuffer(mine, np.float32),
                    slice(begin, begin + counts[self.rank]))  # fmt: skip


def run_ranks(size: int, body: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What body returned, or raised, on each rank."""
    world = _World(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadRanks(world, rank))
        except BaseException as error:
            results[rank] = error
            if isinstance(error, AssertionError):
                world.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    for found in results:
        if isinstance(found, AssertionError):
            raise found
    return results


def same_error(results: list[Any], kind: type[BaseException], text: str) -> None:
    """Every rank ended with this exception."""
    for rank, found in enumerate(results):
        assert type(found) is kind, f"rank {rank}: {found!r}, expected {kind.__name__}({text!r})"
        assert str(found) == text, f"rank {rank}: {found!r}, expected {text!r}"
