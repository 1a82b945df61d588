"""What is told of runs that really happened."""

from __future__ import annotations

from pathlib import Path

import heliograph as h
import torch
from heliograph.builtin_callbacks.recorder.explain.story import brief, story
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.plugin import Recorder
from heliograph.builtin_callbacks.recorder.timeline.page import facts
from heliograph.tests.recordings import data, fit


class Eventful(h.Plugin):
    """Asks for this and that, and puts a stop off."""

    asks = ("skip_batch",)

    @h.on(h.BatchStart)
    def leave_out(self, run: h.Run, event: h.BatchStart) -> None:
        if run.progress.batches == 3:
            run.control.skip_batch("the third is odd")

    @h.on(h.BatchEnd)
    def stop(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.batches == 11:
            run.control.stop("eleven are enough")

    @h.on(h.ShouldStop)
    def put_off(self, run: h.Run, event: h.ShouldStop) -> None:
        if run.control.should_stop and run.progress.batches < 13:
            run.control.veto_stop("not before thirteen")


class Clumsy(h.Plugin):
    """An observer that fails once."""

    policy = "observer"

    @h.on(h.Log)
    def fail(self, run: h.Run, event: h.Log) -> None:
        if run.progress.steps == 4:
            raise OSError("no space left")


def test_a_run_is_told_as_it_was(tmp_path: Path) -> None:
    plugins = [
        h.LogSchedule(h.Every(steps=2)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(steps=4)),
        h.Checkpoint(tmp_path / "checkpoints", keep_last=1),
        Eventful(),
        Clumsy(),
        Recorder(tmp_path, sample=1),
    ]
    result, _ = fit(plugins, epochs=5)
    assert result.recording is not None
    told = result.explain()
    assert told == story(read(tmp_path))
    assert told.startswith("run: stopped by eventful\n  eleven are enough\n")
    assert "asked for during batch_end, at epoch 1, batch 3, step 10" in told
    assert "  skip_batch  once     eventful, during batch_start, epoch 0, batch 3, step 3: the third is odd" in told
    assert "  veto_stop   twice    eventful, during should_stop, epoch 1, batch 3, step 10: not before thirteen" in told
    assert "the stop was put off by eventful, 2 boundaries in a row: not before thirteen" in " ".join(told.split())
    saves = [line.split() for line in told.splitlines() if "run_epoch" in line and line.strip().startswith("step")]
    assert [(line[1], line[-1]) for line in saves] == [("4", "8"), ("8", "12"), ("12", "run_epoch_1_iter_12.pth")]
    assert "pruned since keep_last=1" in told
    assert "clumsy failed on log, and the run went on: OSError: no space left" in told
    assert brief(read(tmp_path))[0] == "stopped by eventful at step 12: eleven are enough"
    shown = facts(read(tmp_path))
    (loss,) = [chart for chart in shown["charts"] if chart["name"] == "loss"]
    assert [curve["total"] for curve in loss["curves"]] == [6, 1]
    assert [piece["x"] for piece in loss["curves"][0]["pieces"]] == [[2, 4, 6, 8, 10, 12]]


def test_a_return_to_a_checkpoint_leaves_lost_work(tmp_path: Path) -> None:
    broken = [*data(8)]
    broken[5] = (broken[5][0] * float("nan"), broken[5][1])
    plugins = [
        h.LogSchedule(h.Every(steps=1)),
        h.SaveSchedule(h.Every(steps=2)),
        h.Checkpoint(tmp_path / "checkpoints"),
        h.RollBack(),
        Recorder(tmp_path),
    ]
    task = h.Supervised(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    trainer = h.Trainer(plugins, device="cpu")
    result = trainer.fit(task, broken, optimizer=torch.optim.SGD, epochs=1)
    told = " ".join(result.explain().split())
    assert "at epoch 0, batch 4, step 4; 1 step (2 batches, 6 samples," in told
    assert ") was lost" in told
    (chart,) = facts(read(tmp_path))["charts"]
    pieces = chart["curves"][0]["pieces"]
    assert [(piece["x"], piece["lost"]) for piece in pieces] == [([1, 2, 3, 4], False), ([5], True), ([5, 6, 7], False)]
