"""Changes of a run in its recording: written, explained, drawn, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.tests.facts import assert_each
from heliograph_recorder import Recorder, replay
from heliograph_recorder.explain.attempt_summary import summarize_attempts
from heliograph_recorder.explain.requests import requests_of
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import EventEntry, Recording, RequestEntry
from heliograph_recorder.timeline.curves import Axis
from heliograph_recorder.timeline.page import marks, write_timeline


class Changes(h.Plugin):
    """Requests changes after some steps."""

    def __init__(self, rate: float = 0.05) -> None:
        self.rate = rate
        self.served: list[tuple[str, str]] = []

    @h.on(h.BatchEnd)
    def ask(self, run: h.Run, event: h.BatchEnd) -> None:
        control = run.control
        match run.progress.steps:
            case 3:
                control.set_learning_rate(self.rate, "it jumps")
                control.disable_plugin("first", "enough")
            case 5:
                control.enable_plugin("first", "again")
            case 6:
                control.enable_plugin("nobody", "a slip")

    @h.on(h.ChangeServed)
    def note(self, run: h.Run, event: h.ChangeServed) -> None:
        self.served.append((event.verb, event.refusal))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("run")
    schedules = [h.LogSchedule(h.Every(steps=4)).named("first"), h.LogSchedule(h.Every(steps=4))]
    fit([*schedules, h.ValidationSchedule(h.Every(steps=4)), Changes(), Recorder(folder)])
    return read(folder)


def entries(recording: Recording, kind: Any) -> list[Any]:
    return [each for each in recording.attempts[0].entries if isinstance(each, kind)]


def test_what_was_asked_for_and_what_became_of_it(recording: Recording) -> None:
    asked = {each.number: each.request for each in entries(recording, RequestEntry) if each.request.by == "changes"}
    assert [each.what for each in asked.values()] == [
        "set_learning_rate 0.05",
        "disable_plugin first",
        "enable_plugin first",
        "enable_plugin nobody",
    ]
    served = [each for each in entries(recording, EventEntry) if each.event == "change_served"]
    assert [(each.data["verb"], each.data["target"], each.data["value"]) for each in served] == [
        (each.verb, each.target, each.value) for each in asked.values()
    ]
    assert [each.data["asked"] for each in served] == [[number] for number in asked]
    assert [each.counters.steps for each in served] == [3, 3, 5, 6]
    assert [bool(each.data["refusal"]) for each in served] == [False, False, False, True]


def test_explain_says_who_changed_what_and_what_could_not_be_done(recording: Recording) -> None:
    text = " ".join(story(recording).split())
    assert "set_learning_rate 0.05 once changes," in text
    assert "learning rate, 1" in text
    assert "changes requested (a" in text
    assert "disabled by changes" in text
    assert "never served" not in text


def test_a_change_to_what_is_so_already_is_not_counted(tmp_path: Path) -> None:
    class Twice(h.Plugin):
        """Requests the same twice."""

        @h.on(h.BatchEnd)
        def ask(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps in (3, 5):
                run.control.set_learning_rate(0.05, "it jumps")
                run.control.disable_plugin("first", "enough")

    fit([h.LogSchedule(steps=4).named("first"), h.LogSchedule(steps=4), Twice(), Recorder(tmp_path)], validation=None)
    recorded = read(tmp_path)
    served = [each for each in entries(recorded, EventEntry) if each.event == "change_served"]
    assert [each.data["changed"] for each in served] == [True, True, False, False]
    text = " ".join(story(recorded).split())
    assert "learning rate and 1" in text


def test_the_timeline_marks_them(recording: Recording, tmp_path: Path) -> None:
    attempts = summarize_attempts(recording)
    requests = {each.number: requests_of(each) for each in attempts}
    found = [each for each in marks(attempts, requests, Axis(attempts)) if each.title.startswith("learning rate set")]
    assert_each(
        [(each.step, each.lines[:2]) for each in found],
        ("(3, ", "set_learning_rate 0.05", "changes during batch_end", "it jumps"),
    )
    write_timeline(recording, tmp_path / "page.html")
    assert "set_learning_rate 0.05" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_replay_shows_the_changes_that_a_plugin_requests(recording: Recording) -> None:
    assert [each.request.what for each in replay(recording.path, [Changes()]).asked] == [
        "set_learning_rate 0.05", "disable_plugin first", "enable_plugin first", "enable_plugin nobody",
    ]  # fmt: skip


def test_a_replayed_plugin_receives_the_changes_of_others(recording: Recording) -> None:
    class Watch(h.Plugin):
        def __init__(self) -> None:
            self.seen: list[tuple[Any, ...]] = []

        @h.on(h.ChangeServed)
        def look(self, run: h.Run, event: h.ChangeServed) -> None:
            self.seen.append((run.progress.steps, event.verb, event.by, run.control.history[-1].what))

    watch = Watch()
    replayed = replay(recording.path, [watch])
    assert replayed.failed == replayed.unheld == {}
    assert [each[:3] for each in watch.seen] == [
        (3, "set_learning_rate", "changes"),
        (3, "disable_plugin", "changes"),
        (5, "enable_plugin", "changes"),
        (6, "enable_plugin", "changes"),
    ]


def test_what_was_never_served_says_why(tmp_path: Path) -> None:
    class Late(h.Plugin):
        @h.on(h.RunClosed)
        def ask(self, run: h.Run, event: h.RunClosed) -> None:
            run.control.set_learning_rate(0.5, "too late")

    fit([h.ValidationSchedule(h.Every(steps=4)), Late(), Recorder(tmp_path)])
    text = " ".join(story(read(tmp_path)).split())
    assert "set_learning_rate 0.5" in text
