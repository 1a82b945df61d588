"""Curves of what a training has logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from ...events.checks import check_path, known_names
from ..system.extras import require

OF_THE_CLOCK = ("seconds", "samples_per_second")
WIDTH, HEIGHT = 7.0, 2.6  # inches of a panel


def plot(rows: Sequence[Mapping[str, float]], path: str | Path | None, names: Sequence[str]) -> Any:
    """Draw the metrics in rows over the optimizer steps; see `RunResult.plot`."""
    if path is not None:
        check_path("plot(path)", path)
    require("matplotlib.figure", "result.plot", extra="plot")
    from ..system.figure import NotebookFigure

    families = _families(rows)
    if not families:
        raise ValueError("Nothing was logged or measured, so there are no curves: add LogSchedule(Every(steps=50)).")
    for name in (names := [names] if isinstance(names, str) else list(names)):
        if name not in families:
            raise ValueError(f"Nothing called {name!r} was logged.{known_names(name, families)}")
    chosen = names or [name for name in families if name not in OF_THE_CLOCK] or list(families)
    figure = NotebookFigure(figsize=(WIDTH, HEIGHT * len(chosen)), layout="constrained")
    for panel, name in zip(figure.subplots(len(chosen), squeeze=False)[:, 0], chosen, strict=True):
        for metric in families[name]:
            points = [(row["step"], row[metric]) for row in rows if metric in row and isfinite(row[metric])]
            steps, values = zip(*points, strict=True) if points else ((), ())
            panel.plot(steps, values, marker="." if len(points) < 50 else "", label=metric)
        panel.set(title=name, xlabel="optimizer steps", ylabel=name)
        panel.legend()
    if path is not None:
        figure.savefig(path)
    return figure


def _families(rows: Sequence[Mapping[str, float]]) -> dict[str, list[str]]:
    """Return the metrics by the last part of their names, losses first, else in the order of their first row."""
    metrics = {name: None for row in rows for name in row if name not in ("step", "epoch")}
    families: dict[str, list[str]] = {}
    for metric in metrics:
        families.setdefault(metric.rpartition("/")[2], []).append(metric)
    return dict(sorted(families.items(), key=lambda each: not each[0].endswith("loss")))
