#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what bench/train_tolerance measured (its --json) as an SVG: losses while training with gradients of
several kinds, and how far each kind's held-out loss is from the exact run of the same seed.

python bench/train_tolerance_plot.py curves.json plot.svg
"""

import json
import statistics
import sys

try:
    import matplotlib
except ImportError as e:
    sys.exit(f"{sys.executable} cannot import matplotlib ({e}); install bench/requirements.txt")
matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

SCHEMA = "logitless-train-tolerance-1"
# Okabe and Ito's colours, which colour-blind readers tell apart, and lines that differ without them.
STYLES = [("#000000", "-"), ("#999999", ":"), ("#0072b2", "-"), ("#56b4e9", "--"), ("#d55e00", "-."), ("#009e73", "--")]


def load(path):
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError) as e:
        sys.exit(f"{path}: {e}")
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        sys.exit(f"{path}: schema is {schema!r}, must be '{SCHEMA}' (train_tolerance --json)")
    return document


def mean_of(lists):
    return [statistics.mean(values) for values in zip(*lists, strict=True)]


def main(arguments):
    if len(arguments) != 2:
        sys.exit(__doc__)
    document = load(arguments[0])
    methods = {}
    for run in document["runs"]:
        methods.setdefault(run["method"], {})[run["seed"]] = run
    exact = next(iter(methods.values()))
    matplotlib.rcParams.update({"svg.hashsalt": "logitless", "svg.fonttype": "none", "font.size": 9})
    figure, (losses, apart) = plt.subplots(2, 1, figsize=(8, 7.2), height_ratios=(1.25, 1), sharex=True)

    for (name, by_seed), (colour, line) in zip(methods.items(), STYLES, strict=False):
        curve = mean_of([run["losses"] for run in by_seed.values()])
        losses.plot(range(1, len(curve) + 1), curve, line, color=colour, linewidth=1, label=name)
        if by_seed is exact:
            continue
        steps = [step for step, _ in next(iter(by_seed.values()))["held_out"]]
        differences = []
        for seed, run in by_seed.items():
            pairs = zip(run["held_out"], exact[seed]["held_out"], strict=True)
            differences.append([mine - theirs for (_, mine), (_, theirs) in pairs])
            apart.plot(steps, differences[-1], line, color=colour, linewidth=0.5, alpha=0.6)
        apart.plot(steps, mean_of(differences), line, color=colour, linewidth=1.8, label=name)
    losses.axhline(document["unigram"], color="#444444", linewidth=0.8, dashes=(6, 4))
    losses.text(0.99, document["unigram"], "frequency of words alone, held-out text", va="bottom", ha="right",
                fontsize=8, color="#444444", transform=losses.get_yaxis_transform())  # fmt: skip
    losses.set_ylabel("training loss, nats per word")
    losses.set_title(f"Mean of {len(exact)} seeds", fontsize=9, loc="left")
    losses.legend(frameon=False, fontsize=8)
    apart.axhline(0, color="#000000", linewidth=0.8)
    apart.set_ylabel("held-out loss minus the exact run's")
    apart.set_title("Of the same seed: thin; mean: thick", fontsize=9, loc="left")
    apart.set_xlabel("step")
    for axes in (losses, apart):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(arguments[1], metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
