from __future__ import annotations

from dataclasses import fields

import pytest
from heliograph.events import Progress
from heliograph.events import progress as module
from heliograph.tests.kit import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

COUNTERS = [
    "epoch",
    "batch",
    "earlier_batches",
    "steps",
    "skipped_steps",
    "skipped_batches",
    "samples",
    "tokens",
    "validations",
    "evaluated",
]
counts = st.integers(min_value=0, max_value=2**62)
states = st.fixed_dictionaries(
    dict.fromkeys(COUNTERS, counts) | {"earlier_seconds": st.floats(min_value=0, max_value=1e9)}
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def started(clock: Clock) -> Progress:
    """Return a progress whose clock began now: the default of the field was bound before the clock was replaced."""
    progress = Progress()
    progress.load_state_dict(dict.fromkeys(COUNTERS, 0) | {"earlier_seconds": 0.0})
    return progress


def test_a_fresh_progress_is_at_zero() -> None:
    progress = Progress()
    assert [getattr(progress, name) for name in COUNTERS] == [0] * len(COUNTERS)
    assert progress.batches == 0
    assert progress.seconds >= 0


def test_batches_are_those_of_all_epochs() -> None:
    assert Progress(earlier_batches=20, batch=3).batches == 23


@settings(deadline=None)
@given(states)
def test_a_state_round_trip_restores_every_counter(state: dict[str, int | float]) -> None:
    progress = Progress()
    progress.load_state_dict(state)
    saved = progress.state_dict()
    assert {name: saved[name] for name in COUNTERS} == {name: state[name] for name in COUNTERS}
    assert saved["earlier_seconds"] >= state["earlier_seconds"]
    assert saved.keys() == state.keys()
    again = Progress()
    again.load_state_dict(saved)
    assert [getattr(again, name) for name in COUNTERS] == [getattr(progress, name) for name in COUNTERS]


def test_the_state_has_every_public_field() -> None:
    names = {each.name for each in fields(Progress) if not each.name.startswith("_")}
    assert set(Progress().state_dict()) == names - {"streams"}
    assert set(Progress(streams={"a": 1}).state_dict()) == names


def test_the_counts_of_streams_are_copied_and_restored() -> None:
    progress = Progress(streams={"digit": 3, "parity": 2})
    copied, saved = progress.copy(), progress.state_dict()
    progress.streams["digit"] += 1
    assert copied.streams == saved["streams"] == {"digit": 3, "parity": 2}
    progress.load_state_dict(saved)
    assert progress.streams == {"digit": 3, "parity": 2}
    progress.load_state_dict(Progress().state_dict())
    assert progress.streams == {}
    with pytest.raises(ValueError, match="Progress needs counters"):
        progress.load_state_dict({**saved, "streams": {"digit": -1}})


@pytest.mark.parametrize(
    "change",
    [{"steps": -1}, {"earlier_seconds": -0.5}, {"speed": 3}, {"steps": None}],
    ids=["negative", "negative seconds", "unknown", "missing"],
)
def test_a_bad_state_is_refused_and_changes_nothing(change: dict[str, int | float | None]) -> None:
    progress = Progress(epoch=2, steps=7)
    state = Progress(epoch=5, steps=9).state_dict() | change
    bad = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=r"0 for \['batch', .*'validations'\],"):
        progress.load_state_dict(bad)
    assert (progress.epoch, progress.steps) == (2, 7)


def test_an_empty_state_is_refused() -> None:
    with pytest.raises(ValueError, match="Progress needs counters"):
        Progress().load_state_dict({})


def test_seconds_continue_from_the_saved_ones(clock: Clock) -> None:
    progress = started(clock)
    clock.now += 5
    assert progress.seconds == 5
    saved = progress.state_dict()
    assert saved["earlier_seconds"] == 5
    clock.now += 100  # between the two runs nothing is counted
    resumed = Progress()
    resumed.load_state_dict(saved)
    assert resumed.seconds == 5
    clock.now += 2
    assert resumed.seconds == 7


def test_a_copy_is_a_snapshot_of_the_counters_whose_clock_continues(clock: Clock) -> None:
    progress = started(clock)
    progress.steps = 3
    snapshot = progress.copy()
    progress.steps = 4
    clock.now += 6
    assert snapshot.steps == 3
    assert snapshot.seconds == progress.seconds == 6
    assert snapshot == Progress(steps=3)  # where the clock began is not a part of the value
    assert "since" not in repr(snapshot)
