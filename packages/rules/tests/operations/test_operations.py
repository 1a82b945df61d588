"""What rules ask the loop for, and the functions that they call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph import (
    BatchStart,
    Checkpoint,
    Event,
    Every,
    GradientsReady,
    Log,
    LogSchedule,
    Run,
    SavePoint,
    SaveSchedule,
    ShouldStop,
    StepEnd,
    TestBatchStart,
    Trainer,
    ValidationBatchEnd,
    ValidationEnd,
    ValidationSchedule,
)
from heliograph.events import Control, Progress, Request
from heliograph.packages.rules.tests.scripted import Scripted, controller, data, rules, train
from heliograph.packages.tests.facts import assert_facts
from heliograph_rules import RuleController
from heliograph_rules.base import EndTracker, RuleFiring, RuleOperation
from heliograph_rules.errors import RuleError, RuleKeyError, RuleNameError, RuleTypeError
from heliograph_rules.operations.requests import CallFunction, Controls, HFControls

Make = Callable[..., Any]
VERBS = {
    "should_training_stop": "stop",
    "should_stop": "stop",
    "should_epoch_stop": "end_epoch",
    "should_end_epoch": "end_epoch",
    "should_evaluate": "validation",
    "should_validate": "validation",
    "should_save": "save",
    "should_log": "log",
    "should_next_phase": "next_phase",
    "should_skip_batch": "skip_batch",
    "should_hold_step": "hold_step",
    "should_skip_step": "skip_step",
    "should_veto_stop": "veto_stop",
    "should_cut_validation": "cut_validation",
    "should_veto_save": "veto_save",
}
WITHDRAWALS = {
    "should_withdraw_training_stop": "stop",
    "should_withdraw_stop": "stop",
    "should_withdraw_epoch_stop": "end_epoch",
    "should_withdraw_end_epoch": "end_epoch",
    "should_withdraw_evaluate": "validation",
    "should_withdraw_validate": "validation",
    "should_withdraw_save": "save",
    "should_withdraw_log": "log",
}
SHARED = set(VERBS) - {
    "should_training_stop", "should_stop", "should_epoch_stop", "should_end_epoch", "should_evaluate", "should_validate"
}  # fmt: skip


def firing(rule: str = "loss < 1", event: Event | None = None) -> RuleFiring:
    return RuleFiring("mine", "on_step_end", StepEnd() if event is None else event, rule)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (HFControls, {"should_training_stop", "should_epoch_stop", "should_evaluate"}),
        (Controls, {"should_stop", "should_end_epoch", "should_validate"}),
    ],
)
def test_every_action_makes_its_request(
    kind: type[RuleOperation], own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heliograph.events.control.is_within", lambda *names: "save_point" not in names)
    operation = kind("control")
    actions = operation.actions()
    withdrawing = {name for name in actions if name in WITHDRAWALS}
    assert len(withdrawing) == 5
    assert set(actions) - withdrawing == own | SHARED
    for name in set(actions) - withdrawing:
        action = actions[name]
        control = Control(Progress(epoch=1, batch=2, steps=3))
        control.is_evaluating = True
        run: Any = SimpleNamespace(control=control)
        action(run, firing())
        (request,) = control.history
        assert request == Request(VERBS[name], "the caller", request.reason, 1, 2, 3)  # type: ignore[arg-type]
        assert_facts(request.reason, "rule 'mine'", "on_step_end: loss < 1")
    everywhere = {"end_epoch", "cut_validation"}  # at any time, and where an evaluation can be cut short
    assert operation.asks == {name: VERBS[name] for name in actions if VERBS.get(name, "end_epoch") not in everywhere}
    for name in withdrawing:
        control = Control(Progress())
        run = SimpleNamespace(control=control)
        control.stop("")
        control.end_epoch("")
        control.request_log("")
        control.request_validation("")
        control.request_save("")
        actions[name](run, firing())
        left = {"stop", "end_epoch", "log", "validation", "save"} - {WITHDRAWALS[name]}
        assert set(control.open_requests()) == left
        assert control.history[-1].verb == f"withdraw_{WITHDRAWALS[name]}"
        assert_facts(control.history[-1].reason, "rule 'mine'", "on_step_end: loss < 1")


@pytest.mark.parametrize("names", ["hfcontrols", "control"])
@pytest.mark.parametrize("about", ["save", "log", "validation"])
def test_what_is_asked_for_where_it_is_done_is_not_done_again(about: str, names: str, tmp_path: Path) -> None:
    validate = "should_evaluate" if names == "hfcontrols" else "should_validate"
    actions = {"save": "should_save", "log": "should_log", "validation": validate}
    triggers = {"save": ["on_save", "save_point"], "log": ["on_log"], "validation": ["on_evaluate"]}
    source = rules(controller("True", triggers=triggers[about], operations=[f"{names}.{actions[about]}"]))
    every = Every(steps=3)
    schedules = [SaveSchedule(every, at_end=False), LogSchedule(every), ValidationSchedule(every), Checkpoint(tmp_path)]
    trainer, done = Trainer([*schedules, RuleController(source)], device="cpu"), list[tuple[str, int]]()
    for kind in (Log, ValidationEnd, SavePoint):
        trainer.bus.on(kind, lambda run, event: done.append((event.name, run.progress.steps)))
    task = Scripted((1.0,), (1.0,))
    trainer.fit(task, data(3), validation=data(1), optimizer=torch.optim.SGD(task.model.parameters()), epochs=2)
    assert done == [(name, step) for step in (3, 6) for name in ("log", "validation_end", "save_point")]


@pytest.mark.parametrize("trigger", ["on_epoch_end", "on_evaluate"])
def test_a_rule_that_ends_the_epoch_at_its_end_leaves_the_next_one_alone(trigger: str) -> None:
    result = train(
        rules(controller("True", triggers=[trigger], operations=["hfcontrols.should_epoch_stop"])),
        validation=[1.0],
        epochs=3,
    )
    assert (result.progress.epoch, result.progress.steps) == (3, 12)


def test_a_rule_that_asks_for_a_save_at_saves_only_needs_somebody_who_asks_for_one() -> None:
    source = rules(controller("True", triggers=["on_save"], operations=["hfcontrols.should_save"]))
    assert (RuleController(source).asks, RuleController(source).needs) == ((), ("save",))
    both = rules(controller("True", triggers=["on_save", "on_step_end"], operations=["hfcontrols.should_save"]))
    assert (RuleController(both).asks, RuleController(both).needs) == (("save",), ())


def test_a_stop_within_a_training_names_the_rule(task: Make, batches: Make, sgd: Any) -> None:
    trainer, operation = Trainer(device="cpu"), HFControls("hfcontrols")
    trainer.bus.on(StepEnd, lambda run, event: operation.actions()["should_training_stop"](run, firing("True")))
    result = trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)
    assert (result.status, result.progress.steps) == ("stopped", 1)
    assert_facts(result.reason, "rule 'mine'", "on_step_end: True")


@pytest.mark.parametrize(
    ("action", "fitting", "other"),
    [
        ("should_skip_batch", BatchStart, StepEnd),
        ("should_hold_step", BatchStart, GradientsReady),
        ("should_skip_step", GradientsReady, StepEnd),
        ("should_veto_stop", ShouldStop, Log),
        ("should_veto_save", ValidationEnd, ShouldStop),
        ("should_cut_validation", ValidationBatchEnd, ValidationEnd),
        ("should_cut_validation", TestBatchStart, BatchStart),
    ],
)
def test_an_action_for_one_event_is_refused_at_another(action: str, fitting: type[Event], other: type[Event]) -> None:
    operation = Controls("control")
    operation.check(action, (), "mine", fitting)
    match = rf"control\.{action} .*only at.* {other.__name__}"
    with pytest.raises(RuleError, match=match):
        operation.check(action, (), "mine", other)
    operation.check("should_stop", (), "mine", other)


def test_what_an_operation_reads_must_be_there() -> None:
    class Reads(RuleOperation):
        reads = frozenset({"loss", "path"})

    Reads("reader").check("should_act", ["loss", "path", "more"], "on_save", StepEnd)
    with pytest.raises(RuleNameError, match=r"'reader' reads 'path'\. Did"):
        Reads("reader").check("should_act", ["loss", "paths"], "on_save", StepEnd)


class Custom(RuleOperation):
    should_count = 3

    def should_(self, run: Run, firing: RuleFiring) -> None:
        raise AssertionError

    def should_act(self, run: Run, firing: RuleFiring) -> None:
        run.control.stop(f"{self.name} on {firing.trigger}")

    def shoulder(self) -> None:
        raise AssertionError

    @property
    def should_not(self) -> Any:
        raise AssertionError


def test_actions_are_methods_with_a_name_after_should() -> None:
    class More(Custom):
        def should_do_more(self, run: Run, firing: RuleFiring) -> None:
            pass

    assert list(Custom("mine").actions()) == ["should_act"]
    assert list(More("mine").actions()) == ["should_act", "should_do_more"]
    run: Any = SimpleNamespace(control=Control(Progress()))
    More("mine").actions()["should_act"](run, firing())
    assert run.control.stop_request.reason == "mine on on_step_end"
    assert Custom("mine").state_dict() == {}


@pytest.mark.parametrize("length", [10, 163, 164, 165, 5000])
def test_a_reason_is_bounded(length: int) -> None:
    reason = firing("x" * length).reason
    assert_facts(reason, "rule 'mine'", "on_step_end: xxx")
    assert len(reason) == min(200, 28 + length)
    assert reason.endswith("...") == (length > 172)


def test_a_reason_is_one_line() -> None:
    assert firing("loss <\n  1\n").reason == firing("loss < 1").reason


def test_a_function_is_called_with_what_the_file_gives() -> None:
    calls: list[Any] = []

    def remember(run: Run, firing: RuleFiring, word: str, *, number: int = 1) -> None:
        calls.append((run, firing, word, number))

    run, fired = SimpleNamespace(), firing()
    for function in ("remember", remember):
        operation = CallFunction("call", function=function, word="hello", number=2)
        operation.bind({"remember": remember})
        assert list(operation.actions()) == ["should_call"]
        operation.actions()["should_call"](run, fired)
    assert calls == [(run, fired, "hello", 2)] * 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, r"\(run, firing\): missing .*'word'"),
        ({"word": "a", "size": 2}, r"size=...\): .*unexpected.*'size'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_load(arguments: dict[str, Any], problem: str) -> None:
    def remember(run: Run, firing: RuleFiring, word: str) -> None:
        raise AssertionError

    operation = CallFunction("call", function="remember", **arguments)
    with pytest.raises(RuleTypeError, match=problem):
        operation.bind({"remember": remember})


def test_a_function_of_pythons_own_that_does_not_show_its_arguments() -> None:
    held = {1: "there"}
    operation = CallFunction("call", function=held.pop)
    operation.bind({})
    run: Any = 1
    fired: Any = 2
    operation.actions()["should_call"](run, fired)  # held.pop(1, 2)
    assert held == {}


def test_a_function_that_is_none_is_refused_at_load() -> None:
    with pytest.raises(RuleTypeError, match="got 3"):
        CallFunction("call", function=3)  # type: ignore[arg-type]
    with pytest.raises(RuleKeyError, match=r"Undefined function 'remembr'\. Did"):
        CallFunction("call", function="remembr").bind({"remember": print})


def test_a_save_is_final_where_it_was_asked_for_after_the_end() -> None:
    ending = EndTracker()
    save, over = (kind() for kind in EndTracker.EVENTS)
    received = []
    for event in (StepEnd(), save, over, StepEnd(), save):
        ending.handle(event)
        received.append(ending.is_final)
    assert received == [False, False, False, False, True]


@pytest.mark.parametrize("action", ["should_veto_save", "should_withdraw_save"])
def test_a_rule_takes_a_save_back(action: str, tmp_path: Path) -> None:
    """Of those after steps 2, 4 and 6, where the validation's loss is above a limit."""
    operations = [f"hfcontrols.{action}"]
    source = rules(controller("evalmetric.eval_loss > 1", triggers=["on_evaluate"], operations=operations))
    every, saved = Every(steps=2), list[int]()
    schedules = [SaveSchedule(every, at_end=False), ValidationSchedule(every, at_end=False), Checkpoint(tmp_path)]
    trainer = Trainer([*schedules, RuleController(source)], device="cpu")
    trainer.bus.on(SavePoint, lambda run, event: saved.append(run.progress.steps))
    task = Scripted((1.0,), (0.5, 2.0, 0.5))
    optimizer = torch.optim.SGD(task.model.parameters())
    result = trainer.fit(task, data(6), validation=data(1), optimizer=optimizer, epochs=1)
    assert saved == [2, 6]
    (taken,) = [each for each in result.history if each.by == "rule_controller"]
    assert (taken.verb, taken.step) == (action.removeprefix("should_"), 4)
