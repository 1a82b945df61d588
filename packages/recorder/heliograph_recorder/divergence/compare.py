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
from .course import Course, CourseMoment, Digested, Place, bits, course_of

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
    if difference is not None and is_complete:
        place = difference.epoch, difference.batch
        ended = [course for course in (first, second) if max(course.batches, default=place) <= place]
        if len(ended) == 1 and difference.kind != "length":
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


OTHER_BATCH: tuple[Kind, str] = "data", "the batch differs: other samples, changed samples, or another order of them"
CAUSES: tuple[Kind, ...] = ("draw", "loss")  # of a request, in a batch that was not skipped


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
            if not is_complete and (first is None or second is None):
                return None
            if first is None or second is None or (first.kind, first.place) != (second.kind, second.place):
                return self._unmatched(first, second)
            compare_moments = self._batch if first.kind == "batch" else self._event
            if difference := compare_moments(first, second) or self._logs(first):
                return difference
        return None

    def _unmatched(self, first: CourseMoment | None, second: CourseMoment | None) -> FirstDifference:
        if first is None or second is None:
            ended, longer = (self._first, second) if first is None else (self._second, first)
            assert longer is not None
            text = f"{ended.name} ends here ({ended.end}); the other run continues with {longer.text}"
            return FirstDifference("length", *longer.place, longer.step, text)
        earlier, name = first, self._first.name
        if _order(second) < _order(first):
            earlier, name = second, self._second.name
        if earlier.kind == "request" and (cause := self._cause(earlier)) is not None:
            return FirstDifference(
                cause[0], *earlier.place, earlier.step, f"{cause[1]}; and {earlier.text} only in {name}"
            )
        return FirstDifference(
            _KINDS.get(earlier.kind, "event"), *earlier.place, earlier.step, f"{earlier.text} only in {name}"
        )

    def _cause(self, request: CourseMoment) -> tuple[Kind, str] | None:
        """Return a difference in the batch that may have caused a request."""
        first, second = self._first.digests.get(request.place), self._second.digests.get(request.place)
        if first is None or second is None:
            return None
        if first.words[BATCH] != second.words[BATCH]:
            return OTHER_BATCH
        cause = self._digests(request.place, first, second)
        return cause if cause is not None and cause[0] in CAUSES and request.facts[0] != "skip_batch" else None

    def _event(self, first: CourseMoment, second: CourseMoment) -> FirstDifference | None:
        if first.facts == second.facts:
            return None
        text = f"{first.text}, and {second.text}"
        return FirstDifference(_KINDS.get(first.kind, "event"), *first.place, first.step, text)

    def _batch(self, first: CourseMoment, second: CourseMoment) -> FirstDifference | None:
        place = first.place
        first_digests, second_digests = self._first.digests.get(place), self._second.digests.get(place)
        difference: tuple[Kind, str] | None = None
        has_digests = first_digests is not None and second_digests is not None
        self.compared += has_digests or (place in self._first.losses and place in self._second.losses)
        if first_digests is not None and second_digests is not None:
            self.digested += 1
            difference = self._digests(place, first_digests, second_digests)
        if difference := difference or self._losses(place) or _counters(first, second):
            return FirstDifference(difference[0], *place, first.step, difference[1] + self._uncompared(difference[0]))
        if first_digests is not None and second_digests is not None and first_digests.words[WEIGHTS]:
            self._weights_step = first.step
        self.batches += 1
        return None

    def _digests(self, place: Place, first: Digested, second: Digested) -> tuple[Kind, str] | None:
        """Return the difference that comes first in the computation of a batch, since it may cause the others."""
        pairs = list(zip(first.words, second.words, strict=True))
        differs = [a != b and bool(a and b) for a, b in pairs]  # 0: not recorded
        if differs[DRAWS]:
            also = ", and so do the batches" if differs[BATCH] else ""
            hint = ". Compare the seeds of the runs: the notes of `explain` name them" if place == (0, 1) else ""
            return "draw", f"the random generators differ after the batch{also}{hint}"
        if differs[BATCH]:
            return OTHER_BATCH
        if differs[LOSS]:
            return "loss", f"the loss differs{self._values(place)}, although batch and random generators are equal"
        if differs[GRADIENTS]:
            return "gradients", "the gradients differ, although the loss is equal"
        if differs[OPTIONS] and bits(first.rate) != bits(second.rate):
            return "learning_rate", f"the learning rate differs: {first.rate!r} and {second.rate!r}"
        if differs[OPTIONS]:
            return ("options", "other optimizer options differ, such as weight decay or the rate of another group")
        if differs[WEIGHTS]:
            return "weights", "the weights differ after a step with equal gradients, as far as these were compared"
        return None

    def _losses(self, place: Place) -> tuple[Kind, str] | None:
        values = self._values(place)
        return ("loss", f"the loss differs{values}") if values else None

    def _values(self, place: Place) -> str:
        first, second = self._first.losses.get(place), self._second.losses.get(place)
        return "" if first is None or second is None or bits(first) == bits(second) else f" ({first!r} and {second!r})"

    def _logs(self, moment: CourseMoment) -> FirstDifference | None:
        """Compare two logs over the same batches if there are no digests."""
        first, second = self._first.logs.get(moment.place), self._second.logs.get(moment.place)
        if first is None or second is None or first[0] != second[0] or (self._first.digests and self._second.digests):
            return None
        for name in first[1].keys() & second[1].keys():
            values = first[1][name], second[1][name]
            if bits(values[0]) != bits(values[1]):
                text = f"{name} in the log differs: {values[0]!r} and {values[1]!r}"
                return FirstDifference("metric", *moment.place, moment.step, text)
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


def _counters(first: CourseMoment, second: CourseMoment) -> tuple[Kind, str] | None:
    names = "optimizer steps", "skipped steps", "skipped batches", "samples", "tokens", "micro-batches of the window"
    for name, a, b in zip(names, first.facts, second.facts, strict=True):
        if a != b:
            return "counters", f"the {name} differ: {a} and {b}"
    return None
