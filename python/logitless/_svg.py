# SPDX-License-Identifier: Apache-2.0
"""Bars and lines as SVG, by hand: one small file, no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#1b7f5c", "#c44e52", "#4c72b0", "#dd8452", "#8172b3", "#937860")


def _document(width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
        f'<rect width="{width}" height="{height}" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """groups: (what is measured, [(name, value, the value as text)])."""
    width, left, row = 760, 240, 24
    parts = [_text(12, 24, title, size=15)]
    y = 48.0
    for heading, entries in groups:
        parts.append(_text(12, y + 12, heading, size=13))
        y += 22
        largest = max((v for _, v, _ in entries if math.isfinite(v)), default=1.0) or 1.0
        for i, (name, value, shown) in enumerate(entries):
            length = (width - left - 110) * value / largest if math.isfinite(value) else 0
            parts.append(_text(left - 10, y + 15, name, "end"))
            parts.append(
                f'<rect x="{left}" y="{y + 2:.1f}" width="{length:.1f}" height="{row - 6}" '
                f'fill="{COLOURS[i % len(COLOURS)]}"/>'
            )
            parts.append(_text(left + length + 6, y + 15, shown))
            y += row
        y += 16
    return _document(width, int(y), parts)


def lines(
    title: str, x_name: str, panels: Sequence[tuple[str, dict[str, list[tuple[float, float]]]]]
) -> str:
    """panels: (name of y, {name: [(x, y)]}), side by side, both axes logarithmic."""
    width, height, margin = 440, 360, 64
    parts = [_text(12, 24, title, size=15)]
    for p, (y_name, series) in enumerate(panels):
        points = [point for values in series.values() for point in values]
        if not points:
            continue
        low_x, high_x = (f(math.log10(x) for x, _ in points) for f in (min, max))
        low_y, high_y = (f(math.log10(y) for _, y in points) for f in (min, max))
        low_y, high_y = math.floor(low_y), math.ceil(high_y)
        high_y += high_y == low_y
        high_x += 1e-9 if high_x == low_x else 0
        left = p * width + margin
        inner_w, inner_h, top = width - margin - 24, height - 2 * margin, 56

        def at(x: float, y: float, left: float = left, lx: float = low_x, hx: float = high_x,
               ly: float = low_y, hy: float = high_y, iw: float = inner_w, ih: float = inner_h,
               top: float = top) -> tuple[float, float]:  # fmt: skip
            return (
                left + iw * (math.log10(x) - lx) / (hx - lx),
                top + ih * (1 - (math.log10(y) - ly) / (hy - ly)),
            )

        parts.append(
            f'<rect x="{left}" y="{top}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#999"/>'
        )
        for power in range(int(low_y), int(high_y) + 1):
            _, y = at(points[0][0], 10.0**power)
            parts.append(f'<path d="M{left} {y:.1f}h{inner_w}" stroke="#ddd"/>')
            parts.append(_text(left - 6, y + 4, f"{10.0**power:g}", "end", 11))
        for x in sorted({x for x, _ in points}):
            px, _ = at(x, 10.0**low_y)
            parts.append(_text(px, top + inner_h + 16, f"{x:g}", "middle", 11))
        parts.append(_text(left + inner_w / 2, top + inner_h + 34, x_name, "middle"))
        parts.append(_text(left, top - 8, y_name))
        for i, (name, values) in enumerate(series.items()):
            colour = COLOURS[i % len(COLOURS)]
            path = " ".join(f"{'ML'[j > 0]}{x:.1f} {y:.1f}" for j, (x, y) in
                            enumerate(at(*point) for point in values))  # fmt: skip
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for point in values:
                x, y = at(*point)
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            if p == 0:
                parts.append(
                    f'<rect x="{margin + 150 * i}" y="{height - 6}" width="12" height="12" fill="{colour}"/>'
                )
                parts.append(_text(margin + 150 * i + 18, height + 5, name))
    return _document(width * len(panels), height + 20, parts)
