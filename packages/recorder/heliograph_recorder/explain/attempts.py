"""The sections of a story about the attempts of a recorded run and their ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from heliograph.events import Request
from heliograph.spi import printable

from ..format.records import AttemptRecord, RequestEntry
from ..verbs import LOADED
from . import words
from .attempt_summary import AttemptSummary, Restore, ancestors
from .words import StorySection

MAX_METRICS = 40
KINDS = {"train": "training", "validation": "validation", "test": "test", "predict": "prediction"}


def describe_ending(attempt: AttemptSummary) -> str:
    closed = attempt.ending
    return attempt.status if closed is None else ending_text(attempt.status, closed.data["by"], closed.data["rank"])


def ending_text(status: str, by: str | None, rank: int | None) -> str:
    requester = f" by {printable(by)}" if by else ""
    return status + requester + (f" on rank {rank}" if rank is not None else "")


def reasons(attempt: AttemptSummary) -> list[str]:
    """Return the reason of the end, and the position of the stop request or of the error."""
    closed = attempt.ending
    if closed is None:
        return []
    texts = [printable(closed.data["reason"])]
    for failed in attempt.events("run_failed"):
        plugin = f"in {printable(failed.data['plugin'])} on {failed.data['event']}, " if failed.data["plugin"] else ""
        texts.append(f"raised {plugin}in phase {failed.data['phase']}")
    requests = (entry.request for entry in attempt.attempt.entries if isinstance(entry, RequestEntry))
    return texts + (stop_request(requests) if attempt.status == "stopped" else [])


def stop_request(requests: Iterable[Request]) -> list[str]:
    """Describe the first request to stop that was not withdrawn, if there is one."""
    stop = None
    for request in requests:
        if request.verb == "withdraw_stop":
            stop = None
        elif request.verb == "stop" and stop is None:
            stop = request
    if stop is None:
        return []
    during = f"during {stop.event}, " if stop.event else ""
    return [f"requested {during}at epoch {stop.epoch}, batch {stop.batch}, step {stop.step}"]


def progress(attempt: AttemptSummary) -> str:
    if not attempt.is_fit:
        return words.count_things(attempt.last.evaluated, "batch") + " evaluated"
    return f"{words.position(attempt.last)}, {words.count_things(attempt.last.samples, 'sample')}"


def end_section(run: str, attempt: AttemptSummary) -> StorySection:
    closed, last = attempt.ending, attempt.last
    duration = f" in {words.seconds(last.seconds)} of training" if attempt.is_fit and last.seconds else ""
    texts = list(dict.fromkeys([*reasons(attempt), progress(attempt) + duration]))
    texts += metrics_line(closed.data["metrics"]) if closed is not None else []
    lines = [line for text in texts for line in words.lines(text)]
    return StorySection(f"{printable(run)}: {describe_ending(attempt)}", lines)


def metrics_line(metrics: Mapping[str, float]) -> list[str]:
    shown = sorted(metrics.items())[:MAX_METRICS]
    texts = [f"{printable(name)}{words.NO_BREAK}{words.number(value)}" for name, value in shown]
    texts += [f"and {len(metrics) - MAX_METRICS:,} more"] * (len(metrics) > MAX_METRICS)
    return [", ".join(texts)] if texts else []


def attempts_section(attempts: Sequence[AttemptSummary]) -> StorySection:
    lines: list[str] = []
    previous: AttemptSummary | None = None
    for attempt in attempts:
        head = f"  {attempt.number}  "
        for text in _describe(attempt, previous):
            lines += words.lines(text, head, "     ")
            head = "     "
        previous = attempt
    return StorySection("attempts", lines)


def describe_comparison(attempt: AttemptSummary) -> Iterator[str]:
    for entry in attempt.events("resume_verified"):
        steps, difference = entry.data["steps"], entry.data["difference"]
        if steps:
            yield f"verified: {steps:,} repeated step{' is' if steps == 1 else 's are'} bitwise identical"
        if difference is not None:
            yield f"the resumed run {printable(difference)}"


def who_changed(data: Mapping[str, Any]) -> str:
    """Return who changed a plugin; a restored checkpoint is not a decision of a plugin."""
    return "when the checkpoint was restored" if data["by"] == LOADED else f"by {data['by']}"


def _describe(attempt: AttemptSummary, previous: AttemptSummary | None) -> Iterator[str]:
    recorded = attempt.attempt
    size = f" on {recorded.world_size:,} processes" if recorded.world_size > 1 else ""
    gap = attempt.gap(previous) if previous is not None else None
    later = f", {words.seconds(gap)} after the end of attempt {attempt.number - 1}" if gap is not None else ""
    yield f"{KINDS[recorded.phase]}{size}, started {attempt.began_text}{later}"
    if previous is not None and attempt.is_fit:
        yield from _changes(previous.attempt, recorded)
    if attempt.is_fit and all(restore.is_roll_back for restore in attempt.restores):
        yield "from the start"
    for restore in attempt.restores:
        yield _describe_restore(restore)
    for parent in ancestors(recorded) if previous is None else ():
        yield f"a fork of {printable(parent.recording)} {printable(parent.parting)}"
    yield from describe_comparison(attempt)
    yield f"{describe_ending(attempt)} after {words.seconds(attempt.seconds)}: {progress(attempt)}"


def _describe_restore(restore: Restore) -> str:
    source = "a state without a file" if restore.path is None else printable(restore.path)
    verb = "rolled back to" if restore.is_roll_back else "resumed from"
    text = f"{verb} {source} at {words.position(restore.counters)}"
    lost = restore.lost_work()
    if lost is None:
        return text + "; no work was lost" * (restore.before is not None)
    steps = words.count_things(lost.steps, "step")
    details = [words.count_things(lost.batch, "batch"), words.count_things(lost.samples, "sample")]
    details += [words.seconds(lost.seconds)] if lost.seconds else []
    return f"{text}; {steps} ({', '.join(details)}) {'was' if lost.steps == 1 else 'were'} lost"


def _changes(before: AttemptRecord, after: AttemptRecord) -> Iterator[str]:
    pairs: list[tuple[str, Any, Any]] = [("processes", before.world_size, after.world_size)]
    for old, new in ((before.versions, after.versions), (before.hyper_parameters, after.hyper_parameters)):
        pairs += [(name, old.get(name, "not given"), new.get(name, "not given")) for name in sorted({*old, *new})]
    changed = [f"{printable(name)} {printable(new)} (was {printable(old)})" for name, old, new in pairs if old != new]
    if changed:
        yield f"changed: {', '.join(changed)}"
