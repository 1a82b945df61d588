"""Walk through a recording, and tell what was undone: by a kill and a resume, or by a return amid the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .records import Batches, Counters, Entry, EventEntry, Recording

Key = tuple[int, int, int, int]


class Walked(NamedTuple):
    """An entry on its place in the whole.

    Attributes:
        attempt_index: its attempt.
        entry: what came about.
        lost: whether a later attempt, or this one later on, went back to a place before it.
    """

    attempt_index: int
    entry: Entry
    lost: bool


def walk(recording: Recording) -> Iterator[Walked]:
    """Yield every entry in the order in which it came about; a block that is half lost comes as two."""
    spans = [[span] for span in _placed(recording)]
    for number, (span, *_) in enumerate(spans):
        if (origin := _origin(span.entry)) is not None:
            for earlier in spans[:number]:
                _lose(earlier, origin)
    for parts in spans:
        yield from (Walked(each.attempt, each.entry, each.lost) for each in parts)


@dataclass(slots=True)
class _Span:
    """An entry, and the place behind it."""

    attempt: int
    entry: Entry
    key: Key
    is_training: bool
    lost: bool = False


def _lose(parts: list[_Span], origin: Key) -> None:
    """Mark as lost what of an entry lies behind a place."""
    first = parts[0]  # those behind it are lost by now
    if first.lost or not first.is_training or first.key <= origin:
        return
    block = first.entry
    kept = origin[1] - block.first.batch if isinstance(block, Batches) and origin[0] == block.first.epoch else 0
    if isinstance(block, Batches) and kept > 0:
        rest = replace(first, entry=part(block, kept, len(block)), lost=True)
        first.entry = part(block, 0, kept)
        first.key = _key(first.entry.last)
        parts.insert(1, rest)
    else:
        first.lost = True


def part(block: Batches, begin: int, end: int) -> Batches:
    """Return some batches of a block; the clock behind them goes by the run's."""
    if (begin, end) == (0, len(block)):
        return block
    return Batches(
        block.after(begin - 1) if begin else block.first,
        block.clock - (block.centiseconds[-1] - block.centiseconds[end - 1]) / 100,
        block.steps[begin:end],
        block.skipped_steps[begin:end],
        block.skipped_batches[begin:end],
        block.samples[begin:end],
        block.window[begin:end],
        block.centiseconds[begin:end],
        None if block.losses is None else block.losses[begin:end],
    )


def _placed(recording: Recording) -> Iterator[_Span]:
    """Yield each entry with the place behind it; one without a place stands where the one before it does."""
    for index, attempt in enumerate(recording.attempts):
        key = (0, 0, 0, 0)
        for entry in attempt.entries:
            if isinstance(entry, EventEntry):
                key = _key(entry.counters)
            elif isinstance(entry, Batches):
                key = _key(entry.last)
            yield _Span(index, entry, key, attempt.phase == "train")


def _origin(entry: Entry) -> Key | None:
    """Return the place that a run went back to, or went on from."""
    if not isinstance(entry, EventEntry) or entry.event != "checkpoint_loaded":
        return None
    return _key(Counters(**entry.data["origin"]))


def _key(counters: Counters) -> Key:
    return counters.epoch, counters.batch, counters.steps, counters.validations
