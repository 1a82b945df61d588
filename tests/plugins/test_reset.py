"""`Plugin.reset`: when it is called, and what its errors do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import Plugin, Recorder, Run, RunResult, Supervised, Trainer, TrainStart, on, replay
from heliograph.tests.kit import sgd
from torch import nn

Batches = list[tuple[torch.Tensor, torch.Tensor]]


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


@pytest.fixture
def batches() -> Batches:
    return [(torch.ones(2, 2), torch.zeros(2, 1))] * 2


def fit(trainer: Trainer, batches: Batches) -> RunResult:
    task = Supervised(nn.Linear(2, 1), nn.functional.mse_loss)
    return trainer.fit(task, batches, optimizer=sgd(), epochs=1)


def test_every_plugin_is_reset_before_any_receives_that_the_training_begins(batches: Batches) -> None:
    calls: list[str] = []
    trainer = Trainer([Memory(calls).named("one"), Memory(calls).named("two")], device="cpu")
    fit(trainer, batches)
    assert calls == ["one reset", "two reset", "one begin", "two begin"]
    fit(trainer, batches)
    assert calls[4:] == calls[:4]


def test_a_test_on_its_own_resets_nothing(batches: Batches) -> None:
    memory = Memory()
    trainer = Trainer([memory], device="cpu")
    trainer.validate(Supervised(nn.Linear(2, 1), nn.functional.mse_loss), batches)
    trainer.test(Supervised(nn.Linear(2, 1), nn.functional.mse_loss), batches)
    assert memory.calls == []


def test_one_that_is_switched_off_is_not_reset(batches: Batches) -> None:
    memory = Memory()
    trainer = Trainer([memory], device="cpu")
    with trainer.plugins.disabled("memory"):
        fit(trainer, batches)
    assert memory.calls == []


def test_a_method_of_that_name_of_another_class_is_left_alone(batches: Batches) -> None:
    assert fit(Trainer([Own()], device="cpu"), batches).status == "completed"


def test_an_error_in_it_fails_the_run(batches: Batches) -> None:
    memory, trainer = Memory(), Trainer([Failing()], device="cpu")
    with pytest.raises(KeyError, match="forgetful") as caught:
        fit(trainer, batches)
    assert "heliograph: in failing, which was to be reset before TrainStart" in caught.value.__notes__
    trainer.plugins.unregister("failing")
    trainer.plugins.register(memory)
    assert fit(trainer, batches).status == "completed"


def test_an_error_in_that_of_an_observer_is_listed(batches: Batches) -> None:
    failing = Failing()
    failing.policy = "observer"
    result = fit(Trainer([failing], device="cpu"), batches)
    assert result.status == "completed"
    assert result.plugin_errors == {"failing": ("reset: KeyError: 'forgetful'",)}
    assert "plugin 'failing': it may remember a former training; reset: KeyError: 'forgetful'" in result.notes


def test_a_replay_resets_too(batches: Batches, tmp_path: Path) -> None:
    recording = fit(Trainer([Recorder(tmp_path)], device="cpu"), batches).recording
    memory = Memory()
    assert recording is not None
    replay(recording, [memory])
    assert memory.calls == ["memory reset", "memory begin"]
