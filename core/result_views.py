"""The views of a result: texts, HTML, plain values and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any

from ..events.checks import check_path, known_names, printable
from ..events.progress import describe_untracked
from .system.extras import require

MAX_PATHS = 3  # listed in a line


def resume_line(resume: Any) -> str:
    facts = (*describe_untracked(resume.untracked), *(f"different: {text}" for text in resume.differences))
    if resume.step is None:
        return printable("; ".join(facts or ("nothing is untracked",)))
    is_replayed = resume.position == "replayed" and resume.batch
    replayed = ["the data were read again up to the position"] if is_replayed else []
    before = [f"verified before: {resume.verified_before}"] if resume.verified_before else []
    listed = ", ".join(resume.edited[:MAX_PATHS]) + ", ..." * (len(resume.edited) > MAX_PATHS)
    edited = [f"changed by the program: {listed}"] if resume.edited else []
    return printable(
        "; ".join([f"resumed at step {resume.step:,}", resume.measured, *before, *replayed, *facts, *edited])
    )


def summary(result: Any) -> str:
    place = result.progress
    lines = [
        f"{_ending(result)}: {result.reason}",
        f"epochs {place.epoch}, steps {place.steps}, samples {place.samples}, "
        f"{f'tokens {place.tokens}, ' if place.tokens else ''}{result.seconds:.1f} s",
    ]
    lines += [f"{name} {value:.6g}" for name, value in sorted(result.metrics.items())]
    lines += _predicted(result)
    checkpoints = (("best", result.best_checkpoint), ("last", result.last_checkpoint))
    lines += [f"{label} checkpoint {path}" for label, path in checkpoints if path]
    if result.resume is not None and result.resume.epoch is not None:
        lines += [str(result.resume)]
    elif result.resume is not None and result.last_checkpoint:
        lines += [f"resumable: {result.resume}"]
    lines += result.notes
    lines += [f"WARNING: {warning}" for warning in result.warnings]
    lines += [f"plugin {name} failed: {error}" for name, errors in result.plugin_errors.items() for error in errors]
    return "\n".join(map(printable, lines))


def line(result: Any) -> str:
    count = len(result.warnings)
    warned = f", {count} warning{'s' * (count > 1)}" if count else ""
    (done,) = _predicted(result) or [f"epochs {result.progress.epoch}, steps {result.progress.steps}"]
    return printable(f"<RunResult: {_ending(result)}, {done}{warned}>")


def html(result: Any) -> str:
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in result.warnings)
    return (
        f"<details><summary>{escape(repr(result)[1:-1])}</summary><pre>{escape(str(result))}</pre></details>"
        + f"<ul>{warnings}</ul>" * bool(warnings)
    )


def _ending(result: Any) -> str:
    by = f" by {result.stopped_by}" if result.stopped_by else ""
    return (
        str(result.status) + by + (f" on rank {result.stopped_on_rank}" if result.stopped_on_rank is not None else "")
    )


def _predicted(result: Any) -> list[str]:
    if result.predictions is None:
        return []
    from .outputs import shape_of  # imported after a prediction

    return [f"predictions {shape_of(result.predictions)}"]


def as_json(facts: Mapping[str, Any]) -> str:
    """Return facts as JSON; NaN and infinity, which JSON lacks, become texts."""
    return json.dumps(json_value(facts), indent=1, allow_nan=False)


def json_value(value: Any) -> Any:
    # Objects become their public fields; NaN, infinities and other objects become text.
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        names = (item.name for item in fields(value) if not item.name.startswith("_"))
        return {name: json_value(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [json_value(item) for item in value]
    return str(value)


CLOCK_METRICS = ("seconds", "samples_per_second")


def plot(rows: Sequence[Mapping[str, float]], path: str | Path | None, names: Sequence[str]) -> Any:
    # See `RunResult.plot`.
    if path is not None:
        check_path("plot(path)", path)
    families = _families(rows)
    if not families:
        raise ValueError("There is nothing to plot, because nothing was logged. Add LogSchedule(steps=50).")
    for name in (names := [names] if isinstance(names, str) else list(names)):
        if name not in families:
            raise ValueError(f"No metric {name!r} was logged.{known_names(name, families)}")
    chosen = names or [name for name in families if name not in CLOCK_METRICS] or list(families)
    figure = new_figure("result.plot", figsize=(7.0, 2.6 * len(chosen)))
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
    # By the last part of the metric name; losses come first.
    metrics = {name: None for row in rows for name in row if name not in ("step", "epoch")}
    families: dict[str, list[str]] = {}
    for metric in metrics:
        families.setdefault(metric.rpartition("/")[2], []).append(metric)
    return dict(sorted(families.items(), key=lambda family: not family[0].endswith("loss")))


def new_figure(purpose: str, **options: Any) -> Any:
    """Return a matplotlib figure that a notebook shows as a picture.

    It needs no pyplot, which keeps figures alive and chooses a backend.

    Raises:
        ImportError: matplotlib, which `purpose` needs, is not installed.
    """
    require("matplotlib.figure", purpose, extra="plot")
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    return NotebookFigure(layout="constrained", **options)
