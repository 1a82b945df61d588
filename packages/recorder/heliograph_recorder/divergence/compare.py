"""Compare two recorded runs, moment by moment, and say what the first difference means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from ..digests.checksums import SMALL
from ..format.digests import COLUMNS
from ..format.gc_pause import gc_paused
from ..format.reader import damage_of, read
from .course import Course, Digested, Moment, Place, bits, course_of, gaps_of
from .report import Difference, Divergence, Kind

BATCH, SAMPLES, DRAWS, OPTIONS, LOSS, GRADIENTS, WEIGHTS = range(len(COLUMNS))


@gc_paused()
def diverge(one: str | Path, other: str | Path) -> Divergence:
    """Compare two recorded trainings, and find the first difference.

    Kills and resumes do not count: what a resumed run has done again counts once. Compared are the counters of every
    batch, requests, toggled plugins, the metrics of validations and logs; and, where both were recorded with
    `Recorder(digests=True)`, the content of every batch, the random generators after it, the learning rates and other
    options of the optimizers, the loss, and, as often as they were taken, gradients and weights: all of them down to
    the last bit. Of several ranks, the batches, draws and losses are those of the main one. Events that plugins emit
    are not compared, and neither is what a loaded state has restored.

    Args:
        one: a recording, or a folder: the newest in it.
        other: the recording to compare with.

    Raises:
        FileNotFoundError: there is no such recording.
        ValueError: it cannot be read, or is of no training; both are the same file; one begins at a checkpoint that the
            other does not have.
    """
    recordings = [read(each) for each in (one, other)]
    if recordings[0].path.resolve() == recordings[1].path.resolve():
        raise ValueError(f"Both are {recordings[0].path}: give two recordings.")
    names = [str(each.path) for each in recordings]
    courses = [course_of(each, name) for each, name in zip(recordings, names, strict=True)]
    since = max(each.begin for each in courses)
    if courses[0].begin != courses[1].begin:  # a fork's recording begins where it was forked
        courses = [course_of(each, name, since) for each, name in zip(recordings, names, strict=True)]
    if courses[0].begin != courses[1].begin:
        raise ValueError(f"{names[0]} and {names[1]} begin at different steps, and have no checkpoint in common.")
    damage = (f"{each.path}: {text}" for each in recordings for text in damage_of(each.attempts))
    return replace(compare(courses[0], courses[1]), damage=tuple(damage))


def compare(one: Course, other: Course, *, whole: bool = True) -> Divergence:
    """Compare two courses.

    Args:
        one: a course.
        other: the one to compare with it.
        whole: whether both came to their ends, so that a difference in length counts.
    """
    comparison = _Comparison(one, other)
    first, aside = comparison.first_difference(whole=whole), ""
    if whole and (asked := _first_aside(one, other, first)) is not None:
        moment, run = asked
        text = f"{moment.text} in epoch {moment.place[0]}, batch {moment.place[1]} only in {run.name}"
        if first is not None and moment.facts[0] == "stop" and _ends_after(run, moment):
            first = replace(first, text=f"{text}, which it ended; so {first.text}")
        else:
            aside = f"{text}: it does not act on what is trained"
    settings = [
        f"{name}: {one.settings.get(name)!r} and {other.settings.get(name)!r}"
        for name in {**one.settings, **other.settings}
        if one.settings.get(name) != other.settings.get(name)
    ]
    return Divergence(
        names=(one.name, other.name),
        first=first,
        aside=aside,
        batches=comparison.batches,
        digested=comparison.digested,
        compared=comparison.compared,
        settings=tuple(settings),
    )


OTHER_OPTIONS = (
    "other options of the optimizer: its weight decay, say, a rate of another group, or one that is a tensor"
)
EMPTY = 1  # the sum of a batch of which nothing can be added up, such as texts
CAUSES: tuple[Kind, ...] = ("draw", "loss")  # in a batch that was not skipped


class _Comparison:
    """The comparison of two courses.

    Attributes:
        batches: how many were compared and are equal.
        digested: of how many both have digests.
        compared: of how many both have digests or losses.
    """

    def __init__(self, one: Course, other: Course) -> None:
        self._one, self._other = one, other
        self.batches = self.digested = self.compared = 0
        self._compared: dict[int, int] = {}  # by column, the last step after which it was taken, and equal

    def first_difference(self, *, whole: bool) -> Difference | None:
        """Return the first difference, None without."""
        for mine, theirs in zip_longest(*self._moments()):
            if not whole and (mine is None or theirs is None):
                return None
            if mine is None or theirs is None or (mine.what, mine.place) != (theirs.what, theirs.place):
                return self._only_in_one(mine, theirs)
            found = self._batch(mine, theirs) if mine.what == "batch" else self._event(mine, theirs)
            if found := found or self._logs(mine):
                return found
        return None

    def _moments(self) -> Iterator[list[Moment]]:
        """Yield the moments of both, without those that one recorder has not."""
        gaps = gaps_of(self._one) ^ gaps_of(self._other)
        for course in (self._one, self._other):
            yield [each for each in course.moments if each.place not in gaps]

    def _only_in_one(self, mine: Moment | None, theirs: Moment | None) -> Difference:
        """Say what one run does where the other does something else, or has ended."""
        if mine is None or theirs is None:
            ended, longer = (self._one, theirs) if mine is None else (self._other, mine)
            assert longer is not None
            text = f"{ended.name} has no more: {ended.end}; the other continues with {longer.text}"
            return Difference("length", *longer.place, longer.step, text)
        first, name = (mine, self._one.name) if _order(mine) <= _order(theirs) else (theirs, self._other.name)
        if first.what == "request" and (cause := self._cause(first)) is not None:
            return Difference(cause[0], *first.place, first.step, f"{cause[1]}; and {first.text} only in {name}")
        return Difference(_KINDS.get(first.what, "event"), *first.place, first.step, f"{first.text} only in {name}")

    def _cause(self, request: Moment) -> tuple[Kind, str] | None:
        """Return what differs in a batch before anybody could request something because of it."""
        mine, theirs = self._one.digests.get(request.place), self._other.digests.get(request.place)
        if mine is None or theirs is None:
            return None
        if mine.words[BATCH] != theirs.words[BATCH]:
            return self._other_batch(request.place, (mine.words[SAMPLES], theirs.words[SAMPLES]))
        found = self._digests(request.place, mine, theirs)
        return found if found is not None and found[0] in CAUSES and request.facts[0] != "skip_batch" else None

    def _event(self, mine: Moment, theirs: Moment) -> Difference | None:
        if mine.facts == theirs.facts:
            return None
        return Difference(_KINDS.get(mine.what, "event"), *mine.place, mine.step, f"{mine.text}, and {theirs.text}")

    def _batch(self, mine: Moment, theirs: Moment) -> Difference | None:
        """Compare a batch by its digests, and by what else is known of it."""
        place = mine.place
        digests = self._one.digests.get(place), self._other.digests.get(place)
        found: tuple[Kind, str] | None = None
        self.compared += None not in digests or (place in self._one.losses and place in self._other.losses)
        if digests[0] is not None and digests[1] is not None:
            self.digested += 1
            found = self._digests(place, digests[0], digests[1])
        if found := found or self._losses(place) or _counters(mine, theirs) or self._chains(place):
            return Difference(found[0], *place, mine.step, found[1] + self._unseen(found[0]))
        for column in range(len(COLUMNS)):
            if digests[0] is not None and digests[1] is not None and digests[0].words[column]:
                self._compared[column] = mine.step
        self.batches += 1
        return None

    def _digests(self, place: Place, mine: Digested, theirs: Digested) -> tuple[Kind, str] | None:
        """Return what the first cause may be: what comes first in a batch, comes first here."""
        pairs = list(zip(mine.words, theirs.words, strict=True))
        differs = [a != b and bool(a and b) for a, b in pairs]  # 0: it was not taken
        if differs[DRAWS]:
            also = ", and the batches differ" if differs[BATCH] else ""
            cause = ". Were the runs seeded alike? The notes of `explain` name a seed" if place == (0, 1) else ""
            return "draw", f"another draw: the random generators differ after the batch{also}{cause}"
        if differs[BATCH]:
            return self._other_batch(place, pairs[SAMPLES])
        if differs[LOSS]:
            values = self._values(place)
            return "loss", f"another loss{values} of an equal batch with equal random generators"
        if differs[GRADIENTS]:
            return "gradients", "other gradients of an equal loss"
        if differs[OPTIONS] and bits(mine.rate) != bits(theirs.rate):
            return "learning_rate", f"another learning rate: {mine.rate!r} and {theirs.rate!r}"
        if differs[OPTIONS]:
            return (
                "options",
                OTHER_OPTIONS,
            )
        if differs[WEIGHTS]:
            return "weights", "other weights after a step with equal gradients, as far as these were compared"
        return None

    def _other_batch(self, place: Place, samples: tuple[int, int]) -> tuple[Kind, str]:
        if samples[0] == samples[1] > EMPTY:
            return "order", "another order, it seems: the values of the batch add up to the same"
        epoch = [
            {at: each for at, each in run.digests.items() if at[0] == place[0]} for run in (self._one, self._other)
        ]
        mine, theirs = (sum(each.words[SAMPLES] for each in digests.values()) for digests in epoch)
        are_added = mine > EMPTY * len(epoch[0])
        if are_added and epoch[0].keys() == epoch[1].keys() and 0 in ((mine - theirs) % 2**32, (mine - theirs) % SMALL):
            return "order", "another order, it seems: the values of the epoch add up to the same, in other batches"
        return "data", "another batch: other samples, the same ones changed, or another order or draw of loading"

    def _losses(self, place: Place) -> tuple[Kind, str] | None:
        mine, theirs = self._one.losses.get(place), self._other.losses.get(place)
        if mine is None or theirs is None or bits(mine) == bits(theirs):
            return None
        return "loss", f"another loss{self._values(place)}"

    def _values(self, place: Place) -> str:
        mine, theirs = self._one.losses.get(place), self._other.losses.get(place)
        return "" if mine is None or theirs is None or bits(mine) == bits(theirs) else f" ({mine!r} and {theirs!r})"

    def _chains(self, place: Place) -> tuple[Kind, str] | None:
        """Compare all batches up to here at once, those without digests included."""
        mine, theirs = self._one.chains.get(place), self._other.chains.get(place)
        if mine is None or theirs is None or mine[1] != theirs[1] or mine[0] == theirs[0]:
            return None
        return "unknown", "something differed in the batches before, of which the digests are missing in a recording"

    def _logs(self, moment: Moment) -> Difference | None:
        """Compare the means of a log that both have, over the same batches, where there are no digests."""
        mine, theirs = self._one.logs.get(moment.place), self._other.logs.get(moment.place)
        if mine is None or theirs is None or mine[0] != theirs[0] or (self._one.digests and self._other.digests):
            return None
        for name in mine[1].keys() & theirs[1].keys():
            values = mine[1][name], theirs[1][name]
            if bits(values[0]) != bits(values[1]):
                text = f"another {name} in the log: {values[0]!r} and {values[1]!r}"
                return Difference("metric", *moment.place, moment.step, text)
        return None

    def _unseen(self, kind: Kind) -> str:
        """Say since when what leads to a difference was not compared."""
        if kind not in ("loss", "weights", "gradients"):
            return ""
        known = self._compared.get(WEIGHTS)
        return (
            " (the weights were not compared before)"
            if known is None
            else f" (the weights were equal after step {known})"
        )


_KINDS: Mapping[str, Kind] = {"request": "request", "plugin_changed": "plugin", "validation_end": "metric"}


def _order(moment: Moment) -> tuple[Place, bool]:
    """Return the order of two moments that are not of one thing: what is done within a batch comes before its end."""
    return moment.place, moment.what == "batch"


def _counters(mine: Moment, theirs: Moment) -> tuple[Kind, str] | None:
    names = "optimizer steps", "skipped steps", "skipped batches", "samples", "tokens", "micro-batches of the window"
    for name, a, b in zip(names, mine.facts, theirs.facts, strict=True):
        if a != b:
            return "counters", f"other {name}: {a} and {b}"
    return None


def _first_aside(one: Course, other: Course, first: Difference | None) -> tuple[Moment, Course] | None:
    """Return the first request that only saves, logs or stops, and that only one run has, with that run."""
    for mine, theirs in zip_longest(one.asides, other.asides):
        if mine is not None and theirs is not None and (mine.place, mine.facts) == (theirs.place, theirs.facts):
            continue
        either = [(each, run) for each, run in ((mine, one), (theirs, other)) if each is not None]
        moment, run = min(either, key=lambda each: each[0].place)
        if first is not None and moment.place > (first.epoch, first.batch):
            return None
        return moment, run
    return None


def _ends_after(run: Course, stop: Moment) -> bool:
    """Return whether a run has no batch after a request to stop."""
    return not any(each.what == "batch" and each.place > stop.place for each in run.moments)
