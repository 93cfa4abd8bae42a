# SPDX-License-Identifier: Apache-2.0
"""Loss and backward of a language model's head beside what torch offers, on this machine.

Every contender runs in this process, on the same operands and the same threads, one call of each in
turn, round after round, so that drifts of the clock meet all alike. Memory is the resident set of a
fresh process each: what one call of loss and backward adds to it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, Callable

OURS = ("logitless", "logitless recompute")
PEERS = ("eager", "torch.compile", "linear_cross_entropy")
DTYPES = ("bf16", "f16", "f32", "mixed")
MIB = 1 << 20


def parse_shape(text: str) -> tuple[int, int, int]:
    try:
        BT, V, H = (int(part) for part in text.split(","))
    except ValueError:
        raise SystemExit(f"logitless: shape is {text!r}, must be BT,V,H, e.g. 1024,32000,2048") from None
    if min(BT, V, H) < 1:
        raise SystemExit(f"logitless: shape is {text!r}, each of BT,V,H must be at least 1")
    return BT, V, H


def operands(shape: tuple[int, int, int], dtype: str) -> tuple[Any, Any, Any]:
    import torch

    BT, V, H = shape
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}.get(dtype, torch.float32)
    torch.manual_seed(0)
    x = torch.randn(BT, H).to(kind).requires_grad_()
    w = torch.empty(V, H, dtype=kind)
    for begin in range(0, V, 4096):
        w[begin : begin + 4096] = torch.randn(min(4096, V - begin), H) * 0.02
    return x, w.requires_grad_(), torch.randint(0, V, (BT,))


def contender(name: str, shape: tuple[int, int, int], dtype: str) -> Callable[[Any, Any, Any], Any]:
    """(x, w, t) -> loss; under autocast where dtype is "mixed"."""
    import torch
    import torch.nn.functional as F

    if name == "logitless":
        from .torch import linear_cross_entropy as loss
    elif name == "logitless recompute":
        from .torch import linear_cross_entropy

        def loss(x: Any, w: Any, t: Any) -> Any:  # type: ignore[misc]
            return linear_cross_entropy(x, w, t, mode="recompute")

    elif name in ("eager", "torch.compile"):

        def loss(x: Any, w: Any, t: Any) -> Any:  # type: ignore[misc]
            return F.cross_entropy(F.linear(x, w).float(), t)

        if name == "torch.compile":
            loss = torch.compile(loss, dynamic=False)
    elif name == "linear_cross_entropy":
        # Its defaults compute in fp32; these are its fastest ones.
        options = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=min(512, shape[0]), acc_policy="accurate",
            acc_dtype=torch.float32 if dtype in ("f32", "f16") else torch.bfloat16,
        )  # fmt: skip

        def loss(x: Any, w: Any, t: Any) -> Any:  # type: ignore[misc]
            if dtype == "mixed":
                x, w = x.bfloat16(), w.bfloat16()
            return F.linear_cross_entropy(x, w, t, options=options)

    else:
        raise SystemExit(f"logitless: contender is {name!r}, must be one of {', '.join(OURS + PEERS)}")
    if dtype != "mixed":
        return loss

    def under_autocast(x: Any, w: Any, t: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(x, w, t)

    return under_autocast


def step(loss: Callable[..., Any], x: Any, w: Any, t: Any) -> float:
    x.grad = w.grad = None
    begin = time.perf_counter()
    loss(x, w, t).backward()
    return time.perf_counter() - begin


def available(names: Iterable[str]) -> list[str]:
    import torch

    return [
        n for n in names
        if n != "linear_cross_entropy" or hasattr(torch.nn, "LinearCrossEntropyOptions")
    ]  # fmt: skip


def measure_time(
    names: list[str], shape: tuple[int, int, int], dtype: str, seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:  # fmt: skip
    x, w, t = operands(shape, dtype)
    losses = {}
    for name in names:
        progress(f"warming up {name}")
        losses[name] = contender(name, shape, dtype)
        step(losses[name], x, w, t)
    times: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    rounds = 0
    while rounds < 3 or time.perf_counter() - begin < seconds:
        rounds += 1
        progress(f"round {rounds}")
        for name in names:
            times[name].append(step(losses[name], x, w, t))
    x.grad = w.grad = None
    return times


# ---- memory -------------------------------------------------------------------------------------


def resident_bytes(field: str = "VmRSS") -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def memory_of_one_step(name: str, shape: tuple[int, int, int], dtype: str) -> int:
    """In this process: bytes that loss and backward add, gradients included, operands not."""
    import torch

    small = (8, 64, 8)
    loss = contender(name, shape, dtype)
    if name != "torch.compile":  # threads, code and small caches exist already in any program
        step(contender(name, small, dtype), *operands(small, dtype))
    x, w, t = operands(shape, dtype)
    if name == "torch.compile":
        # Compiling takes memory of its own: what remains of it does not count.
        step(loss, x, w, t)
        x.grad = w.grad = None
        loss = contender(name, shape, dtype)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    reset_peak()
    before = resident_bytes()
    step(loss, x, w, t)
    return resident_bytes("VmHWM") - before


def measure_memory(name: str, shape: tuple[int, int, int], dtype: str) -> int:
    """The same in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "logitless._bench", name, ",".join(map(str, shape)), dtype],
        capture_output=True, text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"the process that measures {name} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


# ---- the command --------------------------------------------------------------------------------


def time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.{0 if seconds > 0.1 else 2}f} ms"


def bytes_text(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / MIB:.0f} MiB"


def run(arguments: Any) -> int:
    import torch

    from . import info

    shapes = [parse_shape(s) for s in arguments.shape or ["1024,32000,2048"]]
    wanted = list(OURS) + (list(PEERS) if arguments.peers else [])
    names = available(wanted)
    here = info()
    results = []
    for shape in shapes:
        say = _progress(shape)
        times = measure_time(names, shape, arguments.dtype, arguments.seconds, say)
        memory = {}
        for name in names if not arguments.no_memory else []:
            say(f"memory of {name}")
            memory[name] = measure_memory(name, shape, arguments.dtype)
        say("")
        results.append((shape, times, memory))
    if arguments.json:
        print(json.dumps({
            "machine": here, "torch": torch.__version__, "dtype": arguments.dtype,
            "cases": [{"shape": s, "seconds": t, "bytes": m} for s, t, m in results],
        }, indent=1))  # fmt: skip
    else:
        print(f"CPU only: {here['cpu']}, {here['isa']}, {torch.get_num_threads()} threads; torch "
              f"{torch.__version__}; loss and backward, {arguments.dtype}; medians of interleaved rounds")  # fmt: skip
        for shape, times, memory in results:
            _print_bars(f"BT, V, H = {', '.join(map(str, shape))}", *_groups(times, memory))
    if arguments.svg:
        from . import _svg

        groups = []
        for shape, times, memory in results:
            for heading, entries in _groups(times, memory):
                groups.append((f"{heading}, BT, V, H = {', '.join(map(str, shape))}", entries))
        with open(arguments.svg, "w") as file:
            file.write(_svg.bars(f"Loss and backward on {here['cpu']}, {arguments.dtype}", groups))
    return 0


Entry = tuple[str, float, str]


def _groups(
    times: dict[str, list[float]], memory: dict[str, int]
) -> list[tuple[str, list[Entry]]]:
    groups = [("time", [(n, statistics.median(t), time_text(statistics.median(t)))
                        for n, t in times.items()])]  # fmt: skip
    if memory:
        groups.append(("memory added", [(n, float(b), bytes_text(b)) for n, b in memory.items()]))
    return groups


def _progress(shape: tuple[int, int, int]) -> Callable[[str], None]:
    if not sys.stderr.isatty():
        return lambda _: None

    def say(text: str) -> None:
        line = f"{','.join(map(str, shape))}: {text}" if text else ""
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    return say


def _print_bars(title: str, *groups: tuple[str, list[Entry]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n" + title)
        for heading, entries in groups:
            largest = max(v for _, v, _ in entries)
            for name, value, shown in entries:
                print(f"  {name:22s} {'#' * max(1, round(40 * value / largest)):40s} {shown}  {heading}")
        return
    from rich.bar import Bar

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", "", "time and memory of loss and backward"):
        table.add_column(column, justify="right" if not column else "left")
    for heading, entries in groups:
        largest = max(v for _, v, _ in entries)
        table.add_row("", "", heading)
        for name, value, shown in entries:
            ours = name.startswith("logitless")
            table.add_row(name, shown, Bar(largest, 0, value, width=48, color="green" if ours else "red"))
    Console().print(table)


if __name__ == "__main__":
    print(memory_of_one_step(sys.argv[1], parse_shape(sys.argv[2]), sys.argv[3]))
