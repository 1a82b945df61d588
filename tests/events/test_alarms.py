"""Receivers that say until which count they are idle, and filters, which say it of themselves."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any, cast

import pytest
from heliograph import At, Between, Every, Filter, Once, Plugin, Trainer, on
from heliograph.events import BatchEnd, Bus, Lane, Log, OrderedSignal, Progress, Run
from heliograph.events.alarms import Alarm
from heliograph.events.bus import Subscription
from heliograph.tests.kit import class_batches, fit
from heliograph.tests.messages import assert_each
from hypothesis import given
from hypothesis import strategies as st

BATCH_END, STEPS, BATCHES = BatchEnd(), attrgetter("steps"), attrgetter("batches")
DONE = -1.0  # idle until that: always called


class Place:
    """As much of a run as is read."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.origin = self.progress.copy()


class Counting:
    """A receiver that notes the steps at which it is called, and when it is asked until when it is idle."""

    def __init__(self, count: Callable[[Progress], float] = STEPS, due: float | None = DONE) -> None:
        self.count, self.due = count, due
        self.calls: list[int] = []
        self.asked: list[int] = []

    def receive(self, run: Place, event: BatchEnd) -> None:
        self.calls.append(run.progress.steps)

    def until(self, run: Place) -> Alarm | None:
        self.asked.append(run.progress.steps)
        return None if self.due is None else (self.count, self.due)


def connect(bus: Bus, *receivers: Counting, lane: Lane = Lane.DECIDE) -> OrderedSignal[BatchEnd]:
    signal = bus.signal(BatchEnd)
    for each in receivers:
        signal.connect(each.receive, weak=False, subscription=Subscription((lane,), idle_until=each.until))
    return signal


def emit(signal: OrderedSignal[BatchEnd], place: Place, steps: range) -> None:
    for place.progress.steps in steps:
        place.progress.batch += 1
        signal.emit(cast(Run, place), BATCH_END)


def test_an_idle_receiver_is_called_from_its_count_on() -> None:
    idle, awake = Counting(due=4), Counting()
    signal = connect(Bus(), idle)
    signal.connect(awake.receive, weak=False, subscription=Subscription((Lane.REPORT,)))
    emit(signal, Place(), range(1, 6))

    assert idle.calls == [4, 5]
    assert awake.calls == [1, 2, 3, 4, 5]
    assert idle.asked == [1, 5]


def test_where_one_is_due_all_are_called_and_asked_again() -> None:
    """They ask their own filters then, as they would without alarms."""
    first, second, third = Counting(due=3), Counting(BATCHES, due=5), Counting(due=9)
    signal = connect(Bus(), first, second, third)
    place = Place()
    emit(signal, place, range(1, 4))
    first.due = 100
    emit(signal, place, range(4, 8))

    assert first.calls == second.calls == third.calls == [3, 5, 6, 7]
    assert third.asked == [1, 4, 6, 7]


def test_one_that_does_not_know_is_called_each_time_and_it_alone() -> None:
    one, other = Counting(due=None), Counting(due=100)
    emit(connect(Bus(), one, other), Place(), range(1, 4))
    assert one.calls == [1, 2, 3]
    assert other.calls == []
    assert one.asked == other.asked == [1]


def test_one_that_did_not_know_is_asked_again_with_the_others() -> None:
    one, other = Counting(due=None), Counting(due=2)
    signal, place = connect(Bus(), one, other), Place()
    emit(signal, place, range(1, 3))
    one.due, other.due = 5, 100
    emit(signal, place, range(3, 7))

    assert one.calls == [1, 2, 5, 6]
    assert other.calls == [2, 5, 6]
    assert one.asked == other.asked == [1, 3, 6]


def test_another_origin_forgets_what_was_known() -> None:
    """A run that was resumed, or that went back, may be far before the count."""
    idle = Counting(due=4)
    signal, place = connect(Bus(), idle), Place()
    emit(signal, place, range(1, 3))
    place.origin, idle.due = place.progress.copy(), 2
    emit(signal, place, range(1, 3))
    emit(signal, Place(), range(1, 2))

    assert idle.calls == [2]
    assert idle.asked == [1, 1, 1]


def test_the_order_stays_the_same() -> None:
    order: list[str] = []
    bus = Bus()

    def say(name: str, due: float | None, lane: Lane) -> None:
        until = None if due is None else lambda run: (STEPS, due)
        receiver: Any = lambda run, event: order.append(name)  # noqa: E731
        bus.signal(BatchEnd).connect(receiver, weak=False, subscription=Subscription((lane,), idle_until=until))

    say("report", 2, Lane.REPORT)
    say("decide", 3, Lane.DECIDE)
    say("always", None, Lane.PERSIST)
    emit(bus.signal(BatchEnd), Place(), range(1, 3))
    assert order == ["always", "decide", "always", "report"]


def test_pausing_and_moving_begin_anew() -> None:
    idle, awake = Counting(due=2), Counting()
    signal, place = connect(Bus(), idle), Place()
    signal.connect(awake.receive, weak=False, subscription=Subscription((Lane.REPORT,)))
    emit(signal, place, range(1, 2))
    signal.pause(idle.receive, paused=True)
    emit(signal, place, range(2, 4))
    idle.due = 5
    signal.pause(idle.receive, paused=False)
    signal.move([(idle.receive, (Lane.TRANSFORM, 0))])
    emit(signal, place, range(4, 7))

    assert idle.calls == [5, 6]
    assert awake.calls == [1, 2, 3, 4, 5, 6]


def test_a_clock_that_a_handler_sets_is_not_waited_for() -> None:
    """A recorder sets it at each batch for all handlers after it, of the same emission."""
    bus, place, calls = Bus(), Place(), list[int]()

    def set_clock(run: Place, event: BatchEnd) -> None:
        run.progress.set_seconds(run.progress.steps)

    def note(run: Place, event: BatchEnd) -> None:
        calls.append(run.progress.steps)

    bus.on(BatchEnd, cast(Any, set_clock), lane=Lane.TRANSFORM)
    bus.on(BatchEnd, cast(Any, note), when=Every(seconds=2))
    emit(bus.signal(BatchEnd), place, range(1, 7))
    assert calls == [2, 4, 6]


def test_an_attribute_of_that_name_that_cannot_be_called_means_nothing() -> None:
    calls: list[int] = []

    class OwnFilter:
        idle_until = 5

        def __call__(self, run: Run) -> bool:
            return run.progress.steps % 2 == 0

    bus = Bus()
    bus.on(BatchEnd, lambda run, event: calls.append(run.progress.steps), when=OwnFilter())
    emit(bus.signal(BatchEnd), Place(), range(1, 5))
    assert calls == [2, 4]


def test_a_filter_that_counts_in_its_own_way_is_asked_by_its_own_count() -> None:
    class OfHalves(Every):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._count = lambda progress: progress.steps * 2

    calls: list[int] = []
    bus = Bus()
    bus.on(BatchEnd, lambda run, event: calls.append(run.progress.steps), when=OfHalves(steps=4))
    emit(bus.signal(BatchEnd), Place(), range(1, 9))
    assert calls == [2, 4, 6, 8]


FILTERS = st.one_of(
    st.builds(lambda n, after: Every(steps=n, after=after), st.integers(1, 9), st.none() | st.integers(1, 20)),
    st.builds(lambda n: Every(batches=n), st.integers(1, 9)),
    st.builds(lambda n: Every(emissions=n), st.integers(1, 9)),
    st.builds(lambda values: At(samples=values), st.lists(st.integers(1, 60), min_size=1, max_size=4)),
    st.builds(lambda low, more: Between(steps=(low, low + more)), st.integers(1, 20), st.integers(0, 9)),
    st.builds(Once),
)
MOVES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.booleans()), max_size=30)


@given(st.lists(FILTERS, min_size=1, max_size=4), MOVES)
def test_filters_let_through_what_they_would_if_they_were_asked_each_time(
    filters: list[Filter], moves: list[tuple[int, int, bool]]
) -> None:
    bus, place = Bus(), Place()
    expected, got = list[tuple[int, int]](), list[tuple[int, int]]()
    own = deepcopy(filters)
    for number, each in enumerate(filters):
        bus.on(BatchEnd, lambda run, event, number=number: got.append((number, run.progress.batch)), when=each)
    for steps, samples, is_resumed in moves:
        place.progress.batch += 1
        place.progress.steps += steps
        place.progress.samples += samples
        if is_resumed:
            place.origin = place.progress.copy()
        run = cast(Run, place)
        expected += [(number, place.progress.batch) for number, each in enumerate(own) if each(run)]
        bus.signal(BatchEnd).emit(run, BATCH_END)

    assert got == expected


def test_a_filter_is_not_asked_before_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = Filter.__call__

    def count(self: Filter, run: Run) -> bool:
        asked.append(run.progress.steps)
        return ask(self, run)

    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: None, when=Every(steps=10))
    monkeypatch.setattr(Filter, "__call__", count)
    fit(trainer, train=class_batches(25))
    assert asked == [1, 10, 20]


class Idle(Plugin):
    """Has nothing to do before step 3."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def next_due(self, run: Run) -> Alarm:
        return STEPS, 3

    @on(BatchEnd, idle_until="next_due")
    def note(self, run: Run, event: BatchEnd) -> None:
        self.calls.append(run.progress.steps)


def test_a_plugin_names_what_says_until_when_a_handler_is_idle() -> None:
    plugin = Idle()
    fit(plugin, train=class_batches(5))
    assert plugin.calls == [3, 4, 5]


def test_a_condition_is_asked_at_every_event_so_its_plugin_is_never_idle() -> None:
    asked: list[int] = []

    def holds(run: Run) -> bool:
        asked.append(run.progress.steps)
        return run.progress.steps > 1

    plugin = Idle()
    fit(plugin.when(holds), train=class_batches(5))
    assert asked == [1, 2, 3, 4, 5]
    assert plugin.calls == [2, 3, 4, 5]


class Failing(Idle):
    def next_due(self, run: Run) -> Alarm:
        raise ValueError(f"asked at step {run.progress.steps}")


class FailingObserver(Failing):
    policy = "observer"


def test_an_error_in_it_is_one_of_the_handler() -> None:
    plugin = Failing()
    trainer = Trainer([plugin], device="cpu")
    with pytest.raises(ValueError, match="asked at step 1") as raised:
        fit(trainer)
    assert any("failing on batch_end" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("answer", [5, (STEPS, 5, 6), ("steps",), ("steps", 5), (5, 10), (STEPS, "5"), (STEPS, None)])
def test_an_answer_of_another_form_is_an_error_that_says_which_is_expected(answer: Any) -> None:
    class Wrong(Idle):
        def next_due(self, run: Run) -> Any:
            return answer

    with pytest.raises(TypeError) as raised:
        fit(Wrong())
    name = Wrong.__qualname__
    assert str(raised.value).startswith(f"{name}.next_due returned {answer!r}: ")
    assert "(attrgetter('steps'), 1000)" in str(raised.value)
    assert any(f"idle_until of {Idle.__name__}.note," in line for line in raised.value.__notes__)


def test_an_observer_s_count_that_cannot_be_called_is_listed() -> None:
    class Wrong(FailingObserver):
        def next_due(self, run: Run) -> Any:
            return "steps", 10

    plugin = Wrong()
    (error,) = fit(plugin, train=class_batches(3)).plugin_errors["wrong"]
    assert "returned ('steps', 10):" in error
    assert plugin.calls == [1, 2, 3]


def test_an_error_of_an_observer_is_listed_and_its_handler_is_called() -> None:
    plugin = FailingObserver()
    result = fit(plugin, train=class_batches(3))
    assert list(result.plugin_errors) == ["failing_observer"]
    assert_each(result.plugin_errors["failing_observer"], ("batch_end", "step 1", "ValueError: asked at"))
    assert plugin.calls == [1, 2, 3]


def test_while_it_is_asked_no_handler_runs() -> None:
    class Asking(Idle):
        def next_due(self, run: Run) -> Alarm:
            if not run.control.history:
                run.control.request_log("somebody asks")
            return super().next_due(run)

    trainer = Trainer([Asking()], device="cpu")
    trainer.bus.on(Log, lambda run, event: None)
    assert [each.by for each in fit(trainer).history] == ["the caller"]


def test_a_mark_that_names_no_method_is_refused_and_nothing_is_left() -> None:
    class Wrong(Plugin):
        @on(BatchEnd, idle_until="next_duo")
        def note(self, run: Run, event: BatchEnd) -> None: ...

    trainer = Trainer(device="cpu")
    with pytest.raises(TypeError, match=r"Wrong\.note has idle_until='next_duo',"):
        trainer.plugins.register(Wrong())
    assert trainer.bus.receiver_count == len(trainer.plugins) == 0


def test_what_an_emission_reads_has_a_slot() -> None:
    """In blinker's `__dict__` each would take three times as long."""
    signal = Bus().signal(BatchEnd)
    read = ("chain", "is_muted", "probe", "_alarms", "_bus", "_owners")
    assert all(isinstance(vars(OrderedSignal)[name], MemberDescriptorType) for name in read)
    assert not vars(signal).keys() & {*read}
