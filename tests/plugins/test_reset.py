"""`Plugin.reset`: when it is called, and what its errors do."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph import Plugin, Run, Trainer, TrainStart, on
from heliograph.tests.kit import class_batches, fit, linear_classifier


class Memory(Plugin):
    """Writes down what is called, and when."""

    def __init__(self, calls: list[str] | None = None) -> None:
        self.calls: list[str] = [] if calls is None else calls

    def reset(self) -> None:
        self.calls.append(f"{self.name} reset")

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        self.calls.append(f"{self.name} begin")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(f"{self.name} load {state['calls']}")


class Failing(Plugin):
    """Cannot forget."""

    def reset(self) -> None:
        raise KeyError("forgetful")

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Have a handler."""


class Own:
    """No plugin of the base class, with a method of that name."""

    name = "own"

    def reset(self, what: str) -> None:
        raise AssertionError(what)

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Have a handler."""


def test_every_plugin_is_reset_before_any_receives_that_the_training_begins() -> None:
    calls: list[str] = []
    trainer = Trainer([Memory(calls).named("one"), Memory(calls).named("two")], device="cpu")
    fit(trainer)
    assert calls == ["one reset", "two reset", "one begin", "two begin"]
    fit(trainer)
    assert calls[4:] == calls[:4]


def test_a_test_on_its_own_resets_nothing() -> None:
    memory = Memory()
    trainer = Trainer([memory], device="cpu")
    trainer.validate(linear_classifier(), class_batches(2))
    trainer.test(linear_classifier(), class_batches(2))
    assert memory.calls == []


def test_one_that_is_switched_off_is_not_reset() -> None:
    memory = Memory()
    trainer = Trainer([memory], device="cpu")
    with trainer.plugins.disabled("memory"):
        fit(trainer)
    assert memory.calls == []


def test_a_method_of_that_name_of_another_class_is_left_alone() -> None:
    assert fit(Own()).status == "completed"


def test_an_error_in_it_fails_the_run() -> None:
    memory, trainer = Memory(), Trainer([Failing()], device="cpu")
    with pytest.raises(KeyError, match="forgetful") as caught:
        fit(trainer)
    assert any("failing, before TrainStart" in line for line in caught.value.__notes__)
    trainer.plugins.unregister("failing")
    trainer.plugins.register(memory)
    assert fit(trainer).status == "completed"


def test_an_error_in_that_of_an_observer_is_listed() -> None:
    failing = Failing()
    failing.policy = "observer"
    result = fit(failing)
    assert result.status == "completed"
    assert result.plugin_errors == {"failing": ("reset: KeyError: 'forgetful'",)}
    assert any("training; reset: KeyError: 'forgetful'" in line for line in result.notes)
