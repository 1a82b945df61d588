"""What a callback sets in its control becomes a request, and what it resets is withdrawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.bridges.tests.huggingface.callbacks.training import train_here
from heliograph.packages.tests.facts import assert_each
from heliograph_bridges.huggingface import from_huggingface
from transformers import TrainerCallback, TrainerControl


class Setter(TrainerCallback):
    """Sets a flag at a step, and notes what the flags were at each method."""

    def __init__(self, flag: str = "", step: int = 2, *, value: bool = True) -> None:
        self.flag, self.step, self.value = flag, step, value
        self.seen: list[tuple[str, int, str]] = []

    def note(self, name: str, state: Any, control: Any) -> None:
        self.seen.append((name, state.global_step, ",".join(key for key, value in vars(control).items() if value)))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("epoch_begin", state, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("step_begin", state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("step_end", state, control)
        if self.flag and state.global_step == self.step:
            setattr(control, self.flag, self.value)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("log", state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("evaluate", state, control)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("save", state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("epoch_end", state, control)


class FlagRequests(h.Plugin):
    """Keeps the history of requests."""

    @h.on(h.RunClosed)
    def keep(self, run: h.Run, event: h.RunClosed) -> None:
        self.history = [(each.verb, each.by, each.reason, each.step) for each in run.control.history]


def requests_of(callback: TrainerCallback, *plugins: Any, **options: Any) -> list[Any]:
    """Train with a callback, and return all requests."""
    requests, bridged = FlagRequests(), from_huggingface(callback)
    bridged.asks = ("stop", "save", "validation", "log")  # the code names no flag
    train_here(*plugins, bridged, requests, **{"epochs": 2, **options})
    return requests.history


@pytest.mark.parametrize(
    ("flag", "verb"),
    [("should_training_stop", "stop"), ("should_log", "log"), ("should_evaluate", "validation")],
)
def test_a_flag_is_a_request_with_who_and_why(flag: str, verb: str) -> None:
    assert_each(requests_of(Setter(flag)), (verb, "setter", f"{flag} = True", "Setter.on_step_end", ", 2)"))


def test_an_epoch_ends_where_it_is_asked_to() -> None:
    callback = Setter("should_epoch_stop")
    assert [each[0] for each in requests_of(callback)] == ["end_epoch"]
    assert [step for name, step, _ in callback.seen if name == "epoch_end"] == [2, 7]


def test_a_save_is_written_and_reported(tmp_path: Path) -> None:
    callback = Setter("should_save")
    requests_of(callback, h.Checkpoint(tmp_path))
    assert ("save", 2, "") in callback.seen
    assert (tmp_path / "run_epoch_0_iter_2.pth").exists()


def test_the_requests_of_all_plugins_are_shown(tmp_path: Path) -> None:
    callback = Setter()
    saving = [h.SaveSchedule(steps=2, at_end=False), h.Checkpoint(tmp_path)]
    train_here(h.LogSchedule(steps=2), h.ValidationSchedule(steps=2), *saving, callback, train=2, epochs=1)
    assert ("step_end", 1, "") in callback.seen
    assert ("step_end", 2, "should_save,should_evaluate,should_log") in callback.seen


@pytest.mark.parametrize(("flag", "method"), [("should_log", "on_log"), ("should_evaluate", "on_evaluate")])
def test_a_flag_of_what_is_being_done_has_no_effect(flag: str, method: str) -> None:
    class Again(TrainerCallback):
        def ask(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            setattr(control, flag, True)

    setattr(Again, method, Again.ask)
    assert "again" not in [
        by for _, by, *_ in requests_of(Again(), h.LogSchedule(steps=2), h.ValidationSchedule(steps=2))
    ]


@pytest.mark.parametrize(
    ("flag", "schedule"),
    [
        ("should_evaluate", lambda: h.ValidationSchedule(steps=2, at_end=False)),
        ("should_log", lambda: h.LogSchedule(steps=2)),
    ],
)
def test_a_flag_that_is_reset_takes_the_request_of_another_plugin_back(
    flag: str, schedule: Callable[[], h.Plugin]
) -> None:
    callback = Setter(flag, value=False)
    history = requests_of(callback, schedule(), epochs=1)
    verb = flag.removeprefix("should_").replace("evaluate", "validation")
    assert [each[:2] for each in history if each[3] == 2] == [
        (verb, history[0][1]),
        (f"withdraw_{verb}", "setter"),
    ]
    steps = {step for name, step, _ in callback.seen if name in ("log", "evaluate")}
    assert steps == {4}


def test_a_callback_may_return_another_control() -> None:
    class Other(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> TrainerControl:
            return TrainerControl(should_training_stop=state.global_step == 3)

    assert [each[0] for each in requests_of(Other())] == ["stop"]


def test_what_is_no_control_is_an_error() -> None:
    class Wrong(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
            return True

    with pytest.raises(TypeError, match=r"Wrong.on_step_end returned True"):
        train_here(Wrong(), epochs=1)


def test_what_a_callback_may_request_is_read_from_its_code() -> None:
    class Asks(Setter):
        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            for _ in range(1):
                control.should_save = control.should_training_stop

    assert from_huggingface(Asks()).asks == ("stop", "save")
    assert from_huggingface(Setter()).asks == ()


def test_a_method_that_was_never_called_is_said() -> None:
    result = train_here(Setter(), epochs=1)
    assert_each(
        [each for each in result.warnings if "Setter" in each],
        ("Setter.on_log was", "LogSchedule(steps=50)"),
        ("Setter.on_evaluate was", "validation=", "ValidationSchedule(epochs=1)"),
        ("Setter.on_save was", "Checkpoint('runs/x', every=Every(epochs=1))"),
    )
