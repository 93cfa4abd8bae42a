# SPDX-License-Identifier: Apache-2.0
"""What peers.py prints: numbers with their units, tables, notes."""

import statistics

from peer_contenders import SECTIONS, is_default, options_text

GIB = 1 << 30
MIB = 1 << 20


def spread(values):
    """(largest - least) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def time_text(seconds):
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def bytes_text(count):
    if count is None:
        return ""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def error_text(error):
    return "" if error is None else f"{error:.1e}"


def shape_text(case):
    return f"{case['BT']},{case['V']},{case['H']}"


def gradient_bytes(case):
    """Both, in bf16."""
    return 2 * (case["BT"] + case["V"]) * case["H"]


def table(rows):
    """Columns as wide as they must be, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n"


def markdown_table(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" + "|---:" * (len(rows[0]) - 1) + "|")
    return "\n".join(lines) + "\n"


HEADER = ["median", "spread", "of peak", "x ours", "memory"]
ERRORS = ["loss", "grad_input", "grad_weight"]


def section_rows(case, section):
    """Header and a row for each contender, ours first; nothing if nobody took part."""
    rows = []
    for entry in case["contenders"].values():
        measured = entry["sections"].get(section)
        if measured is None or entry["ours_again"]:
            continue
        label = entry["label"]
        if entry["tuning"]:
            label = label.replace("best options", options_text(entry["options"]))
        row = [
            label,
            time_text(measured["median_seconds"]),
            f"{100 * measured['spread']:.0f} %",
            f"{measured['of_peak']:.3f}",
            f"{measured['over_ours']:.2f}",
            bytes_text(measured["memory_bytes"]),
        ]
        if section != "forward":
            row += [error_text((measured["errors"] or {}).get(name)) for name in ERRORS]
        rows.append(row)
    if not rows:
        return []
    errors = [] if section == "forward" else ["error: " + ERRORS[0], *ERRORS[1:]]
    return [[SECTIONS[section], *HEADER, *errors], *rows]


def machine_text(document):
    about = document["about"]
    plural = "" if about["threads"] == 1 else "s"
    commit = about["commit"] or about["version"]
    return (
        f"{about['cpu']}, {about['threads']} thread{plural}, {about['isa']}; Logitless {commit} "
        f"({about['compiler']}), PyTorch {', '.join(document['torch'].values())}; "
        f"{document['date']}"
    )


def fastest_peer(case):
    """Time over ours of the fastest way to the whole step that is not ours; None: there is none."""
    times = [
        entry["sections"]["step"]["over_ours"]
        for key, entry in case["contenders"].items()
        if not key.startswith(("logitless", "mm")) and "step" in entry["sections"]
    ]
    return min(times, default=None)


def amx_text(document):
    """What a reader must know where AMX is present, with the measured ratio; else nothing."""
    if not document["about"]["amx_present"]:
        return ""
    ratios = [
        f"{fastest_peer(case):.2f} at {shape_text(case)}"
        for case in document["cases"]
        if fastest_peer(case) is not None
    ]
    return (
        "AMX present, unused; PyTorch's bf16 uses it: time of the fastest of PyTorch over ours "
        + ("; ".join(ratios) or "not measured")
    )


def notes_of(document):
    notes = [
        "of peak: the products of the result (3 for loss and both gradients, 1 for the forward) "
        "over the register-only peak of the instruction that Logitless multiplies with, measured "
        "before and after",
        "memory: peak of resident memory in one call of a fresh process, over the operands; "
        "gradients are part of it",
        "errors: relative, in the Frobenius norm, against float64 from the same operands, over a "
        "sample of tokens and vocabulary rows",
    ]
    if amx_text(document):
        notes.append(amx_text(document))
    for case in document["cases"]:
        shape = shape_text(case)
        notes += [f"{shape}: {key} left out: {why}" for key, why in case["skipped"].items()]
        noise = case["noise"]
        if noise["idle"] > 0.02:
            notes.append(
                f"{shape}: {noise['idle_of']} used {100 * noise['idle']:.0f} % of a CPU while it "
                "waited for its turn: the times of the others are too long"
            )
        if noise["starved"] > 0.02:
            notes.append(
                f"{shape}: the machine was not quiet: threads wanted a CPU that something else had "
                f"for {100 * noise['starved']:.0f} % of the time of the calls"
            )
        if len(case["groups"]) > 1:
            notes.append(
                f"{shape}: {len(case['groups'])} groups, as memory does not hold all contenders at "
                "once; each is compared with ours in its own group"
            )
        for entry in case["contenders"].values():
            for tried in entry["tuning"]:
                if is_default(tried["options"]):
                    label = entry["label"].removesuffix(", best options")
                    notes.append(
                        f"{shape}: {label} with default options takes "
                        f"{time_text(min(tried['seconds']))}"
                    )
    return notes


def text_of(document, markdown=False):
    """Tables and notes."""
    make, heading = (markdown_table, "### ") if markdown else (table, "")
    out = [machine_text(document), ""]
    for case in document["cases"]:
        low, high = min(case["peaks"]) * 1e-9, max(case["peaks"]) * 1e-9
        out += [
            f"{heading}BT, V, H = {case['BT']}, {case['V']}, {case['H']}; "
            f"gradients {bytes_text(gradient_bytes(case))}; peak {low:.0f} to {high:.0f} GFLOP/s",
            "",
        ]
        out += [make(rows) for rows in (section_rows(case, s) for s in SECTIONS) if rows]
    out += ["- " + note for note in notes_of(document)]
    return "\n".join(out) + "\n"
