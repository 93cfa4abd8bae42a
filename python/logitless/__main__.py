# SPDX-License-Identifier: Apache-2.0
"""The command line: python -m logitless."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Optional

import numpy as np

from . import __version__, _core, info, sparse_counts
from ._sparse import tolerance
from ._types import NUMBERS, STRATEGY


def _run_info(arguments: Any) -> int:
    found = info()
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"logitless {found['version']}: CPU only, for now")
    print(f"  cpu      {found['cpu']}")
    print(f"  isa      {found['isa']} (offered here: {', '.join(found['isas'])})")
    print(f"  threads  {found['threads']}")
    print(f"  openmp   {found['openmp']}")
    print(f"  caches   L1 {found['l1d_bytes'] >> 10} KiB, L2 {found['l2_bytes'] >> 10} KiB, "
          f"L3 {found['l3_bytes'] >> 20} MiB")  # fmt: skip
    return 0


def _run_plan(arguments: Any) -> int:
    from ._bench import parse_shape

    BT, V, H = parse_shape(arguments.shape)
    dtype = NUMBERS[arguments.dtype]
    for kind in ("forward", "gradient", "step"):
        text, _, _ = _core.plan_text(
            kind, BT, V, H, dtype, None, STRATEGY[arguments.strategy], True, True, dtype,
            (arguments.threads, "", arguments.workspace_limit), tolerance(arguments.grad_tolerance),
        )  # fmt: skip
        print(text, end="")
    return 0


def _case(path: str) -> dict[str, Any]:
    from . import numpy as ln

    case = ln.load_case(path)
    for name in ("input", "weight", "target"):
        if name not in case:
            raise ValueError(f"{path}: there is no tensor {name!r}")
    if case.get("vocab_start_index", 0) != 0:
        raise ValueError(f"{path}: a shard of a vocabulary (vocab_start_index is "
                         f"{case['vocab_start_index']}), must be a whole one")  # fmt: skip
    return case


def _step(case: dict[str, Any], arguments: Any) -> Any:
    from . import numpy as ln

    return ln.loss_and_gradient(
        case["input"], case["weight"], case["target"], ignore_index=case.get("ignore_index"),
        token_weights=case.get("grad"), strategy=arguments.strategy, threads=arguments.threads,
        workspace_limit=arguments.workspace_limit, grad_tolerance=getattr(arguments, "grad_tolerance", 0.0),
        seed=getattr(arguments, "seed", 0),
    )  # fmt: skip


def _run_step(arguments: Any) -> int:
    from . import numpy as ln

    case = _case(arguments.case)
    result = _step(case, arguments)
    rows = len(case["target"])
    print(f"loss {result.total:.6f} over {rows} tokens"
          + (", weighted by grad" if "grad" in case else ""))  # fmt: skip
    counts = sparse_counts()
    if arguments.grad_tolerance and counts is not None:
        print(f"kept {counts.kept} of {counts.elements} elements of grad_logits "
              f"({100 * counts.kept_share:.2f} %), {counts.dense_rows} of {counts.rows} rows exactly")  # fmt: skip
    if arguments.out:
        ln.save_case(arguments.out, loss=result.loss, grad_input=result.grad_input,
                     grad_weight=result.grad_weight)  # fmt: skip
    return 0


def _run_verify(arguments: Any) -> int:
    from . import reference

    case = _case(arguments.case)
    result = _step(case, arguments)
    exact = reference.loss_and_gradient(
        case["input"], case["weight"], case["target"], ignore_index=case.get("ignore_index"),
        token_weights=case.get("grad"),
    )  # fmt: skip
    bits = {2: 8, 4: 24}[case["input"].dtype.itemsize]
    bits = 11 if case["input"].dtype == np.float16 else bits
    allowed = {"loss": 2.0**-18, "grad_input": 2.0 ** (2 - bits), "grad_weight": 2.0 ** (2 - bits)}
    status = 0
    for name, bound in allowed.items():
        found = reference.float64(getattr(result, name))
        value = getattr(exact, name)
        error = float(np.linalg.norm(found - value)) / max(float(np.linalg.norm(value)), 1e-300)
        fine = bool(error <= bound)
        status |= not fine
        print(f"{name:12s} relative error {error:.2e}, allowed {bound:.2e}: {'fine' if fine else 'BEYOND'}")
    return status


def _run_bench(arguments: Any) -> int:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ValueError("bench needs torch: pip install torch") from None
    from . import _bench

    return _bench.run(arguments)


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m logitless",
        description="Cross-entropy over a huge vocabulary without building the logits. CPU only, for now.",
        epilog="Exit code: 0 fine, 1 a verification failed, 2 bad usage or input. Files are safetensors, as "
        "the logitless program (docs/command-line.md) writes them; it does more: shards, comparing foreign "
        "outputs, synthetic cases.",
    )
    parser.add_argument("--version", action="version", version=f"logitless {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    sub = commands.add_parser("info", help="what runs here")
    sub.add_argument("--json", action="store_true")
    sub.set_defaults(run=_run_info)

    def add_run_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--strategy", choices=list(STRATEGY), default="automatic")
        sub.add_argument("--threads", type=int, default=0, help="at most so many; 0: the default")
        sub.add_argument("--workspace-limit", type=int, default=0, metavar="BYTES")

    def number(text: str) -> float:
        base, _, exponent = text.partition("^")
        return float(base) ** int(exponent) if exponent else float(text)

    def add_tolerance(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--grad-tolerance", type=number, default=0.0, metavar="EPS",
                         help="a sparse gradient, unbiased, of about this relative error, e.g. 2^-9; 0: exact")  # fmt: skip

    sub = commands.add_parser("plan", help="schedule, tiles and workspace for a shape")
    sub.add_argument("--shape", required=True, metavar="BT,V,H")
    sub.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    add_run_options(sub)
    add_tolerance(sub)
    sub.set_defaults(run=_run_plan)

    sub = commands.add_parser("run", help="loss and gradients of a case")
    sub.add_argument("case", metavar="CASE.safetensors")
    sub.add_argument("--out", metavar="FILE", help="loss, grad_input and grad_weight as safetensors")
    add_run_options(sub)
    add_tolerance(sub)
    sub.add_argument("--seed", type=int, default=0, help="of the sparse gradient's choice")
    sub.set_defaults(run=_run_step)

    sub = commands.add_parser("verify", help="loss and gradients of a case beside float64")
    sub.add_argument("case", metavar="CASE.safetensors")
    add_run_options(sub)
    sub.set_defaults(run=_run_verify)

    sub = commands.add_parser("bench", help="time and memory of loss and backward, in torch")
    sub.add_argument("--peers", action="store_true",
                     help="beside eager, torch.compile and torch's linear_cross_entropy")  # fmt: skip
    sub.add_argument("--shape", action="append", metavar="BT,V,H")
    sub.add_argument("--dtype", choices=("bf16", "f16", "f32", "mixed"), default="bf16",
                     help="mixed: float32 parameters under autocast")  # fmt: skip
    sub.add_argument("--table", action="store_true",
                     help="every shape of docs/performance.md beside all peers, times only (20 minutes)")  # fmt: skip
    sub.add_argument("--accumulate", action="store_true",
                     help="add to the gradients of the step before, instead of fresh ones")  # fmt: skip
    sub.add_argument("--seconds", type=float, default=8.0, help="of rounds with each contender")
    sub.add_argument("--no-memory", action="store_true")
    sub.add_argument("--markdown", metavar="FILE", help="times as a table")
    sub.add_argument("--svg", metavar="FILE", help="the bars as a picture")
    sub.add_argument("--json", action="store_true")
    sub.set_defaults(run=_run_bench)

    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError, IndexError, OSError, RuntimeError) as error:
        print(f"logitless: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
