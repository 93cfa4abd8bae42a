# SPDX-License-Identifier: Apache-2.0
"""The head of a language model split over the ranks of an MPI job, on NumPy arrays, without torch.

    mpirun -n 2 python examples/python/split_head_mpi.py
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from logitless.parallel import balanced_shard, vocab_parallel_loss_and_gradient

V, H, BT = 5003, 128, 256


def main() -> None:
    ranks = MPI.COMM_WORLD
    generator = np.random.default_rng(0)  # the same on every rank
    hidden = generator.standard_normal((BT, H), np.float32)
    target = generator.integers(0, V, BT)
    head = generator.standard_normal((V, H), np.float32) * np.float32(0.1)
    start, end = balanced_shard(V, ranks.Get_size(), ranks.Get_rank())
    weight = head[start:end].copy()  # this rank's rows
    for step in range(5):
        found = vocab_parallel_loss_and_gradient(hidden, weight, target, group=ranks)
        weight -= 20 * found.grad_weight
        if ranks.Get_rank() == 0:
            print(f"step {step}: loss {found.total:.4f} over {ranks.Get_size()} ranks", flush=True)


if __name__ == "__main__":
    main()
