"""`diverge`: finds and explains the first difference between two recorded runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from heliograph.spi import printable_lines

from ..format.reader import damage_of, gc_paused, read
from ..format.records import DIGESTS
from .course import Course, CourseMoment, Place, course_of

WEIGHTS, RATE = -2, -1  # in the digests of a batch
Kind = Literal[
    "draw", "data", "loss", "gradients", "learning_rate", "options", "weights", "request", "plugin", "metric",
    "counters", "event", "length",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference between two runs.

    Attributes:
        kind: a `draw` of random numbers, the `data` or their order, the `loss` of an equal batch, the
            `gradients` of an equal loss, the `learning_rate`, other `options` of an optimizer, the `weights` after an
            equal step, a `request`, an enabled or disabled `plugin`, a `metric`, the `counters`, an `event`, or
            the `length`.
        epoch: from 0.
        batch: in the epoch, from 1.
        step: the number of optimizer steps, including this batch.
        text: the description.
    """

    kind: Kind
    epoch: int
    batch: int
    step: int
    text: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}, step {self.step}: {self.text}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The comparison of two recorded runs; `print` it.

    Attributes:
        names: of the recordings.
        first: the first difference of the trainings; None if none was found, see `is_equal`.
        batches: the number of equal batches before the difference.
        digested: the number of compared batches with digests in both.
        compared: the number of compared batches with digests or losses in both; for others, only counters, requests and
            metrics are compared.
        settings: the different settings of the runs.
        damage: the unreadable parts of the recordings.
    """

    names: tuple[str, str]
    first: FirstDifference | None
    batches: int = 0
    digested: int = 0
    compared: int = 0
    settings: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if the trainings have no difference, and digests or losses were compared."""
        return self.first is None and self.compared > 0

    def __str__(self) -> str:
        batches, digested = self.batches, min(self.batches, self.digested)
        count = f"{batches:,} batch{'es' if batches != 1 else ''}, {digested:,} compared by digests"
        if self.first is not None:
            lines = [f"The first difference: {self.first}.", f"Equal before it: {count}."]
        elif self.compared:
            lines = [f"No difference in {count}."]
        else:
            lines = [
                f"These runs cannot be compared: {count} or losses. Their counters, requests and metrics do not differ."
            ]
        if self.digested < max(1, batches):
            lines.append("Record both with Recorder(digests=True) to compare every batch.")
        lines += ["Different settings:", *(f"  {setting}" for setting in self.settings)] if self.settings else []
        lines += ["Unreadable parts:", *(f"  {part}" for part in self.damage)] if self.damage else []
        return printable_lines("\n".join(lines))


@gc_paused()
def diverge(one: str | Path, other: str | Path) -> Divergence:
    """Compare two recorded trainings, and find the first difference.

    Kills and resumes do not matter: repeated steps count once. The comparison includes the counters of every batch,
    requests, enabled and disabled plugins, and the metrics of validations and logs. If both were recorded with
    `Recorder(digests=True)`, it also includes the contents of every batch, the random generators after it, the
    optimizer options, the loss, and, as often as they were recorded, gradients and weights, all down to the last bit.
    On several ranks, batches, draws and losses are those of the main rank. Events of plugins and the effects of a
    loaded state are not compared.

    Args:
        one: a recording, or a folder, for its newest recording.
        other: the recording to compare with.

    Raises:
        FileNotFoundError: there is no such recording.
        ValueError: a recording cannot be read or has no training; both are the same file; one begins at a checkpoint
            that the other does not have.
    """
    recordings = [read(path) for path in (one, other)]
    if recordings[0].path.resolve() == recordings[1].path.resolve():
        raise ValueError(f"Both are {recordings[0].path}: give two recordings.")
    first, second = map(course_of, recordings)
    if first.begin != second.begin:  # the recording of a fork begins at the fork
        since = max(first.begin, second.begin)
        first, second = (course_of(recording, since) for recording in recordings)
    if first.begin != second.begin:
        raise ValueError(f"{first.name} and {second.name} begin at different steps, and have no checkpoint in common.")
    damage = [f"{recording.path}: {text}" for recording in recordings for text in damage_of(recording.attempts)]
    return replace(compare(first, second), damage=tuple(damage))


def compare(first: Course, second: Course, *, is_complete: bool = True) -> Divergence:
    """Compare two courses; if they are not complete, a difference in length is ignored."""
    comparison = _CourseComparison(first, second)
    difference = comparison.first_difference()
    if not is_complete and difference is not None and difference.kind == "length":
        difference = None
    settings = [
        f"{name}: {first.settings.get(name)!r} and {second.settings.get(name)!r}"
        for name in {**first.settings, **second.settings}
        if first.settings.get(name) != second.settings.get(name)
    ]
    counts = comparison.batches, comparison.digested, comparison.compared
    return Divergence((first.name, second.name), difference, *counts, settings=tuple(settings))


# What differs in a batch, in the order of its computation, since an earlier difference may cause the others.
DIFFERENCES: tuple[tuple[str, Kind, str], ...] = (
    ("draws", "draw", "the random generators differ after the batch"),
    ("batch", "data", "the batch differs: other samples, changed samples, or another order of them"),
    ("loss", "loss", "the loss differs{losses}, although batch and random generators are equal"),
    ("gradients", "gradients", "the gradients differ, although the loss is equal"),
    ("options", "options", "other optimizer options differ, such as weight decay or the rate of another group"),
    ("weights", "weights", "the weights differ after a step with equal gradients, as far as these were compared"),
)
KINDS: dict[str, Kind] = {"request": "request", "plugin_changed": "plugin", "validation_end": "metric", "log": "metric"}
CAUSES: tuple[Kind, ...] = ("data", "draw", "loss")  # of a request, in a batch that was not skipped
COUNTERS = "optimizer steps", "skipped steps", "skipped batches", "samples", "tokens", "micro-batches of the window"
Found = tuple[Kind, str] | None


class _CourseComparison:
    """Compares two courses.

    Attributes:
        batches: the number of equal batches.
        digested: of these, with digests in both.
        compared: of these, with digests or losses in both.
    """

    def __init__(self, first: Course, second: Course) -> None:
        self._first, self._second = first, second
        self.batches = self.digested = self.compared = 0
        self._weights_step: int | None = None  # the last step after which the weights were equal

    def first_difference(self) -> FirstDifference | None:
        for first, second in zip_longest(*_comparable(self._first, self._second)):
            found: Found
            moment: CourseMoment = first or second
            if first is None or second is None:
                ended = self._first if first is None else self._second
                end = ended.end or "killed or running"
                found = "length", f"{ended.name} ends here ({end}); the other run continues with {moment.text}"
            elif (first.kind, first.place) != (second.kind, second.place):
                moments = (first, self._first.name), (second, self._second.name)
                moment, name = min(moments, key=lambda item: (item[0].place, item[0].kind == "batch"))
                found = self._unmatched(moment, name)
            elif first.kind == "batch":
                found = self._batch(first, second)
            elif first.facts != second.facts:
                found = KINDS.get(first.kind, "event"), f"{first.text}, and {second.text}"
            else:
                continue
            if found is not None:
                return FirstDifference(found[0], *moment.place, moment.step, found[1])
        return None

    def _unmatched(self, moment: CourseMoment, name: str) -> Found:
        """Describe a moment of only one run; a request may have its cause in the batch."""
        text = f"{moment.text} only in {name}"
        courses = self._first, self._second
        ended = [course for course in courses if course.end and course.moments[-1].place <= moment.place]
        if len(ended) == 1:
            text += f"; {ended[0].name} ends here ({ended[0].end})"
        cause = self._digests(moment.place) if moment.kind == "request" else None
        if cause is not None and cause[0] in CAUSES and (cause[0] == "data" or moment.facts[0] != "skip_batch"):
            return cause[0], f"{cause[1]}; and {text}"
        return KINDS.get(moment.kind, "event"), text

    def _batch(self, first: CourseMoment, second: CourseMoment) -> Found:
        place = first.place
        has_digests = place in self._first.digests and place in self._second.digests
        self.digested += has_digests
        self.compared += has_digests or (place in self._first.losses and place in self._second.losses)
        losses = self._losses(place)
        found = self._digests(place) or (("loss", f"the loss differs{losses}") if losses else None)
        found = found or _counters(first, second)
        if found is None:
            if has_digests and self._first.digests[place][WEIGHTS]:
                self._weights_step = first.step
            self.batches += 1
            return None
        kind, text = found
        if kind in ("loss", "gradients", "weights"):
            step = self._weights_step
            text += f" (the weights were {'not compared before' if step is None else f'equal after step {step}'})"
        return kind, text

    def _digests(self, place: Place) -> Found:
        first, second = self._first.digests.get(place), self._second.digests.get(place)
        if first is None or second is None or first == second:
            return None
        rows = zip(DIGESTS, first, second, strict=False)
        differing = {name for name, word, other in rows if word != other and word and other}  # 0: not recorded
        kind, text = next(((kind, text) for name, kind, text in DIFFERENCES if name in differing), (None, ""))
        if kind == "draw" and place == (0, 1):
            text += ". Compare the seeds of the runs: the notes of `explain` name them"
        if kind == "options" and repr(first[RATE]) != repr(second[RATE]):
            return "learning_rate", f"the learning rate differs: {first[RATE]!r} and {second[RATE]!r}"
        return None if kind is None else (kind, text.format(losses=self._losses(place)))

    def _losses(self, place: Place) -> str:
        """Return the losses of a batch if they differ."""
        first, second = self._first.losses.get(place), self._second.losses.get(place)
        return "" if first is None or second is None or repr(first) == repr(second) else f" ({first!r} and {second!r})"


def _comparable(*courses: Course) -> Iterator[list[CourseMoment]]:
    """Return the moments of two courses without logs if there are digests, else without logs of different batches."""
    logs = [{_log_key(moment) for moment in course.moments if moment.kind == "log"} for course in courses]
    shared = set() if all(course.digests for course in courses) else logs[0] & logs[1]
    for course in courses:
        yield [moment for moment in course.moments if moment.kind != "log" or _log_key(moment) in shared]


def _log_key(moment: CourseMoment) -> tuple[Place, object]:
    return moment.place, moment.facts[0]


def _counters(first: CourseMoment, second: CourseMoment) -> Found:
    for name, value, other in zip(COUNTERS, first.facts, second.facts, strict=True):
        if value != other:
            return "counters", f"the {name} differ: {value} and {other}"
    return None
