"""The stories of real runs."""

from __future__ import annotations

from pathlib import Path

import heliograph as h
import torch
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests import kit
from heliograph.tests.kit import class_batches
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.reader import read
from heliograph_recorder.plugin import Recorder
from heliograph_recorder.timeline.page import facts


class Eventful(h.Plugin):
    """Makes several requests, and vetoes a stop."""

    asks = ("skip_batch",)

    @h.on(h.BatchStart)
    def skip(self, run: h.Run, event: h.BatchStart) -> None:
        if run.progress.batches == 3:
            run.control.skip_batch("the third is odd")

    @h.on(h.BatchEnd)
    def stop(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.batches == 11:
            run.control.stop("eleven are enough")

    @h.on(h.ShouldStop)
    def veto(self, run: h.Run, event: h.ShouldStop) -> None:
        if run.control.should_stop and run.progress.batches < 13:
            run.control.veto_stop("not before thirteen")


class Clumsy(h.Plugin):
    """An observer that fails once."""

    policy = "observer"

    @h.on(h.Log)
    def fail(self, run: h.Run, event: h.Log) -> None:
        if run.progress.steps == 4:
            raise OSError("no space left")


def test_the_story_of_a_run(tmp_path: Path) -> None:
    plugins = [
        h.LogSchedule(h.Every(steps=2)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(steps=4), at_end=False),
        h.Checkpoint(tmp_path / "checkpoints", keep_last=1),
        Eventful(),
        Clumsy(),
        Recorder(tmp_path, sample=1),
    ]
    result, _ = fit(plugins, epochs=5)
    assert result.recording is not None
    text = result.explain()
    assert text == story(read(tmp_path))
    assert_facts(text, "run: stopped", "eventful\n", "eleven are enough\n")
    assert "batch_end, at epoch 1," in text
    assert_facts(
        text, "skip_batch", "once", "eventful, during batch_start", "epoch 0, batch 3", "step 3", "the third is odd"
    )
    assert_facts(
        text, "veto_stop", "twice", "eventful, during should_stop", "epoch 1, batch 3", "step 10", "not before thirteen"
    )
    assert "eventful at 2 boundaries" in " ".join(text.split())
    saves = [line.split() for line in text.splitlines() if "run_epoch" in line and line.strip().startswith("step")]
    assert [(line[1], "(keep_last=1)" in line) for line in saves] == [("4", True), ("8", True), ("12", False)]
    assert "run continued: OSError:" in text
    shown = facts(read(tmp_path))
    (loss,) = [chart for chart in shown["charts"] if chart["name"] == "loss"]
    assert [curve["total"] for curve in loss["curves"]] == [6, 2]
    assert [piece["x"] for piece in loss["curves"][0]["pieces"]] == [[2, 4, 6, 8, 10, 12]]


def test_a_roll_back_loses_work(tmp_path: Path) -> None:
    broken = [*class_batches(8)]
    broken[5] = (broken[5][0] * float("nan"), broken[5][1])
    plugins = [
        h.LogSchedule(h.Every(steps=1)),
        h.SaveSchedule(h.Every(steps=2), at_end=False),
        h.Checkpoint(tmp_path / "checkpoints"),
        h.RollBack(),
        Recorder(tmp_path),
    ]
    task = h.Supervised(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    trainer = h.Trainer(plugins, device="cpu")
    result = trainer.fit(task, broken, optimizer=torch.optim.SGD, epochs=1)
    text = " ".join(result.explain().split())
    assert "4, step 4; 1" in text
    assert ") was lost" in text
    (chart,) = facts(read(tmp_path))["charts"]
    pieces = chart["curves"][0]["pieces"]
    assert [(piece["x"], piece["lost"]) for piece in pieces] == [([1, 2, 3, 4], False), ([5], True), ([5, 6, 7], False)]


def test_a_checkpoint_that_a_later_validation_made_the_best_is_marked(tmp_path: Path) -> None:
    checkpoint = h.Checkpoint(tmp_path, every=h.Every(steps=2), keep_best=1, keep_last=1, monitor="validation/loss")
    validate, data = h.ValidationSchedule(steps=2), class_batches(5)  # and at the end, after the last save
    result = kit.fit(checkpoint, validate, Recorder(tmp_path), train=data, validation=data, epochs=1)
    assert result.best_checkpoint == result.last_checkpoint
    assert result.best_checkpoint is not None
    row, *_ = [line for line in result.explain().splitlines() if result.best_checkpoint.name in line and "step" in line]
    assert "best so far" in row
