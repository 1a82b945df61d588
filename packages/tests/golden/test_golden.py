"""What earlier versions wrote can be read, resumed, explained and replayed; so can checkpoints of Helios."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import Checkpoint, EarlyStopping, Every, LogSchedule, RunResult, ValidationSchedule
from heliograph.__main__ import main
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.conversion import migrate
from heliograph.core.checkpoint.state.schema import SCHEMA
from heliograph.core.checkpoint.weights import load_weights
from heliograph.tests.kit import GOLDEN, load_golden
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import Recorder, replay
from heliograph_rules import RuleController

FORMER = GOLDEN / "schema_3"
STEPS = (4, 6)
METRICS = {  # of the whole run; floating point may differ by machine
    "train/loss": 0.055523077646891274,
    "train/learning_rate": 0.025,
    "validation/loss": 0.12448422610759735,
}
RANKS_METRICS = {
    "train/loss": 0.2722378472487132,
    "train/learning_rate": 0.025,
    "validation/loss": 0.06334178149700165,
}
STORY = """\
golden: stopped by rule_controller
  rule 'stop_when_it_gets_worse' on on_epoch_end: len(window.metrics.eval_loss) == 2 and
  window.metrics.eval_loss[0] < window.metrics.eval_loss[1]
  requested during validation_end, at epoch 3, batch 0, step 12
"""
make = load_golden("make")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the files."""
    return shutil.copytree(FORMER, tmp_path / "golden")


def recording_in(folder: Path) -> Path:
    (found,) = folder.glob("*.recording")
    return found


def resume(folder: Path, logs: Path, step: int, ranks: int = 1) -> RunResult:
    """Do the rest of the run that left these files."""
    checkpoint = Checkpoint(
        folder,
        keep_last=None,
        keep_best=1,
        monitor="validation/loss",
        resume=folder / f"golden_epoch_1_iter_{step}.pth",
    )
    rules = RuleController(FORMER / "rules.yaml")
    result: RunResult = make.fit(
        checkpoint, logs, rules, Recorder(folder, losses=True), epochs=make.EPOCHS, ranks=ranks
    )
    return result


@pytest.mark.parametrize("step", STEPS)
def test_they_are_of_the_first_schema_that_others_were_given(step: int) -> None:
    for place in (FORMER, FORMER / "ranks"):
        assert torch.load(place / f"golden_epoch_1_iter_{step}.pth", weights_only=True)["schema"] == 3
        assert storage.load(place / f"golden_epoch_1_iter_{step}.pth")["schema"] == SCHEMA


@pytest.mark.parametrize("step", STEPS)
def test_the_rest_of_the_run_equals_an_uninterrupted_one(step: int, folder: Path, tmp_path: Path) -> None:
    result = resume(folder, tmp_path / "logs", step)
    place = result.progress
    assert (place.epoch, place.batch, place.steps) == (3, 0, 12)
    assert (place.samples, place.validations) == (48, 3)
    assert result.metrics == pytest.approx(METRICS, rel=1e-4)
    assert f"resumed at epoch 1, batch {step - 4}, step {step}" in "\n".join(result.notes)
    assert result.resume is not None
    assert (result.resume.fresh_plugins, result.resume.unclaimed_states) == ((), ())
    assert result.stopped_by == "rule_controller"
    rules = RuleController(FORMER / "rules.yaml")
    whole = make.fit(Checkpoint(tmp_path / "whole"), tmp_path / "logs", rules, epochs=make.EPOCHS)
    assert whole.metrics == pytest.approx(METRICS, rel=1e-4)


@pytest.mark.parametrize("step", STEPS)
def test_it_is_exact_with_the_software_that_wrote_it(
    step: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = storage.read_manifest(folder / f"golden_epoch_1_iter_{step}.pth")
    monkeypatch.setattr("heliograph.core.snapshot.versions", lambda: dict(written.versions))
    result = resume(folder, tmp_path / "logs", step)
    assert result.resume is not None
    assert result.resume.guarantee == "exact"


def test_they_know_the_newest_and_the_best(folder: Path) -> None:
    entries, passed_over = storage.entries(folder, make.NAME)
    assert [each.progress["steps"] for each in entries] == [6, 4]
    assert passed_over == []
    assert [each.judged_by for each in entries] == [None, ("validation/loss", "min", 0.13581329584121704)]


def test_a_resumed_run_removes_what_it_may(folder: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder, keep_last=1, keep_best=1, monitor="validation/loss", resume="auto")
    result = make.fit(checkpoint, tmp_path / "logs", epochs=2)
    assert result.best_checkpoint == folder / "golden_epoch_2_iter_8.pth"
    former = {"golden_epoch_1_iter_4.pth", "golden_epoch_1_iter_6.pth"}  # no identity: they may be of two trainings
    assert {path.name for path in folder.glob("*.pth")} == former | {"golden_epoch_2_iter_8.pth"}

    make.fit(checkpoint, tmp_path / "logs", epochs=3)
    names = {path.name for path in folder.glob("*.pth")}
    assert names == former | {"golden_epoch_2_iter_8.pth", "golden_epoch_3_iter_12.pth"}


def test_the_weights_serve_without_a_run(folder: Path) -> None:
    task = make.make_task()
    metrics = load_weights(task, folder / "golden_epoch_1_iter_4.pth").metrics  # saved after its validation
    inputs, targets = make.make_data().tensors
    with torch.no_grad():
        loss = task.loss_fn(task.model.eval()(inputs), targets).item()
    assert loss == pytest.approx(metrics["validation/loss"], rel=1e-5)


def test_the_recording_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("golden: completed")
    assert "log         twice  log_schedule, step 3 to 6: every 3 steps" in " ".join(said.split("\n"))


def test_a_resumed_run_is_explained_with_what_came_before(folder: Path, tmp_path: Path) -> None:
    result = resume(folder, tmp_path / "logs", 4)
    assert result.recording == recording_in(folder)
    story = result.explain()
    assert story.startswith(STORY)
    assert "completed after 66.0 ms: epoch 1, batch 2, step 6, 24 samples" in story
    assert "stopped by rule_controller after" in story


def test_the_recording_is_replayed(folder: Path) -> None:
    rules = RuleController(folder / "rules.yaml")
    schedules = [LogSchedule(Every(steps=3)), ValidationSchedule(Every(epochs=1), at_end=False)]
    replayed = replay(recording_in(folder), [*schedules, EarlyStopping(patience=50), rules])
    asked = [(each.request.by, each.request.verb, each.request.step) for each in replayed.asked]
    assert asked == [
        ("log_schedule", "log", 3),
        ("validation_schedule", "validation", 4),
        ("log_schedule", "log", 6),
    ]


def test_the_rules_file_is_tried_on_the_recording(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "dry-run", str(folder / "rules.yaml"), str(folder)]) == 0
    said = capsys.readouterr().out
    assert "log_at_a_low_loss: would have acted once\n  attempt 1, epoch 1 batch 2 step 6, on_log" in said
    assert "stop_when_it_gets_worse: would never have acted" in said


# Two ranks.


def resume_on_ranks(folder: Path, step: int) -> tuple[Any, ...]:
    result = resume(folder, folder / "logs", step, ranks=2)
    assert result.resume is not None
    place, report = result.progress, result.resume
    return (place.epoch, place.steps, place.samples), report.fresh_plugins, report.unclaimed_states, result.metrics


@pytest.mark.parametrize("step", STEPS)
def test_two_ranks_resume_what_two_ranks_wrote(step: int, ranks: Pool, folder: Path) -> None:
    for place, fresh, unclaimed, metrics in ranks(2).run(resume_on_ranks, folder / "ranks", step):
        assert place == (3, 12, 48)
        assert (fresh, unclaimed) == ((), ())
        assert metrics == pytest.approx(RANKS_METRICS, rel=1e-4)


def test_the_recording_of_two_ranks_is_replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder / "ranks")]) == 0
    assert capsys.readouterr().out.startswith("golden: completed")
    replayed = replay(recording_in(folder / "ranks"), [LogSchedule(Every(steps=2))])
    assert [(request.verb, request.step) for request in replayed.requests("log_schedule")] == [
        ("log", 2),
        ("log", 4),
        ("log", 6),
    ]


# Before the present schema, and from elsewhere.


@pytest.mark.parametrize("how", ["auto", "path"])
def test_an_older_schema_is_resumed_as_it_is(old: Path, how: str, tmp_path: Path) -> None:
    """As if it had been migrated before; the files stay."""
    folder, migrated = tmp_path / "older", tmp_path / "migrated"
    for each in (folder, migrated):
        shutil.copytree(old, each, ignore=shutil.ignore_patterns("older", "migrated", "*.recording"))
    said = [line.strip() for line in migrate(migrated) if line.startswith("    ")]
    before = {path: path.read_bytes() for path in folder.iterdir() if path.suffix in (".pth", ".json")}

    def resumed(folder: Path) -> RunResult:
        newest = folder / "golden_epoch_1_iter_6.pth"
        checkpoint = Checkpoint(folder, keep_last=None, resume="auto" if how == "auto" else newest)
        result: RunResult = make.fit(checkpoint, tmp_path / "logs", epochs=2)
        return result

    result, other = resumed(folder), resumed(migrated)
    assert {path: path.read_bytes() for path in before} == before
    assert "resumed at epoch 1, batch 2, step 6" in "\n".join(result.notes)
    changes = [note for note in result.notes if note.startswith("the checkpoint was migrated in memory, ")]
    assert changes
    assert {note.removeprefix("the checkpoint was migrated in memory, ") for note in changes} == set(said)
    assert result.resume is not None
    assert other.resume is not None
    assert (result.resume.guarantee, result.resume.reasons) == (other.resume.guarantee, other.resume.reasons)
    assert result.metrics == other.metrics
    assert not any(note.startswith("skipped: ") for note in result.notes)


def test_a_run_continues_from_a_checkpoint_of_helios(tmp_path: Path) -> None:
    task = make.make_task()
    with torch.no_grad():
        task.model[0].weight.fill_(0.125)
    optimizer = make.make_optimizer(list(task.model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    parts = {"model": task.model, "optimizer": optimizer, "scheduler": scheduler}
    saved = {
        "version": "1.0.0",
        "training_state": {
            "current_iteration": 4,
            "global_iteration": 4,
            "global_epoch": 1,
            "validation_cycles": 1,
            "dataset_iter": 0,
        },
        "model": {name: part.state_dict() for name, part in parts.items()},
        "rng": {
            "torch": torch.get_rng_state(),
            "rand": random.getstate(),
            "numpy": np.random.default_rng(1).bit_generator.state,
        },
    }
    torch.save(saved, tmp_path / "golden_epoch_1_iter_4.pth")
    migrate(tmp_path)
    weights = storage.load(tmp_path / "golden_epoch_1_iter_4.pth")["modules"]["model"]["0.weight"]
    result = make.fit(Checkpoint(tmp_path, resume="auto"), tmp_path / "logs", epochs=make.EPOCHS)
    assert torch.equal(weights, torch.full((3, 2), 0.125))
    place = result.progress
    assert (place.epoch, place.steps, place.samples) == (make.EPOCHS, make.EPOCHS * make.BATCHES, 32)
    assert result.resume is not None
    assert result.resume.guarantee == "not exact"
    assert "early_stopping" in result.resume.fresh_plugins
    assert "rng_capture" not in result.resume.fresh_plugins
