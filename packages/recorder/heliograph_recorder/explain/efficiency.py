"""The time of a recorded run: by phase, goodput and bottlenecks, and in each plugin on each event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heliograph.spi import printable

from ..format.records import Batches, Entry, EventEntry, HandlerTime, Recording, TimesEntry, walk
from . import words
from .attempt_summary import AttemptSummary
from .judge import Finding, Measured, findings, merged
from .words import StorySection

Kind = Literal["starting", "training", "validation", "test", "prediction", "saving", "replaying"]
KINDS: tuple[Kind, ...] = ("training", "validation", "test", "prediction", "saving", "replaying", "starting")
BACKGROUND = ("checkpoint_saved", "resume_verified")  # a thread may emit them, regardless of the loop
TRAINING: Kind = "training"
ENDS = ("validation_end", "validation_cut", "test_end", "predict_end", "checkpoint_saved")
NEXT: Mapping[str, Kind] = {
    "epoch_start": "training",
    "validation_start": "validation",
    "test_start": "test",
    "predict_start": "prediction",
    "save_point": "saving",
}  # the kind of the slice after an event
MAX_SLICES = 1_500  # a page can show
USEFUL, WAITING, REPEATED, BETWEEN = "useful training", "waiting for data", "repeated later", "between attempts"
NAMES = {"training": USEFUL, "saving": "saves", "validation": "validations", "replaying": "reading data again"}
ORDER = (USEFUL, WAITING, REPEATED, "validations", "saves", "reading data again", "starting", BETWEEN)


@dataclass(frozen=True, slots=True)
class Slice:
    """A period of one kind.

    Attributes:
        kind: what the run did.
        attempt: the number of the attempt.
        begin, end: seconds since the attempt began.
        step: the optimizer steps at its end.
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
    """Return what an attempt did, without gaps, from its beginning to its end."""
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
    """Return the longest slices, at most `most`, in order."""
    shown = sorted(range(len(slices)), key=lambda index: -slices[index].seconds)[:most]
    return [slices[index] for index in sorted(shown)]


def pieces(attempt: AttemptSummary, entries: Iterable[tuple[Entry, bool]]) -> Iterator[tuple[Slice, bool]]:
    """Yield what an attempt did between its entries, and whether that was lost; equal neighbours are one slice.

    Args:
        attempt: the attempt.
        entries: its entries, and whether the training later continued from before them.
    """
    kind: Kind = "starting"  # since the last entry
    open_kind, open_lost = kind, False  # of the next slice
    begin, end, step, is_lost = 0.0, 0.0, 0, False
    is_fit, number = attempt.is_fit, attempt.number
    for entry, is_lost in entries:
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


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The time of a training by part.

    Attributes:
        parts: the seconds of each part; their sum is the time from the first start to the last entry.
        findings: the bottlenecks.
        ranks: the measurements of the last attempt with any, None without one.
        is_pending: whether `Verdicts` is registered but has no measurements yet; then waits for data are unknown.
    """

    parts: dict[str, float]
    findings: tuple[Finding, ...]
    ranks: Measured | None
    is_pending: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def goodput(self) -> float:  # the share of useful training
        return self.parts.get(USEFUL, 0.0) / self.total if self.total else 0.0


def efficiency(recording: Recording, attempts: Sequence[AttemptSummary]) -> Efficiency:
    """Return the time of all attempts that trained, by part.

    Training time is useful if it was not lost and the loop did not wait for data. `Verdicts` measures the waits in a
    sample of the batches.
    """
    entries: list[list[tuple[Entry, bool]]] = [[] for _ in attempts]
    for index, entry, is_lost in walk(recording):
        entries[index].append((entry, is_lost))
    parts = dict.fromkeys(ORDER, 0.0)
    previous: AttemptSummary | None = None
    last: list[Measured] = []
    for attempt, of_attempt in zip(attempts, entries, strict=True):
        if not attempt.is_fit:
            continue
        parts[BETWEEN] += (previous and attempt.gap(previous)) or 0.0
        periods = measured_in(attempt)
        waiting = merged(periods).load_share if periods else 0.0
        for piece, is_lost in pieces(attempt, of_attempt):
            name = REPEATED if is_lost and piece.kind == "training" else NAMES.get(piece.kind, "starting")
            share = waiting if name == USEFUL else 0.0
            parts[name] += piece.seconds * (1 - share)
            parts[WAITING] += piece.seconds * share
        previous, last = attempt, periods or last
    bottlenecks = tuple(finding for finding in findings(last) if finding.holds)
    plans = [attempt.attempt.plan for attempt in attempts]
    is_pending = not last and any("verdicts" in owners for plan in plans for owners in plan.values())
    positive = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return Efficiency(positive, bottlenecks, merged(last) if last else None, is_pending)


def measured_in(attempt: AttemptSummary) -> list[Measured]:
    periods = list[Measured]()
    for entry in attempt.events(Measured.name):
        lists = {name: tuple(value) for name, value in entry.data.items() if isinstance(value, list)}
        try:
            periods.append(Measured(**{**entry.data, **lists}))
        except TypeError:  # of another version, or another event of this name
            continue
    return periods


def efficiency_section(times: Efficiency) -> StorySection:
    if not times.parts:
        return StorySection("where the time went", [])
    rows = [(words.seconds(part), words.share(part, times.total), name) for name, part in times.parts.items()]
    lines = words.table(rows, right=(0, 1))
    for finding in times.findings:
        lines += words.lines(f"{finding.kind}: {finding.text}", "  ", "    ")
    if times.is_pending:
        lines += words.lines("nothing is measured yet: waits for data count as training until Verdicts has timed some")
        return StorySection("where the time went", lines)
    if times.ranks is None:
        lines += words.lines("waits for data, slow ranks and memory were not measured: add Verdicts to the plugins")
    return StorySection(f"where the time went: goodput {words.share(times.goodput, 1)}", lines)


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one plugin's handlers of one event, in all attempts.

    Attributes:
        plugin: the plugin's name.
        event: the event's name.
        seconds: the time in all emissions.
        emissions: the number of emissions.
        longest: the seconds of the longest timed call.
        is_estimate: whether only some emissions were timed.
    """

    plugin: str
    event: str
    seconds: float
    emissions: int
    longest: float
    is_estimate: bool


def costs(attempts: Sequence[AttemptSummary]) -> list[Cost]:
    rows: dict[tuple[str, str], list[HandlerTime]] = {}
    for attempt in attempts:
        times = next((entry for entry in reversed(attempt.attempt.entries) if isinstance(entry, TimesEntry)), None)
        for row in times.rows if times is not None else ():
            rows.setdefault((row.plugin, row.event), []).append(row)
    merged = [
        Cost(
            plugin,
            event,
            sum(row.estimate for row in parts),
            sum(row.emissions for row in parts),
            max(row.longest for row in parts),
            any(row.timed < row.emissions for row in parts),
        )
        for (plugin, event), parts in rows.items()
    ]
    return sorted(merged, key=lambda cost: -cost.seconds)


def timed_seconds(attempts: Sequence[AttemptSummary]) -> float:
    """Return the wall time in which handlers were timed; a killed attempt may have no recorded times."""
    return sum(attempt.timed_seconds for attempt in attempts)


def untimed_attempts(attempts: Sequence[AttemptSummary]) -> list[int]:
    return [attempt.number for attempt in attempts if not attempt.timed_seconds]


def costs_section(rows: Sequence[Cost], wall: float, untimed: Sequence[int] = ()) -> StorySection:
    if not rows:
        return StorySection("time in plugins", [])
    plugins: dict[str, list[Cost]] = {}
    for row in rows:
        plugins.setdefault(row.plugin, []).append(row)
    by_time = sorted(plugins.items(), key=lambda item: -_seconds(item[1]))
    lines = words.table([_cells(name, parts, wall) for name, parts in by_time], right=(0, 1))
    is_estimate = any(row.is_estimate for row in rows)
    if is_estimate:
        lines += words.lines("~ estimated: the events of every batch were timed in some batches only")
    if untimed:
        numbers = words.join_words([str(number) for number in untimed])
        lines += words.lines(f"no times are recorded for attempt{'s' * (len(untimed) > 1)} {numbers}")
    total = "about " * is_estimate + words.seconds(_seconds(rows))
    return StorySection(f"time in plugins: {total} of {words.seconds(wall)}", lines)


def _seconds(rows: Sequence[Cost]) -> float:
    return sum(row.seconds for row in rows)


def _cells(plugin: str, events: Sequence[Cost], wall: float) -> tuple[str, ...]:
    top, slowest = events[0], max(events, key=lambda cost: cost.longest)
    seconds = "~" * any(cost.is_estimate for cost in events) + words.seconds(_seconds(events))
    where = "mostly " * (len(events) > 1) + f"on {top.event}, longest {words.seconds(slowest.longest)}"
    where += f" on {slowest.event}" * (slowest is not top)
    return seconds, words.share(_seconds(events), wall), printable(plugin), where
