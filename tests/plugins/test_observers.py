"""Whatever an observer does, the run continues, and the result says what was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import Every, LogSchedule, Plugin, Trainer, on
from heliograph.events import BatchEnd, EpochEnd, Lane, Log, Run, RunFailed, TrainStart
from heliograph.tests import kit
from heliograph.tests.kit import class_batches
from heliograph.tests.messages import assert_each, assert_facts


class SilentError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise OSError("no text")


class Doing(Plugin):
    """Does something at the second batch."""

    def __init__(self, act: Callable[[Run], object], policy: Any = "observer") -> None:
        self.act, self.policy = act, policy

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 2:
            self.act(run)


class Logging(Plugin):
    """Adds something to every log."""

    def __init__(self, name: Any, value: Any, policy: Any = "observer") -> None:
        self.metric, self.value, self.policy = name, value, policy

    @on(Log, lane=Lane.MEASURE)
    def add(self, run: Run, event: Log) -> None:
        event.metrics[self.metric] = self.value


class Keeping(Plugin):
    """Has a state, of whatever kind."""

    policy: Any = "observer"

    def __init__(self, give: Callable[[], Any], take: Callable[[Any], object] = id) -> None:
        self.give, self.take = give, take
        self.batches = 0

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.give()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.take(state)


class Counting(Plugin):
    """One that is in order."""

    def __init__(self) -> None:
        self.batches = 0

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state["batches"]


class CloseFails(Plugin):
    """Fails when it is closed."""

    policy = "observer"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @on(BatchEnd)
    def receive(self, run: Run, event: BatchEnd) -> None: ...

    def close(self) -> None:
        raise self.error


def fit(*plugins: Any, saved: dict[str, Any] | None = None, cuts: list[dict[str, Any]] | None = None) -> Any:
    """Train two epochs of three batches, from a snapshot if there is one; keep that at the end of the first epoch."""
    trainer = Trainer([LogSchedule(Every(epochs=1)), *plugins], device="cpu")
    if saved is not None:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    if cuts is not None:
        trainer.bus.on(EpochEnd, lambda run, event: cuts.append(deepcopy(run.state_dict())))
    return kit.fit(trainer, train=class_batches(3), epochs=2)


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error."""

    def act(*_: object) -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (SilentError(), "SilentError: <"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (BaseExceptionGroup("all", [SystemExit(1)]), "BaseExceptionGroup: all (1 sub-exception)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_handler_raises_is_forgiven(error: BaseException, reported: str) -> None:
    counting = Counting()
    result = fit(Doing(raising(error)), counting)
    assert (result.status, counting.batches) == ("completed", 6)
    assert list(result.plugin_errors) == ["doing"]
    assert_each(result.plugin_errors["doing"], ("batch_end", "step 2", reported))
    assert f"step 2: {reported}" in str(result)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("all", [KeyboardInterrupt()])], ids=repr)
def test_but_no_ctrl_c(error: BaseException) -> None:
    with pytest.raises(type(error)):
        fit(Doing(raising(error)))


@pytest.mark.parametrize("error", [SystemExit(3), SilentError(), GeneratorExit()], ids=repr)
def test_whatever_closing_raises_is_forgiven(error: BaseException) -> None:
    result = fit(CloseFails(error))
    assert result.status == "completed"
    assert [line.partition(":")[0] for line in result.plugin_errors["close_fails"]] == ["close"]


def test_of_a_critical_plugin_an_error_without_a_text_leaves_as_it_is() -> None:
    error = SilentError()
    reported: list[BaseException] = []

    class Listening(Plugin):
        @on(RunFailed)
        def receive(self, run: Run, event: RunFailed) -> None:
            reported.append(event.error)
            raise SilentError

    with pytest.raises(SilentError) as caught:
        fit(Doing(raising(error), "critical"), Listening())
    assert caught.value is error
    assert reported == [error]
    assert_each(
        caught.value.__notes__,
        ("in train", "epoch 0", "batch 2", "step 2", "in doing on batch_end"),
        ("listening", "run_failed", "SilentError: <"),
    )


# What is given in a wrong type is refused where it is given.

METRICS: list[tuple[Any, Any, str]] = [
    ("x", "text", "The metric 'x' must be a number or a tensor of one element, got 'text'."),
    ("x", "1.5", "The metric 'x' must be a number or a tensor of one element, got '1.5'."),
    ("x", None, "The metric 'x' must be a number or a tensor of one element, got None."),
    (
        "x",
        torch.ones(2),
        "The metric 'x' must be a number or a tensor of one element, got a value of type Tensor.",
    ),
    (3, 1.0, "The name of a metric is a string such as 'train/loss', got 3."),
]


@pytest.mark.parametrize(("name", "value", "sentence"), METRICS, ids=repr)
def test_a_metric_that_is_no_number_is_the_plugins_error(name: Any, value: Any, sentence: str) -> None:
    result = fit(Logging(name, value))
    assert result.status == "completed"
    assert result.plugin_errors["logging"] == tuple(f"log at step {step}: TypeError: {sentence}" for step in (3, 6))
    assert result.metrics.keys() == {"train/loss"}
    with pytest.raises(TypeError) as caught:
        fit(Logging(name, value, "critical"))
    assert str(caught.value) == sentence
    assert "in logging on log" in caught.value.__notes__[0]


def test_a_metric_of_numpy_or_a_tensor_is_kept_as_a_number() -> None:
    result = fit(Logging("x", np.float32(0.5)), Logging("y", torch.tensor(2)).named("other"))
    assert (result.metrics["x"], type(result.metrics["x"])) == (0.5, float)
    assert (result.metrics["y"], type(result.metrics["y"])) == (2.0, float)


def test_a_note_that_is_no_text_is_the_plugins_error() -> None:
    result = fit(Doing(lambda run: run.note(5)))  # type: ignore[arg-type]
    assert list(result.plugin_errors) == ["doing"]
    assert_each(result.plugin_errors["doing"], ("batch_end", "step 2", "TypeError", "run.note", "got int"))
    with pytest.raises(TypeError, match="got int"):
        fit(Doing(lambda run: run.note(5), "critical"))  # type: ignore[arg-type]


# Its state.


@pytest.mark.parametrize(
    ("give", "reported"),
    [
        (raising(KeyError("m")), "KeyError: 'm'"),
        (raising(SystemExit(1)), "SystemExit: 1"),
        (raising(SilentError()), "SilentError: <"),
        (lambda: {"a": [np.zeros(2)]}, "state['a'][0] is a numpy.ndarray"),
        (lambda: {"a": Path("x")}, "state['a'] is a pathlib."),
        (lambda: {"a": threading.Lock()}, "cannot pickle '_thread.lock'"),
    ],
    ids=["raises", "exits", "no text", "numpy", "path", "lock"],
)
def test_a_state_that_cannot_be_saved_is_left_out_and_said_once(give: Callable[[], Any], reported: str) -> None:
    cuts: list[dict[str, Any]] = []
    keeping = Keeping(give)
    result = fit(keeping, Counting(), cuts=cuts)
    assert (result.status, keeping.batches) == ("completed", 6)  # it is not switched off for it
    assert "keeping" not in cuts[0]["plugins"]
    assert cuts[0]["plugins"]["counting"] == {"batches": 3}
    (line,) = result.plugin_errors["keeping"]
    assert_facts(line, "state_dict: ", reported)
    assert_each([note for note in result.notes if "keeping" in note], ("'keeping'", "not saved", line))
    resumed = fit(Keeping(lambda: {"batches": 0}), Counting(), saved=cuts[0])
    assert resumed.resume.fresh_plugins == ("keeping",)


def test_a_state_that_cannot_be_loaded_is_done_without() -> None:
    cuts: list[dict[str, Any]] = []
    fit(Keeping(lambda: {"a": 1}), Counting(), cuts=cuts)
    counting = Counting()
    result = fit(Keeping(dict, lambda state: state["m"]), counting, saved=cuts[0])
    assert (result.status, counting.batches) == ("completed", 6)
    (line,) = result.plugin_errors["keeping"]
    assert_facts(line, "load_state_dict: ValueError", "'keeping'", "the snapshot")
    assert any(f"without its state; {line}" in note for note in result.notes)


def test_of_a_critical_plugin_the_error_names_it() -> None:
    keeping = Keeping(raising(KeyError("m")))
    keeping.policy = "critical"
    with pytest.raises(KeyError) as caught:
        fit(keeping, cuts=[])
    assert any("heliograph: in state_dict" in line for line in caught.value.__notes__)


class Choosy:
    """A filter whose state is of no use."""

    def __call__(self, run: Run) -> bool:
        return True

    def state_dict(self, origin: Any) -> dict[str, Any]:
        return {"a": Path("x")}

    def load_state_dict(self, origin: Any, state: Any) -> None:
        raise KeyError("a")


def test_the_filters_of_an_observer_are_spared_too() -> None:
    class Filtered(Plugin):
        policy = "observer"

        @on(BatchEnd, when=Choosy())
        def receive(self, run: Run, event: BatchEnd) -> None: ...

    cuts: list[dict[str, Any]] = []
    result = fit(Filtered(), cuts=cuts)
    assert "filtered" not in cuts[0]["filters"]
    (line,) = result.plugin_errors["filtered"]
    assert_facts(line, "state_dict of a filter", "TypeError", "filters['receive/batch_end']['a']")
    resumed = fit(Filtered(), saved=cuts[0])
    assert_each(resumed.plugin_errors["filtered"], ("load_state_dict of a filter", "KeyError: 'a'"))
