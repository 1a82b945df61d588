"""One Trainer object in several trainings: in a search, with other batch sizes; and an evaluation before the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from heliograph import EMA, EarlyStopping, Event, Plugin, Run, RunClosed, RunFailed, TrainStart, ValidationEnd, on
from heliograph.packages.bridges.tests.huggingface.trainers.trainings import Linear, Script, make
from heliograph.packages.tests.facts import assert_facts
from transformers import EarlyStoppingCallback

VALIDATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
NEW_MODEL: Any = Linear  # none of transformers' own


class Runs(Plugin):
    """Keeps how runs begin and end."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float, int | None]] = []
        self.ended: list[str] = []

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        assert run.progress.steps == 0
        self.begun.append((run.name, run.optimizer.param_groups[0]["lr"], run.data.batch_size))

    @on(RunFailed, RunClosed)
    def end(self, run: Run, event: Event) -> None:
        self.ended.append(str(event.error) if isinstance(event, RunFailed) else getattr(event, "status", ""))


class OutOfMemory(Script):
    """Has memory for two rows."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if len(inputs["x"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().compute_loss(model, inputs, *args, **options)


class OutOfMemoryInStep(Script):
    """Has memory for two rows, and notes it when the optimizer steps."""

    def create_optimizer(self, *args: Any) -> Any:
        if self.optimizer is None:
            super().create_optimizer(*args).register_step_pre_hook(self.check)
        return self.optimizer

    def check(self, *arguments: Any) -> None:
        if self._train_batch_size > 2:
            raise RuntimeError("CUDA out of memory.")


def test_each_trial_of_a_search_is_a_run_of_its_own(tmp_path: Path) -> None:
    """The third trial is pruned after its first step, where the Trainer calls `on_train_end`."""
    runs = Runs()
    losses = [1.0, 2.0, 1.0, 0.5, 9.0]
    trainer, callback = make(tmp_path / "search", runs, EMA(0.5), max_steps=2, losses=losses, **VALIDATES, **SAVES)
    trainer.model_init = NEW_MODEL
    rates = [0.01, 0.02, 0.03]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        n_trials=3,
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"learning_rate": rates}, seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
    )
    assert not isinstance(best, list)
    assert best.objective == 0.5
    assert [name for name, _, _ in runs.begun] == ["search-run-0", "search-run-1", "search-run-2"]
    assert sorted(rate for _, rate, _ in runs.begun) == rates
    assert runs.ended == ["completed", "completed", "stopped"]
    assert callback.result is not None
    assert_facts(callback.result.reason, "ended the training early")
    files = {str(path.relative_to(tmp_path / "search")) for path in tmp_path.rglob("heliograph.pt")}
    assert files == {f"run-{trial}/checkpoint-{step}/heliograph.pt" for trial in (0, 1) for step in (1, 2)}


def test_each_training_of_one_trainer_begins_anew(tmp_path: Path) -> None:
    runs = Runs()
    losses = [1.0, 2.0, 1.0, 2.0]
    trainer, callback = make(tmp_path, runs, EarlyStopping(patience=1), max_steps=9, losses=losses, **VALIDATES)
    trainer.model_init = NEW_MODEL
    for rate in (0.05, 0.01):
        trainer.args.learning_rate = rate
        trainer.train()
        assert callback.result is not None
        assert (callback.result.status, callback.result.progress.steps) == ("stopped", 2)
    assert [rate for _, rate, _ in runs.begun] == [0.05, 0.01]


@pytest.mark.parametrize("kind", [OutOfMemory, OutOfMemoryInStep])
def test_a_batch_size_that_is_found_is_trained_with_in_a_run_of_its_own(kind: type[Script], tmp_path: Path) -> None:
    runs = Runs()
    options: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 3, "max_steps": 3}
    trainer, callback = make(tmp_path, runs, EMA(0.5), kind=kind, **options, **SAVES)
    trainer.train()
    assert runs.ended == ["CUDA out of memory.", "failed", "completed"]
    assert [size for _, _, size in runs.begun] == [3, 2]
    assert callback.result is not None
    assert (callback.result.progress.steps, callback.result.progress.samples) == (3, 6)


def test_an_evaluation_before_the_first_step(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    class Look(Plugin):
        asks = ("stop", "save")

        @on(ValidationEnd)
        def look(self, run: Run, event: ValidationEnd) -> None:
            seen.append((run.progress.steps, event.metrics["validation/loss"]))
            if event.metrics["validation/loss"] < 2:
                run.control.request_save("good from the start")
                run.control.stop("good from the start")

    trainer, callback = make(tmp_path, Look(), max_steps=2, eval_on_start=True, losses=[3.0, 2.0, 2.0], **VALIDATES)
    trainer.train()
    assert seen == [(0, 3.0), (1, 2.0), (2, 2.0)]
    assert callback.result is not None
    assert (callback.result.status, callback.result.progress.validations) == ("completed", 3)
    stopped, other = make(tmp_path, Look(), max_steps=2, eval_on_start=True, losses=[1.0])
    stopped.train()
    assert other.result is not None
    assert (other.result.status, other.result.progress.steps) == ("stopped", 1)
    assert other.result.last_checkpoint == tmp_path / "checkpoint-1"


@pytest.mark.parametrize(("restores", "more"), [(False, 2), (True, 1)])
def test_their_own_early_stopping_trains_on_after_a_resume(restores: bool, more: int, tmp_path: Path) -> None:
    """What docs/packages/hosting.md says of a stopped run that is resumed holds without us, too."""
    options: dict[str, Any] = {"max_steps": 9, "metric_for_best_model": "loss", "greater_is_better": False}
    options |= {"restore_callback_states_from_checkpoint": restores, **VALIDATES, **SAVES}
    steps: list[int] = []
    for losses in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
        trainer, callback = make(tmp_path, callbacks=[EarlyStoppingCallback(2)], losses=losses, **options)
        trainer.remove_callback(callback)
        trainer.train(resume_from_checkpoint=bool(steps))
        steps.append(trainer.state.global_step)
    assert steps == [3, 3 + more]
