# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes that torch.distributed joins by gloo. They are started once and serve all tests of
a session, since importing torch takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

MOST = 4
PATIENCE = 900  # seconds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join(rank: int, ranks: int, port: int, timeout: float = PATIENCE) -> None:
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )


def _serve(rank: int, port: int, pipe: Any) -> None:
    import torch.distributed as dist

    join(rank, MOST, port)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, MOST + 1)}
    while True:
        task = pipe.recv()
        if task is None:
            break
        ranks, body, arguments = task
        try:
            result = body(groups[ranks], *arguments)
        except BaseException as error:
            result = error
        try:
            pipe.send(result)
        except Exception as error:  # what cannot be pickled
            pipe.send(RuntimeError(f"{type(result).__name__} {result!r}: {error}"))
    os._exit(0)  # nothing is to be tidied up


class GlooRanks:
    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).parent))
        context = multiprocessing.get_context("spawn")
        self.port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, ranks: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What body(group, *arguments) returned, or raised, on each rank. body: a function of a module."""
        for pipe in self.pipes[:ranks]:
            pipe.send((ranks, body, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes[:ranks]):
            # In small steps, so that a machine that stood still is not a rank that hangs.
            assert any(pipe.poll(1) for _ in range(PATIENCE)), f"rank {rank} hangs in {body.__name__}"
            results.append(pipe.recv())
        return results

    def all(self, ranks: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """run; what a rank raised is raised."""
        results = self.run(ranks, body, *arguments)
        for found in results:
            if isinstance(found, BaseException):
                raise found
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
