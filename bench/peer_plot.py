#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what peers.py measured (its --json) as an SVG: time and memory of the whole step, by shape.

python bench/peer_plot.py measured.json plot.svg
"""

import json
import sys

import peer_report as report

try:
    import matplotlib
except ImportError as e:
    sys.exit(f"{sys.executable} cannot import matplotlib ({e}); install bench/requirements.txt")
matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

# By key: name and colour. Okabe and Ito's colours, which colour-blind readers tell apart.
STYLES = {
    "logitless": ("Logitless", "#0b3c5d"),
    "logitless-recompute": ("Logitless, recomputing", "#0b3c5d"),
    "logitless.torch": ("logitless.torch", "#3d6f94"),
    "linear_cross_entropy": ("linear_cross_entropy, best options", "#009e73"),
    "compile-bf16": ("torch.compile, bf16 loss", "#e69f00"),
    "compile-fp32": ("torch.compile, fp32 loss", "#e69f00"),
    "cce": ("CCE's torch_compile fallback*", "#cc79a7"),
    "eager-bf16": ("eager, bf16 loss", "#56b4e9"),
    "eager-fp32": ("eager, fp32 loss", "#56b4e9"),
}
GREY = "#444444"


def rows_of(document):
    """[(name, colour, [the step as measured, or None, by case])], ours first."""
    versions = list(dict.fromkeys(document["torch"].values()))
    rows = []
    for key, (name, colour) in STYLES.items():
        several = len(versions) > 1 and key != "logitless"
        for version in versions if several else versions[:1]:
            steps = [
                case["contenders"].get(f"{key}@{version}" if several else key, {"sections": {}})
                for case in document["cases"]
            ]
            steps = [entry["sections"].get("step") for entry in steps]
            if any(steps):
                rows.append((f"{name} ({version})" if several else name, colour, steps))
    return rows


def bars(axes, rows, case, value_of, text_of):
    """One line per contender; what stands beside the bar is its value, or that there is none."""
    for line, (_, colour, steps) in enumerate(rows):
        value = steps[case] and value_of(steps[case])
        if value is None:
            axes.text(0.02, line, "left out", va="center", fontsize=7, color=GREY,
                      transform=axes.get_yaxis_transform())  # fmt: skip
            continue
        axes.barh(line, value, 0.74, color=colour)
        axes.annotate(text_of(steps[case]), (value, line), (2, 0), textcoords="offset points",
                      va="center", fontsize=7)  # fmt: skip


def time_text(step):
    over = step["over_ours"]
    return f"{over:.2f} x" if over != 1 else report.time_text(step["median_seconds"])


def caption_of(document):
    lines = [
        report.machine_text(document),
        "Vertical lines: the time of Logitless; the gradients themselves.",
    ]
    if document["about"]["amx_present"]:
        lines.append(report.amx_text(document))
    if any("cce" in key for case in document["cases"] for key in case["contenders"]):
        lines.append("* holds the logits; its Triton kernel needs a GPU")
    return "\n".join(lines)


def draw(document, path):
    plt.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "logitless",  # the same file from the same numbers
            "font.size": 8,
            "font.family": "sans-serif",
            "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        }
    )
    cases, rows = document["cases"], rows_of(document)
    # On an opaque ground of its own: legible whatever the page behind it is.
    figure, grid = plt.subplots(
        2,
        len(cases),
        figsize=(2.6 + 1.75 * len(cases), 1.5 + 0.36 * len(rows)),
        sharex="row",
        sharey=True,
        squeeze=False,
        facecolor="white",
        layout="constrained",
    )
    slowest = max(s["over_ours"] for _, _, steps in rows for s in steps if s)
    most = max(s["memory_bytes"] or 0 for _, _, steps in rows for s in steps if s)
    for column, case in enumerate(cases):
        time, memory = grid[0][column], grid[1][column]
        bars(time, rows, column, lambda s: s["over_ours"], time_text)
        bars(memory, rows, column,
             lambda s: s["memory_bytes"] and s["memory_bytes"] / report.MIB,
             lambda s: report.bytes_text(s["memory_bytes"]))  # fmt: skip
        time.axvline(1, color="#0b3c5d", linewidth=0.8)
        time.set_title(f"{case['BT']:,} tokens\nV = {case['V']:,}, H = {case['H']:,}", fontsize=8)
        time.set_xlim(0, slowest * 1.3)
        memory.axvline(report.gradient_bytes(case) / report.MIB, color="black", linewidth=0.8)
        memory.set_xscale("log")
        memory.set_xlim(10, most / report.MIB * 12)
        time.set_xlabel("time / ours", fontsize=7)
        memory.set_xlabel("memory over the operands, MiB", fontsize=7)
    grid[0][0].set_yticks(range(len(rows)), [name for name, _, _ in rows])
    grid[0][0].invert_yaxis()
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=7)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    figure.suptitle(
        "Loss and both gradients of a language model's head on a CPU, bf16: shorter is better",
        fontsize=10,
    )
    figure.supxlabel(caption_of(document), fontsize=7, color=GREY, x=0.01, ha="left")
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    with open(sys.argv[1]) as file:
        draw(json.load(file), sys.argv[2])
