"""The life of a data module: prepared once, set up for a run, torn down however it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    DataModule,
    EpochStart,
    Every,
    ExceptionPassThrough,
    FileLog,
    LoaderParams,
    Phases,
    Plugin,
    RunClosed,
    RunFailed,
    Trainer,
    TrainingError,
    ValidationSchedule,
    on,
)
from heliograph.core.engines.device import DeviceEngine
from heliograph.tests.messages import assert_each
from torch.utils.data import DataLoader

Make = Callable[..., Any]


class DiaryModule(DataModule):
    """Keeps a diary; fails where it is asked to."""

    loader_params = LoaderParams(batch_size=4, shuffle=True)

    def __init__(self, make: Make, fails: str = "", error: BaseException | None = None) -> None:
        self.diary: list[str] = []
        self.make, self.fails, self.error = make, fails, error or ArithmeticError("broken")

    def _note(self, what: str) -> None:
        self.diary.append(what)
        if what in self.fails.split():
            raise type(self.error)(f"{what} is broken")

    def prepare(self) -> None:
        self._note("prepare")

    def set_up(self) -> None:
        self._note("set_up")

    def train(self) -> Any:
        self._note("train")
        return self.make(8)

    def validation(self) -> Any:
        self._note("validation")
        return self.make(4)

    def test(self) -> Any:
        self._note("test")
        return {"a": self.make(4), "b": DataLoader(self.make(4), 2)}

    def tear_down(self) -> None:
        self._note("tear_down")


RUN = ["set_up", "train", "validation", "tear_down"]


class Ending(Plugin):
    """Ends a run in some way, during an epoch."""

    def __init__(self, how: Any) -> None:
        self.how = how

    @on(BatchEnd)
    def end(self, run: Any, event: BatchEnd) -> None:
        self.how(run)


def raising(error: BaseException) -> Callable[[Any], None]:
    def act(run: Any) -> None:
        raise error

    return act


def fit(module: Any, noisy: Make, *plugins: Any, **options: Any) -> Any:
    trainer = Trainer([ValidationSchedule(Every(epochs=1)), *plugins], device="cpu")
    return trainer.fit(noisy(), module, **{"epochs": 1, "optimizer": torch.optim.SGD, **options})


def test_the_life_of_a_module(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing)
    events: list[str] = []
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    trainer.bus.on(EpochStart, lambda run, event: events.extend(module.diary))
    trainer.bus.on(RunClosed, lambda run, event: events.append("closed"))
    result = trainer.fit(noisy(), module, epochs=1, optimizer=torch.optim.SGD)

    assert events == ["prepare", "set_up", "train", "validation", "closed"]
    assert module.diary == ["prepare", *RUN]
    assert (result.progress.steps, result.status) == (2, "completed")
    assert "validation/loss" in result.metrics


def test_it_is_prepared_once_and_set_up_for_every_run(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing)
    fit(module, noisy)
    fit(module, noisy)
    Trainer(device="cpu").validate(noisy(), module)
    result = Trainer(device="cpu").test(noisy(), module)

    assert module.diary == [
        "prepare", *RUN, *RUN, "set_up", "validation", "tear_down", "set_up", "test", "tear_down",
    ]  # fmt: skip
    assert set(result.metrics) == {"test/a/loss", "test/b/loss"}
    assert result.progress.evaluated == 3


def test_a_second_process_of_a_node_does_not_prepare(drawing: Make, noisy: Make) -> None:
    engine = DeviceEngine("cpu")
    engine.is_local_main = False
    module = DiaryModule(drawing)
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], engine=engine)
    trainer.fit(noisy(), module, epochs=1, optimizer=torch.optim.SGD)
    trainer.validate(noisy(), module)

    assert "prepare" not in module.diary


def test_a_prepare_that_failed_is_tried_again(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing, fails="prepare")
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            fit(module, noisy)
    assert module.diary == ["prepare", "prepare"]


@pytest.mark.parametrize(
    ("how", "raised"),
    [
        (lambda run: run.control.stop("enough"), None),
        (raising(ArithmeticError("a plugin")), ArithmeticError),
        (raising(KeyboardInterrupt()), KeyboardInterrupt),
        (raising(SystemExit(3)), SystemExit),
        (lambda run: run.hooks.exit_with(75) or run.control.stop("preempted"), SystemExit),
    ],
)
def test_it_is_torn_down_on_every_ending(how: Any, raised: Any, drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing)
    if raised is None:
        assert fit(module, noisy, Ending(how)).status == "stopped"
    else:
        with pytest.raises(raised):
            fit(module, noisy, Ending(how))

    assert module.diary == ["prepare", *RUN]


def test_an_interrupt_that_is_returned(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing)
    result = fit(module, noisy, Ending(raising(KeyboardInterrupt())), on_interrupt="return")
    assert result.status == "interrupted"
    assert module.diary == ["prepare", *RUN]


def test_so_is_one_whose_task_or_settings_are_wrong(drawing: Make, noisy: Make) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"epochs": 0}, "epochs=.*more than 0"),
        ({"loader_params": {"batchsize": 3}}, "no 'batchsize'"),
        ({"epochs": None}, "run has no end"),
    ]
    for options, message in wrong:
        module = DiaryModule(drawing)
        with pytest.raises(ValueError, match=message):
            fit(module, noisy, **options)
        assert module.diary == ["prepare", *RUN]


def test_so_is_one_whose_run_does_not_begin(drawing: Make, noisy: Make) -> None:
    inner = DiaryModule(drawing)
    trainer = Trainer(device="cpu")

    def again(run: Any, event: EpochStart) -> None:
        trainer.validate(noisy(), inner)

    trainer.bus.on(EpochStart, again)
    with pytest.raises(RuntimeError, match="DeviceEngine"):
        trainer.fit(noisy(), DataLoader(drawing(), 4), epochs=1, optimizer=torch.optim.SGD)
    assert inner.diary == ["prepare", "set_up", "validation", "tear_down"]


@pytest.mark.parametrize("where", ["set_up", "train", "validation"])
def test_so_is_one_that_fails_itself(where: str, drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing, fails=where)
    with pytest.raises(ArithmeticError, match=f"{where} is broken"):
        fit(module, noisy)
    assert module.diary == ["prepare", *RUN[: RUN.index(where) + 1], "tear_down"]


def test_so_is_one_of_an_evaluation_that_fails(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing, fails="test")
    with pytest.raises(ArithmeticError, match="test is broken"):
        Trainer(device="cpu").test(noisy(), module)
    with pytest.raises(TypeError, match="validation_step"):
        Trainer(device="cpu").validate(object(), module)
    assert module.diary == ["prepare", "set_up", "test", "tear_down", "set_up", "validation", "tear_down"]


# What plugins get of that.


@pytest.mark.parametrize("where", ["prepare", "set_up", "train", "validation"])
def test_the_run_that_was_to_begin_fails(where: str, drawing: Make, noisy: Make, tmp_path: Path) -> None:
    module, events = DiaryModule(drawing, fails=where), list[Any]()
    plugins: list[Any] = [ValidationSchedule(Every(epochs=1)), FileLog(tmp_path), ExceptionPassThrough()]
    trainer = Trainer(plugins, device="cpu")
    trainer.bus.on(RunFailed, lambda run, event: events.append((event.phase, str(event.error), run.name)))
    trainer.bus.on(
        RunClosed, lambda run, event: events.append((event.status, list(module.diary), run.data.train_loader))
    )
    with pytest.raises(TrainingError, match=f"step 0: ArithmeticError: {where}"):
        trainer.fit(noisy(), module, epochs=1, optimizer=torch.optim.SGD, name="mine")
    diary = ["prepare", *RUN[: RUN.index(where) + 1], "tear_down"] if where != "prepare" else ["prepare"]
    assert events == [("train", f"{where} is broken", "mine"), ("failed", diary, None)]
    (log,) = tmp_path.iterdir()
    assert f"ArithmeticError: {where} is broken" in log.read_text(encoding="utf-8")

    module.fails = ""  # the trainer is free
    result = trainer.fit(noisy(), module, epochs=1, optimizer=torch.optim.SGD)
    assert result.status == "completed"


@pytest.mark.parametrize("phase", ["validation", "test"])
def test_an_evaluation_that_was_to_begin_fails(phase: str, drawing: Make, noisy: Make) -> None:
    trainer, events = Trainer([ExceptionPassThrough(test=[ArithmeticError])], device="cpu"), list[str]()
    trainer.bus.on(RunFailed, lambda run, event: events.append(event.phase))
    evaluate = trainer.test if phase == "test" else trainer.validate
    with pytest.raises(ArithmeticError if phase == "test" else TrainingError):
        evaluate(noisy(), DiaryModule(drawing, fails=phase))
    assert events == [phase]


def test_what_is_wrong_with_the_arguments_is_of_no_run(drawing: Make, noisy: Make) -> None:
    trainer, events = Trainer(device="cpu"), list[str]()
    trainer.bus.on(RunFailed, lambda run, event: events.append(event.name))
    with pytest.raises(ValueError, match="epochs="):
        trainer.fit(noisy(), DiaryModule(drawing), epochs=0, optimizer=torch.optim.SGD)
    assert events == []


# A tear_down that fails.


def test_its_error_is_the_run_s_where_there_is_no_other(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing, fails="tear_down")
    with pytest.raises(ArithmeticError, match="tear_down is broken"):
        fit(module, noisy)
    with pytest.raises(ArithmeticError, match="tear_down is broken"):
        Trainer(device="cpu").validate(noisy(), module)


@pytest.mark.parametrize("evaluated", [True, False])
def test_and_else_a_note(evaluated: bool, drawing: Make, noisy: Make) -> None:
    class Failing(noisy):  # type: ignore[misc, valid-type]  # a class from a fixture
        def training_step(self, run: Any, batch: Any) -> Any:
            raise LookupError("the step is broken")

    module = DiaryModule(drawing, fails="tear_down")
    with pytest.raises(LookupError, match="the step is broken") as info:
        Trainer(device="cpu").validate(Failing(), module) if evaluated else fit(module, Failing)
    assert "tear_down is broken" in str(info.value.__notes__)


def test_a_note_on_what_failed_before_the_run_too(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing, fails="set_up tear_down")
    with pytest.raises(ArithmeticError, match="set_up is broken") as info:
        fit(module, noisy)
    assert_each(
        info.value.__notes__,
        ("tear_down failed", "ArithmeticError", "tear_down is broken"),
        ("in train", "epoch 0", "batch 0", "step 0"),
    )


def test_the_trainer_is_free_afterwards(drawing: Make, noisy: Make) -> None:
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    with pytest.raises(ArithmeticError):
        trainer.fit(noisy(), DiaryModule(drawing, fails="tear_down"), epochs=1, optimizer=torch.optim.SGD)
    result = trainer.fit(noisy(), DiaryModule(drawing), epochs=1, optimizer=torch.optim.SGD)
    assert result.status == "completed"


# What it gives.


def test_what_fit_is_given_goes_before(drawing: Make, noisy: Make) -> None:
    module = DiaryModule(drawing)
    result = fit(module, noisy, loader_params={"batch_size": 2}, validation=DataLoader(drawing(3), 3))
    assert result.progress.steps == 4
    assert module.diary == ["prepare", "set_up", "train", "tear_down"]


def test_the_least_module(drawing: Make, noisy: Make) -> None:
    class Least(DataModule):
        def train(self) -> Any:
            return Phases(DataLoader(drawing(8), 4), DataLoader(drawing(4), 4))

    assert Trainer(device="cpu").fit(noisy(), Least(), epochs=1, optimizer=torch.optim.SGD).progress.steps == 2


def test_what_is_missing_is_said(noisy: Make) -> None:
    class Empty(DataModule): ...

    trainer = Trainer(device="cpu")
    with pytest.raises(TypeError, match=r"training data: define train\(\)"):
        trainer.fit(noisy(), Empty(), epochs=1, optimizer=torch.optim.SGD)
    with pytest.raises(TypeError, match=r"test data: define test\(\)"):
        trainer.test(noisy(), Empty())
    with pytest.raises(TypeError, match="validation"):
        trainer.validate(noisy(), Empty())


def test_a_loop_of_one_s_own(drawing: Make, noisy: Make) -> None:
    module, task = DiaryModule(drawing), noisy()
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    with trainer.run(task, module, epochs=1, optimizer=torch.optim.SGD) as run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(task.training_step(run, batch))
        assert module.diary[-1] == "validation"

    assert module.diary == ["prepare", *RUN]
    assert run.result.progress.steps == 2
