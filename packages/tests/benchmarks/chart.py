"""The first table as a picture that can be read on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from heliograph.packages.tests.benchmarks.first import CONTROL, OURS
from heliograph.packages.tests.benchmarks.measure import Comparison

OURS_COLOR, PEER_COLOR, TEXT_COLOR = "#d97a1f", "#8f9bb0", "#7b808a"
LONGEST = 100.0  # microseconds; longer bars end in an arrow
CAPTION = "microseconds that a step takes beyond the hand-written loop"
CUT_CAPTION = f"{CAPTION}; bars with an arrow are longer than drawn"
BAR, GAP, HEAD = 1.0, 1.1, 1.2  # heights


class Bar(NamedTuple):
    """A loop in the picture, from top to bottom."""

    y: float
    name: str
    microseconds: float
    ratio: float


def draw(rows: Iterable[Comparison], path: Path, *, longest: float = LONGEST) -> None:
    """Write the picture, as SVG or what else the suffix says; bars beyond `longest` microseconds are cut."""
    import matplotlib as mpl  # of the extra `examples`

    mpl.use("Agg")
    from matplotlib.figure import Figure

    heads, bars = laid_out(rows)
    bottom = bars[-1].y + BAR
    with mpl.rc_context({"svg.hashsalt": "performance", "font.size": 9, "text.color": TEXT_COLOR}):
        figure = Figure(figsize=(7.6, 0.21 * (bottom + 2.4)))
        axes = figure.add_axes((0.2, 0.0, 0.53, 1.0))
        axes.set(xlim=(0, 1), ylim=(bottom + 0.2, -2.2))
        axes.set_axis_off()
        is_cut = any(bar.microseconds > longest for bar in bars)
        axes.text(-0.37, -1.5, CUT_CAPTION if is_cut else CAPTION, va="center")
        for y, text in heads:
            axes.text(-0.37, y, text, weight="bold", va="center")
        for bar in bars:
            draw_bar(axes, bar, longest)
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def laid_out(rows: Iterable[Comparison]) -> tuple[list[tuple[float, str]], list[Bar]]:
    """Return the heads and the bars, from top to bottom; in a row, from the shortest to the longest."""
    heads, bars, y = list[tuple[float, str]](), list[Bar](), 0.0
    for row in rows:
        heads.append((y, row.name.replace("`", "")))
        y += HEAD
        shown = [loop for name, loop in row.loops.items() if name != CONTROL]
        for loop in sorted(shown, key=lambda loop: (loop.name != OURS, loop.beyond.middle)):
            bars.append(Bar(y, loop.name, loop.beyond.middle, loop.ratio.middle))
            y += BAR
        y += GAP - BAR / 2
    return heads, bars


def draw_bar(axes: Any, bar: Bar, longest: float) -> None:
    """Draw one loop: its name, its bar, its figures."""
    ours, cut = bar.name == OURS, bar.microseconds > longest
    length = min(max(bar.microseconds, 0.0), longest) / longest
    color, weight = (OURS_COLOR, "bold") if ours else (PEER_COLOR, "normal")
    axes.text(-0.015, bar.y, bar.name, ha="right", va="center", weight=weight)
    axes.barh(bar.y, length, height=0.72, color=color)
    if cut:
        axes.plot([1.009], [bar.y], marker=">", markersize=6, color=color, clip_on=False)
    text = f"{bar.microseconds:+.1f} µs" if abs(bar.microseconds) < 10 else f"{bar.microseconds:+.0f} µs"
    axes.text(length + (0.026 if cut else 0.01), bar.y, f"{text}  ({bar.ratio:.2f} times)", va="center", weight=weight)
