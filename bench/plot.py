#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `logitless bench --json` measured as an SVG.

KIND is one of
  shapes   ratio to the machine's peak, by shape
  tokens   time and memory against the number of tokens (bench --tokens 32,64,...)
  limit    time against the workspace limit (bench --workspace-limit 8MiB,16MiB,...)
  cliffs   time over what a good implementation may take, by shape

Needs matplotlib (Debian: python3-matplotlib).
"""

import argparse
import json
import sys

try:
    import matplotlib
except ImportError as e:
    sys.exit(f"plot.py: {sys.executable} cannot import matplotlib ({e}); see docs/dependencies.md")
matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

SCHEMA = "logitless-bench-1"
MIB = 1 << 20
MOST_IN_A_ROW = 28  # shapes side by side that stay legible on a page

# Okabe and Ito's colours, which colour-blind readers tell apart, and a shape for each, so that
# nobody needs the colour.
STYLES = {
    "forward": ("#0072b2", "o"),
    "gradient": ("#d55e00", "s"),
    "gradient-hp": ("#cc79a7", "D"),
    "step": ("#009e73", "^"),
    "one-pass": ("#0b3c5d", "v"),
}
OTHERS = [("#e69f00", "P"), ("#56b4e9", "X"), ("#999999", "*"), ("#000000", "<")]


class Bad(Exception):
    """One sentence for the user."""


# ---- what was measured ---------------------------------------------------------------------------


def load(paths):
    """The documents' cases in one list, and the heading that they must share."""
    documents = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        except OSError as e:
            raise Bad(f"{path}: {e.strerror}") from e
        except ValueError as e:
            raise Bad(f"{path}: is not JSON ({e})") from e
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise Bad(f"{path}: schema is {schema!r}, must be '{SCHEMA}' (logitless bench --json)")
        documents.append(document)
    for key in ("cpu", "isa", "commit"):
        values = list(dict.fromkeys(document[key] for document in documents))
        if len(values) > 1:
            raise Bad(f"the files differ in {key} ({', '.join(values)}): one plot has one machine")
    cases = [case for document in documents for case in document["cases"]]
    if not cases:
        raise Bad(f"{paths[0]}: has no case")
    return documents[0], cases


def shape_of(case):
    return tuple(case["shape"][name] for name in ("BT", "V", "H"))


def shape_text(case):
    BT, V, H = shape_of(case)
    return f"{BT:,} x {V:,} x {H:,}" + (f"\n{case['model']}" if "model" in case else "")


def series_of(case, cases, beside=()):
    """The name of the line that a case is a point of: the op, and what varies over the cases."""

    def varies(key):
        return key not in beside and len({other.get(key) for other in cases}) > 1

    parts = [case["op"]]
    if "only" in case:
        parts.append(f"{case['only']} alone")
    if case.get("zero_grad_rows"):
        parts.append(f"{100 * case['zero_grad_rows']:g} % of rows without gradient")
    if varies("dtype"):
        parts.append(case["dtype"])
    if varies("threads"):
        parts.append(f"{case['threads']} thread" + ("" if case["threads"] == 1 else "s"))
    if varies("workspace_limit_bytes"):
        limit = case.get("workspace_limit_bytes")
        parts.append(f"limit {limit / MIB:g} MiB" if limit else "default limit")
    return ", ".join(parts)


def grouped(cases, key):
    """{key(case): [case, ...]}, in the order in which they were measured."""
    groups = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return groups


def style_of(name, names):
    """Colour and marker of a series: its op's, if no other series has that op."""
    op = name.split(",")[0]
    if op in STYLES and sum(other.split(",")[0] == op for other in names) == 1:
        return STYLES[op]
    every = list(STYLES.values()) + OTHERS
    return every[list(names).index(name) % len(every)]


def whiskers(middle, intervals):
    """matplotlib's yerr of intervals around their middle."""
    return [
        [max(m - low, 0) for m, (low, _) in zip(middle, intervals)],
        [max(high - m, 0) for m, (_, high) in zip(middle, intervals)],
    ]


def caption(heading, cases):
    threads = sorted({case["threads"] for case in cases})
    text = f"{heading['cpu']}, {heading['isa']}"
    if heading.get("amx_present"):
        text += " (AMX present, unused)"
    text += f", {' and '.join(map(str, threads))} thread{'' if threads == [1] else 's'}"
    dtypes = list(dict.fromkeys(case["dtype"] for case in cases))
    text += f", {', '.join(dtypes)}; {heading['compiler']}, commit {heading['commit'] or 'unknown'}"
    return (
        f"{text}, {heading['date'][:10]}\n"
        "Medians; whiskers from the 10th to the 90th percentile of the repeats. "
        "Shapes are tokens x vocabulary x hidden size."
    )


# ---- the four plots ------------------------------------------------------------------------------


def new_figure(columns, rows, size):
    # A ground of its own: legible on whatever page it lies.
    return plt.subplots(rows, columns, figsize=size, squeeze=False, facecolor="white")


def name_the_shapes(axes, labels, last):
    turned = len(labels) > 6
    axes.set_xticks(
        range(len(labels)),
        [label.replace("\n", ", ") if turned else label.replace(" x ", " x\n", 1) for label in labels],
        rotation=90 if turned else 0,
        fontsize=7 if turned else 8,
    )
    if last:
        axes.set_xlabel("tokens x vocabulary x hidden size")


def points_by_shape(cases, value_of, interval_of):
    """A figure with a place for each shape, the series side by side in it; many shapes in rows."""
    labels = list(dict.fromkeys(shape_text(case) for case in cases))
    rows = -(-len(labels) // MOST_IN_A_ROW)
    length = -(-len(labels) // rows)
    height = 3.6 if length <= 6 else 3.4
    figure, panels = new_figure(1, rows, (9.2, 0.8 + height * rows))
    series = grouped(cases, lambda case: series_of(case, cases))
    for row, [axes] in enumerate(panels):
        places = {label: i for i, label in enumerate(labels[row * length : (row + 1) * length])}
        for i, (name, group) in enumerate(series.items()):
            colour, marker = style_of(name, series)
            here = [case for case in group if shape_text(case) in places]
            shift = (i - (len(series) - 1) / 2) * min(0.16, 0.8 / len(series))
            values = [value_of(case) for case in here]
            axes.errorbar(
                [places[shape_text(case)] + shift for case in here],
                values,
                yerr=whiskers(values, [interval_of(case) for case in here]),
                color=colour,
                marker=marker,
                markersize=5 if length <= 6 else 4,
                linestyle="none",
                linewidth=1,
                label=name,
            )
        name_the_shapes(axes, list(places), row + 1 == rows)
        axes.set_xlim(-0.6, length - 0.4)
    return figure, [axes for [axes] in panels]


def share_limits(panels, least, most):
    """The same values on every row: from `least` to `most`, more where there is more to show."""
    low = min([least] + [axes.get_ylim()[0] for axes in panels])
    high = max([most] + [axes.get_ylim()[1] for axes in panels])
    for axes in panels:
        axes.set_ylim(max(low, 0), high)


def plot_shapes(cases):
    figure, panels = points_by_shape(
        cases, lambda case: case["ratio_to_peak"], lambda case: case["ratio_interval"]
    )
    for axes in panels:
        axes.axhline(1, color="#444444", linewidth=0.8)
        axes.set_ylabel("ratio to the instruction's peak")
    share_limits(panels, 0.5, 1.05)
    return figure, "How much of the machine's peak is reached, by shape: 1 is the limit"


def plot_cliffs(cases):
    def over(case, seconds):
        return seconds / case["expected"]["seconds"]

    figure, panels = points_by_shape(
        cases,
        lambda case: over(case, case["median_seconds"]),
        lambda case: [over(case, seconds) for seconds in case["seconds_interval"]],
    )
    for axes in panels:
        axes.axhline(1, color="#444444", linewidth=0.8)
        axes.axhline(1.15, color="#d55e00", linewidth=0.8, linestyle="--")
        axes.annotate("15 % more", (0.995, 1.15), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", fontsize=7, color="#a04000")  # fmt: skip
        axes.set_ylabel("time / expected time")
    share_limits(panels, 0.5, 1.3)
    return figure, (
        "Cliffs: time over max(bytes / bandwidth, flops / (0.9 peak)) + packing, by shape"
    )


def log2_axis(axis, values):
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(values), [f"{value:,g}" for value in sorted(values)], rotation=45)
    axis.minorticks_off()


def plot_tokens(cases):
    heads = grouped(cases, lambda case: shape_of(case)[1:])
    if any(len({shape_of(case)[0] for case in group}) < 2 for group in heads.values()):
        raise Bad("tokens: needs two numbers of tokens or more for each head (--tokens 32,64,...)")
    figure, panels = new_figure(2, len(heads), (9.2, 0.9 + 3.4 * len(heads)))
    for (time_axes, memory_axes), ((V, H), group) in zip(panels, heads.items()):
        series = grouped(group, lambda case: series_of(case, group))
        for name, points in series.items():
            colour, marker = style_of(name, series)
            points = sorted(points, key=shape_of)
            tokens = [shape_of(case)[0] for case in points]
            times = [1e3 * case["median_seconds"] for case in points]
            intervals = [[1e3 * s for s in case["seconds_interval"]] for case in points]
            look = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1}
            time_axes.errorbar(tokens, times, yerr=whiskers(times, intervals), label=name, **look)
            memory_axes.plot(tokens, [memory_of(case) for case in points], **look)
            beside = [case for case in points if "unfused" in case]
            if beside:
                at = [shape_of(case)[0] for case in beside]
                look.update(linestyle="--", fillstyle="none")
                unfused = [case["unfused"] for case in beside]
                label = f"{name}, logits held"
                time_axes.plot(at, [1e3 * u["median_seconds"] for u in unfused], label=label, **look)
                held = [(u["peak_memory_bytes"] or 0) / MIB for u in unfused]
                if all(held):
                    memory_axes.plot(at, held, **look)
        every = {shape_of(case)[0] for case in group}
        for axes, label in ((time_axes, "time, ms"), (memory_axes, "memory, MiB")):
            log2_axis(axes, every)
            axes.set_yscale("log")
            axes.set_xlabel("tokens")
            axes.set_ylabel(label)
            axes.set_title(f"vocabulary {V:,}, hidden size {H:,}", fontsize=8, loc="left")
    return figure, "Time, and memory beside operands and results, by number of tokens"


def memory_of(case):
    measured = case["peak_memory_bytes"]
    return (case["workspace_bytes"] if measured is None else measured) / MIB


def plot_limit(cases):
    limited = [case for case in cases if case.get("workspace_limit_bytes")]
    shapes = grouped(limited, shape_of)
    if not shapes or any(
        len({case["workspace_limit_bytes"] for case in group}) < 2 for group in shapes.values()
    ):
        raise Bad("limit: needs two limits or more for each shape (--workspace-limit 8MiB,16MiB,...)")
    figure, panels = new_figure(len(shapes), 1, (max(7.2, 4.6 * len(shapes)), 4.6))
    for axes, (shape, group) in zip(panels[0], shapes.items()):
        series = grouped(group, lambda case: series_of(case, group, ("workspace_limit_bytes",)))
        recomputed = False
        for name, points in series.items():
            colour, marker = style_of(name, series)
            points = sorted(points, key=lambda case: case["workspace_limit_bytes"])
            limits = [case["workspace_limit_bytes"] / MIB for case in points]
            times = [1e3 * case["median_seconds"] for case in points]
            intervals = [[1e3 * s for s in case["seconds_interval"]] for case in points]
            axes.errorbar(limits, times, yerr=whiskers(times, intervals), color=colour,
                          marker=marker, markersize=5, linewidth=1, label=name)  # fmt: skip
            # The one pass where it did not fit.
            hollow = [i for i, case in enumerate(points) if case.get("strategy") == "recompute"]
            recomputed = recomputed or bool(hollow)
            axes.plot([limits[i] for i in hollow], [times[i] for i in hollow], color=colour,
                      marker=marker, markersize=5, linestyle="none", markerfacecolor="white",
                      zorder=3)  # fmt: skip
        log2_axis(axes, {case["workspace_limit_bytes"] / MIB for case in group})
        axes.set_ylim(bottom=0)
        axes.set_xlabel("workspace limit, MiB")
        axes.set_ylabel("time, ms")
        title = shape_text(group[0]).replace("\n", ", ")
        axes.set_title(title + ("; hollow: recomputed" if recomputed else ""), fontsize=8, loc="left")
    return figure, "Time against the workspace limit"


PLOTS = {"shapes": plot_shapes, "tokens": plot_tokens, "limit": plot_limit, "cliffs": plot_cliffs}


def draw(kind, heading, cases, path):
    plt.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "logitless",  # the same bytes for the same numbers
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
            "font.size": 9,
        }
    )
    figure, title = PLOTS[kind](cases)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    found = zip(*figure.axes[0].get_legend_handles_labels())
    handles, labels = zip(*sorted(found, key=lambda entry: "logits held" in entry[1]))
    columns = max(1, min(len(labels), int(figure.get_figwidth() / 2.2)))
    rows = -(-len(labels) // columns)
    height = figure.get_figheight()
    top = 1 - (0.42 + 0.2 * rows) / height
    figure.text(0.01, 1 - 0.1 / height, title, fontsize=10.5, va="top")
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0, 1 - 0.28 / height),
                  ncol=columns, fontsize=8, frameon=False)  # fmt: skip
    figure.text(0.01, 0.06 / height, caption(heading, cases), fontsize=7, color="#444444")
    figure.tight_layout(rect=(0, 0.36 / height, 1, top))
    try:
        figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as e:
        raise Bad(f"{path}: {e.strerror}") from e


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", metavar="KIND", choices=PLOTS)
    parser.add_argument("svg", metavar="OUT.svg", help="the picture to write")
    parser.add_argument("json", metavar="FILE.json", nargs="+", help="of one machine and commit")
    arguments = parser.parse_args()
    try:
        heading, cases = load(arguments.json)
        draw(arguments.kind, heading, cases, arguments.svg)
    except Bad as bad:
        print(f"plot.py: {bad}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
