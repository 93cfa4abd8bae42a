#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what peers.py measured (its --json) as an SVG: time and memory of the whole step, by shape.

python bench/peer_plot.py measured.json plot.svg
"""

import json
import sys

try:
    import matplotlib
except ImportError as e:
    sys.exit(f"{sys.executable} cannot import matplotlib ({e}); install bench/requirements.txt")
matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
import peer_report as report  # noqa: E402

# Okabe and Ito's colours, which colour-blind readers tell apart; ours is the dark one.
STYLES = [
    ("logitless", "Logitless", "#0b3c5d"),
    ("eager-bf16", "eager, bf16 loss", "#56b4e9"),
    ("eager-fp32", "eager, fp32 loss", "#9bd0f0"),
    ("compile-bf16", "torch.compile, bf16 loss", "#e69f00"),
    ("compile-fp32", "torch.compile, fp32 loss", "#f3cf80"),
    ("linear_cross_entropy", "linear_cross_entropy, best options", "#009e73"),
    ("cce", "CCE's torch_compile fallback", "#cc79a7"),
]


def bars_of(document):
    """[(label, colour, [time over ours or None by shape], [scratch bytes or None by shape])]."""
    versions = list(dict.fromkeys(document["torch"].values()))
    bars = []
    for key, label, colour in STYLES:
        for version in versions[:1] if key == "logitless" else versions:
            full = key if key == "logitless" or len(versions) == 1 else f"{key}@{version}"
            shown = label if key == "logitless" or len(versions) == 1 else f"{label} ({version})"
            steps = [
                case["contenders"].get(full, {}).get("sections", {}).get("step")
                for case in document["cases"]
            ]
            if any(steps):
                bars.append(
                    (
                        shown,
                        colour,
                        [s and s["over_ours"] for s in steps],
                        [s and s["memory_bytes"] for s in steps],
                    )
                )
    return bars


def draw(document, path):
    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "font.size": 9,
            "svg.hashsalt": "logitless",
            "font.family": "sans-serif",
            "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        }
    )
    cases, bars = document["cases"], bars_of(document)
    # An opaque ground of its own: legible whatever the page behind it is.
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9.2, 6.4), sharex=True, facecolor="white")
    width = 0.84 / len(bars)
    for i, (label, colour, times, memory) in enumerate(bars):
        at = [j + (i - (len(bars) - 1) / 2) * width for j in range(len(cases))]
        upper.bar(at, [t or 0 for t in times], width * 0.92, color=colour, label=label)
        lower.bar(at, [(m or 0) / (1 << 20) for m in memory], width * 0.92, color=colour)
        for x, t, m in zip(at, times, memory):
            if t is None:
                upper.text(
                    x, 0.02, "does not fit", rotation=90, ha="center", va="bottom", fontsize=6
                )
            else:
                upper.text(x, t + 0.02, f"{t:.2f}", ha="center", va="bottom", fontsize=6.5)
            if m is not None:
                lower.text(
                    x,
                    max(m / (1 << 20), 1) * 1.08,
                    report.bytes_text(m).replace(" ", "\n"),
                    ha="center",
                    va="bottom",
                    fontsize=5.5,
                    linespacing=0.9,
                )
    upper.axhline(1, color="#0b3c5d", linewidth=0.8)
    upper.set_ylabel("time / ours")
    upper.set_title(
        "Loss and both gradients of a language model's head, bf16, on a CPU: less is better",
        fontsize=10.5,
        loc="left",
    )
    lower.set_yscale("log")
    lower.set_ylim(top=lower.get_ylim()[1] * 3)
    lower.set_ylabel("scratch memory, MiB")
    names = []
    for case in cases:
        ours = case["contenders"]["logitless"]["sections"]["step"]["median_seconds"]
        names.append(
            f"{case['BT']} tokens\nV = {case['V']:,}, H = {case['H']:,}\n"
            f"{case['BT'] / ours:,.0f} tokens/s (ours)"
        )
    lower.set_xticks(range(len(cases)), names)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    upper.margins(y=0.12)
    figure.legend(
        loc="upper left", bbox_to_anchor=(0.06, 0.935), ncols=4, fontsize=7.5, frameon=False
    )
    caption = report.machine_text(document)
    if document["about"]["amx_present"]:
        caption += "\n" + report.amx_text(document)
    figure.text(0.01, 0.01, caption, fontsize=6.5, color="#444444")
    figure.tight_layout(rect=(0, 0.03, 1, 0.9))
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    with open(sys.argv[1]) as file:
        draw(json.load(file), sys.argv[2])
