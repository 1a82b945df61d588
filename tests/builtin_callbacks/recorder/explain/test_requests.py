"""Requests, grouped, and what became of them."""

from __future__ import annotations

import pytest
from heliograph.builtin_callbacks.recorder.explain.attempt_summary import legs
from heliograph.builtin_callbacks.recorder.explain.requests import asks_of, groups
from heliograph.builtin_callbacks.recorder.explain.story import story
from heliograph.tests.builtin_callbacks.recorder.explain.factory import Script, recording


def grouped(script: Script) -> list[tuple[str, str, int, str]]:
    (leg,) = legs(recording(script))
    return [(each.first.verb, each.who, each.times, each.reason) for each in groups(asks_of(leg))]


def test_the_same_request_of_the_same_plugin_is_one_group() -> None:
    script = Script()
    for step in range(3):
        script.ask("log", "log_schedule", "every step")
        script.ask("log", "first_log", "at step 1")
        script.ask("hold_step", "gradient_accumulation", "windows of 4", times=3 + step)
        script.ask("log", "log_schedule", "every step", rank=1)
    assert grouped(script) == [
        ("log", "log_schedule", 3, "every step"),
        ("log", "first_log", 3, "at step 1"),
        ("hold_step", "gradient_accumulation", 12, "windows of 4"),
        ("log", "log_schedule on rank 1", 3, "every step"),
    ]


def test_a_plugin_whose_reasons_never_repeat_is_one_group() -> None:
    script = Script()
    script.ask("save", "save_schedule", "every step")
    for loss in range(500):
        script.ask("log", "watcher", f"the loss is {loss}")
    assert grouped(script) == [
        ("save", "save_schedule", 1, "every step"),
        ("log", "watcher", 500, "the loss is 0 ... the loss is 499 (500 different reasons)"),
    ]
    assert len(story(recording(script)).splitlines()) < 15


def test_a_few_reasons_are_told_one_by_one() -> None:
    script = Script()
    for reason in ("it is late", "it is early"):
        script.ask("end_epoch", "someone", reason)
    assert [reason for *_, reason in grouped(script)] == ["it is late", "it is early"]


@pytest.mark.parametrize(
    ("status", "closed", "why"),
    [
        ("completed", True, "the run ended before"),
        ("failed", True, "the run failed"),
        ("interrupted", True, "the run was interrupted"),
        ("", False, "the run was killed"),
    ],
)
def test_what_was_never_served_is_told_with_why(status: str, closed: bool, why: str) -> None:
    script, later = Script(), Script()
    script.start()
    script.batches(1)
    for _ in range(2):
        script.ask("validation", "someone", "to know")
    place = script.counters
    if closed:
        script.close(status, "because")
    later.load("a.pth", place)
    told = " ".join(story(recording(script, later)).split())
    assert f"the validation that someone asked for twice (to know) was never served: {why}" in told


def test_what_a_roll_back_dropped_is_told() -> None:
    script = Script()
    script.start()
    script.batches(1)
    script.ask("save", "someone", "to be safe", "gradients_ready")
    script.load("a.pth", script.counters)
    script.close("completed", "done")
    told = " ".join(story(recording(script)).split())
    assert "the save that someone asked for (to be safe) was never served: the run went back before" in told
