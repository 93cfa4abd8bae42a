# SPDX-License-Identifier: Apache-2.0
"""Memory and time of loss and backward against the number of tokens: eager torch, torch.compile, ours.

    python examples/python/memory_and_time.py --vocab 32000 --hidden 1024 --out memory_and_time.svg
"""

from __future__ import annotations

import argparse
import statistics

from logitless import _bench, _svg

NAMES = ["logitless", "eager", "torch.compile"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="256,1024,4096")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=_bench.DTYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", default="memory_and_time.svg")
    arguments = parser.parse_args()
    time = {name: [] for name in NAMES}
    memory = {name: [] for name in NAMES}
    for BT in map(int, arguments.tokens.split(",")):
        shape = (BT, arguments.vocab, arguments.hidden)
        for name, found in _bench.measure_time(NAMES, shape, arguments.dtype, arguments.seconds).items():
            if "failed" in found:
                print(f"left out: {name}, {found['failed']}", flush=True)
                continue
            time[name].append((BT, statistics.median(found["seconds"])))
            added = _bench.measure_memory(name, shape, arguments.dtype) / _bench.MIB
            memory[name].append((BT, max(added, 0.1)))  # tiny ones may add nothing, which has no logarithm
            print(f"BT = {BT}, {name}: {_bench.time_text(time[name][-1][1])}, "
                  f"{memory[name][-1][1]:.0f} MiB", flush=True)  # fmt: skip
    title = f"Loss and backward, V = {arguments.vocab}, H = {arguments.hidden}, {arguments.dtype}"
    with open(arguments.out, "w") as file:
        file.write(_svg.lines(title, "tokens", [("seconds", time), ("MiB added", memory)]))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
