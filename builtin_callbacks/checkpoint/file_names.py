"""What the checkpoints of a run are called: for people, who want to see where a run was and how well it did."""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter
from typing import Any

from ...core.checkpoint.storage import checkpoint_name
from ...events import Run, SavePoint
from ...events.checks import known_names

Metadata = str | Callable[[Run], str]


def file_name(run: Run, name: str, metadata: Metadata | None) -> str:
    """Return the name of a checkpoint of a run at its present position.

    Args:
        run: the run.
        name: what the names of its training's files begin with.
        metadata: a template of metric names, or a function of the run; by default what the task's
            `checkpoint_metadata(run)` returns, if it has one.

    Raises:
        ValueError: the template asks for a metric that does not exist.
        TypeError: the function returned no string.
    """
    with run.engine.refusing("the metadata of a checkpoint", SavePoint.name):  # only one rank is here
        text = _text(run, metadata)
    return checkpoint_name(name, run.progress.epoch, run.progress.steps, text)


def fields(template: str) -> list[str]:
    """Return the metric names in a template; ValueError where it is malformed."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _text(run: Run, metadata: Metadata | None) -> str:
    if isinstance(metadata, str):
        for name in fields(metadata):
            if name not in run.metrics:
                raise ValueError(
                    f"The checkpoint's name asks for {name!r}, which is not a metric.{known_names(name, run.metrics)}"
                )
        return _Template().vformat(metadata, (), run.metrics)
    source = metadata or getattr(run.task, "checkpoint_metadata", None)
    text = "" if source is None else source(run)
    if not isinstance(text, str):
        raise TypeError(f"A checkpoint's metadata is a string, the function returned {text!r}.")
    return text


class _Template(Formatter):
    """Fills in metric names, which contain slashes and so are not attribute paths."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return kwargs[field_name], field_name
