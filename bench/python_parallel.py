#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A step of a head split over gloo ranks beside Megatron-core's: time and memory.

  pip install --no-deps megatron-core==0.16.1
  python bench/python_parallel.py --ranks 2 --shape 1024,32000,1024 --dtype bf16

Megatron's step is what its ColumnParallelLinear and vocab_parallel_cross_entropy do: logits of this rank's
rows, the loss over the ranks, both products of the backward, and an all-reduce of hidden's gradient. Each
contender has processes of its own, one thread each; the two compute in turn, so that both meet the same
minutes. Memory: what the first step adds to the peak of a rank whose operands and gradients are there.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import socket
import statistics
import time
import warnings
from typing import Any, Callable

CONTENDERS = ("logitless", "megatron-core")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def step_of(contender: str, group: Any) -> Callable[[Any, Any, Any], None]:
    import torch
    import torch.distributed as dist

    if contender == "logitless":
        from logitless.parallel import vocab_parallel_linear_cross_entropy

        return lambda x, w, t: vocab_parallel_linear_cross_entropy(x, w, t, group=group).backward()

    warnings.simplefilter("ignore")  # what it would rather have installed
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

    def megatron(x: Any, w: Any, t: Any) -> None:
        logits = torch.nn.functional.linear(x, w).unsqueeze(1)
        vocab_parallel_cross_entropy(logits, t.unsqueeze(1)).mean().backward()
        dist.all_reduce(x.grad)  # of the operands' type, as Megatron does

    return megatron


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(contender: str, rank: int, ranks: int, port: int, shape: Any, dtype: str, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    BT, V, H = shape
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    torch.manual_seed(0)
    x = torch.randn(BT, H).to(kind).requires_grad_()
    rows = V // ranks + (rank < V % ranks) if contender == "logitless" else V // ranks
    w = torch.empty(rows, H, dtype=kind).normal_(0, 0.02).requires_grad_()
    t = torch.randint(0, V // ranks * ranks, (BT,))
    step = step_of(contender, None)

    def run() -> float:
        x.grad, w.grad = torch.zeros_like(x), torch.zeros_like(w)
        gc.collect()
        dist.barrier()
        begin = time.perf_counter()
        step(x, w, t)
        dist.barrier()
        return time.perf_counter() - begin

    x.grad, w.grad = torch.zeros_like(x), torch.zeros_like(w)
    before = peak_bytes()
    run()
    pipe.send(peak_bytes() - before)
    while pipe.recv():
        pipe.send(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="1024,32000,1024", help="BT,V,H; V of the whole vocabulary")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    shape = tuple(int(part) for part in arguments.shape.split(","))
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Any]] = {}
    memory: dict[str, int] = {}
    processes = []
    for contender in CONTENDERS:
        port = free_port()
        pipes[contender] = []
        for rank in range(arguments.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, daemon=True,
                args=(contender, rank, arguments.ranks, port, shape, arguments.dtype, theirs),
            )  # fmt: skip
            process.start()
            processes.append(process)
            pipes[contender].append(ours)
        memory[contender] = max(pipe.recv() for pipe in pipes[contender])
    seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for _ in range(arguments.rounds + 1):
        for contender in CONTENDERS:
            for pipe in pipes[contender]:
                pipe.send(True)
            seconds[contender].append(max(pipe.recv() for pipe in pipes[contender]))
    print(f"(BT, V, H) = {shape}, {arguments.dtype}, {arguments.ranks} ranks of one thread")
    for contender in CONTENDERS:
        times = sorted(seconds[contender][1:])  # the first warms up
        print(f"{contender:14} median {statistics.median(times) * 1e3:8.1f} ms   "
              f"[{times[0] * 1e3:.1f}, {times[-1] * 1e3:.1f}]   {memory[contender] / 2**20:8.1f} MiB a rank")  # fmt: skip
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
