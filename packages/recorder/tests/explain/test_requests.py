"""Requests in groups, and what became of them."""

from __future__ import annotations

import pytest
from heliograph.packages.recorder.tests.explain.factory import Script, recording
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.explain.attempt_summary import summarize_attempts
from heliograph_recorder.explain.requests import group_requests, requests_of
from heliograph_recorder.explain.story import story


def grouped(script: Script) -> list[tuple[str, str, int, str]]:
    (attempt,) = summarize_attempts(recording(script))
    return [(each.first.verb, each.requester, each.times, each.reason) for each in group_requests(requests_of(attempt))]


def test_the_same_request_of_the_same_plugin_is_one_group() -> None:
    script = Script()
    for step in range(3):
        script.request("log", "log_schedule", "every step")
        script.request("log", "first_log", "at step 1")
        script.request("hold_step", "gradient_accumulation", "windows of 4", times=3 + step)
        script.request("log", "log_schedule", "every step", rank=1)
    assert grouped(script) == [
        ("log", "log_schedule", 3, "every step"),
        ("log", "first_log", 3, "at step 1"),
        ("hold_step", "gradient_accumulation", 12, "windows of 4"),
        ("log", "log_schedule on rank 1", 3, "every step"),
    ]


def test_a_plugin_whose_reasons_never_repeat_is_one_group() -> None:
    script = Script()
    script.request("save", "save_schedule", "every step")
    for loss in range(500):
        script.request("log", "watcher", f"the loss is {loss}")
    saved, logged = grouped(script)
    assert saved == ("save", "save_schedule", 1, "every step")
    assert logged[:3] == ("log", "watcher", 500)
    assert_facts(logged[3], "the loss is 0", "the loss is 499", "500")
    assert len(story(recording(script)).splitlines()) < 15


def test_a_few_reasons_are_listed_one_by_one() -> None:
    script = Script()
    for reason in ("it is late", "it is early"):
        script.request("end_epoch", "someone", reason)
    assert [reason for *_, reason in grouped(script)] == ["it is late", "it is early"]


@pytest.mark.parametrize(
    ("status", "closed", "why"),
    [
        ("completed", True, "the run ended first"),
        ("failed", True, "the run failed"),
        ("interrupted", True, "the run was interrupted"),
        ("", False, "the run was killed"),
    ],
)
def test_why_a_request_was_never_served(status: str, closed: bool, why: str) -> None:
    script, later = Script(), Script()
    script.start()
    script.batches(1)
    for _ in range(2):
        script.request("validation", "someone", "to know")
    counters = script.counters
    if closed:
        script.close(status, "because")
    later.load("a.pth", counters)
    text = " ".join(story(recording(script, later)).split())
    assert f"never served: {why}" in text


def test_a_request_that_a_roll_back_dropped() -> None:
    script = Script()
    script.start()
    script.batches(1)
    script.request("save", "someone", "to be safe", "gradients_ready")
    script.load("a.pth", script.counters)
    script.close("completed", "done")
    text = " ".join(story(recording(script)).split())
    assert "someone requested (to" in text


def test_what_was_served_after_the_last_save_is_lost_in_the_kill() -> None:
    first, second = Script(), Script(began="2026-01-01T12:00:10+00:00", name="a2")
    first.start()
    first.batches(2)
    first.save("c/step_2.pth")
    saved = first.counters
    first.request("skip_step", "ann@home", "too large", "gradients_ready")
    first.batches(2)
    asked = first.request("set_learning_rate", "ann@home", "too slow", value=0.02)
    change = {"verb": "set_learning_rate", "target": "", "value": 0.02, "by": "ann@home", "reason": "too slow"}
    first.emit("change_served", **change, refusal="", changed=True, asked=[asked])
    first.request("log", "ann@home", "now")
    second.emit("train_start")
    second.load("c/step_2.pth", saved)
    second.epoch(resumed=True)
    second.batches(4)
    second.save("c/step_6.pth")
    both = recording(first, second)
    text = " ".join(story(both).split())
    assert "set_learning_rate 0.02 once ann@home," in text
    assert "granted: 2 saves" in text
    assert "(now) was never served:" in text
