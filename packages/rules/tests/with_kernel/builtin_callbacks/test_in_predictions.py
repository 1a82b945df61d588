"""What the built-in plugins do in a prediction."""

from __future__ import annotations

from pathlib import Path

import heliograph as h
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.builtin_callbacks.test_in_predictions import inputs, tracking
from heliograph_recorder import Recorder, replay
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import EventEntry
from heliograph_recorder.timeline.page import page
from heliograph_rules import RuleController, RuleFired


def test_a_recording_has_it_and_explains_and_replays_it(tmp_path: Path) -> None:
    class Counting(h.Plugin):
        def __init__(self) -> None:
            self.seen: list[str] = []

        @h.on(h.PredictBatchEnd, h.PredictEnd)
        def count(self, run: h.Run, event: h.PredictBatchEnd | h.PredictEnd) -> None:
            self.seen.append(f"{run.phase} {event.name} {run.progress.evaluated}")

        @h.on(h.ValidationCut)
        def cut(self, run: h.Run, event: h.ValidationCut) -> None:
            self.seen.append(event.reason)

    live, again = Counting(), Counting()
    trainer = h.Trainer([Recorder(tmp_path), live], device="cpu")
    result = trainer.predict(tracking(), {"a": inputs(2), "b": inputs(1)})
    for _ in trainer.predict_batches(tracking(), inputs()):
        break
    assert result.recording is not None
    recording = read(result.recording)
    assert [each.phase for each in recording.attempts] == ["predict", "predict"]
    entries = [entry for entry in recording.attempts[0].entries if isinstance(entry, EventEntry)]
    assert [entry.event for entry in entries] == ["predict_start", "predict_end", "run_closed"]
    assert entries[1].data == {"metrics": {"predict/a/seen": 2.0, "predict/b/seen": 2.0}, "batches": {"a": 2, "b": 1}}
    assert "prediction, started" in str(story(recording))
    assert '"kind":"prediction"' in page(recording).replace('": "', '":"')
    replay(result.recording, [again])
    assert again.seen == live.seen
    first, last = live.seen[-2:]
    assert first == "predict predict_batch_end 1"
    assert_facts(last, "predict_batches", "left")


def test_a_replay_cannot_write_predictions(tmp_path: Path) -> None:
    trainer = h.Trainer([Recorder(tmp_path / "r"), h.PredictionWriter(tmp_path / "out")], device="cpu")
    result = trainer.predict(tracking(), inputs())
    replayed = replay(result.recording or "", [h.PredictionWriter(tmp_path / "out", overwrite=True)])
    assert_facts(str(replayed), "not hold the outputs")
    assert len(h.read_predictions(tmp_path / "out")) == 9


def test_a_rule_on_predict_is_asked() -> None:
    fired: list[h.Event] = []
    rules = {
        "controller_metrics": [{"name": "e", "class": "EvalMetrics", "arguments": {"source_event": "predict_end"}}],
        "controllers": [
            {
                "name": "c",
                "triggers": ["on_predict"],
                "rule": "e['predict/seen'] == 2",
                "operations": ["hfcontrols.should_log"],
            }
        ],
    }
    trainer = h.Trainer([RuleController(rules), h.LogSchedule(h.Every(epochs=1))], device="cpu")
    trainer.bus.on(RuleFired, lambda run, event: fired.append(event))
    trainer.predict(tracking(), inputs())
    assert len(fired) == 1
