"""Our plugins in the loop of Lightning's Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from heliograph import (
    At,
    BatchTransform,
    Checkpoint,
    EarlyStopping,
    Every,
    GradientAccumulation,
    GradientsReady,
    Log,
    LogSchedule,
    NaNGuard,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.packages.bridges.tests.hosted import loops
from heliograph.packages.bridges.tests.lightning.conftest import Classifier
from heliograph.tests import kit
from heliograph_bridges.lightning import HeliographCallback
from heliograph_recorder import Recorder, replay
from torch.utils.data import DataLoader


class Trace(loops.Trace):
    """Keeps the names of our events."""

    quiet = ("validation_batch_start", "validation_batch_end", "forward_end", "backward_end")


class Theirs(pl.Callback):
    """Keeps the names of Lightning's hooks in the trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "on_train_start",
            "on_train_epoch_start",
            "on_train_batch_start",
            "on_before_optimizer_step",
            "on_train_batch_end",
            "on_validation_start",
            "on_validation_end",
            "on_train_epoch_end",
            "on_train_end",
        ):
            names = object.__getattribute__(self, "_trace").names
            return lambda *arguments, **options: names.append(name.removeprefix("on_").upper())
        return super().__getattribute__(name)


def fit(
    callbacks: list[Any],
    *,
    module: Any = None,
    batches: int = 2,
    resume: Path | None = None,
    validates: bool = True,
    **options: Any,
) -> tuple[pl.Trainer, Any]:
    """Train with Lightning."""
    module = module or Classifier()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        warnings.filterwarnings("ignore", ".*GPU available")
        warnings.filterwarnings("ignore", ".*exists and is not empty")
        warnings.filterwarnings("ignore", r".*fit\(ckpt_path=")
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to create")
        trainer = pl.Trainer(callbacks=callbacks, accelerator="cpu", **{**quiet, **options})
        loaders: list[Any] = [DataLoader(kit.class_batches(n), batch_size=None) for n in (batches, 1)]  # type: ignore[arg-type]
        trainer.fit(module, loaders[0], loaders[1] if validates else None, ckpt_path=resume)
    return trainer, module


def train(*plugins: Any, save_to: Path | None = None, **options: Any) -> RunResult:
    """Train with plugins; return the result."""
    callback = HeliographCallback(plugins, save_to=save_to)
    fit([callback], **options)
    assert callback.result is not None
    return callback.result


def test_the_order_of_events_beside_the_hooks_of_lightning() -> None:
    """The check before the training is not a validation of it."""
    trace = Trace()
    callback = HeliographCallback([trace, LogSchedule(Every(steps=2))])
    fit([Theirs(trace), callback], max_epochs=1)

    assert trace.text == (
        "VALIDATION_START VALIDATION_END "
        "TRAIN_START train_start TRAIN_EPOCH_START epoch_start "
        "TRAIN_BATCH_START batch_start BEFORE_OPTIMIZER_STEP gradients_ready "
        "TRAIN_BATCH_END step_end batch_end should_stop "
        "TRAIN_BATCH_START batch_start BEFORE_OPTIMIZER_STEP gradients_ready "
        "TRAIN_BATCH_END step_end batch_end log should_stop "
        "VALIDATION_START validation_start VALIDATION_END validation_end should_stop "
        "TRAIN_EPOCH_END epoch_end should_stop TRAIN_END last_boundary train_end run_closed"
    )
    result = callback.result
    assert result is not None
    assert (result.status, result.progress.steps, result.progress.samples, result.warnings) == ("completed", 2, 6, ())


def test_the_order_with_accumulation_and_validations_in_mid_epoch() -> None:
    trace = Trace()
    callback = HeliographCallback([trace])
    fit([callback], batches=4, max_epochs=1, accumulate_grad_batches=2, val_check_interval=2, num_sanity_val_steps=0)

    assert trace.text == (
        "train_start epoch_start batch_start batch_end "
        "batch_start gradients_ready step_end batch_end should_stop validation_start validation_end should_stop "
        "batch_start batch_end batch_start gradients_ready step_end batch_end should_stop "
        "validation_start validation_end should_stop epoch_end should_stop last_boundary train_end run_closed"
    )


def test_the_order_where_a_plugin_stops_in_mid_epoch() -> None:
    class Stop(Plugin):
        asks = ("stop",)

        @on(StepEnd)
        def stop(self, run: Run, event: StepEnd) -> None:
            if run.progress.steps == 3:
                run.control.stop("enough")

    trace = Trace()
    callback = HeliographCallback([trace, Stop()])
    trainer, _ = fit([callback], max_epochs=5, batches=4, num_sanity_val_steps=0)

    assert trace.text.endswith(
        "batch_start gradients_ready step_end batch_end should_stop last_boundary train_end run_closed"
    ) or trace.text.endswith("validation_start validation_end should_stop last_boundary train_end run_closed")
    assert callback.result is not None
    assert (callback.result.status, callback.result.stopped_by) == ("stopped", "stop")
    assert callback.result.progress.steps == trainer.global_step == 3


@pytest.mark.parametrize("factor", [1, 2])
def test_the_loss_is_that_of_the_module_whatever_lightning_divides_it_by(factor: int) -> None:
    seen: list[float] = []

    class See(Plugin):
        @on(GradientsReady)
        def see(self, run: Run, event: GradientsReady) -> None:
            seen.append(float(run.loss))

    module: Any = Classifier()
    inputs, targets = kit.class_batches(1)[0]
    expected = torch.nn.functional.cross_entropy(module.model(inputs), targets).item()
    train(See(), module=module, batches=factor, accumulate_grad_batches=factor, max_epochs=1)

    if factor == 1:
        assert seen == [pytest.approx(expected)]
    else:
        inputs, targets = kit.class_batches(2)[1]
        assert seen == [pytest.approx(torch.nn.functional.cross_entropy(Classifier().model(inputs), targets).item())]


class Scripted(Classifier):
    """Its validation loss is given, epoch by epoch."""

    values = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.values[self.trainer.current_epoch])


def test_early_stopping_stops_where_that_of_lightning_does() -> None:
    callback = HeliographCallback([EarlyStopping(patience=2)])
    ours, _ = fit([callback], module=Scripted(), max_epochs=6)
    theirs, _ = fit([pl.callbacks.EarlyStopping("val_loss", patience=2)], module=Scripted(), max_epochs=6)

    assert callback.result is not None
    assert (callback.result.status, callback.result.stopped_by) == ("stopped", "early_stopping")
    assert ours.global_step == theirs.global_step == 8


def test_a_step_is_dropped_where_a_plugin_asks_for_it() -> None:
    class Skip(Plugin):
        asks = ("skip_step",)

        @on(GradientsReady)
        def skip(self, run: Run, event: GradientsReady) -> None:
            run.control.skip_step("all of them")

    module: Any = Classifier()
    before = module.model.weight.detach().clone()
    result = train(Skip(), module=module, max_epochs=1)

    assert torch.equal(module.model.weight, before)
    assert (result.progress.steps, result.progress.skipped_steps) == (0, 2)


def test_a_loss_that_is_nan_stops_before_the_step() -> None:
    class Diverging(Classifier):
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index) * (math.nan if index else 1.0)

    module: Any = Diverging()
    result = train(NaNGuard("stop"), module=module, max_epochs=2)

    assert (result.status, result.stopped_by, result.progress.steps) == ("stopped", "nan_guard", 1)
    assert bool(torch.isfinite(module.model.weight).all())


def test_metrics_have_our_names() -> None:
    class Measuring(Classifier):
        def validation_step(self, batch: Any, index: int) -> None:
            super().validation_step(batch, index)
            self.log("accuracy", 0.25)

    result = train(LogSchedule(Every(steps=1)), module=Measuring(), max_epochs=1)

    assert set(result.metrics) == {"train/loss", "validation/loss", "validation/accuracy"}
    assert result.metrics["validation/accuracy"] == 0.25


class Rows(Plugin):
    """Keeps the metrics of each log with its step, and those of each validation."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, float]]] = []
        self.validations: list[dict[str, float]] = []

    @on(Log)
    def keep_log(self, run: Run, event: Log) -> None:
        self.logs.append((run.progress.steps, dict(event.metrics)))

    @on(ValidationEnd)
    def keep_validation(self, run: Run, event: ValidationEnd) -> None:
        self.validations.append(dict(event.metrics))


class Logging(Classifier):
    """Calls functions that log, each in the hook of its name."""

    def __init__(self, **logs: Callable[[Any], None]) -> None:
        super().__init__()
        self.logs, self.batches = logs, 0

    def _call(self, hook: str) -> None:
        if hook in self.logs:
            self.logs[hook](self)

    def training_step(self, batch: Any, index: int) -> Any:
        self.batches += 1
        self._call("training_step")
        return self._loss(batch)

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self._call("validation_step")

    def on_validation_epoch_end(self) -> None:
        self._call("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self._call("on_train_epoch_end")


@pytest.mark.parametrize("hook", ["validation_step", "on_validation_epoch_end"])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("val_accuracy", "validation/accuracy"),
        ("accuracy", "validation/accuracy"),
        ("of/classes", "validation/of/classes"),
    ],
)
def test_a_metric_that_a_validation_does_not_change_is_still_measured(name: str, ours: str, hook: str) -> None:
    """The sanity check logs the same value."""
    module = Logging(**{hook: lambda module: module.log(name, 0.5)})
    result = train(EarlyStopping(ours, mode="max", patience=2), module=module, max_epochs=9)

    assert (result.status, result.progress.epoch) == ("stopped", 3)


def test_a_metric_belongs_to_the_phase_in_which_it_is_logged_whatever_its_name() -> None:
    def log(module: Any) -> None:
        module.log_dict(dict.fromkeys(("loss", "train_score", "val_score"), 0.5))

    class Logs(pl.Callback):
        log: Any

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.log("by_callback", 3.0)

    rows = Rows()
    callback = HeliographCallback([LogSchedule(Every(steps=1)), rows])
    fit([callback, Logs()], module=Logging(training_step=log, validation_step=log), max_epochs=2)

    trained = {"train/loss": 0.5, "train/score": 0.5, "train/val_score": 0.5}
    assert [row for _, row in rows.logs] == [trained] * 4
    validated = {"validation/loss": 0.5, "validation/train_score": 0.5, "validation/score": 0.5}
    assert rows.validations == [validated | {"validation/by_callback": 3.0}] * 2


def test_a_log_has_what_was_logged_since_the_last_one() -> None:
    """The values of an epoch are in the log of its end, also those that the module logs last."""

    def log_step(module: Any) -> None:
        module.log("step", float(module.batches))
        module.log("mean", float(module.batches), on_step=False, on_epoch=True)
        module.log("both", float(module.batches), on_step=True, on_epoch=True)
        if module.batches == 2:
            module.log("once", 1.0)

    rows = Rows()
    schedules = [LogSchedule(Every(steps=2)), LogSchedule(Every(epochs=1)).named("epochs")]
    module = Logging(training_step=log_step, on_train_epoch_end=lambda module: module.log("score", 7.0))
    train(*schedules, rows, module=module, batches=3, max_epochs=2)

    logged = [(step, {n: v for n, v in row.items() if n != "train/loss"}) for step, row in rows.logs]
    assert logged[0] == (2, {"train/step": 2, "train/both": 2, "train/both_step": 2, "train/once": 1})
    means = {"train/mean": 2, "train/both": 2, "train/both_epoch": 2}
    assert logged[1] == (3, {"train/step": 3, "train/both_step": 3, "train/score": 7, **means})
    assert logged[2] == (4, {"train/step": 4, "train/both": 4, "train/both_step": 4})


def test_the_mean_of_an_epoch_does_not_replace_the_loss_of_later_steps() -> None:
    def losses(module: Any) -> tuple[list[tuple[int, float]], RunResult]:
        rows = Rows()
        result = train(LogSchedule(Every(steps=3), at_end=False), rows, module=module, max_epochs=3)
        return [(step, row["train/loss"]) for step, row in rows.logs], result

    logged, result = losses(Classifier())

    assert [step for step, _ in logged] == [3, 6]
    assert logged == losses(Logging())[0]
    assert result.means["train/loss"] == pytest.approx(sum(loss for _, loss in logged) / 2)


def test_the_metrics_of_several_loaders_are_kept_apart() -> None:
    rows = Rows()
    callback = HeliographCallback([rows])
    loader: Any = DataLoader(kit.class_batches(1), batch_size=None)  # type: ignore[arg-type]

    class Two(Logging):
        def val_dataloader(self) -> Any:
            return [loader, loader]

    module = Two(validation_step=lambda module: module.log("accuracy", 0.5))
    fit([callback], module=module, validates=False, max_epochs=2)

    names = ("validation/accuracy/dataloader_idx_0", "validation/accuracy/dataloader_idx_1")
    assert rows.validations == [dict.fromkeys(names, 0.5)] * 2


def test_a_training_leaves_the_hook_of_the_module_as_it_was() -> None:
    class Failing(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            raise ArithmeticError("a fault")

    module, ends = Logging(), list[int]()
    module.on_train_epoch_end = own = lambda: ends.append(module.batches)  # type: ignore[method-assign]
    fit([HeliographCallback([]), HeliographCallback([], name="second")], module=module, max_epochs=2)
    assert ends == [2, 4]
    with pytest.raises(ArithmeticError):
        fit([HeliographCallback([]), Failing()], module=module, max_epochs=2)
    assert module.on_train_epoch_end is own


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (
            lambda folder: GradientAccumulation(2),
            r"hold_step, which Lightning.*accumulate_grad_batches=",
        ),
        (lambda folder: Checkpoint(folder, every=Every(epochs=1)), "save.*, which Lightning does"),
        (lambda folder: SaveSchedule(Every(steps=1)), r"pass HeliographCallback\(save_to="),
        (lambda folder: ValidationSchedule(Every(epochs=1)), "requests validation, which Lightning"),
        (lambda folder: RNGCapture(), "controls the random generators"),
        (lambda folder: BatchTransform(lambda batch: batch), "replaces run.batch"),
        (
            lambda folder: LogSchedule(Every(fraction=0.5)),
            r"set Trainer\(max_st",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    plugin: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        train(plugin(tmp_path), max_epochs=1)


def test_early_stopping_needs_validation_data() -> None:
    with pytest.raises(ValueError, match="validation data:"):
        train(EarlyStopping(), validates=False, max_epochs=1)


def test_an_error_closes_the_run() -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, index: int) -> Any:
            raise ArithmeticError("a fault")

    trace = Trace()
    callback = HeliographCallback([trace])
    with pytest.raises(ArithmeticError, match="a fault"):
        fit([callback], module=Failing(), max_epochs=1)

    assert trace.names[-2:] == ["run_failed", "run_closed"]
    assert callback.result is not None
    assert callback.result.status == "failed"


def test_a_plugin_asks_for_a_save_and_a_resumed_training_continues_its_state(tmp_path: Path) -> None:
    def plugins() -> list[Any]:
        return [EarlyStopping(patience=2), SaveSchedule(At(epochs=3), at_end=False)]

    class Killed(Scripted):
        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch == 3:
                raise KeyboardInterrupt

    whole = HeliographCallback(plugins())
    whole_callback = HeliographCallback(plugins(), save_to=tmp_path / "whole")
    _, module = fit([whole_callback], module=Scripted(), max_epochs=6)
    killed = HeliographCallback(plugins(), save_to=tmp_path / "killed")
    with pytest.raises(SystemExit):
        fit([killed], module=Killed(), max_epochs=6)
    saved = tmp_path / "killed" / "step=6.ckpt"
    assert killed.result is not None
    assert (killed.result.status, killed.result.last_checkpoint) == ("interrupted", saved)

    resumed = HeliographCallback(plugins(), save_to=tmp_path / "killed")
    _, again = fit([resumed], module=Scripted(), max_epochs=6, resume=saved)

    assert whole.result is None
    assert whole_callback.result is not None
    assert resumed.result is not None
    for result in (whole_callback.result, resumed.result):
        assert (result.status, result.stopped_by, result.progress.steps) == ("stopped", "early_stopping", 8)
    assert torch.equal(again.model.weight, module.model.weight)


def test_the_checkpoints_of_lightning_hold_the_states(tmp_path: Path) -> None:
    def fit_with(saver: pl.callbacks.ModelCheckpoint | None, resume: Path | None = None) -> HeliographCallback:
        callback = HeliographCallback([EarlyStopping(patience=2)])
        callbacks: list[Any] = [callback] if saver is None else [saver, callback]
        fit(callbacks, module=Scripted(), max_epochs=6, resume=resume, enable_checkpointing=saver is not None)
        return callback

    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    whole = fit_with(saver)
    for epoch in (1, 2):
        resumed = fit_with(None, tmp_path / f"epoch={epoch}.ckpt")
        assert resumed.result is not None
        assert whole.result is not None
        assert (resumed.result.stopped_by, resumed.result.progress.steps) == ("early_stopping", 8)
        assert resumed.result.progress.epoch == whole.result.progress.epoch


@pytest.mark.parametrize("steps", [3, 4])
def test_a_checkpoint_within_an_epoch_or_at_its_last_batch_loses_no_epoch(steps: int, tmp_path: Path) -> None:
    """An epoch has four batches; the checkpoint of the last is written before its validation, which Lightning skips."""

    def train_with(callbacks: list[Any], **options: Any) -> tuple[Trace, RunResult]:
        trace = Trace()
        callback = HeliographCallback([trace])
        fit([*callbacks, callback], batches=4, max_epochs=3, num_sanity_val_steps=0, **options)
        assert callback.result is not None
        return trace, callback.result

    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=steps, filename="{step}")
    whole, result = train_with([saver], enable_checkpointing=True)
    trace, resumed = train_with([], resume=tmp_path / f"step={steps}.ckpt")

    at = [i for i, name in enumerate(whole.names) if name == "batch_end"][steps - 1] + 2
    validation = ["validation_start", "validation_end", "should_stop"]
    expected = whole.names[at:] if steps == 3 else whole.names[at + len(validation) :]
    assert trace.names[2:] == ["epoch_start", *expected]  # resumed=True
    assert (resumed.progress.epoch, resumed.progress.steps) == (result.progress.epoch, result.progress.steps) == (3, 12)


def test_a_checkpoint_that_is_written_after_the_training_holds_the_states(tmp_path: Path) -> None:
    callback = HeliographCallback([EarlyStopping(patience=9)])
    trainer, _ = fit([callback], module=Scripted(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    longer = HeliographCallback([EarlyStopping(patience=9)])
    fit([longer], module=Scripted(), max_epochs=3, resume=tmp_path / "end.ckpt")

    assert longer.result is not None
    assert (longer.result.progress.epoch, longer.result.progress.steps) == (3, 6)
    assert not [note for note in longer.result.notes if "fresh" in note]
    assert longer.plugins.names() == ["early_stopping"]


def test_a_checkpoint_that_is_written_upon_an_error_holds_the_states(tmp_path: Path) -> None:
    class Failing(Scripted):
        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch == 2:
                raise ArithmeticError("a fault")

    saver = pl.callbacks.OnExceptionCheckpoint(tmp_path, "fault")
    callback = HeliographCallback([EarlyStopping(patience=9)])
    with pytest.raises(ArithmeticError):
        fit([callback, saver], module=Failing(), max_epochs=4, enable_checkpointing=True)
    resumed = HeliographCallback([EarlyStopping(patience=9)])
    trainer, _ = fit([resumed], module=Scripted(), max_epochs=4, resume=tmp_path / "fault.ckpt")

    assert resumed.result is not None
    assert resumed.result.progress.epoch == 4
    assert resumed.result.progress.steps == trainer.global_step  # an epoch that had begun is lost to Lightning
    assert not [note for note in resumed.result.notes if "fresh" in note]


def test_a_loader_without_a_length_ends_its_epochs() -> None:
    class Unsized(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(kit.class_batches(3))

    trace = Trace()
    callback = HeliographCallback([trace])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", max_epochs=2, **quiet)
        trainer.fit(Classifier(), DataLoader(Unsized(), batch_size=None))

    assert trace.text.count("batch_end should_stop epoch_end should_stop") == 2
    assert callback.result is not None
    assert callback.result.progress.epoch == 2


def test_with_several_optimizers_what_acts_on_gradients_is_refused() -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> Any:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
                self.manual_backward(self._loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    with pytest.raises(ValueError, match=r"requests skip_step.*takes several optimizers"):
        train(NaNGuard("skip"), module=Two(), max_epochs=1)
    result = train(LogSchedule(Every(steps=1)), module=Two(), max_epochs=1)
    assert (result.progress.steps, result.progress.samples) == (2, 6)


def test_a_batch_without_a_loss_is_counted() -> None:
    class Half(Classifier):
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index) if index else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = train(LogSchedule(Every(steps=1)), module=Half(), max_epochs=1)

    assert (result.progress.steps, result.progress.samples) == (2, 6)


def test_a_training_that_another_callback_stops_is_stopped() -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    callback = HeliographCallback([Trace()])
    fit([Stop(), callback], max_epochs=9)

    assert callback.result is not None
    assert (callback.result.status, callback.result.stopped_by) == ("stopped", "Lightning")


def test_a_training_after_a_validation_that_failed_begins_with_its_check() -> None:
    class Failing(Classifier):
        def validation_step(self, batch: Any, index: int) -> None:
            if not self.trainer.sanity_checking:
                raise ArithmeticError("a fault")

    callback = HeliographCallback([Trace()])
    with pytest.raises(ArithmeticError):
        fit([callback], module=Failing(), max_epochs=1)
    fit([callback], max_epochs=1)

    assert callback.result is not None
    assert (callback.result.status, callback.result.progress.steps) == ("completed", 2)


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    result = train(
        Recorder(tmp_path), EarlyStopping(patience=2), LogSchedule(Every(steps=1)), module=Scripted(), max_epochs=6
    )
    replayed = replay(tmp_path, [EarlyStopping(patience=2)])

    assert (replayed.unheld, replayed.failed) == ({}, {})
    assert len(replayed.asked) == 1
    assert "early_stopping" in result.explain()


def test_pytorch_lightning_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = kit.linear_classifier().model

        training_step = Classifier.training_step
        validation_step = Classifier.validation_step
        configure_optimizers = Classifier.configure_optimizers
        _loss = Classifier._loss

    monkeypatch.setattr(pl, "Trainer", pytorch_lightning.Trainer)
    assert train(EarlyStopping(patience=2), module=Module(), max_epochs=1).progress.steps == 2
