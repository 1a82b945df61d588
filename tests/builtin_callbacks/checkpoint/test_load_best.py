"""LoadBest: the best checkpoint comes back at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointSaved,
    Every,
    LastBoundary,
    LoadBest,
    Plugin,
    Run,
    RunClosed,
    RunResult,
    SaveSchedule,
    TrainEnd,
    Trainer,
    ValidationSchedule,
    WeightsCheckpoint,
    on,
)
from heliograph.core.checkpoint.storage import reader
from heliograph.events import Event
from heliograph.tests.kit import adam, checkpoint_names
from heliograph.tests.messages import assert_each, has_facts
from torch import Tensor

Make = Callable[..., Any]
MONITOR: dict[str, Any] = {"keep_best": 1, "monitor": "validation/loss"}


@pytest.fixture
def fit(scripted: Make, batches: Make) -> Callable[..., RunResult]:
    """Return a function that trains an epoch of one batch per scripted loss, validating and saving after each."""

    def run(checkpoint: Checkpoint, values: list[float], *plugins: Any, **options: Any) -> RunResult:
        schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
        trainer = Trainer([*schedules, *plugins, checkpoint], device="cpu")
        options = {"epochs": len(values), "optimizer": adam(0.1), "task": scripted(values), **options}
        return trainer.fit(options.pop("task"), batches(1), validation=batches(1), **options)

    return run


class Watch(Plugin):
    """Remembers the state at each save, and at the end of the training."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}
        self.trained = self.at_train_end = torch.empty(0)

    @on(CheckpointSaved)
    def remember(self, run: Run, event: CheckpointSaved) -> None:
        self.weights[event.path.name] = run.task.model.weight.detach().clone()
        self.moments[event.path.name] = moment(run.optimizer)

    @on(LastBoundary)
    def finish(self, run: Run, event: LastBoundary) -> None:
        self.trained = run.task.model.weight.detach().clone()

    @on(TrainEnd)
    def look(self, run: Run, event: TrainEnd) -> None:
        self.at_train_end = run.task.model.weight.detach().clone()


def moment(optimizer: torch.optim.Optimizer) -> Tensor:
    state: Tensor = next(iter(optimizer.state.values()))["exp_avg"]
    return state.detach().clone()


BEST, LAST = "run_epoch_2_iter_2.pth", "run_epoch_4_iter_4.pth"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("extent", ["weights", "everything"])
def test_the_best_is_loaded_back_after_the_last_save(
    fit: Make, scripted: Make, tmp_path: Path, extent: Any, background: bool
) -> None:
    values, kept, watch = [3.0, 1.0, 2.0, 4.0], list[torch.optim.Optimizer](), Watch()
    task = scripted(values)

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        kept.append(adam(0.1)(parameters))
        return kept[0]

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    class Halve(Plugin):
        asks = ("scheduler",)

        @on(BatchEnd)
        def halve(self, run: Run, event: BatchEnd) -> None:
            run.scheduler.step()

    plugins = [LoadBest(extent), watch, Halve()]
    checkpoint = Checkpoint(tmp_path, background=background, **MONITOR)
    result = fit(checkpoint, values, *plugins, task=task, optimizer=optimizer, scheduler=scheduler)
    saved = reader.load(tmp_path / LAST)

    assert torch.equal(task.model.weight, reader.load(tmp_path / BEST)["modules"]["model"]["weight"])
    assert torch.equal(saved["modules"]["model"]["weight"], watch.trained)  # the last save holds the last weights
    assert not torch.equal(task.model.weight, watch.trained)
    assert torch.equal(task.model.weight, watch.at_train_end)  # who exports it there has the best
    everything = extent == "everything"
    assert torch.equal(
        moment(kept[0]),
        reader.load(tmp_path / (BEST if everything else LAST))["optimizers"]["optimizer"]["state"][0]["exp_avg"],
    )
    assert kept[0].param_groups[0]["lr"] == 0.1 * 0.5 ** (2 if everything else 4)
    facts = ("loaded back", extent, "best checkpoint", tmp_path / BEST, "validation/loss 1")
    # On a slow machine there is a note that saves waited, too.
    assert any(has_facts(note, *facts) for note in result.notes)
    assert (result.best_checkpoint, result.last_checkpoint) == (tmp_path / BEST, tmp_path / LAST)


class Late(Plugin):
    """Asks for a save at the end."""

    asks = ("save",)

    def __init__(self, event: type[Event]) -> None:
        self.event = event

    @on(LastBoundary, TrainEnd)
    def ask(self, run: Run, event: LastBoundary | TrainEnd) -> None:
        if isinstance(event, self.event):
            run.control.request_save("at the end")


@pytest.mark.parametrize("event", [LastBoundary, TrainEnd])
def test_a_save_that_is_asked_for_at_the_end_holds_the_last_weights(
    fit: Make, scripted: Make, tmp_path: Path, event: type[Event]
) -> None:
    """One at `TrainEnd` comes when the best was loaded back, and is not written: the last weights are in a file."""
    task, watch = scripted([1.0, 2.0]), Watch()
    result = fit(Checkpoint(tmp_path, **MONITOR), [1.0, 2.0], LoadBest(), watch, Late(event), task=task)

    assert torch.equal(reader.load(tmp_path / "run_epoch_2_iter_2.pth")["modules"]["model"]["weight"], watch.trained)
    assert not torch.equal(task.model.weight, watch.trained)
    assert result.warnings == ()


def test_a_save_that_comes_when_the_best_is_loaded_back_is_not_written_and_that_is_said(
    scripted: Make, batches: Make, tmp_path: Path
) -> None:
    schedules = [ValidationSchedule(Every(steps=1)), SaveSchedule(Every(steps=2), at_end=False)]
    trainer = Trainer([*schedules, LoadBest(), Checkpoint(tmp_path, **MONITOR), Late(TrainEnd)], device="cpu")
    values = [1.0, 1.0, 2.0]
    result = trainer.fit(scripted(values), batches(3), validation=batches(1), optimizer=adam(0.1), epochs=1)

    assert checkpoint_names(tmp_path) == ["run_epoch_0_iter_2.pth"]
    assert result.warnings == (
        f"The newest checkpoint in {tmp_path} is of step 2, and the run ended at step 3: 1 step is not in it. "
        f"To save the end, use Checkpoint(..., every=...), or a SaveSchedule without at_end=False.",
    )


def test_nan_is_no_best_to_load_back(fit: Make, scripted: Make, tmp_path: Path) -> None:
    task, watch = scripted([float("nan"), float("nan")]), Watch()
    result = fit(Checkpoint(tmp_path, **MONITOR), [0.0, 0.0], LoadBest(), watch, task=task)

    assert torch.equal(task.model.weight, watch.trained)
    assert_each(
        result.warnings,
        ("validation/loss is nan", "NaNGuard('raise')"),
        ("LoadBest", "nothing", "no checkpoint"),
        ("No checkpoint", "'validation/loss'", "NaN"),
    )


def test_without_a_best_it_says_so(scripted: Make, batches: Make, tmp_path: Path) -> None:
    schedules = [ValidationSchedule(Every(steps=2), at_end=False), SaveSchedule(Every(steps=3), at_end=False)]
    trainer = Trainer([*schedules, Checkpoint(tmp_path, **MONITOR), LoadBest()], device="cpu")
    result = trainer.fit(scripted([1.0]), batches(3), validation=batches(1), optimizer=adam(0.1), epochs=1)

    assert checkpoint_names(tmp_path) == ["run_epoch_0_iter_3.pth"]
    assert result.warnings == (
        "LoadBest loaded nothing: no checkpoint is the best.",
        "No checkpoint is the best by 'validation/loss', because none was saved at the step of a measurement: it was "
        "measured last at step 2. Measure and save at common steps, for example with Every(steps=200) for both.",
    )


def test_a_best_that_was_damaged_is_not_loaded(fit: Make, scripted: Make, tmp_path: Path) -> None:
    task = scripted([1.0, 2.0])

    class Damage(Plugin):
        @on(LastBoundary)
        def damage(self, run: Run, event: LastBoundary) -> None:
            data = (tmp_path / "run_epoch_1_iter_1.pth").read_bytes()
            (tmp_path / "run_epoch_1_iter_1.pth").write_bytes(data[:-1] + b"x")

    with pytest.raises(ValueError, match=r"run_epoch_1_iter_1\.pth is damaged"):
        fit(Checkpoint(tmp_path, **MONITOR), [1.0, 2.0], LoadBest(), Damage(), task=task)
    assert torch.equal(
        task.model.weight, reader.load(tmp_path / "run_epoch_2_iter_2.pth")["modules"]["model"]["weight"]
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_fails_keeps_its_weights(
    fit: Make, scripted: Make, tmp_path: Path, error: type[BaseException]
) -> None:
    task, before = scripted([1.0, 2.0, 3.0]), list[Tensor]()

    class Fail(Plugin):
        @on(BatchEnd, when=Every(batches=3))
        def fail(self, run: Run, event: BatchEnd) -> None:
            before.append(task.model.weight.detach().clone())
            raise error

    with pytest.raises(error):
        fit(Checkpoint(tmp_path, **MONITOR), [1.0, 2.0, 3.0], LoadBest("everything"), Fail(), task=task)
    assert torch.equal(task.model.weight, before[0])


def test_the_best_of_an_earlier_process_comes_back(fit: Make, scripted: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, **MONITOR), [0.5, 0.9])
    task = scripted([0.7])
    fit(Checkpoint(tmp_path, resume="auto", **MONITOR), [0.7], LoadBest(), task=task, epochs=3)

    assert torch.equal(
        task.model.weight, reader.load(tmp_path / "run_epoch_1_iter_1.pth")["modules"]["model"]["weight"]
    )


def test_a_test_on_the_same_trainer_loads_nothing(scripted: Make, task: Make, batches: Make, tmp_path: Path) -> None:
    plugins = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    trainer = Trainer([*plugins, Checkpoint(tmp_path, **MONITOR), LoadBest()], device="cpu")
    trainer.fit(scripted([1.0]), batches(1), validation=batches(1), optimizer=adam(0.1), epochs=1)

    assert trainer.test(task(), batches(1)).notes == ()


def test_what_it_loads_is_checked() -> None:
    with pytest.raises(ValueError, match="'weights' or 'everything', got"):
        LoadBest("all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ([], "0 plugins rank checkpoints"),
        ([(Checkpoint, {})], "0 plugins rank checkpoints"),
        ([(WeightsCheckpoint, MONITOR)], "0 plugins rank checkpoints"),
        ([(Checkpoint, MONITOR), (WeightsCheckpoint, {})], ""),
        ([(WeightsCheckpoint, MONITOR), (Checkpoint, MONITOR)], ""),
    ],
)
def test_one_plugin_must_rank_full_checkpoints(
    fit: Make, tmp_path: Path, kinds: list[tuple[Any, dict[str, Any]]], found: str
) -> None:
    plugins = [kind(tmp_path / str(number), **options) for number, (kind, options) in enumerate(kinds)]
    if found:
        with pytest.raises(ValueError, match=rf"^LoadBest\('everything'\) .*{found}"):
            fit(SaveSchedule(epochs=2).named("other"), [1.0], LoadBest("everything"), *plugins)
    else:
        result = fit(SaveSchedule(epochs=2).named("other"), [1.0], LoadBest("everything"), *plugins)
        assert any(has_facts(note, "loaded back", "everything") for note in result.notes)


def test_several_that_rank_are_refused(fit: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^LoadBest.* 2 plugins rank"):
        fit(Checkpoint(tmp_path, **MONITOR), [1.0], LoadBest(), WeightsCheckpoint(tmp_path / "w", **MONITOR))


def test_without_validation_data_it_is_refused(scripted: Make, batches: Make, tmp_path: Path) -> None:
    trainer = Trainer([Checkpoint(tmp_path, every=Every(epochs=1), **MONITOR), LoadBest()], device="cpu")
    with pytest.raises(ValueError, match="LoadBest needs 'validation/loss',"):
        trainer.fit(scripted([1.0]), batches(1), optimizer=adam(0.1), epochs=1)


def test_others_receive_the_closing_after_the_best_has_come_back(fit: Make, scripted: Make, tmp_path: Path) -> None:
    task, seen = scripted([1.0, 2.0]), list[Tensor]()

    class Closing(Plugin):
        @on(RunClosed)
        def look(self, run: Run, event: RunClosed) -> None:
            seen.append(task.model.weight.detach().clone())

    fit(Checkpoint(tmp_path, **MONITOR), [1.0, 2.0], LoadBest(), Closing(), task=task)
    assert torch.equal(seen[0], reader.load(tmp_path / "run_epoch_1_iter_1.pth")["modules"]["model"]["weight"])
