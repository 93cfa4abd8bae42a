# SPDX-License-Identifier: Apache-2.0
"""Run by mpirun: python -m mpi4py mpi_ranks.py SCENARIO [THREAD_LEVEL]. Uncaught exceptions end all ranks."""

from __future__ import annotations

import itertools
import os
import signal
import sys

import mpi4py

if len(sys.argv) > 2:
    mpi4py.rc.thread_level = sys.argv[2]

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from judge import assert_within, expected  # noqa: E402
from mpi4py import MPI  # noqa: E402

from logitless.parallel import (  # noqa: E402
    balanced_shard,
    padded_shard,
    vocab_parallel_loss_and_gradient,
)

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.Get_rank(), WORLD.Get_size()


def case(dtype="f32", BT=37, V=203, H=24):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((BT, H), np.float32).astype(TYPES[dtype])
    w = (rng.standard_normal((V, H), np.float32) * 0.3).astype(TYPES[dtype])
    t = rng.integers(0, V, BT)
    t[::7] = -100
    return x, w, t


def covers(V):
    cuts = [V * r * (r + 1) // (RANKS * (RANKS + 1)) for r in range(RANKS + 1)]
    yield [balanced_shard(V, RANKS, r) for r in range(RANKS)]
    yield [padded_shard(V, RANKS, r, 16) for r in range(RANKS)]
    yield list(zip(cuts, cuts[1:]))[::-1]
    yield [(0, 0)] * (RANKS - 1) + [(0, V)]


def values():
    for dtype in TYPES:
        x, w, t = case(dtype)
        count = (t != -100).sum()
        e = expected(np.float64(x), np.float64(w), t, np.full(37, 1 / count), multiply=dtype, output=dtype)
        for cover in covers(203):
            for sliced, strategy in itertools.product((False, True), ("one_pass", "recompute")):
                begin, end = cover[RANK]
                part = slice(*balanced_shard(37, RANKS, RANK)) if sliced else slice(None)
                step = vocab_parallel_loss_and_gradient(
                    x[part], w[begin:end], t, group=WORLD, vocab_start=begin, ignore_index=-100,
                    sequence_parallel=sliced, chunk_tokens=8, strategy=strategy,
                )  # fmt: skip
                everything = WORLD.allgather((step.total, step.loss.tobytes(), step.grad_input, step.grad_weight))
                assert len({e[:2] for e in everything}) == 1, "ranks have other bits"
                inputs = [np.float64(e[2]) for e in everything]
                assert sliced or all((i == inputs[0]).all() for i in inputs)
                assert_within("loss", step.loss, e.loss, e.allowed_loss)
                assert_within("grad_input", np.concatenate(inputs) if sliced else inputs[0],
                              e.grad_input, e.allowed_grad_input)  # fmt: skip
                order = np.argsort([c[0] for c in cover], kind="stable")
                assert_within("grad_weight", np.concatenate([np.float64(everything[r][3]) for r in order]),
                              e.grad_weight, e.allowed_grad_weight)  # fmt: skip


def errors():
    x, w, t = case()
    begin, end = balanced_shard(203, RANKS, RANK)
    for change, text in (
        ({"normalizer": RANK + 1.0}, "normalizer: ranks 0 and 1 were given 1.000000 and 2.000000, must be the same"),
        ({"vocab_start": -1 if RANK == 1 else begin}, "rank 1: vocab_start is -1, must be between 0 and 281474976710656"),
    ):  # fmt: skip
        try:
            vocab_parallel_loss_and_gradient(x, w[begin:end], t, group=WORLD, ignore_index=-100, **change)
        except ValueError as error:
            assert str(error) == text, error
        else:
            raise AssertionError("no error")
    group = WORLD.Split(RANK % 2, RANK)  # a group of its own beside the others
    begin, end = balanced_shard(203, group.Get_size(), group.Get_rank())
    step = vocab_parallel_loss_and_gradient(x, w[begin:end], t, group=group, ignore_index=-100)
    assert len(set(WORLD.allgather(round(step.total, 5)))) == 1
    group.Free()
    try:
        vocab_parallel_loss_and_gradient(x, w, t, group=MPI.COMM_NULL)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("group is "), error
    assert "torch" not in sys.modules


def refused():
    x, w, t = case()
    try:
        vocab_parallel_loss_and_gradient(x, w, t, group=WORLD)
    except ValueError as error:
        assert "MPI was initialised with MPI_THREAD_SINGLE, must be MPI_THREAD_FUNNELED" in str(error)
        return
    raise AssertionError("not refused")


def dies():
    x, w, t = case(BT=512, V=6000, H=64)
    begin, end = balanced_shard(6000, RANKS, RANK)
    for i in range(100_000):
        vocab_parallel_loss_and_gradient(x, w[begin:end], t, group=WORLD, ignore_index=-100)
        if RANK == 1 and i == 5:
            os.kill(os.getpid(), signal.SIGKILL)


globals()[sys.argv[1]]()
sys.stdout.write(f"rank {RANK} is fine\n")
sys.stdout.flush()
