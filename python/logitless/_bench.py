# SPDX-License-Identifier: Apache-2.0
"""Loss and backward of a language model's head beside what torch offers, on this machine.

Time: every contender is a process of its own with the same operands and as many threads. Ours and one
other are there at a time and compute in turn, one call each, round after round, so that drifts of the
clock meet both alike. Torch's processes keep the memory that they free and get huge pages, as ours
keeps the pages of its gradients: with malloc's defaults every step would pay for fresh ones.
Memory: what one call adds to the resident set of a fresh process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

OURS = ("logitless", "logitless recompute")
PEERS = ("eager", "eager fp32 loss", "torch.compile", "torch.compile fp32 loss", "linear_cross_entropy")
DTYPES = ("bf16", "f16", "f32", "mixed")
MIB = 1 << 20
# What docs/performance.md has a table of.
TABLE = (
    ("f32", (1024, 32000, 2048)),
    ("bf16", (1024, 32000, 2048)),
    ("bf16", (1024, 49152, 576)),
    ("bf16", (512, 32064, 4096)),
    ("bf16", (8192, 32000, 1024)),
    ("bf16", (2048, 128256, 2048)),
)
_ROUNDS = (5, 15)  # at least and at most, of each pair
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_KEPT_BYTES_MOST = 10 << 30  # of a process that keeps what it frees
_DATA_BYTES_MOST = 12 << 30  # an allocation beyond fails

Shape = tuple[int, int, int]


def parse_shape(text: str) -> Shape:
    try:
        BT, V, H = (int(part) for part in text.split(","))
    except ValueError:
        raise SystemExit(f"logitless: shape is {text!r}, must be BT,V,H, e.g. 1024,32000,2048") from None
    if min(BT, V, H) < 1:
        raise SystemExit(f"logitless: shape is {text!r}, each of BT,V,H must be at least 1")
    return BT, V, H


def shape_text(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def operands(shape: Shape, dtype: str) -> tuple[Any, Any, Any]:
    import torch

    BT, V, H = shape
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}.get(dtype, torch.float32)
    torch.manual_seed(0)
    x = torch.randn(BT, H).to(kind).requires_grad_()
    w = torch.empty(V, H, dtype=kind)
    for begin in range(0, V, 4096):
        w[begin : begin + 4096] = torch.randn(min(4096, V - begin), H) * 0.02
    return x, w.requires_grad_(), torch.randint(0, V, (BT,))


# ---- contenders ---------------------------------------------------------------------------------


def tunings(shape: Shape, dtype: str) -> list[dict[str, Any]]:
    """Options of torch's linear_cross_entropy to choose from. Its defaults are far slower in 16 bits."""
    acc_dtype = "float32" if dtype in ("f32", "f16") else "bfloat16"
    found: list[dict[str, Any]] = [{}] if dtype == "f32" else []
    for chunk in (256, 512, 1024):
        if chunk <= max(256, shape[0]):
            found.append({"acc_policy": "accurate", "acc_dtype": acc_dtype, "batch_chunk_size": chunk})
    return found


def contender(
    name: str, shape: Shape, dtype: str, options: Optional[dict[str, Any]] = None
) -> Callable[[Any, Any, Any], Any]:
    """(x, w, t) -> loss; under autocast where dtype is "mixed"."""
    import torch
    import torch.nn.functional as F

    if name == "logitless":
        from .torch import linear_cross_entropy as loss
    elif name == "logitless recompute":
        from .torch import linear_cross_entropy

        def loss(x: Any, w: Any, t: Any) -> Any:  # type: ignore[misc]
            return linear_cross_entropy(x, w, t, mode="recompute")

    elif name in PEERS[:4]:
        in_fp32 = name.endswith("fp32 loss")

        def loss(x: Any, w: Any, t: Any) -> Any:  # type: ignore[misc]
            logits = F.linear(x, w)
            return F.cross_entropy(logits.float() if in_fp32 else logits, t)

        if name.startswith("torch.compile"):
            loss = torch.compile(loss, dynamic=False)
    elif name == "linear_cross_entropy":
        options = dict(tunings(shape, dtype)[-1] if options is None else options)
        if "acc_dtype" in options:
            options["acc_dtype"] = getattr(torch, options["acc_dtype"])
            options["batch_chunk_size"] = min(options["batch_chunk_size"], shape[0])
        chunks = torch.nn.LinearCrossEntropyOptions(**options) if options else None

        def loss(x: Any, w: Any, t: Any) -> Any:  # type: ignore[misc]
            if dtype == "mixed":
                x, w = x.bfloat16(), w.bfloat16()
            return F.linear_cross_entropy(x, w, t, options=chunks)

    else:
        raise SystemExit(f"logitless: contender is {name!r}, must be one of {', '.join(OURS + PEERS)}")
    if dtype != "mixed":
        return loss

    def under_autocast(x: Any, w: Any, t: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(x, w, t)

    return under_autocast


def step(loss: Callable[..., Any], x: Any, w: Any, t: Any, accumulate: bool = False) -> float:
    if not accumulate:
        x.grad = w.grad = None
    begin = time.perf_counter()
    loss(x, w, t).backward()
    return time.perf_counter() - begin


def available(names: Iterable[str], dtype: str = "bf16") -> list[str]:
    """Those that this torch has; in f32 the loss is fp32 anyway."""
    import torch

    return [
        n for n in names
        if not (n == "linear_cross_entropy" and not hasattr(torch.nn, "LinearCrossEntropyOptions"))
        and not (n.endswith("fp32 loss") and dtype == "f32")
    ]  # fmt: skip


# ---- time ---------------------------------------------------------------------------------------


class Failed(RuntimeError):
    pass


class Worker:
    """A process that holds the operands and runs one contender when told to."""

    def __init__(self, name: str, shape: Shape, dtype: str, threads: int, folder: str) -> None:
        self.name = name
        BT, V, H = shape
        size = {"bf16": 2, "f16": 2}.get(dtype, 4)
        held = 2 * size * (BT + V) * H
        kept = 0 if name in OURS else int(2.3 * BT * V * (18 if name.endswith("fp32 loss") else 4 * size))
        keeps = name not in OURS and held + kept < _KEPT_BYTES_MOST
        environment = {
            **os.environ,
            **(_KEEP_FREED_MEMORY if keeps else {}),
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.said = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "logitless._bench", "worker", name, ",".join(map(str, shape)), dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, env=environment,
        )  # fmt: skip

    def ask(self, order: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            self.said.seek(0)
            last = self.said.read().strip().splitlines()[-1:] or [f"ended with {code}"]
            raise Failed(f"{self.name}: {last[0]}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()
        self.process.stdout.close()
        self.said.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _work(name: str, shape: Shape, dtype: str) -> None:
    """The worker's side: an order a line on stdin, JSON on stdout."""
    import resource

    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not meet the replies
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES_MOST, _DATA_BYTES_MOST))
    import gc

    x, w, t = operands(shape, dtype)
    for line in sys.stdin:
        order = line.strip()
        reply: Any = None
        if order == "warm":
            choices: list[Any] = tunings(shape, dtype) if name == "linear_cross_entropy" else [None]
            tried: list[tuple[float, Any]] = []
            for choice in choices:
                loss = contender(name, shape, dtype, choice)
                times = [step(loss, x, w, t)]
                if times[0] < 3 * min((s for s, _ in tried), default=times[0]):
                    times += [step(loss, x, w, t)]
                tried.append((min(times), choice))
            options = min(tried, key=lambda one: one[0])[1]
            if len(choices) > 1:
                loss = contender(name, shape, dtype, options)
            step(loss, x, w, t)
            gc.disable()
            reply = options
        else:
            cpu = time.process_time()
            seconds = step(loss, x, w, t, order == "accumulate")
            reply = (seconds, time.process_time() - cpu)
            gc.collect()
        replies.write(json.dumps(reply) + "\n")


def measure_time(
    names: Sequence[str], shape: Shape, dtype: str, seconds: float,
    progress: Callable[[str], None] = lambda _: None, accumulate: bool = False,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """{name: {"seconds": [...], "cpu_seconds": [...], "over_ours": ..., "options": ...}}, or {"failed": why}.

    The first name is the one that the others are raced against, each alone with it, for about `seconds`."""
    import torch

    ours, others = names[0], list(names[1:])
    found: dict[str, dict[str, Any]] = {n: {"seconds": [], "cpu_seconds": []} for n in names}
    order = "accumulate" if accumulate else "run"
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="logitless-bench-") as folder:
        progress(f"warming up {ours}")
        with Worker(ours, shape, dtype, threads, folder) as first:
            first.ask("warm")
            for other in others or [""]:
                try:
                    _race(first, other, shape, dtype, seconds, progress, order, threads, folder, found)
                except Failed as failure:
                    if not other or failure.args[0].startswith(f"{ours}:"):
                        raise
                    found[other] = {"failed": str(failure)}
    return found


def _race(
    first: Worker, other: str, shape: Shape, dtype: str, seconds: float, progress: Callable[[str], None],
    order: str, threads: int, folder: str, found: dict[str, dict[str, Any]],
) -> None:  # fmt: skip
    workers = [first]
    try:
        if other:
            progress(f"warming up {other}")
            workers.append(Worker(other, shape, dtype, threads, folder))
            found[other]["options"] = workers[1].ask("warm")
        pair: list[list[float]] = [[] for _ in workers]
        begin = time.perf_counter()
        least, most = _ROUNDS
        for turn in range(most):
            if turn >= least and time.perf_counter() - begin > seconds:
                break
            progress(f"{other or first.name}, round {turn + 1}")
            for i in range(len(workers)) if turn % 2 == 0 else reversed(range(len(workers))):
                time.sleep(0.05)  # until the other's threads sleep
                wall, cpu = workers[i].ask(order)
                pair[i].append(wall)
                found[workers[i].name]["seconds"].append(wall)
                found[workers[i].name]["cpu_seconds"].append(cpu)
        found[workers[-1].name]["over_ours"] = statistics.median(pair[-1]) / statistics.median(pair[0])
    finally:
        for worker in workers[1:]:
            worker.close()


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


def memory_of_one_step(name: str, shape: Shape, dtype: str) -> int:
    """In this process: bytes that loss and backward add, gradients included, operands not."""
    import torch

    small = (8, 64, 8)
    loss = contender(name, shape, dtype)
    compiled = name.startswith("torch.compile")
    if not compiled:  # threads, code and small caches exist already in any program
        step(contender(name, small, dtype), *operands(small, dtype))
    x, w, t = operands(shape, dtype)
    if compiled:
        # Compiling takes memory of its own: what remains of it does not count.
        step(loss, x, w, t)
        x.grad = w.grad = None
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    reset_peak()
    before = resident_bytes()
    step(loss, x, w, t)
    return resident_bytes("VmHWM") - before


def measure_memory(name: str, shape: Shape, dtype: str) -> int:
    """The same in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "logitless._bench", "memory", name, ",".join(map(str, shape)), dtype],
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

    cases = [(arguments.dtype, parse_shape(s)) for s in arguments.shape or []]
    if arguments.table:
        cases += TABLE
    cases = cases or [(arguments.dtype, (1024, 32000, 2048))]
    peers = arguments.peers or arguments.table
    here = info()
    results = []
    for dtype, shape in cases:
        names = available([*OURS, *(PEERS if peers else ())], dtype)
        say = _progress(dtype, shape)
        times = measure_time(names, shape, dtype, arguments.seconds, say, arguments.accumulate)
        memory = {}
        for name in names if not (arguments.no_memory or arguments.table) else []:
            say(f"memory of {name}")
            memory[name] = measure_memory(name, shape, dtype)
        say("")
        results.append((dtype, shape, times, memory))
        for name, one in times.items():
            if "failed" in one:
                print(f"left out: {name}, {one['failed']}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({
            "machine": here, "torch": torch.__version__, "accumulate": arguments.accumulate,
            "cases": [{"dtype": d, "shape": s, "times": t, "bytes": m} for d, s, t, m in results],
        }, indent=1))  # fmt: skip
    else:
        print(f"CPU only: {here['cpu']}, {here['isa']}, {torch.get_num_threads()} threads; torch "
              f"{torch.__version__}; loss and backward, gradients "
              f"{'accumulate' if arguments.accumulate else 'fresh each step'}; each contender a process, in "
              "turn with ours; medians")  # fmt: skip
        for dtype, shape, times, memory in results:
            _print_bars(f"BT, V, H = {shape_text(shape)}, {dtype}", *_groups(times, memory))
    if arguments.markdown:
        with open(arguments.markdown, "w") as file:
            file.write(markdown(results))
    if arguments.svg:
        from . import _svg

        groups = []
        for dtype, shape, times, memory in results:
            for heading, entries in _groups(times, memory):
                groups.append((f"{heading}, BT, V, H = {shape_text(shape)}, {dtype}", entries))
        with open(arguments.svg, "w") as file:
            file.write(_svg.bars(f"Loss and backward on {here['cpu']}", groups))
    return 0


def markdown(results: Sequence[tuple[str, Shape, dict[str, Any], Any]]) -> str:
    """Ours in milliseconds, the others over ours in the same minutes."""
    columns = [n for n in PEERS if any(n in times for _, _, times, _ in results)]
    head = ["", "BT, V, H", "`logitless`", "recompute", *columns, "fastest of torch's"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for dtype, shape, times, _ in results:
        ours = statistics.median(times["logitless"]["seconds"])
        ratios = {n: times.get(n, {}).get("over_ours") for n in ("logitless recompute", *columns)}
        theirs = [ratio for n in columns if (ratio := ratios[n])]
        cells = [f"{r:.2f}" if r else "" for r in (*ratios.values(), min(theirs) if theirs else None)]
        lines.append(f"| {dtype} | {shape_text(shape)} | {time_text(ours)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


Entry = tuple[str, float, str]


def _groups(times: dict[str, dict[str, Any]], memory: dict[str, int]) -> list[tuple[str, list[Entry]]]:
    medians = {n: statistics.median(t["seconds"]) for n, t in times.items() if t.get("seconds")}
    entries = []
    for name, median in medians.items():
        ratio = times[name].get("over_ours")
        entries.append((name, median, time_text(median) + (f", {ratio:.2f} x ours" if ratio else "")))
    groups = [("time", entries)]
    if memory:
        groups.append(("memory added", [(n, float(b), bytes_text(b)) for n, b in memory.items()]))
    return groups


def _progress(dtype: str, shape: Shape) -> Callable[[str], None]:
    if not sys.stderr.isatty():
        return lambda _: None

    def say(text: str) -> None:
        line = f"{shape_text(shape)} {dtype}: {text}" if text else ""
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
                print(f"  {name:25s} {'#' * max(1, round(40 * value / largest)):40s} {shown}  {heading}")
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
    what, name, shape, dtype = sys.argv[1:]
    if what == "memory":
        print(memory_of_one_step(name, parse_shape(shape), dtype))
    else:
        _work(name, parse_shape(shape), dtype)
