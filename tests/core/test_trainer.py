"""Calls of the trainer: what they accept, refuse and return."""

from __future__ import annotations

import html
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import heliograph
import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    Checkpoint,
    DeviceEngine,
    EarlyStopping,
    EpochEnd,
    Every,
    GradientsReady,
    LearningRate,
    LogSchedule,
    Plugin,
    ProgressBar,
    Run,
    RunClosed,
    SavePoint,
    SaveSchedule,
    StepEnd,
    StrictError,
    Supervised,
    Task,
    TrainEnd,
    Trainer,
    ValidationSchedule,
    accuracy,
    on,
    tuning,
)
from heliograph.tests.kit import Batch, class_batches, fit, linear_classifier, sgd
from heliograph.tests.messages import assert_each, assert_facts
from torch import Tensor, nn

# What is refused.


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "3"])
def test_steps_are_a_positive_whole_number(limit: Any) -> None:
    with pytest.raises(ValueError, match=f"least 1; got {limit!r}"):
        fit(steps=limit)


@pytest.mark.parametrize("limit", [0, -0.5, float("inf"), float("nan"), True, "3"])
def test_epochs_are_a_positive_number(limit: Any) -> None:
    with pytest.raises(ValueError, match=f"0; got {limit!r}"):
        fit(epochs=limit)


def test_an_unlimited_run_needs_something_that_can_stop_it() -> None:
    with pytest.raises(ValueError, match="end: pass epochs="):
        fit(epochs=None)


def test_an_unlimited_run_ends_by_a_plugin() -> None:
    class StopAfterThree(Plugin):
        asks = ("stop",)

        @on(EpochEnd)
        def stop(self, run: Run, event: EpochEnd) -> None:
            if run.progress.epoch == 3:
                run.control.stop("three are enough")

    result = fit(Trainer([StopAfterThree()], device="cpu"), epochs=None)
    assert (result.status, result.stopped_by, result.progress.epoch) == ("stopped", "stop_after_three", 3)


def test_validation_data_that_nobody_would_ever_use() -> None:
    with pytest.raises(
        ValueError,
        match=r"validation: add ValidationSchedule\(epochs=",
    ):
        fit(validation=class_batches(2))


def test_a_scheduler_that_nobody_would_ever_step() -> None:
    with pytest.raises(ValueError, match=r"add LearningRate\('step'\)"):
        fit(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match="has no parameter of"):
        fit(optimizer=sgd()(nn.Linear(4, 2).parameters()))


def test_an_optimizer_that_needs_a_closure() -> None:
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        fit(optimizer=torch.optim.LBFGS)


def test_schedulers_that_do_not_fit() -> None:
    other = sgd()(nn.Linear(4, 2).parameters())
    with pytest.raises(ValueError, match="belongs to a different"):
        fit(scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(TypeError, match="scheduler= takes a scheduler,"):
        fit(scheduler=torch.optim.lr_scheduler.StepLR)
    for makes, got in (
        (lambda optimizer: None, r"None from .*<lambda>"),
        (torch.optim.lr_scheduler.CosineAnnealingLR, r".*CosineAnnealingLR.*"),
    ):
        with pytest.raises(TypeError, match=rf"steps: .*; got {got}\.$"):
            fit(scheduler=makes)
    with pytest.raises(ValueError, match=r"LearningRate\('epoch'\) does not fit"):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        fit(Trainer([LearningRate("epoch")], device="cpu"), scheduler=lambda optimizer: plateau(optimizer))


def test_a_scheduler_whose_state_could_not_be_saved_is_refused_at_the_start() -> None:
    class Halving:
        def step(self) -> None:
            """Halve it."""

        def state_dict(self) -> dict[str, Any]:
            return {}

    message = r"Halving has no load_state_dict.*load_state_dict\(state\)"
    with pytest.raises(TypeError, match=message):
        fit(Trainer([LearningRate("step")], device="cpu"), scheduler=Halving())
    del Halving.state_dict
    with pytest.raises(TypeError, match="state_dict and no load_state_dict"):
        fit(Trainer([LearningRate("step")], device="cpu"), scheduler=lambda optimizer: Halving())


def test_parts_of_a_task_that_nobody_would_see() -> None:
    class Hidden(Supervised):
        def __init__(self, part: Any) -> None:
            super().__init__(nn.Linear(4, 2), nn.functional.cross_entropy)
            self.part = part

    for part in ([nn.Linear(4, 2)], {"head": nn.Linear(4, 2)}, nn.Parameter(torch.zeros(1))):
        with pytest.raises(ValueError, match=r"Hidden\.part has modules or"):
            fit(task=Hidden(part))
    assert fit(task=Hidden(nn.ModuleList([nn.Linear(4, 2)]))).status == "completed"


def test_a_dataset_is_no_loader() -> None:
    dataset = torch.utils.data.TensorDataset(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"TensorDataset.*loader_params="):
        fit(train=dataset)


def test_plugins_that_are_none() -> None:
    with pytest.raises(TypeError, match=r"Trainer\(\[EarlyStopping\(\.\.\.\)\]\)"):
        Trainer(EarlyStopping())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="EarlyStopping is a class:"):
        Trainer([EarlyStopping])


def test_validations_scheduled_without_data() -> None:
    with pytest.raises(ValueError, match="'validation_schedule' would never act"):
        fit(Trainer([ValidationSchedule(Every(epochs=1))], device="cpu"))


def test_numpy_numbers_become_pythons_own() -> None:
    class Numpy(Supervised):
        def validation_step(self, run: Run, batch: Any) -> Any:
            return {"f1": np.float64(0.5), "f2": np.float32(0.25)}

    task = Numpy(nn.Linear(4, 2), nn.functional.cross_entropy)
    metrics = Trainer(device="cpu").validate(task, class_batches(2)).metrics
    assert metrics == {"validation/f1": 0.5, "validation/f2": 0.25}
    assert {type(value) for value in metrics.values()} == {float}


def test_accuracy_is_for_classes() -> None:
    with pytest.raises(ValueError, match=r"2 classes, got \[5,"):
        accuracy(torch.ones(5, 1), torch.ones(5))


def test_a_plugin_whose_need_nobody_serves(tmp_path: Any) -> None:
    class Waits(Plugin):
        needs = ("log",)

        @on(BatchEnd)
        def wait(self, run: Run, event: BatchEnd) -> None: ...

    with pytest.raises(ValueError, match="'waits' would never act:"):
        fit(Trainer([Waits()], device="cpu"))
    assert fit(Trainer([Waits(), LogSchedule(Every(steps=1))], device="cpu")).status == "completed"


def test_what_a_disabled_plugin_would_ask_for_is_a_warning() -> None:
    """It may be enabled in the run; and who disables it, for a short trial say, wants the run without it."""
    rates = LearningRate("step")
    schedules = [ValidationSchedule(Every(epochs=1)), LogSchedule(Every(steps=1))]
    trainer = Trainer([*schedules, rates, EarlyStopping("train/loss"), ProgressBar()], device="cpu")
    trainer.plugins.disable("validation_schedule", "log_schedule", rates, "progress")
    options = {"validation": class_batches(2), "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)}
    result = fit(trainer, **options)
    assert_each(
        result.warnings[:3],
        ("'validation_schedule'", "disabled", "validation"),
        ("'learning_rate'", "disabled", "scheduler"),
        ("'log_schedule'", "disabled", "log", "'early_stopping'"),
    )
    trainer.plugins.enable("validation_schedule", "log_schedule", rates)
    assert fit(trainer, **options).warnings == ()


def test_what_is_enabled_in_the_run_is_no_warning() -> None:
    schedule = ValidationSchedule(Every(epochs=1))
    trainer = Trainer([schedule], device="cpu")
    trainer.plugins.disable(schedule)
    trainer.bus.on(StepEnd, lambda run, event: run.plugins.enable(schedule))
    result = fit(trainer, validation=class_batches(2))
    assert (result.progress.validations, result.warnings) == (1, ())


def test_a_run_without_an_end_since_its_stopper_is_disabled() -> None:
    trainer = Trainer([LogSchedule(Every(steps=1)), EarlyStopping("train/loss")], device="cpu")
    trainer.plugins.disable("early_stopping")
    with pytest.raises(ValueError, match=r"end: .*Plugin 'early_stopping'"):
        trainer.fit(linear_classifier(), class_batches(2), optimizer=sgd())


def test_an_empty_loader() -> None:
    with pytest.raises(ValueError, match="train loader is empty"):
        fit(train=[])
    with pytest.raises(ValueError, match="validation loader is empty"):
        fit(Trainer([ValidationSchedule(Every(epochs=1))], device="cpu"), validation=[])
    with pytest.raises(ValueError, match="test loader is empty"):
        Trainer(device="cpu").test(linear_classifier(), [])


@pytest.mark.parametrize("options", [{"steps": 11}, {"epochs": 3}, {"steps": 11, "epochs": 3}])
def test_data_that_end_for_good_end_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    trainer, events = Trainer([SaveSchedule(At(steps=1), at_end=True), Checkpoint(tmp_path)], device="cpu"), list[str]()
    for kind in (EpochEnd, TrainEnd, SavePoint, RunClosed):
        trainer.bus.on(kind, lambda run, event: events.append(event.name))
    result = fit(trainer, train=(batch for batch in class_batches(2)), **options)
    assert (result.status, result.stopped_by) == ("stopped", "the loop")
    assert_facts(result.reason, "train loader", "no batch", "epoch 1")
    assert (result.progress.epoch, result.progress.steps) == (1, 2)
    assert events == ["save_point", "epoch_end", "save_point", "train_end", "run_closed"]
    assert_each(result.warnings, ("no batch", "epoch 1", "ended early", "__iter__"))
    with pytest.raises(StrictError, match="run ended early"):
        fit(Trainer(device="cpu", strict=True), train=iter(class_batches(2)), **options)


def test_data_that_end_for_good_end_a_loop_of_ones_own() -> None:
    trainer = Trainer(device="cpu")
    with trainer.run(linear_classifier(), iter(class_batches(2)), optimizer=sgd(), epochs=3) as run:
        epochs = []
        for _ in run.epochs():
            epochs.append(0)
            for batch in run.batches():
                epochs[-1] += 1
                run.step(run.stepping.forward(run, batch))
    assert (epochs, run.result.status, run.result.progress.epoch) == ([2, 0], "stopped", 1)


def test_data_that_have_never_begun_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"epoch 0\. A generator"):
        fit(train=iter(()), epochs=2)


def test_validation_data_that_end_for_good_are_an_error() -> None:
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    with pytest.raises(ValueError, match="validation loader yielded no"):
        fit(trainer, validation=iter(class_batches(2)), epochs=2)


def test_a_dict_of_loaders_in_a_dict_of_sets_is_refused() -> None:
    named = {"a": class_batches(1), "b": class_batches(1)}
    with pytest.raises(TypeError, match=r"keys \['a', 'b'\]"):
        fit(Trainer([ValidationSchedule(Every(epochs=1))], device="cpu"), validation={"x": named})


def test_no_loader_at_all() -> None:
    with pytest.raises(TypeError, match=r"iterable.*got int"):
        fit(train=3)


def test_a_task_without_its_step() -> None:
    with pytest.raises(TypeError, match=r"training_step\(run, batch\)"):
        fit(task=nn.Linear(4, 2))
    with pytest.raises(TypeError, match="needs a method training_step"):
        fit(task=Task(), optimizer=sgd()(nn.Linear(4, 2).parameters()))


class Bare(Task):
    """Trains, and has no other step."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.trained = 0

    def training_step(self, run: Run, batch: Any) -> Tensor:
        self.trained += 1
        return self.model(batch[0]).sum()  # type: ignore[no-any-return]  # of a module


def test_a_step_that_would_be_lacking_later_is_missed_before_the_first_batch() -> None:
    task, sentence = Bare(), r"^Bare needs.*validation_step\(run, batch\)"
    with pytest.raises(TypeError, match=sentence):
        fit(Trainer([ValidationSchedule(Every(epochs=1))], device="cpu"), task=task, validation=class_batches(1))
    assert task.trained == 0
    for evaluate in (Trainer(device="cpu").validate, Trainer(device="cpu").test):
        with pytest.raises(TypeError, match=sentence):
            evaluate(task, iter([]))
    with pytest.raises(TypeError, match=r"predict_step\(run, batch\) that returns"):
        Trainer(device="cpu").predict(task, iter([]))


def test_a_step_may_be_an_attribute() -> None:
    task = Bare()
    task.validation_step = lambda run, batch: 3.0  # type: ignore[method-assign]
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    assert fit(trainer, task=task, validation=class_batches(1)).metrics["validation/loss"] == 3.0


def one(self: Any, batch: Any) -> None: ...


def other_order(self: Any, batch: Any, batch_idx: int) -> None: ...


def three(self: Any, run: Run, batch: Any, index: int) -> None: ...


@pytest.mark.parametrize(
    ("step", "form"),
    [
        (one, r"\(batch: 'Any'\) -> 'None'"),
        (other_order, r"\(batch: 'Any', batch_idx: 'int'\).*"),
        (three, r"\(run: 'Run', batch.*index: 'int'\).*"),
    ],
)
def test_a_step_that_does_not_take_run_and_batch_is_refused_before_the_first_batch(step: Any, form: str) -> None:
    def sentence(name: str) -> str:
        return rf"(?m)^Own\.{name}{form} .*\(run, batch\).*def {name}\(self, run, batch\)"

    untrained, trainer = type("Own", (Bare,), {"training_step": step})(), Trainer(device="cpu")
    with pytest.raises(TypeError, match=sentence("training_step")):
        fit(trainer, task=untrained)
    for function in (tuning.rehearse, tuning.overfit, tuning.find_learning_rate):
        with pytest.raises(TypeError, match=sentence("training_step")):
            function(trainer, untrained, class_batches(4), optimizer=torch.optim.SGD, steps=2)
    task = type("Own", (Bare,), {"validation_step": step, "predict_step": step})()
    with pytest.raises(TypeError, match=sentence("validation_step")):
        fit(Trainer([ValidationSchedule(Every(epochs=1))], device="cpu"), task=task, validation=class_batches(1))
    assert task.trained == 0
    for evaluate in (Trainer(device="cpu").validate, Trainer(device="cpu").test):
        with pytest.raises(TypeError, match=sentence("validation_step")):
            evaluate(task, class_batches(1))
    with pytest.raises(TypeError, match=sentence("predict_step")):
        Trainer(device="cpu").predict(task, class_batches(1))


def test_a_step_is_looked_at_as_it_is_called() -> None:
    def with_scale(step: Any) -> Any:
        @wraps(step)
        def scaled(*given: Any) -> Any:
            return step(*given, 0.5)

        return scaled

    class Wrapped(Bare):
        @with_scale
        def training_step(self, run: Run, batch: Any, scale: float) -> Tensor:
            return super().training_step(run, batch) * scale

    assert fit(task=Wrapped()).status == "completed"


def test_a_loop_of_your_own_calls_no_step_of_the_task() -> None:
    task = type("Own", (Bare,), {"training_step": other_order})()
    trainer = Trainer(device="cpu")
    with trainer.run(task, class_batches(2), optimizer=sgd(), epochs=1) as run:
        for _ in run.epochs():
            for inputs, _ in run.batches():
                run.step(task.model(inputs).sum())
    assert run.result.progress.steps == 2


def test_no_optimizer() -> None:
    with pytest.raises(TypeError, match="optimizer= takes a torch"):
        fit(optimizer="sgd")
    with pytest.raises(TypeError, match="got None"):
        Trainer(device="cpu").fit(linear_classifier(), class_batches(2), epochs=1)


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", ".hidden", 3])
def test_run_names_are_fit_for_files(name: Any) -> None:
    with pytest.raises(ValueError, match="part of file names"):
        fit(name=name)


def test_an_empty_dict_of_sets_is_refused() -> None:
    task, trainer = linear_classifier(), Trainer([ValidationSchedule(epochs=1)], device="cpu")
    empty = "no {} data.*is empty"
    with pytest.raises(ValueError, match=empty.format("validation")):
        trainer.fit(task, class_batches(1), validation={}, optimizer=sgd(), epochs=1)
    with pytest.raises(ValueError, match=empty.format("validation")):
        trainer.validate(task, {})
    with pytest.raises(ValueError, match=empty.format("test")):
        trainer.test(task, {})


def test_a_slash_in_the_name_of_a_set() -> None:
    with pytest.raises(ValueError, match="without '/'; got 'a/b'"):
        Trainer(device="cpu").test(linear_classifier(), {"a/b": class_batches(2)})


@pytest.mark.parametrize(
    ("loss", "error", "sentence"),
    [
        (lambda outputs: 1.0, TypeError, "scalar tensor, got float"),
        (lambda outputs: outputs, ValueError, r"scalar tensor, got.*\[3, 2\]"),
        (lambda outputs: None, TypeError, "got NoneType: .*return"),
        (lambda outputs: {"loss": outputs.mean()}, TypeError, r"got dict: use \.loss"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor(loss: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        fit(task=Supervised(nn.Linear(4, 2), lambda outputs, targets: loss(outputs)))


def test_a_validation_asked_for_without_data() -> None:
    class Ask(Plugin):
        @on(BatchEnd)
        def ask(self, run: Run, event: BatchEnd) -> None:
            run.control.request_validation("why not")

    with pytest.raises(ValueError, match="validation data: pass validation="):
        fit(Trainer([Ask()], device="cpu"))


def test_devices() -> None:
    with pytest.raises(ValueError, match="Unknown device 'gpu0'"):
        Trainer(device="gpu0")
    with pytest.raises(ValueError, match="not both"):
        Trainer(device="cpu", engine=DeviceEngine("cpu"))
    with pytest.raises(ValueError, match=f"torch sees {torch.cuda.device_count()} CUDA devices"):
        Trainer(device="cuda:99")
    assert Trainer().engine.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_misspelt_argument() -> None:
    with pytest.raises(TypeError, match=r"argument 'schedular'\. Did"):
        fit(schedular=3)


def test_a_loader_longer_than_it_says_warns() -> None:
    class Short:
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[Batch]:
            return iter(class_batches(3))

    result = fit(train=Short())
    assert result.progress.steps == 3
    assert_each(result.warnings, ("train loader", "3 batches", "length says 1"))


# What is returned.


def test_the_result_says_how_it_went() -> None:
    result = fit(Trainer([LogSchedule(Every(steps=1))], device="cpu"), epochs=2, hyper_parameters={"lr": 0.1})
    assert (result.status, result.reason, result.stopped_by) == ("completed", "2 epochs done", None)
    assert set(result.metrics) == {"train/loss"}
    text = str(result)
    assert_facts(text, "completed", "2 epochs", "epochs 2", "steps 4", "samples 12")
    assert f"train/loss {result.metrics['train/loss']:.6g}" in text


def test_what_is_printed_has_no_control_characters() -> None:
    """Names and reasons of the user could move the cursor, or look like other lines."""

    class Odd(Plugin):
        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            run.track("acc\x1b[31m\nsteps 9", 1.0)
            run.note("a\x07note")
            run.control.stop("\x1b[2Jgone\nepochs 9", required=False)

    trainer = Trainer([LogSchedule(Every(steps=1)), Odd()], device="cpu")
    result = fit(trainer, steps=2)
    for shown in (str(result), repr(result), str(result.history), str(result.resume)):
        assert all(line.isprintable() for line in shown.split("\n")), shown
    assert not any(line.startswith(("steps 9", "epochs 9")) for line in str(result).split("\n"))
    assert "train/acc\\x1b[31m steps 9 1" in str(result)
    assert len(str(result.history).split("\n")) == len(result.history)


def test_hyper_parameters_are_checked() -> None:
    with pytest.raises(TypeError, match=r"\{'lr': 0.01\}, got 3\."):
        fit(Trainer(device="cpu"), hyper_parameters=3)
    with pytest.raises(TypeError, match="hyper_parameters= takes values"):
        fit(Trainer(device="cpu"), hyper_parameters={"lr": 0.1, 3: 4})


def test_the_printed_history_names_who_asked() -> None:
    trainer = Trainer([ValidationSchedule(Every(epochs=1)), EarlyStopping(patience=1, min_delta=9.0)], device="cpu")
    result = fit(trainer, validation=class_batches(2), epochs=9)
    assert result.status == "stopped"
    assert_facts(result, "stopped", "early_stopping", "validation/loss")
    assert [(each.by, each.verb) for each in result.history] == [
        ("validation_schedule", "validation"),
        ("validation_schedule", "validation"),
        ("early_stopping", "stop"),
    ]
    assert "early_stopping: stop - validation/loss" in str(result.history)
    assert str(fit().history) == "no requests"


def test_what_users_print_says_what_it_is() -> None:
    trainer = Trainer([EarlyStopping("validation/loss", patience=3)], device="cpu")
    trainer.plugins.register(ValidationSchedule(epochs=1))
    task, texts = linear_classifier(), dict[str, str]()

    def look(run: Run, event: StepEnd) -> None:
        run.control.stop("enough", by="look")
        texts.update(run=repr(run), control=repr(run.control))

    handle = trainer.bus.on(StepEnd, look, when=At(steps=2))
    trainer.fit(task, class_batches(3), validation=class_batches(1), optimizer=sgd(), epochs=1)

    assert repr(trainer).startswith("Trainer([")
    assert "EarlyStopping(monitor='validation/loss', patience=3)," in repr(trainer)
    assert "engine=DeviceEngine(device='cpu', precision='fp32')" in repr(trainer)
    assert repr(trainer.plugins) == "<Plugins: early_stopping, validation_schedule>"
    assert "1 of StepEnd" in repr(trainer.bus)
    assert "look on StepEnd" in repr(handle)
    assert "look" in repr(trainer.bus.signal(StepEnd))
    assert (
        repr(Supervised(nn.Linear(2, 1), nn.functional.mse_loss)) == "Supervised(model=Linear(...), loss_fn=mse_loss)"
    )
    assert repr(task).startswith(f"{type(task).__name__}(model=")
    assert_facts(texts["run"], "TrainRun 'run'", "train", "epoch 0", "batch 1", "step 2")
    assert_facts(texts["control"], "Control", "stop", "look", "1 in history")


def test_a_trainer_with_many_plugins_prints_a_line_for_each() -> None:
    lines = repr(Trainer(heliograph.standard("runs"), device="cpu", strict=True)).splitlines()
    assert "LogSchedule(steps=50, at_end=True)," in [line.strip() for line in lines]
    assert lines[-1] == "], engine=DeviceEngine(device='cpu', precision='fp32'), strict=True)"


def test_no_public_class_prints_an_address() -> None:
    public = [value for name in dir(heliograph) if isinstance(value := getattr(heliograph, name), type)]
    kinds: set[Any] = {each for each in public if not vars(each).get("_is_protocol") and each is not heliograph.Event}
    assert {each for each in kinds if each.__repr__ is object.__repr__} == set()


def test_a_task_that_is_a_module_prints_its_layers() -> None:
    class Net(Task, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

    assert "(layer): Linear(in_features=2" in repr(Net())


def test_the_repr_of_a_result_is_one_line() -> None:
    batches = class_batches(3)
    trainer = Trainer([LogSchedule(Every(steps=1))], device="cpu")
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "epochs": 2}
    assert_facts(repr(trainer.fit(linear_classifier(), batches, **options)), "completed", "epochs 2", "steps 6")
    trainer.bus.on(BatchEnd, lambda run, event: run.control.stop("enough"), when=At(batches=4))
    trainer.bus.on(BatchEnd, lambda run, event: run.warn("A <b> is missing."))
    result = trainer.fit(linear_classifier(), batches, **options)
    line = repr(result)[1:-1]
    assert_facts(line, "RunResult", "stopped", result.stopped_by, "epochs 1", "steps 4", "1 warning")
    assert "\n" not in line
    page = result._repr_html_()
    assert page.startswith(f"<details><summary>{html.escape(line)}</summary><pre>stopped by ")
    assert page.count("A &lt;b&gt; is missing.") == 2
    assert page.endswith("</li></ul>")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"epochs": 1}, "1 epoch done"), ({"steps": 1}, "1 step done"), ({"steps": 2}, "2 steps done")],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_one_of_a_kind_is_reported_as_one(options: dict[str, Any], reason: str) -> None:
    assert fit(**options).reason == reason


def test_one_batch_is_reported_as_one() -> None:
    assert Trainer(device="cpu").validate(linear_classifier(), class_batches(1)).reason == "1 batch evaluated"


def test_metrics_are_means_over_samples_of_unequal_batches() -> None:
    batches = [*class_batches(1, size=6), *class_batches(1, size=2)]
    task = linear_classifier(metrics={"accuracy": accuracy})
    expected = nn.functional.cross_entropy(
        task.model(torch.cat([each[0] for each in batches])), torch.cat([each[1] for each in batches])
    )
    result = Trainer(device="cpu").validate(task, batches)
    assert result.metrics["validation/loss"] == pytest.approx(expected.item(), rel=1e-6)
    hits = sum(int((task.model(each[0]).argmax(1) == each[1]).sum()) for each in batches)
    assert result.metrics["validation/accuracy"] == pytest.approx(hits / 8)
    assert (result.reason, result.progress.samples) == ("2 batches evaluated", 8)


def test_train_metrics_are_means_since_the_last_log() -> None:
    seen: list[float] = []

    class Losses(Plugin):
        @on(BatchEnd)
        def keep(self, run: Run, event: BatchEnd) -> None:
            seen.append(run.loss.item())

    trainer = Trainer([Losses(), LogSchedule(Every(steps=2))], device="cpu")
    result = fit(trainer, task=linear_classifier(metrics={"accuracy": accuracy}), train=class_batches(4))
    assert result.metrics["train/loss"] == pytest.approx(sum(seen[2:]) / 2, rel=1e-6)
    assert 0 <= result.metrics["train/accuracy"] <= 1


def test_nothing_is_tracked_where_nobody_logs() -> None:
    class Look(Plugin):
        tracked: list[bool]

        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            self.tracked = [*getattr(self, "tracked", []), run.report.tracks]
            run.track("mine", 1.0)

    plugin = Look()
    assert fit(Trainer([plugin], device="cpu")).metrics == {}
    assert plugin.tracked == [False, False]


def test_two_fits_of_one_trainer_are_equal_and_nothing_is_stale() -> None:
    plugins = [
        ValidationSchedule(Every(epochs=1)),
        EarlyStopping(patience=1, min_delta=9.0),
        LogSchedule(Every(steps=1)),
    ]
    trainer = Trainer(plugins, device="cpu")
    first = fit(trainer, validation=class_batches(2), epochs=5)
    second = fit(trainer, validation=class_batches(2), epochs=5)
    assert first.status == second.status == "stopped"
    assert first.progress.epoch == second.progress.epoch == 2
    assert first.metrics == second.metrics
    assert first.history is not second.history


def test_fit_then_test_on_one_trainer() -> None:
    task = linear_classifier()
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    fitted = fit(trainer, task=task, validation=class_batches(2))
    tested = trainer.test(task, class_batches(2))
    assert tested.metrics["test/loss"] == fitted.metrics["validation/loss"]
    assert tested.progress.steps == 0
    assert {name.split("/")[0] for name in tested.metrics} == {"test"}


def test_a_module_may_be_the_task() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, run: Run, batch: Batch) -> Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    task = Net()
    before = task.layer.weight.detach().clone()
    assert fit(task=task).progress.steps == 2
    assert not torch.equal(task.layer.weight, before)


def test_a_step_may_return_a_plain_loss_or_nothing_in_validation() -> None:
    class Plain(Supervised):
        def validation_step(self, run: Run, batch: Any) -> Any:
            run.track("extra", 2.0)
            return self.training_step(run, batch)

        def test_step(self, run: Run, batch: Any) -> Any:
            return {}

    task = Plain(nn.Linear(4, 2), nn.functional.cross_entropy)
    assert set(Trainer(device="cpu").validate(task, class_batches(2)).metrics) == {
        "validation/loss",
        "validation/extra",
    }
    assert Trainer(device="cpu").test(task, class_batches(2)).metrics == {}


def test_a_task_may_count_its_samples_itself() -> None:
    class Tokens(Supervised):
        def batch_size(self, batch: Any) -> int:
            return 100

    assert fit(task=Tokens(nn.Linear(4, 2), nn.functional.cross_entropy)).progress.samples == 200


def test_an_attribute_of_the_name_batch_size_is_not_taken_for_the_method() -> None:
    task = linear_classifier()
    vars(task)["batch_size"] = 3
    assert fit(task=task, train=class_batches(2, size=5)).progress.samples == 10


def test_supervised_refuses_what_it_cannot_use() -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        Supervised("model", nn.functional.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"function of \(outputs, targets\),"):
        linear_classifier(metrics={"accuracy": "accuracy"})
    with pytest.raises(ValueError, match="cannot be called 'loss'"):
        linear_classifier(metrics={"loss": accuracy})
    with pytest.raises(ValueError, match=r"shape \[3, 2\]"):
        Trainer(device="cpu").test(
            linear_classifier(metrics={"wide": lambda outputs, targets: outputs}), class_batches(2)
        )


def test_supervised_refuses_batches_that_are_dicts() -> None:
    """Those of a Ray dataset are, and one of two columns would come apart into their names."""
    data = [{"image": torch.randn(3, 4), "label": torch.zeros(3, dtype=torch.long)}]
    asked = r"\['image', 'label'\].*inputs='image', targets='label'\)"
    trainer = Trainer(device="cpu")
    with pytest.raises(TypeError, match=asked):
        trainer.fit(linear_classifier(), data, optimizer=torch.optim.SGD, epochs=1)
    with pytest.raises(TypeError, match=asked):
        trainer.validate(linear_classifier(), data)


def test_the_sampler_is_given_the_epoch() -> None:
    class Loader:
        def __init__(self) -> None:
            self.reported: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.reported.append(epoch)

        def __iter__(self) -> Iterator[Batch]:
            return iter(class_batches(2))

    loader = Loader()
    fit(train=loader, epochs=3)
    assert loader.reported == [0, 1, 2]


class Point(NamedTuple):
    inputs: Tensor
    target: Tensor


def test_an_engine_of_ones_own_sees_every_call() -> None:
    calls: list[str] = []

    class Watching(DeviceEngine):
        def set_up(self, task: Any, modules: Any, optimizers: Any) -> None:
            calls.append(f"set up {list(modules)} {list(optimizers)}")

        def bind(self, forward: Any) -> Any:
            calls.append("bind")
            return forward

        def unscale(self, optimizer: Any) -> None:
            calls.append("unscale")

        def tear_down(self) -> None:
            calls.append("tear down")

    class Listen(Plugin):
        @on(GradientsReady)
        def look(self, run: Run, event: GradientsReady) -> None:
            calls.append("gradients")

    fit(Trainer([Listen()], engine=Watching("cpu")), train=class_batches(1))
    assert calls == ["set up ['model'] ['optimizer']", "bind", "unscale", "gradients", "tear down"]


def test_an_engine_that_skips_a_step_is_counted() -> None:
    class Skipping(DeviceEngine):
        def bind_step(self, optimizer: Any) -> Any:
            return lambda: False

    result = fit(Trainer([LearningRate("step")], engine=Skipping("cpu")), scheduler=(_Never()))
    assert (result.progress.steps, result.progress.skipped_steps) == (0, 2)


class _Never:
    def step(self) -> None:
        raise AssertionError("the optimizer was not stepped, the scheduler was")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def test_saving_needs_somebody_who_saves() -> None:
    result = fit(Trainer([SaveSchedule(Every(steps=1))], device="cpu"))
    assert result.last_checkpoint is None
