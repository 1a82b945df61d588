"""Checkpoint at the end of a run: what is saved, judged and loaded back there, what is missing, and how to resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    Checkpoint,
    CheckpointLabel,
    EarlyStopping,
    EpochEnd,
    Every,
    Lane,
    LastBoundary,
    LearningRate,
    LoadBest,
    LogSchedule,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    ShouldStop,
    StrictError,
    Supervised,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    load_weights,
    on,
)
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import reader
from heliograph.tests import kit
from heliograph.tests.kit import adam, checkpoint_names, class_batches, linear_classifier
from heliograph.tests.messages import assert_each, assert_facts, pattern
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SET = TensorDataset(torch.linspace(-1, 1, 36).reshape(12, 3), torch.linspace(0, 1, 12).reshape(12, 1))
BEST: dict[str, Any] = {"keep_best": 1, "monitor": "validation/loss"}


class Stop(Plugin):
    """Asks for a stop after some batches."""

    asks = ("stop",)

    def __init__(self, batches: int) -> None:
        self.batches = batches

    @on(BatchEnd)
    def stop(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == self.batches:
            run.control.stop("enough")


class Veto(Plugin):
    """Vetoes a stop until some steps are done."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @on(ShouldStop)
    def veto(self, run: Run, event: ShouldStop) -> None:
        if run.control.should_stop and run.progress.steps < self.steps:
            run.control.veto_stop("too early")


class Fail(Plugin):
    """Raises after some batches."""

    def __init__(self, error: BaseException, batches: int = 8) -> None:
        self.error, self.batches = error, batches

    @on(BatchEnd)
    def fail(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == self.batches:
            raise self.error


class Trace(Plugin):
    """Notes where validations and saves are."""

    affects_training = False

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    @on(SavePoint, ValidationEnd)
    def note(self, run: Run, event: SavePoint | ValidationEnd) -> None:
        self.seen.append((event.name, run.progress.batches))


# The end of a run that ends within an epoch.


@pytest.mark.parametrize("plugins", [(), (Stop(5),)], ids=["by steps", "by a stop"])
def test_schedules_by_epochs_act_at_an_end_within_an_epoch(plugins: tuple[Plugin, ...], tmp_path: Path) -> None:
    trace, checkpoint = Trace(), Checkpoint(tmp_path, **BEST)
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    result = kit.fit(
        *schedules, trace, checkpoint, *plugins, train=class_batches(6), validation=class_batches(2), steps=5
    )

    assert trace.seen == [("validation_end", 5), ("save_point", 5)]
    assert result.last_checkpoint == result.best_checkpoint == tmp_path / "run_epoch_0_iter_5.pth"
    judged_by = storage.read_manifest(tmp_path / "run_epoch_0_iter_5.pth").judged_by
    assert judged_by == ("validation/loss", "min", result.metrics["validation/loss"])
    assert result.warnings == ()


ENDS: dict[str, tuple[dict[str, Any], Any, tuple[Plugin, ...]]] = {
    "within an epoch": ({"steps": 3}, Every(epochs=1), ()),
    "at an epoch's end": ({"steps": 4}, Every(epochs=1), ()),
    "later within an epoch": ({"steps": 7}, Every(epochs=1), ()),
    "a fraction of an epoch": ({"epochs": 1.5}, Every(epochs=1), ()),
    "a stop": ({"epochs": 9}, Every(epochs=1), (Stop(6),)),
    "saves by steps": ({"steps": 3}, Every(steps=1), ()),
    "saves by steps to an epoch's end": ({"steps": 8}, Every(steps=2), ()),
    "a stop after a save": ({"epochs": 9}, Every(steps=1), (Stop(6),)),
    "a stop after a veto": ({"epochs": 9}, Every(steps=1), (Stop(5), Veto(7))),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("asks", [False, True])
def test_the_last_checkpoint_has_the_metrics_of_its_weights_and_a_step_has_one_file(
    end: str, background: bool, asks: bool, tmp_path: Path
) -> None:
    length, every, plugins = ENDS[end]
    options: dict[str, Any] = {"background": background, "keep_last": None, **BEST}
    savers = [Checkpoint(tmp_path, every=every if asks else None, **options), CheckpointLabel("{validation/loss:.6f}")]
    schedules = [ValidationSchedule(Every(epochs=1)), *([] if asks else [SaveSchedule(every)])]
    result = kit.fit(*schedules, *savers, *plugins, train=class_batches(4), validation=class_batches(2), **length)

    value, path = result.metrics["validation/loss"], result.last_checkpoint
    assert path is not None
    assert path.name.endswith(f"_iter_{result.progress.steps}_{value:.6f}.pth")
    entry = storage.read_manifest(path)
    assert (entry.metrics["validation/loss"], entry.judged_by) == (value, ("validation/loss", "min", value))
    assert reader.load(path)["metrics"]["validation/loss"] == value
    steps = [int(name.split("_iter_")[1].split("_")[0].removesuffix(".pth")) for name in checkpoint_names(tmp_path)]
    assert sorted(set(steps)) == sorted(steps)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.exists()


def test_what_a_stop_of_a_vetoed_run_has_ended_continues_in_the_next(tmp_path: Path) -> None:
    def train(*plugins: Plugin) -> RunResult:
        saves = Checkpoint(tmp_path, every=Every(steps=1), resume="auto")
        return kit.fit(saves, *plugins, train=class_batches(4), epochs=3)

    assert train(Stop(5), Veto(7)).progress.steps == 7
    assert (train(Veto(7)).status, checkpoint_names(tmp_path)) == ("completed", ["run_epoch_3_iter_12.pth"])


def test_a_pinned_checkpoint_of_a_step_stays_beside_a_newer_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, every=Every(steps=2), keep_last=None)

    class Pin(Plugin):
        @on(EpochEnd)
        def pin(self, run: Run, event: EpochEnd) -> None:
            checkpoint.pin()

    kit.fit(checkpoint, Pin(), train=class_batches(2))
    assert checkpoint_names(tmp_path) == ["run_epoch_0_iter_2.pth", "run_epoch_1_iter_2.pth"]


def test_the_steps_after_the_last_save_are_saved(tmp_path: Path) -> None:
    result = kit.fit(SaveSchedule(Every(steps=5)), Checkpoint(tmp_path), train=class_batches(10), steps=8)
    assert (result.last_checkpoint, result.warnings) == (tmp_path / "run_epoch_0_iter_8.pth", ())


def train(folder: Path, steps: int, resume: str | None = None) -> tuple[RunResult, dict[str, Any], Trace]:
    """Train with all that an additional validation would disturb; return what the run left."""
    torch.manual_seed(0)
    task = Supervised(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)), nn.functional.mse_loss)
    trace, stopper = Trace(), EarlyStopping("validation/loss", patience=50)
    plugins = [
        RNGCapture(3),
        LearningRate("plateau", monitor="validation/loss"),
        stopper,
        EMA(0.9),
        LogSchedule(Every(steps=2), at_end=True),
        ValidationSchedule(Every(steps=3)),
        SaveSchedule(Every(epochs=1)),
        trace,
        Checkpoint(folder, resume=resume, keep_last=None, **BEST),
    ]
    result = Trainer(plugins, device="cpu").fit(
        task,
        DataLoader(SET, 2, shuffle=True),
        validation=DataLoader(SET, 4),
        optimizer=adam(0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        steps=steps,
    )
    assert result.last_checkpoint is not None
    state = reader.load(result.last_checkpoint)
    parts = ("modules", "optimizers", "schedulers", "metrics", "means", "data")
    plugin_states = {name: state["plugins"][name] for name in ("early_stopping", "ema", "rng_capture")}
    progress = {name: value for name, value in state["progress"].items() if "seconds" not in name}
    return result, {"progress": progress, **plugin_states, **{part: state[part] for part in parts}}, trace


@pytest.mark.sample(3)
@pytest.mark.parametrize("steps", [2, 4, 5, 7, 8, 11, 13])
def test_a_run_that_ended_and_is_made_longer_equals_one_of_that_length(steps: int, tmp_path: Path) -> None:
    """The checkpoint has the metrics of the end's validation, but who counts validations has not counted it there."""
    whole, at_end, trace = train(tmp_path / "whole", 14)
    first, _, _ = train(tmp_path / "parts", steps)
    second, again, rest = train(tmp_path / "parts", 14, resume="auto")

    assert (first.progress.steps, second.resume and second.resume.step) == (steps, steps)
    assert second.resume is not None
    assert second.resume.reasons == (), second.resume.reasons
    assert kit.counters(second) == kit.counters(whole)
    assert second.metrics == whole.metrics
    assert again.keys() == at_end.keys()
    for part, value in at_end.items():
        assert equal(value, again[part]), part
    assert rest.seen == [each for each in trace.seen if each[1] > steps]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_a_run_with_nothing_left_to_do_validates_its_end_again_and_saves_nothing(tmp_path: Path) -> None:
    """What a kill between the save and the validation of the end had cut off is made up for."""
    first, _, _ = train(tmp_path, 5)
    second, _, trace = train(tmp_path, 5, resume="auto")

    assert trace.seen == [("validation_end", 5)]
    assert (second.metrics, second.best_checkpoint) == (first.metrics, first.best_checkpoint)
    assert checkpoint_names(tmp_path) == ["run_epoch_0_iter_5.pth"]


# Which checkpoint is the best.


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_judged_by_a_measurement_of_its_weights_that_comes_later(
    background: bool, tmp_path: Path
) -> None:
    """Steps 4, 8 and 12 are saved, epochs of 6 batches validated: at step 12 before the epoch's end, and after it."""
    checkpoint = Checkpoint(tmp_path, keep_last=None, background=background, **BEST)
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(steps=4), at_end=False)]
    result = kit.fit(*schedules, checkpoint, train=class_batches(6), validation=class_batches(2), epochs=2)

    judged = {name: storage.read_manifest(tmp_path / name).judged_by for name in checkpoint_names(tmp_path)}
    value = result.metrics["validation/loss"]
    assert judged == {
        "run_epoch_0_iter_4.pth": None,
        "run_epoch_1_iter_12.pth": ("validation/loss", "min", value),
        "run_epoch_1_iter_8.pth": None,
    }
    assert result.best_checkpoint == tmp_path / "run_epoch_1_iter_12.pth"
    assert (tmp_path / "run.best").read_text() == "run_epoch_1_iter_12.pth\n"
    assert result.warnings == ()
    reader.verify(result.best_checkpoint)


def test_what_is_judged_later_is_kept_and_what_it_beats_goes(tmp_path: Path) -> None:
    values = iter([3.0, 1.0, 2.0])

    class Script(Plugin):
        @on(ValidationEnd, lane=Lane.MEASURE)
        def replace(self, run: Run, event: ValidationEnd) -> None:
            event.metrics["validation/loss"] = next(values)

    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(steps=2), at_end=False)]
    result = kit.fit(
        *schedules,
        Script(),
        Checkpoint(tmp_path, **BEST),
        train=class_batches(2),
        validation=class_batches(1),
        epochs=3,
    )
    assert checkpoint_names(tmp_path) == ["run_epoch_1_iter_4.pth", "run_epoch_2_iter_6.pth"]
    assert result.best_checkpoint == tmp_path / "run_epoch_1_iter_4.pth"


def test_a_resumed_run_judges_the_checkpoint_that_it_resumes(tmp_path: Path) -> None:
    """The run was killed between the save at an epoch's last batch and the validation at its end."""
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(steps=2), at_end=False)]
    data: dict[str, Any] = {"train": class_batches(2), "validation": class_batches(1)}
    with pytest.raises(ArithmeticError):
        kit.fit(*schedules, Checkpoint(tmp_path, **BEST), FailAtSave(), **data)
    result = kit.fit(*schedules, Checkpoint(tmp_path, resume="auto", **BEST), **data)

    path = tmp_path / "run_epoch_0_iter_2.pth"
    assert result.best_checkpoint == path
    assert storage.read_manifest(path).judged_by == ("validation/loss", "min", result.metrics["validation/loss"])


class FailAtSave(Plugin):
    """Raises when something was saved."""

    @on(SavePoint, lane=Lane.REPORT)
    def fail(self, run: Run, event: SavePoint) -> None:
        raise ArithmeticError("killed")


# What is missing is said.


def warnings_of(*plugins: Any, **options: Any) -> tuple[str, ...]:
    return kit.fit(*plugins, **{"train": class_batches(6), **options}).warnings


def test_a_checkpoint_that_writes_none_is_missed(tmp_path: Path) -> None:
    class Asks(Plugin):
        asks = ("save",)

        @on(LastBoundary)
        def never(self, run: Run, event: LastBoundary) -> None: ...

    assert warnings_of(Asks(), Checkpoint(tmp_path)) == (
        f"No checkpoint was written to {tmp_path}: no save was requested in 6 steps; set every=Every(epochs=1), which "
        f"also saves the end.",
    )


def test_steps_that_are_in_no_checkpoint_are_missed(tmp_path: Path) -> None:
    schedule, facts = SaveSchedule(Every(steps=4), at_end=False), ("step 4", "step 6", "2 steps")
    (warning,) = warnings_of(schedule, Checkpoint(tmp_path))
    assert_facts(warning, *facts)
    with pytest.raises(StrictError, match=pattern(*facts)):
        trainer = Trainer([schedule, Checkpoint(tmp_path)], device="cpu", strict=True)
        trainer.fit(linear_classifier(), class_batches(6), optimizer=adam(), epochs=1)


def test_a_best_that_nothing_was_measured_for_is_missed(tmp_path: Path) -> None:
    schedules = [ValidationSchedule(Every(steps=4), at_end=False), SaveSchedule(Every(steps=3), at_end=False)]
    (warning,) = warnings_of(*schedules, Checkpoint(tmp_path, **BEST), validation=class_batches(1))
    assert "last at step 4." in warning


def test_a_schedule_whose_saves_nobody_writes_says_so_at_the_start() -> None:
    assert_each(warnings_of(SaveSchedule(Every(epochs=1))), ("Saves", "no plugin", "Checkpoint('runs/x')"))
    trainer = Trainer([SaveSchedule(Every(epochs=1))], device="cpu", strict=True)
    with pytest.raises(StrictError, match="no plugin writes them") as info:
        trainer.fit(linear_classifier(), class_batches(6), optimizer=adam(), epochs=1)
    assert info.value.result is None


def test_any_handler_of_a_save_may_be_who_writes() -> None:
    class Writer(Plugin):
        @on(SavePoint)
        def write(self, run: Run, event: SavePoint) -> None: ...

    assert warnings_of(SaveSchedule(Every(epochs=1)), Writer()) == ()
    trainer = Trainer([SaveSchedule(Every(epochs=1)), Writer()], device="cpu")
    with trainer.plugins.disabled("writer"):
        assert_each(kit.fit(trainer).warnings, ("Saves", "'writer'", "disabled"))
    trainer.bus.on(SavePoint, lambda run, event: None)
    with trainer.plugins.disabled("writer"):
        assert kit.fit(trainer).warnings == ()


class Disable(Plugin):
    """Disables a plugin after some batches."""

    def __init__(self, name: str, batches: int) -> None:
        self.plugin, self.batches = name, batches

    @on(BatchEnd)
    def disable(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == self.batches:
            run.plugins.disable(self.plugin)


def test_a_checkpoint_that_is_disabled_in_mid_run_says_what_it_did_not_save(tmp_path: Path) -> None:
    plugins = [SaveSchedule(Every(steps=2)), Checkpoint(tmp_path), Disable("checkpoint", 3)]
    trainer = Trainer(plugins, device="cpu")
    path = tmp_path / "run_epoch_0_iter_2.pth"
    assert_each(
        kit.fit(trainer, train=class_batches(6)).warnings,
        ("'checkpoint'", "disabled", "step 3", path, "step 2", "4 steps"),
    )
    assert_each(kit.fit(trainer).warnings, ("Saves", "'checkpoint'", "disabled"))


def test_so_does_a_writer_of_other_files_or_of_none(tmp_path: Path) -> None:
    class Writer(Plugin):
        def __init__(self, path: Path | None) -> None:
            self.path = path

        @on(SavePoint)
        def write(self, run: Run, event: SavePoint) -> None:
            run.checkpoints.last = self.path

    for path, words in (
        (tmp_path / "a.pt", ("newest checkpoint", tmp_path / "a.pt")),
        (None, ("no checkpoint",)),
    ):
        plugins = [SaveSchedule(Every(steps=2)), Writer(path), Disable("writer", 3)]
        assert_each(warnings_of(*plugins), ("'writer'", "disabled", "step 3", *words))


# What is lost, and how to resume.


@pytest.mark.parametrize("background", [False, True])
def test_an_error_says_what_is_lost_and_how_to_resume(background: bool, tmp_path: Path) -> None:
    error = ArithmeticError("in the middle")
    plugins = [SaveSchedule(Every(steps=5)), Checkpoint(tmp_path, background=background), Fail(error)]
    with pytest.raises(ArithmeticError):
        kit.fit(*plugins, train=class_batches(10), name="x")

    path = tmp_path / "x_epoch_0_iter_5.pth"
    assert error.__notes__[0] == (
        f"heliograph: the newest checkpoint is {path}, of step 5, 3 steps are lost; to resume it, "
        f"Checkpoint('{tmp_path}', resume='{path}')"
    )


def test_a_program_that_resumes_by_itself_is_only_started_again(tmp_path: Path) -> None:
    plugins = [SaveSchedule(Every(steps=5)), Checkpoint(tmp_path, resume="auto"), Fail(KeyboardInterrupt())]
    result = kit.fit(*plugins, train=class_batches(10), name="x", on_interrupt="return")
    assert_facts(result.notes[-1], tmp_path / "x_epoch_0_iter_5.pth", "step 5", "3 steps", "start the program")


def test_so_does_the_result_of_an_interrupt(tmp_path: Path) -> None:
    plugins = [SaveSchedule(Every(steps=50)), Checkpoint(tmp_path), Fail(KeyboardInterrupt())]
    result = kit.fit(*plugins, train=class_batches(10), on_interrupt="return")
    assert_each(result.notes, ("no checkpoint", "8 steps"))
    assert result.warnings == ()


# The weights that were measured are those that are loaded.


def measure(model: nn.Module) -> float:
    task = Supervised(model, nn.functional.cross_entropy)
    return Trainer(device="cpu").validate(task, class_batches(3)).metrics["validation/loss"]


def averaged(folder: Path, *plugins: Plugin) -> tuple[RunResult, Any, Trainer]:
    task = linear_classifier()
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    trainer = Trainer([EMA(0.9), *schedules, Checkpoint(folder, **BEST), *plugins], device="cpu")
    result = trainer.fit(task, class_batches(4), validation=class_batches(3), optimizer=kit.sgd(1.0), epochs=4)
    return result, task, trainer


@pytest.mark.parametrize("extent", ["weights", "everything"])
def test_the_best_by_averaged_weights_comes_back_averaged(extent: Any, tmp_path: Path) -> None:
    result, task, trainer = averaged(tmp_path, LoadBest(extent))
    assert result.best_checkpoint is not None
    judged_by = storage.read_manifest(result.best_checkpoint).judged_by
    assert judged_by is not None

    assert measure(task.model) == judged_by[2]
    assert_facts(result.notes[-1], "loaded back", extent, "'ema'", "best checkpoint")
    again = trainer.validate(task, class_batches(3))
    assert again.metrics["validation/loss"] == judged_by[2]


def test_the_trained_weights_come_back_where_they_were_measured(tmp_path: Path) -> None:
    task = linear_classifier()
    schedules = [LogSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    savers = [Checkpoint(tmp_path, keep_best=1, monitor="train/loss"), LoadBest()]
    result = kit.fit(EMA(0.9), *schedules, *savers, task=task, epochs=3)
    assert result.best_checkpoint is not None
    saved = reader.load(result.best_checkpoint)["modules"]["model"]["weight"]
    assert torch.equal(task.model.state_dict()["weight"], saved)


def test_weights_are_loaded_as_they_were_measured_unless_others_are_asked_for(tmp_path: Path) -> None:
    result, task, _ = averaged(tmp_path)
    path = result.best_checkpoint
    assert path is not None
    trained = reader.load(path)["modules"]["model"]["weight"]
    average = reader.load(path)["plugins"]["ema"]["weights"]["model"]["weight"]
    assert not torch.equal(trained, average)

    metrics = load_weights(task, path).metrics
    assert torch.equal(task.model.weight, average)
    assert measure(task.model) == metrics["validation/loss"]
    load_weights(task, path, average=False)
    assert torch.equal(task.model.weight, trained)
    load_weights(task, path, average="ema")
    assert torch.equal(task.model.weight, average)
    with pytest.raises(ValueError, match=r"plugin 'swa'.* Known: ema"):
        load_weights(task, path, average="swa")


def test_weights_are_loaded_into_a_plain_module(tmp_path: Path) -> None:
    result, task, _ = averaged(tmp_path)
    path = result.best_checkpoint
    assert path is not None
    module = nn.Linear(4, 2)
    metrics = load_weights(module, path).metrics
    load_weights(task, path)
    assert torch.equal(module.weight, task.model.weight)
    assert measure(module) == metrics["validation/loss"]
    with pytest.raises(ValueError, match=r"\[2, 4\], the task's"):
        load_weights(nn.Linear(5, 2), path)


def test_one_module_gets_its_own_of_several_that_are_saved(tmp_path: Path) -> None:
    class Two(Supervised):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 2), nn.functional.cross_entropy)
            self.other = nn.Linear(1, 1)

    result = kit.fit(SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path), task=Two())
    assert result.last_checkpoint is not None
    alone, both = nn.Linear(4, 2), SimpleNamespace(model=nn.Linear(4, 2), other=nn.Linear(1, 1))
    load_weights(alone, result.last_checkpoint)
    load_weights(both, result.last_checkpoint)
    saved = reader.load(result.last_checkpoint)["modules"]["model"]["weight"]
    assert torch.equal(alone.weight, saved)
    assert torch.equal(both.model.weight, saved)


def test_two_in_one_folder_are_refused_by_their_names(tmp_path: Path) -> None:
    two = [Checkpoint(tmp_path), Checkpoint(tmp_path, every=Every(steps=3)).named("two")]
    with pytest.raises(ValueError, match="'checkpoint' and 'two' both"):
        Trainer(two)


def test_the_average_and_the_best_cannot_both_be_left_in_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"final weights \(EMA\(load_at_end=True\), LoadBest\)"):
        Trainer([EMA(load_at_end=True), Checkpoint(tmp_path, **BEST), LoadBest()])
    Trainer([EMA(), Checkpoint(tmp_path, **BEST), LoadBest()])
