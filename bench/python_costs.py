#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the Python package costs beside the core, to be run on a quiet machine.

  python bench/python_costs.py

1. A call of one token: torch's face less the core's own call, in microseconds (at most 100 promised).
2. Torch's products and ours in turn, beside each alone (at most 5 % promised): two pools of threads in
   one process would show here.
"""

import statistics
import time

import torch

import logitless
from logitless import _torch_ops


def microseconds(call, rounds=7, calls=500):
    for _ in range(calls):
        call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return min(times) * 1e6


def one_token():
    x = torch.randn(1, 64, requires_grad=True)
    w = torch.randn(100, 64, requires_grad=True)
    t = torch.zeros(1, dtype=torch.int64)
    rows = [torch.empty(1) for _ in range(4)]
    vectors = [_torch_ops.vector(r) for r in rows]
    gi, gw = torch.empty_like(x), torch.empty_like(w)
    xm, wm, tv = _torch_ops.matrix(x), _torch_ops.matrix(w), _torch_ops.vector(t)
    gim, gwm, options = _torch_ops.matrix(gi), _torch_ops.matrix(gw), _torch_ops.options()
    core = _torch_ops._core

    def statistics_and_loss():
        core.forward(xm, wm, tv, 0, 100, -100, None, None, 0, vectors[1], vectors[2], vectors[3],
                     None, None, None, options)  # fmt: skip
        core.loss(vectors[1], vectors[2], vectors[3], None, None, vectors[0], None, None, options)

    def step():
        core.loss_and_gradient(xm, wm, tv, -100, None, None, 1.0, None, 1, vectors[0], vectors[1],
                               vectors[2], vectors[3], gim, False, gwm, False, options)  # fmt: skip

    def without_gradients():
        with torch.no_grad():
            logitless.linear_cross_entropy(x, w, t)

    for name, face, own in (
        ("forward, no gradients", without_gradients, statistics_and_loss),
        ("forward, one pass", lambda: logitless.linear_cross_entropy(x, w, t), step),
        ("forward, recompute", lambda: logitless.linear_cross_entropy(x, w, t, mode="recompute"),
         statistics_and_loss),
    ):  # fmt: skip
        with_face, alone = microseconds(face), microseconds(own)
        print(f"BT = 1, {name}: {with_face:.1f} us, the core's {alone:.1f}, beside it {with_face - alone:.1f}")


def in_turn(rounds=15):
    a, b = torch.randn(1024, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    x = torch.randn(256, 1024).bfloat16().requires_grad_()
    w = (torch.randn(16000, 1024) * 0.02).bfloat16().requires_grad_()
    t = torch.randint(0, 16000, (256,))

    def torch_s():
        for _ in range(4):
            a @ b

    def ours():
        x.grad = w.grad = None
        logitless.linear_cross_entropy(x, w, t).backward()

    def seconds(call):
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    alone, turns = {torch_s: [], ours: []}, {torch_s: [], ours: []}
    for call in alone:
        seconds(call)
    for _ in range(rounds):
        for call in alone:
            alone[call] += [seconds(call) for _ in range(3)]
        for _ in range(3):
            for call in turns:
                turns[call].append(seconds(call))
    for call in alone:
        ratio = statistics.median(turns[call]) / statistics.median(alone[call])
        print(f"{call.__name__}: alone {statistics.median(alone[call]) * 1e3:.2f} ms, in turn {ratio:.3f} of it")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {logitless.info()['isa']}")
    one_token()
    in_turn()
