"""Iterate over the entries of a recording, and find those whose work was lost by a kill or a roll-back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    later = _origins(recording)  # those that follow the entry
    least = min((origin for _, _, origin in later), default=None)
    for index, attempt in enumerate(recording.attempts):
        key, is_training = (0, 0, 0, 0), attempt.phase == "train"  # an entry without counters has that of the former
        for place, entry in enumerate(attempt.entries):
            if least is None:
                yield WalkedEntry(index, entry, False)
                continue
            if later[0][:2] == (index, place):
                del later[0]
                least = min((origin for _, _, origin in later), default=None)
            if isinstance(entry, EventEntry):
                key = key_of(entry.counters)
            elif isinstance(entry, Batches):
                key = key_of(entry.last)
            if least is None or not is_training or key <= least:
                yield WalkedEntry(index, entry, False)
            else:
                parts = _parts(entry, key, [origin for _, _, origin in later])
                yield from (WalkedEntry(index, part, lost) for part, lost in parts)


def _origins(recording: Recording) -> list[tuple[int, int, Key]]:
    return [
        (index, place, origin)
        for index, attempt in enumerate(recording.attempts)
        for place, entry in enumerate(attempt.entries)
        if (origin := _origin(entry)) is not None
    ]


def _parts(entry: Entry, key: Key, origins: Sequence[Key]) -> list[tuple[Entry, bool]]:
    parts: list[tuple[Entry, bool]] = []
    for origin in origins:
        if key <= origin:
            continue
        is_within = isinstance(entry, Batches) and origin[0] == entry.first.epoch
        kept = origin[1] - entry.first.batch if isinstance(entry, Batches) and is_within else 0
        if not isinstance(entry, Batches) or kept <= 0:
            return [(entry, True), *parts]
        parts.insert(0, (slice_block(entry, kept, len(entry)), True))
        entry = slice_block(entry, 0, kept)
        key = key_of(entry.last)
    return [(entry, False), *parts]


def slice_block(block: Batches, begin: int, end: int) -> Batches:
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


def _origin(entry: Entry) -> Key | None:
    if not isinstance(entry, EventEntry) or entry.event != "checkpoint_loaded":
        return None
    return key_of(Counters(**entry.data["origin"]))


def key_of(counters: Counters) -> Key:
    return counters.epoch, counters.batch, counters.steps, counters.validations
