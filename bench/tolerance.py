#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The sparse gradient against its tolerance: time, kept share and error on one case, and a picture.

  bench/tolerance.py hidden.safetensors head.safetensors [--tokens 1024] [--svg plot.svg] [--json rows.json]

Per tolerance one call in turn with the forward alone and with the exact step, medians of --rounds; errors of fp32
gradients against those of the same operands in fp32, of one seed. For a quiet machine. Needs the logitless package,
numpy and ml_dtypes; for the picture matplotlib (bench/requirements.txt). docs/sparse-gradient.md shows it.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np

import logitless
import logitless.numpy as ln

EXPONENTS = (-5, -6, -7, -8, -9, -10, -11, -12)


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def relative(error, exact):
    return float(np.linalg.norm(error) / np.linalg.norm(exact))


def measure(case, rounds):
    x, w, t = case["input"], case["weight"], case["target"]
    exact = ln.loss_and_gradient(x.astype(np.float32), w.astype(np.float32), t)
    rest = -np.expm1(-exact.loss.astype(np.float64))  # 1 - p of the target
    counted = rest >= 2**-8
    norms = np.linalg.norm(exact.grad_input, axis=1)
    # Outputs are made beforehand: only calls are timed.
    buffers = {"grad_input": np.empty_like(x), "grad_weight": np.empty_like(w)}
    rows = []
    for exponent in EXPONENTS:
        eps = 2.0**exponent
        got = ln.loss_and_gradient(x, w, t, grad_tolerance=eps, seed=1, grad_input=np.float32, grad_weight=np.float32)
        counts = logitless.sparse_counts()
        errors = np.linalg.norm(got.grad_input - exact.grad_input, axis=1) / norms
        times = {"forward": [], "exact": [], "sparse": []}
        for seed in range(rounds + 1):
            calls = {
                "forward": lambda: ln.forward(x, w, t),
                "exact": lambda: ln.loss_and_gradient(x, w, t, out=buffers),
                "sparse": lambda seed=seed: ln.loss_and_gradient(x, w, t, grad_tolerance=eps, seed=seed, out=buffers),
            }
            for name, call in calls.items():
                times[name].append(seconds(call))
        middle = {name: statistics.median(all[1:]) for name, all in times.items()}  # the first warms up
        rows.append(
            {
                "exponent": exponent,
                "kept": counts.kept / max(1, counts.elements),
                "dense_rows": counts.dense_rows,
                "milliseconds": {name: 1e3 * value for name, value in middle.items()},
                "times_forward": middle["sparse"] / middle["forward"],
                "times_exact": middle["sparse"] / middle["exact"],
                "grad_input": relative(got.grad_input - exact.grad_input, exact.grad_input),
                "grad_weight": relative(got.grad_weight - exact.grad_weight, exact.grad_weight),
                "rows": {
                    "median": float(np.median(errors)),
                    "p99": float(np.quantile(errors, 0.99)),
                    "worst": float(np.max(errors)),
                    "worst_of_rest_from_2^-8": float(np.max(errors[counted])),
                },
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def draw(rows, title, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "logitless", "font.size": 9})
    figure, (errors, times) = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
    x = [row["exponent"] for row in rows]
    series = (
        ("eps", [2.0**e for e in x], "#999999", ""),
        ("worst row", [row["rows"]["worst_of_rest_from_2^-8"] for row in rows], "#d55e00", "^"),
        ("grad_input", [row["grad_input"] for row in rows], "#0b3c5d", "v"),
        ("grad_weight", [row["grad_weight"] for row in rows], "#009e73", "o"),
    )
    for name, y, colour, marker in series:
        errors.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1, label=name)
    errors.set_yscale("log", base=2)
    errors.set_ylabel("relative error")
    times.plot(x, [row["times_forward"] for row in rows], color="#0b3c5d", marker="v", linewidth=1, label="sparse")
    exact = [row["milliseconds"]["exact"] / row["milliseconds"]["forward"] for row in rows]
    times.plot(x, exact, color="#999999", marker="s", markersize=4, linewidth=1, label="exact, one pass")
    for row in rows:
        times.annotate(f"{100 * row['kept']:.2g} %", (row["exponent"], row["times_forward"]), (0, 7),
                       textcoords="offset points", ha="center", fontsize=7)  # fmt: skip
    times.set_ylim(0, 1.15 * max(exact))
    times.set_ylabel("loss and both gradients, times the forward alone")
    for axes in (errors, times):
        axes.set_xticks(x, [f"$2^{{{e}}}$" for e in x])
        axes.set_xlabel("grad_tolerance (kept share at the points)" if axes is times else "grad_tolerance")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="+", help="safetensors files with input, weight and target")
    parser.add_argument("--tokens", type=int, help="only the first ones")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="all numbers")
    parser.add_argument("--svg", metavar="FILE", help="the picture")
    arguments = parser.parse_args()
    case = {}
    for path in arguments.case:
        case.update(ln.load_case(path))
    missing = {"input", "weight", "target"} - case.keys()
    if missing:
        parser.error(f"no {', '.join(sorted(missing))} in {', '.join(arguments.case)}")
    for name in ("input", "target"):
        case[name] = case[name][: arguments.tokens]
    rows = measure(case, arguments.rounds)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    if arguments.svg:
        shape = (case["input"].shape[0], *case["weight"].shape)
        draw(rows, "[BT, V, H] = [{:,}, {:,}, {:,}], {}".format(*shape, case["input"].dtype), arguments.svg)


if __name__ == "__main__":
    main()
