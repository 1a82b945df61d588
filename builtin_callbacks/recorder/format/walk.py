"""Iterate over the entries of a recording, and find those whose work was lost by a kill or a roll-back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .records import Batches, Counters, Entry, EventEntry, Recording

Key = tuple[int, int, int, int]


class WalkedEntry(NamedTuple):
    """An entry of a recording.

    Attributes:
        attempt_index: its attempt, from 0.
        entry: the entry.
        lost: whether the training later continued from before it.
    """

    attempt_index: int
    entry: Entry
    lost: bool


def walk(recording: Recording) -> Iterator[WalkedEntry]:
    """Yield every entry in order; a block of which a part is lost comes in two."""
    spans = [[span] for span in _spans(recording)]
    for number, (span, *_) in enumerate(spans):
        if (origin := _origin(span.entry)) is not None:
            for earlier in spans[:number]:
                _mark_lost(earlier, origin)
    for parts in spans:
        yield from (WalkedEntry(each.attempt, each.entry, each.lost) for each in parts)


@dataclass(slots=True)
class _Span:
    """An entry, and the position after it."""

    attempt: int
    entry: Entry
    key: Key
    is_training: bool
    lost: bool = False


def _mark_lost(parts: list[_Span], origin: Key) -> None:
    """Mark as lost what an entry holds after a position."""
    first = parts[0]  # the parts after it are lost already
    if first.lost or not first.is_training or first.key <= origin:
        return
    block = first.entry
    kept = origin[1] - block.first.batch if isinstance(block, Batches) and origin[0] == block.first.epoch else 0
    if isinstance(block, Batches) and kept > 0:
        rest = replace(first, entry=slice_block(block, kept, len(block)), lost=True)
        first.entry = slice_block(block, 0, kept)
        first.key = _key(first.entry.last)
        parts.insert(1, rest)
    else:
        first.lost = True


def slice_block(block: Batches, begin: int, end: int) -> Batches:
    """Return some batches of a block; its clock is derived from the run's."""
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
        None if block.tokens is None else block.tokens[begin:end],
    )


def _spans(recording: Recording) -> Iterator[_Span]:
    """Yield each entry with the position after it; one without counters has that of the entry before."""
    for index, attempt in enumerate(recording.attempts):
        key = (0, 0, 0, 0)
        for entry in attempt.entries:
            if isinstance(entry, EventEntry):
                key = _key(entry.counters)
            elif isinstance(entry, Batches):
                key = _key(entry.last)
            yield _Span(index, entry, key, attempt.phase == "train")


def _origin(entry: Entry) -> Key | None:
    """Return the position at which a run continues from a checkpoint, None for any other entry."""
    if not isinstance(entry, EventEntry) or entry.event != "checkpoint_loaded":
        return None
    return _key(Counters(**entry.data["origin"]))


def _key(counters: Counters) -> Key:
    return counters.epoch, counters.batch, counters.steps, counters.validations
