"""Work from before which a later attempt continued is lost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from heliograph.events import Request
from heliograph.packages.recorder.tests.recordings import attempt
from heliograph_recorder.format.records import Batches, Counters, EventEntry, Recording, RequestEntry, walk


def at(batch: int, epoch: int = 0) -> Counters:
    return Counters(epoch, batch, steps=batch, samples=batch, seconds=batch / 100)


def block(begin: int, end: int) -> Batches:
    steps, zeros = tuple(range(begin + 1, end + 1)), (0,) * (end - begin)
    return Batches(at(begin), end / 100, steps, steps, zeros, zeros, steps, zeros, zeros)


def event(name: str, batch: int) -> EventEntry:
    return EventEntry(name, batch / 100, at(batch))


def back_to(batch: int) -> EventEntry:
    return EventEntry("checkpoint_loaded", 0.0, at(batch), {"path": None, "origin": asdict(at(batch))})


def walked(*attempts: tuple[object, ...], **about: object) -> list[tuple[int, str, bool]]:
    recording = Recording(Path(), tuple(attempt(*each, **about) for each in attempts))  # type: ignore[arg-type]
    names = []
    for index, entry, lost in walk(recording):
        span = f"{entry.first.batch}-{entry.first.batch + len(entry)}" if isinstance(entry, Batches) else ""
        names.append((index, span or getattr(entry, "event", "asked"), lost))
    return names


START = event("train_start", 0)


def test_work_after_the_position_of_the_resume_is_lost() -> None:
    first = (START, block(0, 4), event("save_point", 4), event("checkpoint_saved", 4), block(4, 6))
    second = (START, back_to(4), block(4, 8))
    assert walked(first, second) == [
        (0, "train_start", False),
        (0, "0-4", False),
        (0, "save_point", False),
        (0, "checkpoint_saved", False),
        (0, "4-6", True),
        (1, "train_start", False),
        (1, "checkpoint_loaded", False),
        (1, "4-8", False),
    ]


def test_a_block_may_be_lost_in_several_parts() -> None:
    assert walked((block(0, 8),), (back_to(6), block(6, 9)), (back_to(3), block(3, 10))) == [
        (0, "0-3", False),
        (0, "3-6", True),
        (0, "6-8", True),
        (1, "checkpoint_loaded", True),
        (1, "6-9", True),
        (2, "checkpoint_loaded", False),
        (2, "3-10", False),
    ]


def test_a_part_of_a_block_keeps_its_numbers() -> None:
    recording = Recording(Path(), (attempt(block(2, 8)), attempt(back_to(5))))
    whole = list(block(2, 8))
    parts = [list(each.entry) for each in walk(recording) if isinstance(each.entry, Batches)]
    assert parts == [whole[:3], whole[3:]]


def test_a_roll_back_loses_what_came_after() -> None:
    asked = RequestEntry(0, Request("roll_back", "me", "bad", 0, 6, 6))
    assert walked((block(0, 6), asked, back_to(2), block(2, 3))) == [
        (0, "0-2", False),
        (0, "2-6", True),
        (0, "asked", True),
        (0, "checkpoint_loaded", False),
        (0, "2-3", False),
    ]


def test_a_test_between_two_attempts_is_not_lost() -> None:
    attempts = (attempt(block(0, 6)), attempt(event("test_end", 3), phase="test"), attempt(back_to(0)))
    assert [each.lost for each in walk(Recording(Path(), attempts))] == [True, False, False]
