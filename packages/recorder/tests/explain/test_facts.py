"""The facts of a recorded run as JSON, and its status."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import heliograph as h
import pytest
import torch
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.tests.facts import assert_facts
from heliograph.spi import as_json
from heliograph_recorder import Recorder
from heliograph_recorder.command import explain, status
from heliograph_recorder.explain.facts import SCHEMA, describe_status, facts_of
from torch import nn


def test_a_killed_and_resumed_run_has_its_roll_back() -> None:
    facts = json.loads(as_json(facts_of(killed_and_resumed(), is_running=False)))
    assert (facts["run"], facts["began"], facts["last_checkpoint"]) == (
        "digits",
        "2026-01-01T10:00:00Z",
        "ckpt/step_8.pth",
    )
    assert [(restore["step"], restore["is_roll_back"]) for restore in facts["attempts"][1]["restores"]] == [
        (4, False),
        (8, True),
    ]
    assert (
        facts["checkpoints"][0] | {"pruned": "keep_last=1", "requested_by": ["save_schedule"]}
        == (facts["checkpoints"][0])
    )
    assert facts["notes"][0] == "attempt 2: rolled back at step 10"


def test_requests_say_who_asked_and_whether_they_were_served() -> None:
    facts = facts_of(killed_and_resumed(), is_running=False)
    stop = next(request for request in facts["requests"] if request["verb"] == "stop")
    assert (stop["by"], stop["epoch"], stop["batch"], stop["step"]) == ("early_stopping", 1, 4, 12)
    unserved = [request for request in facts["requests"] if request["served"] is False]
    assert any((request["by"], request["verb"]) == ("someone", "save") for request in unserved)


def test_the_status_has_the_end_the_place_and_the_checkpoint() -> None:
    text = describe_status(facts_of(killed_and_resumed(), is_running=False))
    assert_facts(text, "digits: stopped", "since 2026-01-01T12:00:1", "has not improved (early_stopping)", "step 14")
    assert_facts(text, "train/loss 0.9", "last checkpoint: ckpt/step_8.pth")


def test_the_best_checkpoint_of_a_killed_run_may_be_chosen_after_its_save(tmp_path: Path) -> None:
    script, (first, second) = Script(), (str(tmp_path / f"run_epoch_{epoch}_iter_4.pth") for epoch in (1, 2))
    script.start()
    script.save(first)
    script.validation(validation__loss=1.0)
    script.save(second)
    facts = facts_of(recording(script), is_running=False)
    assert (facts["best_checkpoint"], facts["last_checkpoint"]) == (None, second)
    (tmp_path / "other.best").write_text("other_epoch_1_iter_4.pth\n")
    (tmp_path / "run.best").write_text(f"{Path(first).name}\n")
    facts = facts_of(recording(script), is_running=False)
    assert (facts["best_checkpoint"], facts["last_checkpoint"]) == (first, second)
    assert [save["is_best"] for save in facts["checkpoints"]] == [True, False]


def test_the_metrics_of_the_end_need_no_log() -> None:
    script = Script()
    script.start()
    script.close("completed", "4 epochs", metrics={"train/loss": 0.5}, best="a.pth")
    assert facts_of(recording(script))["metrics"] == {"train/loss": 0.5}


def test_json_has_no_bare_nan() -> None:
    assert json.loads(as_json({"a": nan, "b": [inf, {"c": -inf}], "d": 1.5})) == {
        "a": "nan",
        "b": ["inf", {"c": "-inf"}],
        "d": 1.5,
    }


class Fails(h.Plugin):
    @h.on(h.BatchEnd)
    def fail(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.batch == 2:
            raise OSError("the disk is gone")


class Adds(h.Plugin):
    @h.on(h.Log)
    def add(self, run: h.Run, event: h.Log) -> None:
        event.metrics["train/added"] = 7.0


def train(folder: Path, *plugins: h.Plugin) -> None:
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(4)]
    trainer = h.Trainer([Recorder(folder), *plugins], device="cpu")
    trainer.fit(h.Supervised(nn.Linear(2, 1), nn.functional.mse_loss), batches, optimizer=torch.optim.SGD, epochs=1)


def test_the_commands_print_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, h.LogSchedule(steps=2), Adds())
    for command in (status, explain):
        assert command([str(tmp_path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["schema"], facts["status"], facts["progress"]["step"]) == (SCHEMA, "completed", 4)
        assert facts["metrics"]["train/added"] == 7.0
    assert status([str(tmp_path)]) == 0
    assert_facts(capsys.readouterr().out, "run: completed", "step 4", "last checkpoint: none")


def test_a_failed_run_has_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        train(tmp_path, Fails())
    assert status([str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["status"] == "failed"
    assert_facts(facts["reason"], "OSError", "the disk is gone")


def test_a_missing_recording_has_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([str(tmp_path / "nowhere")]) == 2
    assert_facts(capsys.readouterr().err, "heliograph status", "nowhere")
