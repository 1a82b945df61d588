from __future__ import annotations

from typing import Any

import pytest
from heliograph import Every, Plugin, on
from heliograph.events import BatchEnd, BatchStart, Bus, EpochEnd, Event, Lane, Progress, Run, StepEnd
from heliograph.plugins import Plugins


class Custom(Event):
    """A third party's event."""


class FakeRun:
    """As much of a run as a filter asks for."""

    def __init__(self) -> None:
        self.progress = self.origin = Progress()


def received_by(plugin: object) -> list[str]:
    """Return the names of the events that a registered plugin receives."""
    bus = Bus()
    Plugins(bus).register(plugin)
    return [signal.event.__name__ for signal in bus.signals() if signal.chain]


def test_a_mark_leaves_the_method_as_it_is() -> None:
    class Noting(Plugin):
        @on(BatchEnd)
        def note(self, run: Run, event: BatchEnd) -> None:
            """Take note."""
            self.noted = event

    plugin, event = Noting(), BatchEnd()
    plugin.note(Any, event)  # type: ignore[arg-type]
    assert plugin.noted is event
    assert (Noting.note.__name__, Noting.note.__doc__) == ("note", "Take note.")


def test_one_two_and_three_events() -> None:
    class Noting(Plugin):
        @on(BatchEnd)
        def one(self, run: Run, event: BatchEnd) -> None: ...

        @on(BatchStart, EpochEnd)
        def two(self, run: Run, event: BatchStart | EpochEnd) -> None: ...

        @on(StepEnd, Custom, BatchEnd)
        def three(self, run: Run, event: Event) -> None: ...

    assert received_by(Noting()) == ["BatchStart", "StepEnd", "BatchEnd", "EpochEnd", "Custom"]


def test_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match=r"@on\(\) needs at least"):
        on()


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ("epoch_end", r"on\(EpochEnd\).*; got 'epoch_end'\."),
        (Event, "Unknown event 'Event'"),
        (int, "Unknown event 'int'"),
        ([BatchEnd, EpochEnd], "Unknown event "),
    ],
    ids=str,
)
def test_what_is_no_event_is_refused_where_it_is_written(event: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        on(event)
    with pytest.raises(TypeError, match=sentence):
        on(BatchEnd, event)


def test_the_function_under_a_forgotten_call_is_refused() -> None:
    def note(self: Any, run: Run, event: BatchEnd) -> None: ...

    with pytest.raises(TypeError, match="Unknown event 'note'"):
        on(note)  # type: ignore[call-overload]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="lanes"):
        on(BatchEnd, lanes=Lane.REPORT)  # type: ignore[call-overload]


def test_what_is_not_a_lane_is_refused() -> None:
    sentence = r"^lane=.*got 'measure'.*mean 'Lane\.MEASURE'\? Known:"
    with pytest.raises(TypeError, match=sentence):
        on(BatchEnd, lane="measure")  # type: ignore[call-overload]


def test_two_marks_on_one_method_are_refused_with_the_mend() -> None:
    def note(self: Any, run: Run, event: Event) -> None: ...

    on(BatchEnd)(note)
    with pytest.raises(TypeError, match=r"@on twice: .*@on\(EpochEnd, TrainEnd\)\."):
        on(EpochEnd)(note)


class Base(Plugin):
    def __init__(self) -> None:
        self.received: list[str] = []

    @on(BatchEnd)
    def first(self, run: Run, event: Event) -> None:
        self.received.append("base first")

    @on(BatchEnd)
    def second(self, run: Run, event: Event) -> None:
        self.received.append("base second")


def received(plugin: Base, *events: Event) -> list[str]:
    bus = Bus()
    Plugins(bus).register(plugin)
    for event in events:
        bus.signal(type(event)).emit(Any, event)  # type: ignore[arg-type]
    return plugin.received


def test_handlers_are_inherited_in_the_order_in_which_they_are_written() -> None:
    class Child(Base):
        @on(BatchEnd)
        def third(self, run: Run, event: Event) -> None:
            self.received.append("child third")

    assert received(Child(), BatchEnd()) == ["base first", "base second", "child third"]


def test_an_override_without_a_mark_keeps_the_inherited_one() -> None:
    class Child(Base):
        def first(self, run: Run, event: Event) -> None:
            self.received.append("child first")

    assert received(Child(), BatchEnd()) == ["child first", "base second"]


def test_an_override_with_a_mark_replaces_the_inherited_one() -> None:
    class Child(Base):
        @on(EpochEnd)
        def first(self, run: Run, event: Event) -> None:  # type: ignore[override]
            self.received.append("child first")

    assert received(Child(), BatchEnd(), EpochEnd(0)) == ["base second", "child first"]


def test_a_mixin_adds_its_handlers() -> None:
    class Mixin:
        received: list[str]

        @on(EpochEnd)
        def mixed_in(self, run: Run, event: EpochEnd) -> None:
            self.received.append("mixin")

    class Child(Mixin, Base):
        pass

    assert received(Child(), BatchEnd(), EpochEnd(0)) == ["base first", "base second", "mixin"]


def test_every_plugin_object_has_its_own_copy_of_a_filter() -> None:
    class Sparse(Plugin):
        def __init__(self) -> None:
            self.calls = 0

        @on(Custom, when=Every(emissions=2))
        def count(self, run: Run, event: Custom) -> None:
            self.calls += 1

    bus = Bus()
    plugins = Plugins(bus)
    one, two = plugins.register(Sparse()), plugins.register(Sparse(), name="two")
    run = FakeRun()
    for _ in range(4):
        bus.signal(Custom).emit(run, Custom())  # type: ignore[arg-type]
    assert (one.calls, two.calls) == (2, 2)


def test_events_of_one_mark_have_filters_of_their_own() -> None:
    calls: list[str] = []

    class Sparse(Plugin):
        @on(BatchEnd, Custom, when=Every(emissions=2))
        def note(self, run: Run, event: Event) -> None:
            calls.append(event.name)

    bus, run = Bus(), FakeRun()
    Plugins(bus).register(Sparse())
    for event in (BatchEnd(), Custom(), BatchEnd(), Custom()):
        bus.signal(type(event)).emit(run, event)  # type: ignore[arg-type]
    assert calls == ["batch_end", "custom"]
