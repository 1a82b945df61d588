from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from heliograph import Plugin, Trainer, TrainRun, on
from heliograph.events import (
    BatchEnd,
    BatchStart,
    Control,
    EpochEnd,
    Event,
    GradientsReady,
    History,
    Log,
    Progress,
    Request,
    Run,
    SavePoint,
    ShouldStop,
    StepEnd,
    TrainEnd,
    TrainStart,
    ValidationEnd,
)
from heliograph.events import control as control_module
from heliograph.tests.kit import class_batches, go_through, make_run
from heliograph.tests.messages import assert_each, assert_facts


class Custom(Event):
    """A third party's event."""


class Place:
    """Of which event a handler seems to run: the tests ask for things outside of any."""

    event = ""

    def is_within(self, *names: str) -> bool:
        """Stand for the look at the stack."""
        return "".join(f"_{each.lower()}" if each.isupper() else each for each in self.event)[1:] in names


PLACE = Place()


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch) -> None:
    PLACE.event = ""
    monkeypatch.setattr(control_module, "is_within", PLACE.is_within)


@pytest.fixture
def control() -> Control:
    return Control(Progress())


def fit(trainer: Trainer, batches: int = 4, epochs: int = 2) -> TrainRun:
    """Train in a loop of our own, so that the run can be looked at afterwards."""
    trainer.plugins.register(Asker())
    return go_through(make_run(trainer, batches, epochs, validation=class_batches(1)))


class Asker(Plugin):
    """Declares that it asks for validations; asks for nothing."""

    asks = ("validation",)

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None: ...


def test_a_fresh_control_asks_for_nothing(control: Control) -> None:
    properties = ("should_stop", "should_end_epoch", "should_log", "should_validate", "should_save")
    assert [getattr(control, name) for name in properties] == [False] * 5
    flags = ("skips_batch", "holds_step", "drops_step", "touched", "pending", "stopped", "leaving")
    assert [getattr(control, name) for name in flags] == [False] * 7
    assert (control.loss_scale, control.stop_request, list(control.history)) == (1.0, None, [])
    assert str(control.history) == "no requests"


# Lifetimes.


def test_a_stop_lives_until_the_run_ends(control: Control) -> None:
    control.stop("enough")
    assert (control.should_stop, control.pending, control.stopped) == (True, True, False)
    control.close_batch()
    control.close_epoch()
    assert (control.should_stop, control.stopped) == (True, False)
    control.decide()
    assert (control.should_stop, control.stopped, control.leaving, control.pending) == (True, True, True, True)


def test_the_first_stop_wins_and_all_are_remembered(control: Control) -> None:
    control.stop("first", by="a")
    control.stop("second", by="b")
    assert control.stop_request is not None
    assert (control.stop_request.by, control.stop_request.reason) == ("a", "first")
    assert [(each.by, each.reason) for each in control.history] == [("a", "first"), ("b", "second")]


def test_an_end_of_the_epoch_lives_until_the_epoch_ends(control: Control) -> None:
    control.end_epoch("enough of it")
    assert (control.should_end_epoch, control.pending, control.leaving) == (True, True, False)
    control.close_batch()
    control.decide()
    assert (control.should_end_epoch, control.leaving, control.stopped) == (True, True, False)
    control.close_epoch()
    assert not control.should_end_epoch
    control.decide()
    assert (control.leaving, control.pending) == (False, False)


@pytest.mark.parametrize(
    ("verb", "stage", "flag"),
    [
        ("skip_batch", "BatchStart", "skips_batch"),
        ("hold_step", "BatchStart", "holds_step"),
        ("skip_step", "GradientsReady", "drops_step"),
    ],
)
def test_what_is_asked_for_a_batch_lives_until_the_batch_ends(
    control: Control, verb: str, stage: str, flag: str
) -> None:
    PLACE.event = stage
    getattr(control, verb)("for a test")
    assert (getattr(control, flag), control.touched, control.pending) == (True, True, False)
    control.decide()
    control.close_epoch()
    assert getattr(control, flag)
    control.close_batch()
    assert (getattr(control, flag), control.touched) == (False, False)


def test_factors_on_the_loss_multiply_until_the_batch_ends(control: Control) -> None:
    PLACE.event = "BatchStart"
    control.scale_loss(0.5, "halve")
    control.scale_loss(3, "treble")
    assert (control.loss_scale, control.touched) == (1.5, True)
    control.close_batch()
    assert (control.loss_scale, control.touched) == (1.0, False)


@pytest.mark.parametrize(
    ("verb", "name", "question"),
    [
        ("request_log", "log", "should_log"),
        ("request_validation", "validation", "should_validate"),
        ("request_save", "save", "should_save"),
    ],
)
def test_a_boundary_request_lives_until_it_is_served_once(
    control: Control, verb: str, name: str, question: str
) -> None:
    getattr(control, verb)("it is time")
    getattr(control, verb)("now, says another")
    control.close_batch()
    control.close_epoch()
    control.decide()
    assert (getattr(control, question), control.pending, control.leaving) == (True, True, False)
    assert control.pop_request(name) is True  # type: ignore[arg-type]
    assert control.pop_request(name) is False  # type: ignore[arg-type]
    assert not getattr(control, question)
    control.decide()
    assert not control.pending
    assert [each.verb for each in control.history] == [name, name]


def test_serving_one_request_leaves_the_others(control: Control) -> None:
    control.request_log("now")
    control.request_save("now")
    assert control.pop_request("validation") is False
    assert control.pop_request("log") is True
    assert (control.should_log, control.should_save) == (False, True)


def test_a_veto_lasts_for_one_boundary_and_the_stop_stands_again(control: Control) -> None:
    control.stop("enough")
    PLACE.event = "ShouldStop"
    control.veto_stop("too early")
    control.decide()
    assert (control.stopped, control.leaving, control.should_stop, control.pending) == (False, False, True, True)
    control.veto_stop("still too early")
    control.decide()
    assert control.stopped is False
    control.decide()
    assert (control.stopped, control.leaving) == (True, True)


def test_a_veto_does_not_hold_the_end_of_an_epoch(control: Control) -> None:
    control.stop("enough")
    control.end_epoch("over")
    PLACE.event = "ShouldStop"
    control.veto_stop("too early")
    control.decide()
    assert (control.stopped, control.leaving) == (False, True)


def test_a_veto_without_a_stop_does_not_hinder_a_later_one(control: Control) -> None:
    PLACE.event = "ShouldStop"
    control.veto_stop("just in case")
    control.decide()
    control.stop("enough")
    control.decide()
    assert control.stopped


def test_no_other_method_resets_anything(control: Control) -> None:
    control.stop("stop")
    control.end_epoch("end")
    control.request_log("log")
    PLACE.event = "BatchStart"
    control.skip_batch("skip")
    control.close_batch()
    assert (control.should_stop, control.should_end_epoch, control.should_log) == (True, True, True)
    control.skip_batch("skip")
    control.close_epoch()
    assert (control.should_stop, control.should_end_epoch, control.should_log) == (True, False, True)
    assert control.skips_batch
    control.pop_request("log")
    assert (control.should_stop, control.should_log, control.skips_batch) == (True, False, True)


# Verbs out of their event, and bad reasons.


@pytest.mark.parametrize("stage", ["", "BatchStart", "GradientsReady", "ShouldStop"])
@pytest.mark.parametrize(
    ("verb", "event"),
    [
        ("skip_batch", "BatchStart"),
        ("hold_step", "BatchStart"),
        ("skip_step", "GradientsReady"),
        ("veto_stop", "ShouldStop"),
        ("scale_loss", "BatchStart"),
    ],
)
def test_a_verb_out_of_its_event_says_where_it_belongs(control: Control, verb: str, event: str, stage: str) -> None:
    PLACE.event = stage
    arguments = (2.0, "reason") if verb == "scale_loss" else ("reason",)
    if stage == event:
        getattr(control, verb)(*arguments)
        assert [each.verb for each in control.history] == [verb]
        return
    sentence = rf"^control\.{verb} .*handler of {event}\.$"
    with pytest.raises(RuntimeError, match=sentence):
        getattr(control, verb)(*arguments)
    assert (list(control.history), control.touched, control.loss_scale) == ([], False, 1.0)


def test_a_reason_for_taking_back_is_a_string(control: Control) -> None:
    with pytest.raises(TypeError, match=r"string, got None\.$"):
        control.withdraw("save", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "verb", ["stop", "end_epoch", "request_log", "request_validation", "request_save", "skip_batch", "hold_step"]
)
def test_a_reason_is_a_string(control: Control, verb: str) -> None:
    PLACE.event = "BatchStart"
    with pytest.raises(TypeError, match=r"string, got 3\.$"):
        getattr(control, verb)(3)
    assert (list(control.history), control.pending, control.touched) == ([], False, False)
    with pytest.raises(TypeError, match="reason"):
        getattr(control, verb)()


def test_each_verb_is_allowed_in_its_event_of_a_real_run_only() -> None:
    refused: list[str] = []

    def ask(verb: str) -> Callable[[Run, Event], None]:
        def receive(run: Run, event: Event) -> None:
            try:
                getattr(run.control, verb)("test")
            except RuntimeError:
                refused.append(f"{verb} in {event.name}")

        return receive

    trainer = Trainer(device="cpu")
    events: list[type[Event]] = [BatchStart, GradientsReady, StepEnd, BatchEnd, ShouldStop, EpochEnd]
    for event in events:
        for verb in ("hold_step", "veto_stop"):
            trainer.bus.on(event, ask(verb))
    fit(trainer, batches=1, epochs=1)
    elsewhere = {f"hold_step in {event.name}" for event in events if event is not BatchStart}
    elsewhere |= {f"veto_stop in {event.name}" for event in events if event is not ShouldStop}
    assert set(refused) == elsewhere


# Who asked.


def stop_from_a_function(run: Run, event: Event) -> None:
    run.control.stop("said the function")


class Stopper(Plugin):
    """Asks through a helper of its own."""

    @on(StepEnd)
    def judge(self, run: Run, event: StepEnd) -> None:
        self._stop(run)

    def _stop(self, run: Run) -> None:
        run.control.stop("said the plugin")


def asker_of(run: TrainRun) -> str:
    assert run.control.stop_request is not None
    return run.control.stop_request.by


def test_a_function_is_found_out() -> None:
    trainer = Trainer(device="cpu")
    trainer.bus.on(StepEnd, stop_from_a_function)
    assert asker_of(fit(trainer)) == "stop_from_a_function"


def test_a_plugin_is_found_out_by_its_name() -> None:
    run = fit(Trainer([Stopper().named("judge_dredd")], device="cpu"))
    assert asker_of(run) == "judge_dredd"
    assert run.result.stopped_by == "judge_dredd"
    assert run.result.reason == "said the plugin"


def test_a_plugin_with_a_filter_is_found_out() -> None:
    class Filtered(Plugin):
        @on(StepEnd, when=lambda run: True)
        def judge(self, run: Run, event: StepEnd) -> None:
            run.control.stop("so")

    assert asker_of(fit(Trainer([Filtered()], device="cpu"))) == "filtered"


def test_a_wrapped_handler_is_found_out() -> None:
    trainer = Trainer([Stopper()], device="cpu")
    trainer.bus.intercept(lambda receiver, owner: lambda run, *, event: receiver(run, event=event))
    assert asker_of(fit(trainer)) == "stopper"


def test_the_innermost_handler_is_the_one_who_asked() -> None:
    trainer = Trainer(device="cpu")

    def announce(run: Run, event: StepEnd) -> None:
        run.emit(Custom())

    trainer.bus.on(StepEnd, announce)
    trainer.bus.on(Custom, stop_from_a_function)
    assert asker_of(fit(trainer)) == "stop_from_a_function"


def test_a_handler_of_the_last_event_is_found_out_too() -> None:
    trainer = Trainer(device="cpu")

    def late(run: Run, event: TrainEnd) -> None:
        run.control.request_log("the rest")

    trainer.bus.on(TrainEnd, late)
    run = fit(trainer)
    assert [(each.verb, each.by) for each in run.control.history] == [("log", late.__qualname__)]


def test_outside_any_handler_it_is_the_caller(run: TrainRun, control: Control) -> None:
    run.control.stop("by hand")
    assert asker_of(run) == "the caller"
    control.request_save("by hand")
    assert control.history[0].by == "the caller"


def test_the_event_is_noted_whose_handler_asked() -> None:
    run = fit(Trainer([Stopper()], device="cpu"))
    assert [(each.verb, each.event) for each in run.control.history] == [("stop", "step_end")]


def test_of_nested_events_the_innermost_is_noted() -> None:
    trainer = Trainer(device="cpu")

    def announce(run: Run, event: EpochEnd) -> None:
        run.emit(Custom())

    def ask(run: Run, event: Custom) -> None:
        run.control.request_log("innermost")

    trainer.bus.on(EpochEnd, announce)
    trainer.bus.on(Custom, ask)
    run = fit(trainer)
    assert {(each.verb, each.event) for each in run.control.history} == {("log", "custom")}


def test_an_event_is_noted_also_where_the_asker_is_given() -> None:
    trainer = Trainer(device="cpu")

    def ask(run: Run, event: EpochEnd) -> None:
        run.control.request_log("in another's name", by="a friend")

    trainer.bus.on(EpochEnd, ask)
    assert [(each.by, each.event) for each in fit(trainer).control.history] == [("a friend", "epoch_end")] * 2


def test_outside_any_handler_no_event_is_noted(run: TrainRun, control: Control) -> None:
    run.control.stop("by hand")
    control.request_save("by hand")
    assert [run.control.history[0].event, control.history[0].event] == ["", ""]


def test_an_explicit_asker_is_believed() -> None:
    trainer = Trainer(device="cpu")

    def receive(run: Run, event: StepEnd) -> None:
        run.control.stop("why not", by="somebody else")

    trainer.bus.on(StepEnd, receive)
    assert asker_of(fit(trainer)) == "somebody else"


def test_a_plugin_that_leaves_is_still_found_out() -> None:
    trainer = Trainer(device="cpu")

    class Leaving(Plugin):
        @on(StepEnd)
        def judge(self, run: Run, event: StepEnd) -> None:
            trainer.plugins.disable("leaving")
            run.control.stop("my last word")

    trainer.plugins.register(Leaving())
    assert asker_of(fit(trainer)) == "leaving"


def test_a_plugin_is_found_out_when_another_one_left_before_it() -> None:
    trainer = Trainer(device="cpu")

    class First(Plugin):
        @on(StepEnd)
        def judge(self, run: Run, event: StepEnd) -> None:
            trainer.plugins.disable("first")

    class Second(Plugin):
        @on(StepEnd, when=lambda run: True)
        def judge(self, run: Run, event: StepEnd) -> None:
            run.control.stop("so")

    for plugin in (First(), Second()):
        trainer.plugins.register(plugin)
    assert asker_of(fit(trainer)) == "second"


# The history.


def test_the_history_keeps_the_order_and_says_where_the_run_was() -> None:
    progress = Progress(epoch=2, batch=5, steps=21)
    control = Control(progress)
    control.request_log("time", by="log_schedule")
    progress.batch, progress.steps = 6, 22
    control.stop("done", by="early_stopping")
    assert list(control.history) == [
        Request("log", "log_schedule", "time", 2, 5, 21),
        Request("stop", "early_stopping", "done", 2, 6, 22),
    ]
    assert_each(
        str(control.history).splitlines(),
        ("epoch 2", "batch 5", "step 21", "log_schedule: log", "time"),
        ("epoch 2", "batch 6", "step 22", "early_stopping: stop", "done"),
    )


def test_repeated_requests_for_a_batch_and_vetoes_are_counted_on_one_line(control: Control) -> None:
    PLACE.event = "BatchStart"
    for _ in range(3):
        control.hold_step("accumulating", by="accumulation")
        control.scale_loss(0.25, "accumulating", by="accumulation")
    control.hold_step("another reason", by="accumulation")
    control.hold_step("accumulating", by="another")
    PLACE.event = "ShouldStop"
    for _ in range(2):
        control.veto_stop("too early", by="minimum")
    assert [(each.verb, each.by, each.times) for each in control.history] == [
        ("hold_step", "accumulation", 3),
        ("scale_loss", "accumulation", 3),
        ("hold_step", "accumulation", 1),
        ("hold_step", "another", 1),
        ("veto_stop", "minimum", 2),
    ]
    lines = str(control.history).splitlines()
    place = ("epoch 0", "batch 0", "step 0")
    assert_facts(lines[0], *place, "accumulation: hold_step (x3)", "accumulating")
    assert_facts(lines[2], *place, "accumulation: hold_step ", "another reason")


def test_other_requests_are_listed_one_by_one(control: Control) -> None:
    PLACE.event = "BatchStart"
    for _ in range(2):
        control.request_log("time")
        control.stop("enough")
        control.skip_batch("bad")
    assert [each.verb for each in control.history] == ["log", "stop", "skip_batch"] * 2
    assert {each.times for each in control.history} == {1}


def test_the_history_escapes_control_characters(control: Control) -> None:
    control.stop("\x1b[2Jdone\nepoch 9 batch 9 step 9  me: stop - never\r")
    text = str(control.history)
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    assert "\\x1b[2Jdone" in str(control.history[0])


def test_the_history_keeps_the_latest_ten_thousand() -> None:
    progress = Progress()
    control = Control(progress)
    for step in range(10_003):
        progress.steps = step
        control.request_log("time", by="a")
    assert len(control.history) == 10_000
    assert (control.history[0].step, control.history[-1].step) == (3, 10_002)


def test_the_history_counts_what_it_no_longer_keeps() -> None:
    control = Control(Progress())
    for _ in range(10_003):
        control.request_log("time", by="a")
    assert (len(control.history), control.history.total) == (10_000, 10_003)


def test_the_history_counts_a_repeated_request_once(control: Control) -> None:
    PLACE.event = "BatchStart"
    for _ in range(3):
        control.hold_step("accumulating", by="a")
    control.hold_step("another reason", by="a")
    assert control.history.total == 2


def test_the_count_of_a_history_is_copied_and_sent() -> None:
    request = Request("log", "a", "time", 0, 0, 0)
    history = History([request], maxlen=2)
    for step in range(4):
        history.add(Request("log", "a", "time", 0, 0, step))
    for copied in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        assert (list(copied), copied.total) == (list(history), 5)


def test_a_counted_request_that_fell_off_the_end_is_listed_again() -> None:
    control = Control(Progress())
    PLACE.event = "BatchStart"
    control.hold_step("accumulating", by="a")
    for _ in range(10_000):
        control.request_log("time", by="b")
    control.hold_step("accumulating", by="a")
    assert (control.history[-1].verb, control.history[-1].times) in {("hold_step", 1), ("hold_step", 2)}


def test_the_history_is_plain_data_that_can_be_copied_and_sent() -> None:
    control = Control(Progress())
    control.stop("enough", by="a")
    expected = [Request("stop", "a", "enough", 0, 0, 0)]
    for history in (
        copy.copy(control.history),
        copy.deepcopy(control.history),
        pickle.loads(pickle.dumps(control.history)),
    ):
        assert isinstance(history, History)
        assert list(history) == expected


def test_a_control_of_a_new_run_is_fresh(run: TrainRun, another_run: Callable[[], TrainRun]) -> None:
    run.control.stop("enough")
    other = another_run()
    assert other.control is not run.control
    assert (other.control.should_stop, list(other.control.history)) == (False, [])


def test_the_boundary_serves_in_order_and_a_request_from_any_event_is_not_lost() -> None:
    received: list[str] = []
    trainer = Trainer(device="cpu")

    def ask(run: Run, event: StepEnd) -> None:
        if run.progress.steps == 1:
            run.control.request_save("test")
            run.control.request_validation("test")
            run.control.request_log("test")

    def ask_again(run: Run, event: ValidationEnd) -> None:
        if run.progress.steps == 1:
            run.control.request_log("from within a boundary")

    def note(run: Run, event: Log | ValidationEnd | SavePoint) -> None:
        received.append(f"{event.name} {run.progress.steps}")

    trainer.bus.on(StepEnd, ask)
    trainer.bus.on(ValidationEnd, ask_again)
    for kind in (Log, ValidationEnd, SavePoint):
        trainer.bus.on(kind, note)
    run = fit(trainer, batches=3, epochs=1)
    assert received == ["log 1", "validation_end 1", "save_point 1", "log 2"]
    assert (run.control.should_log, run.control.should_save, run.control.should_validate) == (False, False, False)
    assert [each.verb for each in run.control.history] == ["save", "validation", "log", "log"]


# A validation that is cut short, the state, and turning back.

CUT_BELONGS = r"^control\.cut_validation .* in a handler of a running validation or test\.$"


@pytest.mark.parametrize("stage", ["", "BatchStart", "ShouldStop", "RunClosed"])
def test_only_a_running_validation_can_be_cut_short(control: Control, stage: str) -> None:
    PLACE.event = stage
    with pytest.raises(RuntimeError, match=CUT_BELONGS):
        control.cut_validation("now")
    assert (control.cut_request, list(control.history)) == (None, [])
    control.is_evaluating = True
    control.cut_validation("now", by="me")
    assert control.cut_request == control.history[0] == Request("cut_validation", "me", "now", 0, 0, 0)
    assert (control.pending, control.should_validate) == (False, False)


def test_a_validation_that_was_cut_short_is_postponed_with_the_save_after_it(control: Control) -> None:
    control.is_evaluating = True
    control.request_save("after it")
    control.cut_validation("no time")
    assert control.close_validation() is control.history[-1]
    assert (control.cut_request, control.should_validate, control.should_save) == (None, False, True)
    assert control.pop_request("save") is True
    assert control.state_dict() == {
        "due": ["save", "validation"],
        "postponed": ["save", "validation"],
        "end_epoch": False,
    }
    control.decide()
    assert control.pending is False


def test_a_whole_validation_makes_up_for_one_that_was_postponed(control: Control) -> None:
    control.is_evaluating = True
    control.cut_validation("no time")
    control.close_validation()
    assert control.state_dict()["due"] == ["validation"]
    assert control.close_validation() is None
    assert control.state_dict() == {"due": [], "postponed": [], "end_epoch": False}


def test_pending_requests_are_restored_with_who_asked_and_why(control: Control) -> None:
    verbs = "log", "validation", "save", "stop", "end_epoch"
    for verb in verbs:
        ask = getattr(control, verb, None) or getattr(control, f"request_{verb}")
        ask(f"why {verb}", by=f"who {verb}")
    control.pop_request("save")
    state = control.state_dict()
    assert (state["due"], state["postponed"], state["end_epoch"]) == (["log", "validation"], [], True)
    other = Control(Progress())
    other.request_save("of its own")
    other.load_state_dict(state)
    assert (other.should_log, other.should_validate, other.should_save, other.should_end_epoch) == (True,) * 4
    assert (other.should_stop, other.pending, [request.verb for request in other.history]) == (True, True, ["save"])
    asked = {verb: (request.by, request.reason) for verb, request in other.open_requests().items()}
    assert asked == {verb: (f"who {verb}", f"why {verb}") for verb in verbs} | {"save": ("the caller", "of its own")}


def load(state: dict[str, Any]) -> Control:
    control = Control(Progress())
    control.load_state_dict(state, at_save_point=True)
    control.release()
    return control


def test_a_saved_stop_applies_again_if_it_was_vetoed_before_or_is_vetoed_now(control: Control) -> None:
    control.stop("enough")
    fresh = control.state_dict()
    PLACE.event = "ShouldStop"
    control.veto_stop("too early")
    control.decide()
    vetoed = control.state_dict()

    taking_effect = load(vetoed)
    taking_effect.decide()
    assert (taking_effect.stopped, taking_effect.should_stop) == (True, True)
    vetoed_now = load(fresh)
    vetoed_now.veto_stop("too early")
    vetoed_now.decide()
    assert (vetoed_now.stopped, vetoed_now.should_stop) == (False, True)
    vetoed_now.decide()
    assert vetoed_now.stopped


def test_a_stop_that_ended_the_saved_run_does_not_end_the_resumed_one(control: Control) -> None:
    control.stop("enough")
    resumed = load(control.state_dict())
    resumed.decide()
    assert (resumed.stopped, resumed.should_stop, resumed.pending) == (False, False, False)
    control.decide()
    assert "stop" not in control.state_dict()

    asks_again = load(Control(Progress()).state_dict())
    asks_again.stop("of its own")
    asks_again.decide()
    assert asks_again.stopped


@pytest.mark.parametrize("is_vetoed", [False, True])
def test_a_stop_of_a_training_that_is_over_is_saved_only_if_it_was_vetoed(control: Control, is_vetoed: bool) -> None:
    control.stop("enough")
    if is_vetoed:
        PLACE.event = "ShouldStop"
        control.veto_stop("too early")
        control.decide()
    assert ("stop" in control.state_dict(is_over=True)) == is_vetoed


def test_a_required_stop_is_no_state_since_the_resumed_run_has_another_machine(control: Control) -> None:
    control.stop("the machine goes", required=True)
    PLACE.event = "ShouldStop"
    control.veto_stop("too early")
    control.decide()
    assert "stop" not in control.state_dict()


def test_a_new_stop_replaces_one_that_ended_the_saved_run(control: Control) -> None:
    control.stop("enough")
    resumed = load(control.state_dict())
    resumed.stop("of its own")
    resumed.decide()
    assert resumed.stopped
    assert resumed.stop_request is not None
    assert resumed.stop_request.reason == "of its own"


def test_a_veto_of_a_save_is_restored_unless_its_boundary_is_over(control: Control) -> None:
    control.veto_save("no improvement")
    state = control.state_dict()
    other = Control(Progress())
    other.load_state_dict(state)
    other.request_save("due")
    assert not other.pop_request("save")
    later = load(state)
    later.request_save("due")
    assert later.pop_request("save")


def test_what_was_due_after_a_boundary_stands_when_the_rest_of_that_boundary_is_done() -> None:
    control = Control(Progress())
    state = {"due": ["log", "save", "validation"], "postponed": ["validation"], "end_epoch": False}
    control.load_state_dict(state, at_save_point=True)
    assert (control.should_validate, control.should_log, control.should_save) == (True, False, False)
    assert control.state_dict()["due"] == ["log", "save", "validation"]

    assert control.pop_request("validation")
    control.release()
    control.decide()
    assert (control.should_validate, control.should_log, control.should_save) == (False, True, True)
    assert control.pending


def test_an_empty_state_asks_for_nothing(control: Control) -> None:
    state = control.state_dict()
    control.load_state_dict(state)
    assert (control.pending, state) == (False, {"due": [], "postponed": [], "end_epoch": False})


def test_before_the_run_turns_back_nothing_is_served_and_nothing_decided(control: Control) -> None:
    control.request_log("due")
    control.stop("enough")
    control.roll_back("to a.pth")
    assert (control.is_rolling_back, control.pending, control.pop_request("log")) == (True, True, False)
    control.decide()
    assert (control.leaving, control.stopped, control.pending) == (True, False, True)
    assert [(each.verb, each.reason) for each in control.history][-1] == ("roll_back", "to a.pth")


@pytest.mark.parametrize("stops", [False, True])
def test_turning_back_forgets_all_but_a_stop(control: Control, stops: bool) -> None:
    control.request_validation("due")
    control.end_epoch("over")
    PLACE.event = "BatchStart"
    control.skip_batch("bad")
    if stops:
        control.stop("enough")
    control.roll_back("to a.pth")
    control.decide()
    control.discard_epoch()
    assert (control.should_validate, control.should_end_epoch, control.skips_batch, control.touched) == (False,) * 4
    assert (control.is_rolling_back, control.leaving) == (False, False)
    assert (control.should_stop, control.pending) == (stops, stops)
    state = control.state_dict()
    assert (state["due"], state["postponed"], state["end_epoch"]) == ([], [], False)


def test_a_watcher_of_the_history_receives_each_request_but_not_each_repetition() -> None:
    control, received = Control(Progress()), list[int]()
    control.history.watcher = lambda: received.append(control.history.total)
    control.stop("once", by="me")
    PLACE.event = "BatchStart"
    for _ in range(3):
        control.hold_step("always", by="me")
    assert received == [1, 2]
