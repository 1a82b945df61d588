"""Where the time of a recorded training went: its goodput, and what takes too much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..format.records import Batches, Entry, EventEntry, Recording, walk
from . import words
from .attempt_summary import AttemptSummary
from .judge import Finding, Measured, findings, merged
from .words import Section

Kind = Literal["starting", "training", "validation", "test", "prediction", "saving", "replaying"]
KINDS: tuple[Kind, ...] = ("training", "validation", "test", "prediction", "saving", "replaying", "starting")
BACKGROUND = ("checkpoint_saved", "resume_verified")  # a thread may emit them while the loop does something else
TRAINING: Kind = "training"
ENDS = ("validation_end", "validation_cut", "test_end", "predict_end", "checkpoint_saved")
NEXT: Mapping[str, Kind] = {
    "epoch_start": "training",
    "validation_start": "validation",
    "test_start": "test",
    "predict_start": "prediction",
    "save_point": "saving",
}  # what the run does after an event
MAX_SLICES = 1_500  # as many as a page can show


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time in which the run did one thing.

    Attributes:
        kind: what it did.
        attempt: its number.
        begin, end: in seconds since the attempt began.
        step: optimizer steps at its end.
    """

    kind: Kind
    attempt: int
    begin: float
    end: float
    step: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def phases(attempt: AttemptSummary) -> list[Slice]:
    slices: list[Slice] = []
    for piece, _ in pieces(attempt, ((entry, False) for entry in attempt.attempt.entries)):
        if piece.end <= piece.begin:
            continue
        if slices and slices[-1].kind == piece.kind:
            slices[-1] = replace(slices[-1], end=piece.end, step=piece.step)
        else:
            slices.append(piece)
    return slices


def totals(slices: Sequence[Slice]) -> dict[Kind, float]:
    sums = {kind: sum(piece.seconds for piece in slices if piece.kind == kind) for kind in KINDS}
    return {kind: seconds for kind, seconds in sums.items() if seconds > 0}


def longest(slices: Sequence[Slice], most: int = MAX_SLICES) -> list[Slice]:
    if len(slices) <= most:
        return list(slices)
    size = -(-len(slices) // most)
    kept: list[Slice] = []
    for start in range(0, len(slices), size):
        stretch = slices[start : start + size]
        sums = totals(stretch)
        for attempt in dict.fromkeys(piece.attempt for piece in stretch):
            own = [piece for piece in stretch if piece.attempt == attempt]
            kept.append(replace(own[-1], kind=max(sums, key=lambda kind: sums[kind]), begin=own[0].begin))
    return kept


def pieces(attempt: AttemptSummary, entries: Iterable[tuple[Entry, bool]]) -> Iterator[tuple[Slice, bool]]:
    kind: Kind = "starting"  # since the last entry
    open_kind, open_lost = kind, False  # of the slice that is not yielded yet
    begin, end, step, is_lost = 0.0, 0.0, 0, False
    is_fit, number = attempt.is_fit, attempt.number
    for entry, is_lost in entries:  # the last one says it of what follows
        if isinstance(entry, Batches):
            at, now, then = entry.steps[-1], TRAINING, TRAINING
        elif isinstance(entry, EventEntry) and (entry.event not in BACKGROUND or kind == "saving"):
            at, now, then = entry.counters.steps, kind, _next(entry, kind, is_fit=is_fit)
        else:  # takes no time of the loop
            continue
        if now != open_kind or is_lost != open_lost:
            yield Slice(open_kind, number, begin, end, step), open_lost
            open_kind, open_lost, begin = now, is_lost, end
        kind = then
        if entry.clock > end:
            end, step = entry.clock, at
    if kind != open_kind or is_lost != open_lost:
        yield Slice(open_kind, number, begin, end, step), open_lost
        open_kind, open_lost, begin = kind, is_lost, end
    yield Slice(open_kind, number, begin, attempt.seconds, step), open_lost


def _next(entry: EventEntry, kind: Kind, *, is_fit: bool) -> Kind:
    event = entry.event
    if event == "replay":
        return "replaying" if entry.data["done"] < entry.data["batches"] else "training"
    if event in ENDS:
        return "training" if is_fit else "starting"
    return NEXT.get(event) or ("training" if kind == "saving" else kind)


USEFUL, WAITING, REPEATED, BETWEEN = "useful training", "waiting for data", "repeated later", "between attempts"
NAMES = {"training": USEFUL, "saving": "saves", "validation": "validations", "replaying": "reading data again"}
ORDER = (USEFUL, WAITING, REPEATED, "validations", "saves", "reading data again", "starting", BETWEEN)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Where the time of a training went.

    Attributes:
        parts: the seconds of each, which add up to all the time from its first start to its last entry.
        findings: what takes too much.
        ranks: what was measured in the last attempt of which something was, None for none.
        is_pending: whether `Verdicts` is to measure it, and has measured nothing yet: so waits for data are not known.
    """

    parts: dict[str, float]
    findings: tuple[Finding, ...]
    ranks: Measured | None
    is_pending: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def goodput(self) -> float:
        return self.parts.get(USEFUL, 0.0) / self.total if self.total else 0.0


def efficiency(recording: Recording, attempts: Sequence[AttemptSummary]) -> Efficiency:
    entries: list[list[tuple[Entry, bool]]] = [[] for _ in attempts]
    for index, entry, is_lost in walk(recording):
        entries[index].append((entry, is_lost))
    parts = dict.fromkeys(ORDER, 0.0)
    previous: AttemptSummary | None = None
    last: list[Measured] = []
    for attempt, own in zip(attempts, entries, strict=True):
        if not attempt.is_fit:
            continue
        parts[BETWEEN] += (previous and attempt.gap(previous)) or 0.0
        stretches = measured_in(attempt)
        waiting = merged(stretches).load_share if stretches else 0.0
        for piece, is_lost in pieces(attempt, own):
            name = REPEATED if is_lost and piece.kind == "training" else NAMES.get(piece.kind, "starting")
            share = waiting if name == USEFUL else 0.0
            parts[name] += piece.seconds * (1 - share)
            parts[WAITING] += piece.seconds * share
        previous, last = attempt, stretches or last
    found = findings(last or _unmeasured(attempts, parts))
    known = {name: seconds for name, seconds in parts.items() if seconds > 0}
    is_pending = not last and any("verdicts" in owners for each in attempts for owners in each.attempt.plan.values())
    return Efficiency(known, tuple(each for each in found if each.holds), merged(last) if last else None, is_pending)


def measured_in(attempt: AttemptSummary) -> list[Measured]:
    stretches = list[Measured]()
    for entry in attempt.events(Measured.name):
        lists = {name: tuple(value) for name, value in entry.data.items() if isinstance(value, list)}
        try:
            stretches.append(Measured(**{**entry.data, **lists}))
        except TypeError:  # of another version, or of somebody else's event of this name
            continue
    return stretches


def efficiency_section(found: Efficiency) -> Section:
    if not found.parts:
        return Section("where the time went", [])
    rows = [(words.seconds(each), words.share(each, found.total), name) for name, each in found.parts.items()]
    lines = words.table(rows, right=(0, 1))
    for each in found.findings:
        lines += words.lines(f"{each.kind}: {each.text}", "  ", "    ")
    if found.is_pending:
        lines += words.lines(
            "nothing is measured yet: a wait for data counts as training until Verdicts has timed some"
        )
        return Section("where the time went", lines)
    if found.ranks is None:
        lines += words.lines("waits for data, slow ranks and memory were not measured: add Verdicts to the plugins")
    return Section(f"where the time went: goodput {words.share(found.goodput, 1)}", lines)


def _unmeasured(attempts: Sequence[AttemptSummary], parts: dict[str, float]) -> list[Measured]:
    fits = [attempt for attempt in attempts if attempt.is_fit]
    entries: list[EventEntry] = [entry for attempt in fits for entry in attempt.events("validation_end", "save_point")]
    saves = sum(entry.event == "save_point" for entry in entries)
    seconds = sum(attempt.seconds for attempt in fits)
    validation, save = parts["validations"], parts["saves"]
    return [Measured(seconds, 1, 0, validation, len(entries) - saves, save, saves, (0.0,), (0.0,), (0.0,), (0,), (0,))]
