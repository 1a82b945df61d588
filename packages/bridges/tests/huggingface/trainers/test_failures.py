"""Errors, refusals and odd uses of the callback in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    BatchEnd,
    Checkpoint,
    Event,
    ExceptionPassThrough,
    GradientAccumulation,
    GradientsReady,
    Plugin,
    Run,
    RunClosed,
    RunFailed,
    StepEnd,
    TrainingError,
    ValidationSchedule,
    on,
)
from heliograph.packages.bridges.tests.huggingface.trainers.trainings import Rows, Script, make
from heliograph.packages.tests.facts import assert_facts
from heliograph_bridges.huggingface import HeliographCallback
from heliograph_bridges.huggingface.trainers.callback import caller, host_of
from transformers import TrainerCallback


class Ends(Plugin):
    """Keeps how runs end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @on(RunFailed, RunClosed)
    def keep(self, run: Run, event: Event) -> None:
        what = event.error.args[0] if isinstance(event, RunFailed) else getattr(event, "status", "")
        self.seen.append(f"{event.name} {what} {run.progress.steps} {run.phase}")


class Broken(Script):
    """Fails in one of its methods, in the third step."""

    where = ""

    def fail(self, where: str) -> None:
        if self.where == where and self.state.global_step == 2:
            raise ZeroDivisionError(where)

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        self.fail("data")
        return super().get_batch_samples(*args, **options)

    def training_step(self, *args: Any, **options: Any) -> Any:
        self.fail("training_step")
        return super().training_step(*args, **options)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        self.fail("evaluation_loop")
        return super().evaluation_loop(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> Any:
        self.fail("saving")
        return super()._save_checkpoint(*args, **options)


@pytest.mark.parametrize("where", ["data", "training_step", "evaluation_loop", "saving"])
def test_whatever_fails_the_trainer_closes_the_run(where: str, tmp_path: Path) -> None:
    ends = Ends()
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer, callback = make(tmp_path, ends, kind=Broken, max_steps=4, **options)
    assert isinstance(trainer, Broken)
    trainer.where = where
    with pytest.raises(ZeroDivisionError, match=where) as caught:
        trainer.train()
    phase = "validation" if where == "evaluation_loop" else "train"
    assert ends.seen == [f"run_failed {where} 2 {phase}", f"run_closed failed 2 {phase}"]
    assert callback.result is not None
    assert callback.result.status == "failed"
    assert caught.value.__notes__[0].startswith("heliograph: in ")
    trainer.where = ""
    trainer.train()
    assert ends.seen[2:] == ["run_closed completed 4 train"]


def test_an_interrupt(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer, callback = make(tmp_path, callbacks=[Interrupt()], max_steps=4)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert callback.result is not None
    assert (callback.result.status, callback.result.exit_status) == ("interrupted", 130)


def test_an_error_of_a_plugin_leaves_as_it_leaves_fit(tmp_path: Path) -> None:
    class Bad(Plugin):
        @on(StepEnd)
        def fail(self, run: Run, event: StepEnd) -> None:
            raise LookupError("on purpose")

    trainer, _ = make(tmp_path, Bad(), ExceptionPassThrough(), max_steps=4)
    with pytest.raises(TrainingError, match="on purpose"):
        trainer.train()


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (
            lambda: GradientAccumulation(2),
            r"requests hold_step.*set TrainingArguments\(gradient_accumulation_steps=\.\.",
        ),
        (lambda: Checkpoint("x"), r"writes checkpoints, .*heliograph\.Script .*save_strategy=\.\.\."),
    ],
)
def test_a_plugin_that_it_cannot_serve_is_refused_at_the_start(plugin: Any, text: str, tmp_path: Path) -> None:
    trainer, callback = make(tmp_path, plugin(), max_steps=4)
    with pytest.raises(ValueError, match=text):
        trainer.train()
    assert trainer.state.global_step == 0
    assert callback.result is None


def test_under_fsdp_nobody_sees_whole_gradients(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, max_steps=1)
    assert host_of(trainer).lacks == set()
    trainer.is_fsdp_enabled = True
    assert host_of(trainer).lacks == {GradientsReady}
    assert host_of(trainer).verbs == {"veto_stop"}


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, callbacks=[HeliographCallback([])], max_steps=1)
    with pytest.raises(ValueError, match="has two HeliographCallbacks"):
        trainer.train()


def test_a_class_is_refused_as_a_plugin() -> None:
    with pytest.raises(TypeError, match="ValidationSchedule is a class"):
        HeliographCallback([ValidationSchedule])
    with pytest.raises(TypeError, match=r"list, as in \[ValidationSchedule\(\.\.\.\)\]"):
        HeliographCallback(ValidationSchedule(epochs=1))  # type: ignore[arg-type]


def test_one_that_is_added_later_says_what_it_does_not_see(tmp_path: Path) -> None:
    trainer, first = make(tmp_path, max_steps=2)
    trainer.remove_callback(first)
    late = HeliographCallback([Ends()])
    trainer.add_callback(late)
    trainer.train()
    assert late.result is not None
    assert_facts(late.result.notes[0], "added after heliograph.Script")
    assert late.result.progress.samples == 4


def test_one_that_is_added_later_sees_what_fails_in_a_step(tmp_path: Path) -> None:
    ends = Ends()
    trainer, first = make(tmp_path, kind=Broken, max_steps=4)
    assert isinstance(trainer, Broken)
    trainer.remove_callback(first)
    trainer.add_callback(HeliographCallback([ends]))
    trainer.where = "training_step"
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert ends.seen == ["run_failed training_step 2 train", "run_closed failed 2 train"]


def test_what_another_callback_stops(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == 3

    trainer, callback = make(tmp_path, callbacks=[Stop()], max_steps=9)
    trainer.train()
    assert callback.result is not None
    assert (callback.result.status, callback.result.stopped_by) == ("stopped", "heliograph.Script")
    assert_facts(callback.result.reason, "a callback", "should_training_stop")


def test_an_epoch_that_another_callback_ends(tmp_path: Path) -> None:
    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = True

    trainer, callback = make(tmp_path, callbacks=[End()], num_train_epochs=3)
    trainer.train()
    assert callback.result is not None
    assert (callback.result.status, callback.result.progress.epoch, trainer.state.global_step) == ("completed", 3, 3)


def test_an_evaluation_outside_of_a_training_is_none_of_ours(tmp_path: Path) -> None:
    ends = Ends()
    trainer, callback = make(tmp_path, ends, max_steps=2)
    before = trainer.evaluate()
    trainer.train()
    assert trainer.predict(Rows(2)).metrics is not None
    assert before["eval_loss"] > 0
    assert ends.seen == ["run_closed completed 2 train"]
    assert callback.result is not None
    assert "validation/loss" not in callback.result.metrics


def test_it_is_for_the_trainer_only() -> None:
    with pytest.raises(RuntimeError, match="HeliographCallback was not called"):
        caller()


def test_one_callback_in_several_trainings(tmp_path: Path) -> None:
    class Count(Plugin):
        count = 0

        @on(BatchEnd)
        def add(self, run: Run, event: BatchEnd) -> None:
            self.count += 1

    trainer, callback = make(tmp_path, Count(), max_steps=2)
    trainer.train()
    first = callback.result
    trainer.train()
    assert callback.plugins[Count].count == 4
    assert first is not None
    assert callback.result is not None
    assert callback.result.progress.steps == first.progress.steps == 2
