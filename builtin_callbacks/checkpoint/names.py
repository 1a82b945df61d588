"""Names of checkpoints: a name for the training that no other one in the folder has, and the names of its files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import count
from string import Formatter
from typing import Any, Literal

from ...core.checkpoint.storage import Entry, Store, checkpoint_name
from ...events import Event, Log, Run, SavePoint, ValidationEnd
from ...events.checks import known_names

Metadata = str | Callable[[Run], str]
SEPARATORS = "_- .,"
ALIKE = 0.85  # of two names: one is the other misspelt
OnExisting = Literal["new_name", "refuse", "replace"]
ON_EXISTING: tuple[OnExisting, ...] = ("new_name", "refuse", "replace")
logger = logging.getLogger("heliograph")


class FileNames:
    """Names the checkpoints of one run after the other.

    Args:
        metadata: a template of metric names, or a function of the run; by default what the task's
            `checkpoint_metadata(run)` returns, if it has one.

    Attributes:
        events: those that show which metrics there are, as far as the template needs them.

    Raises:
        TypeError: it is neither.
        ValueError: the template is malformed.
    """

    def __init__(self, metadata: Metadata | None) -> None:
        if not isinstance(metadata, str | None) and not callable(metadata):
            raise TypeError(
                f"metadata is a template of metric names such as 'loss_{{validation/loss:.3f}}', or a function of the "
                f"run that returns a string; got {metadata!r}."
            )
        self._metadata = metadata
        self._template = _Template(metadata) if isinstance(metadata, str) else None
        names = () if self._template is None else self._template.metrics
        after: dict[bool, tuple[type[Event], ...]] = {True: (Log,), False: (ValidationEnd,)}
        self.events = {event for name in names for event in after[name.startswith("train/")]}
        self.begin()

    def begin(self) -> None:
        """Forget the former run."""
        self._lacking: dict[str, str] = {}  # metrics, and the first checkpoint that was named without them

    def name(self, run: Run, prefix: str) -> str:
        """Return the name of a checkpoint of a run at its present position.

        Args:
            run: the run.
            prefix: what the names of its training's files begin with.

        Raises:
            TypeError: the function returned no string.
        """
        with run.engine.refusing("the metadata of a checkpoint", SavePoint.name):  # only one rank is here
            text, lacking = self._text(run)
        name = checkpoint_name(prefix, run.progress.epoch, run.progress.steps, text)
        for metric in lacking:
            if metric not in self._lacking:
                self._lacking[metric] = name
                run.note(f"{name} is named without {metric!r}, which was not measured before")
        return name

    def check(self, run: Run, event: ValidationEnd | Log) -> None:
        """Raise ValueError where the template has a metric that is not among those that were just measured.

        Whether a metric of another split than these may come later is not known, but a misspelt one is.
        """
        if self._template is None or type(event) not in self.events:
            return
        split = "train/" if isinstance(event, Log) else "validation/"
        known = {**run.metrics, **event.metrics}
        if not any(name.startswith(split) for name in event.metrics):
            return
        for name in self._template.metrics:
            if name not in known and (name.startswith(split) or get_close_matches(name, known, n=1, cutoff=ALIKE)):
                raise ValueError(
                    f"The checkpoint's name asks for {name!r}, which is not a metric.{known_names(name, known)}"
                )

    def finish(self, run: Run) -> None:
        """Warn of metrics that never came."""
        for metric, first in self._lacking.items():
            if metric not in run.metrics:
                run.warn(
                    f"The metadata of the checkpoints asks for {metric!r}, which was never measured: they are named "
                    f"without it, from {first} on.{known_names(metric, run.metrics)}"
                )

    def _text(self, run: Run) -> tuple[str, list[str]]:
        if self._template is not None:
            return self._template.fill(run.metrics)
        source: Any = self._metadata or getattr(run.task, "checkpoint_metadata", None)
        text = "" if source is None else source(run)
        if not isinstance(text, str):
            raise TypeError(f"A checkpoint's metadata is a string, the function returned {text!r}.")
        return text, []


class _Template:
    """Text with metric names, which contain slashes and so are not attribute paths.

    Attributes:
        metrics: the names.
    """

    def __init__(self, text: str) -> None:
        try:
            self._parts = list(Formatter().parse(text))
            self.metrics = [name for _, name, _, _ in self._parts if name is not None]
            if any(not name or name.isdecimal() for name in self.metrics):
                raise ValueError("the name of a metric is missing between { and }")
            self.fill(dict.fromkeys(self.metrics, 0.5))
        except ValueError as error:
            raise ValueError(
                f"metadata={text!r} is not a template of metric names such as 'loss_{{validation/loss:.3f}}': {error}."
            ) from error

    def fill(self, metrics: Mapping[str, float]) -> tuple[str, list[str]]:
        """Return the text with values, without the parts whose metrics are not there, and the names of those."""
        formatter, text, missing = Formatter(), "", []
        for literal, name, form, conversion in self._parts:
            if name is None:
                text += literal
            elif name in metrics:
                value = formatter.convert_field(metrics[name], conversion)
                text += literal + formatter.format_field(value, form or "")
            else:
                missing.append(name)
        return text.strip(SEPARATORS) if missing else text, missing


def claim_name(store: Store, training_id: str, wanted: str, on_existing: OnExisting) -> tuple[list[str], list[Entry]]:
    """Let a store write for a training, under the wanted name unless that is another's.

    Returns:
        What there is to say, and the checkpoints of others that go as soon as one of this training is written.

    Args:
        store: an open one.
        training_id: the training.
        wanted: the name.
        on_existing: what to do where the name is another training's.

    Raises:
        ValueError: it is, and that is to be refused; or another process writes under the name.
    """
    known, rest = store.under(wanted)
    others = [each for each in known if each.training != training_id]
    is_own = len(known) > len(others) or all(each.head and each.head.training == training_id for each in rest)
    if is_own and not others:
        store.write_as(training_id, wanted)
        return [], []
    there = f"{store.folder} holds another training under the name {wanted!r} ({_summary(others, len(rest))})"
    if on_existing == "refuse":
        raise ValueError(
            f"{there}, and on_existing='refuse'. Continue it, resume='auto'; give this run another name= or folder; "
            f"or choose on_existing='new_name', which leaves it there and numbers the name of this one, or 'replace', "
            f"which removes it when the first checkpoint of this one is written."
        )
    if on_existing == "replace":
        store.write_as(training_id, wanted)
        note = f"{there}: it is removed when the first checkpoint of this one is written, on_existing='replace'"
    else:
        name = _take_free_name(store, training_id, wanted)
        others, note = [], f"{there}: it stays, and this one is written as {name!r}"
    logger.warning(note)
    return [note], others


def _take_free_name(store: Store, training_id: str, wanted: str) -> str:
    for number in count(2):
        name = f"{wanted}-{number}"
        known, rest = store.under(name)
        if rest or any(each.training != training_id for each in known):
            continue
        try:
            store.write_as(training_id, name)
        except ValueError:  # of another process, which has not saved yet
            continue
        return name
    raise AssertionError


def _summary(others: Sequence[Entry], unknown: int) -> str:
    """Return what lies there, in words: the newest, and how many."""
    if not others:
        return f"{unknown} without a manifest that can be used"
    newest = max(others, key=lambda each: each.order)
    return f"{len(others) + unknown} in all, the newest is {newest.path.name}"
