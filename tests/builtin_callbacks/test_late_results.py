"""Results of an evaluation in another process: they rank checkpoints, and stop a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from heliograph import Checkpoint, EarlyStopping, Every, LateResult, Plugin, Run, RunResult, SavePoint, on
from heliograph.core.metrics.monitor import Monitor
from heliograph.events import Lane
from heliograph.tests.kit import checkpoint_names, class_batches, fit
from heliograph.tests.messages import assert_facts

LATE: dict[str, Any] = {"monitor": "late/accuracy", "mode": "max"}


class Late(Plugin):
    """Emits a result for the checkpoint two steps ago before each save."""

    affects_training = False

    def __init__(self, folder: Path, accuracy: Mapping[int, float], name: str = "late/accuracy") -> None:
        self._folder, self._accuracy, self._name = folder, accuracy, name

    @on(SavePoint, lane=Lane.MEASURE, optional=True)
    def emit(self, run: Run, event: SavePoint) -> None:
        steps = run.progress.steps - 2
        if steps in self._accuracy:
            path = self._folder / f"run_epoch_0_iter_{steps}.pth"
            run.emit(LateResult(path, steps, {self._name: self._accuracy[steps]}))


def train(folder: Path, *plugins: Plugin, **options: Any) -> RunResult:
    checkpoint = Checkpoint(folder, every=Every(steps=1), **options)
    return fit(*plugins, checkpoint, train=class_batches(6), epochs=1)


@pytest.mark.parametrize("background", [False, True])
def test_a_late_result_ranks_its_own_checkpoint(background: bool, tmp_path: Path) -> None:
    late = Late(tmp_path, {1: 0.5, 2: 0.9, 3: 0.7})
    result = train(tmp_path, late, keep_last=3, keep_best=1, background=background, **LATE)
    assert result.best_checkpoint == tmp_path / "run_epoch_0_iter_2.pth"
    names = ["run_epoch_0_iter_2", "run_epoch_0_iter_4", "run_epoch_0_iter_5", "run_epoch_1_iter_6"]
    assert [name.removesuffix(".pth") for name in checkpoint_names(tmp_path)] == names


def test_a_result_of_a_removed_checkpoint_ranks_nothing(tmp_path: Path) -> None:
    result = train(tmp_path, Late(tmp_path, {1: 0.5, 2: 0.9}), keep_last=1, keep_best=1, **LATE)
    assert result.best_checkpoint is None
    assert_facts(result.warnings[0], "late/accuracy", "keep_last")


def test_late_results_stop_a_run(tmp_path: Path) -> None:
    result = train(tmp_path, Late(tmp_path, {1: 0.9, 2: 0.5, 3: 0.4}), EarlyStopping(patience=2, **LATE))
    assert (result.stopped_by, result.progress.steps) == ("early_stopping", 5)


def test_a_result_without_the_metric_is_no_error(tmp_path: Path) -> None:
    late = Late(tmp_path, {1: 0.9, 2: 0.5}, "late/acuracy")
    result = train(tmp_path, late, EarlyStopping(patience=1, **LATE))
    assert result.status == "completed"
    assert_facts(result.warnings[0], "EarlyStopping never acted", "late/accuracy", "none of 2 measurements")


def test_a_late_metric_is_for_plugins_that_read_late_results() -> None:
    assert Monitor("late/loss", None, late=True).split == "late"
    with pytest.raises(ValueError, match="late/loss"):
        Monitor("late/loss", None)
