"""CheckpointLabel: names from a template, a function, the task or any plugin."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    Checkpoint,
    CheckpointLabel,
    CheckpointSaved,
    Every,
    LogSchedule,
    Plugin,
    Preemption,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    StrictError,
    Supervised,
    Trainer,
    ValidationSchedule,
    on,
)
from heliograph.tests import kit
from heliograph.tests.kit import checkpoint_names, class_batches
from heliograph.tests.messages import assert_each
from torch import nn

Make = Callable[..., Any]

SAVES, VALIDATIONS = SaveSchedule(Every(steps=1)), ValidationSchedule(Every(epochs=1))


def fit_twice(checkpoint: Checkpoint, *plugins: Any, strict: bool = False, **options: Any) -> RunResult:
    """Train two epochs of two steps with a validation after each, and a save at every step."""
    trainer = Trainer([SAVES, checkpoint, VALIDATIONS, *plugins], device="cpu", strict=strict)
    return kit.fit(trainer, **{"epochs": 2, "validation": class_batches(1), **options})


def test_what_is_not_measured_yet_is_left_out(tmp_path: Path) -> None:
    result = fit_twice(Checkpoint(tmp_path, keep_last=None), CheckpointLabel("loss_{validation/loss:.3f}"))

    names = checkpoint_names(tmp_path)
    assert names[:2] == ["run_epoch_0_iter_1.pth", "run_epoch_0_iter_2.pth"]
    ends = ["run_epoch_1_iter_3_loss", "run_epoch_2_iter_4_loss"]
    assert [name.rpartition("_")[0] for name in names[2:]] == ends
    assert result.warnings == ()


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("a_{validation/loss:.3f}_b", "_b"),
        ("{validation/loss}{train/loss:.1f}", "_0.5"),
        ("loss_{validation/loss:.3f}_train_{train/loss:.1f}", "_train_0.5"),
        ("train_{train/loss:.1f}_loss_{validation/loss:.3f}", "_train_0.5"),
        ("{validation/loss!r:>9}", ""),
        ("{train/loss!r:.3}", "_0.5"),
        ("{{{train/loss:.1f}}}", "_0.5"),
    ],
)
def test_only_the_part_of_a_missing_metric_is_left_out(template: str, end: str, tmp_path: Path) -> None:
    names: list[str] = []

    class Names(Plugin):
        @on(CheckpointSaved)
        def note(self, run: Run, event: CheckpointSaved) -> None:
            names.append(event.path.name)

    fit_twice(Checkpoint(tmp_path), CheckpointLabel(template), LogSchedule(Every(steps=1)), Names(), steps=2)
    assert names[0] == f"run_epoch_0_iter_1{end}.pth"


class Terminated(Plugin):
    """Receives a signal after the first step."""

    @on(StepEnd)
    def terminate(self, run: Run, event: StepEnd) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_preempted_run_is_saved_before_its_first_validation(tmp_path: Path) -> None:
    label = CheckpointLabel("{validation/loss:.3f}")
    trainer = Trainer([Checkpoint(tmp_path), label, VALIDATIONS, Terminated(), Preemption()], device="cpu")

    with pytest.raises(SystemExit) as caught:
        kit.fit(trainer, validation=class_batches(1))

    assert caught.value.code == 128 + signal.SIGTERM
    assert checkpoint_names(tmp_path) == ["run_epoch_0_iter_1.pth"]


@pytest.mark.parametrize("name", ["validation/los", "validation/accuracy"])
def test_a_metric_that_no_validation_measures_is_refused_by_the_first(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"checkpoint's name needs '{name}',"):
        fit_twice(Checkpoint(tmp_path), CheckpointLabel(f"{{{name}}}"))

    assert checkpoint_names(tmp_path) == ["run_epoch_0_iter_2.pth"]  # the one of before


@pytest.mark.parametrize("name", ["train/los", "train/accuracy"])
def test_a_metric_that_no_step_measures_is_refused_by_the_first_log(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"name needs '{name}', .*Known: train/loss[.]\n"):
        fit_twice(Checkpoint(tmp_path), CheckpointLabel(f"{{{name}}}"), LogSchedule(Every(steps=1)))


def test_a_metric_of_the_user_may_come_at_any_time(tmp_path: Path) -> None:
    class Late(Plugin):
        @on(StepEnd)
        def measure(self, run: Run, event: StepEnd) -> None:
            if run.progress.steps == 3:
                run.metrics["score"] = 0.25

    result = fit_twice(Checkpoint(tmp_path), CheckpointLabel("{score}"), Late())

    assert checkpoint_names(tmp_path) == ["run_epoch_2_iter_4_0.25.pth"]
    assert result.warnings == ()


def test_a_metric_that_never_comes_is_a_warning(tmp_path: Path) -> None:
    def train(**options: Any) -> RunResult:
        return fit_twice(Checkpoint(tmp_path), CheckpointLabel("a_{train/loss:.3f}"), **options)

    assert_each(
        train().warnings, ("'train/loss'", "never measured", "step 1", "'validation/loss'", "Known: validation/loss")
    )
    with pytest.raises(StrictError, match="needs 'train/loss',"):
        train(strict=True)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{validation/loss", "expected '}'"),
        ("a_{}", "a metric is missing"),
        ("{0}", "a metric is missing"),
        ("{validation/loss:q}", "Unknown format code 'q'"),
        ("{validation/loss:d}", "Unknown format code 'd'"),
        ("{validation/loss!x}", "Unknown conversion specifier x"),
        ("{validation/loss:{width}}", "Invalid format specifier"),
    ],
)
def test_a_malformed_template_is_refused_at_once(template: str, why: str) -> None:
    with pytest.raises(ValueError, match="is not a template") as caught:
        CheckpointLabel(template)

    assert repr(template) in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize("metadata", [5, b"loss", ["{train/loss}"]])
def test_what_is_neither_a_template_nor_a_function_is_refused_at_once(metadata: Any) -> None:
    with pytest.raises(TypeError, match="template of metric"):
        CheckpointLabel(metadata)


# Where a label comes from, and what becomes of it.


def test_metadata_by_template(fit: Make, scripted: Make, batches: Make, tmp_path: Path) -> None:
    label, options = CheckpointLabel("loss_{validation/loss:.4f}"), {"validation": batches(1), "epochs": 1}
    fit(Checkpoint(tmp_path), label, VALIDATIONS, task=scripted([0.123456]), **options)

    assert checkpoint_names(tmp_path) == ["run_epoch_1_iter_3_loss_0.1235.pth"]


def test_metadata_by_template_of_a_training_metric_that_is_logged(fit: Make, tmp_path: Path) -> None:
    result = fit(Checkpoint(tmp_path), CheckpointLabel("{train/loss:.3f}"), LogSchedule(Every(epochs=1)), epochs=1)

    assert checkpoint_names(tmp_path) == [f"run_epoch_1_iter_3_{result.metrics['train/loss']:.3f}.pth"]


def test_metadata_by_function(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), CheckpointLabel(lambda run: f"b{run.progress.batches}"), epochs=1)

    assert checkpoint_names(tmp_path) == ["run_epoch_1_iter_3_b3.pth"]


class NamingTask(Supervised):
    """Says what its checkpoints are called."""

    def checkpoint_metadata(self, run: Run) -> str:
        return f"by the task/{run.progress.epoch}"


def test_metadata_by_the_task_is_sanitised(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), task=NamingTask(nn.Linear(4, 2), nn.functional.mse_loss), epochs=1)

    assert checkpoint_names(tmp_path) == ["run_epoch_1_iter_3_by-the-task-1.pth"]


def test_an_own_metadata_goes_before_the_task_s(fit: Make, tmp_path: Path) -> None:
    mine = NamingTask(nn.Linear(4, 2), nn.functional.mse_loss)
    fit(Checkpoint(tmp_path), CheckpointLabel(lambda run: "mine"), task=mine, epochs=1)

    assert checkpoint_names(tmp_path) == ["run_epoch_1_iter_3_mine.pth"]


@pytest.mark.parametrize(
    ("metadata", "end"),
    [
        ("../../etc/passwd", "_etc-passwd"),
        ("a b\tc", "_a-b-c"),
        ("acc=0.5,x+y", "_acc=0.5-x+y"),
        ("", ""),
        ("  ", "_unnamed"),
        ("ünï", "_ünï"),
    ],
)
def test_metadata_is_sanitised(fit: Make, tmp_path: Path, metadata: str, end: str) -> None:
    fit(Checkpoint(tmp_path / "c"), CheckpointLabel(lambda run: metadata), epochs=1, name="my run")

    assert checkpoint_names(tmp_path / "c") == [f"my-run-d33e7609_epoch_1_iter_3{end}.pth"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("letter", ["x", "ü", "字"])
def test_long_metadata_keeps_place_and_suffix(fit: Make, tmp_path: Path, letter: str) -> None:
    fit(Checkpoint(tmp_path), CheckpointLabel(lambda run: letter * 500), epochs=1)
    (name,) = checkpoint_names(tmp_path)

    assert name.startswith(f"run_epoch_1_iter_3_{letter * 20}")
    assert name.endswith(".pth")
    assert len(os.fsencode(name)) <= 255


def test_a_template_of_a_missing_metric_lists_and_suggests(fit: Make, batches: Make, tmp_path: Path) -> None:
    label = CheckpointLabel("{validation/los}")
    with pytest.raises(ValueError, match="needs 'validation/los',") as info:
        fit(Checkpoint(tmp_path), label, VALIDATIONS, validation=batches(1), epochs=1)

    assert "Known: validation/loss" in str(info.value)
    assert checkpoint_names(tmp_path) == []


def test_a_function_that_returns_no_string(fit: Make, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="function returned 3"):
        fit(Checkpoint(tmp_path), CheckpointLabel(lambda run: 3))  # type: ignore[arg-type, return-value]


def test_any_plugin_can_name_checkpoints_while_it_is_on(fit: Make, tmp_path: Path) -> None:
    class Names(Plugin):
        @on(CheckpointSaved)
        def rest(self, run: Run, event: CheckpointSaved) -> None:
            run.plugins.disable(self)

        def checkpoint_metadata(self, run: Run) -> str:
            return "by_a_plugin"

    task = NamingTask(nn.Linear(4, 2), nn.functional.mse_loss)
    fit(Checkpoint(tmp_path, keep_last=None), Names(), task=task)

    names = ["run_epoch_1_iter_3_by_a_plugin.pth", "run_epoch_2_iter_6_by-the-task-2.pth"]
    assert checkpoint_names(tmp_path) == names


def test_two_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="names of checkpoints"):
        Trainer([CheckpointLabel("{train/loss}"), CheckpointLabel("b").named("b")])
