"""`diverge`: finds and explains the first difference between two recorded runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from heliograph.spi import printable_lines

from ..format.reader import damage_of, gc_paused, read
from ..format.records import DIGESTS
from .course import Course, CourseMoment, Place, bits, course_of

BATCH, DRAWS, OPTIONS, LOSS, GRADIENTS, WEIGHTS = range(len(DIGESTS))


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
    names = [str(recording.path) for recording in recordings]
    courses = [course_of(recording, name) for recording, name in zip(recordings, names, strict=True)]
    since = max(course.begin for course in courses)
    if courses[0].begin != courses[1].begin:  # the recording of a fork begins at the fork
        courses = [course_of(recording, name, since) for recording, name in zip(recordings, names, strict=True)]
    if courses[0].begin != courses[1].begin:
        raise ValueError(f"{names[0]} and {names[1]} begin at different steps, and have no checkpoint in common.")
    damage = (f"{recording.path}: {text}" for recording in recordings for text in damage_of(recording.attempts))
    return replace(compare(courses[0], courses[1]), damage=tuple(damage))


def compare(first: Course, second: Course, *, is_complete: bool = True) -> Divergence:
    """Compare two courses; if they are not complete, a difference in length is ignored."""
    comparison = _CourseComparison(first, second)
    difference = comparison.first_difference(is_complete=is_complete)
    if difference is not None and is_complete and difference.kind != "length":
        place = difference.epoch, difference.batch
        ended = [course for course in (first, second) if max(course.batches, default=place) <= place]
        if len(ended) == 1:
            text = f"{difference.text}; {ended[0].name} ends here ({ended[0].end})"
            difference = replace(difference, text=text)
    settings = [
        f"{name}: {first.settings.get(name)!r} and {second.settings.get(name)!r}"
        for name in {**first.settings, **second.settings}
        if first.settings.get(name) != second.settings.get(name)
    ]
    return Divergence(
        names=(first.name, second.name),
        first=difference,
        batches=comparison.batches,
        digested=comparison.digested,
        compared=comparison.compared,
        settings=tuple(settings),
    )


# What differs in a batch, in the order of its computation, since an earlier difference may cause the others.
DIFFERENCES: tuple[tuple[int, Kind, str], ...] = (
    (DRAWS, "draw", "the random generators differ after the batch"),
    (BATCH, "data", "the batch differs: other samples, changed samples, or another order of them"),
    (LOSS, "loss", "the loss differs, although batch and random generators are equal"),
    (GRADIENTS, "gradients", "the gradients differ, although the loss is equal"),
    (OPTIONS, "options", "other optimizer options differ, such as weight decay or the rate of another group"),
    (WEIGHTS, "weights", "the weights differ after a step with equal gradients, as far as these were compared"),
)
CAUSES: tuple[Kind, ...] = ("data", "draw", "loss")  # of a request, in a batch that was not skipped
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

    def first_difference(self, *, is_complete: bool) -> FirstDifference | None:
        for first, second in zip_longest(self._first.moments, self._second.moments):
            found: Found
            moment: CourseMoment = first or second
            if first is None or second is None:
                if not is_complete:
                    return None
                ended = self._first if first is None else self._second
                found = "length", f"{ended.name} ends here ({ended.end}); the other run continues with {moment.text}"
            elif (first.kind, first.place) != (second.kind, second.place):
                is_second = _order(second) < _order(first)
                moment, course = (second, self._second) if is_second else (first, self._first)
                found = self._unmatched(moment, course.name)
            else:
                found = (self._batch if first.kind == "batch" else _compare_events)(first, second) or self._logs(first)
            if found is not None:
                epoch, batch = moment.place
                return FirstDifference(found[0], epoch, batch, moment.step, found[1])
        return None

    def _unmatched(self, moment: CourseMoment, name: str) -> Found:
        cause = self._digests(moment.place) if moment.kind == "request" else None
        if cause is not None and cause[0] in CAUSES and (cause[0] == "data" or moment.facts[0] != "skip_batch"):
            return cause[0], f"{cause[1]}; and {moment.text} only in {name}"
        return _KINDS.get(moment.kind, "event"), f"{moment.text} only in {name}"

    def _batch(self, first: CourseMoment, second: CourseMoment) -> Found:
        place = first.place
        has_digests = place in self._first.digests and place in self._second.digests
        self.digested += has_digests
        self.compared += has_digests or (place in self._first.losses and place in self._second.losses)
        values = self._values(place)
        found: Found = self._digests(place) or (("loss", f"the loss differs{values}") if values else None)
        if found := found or _counters(first, second):
            return found[0], found[1] + self._uncompared(found[0])
        if has_digests and self._first.digests[place].words[WEIGHTS]:
            self._weights_step = first.step
        self.batches += 1
        return None

    def _digests(self, place: Place) -> Found:
        first, second = self._first.digests.get(place), self._second.digests.get(place)
        if first is None or second is None:
            return None
        pairs = list(zip(first.words, second.words, strict=True))
        differs = [a != b and bool(a and b) for a, b in pairs]  # 0: not recorded
        kind, text = next(((kind, text) for column, kind, text in DIFFERENCES if differs[column]), (None, ""))
        if kind == "draw":
            text += ", and so do the batches" if differs[BATCH] else ""
            text += ". Compare the seeds of the runs: the notes of `explain` name them" if place == (0, 1) else ""
        elif kind == "loss":
            text = text.replace(",", f"{self._values(place)},", 1)
        elif kind == "options" and bits(first.rate) != bits(second.rate):
            return "learning_rate", f"the learning rate differs: {first.rate!r} and {second.rate!r}"
        return None if kind is None else (kind, text)

    def _values(self, place: Place) -> str:
        first, second = self._first.losses.get(place), self._second.losses.get(place)
        return "" if first is None or second is None or bits(first) == bits(second) else f" ({first!r} and {second!r})"

    def _logs(self, moment: CourseMoment) -> Found:
        """Compare two logs over the same batches if there are no digests."""
        first, second = self._first.logs.get(moment.place), self._second.logs.get(moment.place)
        if first is None or second is None or first[0] != second[0] or (self._first.digests and self._second.digests):
            return None
        for name in first[1].keys() & second[1].keys():
            values = first[1][name], second[1][name]
            if bits(values[0]) != bits(values[1]):
                return "metric", f"{name} in the log differs: {values[0]!r} and {values[1]!r}"
        return None

    def _uncompared(self, kind: Kind) -> str:
        if kind not in ("loss", "weights", "gradients"):
            return ""
        if self._weights_step is None:
            return " (the weights were not compared before)"
        return f" (the weights were equal after step {self._weights_step})"


_KINDS: Mapping[str, Kind] = {"request": "request", "plugin_changed": "plugin", "validation_end": "metric"}


def _order(moment: CourseMoment) -> tuple[Place, bool]:
    """Return the sort key of a moment: events in a batch come before its end."""
    return moment.place, moment.kind == "batch"


def _compare_events(first: CourseMoment, second: CourseMoment) -> Found:
    return (
        None if first.facts == second.facts else (_KINDS.get(first.kind, "event"), f"{first.text}, and {second.text}")
    )


def _counters(first: CourseMoment, second: CourseMoment) -> Found:
    names = "optimizer steps", "skipped steps", "skipped batches", "samples", "tokens", "micro-batches of the window"
    for name, a, b in zip(names, first.facts, second.facts, strict=True):
        if a != b:
            return "counters", f"the {name} differ: {a} and {b}"
    return None
