from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import blinker
import pytest
from heliograph import Every, Once, Plugin, Trainer, TrainRun, on
from heliograph.events import (
    BatchEnd,
    BatchStart,
    Bus,
    EpochEnd,
    EpochStart,
    Event,
    Handle,
    Lane,
    Log,
    OrderedSignal,
    Run,
    StepEnd,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

if TYPE_CHECKING:
    from heliograph.events import TrainEnd

Receiver = Callable[..., None]
BATCH_END = BatchEnd()


class Custom(Event):
    """A third party's event."""

    text: str = ""


class Listener:
    """Notes its name in a shared list when it is called."""

    def __init__(self, name: str, received: list[str]) -> None:
        self.name = name
        self.received = received

    def receive(self, run: Run, event: Event) -> None:
        self.received.append(self.name)


class Sender:
    """Stands for a run where only its identity matters."""

    __slots__ = ("__weakref__",)


def recorder(name: str, received: list[str], then: Callable[[], object] = lambda: None) -> Receiver:
    """Return a receiver that notes its name, then does something."""

    def receive(run: Run, event: Event) -> None:
        received.append(name)
        then()

    return receive


def emitted(signal: OrderedSignal[Any], run: Run, received: list[str], event: Event = BATCH_END) -> list[str]:
    """Return who receives one emission."""
    received.clear()
    signal.emit(run, event)
    return list(received)


# Order.


def test_handlers_run_by_lane_and_then_in_order_of_arrival(run: TrainRun) -> None:
    received: list[str] = []
    lanes = [Lane.REPORT, Lane.TRANSFORM, Lane.DECIDE, Lane.PERSIST, Lane.MEASURE]
    for arrival in range(3):
        for lane in lanes:
            run.bus.on(BatchEnd, recorder(f"{lane.name} {arrival}", received), lane=lane)
    expected = [f"{lane.name} {arrival}" for lane in sorted(lanes) for arrival in range(3)]
    assert [lane.name for lane in Lane] == ["TRANSFORM", "MEASURE", "DECIDE", "PERSIST", "REPORT"]
    assert [emitted(run.bus.signal(BatchEnd), run, received) for _ in range(3)] == [expected] * 3


def test_what_is_connected_without_a_lane_runs_after_all_lanes(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    signal.connect(recorder("foreign", received), weak=False)
    run.bus.on(BatchEnd, recorder("report", received), lane=Lane.REPORT)
    run.bus.on(BatchEnd, recorder("decide", received))
    assert emitted(signal, run, received) == ["decide", "report", "foreign"]


def test_a_function_runs_after_the_plugins_of_its_lane() -> None:
    received: list[str] = []

    class First(Plugin):
        @on(BatchEnd)
        def receive(self, run: Run, event: BatchEnd) -> None:
            received.append("plugin")

    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, recorder("function", received))
    trainer.bus.on(BatchEnd, recorder("transform", received), lane=Lane.TRANSFORM)
    trainer.plugins.register(First())
    assert emitted(trainer.bus.signal(BatchEnd), Any, received) == ["transform", "plugin", "function"]  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(Lane)), st.booleans()), max_size=12))
def test_the_order_of_calls_is_stable_and_equals_a_simple_model(subscriptions: list[tuple[Lane, bool]]) -> None:
    bus, received = Bus(), list[str]()
    for arrival, (lane, paused) in enumerate(subscriptions):
        handle = bus.on(BatchEnd, recorder(str(arrival), received), lane=lane)
        if paused:
            handle.pause()
    speaking = [(lane, arrival) for arrival, (lane, paused) in enumerate(subscriptions) if not paused]
    expected = [str(arrival) for _, arrival in sorted(speaking)]
    signal, sender = bus.signal(BatchEnd), Sender()
    assert emitted(signal, sender, received) == expected  # type: ignore[arg-type]
    assert emitted(signal, sender, received) == expected  # type: ignore[arg-type]
    received.clear()
    signal.send(sender, event=BATCH_END)
    assert received == expected


class SignalMachine(RuleBasedStateMachine):
    """Any sequence of connect, disconnect, pause and resume keeps to a model: a list of subscriptions."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = Bus()
        self.signal = self.bus.signal(BatchEnd)
        self.received: list[str] = []
        self.receivers = {str(number): recorder(str(number), self.received) for number in range(6)}
        self.handles: dict[str, Handle] = {}
        self.model: list[tuple[Lane, str]] = []
        self.silent: set[str] = set()

    def seated(self) -> list[str]:
        return [name for _, name in self.model]

    @rule(name=st.sampled_from("012345"), lane=st.sampled_from(list(Lane)))
    def connect(self, name: str, lane: Lane) -> None:
        if name in self.seated():
            with pytest.raises(ValueError, match="subscribed to BatchEnd"):
                self.bus.on(BatchEnd, self.receivers[name], lane=lane)
            self.signal.connect(self.receivers[name], weak=False)  # blinker's own connect keeps the place
            return
        self.handles[name] = self.bus.on(BatchEnd, self.receivers[name], lane=lane)
        self.model.append((lane, name))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.handles)))
        self.handles[name].remove()
        self.model = [seat for seat in self.model if seat[1] != name]
        self.silent.discard(name)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), paused=st.booleans())
    def toggle(self, data: st.DataObject, paused: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.handles)))
        handle = self.handles[name]
        (handle.pause if paused else handle.resume)()
        if name in self.seated():
            (self.silent.add if paused else self.silent.discard)(name)

    @invariant()
    def calls_equal_the_model(self) -> None:
        expected = [name for _, name in sorted(self.model, key=lambda seat: seat[0]) if name not in self.silent]
        assert emitted(self.signal, Sender(), self.received) == expected  # type: ignore[arg-type]
        assert len(self.signal.chain) == len(expected)
        assert bool(self.signal.receivers) == bool(self.model)


TestAnySequenceKeepsTheModel = SignalMachine.TestCase
TestAnySequenceKeepsTheModel.settings = settings(deadline=None)


# It is a blinker signal.


def test_every_event_has_one_signal_per_bus(run: TrainRun) -> None:
    signal = run.bus.signal(BatchEnd)
    assert isinstance(signal, blinker.Signal)
    assert run.bus.signal(BatchEnd) is signal
    assert len({id(signal), id(run.bus.signal(StepEnd)), id(Bus().signal(BatchEnd))}) == 3
    assert signal.event is BatchEnd
    assert signal.__doc__ == BatchEnd.__doc__


def test_signals_are_listed_in_the_order_of_the_catalogue() -> None:
    bus = Bus()
    for event in (Custom, EpochEnd, BatchEnd, EpochStart):
        bus.signal(event)
    assert [signal.event for signal in bus.signals()] == [EpochStart, BatchEnd, EpochEnd, Custom]


def test_connect_and_disconnect(run: TrainRun) -> None:
    received: list[str] = []
    signal, receiver = run.bus.signal(BatchEnd), recorder("a", received)
    assert signal.connect(receiver) is receiver
    assert emitted(signal, run, received) == ["a"]
    signal.disconnect(receiver)
    assert emitted(signal, run, received) == []
    assert not signal.receivers
    signal.disconnect(receiver)  # as in blinker, twice does no harm
    assert signal.chain == ()


def test_connect_via(run: TrainRun, another_run: Callable[[], TrainRun]) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)

    @signal.connect_via(run)
    def receive(sender: Run, **facts: Any) -> None:
        received.append(facts["event"].name)

    assert emitted(signal, run, received) == ["batch_end"]
    assert emitted(signal, another_run(), received) == []


def test_connected_to(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    with signal.connected_to(recorder("a", received)):
        assert emitted(signal, run, received) == ["a"]
    assert emitted(signal, run, received) == []


def test_connected_to_disconnects_after_an_error_too(run: TrainRun) -> None:
    signal = run.bus.signal(BatchEnd)
    with pytest.raises(KeyError), signal.connected_to(recorder("a", [])):
        raise KeyError
    assert not signal.receivers


def test_muted(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    signal.connect(recorder("a", received), weak=False)
    with signal.muted():
        assert emitted(signal, run, received) == []
        assert list(signal.emit_each(run, BATCH_END)) == []
        assert signal.send(run, event=BATCH_END) == []
        assert received == []
    assert emitted(signal, run, received) == ["a"]


def test_receiver_connected_and_receiver_disconnected_are_sent(run: TrainRun) -> None:
    reported: list[tuple[str, Any, Any]] = []
    signal, receiver = run.bus.signal(BatchEnd), recorder("a", [])

    def connected(source: Any, **facts: Any) -> None:
        reported.append(("connected", source, (facts["receiver"], facts["weak"])))

    def disconnected(source: Any, **facts: Any) -> None:
        reported.append(("disconnected", source, facts["receiver"]))

    signal.receiver_connected.connect(connected)
    signal.receiver_disconnected.connect(disconnected)
    handle = run.bus.on(BatchEnd, receiver)
    handle.remove()
    assert reported == [("connected", signal, (receiver, False)), ("disconnected", signal, receiver)]


def test_a_type_error_in_receiver_connected_takes_the_connection_back(trainer: Trainer) -> None:
    signal = trainer.bus.signal(BatchEnd)

    def refuse(source: Any, **facts: Any) -> None:
        raise TypeError("no")

    signal.receiver_connected.connect(refuse)
    with pytest.raises(TypeError, match=r"^no$"):
        signal.connect(recorder("a", []))
    assert (signal.chain, dict(signal.receivers)) == ((), {})
    assert trainer.plan() == "no handlers"


def test_a_receiver_bound_to_a_sender_receives_that_run_only(
    run: TrainRun, another_run: Callable[[], TrainRun]
) -> None:
    received: list[str] = []
    signal, other, third = run.bus.signal(BatchEnd), another_run(), another_run()
    receiver = recorder("bound", received)
    signal.connect(receiver, run, weak=False)
    signal.connect(receiver, other, weak=False)
    signal.connect(recorder("any", received), weak=False)
    assert emitted(signal, run, received) == ["bound", "any"]
    assert emitted(signal, other, received) == ["bound", "any"]
    assert emitted(signal, third, received) == ["any"]
    signal.disconnect(receiver, run)
    assert emitted(signal, run, received) == ["any"]
    assert emitted(signal, other, received) == ["bound", "any"]
    signal.disconnect(receiver, other)
    assert emitted(signal, other, received) == ["any"]
    assert len(signal.receivers) == 1


def test_a_receiver_of_any_sender_that_is_also_bound_is_called_once(run: TrainRun) -> None:
    received: list[str] = []
    signal, receiver = run.bus.signal(BatchEnd), recorder("a", received)
    signal.connect(receiver, weak=False)
    signal.connect(receiver, run, weak=False)
    assert emitted(signal, run, received) == ["a"]


def test_a_dead_senders_receiver_does_not_receive_a_later_one_at_the_same_address() -> None:
    signal, received = Bus().signal(BatchEnd), list[str]()
    kept = []
    for _ in range(1000):  # the first or second time, an address is used again
        sender = Sender()
        address = id(sender)
        receiver = recorder("bound", received)
        signal.connect(receiver, sender, weak=False)
        del sender
        kept.append(Sender())
        if id(kept[-1]) == address:
            break
        signal.disconnect(receiver)
    assert id(kept[-1]) == address
    assert emitted(signal, kept[-1], received) == []  # type: ignore[arg-type]


def test_weak_receivers_die_with_their_owner(run: TrainRun) -> None:
    received: list[str] = []
    signal, listener = run.bus.signal(BatchEnd), Listener("weak", received)
    signal.connect(listener.receive)
    assert emitted(signal, run, received) == ["weak"]
    del listener
    gc.collect()
    assert emitted(signal, run, received) == []
    assert (signal.chain, dict(signal.receivers)) == ((), {})


def test_a_weak_receiver_that_dies_in_the_middle_of_a_dispatch_is_not_called(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    living = [Listener("weak", received)]

    def kill(run: Run, event: Event) -> None:
        received.append("killer")
        living.clear()
        gc.collect()

    signal.connect(kill, weak=False)
    signal.connect(living[0].receive)
    signal.connect(recorder("last", received), weak=False)
    assert emitted(signal, run, received) == ["killer", "last"]
    assert emitted(signal, run, received) == ["killer", "last"]
    assert len(signal.receivers) == 2


def test_strong_when_asked_and_with_on(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    signal.connect(Listener("strong", received).receive, weak=False)
    run.bus.on(BatchEnd, Listener("on", received).receive)
    gc.collect()
    assert emitted(signal, run, received) == ["on", "strong"]


def test_has_receivers_for(run: TrainRun, another_run: Callable[[], TrainRun]) -> None:
    signal, other = run.bus.signal(BatchEnd), another_run()
    assert not signal.has_receivers_for(run)
    bound, anyones = recorder("a", []), recorder("b", [])
    signal.connect(bound, run)
    assert signal.has_receivers_for(run)
    assert not signal.has_receivers_for(other)
    signal.connect(anyones)
    assert signal.has_receivers_for(other)
    signal.disconnect(anyones)
    assert not signal.has_receivers_for(other)


def test_blinkers_own_send_keeps_the_order_and_skips_the_paused(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    for lane in (Lane.REPORT, Lane.TRANSFORM, Lane.PERSIST, Lane.DECIDE):
        handle = run.bus.on(BatchEnd, recorder(lane.name, received), lane=lane)
        if lane is Lane.PERSIST:
            handle.pause()
    returned = signal.send(run, event=BATCH_END)
    assert received == ["TRANSFORM", "DECIDE", "REPORT"]
    assert [value for _, value in returned] == [None, None, None]
    assert [receiver for receiver, _ in returned] == list(signal.receivers_for(run))


def test_blinkers_own_send_does_not_call_the_dead(run: TrainRun) -> None:
    received: list[str] = []
    signal, listener = run.bus.signal(BatchEnd), Listener("weak", received)
    signal.connect(listener.receive)
    del listener
    gc.collect()
    assert signal.send(run, event=BATCH_END) == []


def test_blinkers_send_async_keeps_the_order_too(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    for lane in (Lane.REPORT, Lane.TRANSFORM):
        run.bus.on(BatchEnd, recorder(lane.name, received), lane=lane)

    def awaitable(receiver: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **facts: Any) -> Any:
            return receiver(*args, **facts)

        return call

    asyncio.run(signal.send_async(run, _sync_wrapper=awaitable, event=BATCH_END))
    assert received == ["TRANSFORM", "REPORT"]


def test_a_foreign_receiver_works_under_emit_and_send(run: TrainRun) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def foreign(sender: Any, **facts: Any) -> None:
        calls.append((sender, facts))

    signal = run.bus.signal(BatchEnd)
    signal.connect(foreign)
    signal.emit(run, BATCH_END)
    signal.send(run, event=BATCH_END)
    assert calls == [(run, {"event": BATCH_END})] * 2


def test_clearing_the_signal_leaves_nothing(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    signal.connect(recorder("a", received), weak=False)
    signal._clear_state()
    assert emitted(signal, run, received) == []
    assert not signal.receivers
    signal.connect(recorder("b", received), weak=False)
    assert emitted(signal, run, received) == ["b"]


# A change in the middle of a dispatch takes effect from the next emission.


def test_connecting_in_the_middle_of_a_dispatch(run: TrainRun) -> None:
    received: list[str] = []
    late = [recorder("late", received)]

    def connect() -> None:
        while late:
            run.bus.on(BatchEnd, late.pop(), lane=Lane.REPORT)

    run.bus.on(BatchEnd, recorder("first", received, connect))
    signal = run.bus.signal(BatchEnd)
    assert emitted(signal, run, received) == ["first"]
    assert emitted(signal, run, received) == ["first", "late"]


def test_disconnecting_in_the_middle_of_a_dispatch(run: TrainRun) -> None:
    received: list[str] = []
    handles: list[Handle] = []
    run.bus.on(BatchEnd, recorder("first", received, lambda: handles[0].remove()))
    handles.append(run.bus.on(BatchEnd, recorder("second", received)))
    signal = run.bus.signal(BatchEnd)
    assert emitted(signal, run, received) == ["first", "second"]
    assert emitted(signal, run, received) == ["first"]


def test_pausing_and_resuming_in_the_middle_of_a_dispatch(run: TrainRun) -> None:
    received: list[str] = []
    actions: list[Callable[[], None]] = []
    run.bus.on(BatchEnd, recorder("first", received, lambda: actions.pop(0)()))
    handle = run.bus.on(BatchEnd, recorder("second", received))
    actions += [handle.pause, handle.resume, lambda: None]
    signal = run.bus.signal(BatchEnd)
    assert emitted(signal, run, received) == ["first", "second"]
    assert emitted(signal, run, received) == ["first"]
    assert emitted(signal, run, received) == ["first", "second"]


def test_a_nested_emission_runs_whole_within_the_outer_one(run: TrainRun) -> None:
    received: list[str] = []
    signal, depth = run.bus.signal(Custom), [0]

    def outer(run: Run, event: Custom) -> None:
        received.append(f"outer {event.text}")
        if depth[0] < 2:
            depth[0] += 1
            run.emit(Custom(str(depth[0])))

    signal.connect(outer, weak=False)
    signal.connect(recorder("inner", received), weak=False)
    signal.emit(run, Custom("0"))
    assert received == ["outer 0", "outer 1", "outer 2", "inner", "inner", "inner"]


def test_a_change_in_a_nested_emission_is_received_from_the_next_one(run: TrainRun) -> None:
    received: list[str] = []
    late = [recorder("late", received)]
    signal = run.bus.signal(BatchEnd)

    def connect(run: Run, event: Custom) -> None:
        while late:
            run.bus.on(BatchEnd, late.pop())

    run.bus.on(Custom, connect)
    run.bus.on(BatchEnd, recorder("first", received, lambda: run.emit(Custom())))
    assert emitted(signal, run, received) == ["first"]
    assert emitted(signal, run, received) == ["first", "late"]


def test_threads_that_connect_at_once_lose_nothing() -> None:
    bus, received = Bus(), list[str]()
    signal = bus.signal(BatchEnd)

    def connect(start: int) -> None:
        for number in range(50):
            bus.on(BatchEnd, recorder(str(start + number), received))

    threads = [threading.Thread(target=connect, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(signal.chain) == 150
    assert len(set(emitted(signal, Sender(), received))) == 150  # type: ignore[arg-type]


# Place and chain.


def test_reconnecting_keeps_the_place_and_disconnecting_loses_it(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    first, second = recorder("first", received), recorder("second", received)
    signal.connect(first, weak=False)
    signal.connect(second, weak=False)
    signal.connect(first, weak=False)
    assert emitted(signal, run, received) == ["first", "second"]
    signal.disconnect(first)
    signal.connect(first, weak=False)
    assert emitted(signal, run, received) == ["second", "first"]


def test_the_chain_is_rebuilt_on_a_change_only(run: TrainRun) -> None:
    signal = run.bus.signal(BatchEnd)
    assert signal.chain == ()
    handle = run.bus.on(BatchEnd, recorder("a", []))
    chain = signal.chain
    assert len(chain) == 1
    for _ in range(3):
        signal.emit(run, BATCH_END)
        signal.send(run, event=BATCH_END)
        run.bus.on(StepEnd, recorder("elsewhere", []))
    assert signal.chain is chain
    handle.pause()
    assert signal.chain == ()
    handle.resume()
    assert signal.chain == chain
    other = run.bus.on(BatchEnd, recorder("b", []))
    assert signal.chain[:1] == chain
    assert len(signal.chain) == 2
    other.remove()
    assert signal.chain == chain


def test_a_plain_receiver_is_in_the_chain_itself(run: TrainRun) -> None:
    receiver = recorder("a", [])
    run.bus.on(BatchEnd, receiver)
    assert run.bus.signal(BatchEnd).chain == (receiver,)


# Handles and filters.


def test_a_handle_removes_pauses_and_resumes(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    handle = run.bus.on(BatchEnd, recorder("a", received))
    run.bus.on(BatchEnd, recorder("b", received))
    handle.pause()
    handle.pause()
    assert emitted(signal, run, received) == ["b"]
    handle.resume()
    handle.resume()
    assert emitted(signal, run, received) == ["a", "b"]
    handle.remove()
    handle.remove()
    assert emitted(signal, run, received) == ["b"]
    handle.pause()
    handle.resume()
    assert emitted(signal, run, received) == ["b"]


def test_a_handle_is_a_context(run: TrainRun) -> None:
    received: list[str] = []
    signal = run.bus.signal(BatchEnd)
    with run.bus.on(BatchEnd, recorder("a", received)) as handle:
        assert isinstance(handle, Handle)
        assert emitted(signal, run, received) == ["a"]
    assert not signal.receivers
    with pytest.raises(KeyError), run.bus.on(BatchEnd, recorder("b", received)):
        raise KeyError
    assert emitted(signal, run, received) == []


def test_filters_on_any_event(run: TrainRun) -> None:
    received: list[str] = []
    run.bus.on(Custom, recorder("every 2", received), when=Every(emissions=2))
    run.bus.on(Custom, recorder("once", received), when=Once())
    run.bus.on(Custom, recorder("step", received), when=lambda run: run.progress.steps == 1)
    signal = run.bus.signal(Custom)
    calls = []
    for step in range(4):
        run.progress.steps = step
        calls.append(emitted(signal, run, received, Custom()))
    assert calls == [["once"], ["every 2", "step"], [], ["every 2"]]


def test_a_filter_is_copied_so_that_two_may_be_given_the_same(run: TrainRun) -> None:
    received: list[str] = []
    condition = Every(emissions=2)
    for name in "ab":
        run.bus.on(Custom, recorder(name, received), when=condition)
    signal = run.bus.signal(Custom)
    assert [emitted(signal, run, received, Custom()) for _ in range(4)] == [[], ["a", "b"], [], ["a", "b"]]


class Switch:
    """Has a method that serves as a filter."""

    def __init__(self) -> None:
        self.on = False

    def is_on(self, run: Run) -> bool:
        return self.on


def test_a_method_as_a_filter_asks_its_own_object(run: TrainRun) -> None:
    received: list[str] = []
    switch = Switch()
    run.bus.on(BatchEnd, recorder("a", received), when=switch.is_on)
    signal = run.bus.signal(BatchEnd)
    assert emitted(signal, run, received) == []
    switch.on = True
    assert emitted(signal, run, received) == ["a"]


def test_subscribing_twice_is_refused(run: TrainRun) -> None:
    received: list[str] = []
    receiver = recorder("a", received)
    handle = run.bus.on(BatchEnd, receiver)
    with pytest.raises(ValueError, match=r"^recorder.* subscribed to BatchEnd:"):
        run.bus.on(BatchEnd, receiver, lane=Lane.REPORT)
    run.bus.on(StepEnd, receiver)
    assert emitted(run.bus.signal(BatchEnd), run, received) == ["a"]
    handle.remove()
    run.bus.on(BatchEnd, receiver)
    assert emitted(run.bus.signal(BatchEnd), run, received) == ["a"]


def test_a_paused_filter_is_not_asked(run: TrainRun) -> None:
    asked: list[Run] = []

    def when(run: Run) -> bool:
        asked.append(run)
        return True

    handle = run.bus.on(BatchEnd, recorder("a", []), when=when)
    handle.pause()
    run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert asked == []
    handle.resume()
    run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert asked == [run]


# Everything is checked when it is connected.


async def coroutine(run: Run, event: Event) -> None: ...


def generator(run: Run, event: Event) -> Iterator[int]:
    yield 1


async def async_generator(run: Run, event: Event) -> AsyncIterator[int]:
    yield 1


class CallableCoroutine:
    async def __call__(self, run: Run, event: Event) -> None: ...


class CallableGenerator:
    def __call__(self, run: Run, event: Event) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("receiver", "name"),
    [
        (coroutine, "coroutine"),
        (generator, "generator"),
        (functools.partial(coroutine), "partial"),
        (async_generator, "async_generator"),
        (CallableCoroutine(), "CallableCoroutine"),
        (CallableGenerator(), "CallableGenerator"),
        (3, "int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_never_run_is_refused(bus: Bus, receiver: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name} cannot handle BatchEnd:"):
        bus.on(BatchEnd, receiver)
    assert bus.signal(BatchEnd).chain == ()
    assert not bus.signal(BatchEnd).receivers


def without_event(run: Run) -> None: ...


def misspelt(run: Run, evnet: Event) -> None: ...


def one_too_many(run: Run, event: Event, more: int) -> None: ...


@pytest.mark.parametrize("receiver", [without_event, misspelt, one_too_many, Listener.receive])
def test_a_wrong_signature_is_refused_by_name(bus: Bus, receiver: Callable[..., None]) -> None:
    sentence = rf"^{receiver.__qualname__}\(.*\).*BatchEnd.*\(run, event\)"
    with pytest.raises(TypeError, match=sentence):
        bus.on(BatchEnd, receiver)
    with pytest.raises(TypeError, match=sentence):
        bus.signal(BatchEnd).connect(receiver)
    assert not bus.signal(BatchEnd).receivers


def test_a_function_without_a_signature_is_refused_by_name(bus: Bus) -> None:
    with pytest.raises(TypeError, match="max"):
        bus.on(BatchEnd, max)


def exact(run: Run, event: BatchEnd) -> None: ...


def wider(run: Run, event: Event) -> None: ...


def widest(run: object, event: object) -> None: ...


def whatever(run: Any, event: Any) -> None: ...


def bare(run, event): ...  # type: ignore[no-untyped-def]


def union(run: Run, event: BatchEnd | EpochEnd) -> None: ...


def optional(run: Run, event: BatchEnd | None) -> None: ...


def by_string(run: Run, event: "BatchEnd") -> None: ...  # noqa: UP037


def for_the_checker_only(run: Run, event: TrainEnd) -> None: ...


def unknown_attribute(run: Run, event: blinker.NoSuchEvent) -> None: ...  # type: ignore[name-defined]


def with_defaults(run: Run, event: BatchEnd, note: str = "") -> None: ...


class CallableListener:
    def __call__(self, run: Run, event: BatchEnd) -> None: ...


@pytest.mark.parametrize(
    "receiver",
    [
        exact,
        wider,
        widest,
        whatever,
        bare,
        union,
        optional,
        by_string,
        for_the_checker_only,
        unknown_attribute,
        with_defaults,
        CallableListener(),
        functools.partial(with_defaults, note="x"),
        Listener("bound", []).receive,
    ],
    ids=lambda receiver: getattr(receiver, "__name__", type(receiver).__name__),
)
def test_a_fitting_annotation_is_accepted(bus: Bus, receiver: Receiver) -> None:
    bus.on(BatchEnd, receiver)
    assert len(bus.signal(BatchEnd).chain) == 1


@pytest.mark.parametrize(
    ("receiver", "event", "sentence"),
    [
        (exact, StepEnd, r"exact .*StepEnd.*as BatchEnd\."),
        (by_string, StepEnd, r"by_string .*StepEnd.*as BatchEnd\."),
        (union, StepEnd, r"union.*StepEnd.*as BatchEnd \| EpochEnd\."),
        (CallableListener(), Log, r"CallableListener .*Log.*as BatchEnd\."),
    ],
)
def test_a_wrong_annotation_is_refused(bus: Bus, receiver: Receiver, event: type[Event], sentence: str) -> None:
    with pytest.raises(TypeError, match=f"^{sentence}$"):
        bus.on(event, receiver)
    assert bus.signal(event).chain == ()


@pytest.mark.parametrize(
    ("given_event", "sentence"),
    [
        ("batch_end", r"on\(BatchEnd\).*; got 'batch_end'\.$"),
        ("BatchEnd", r"on\(BatchEnd\).*; got 'BatchEnd'\.$"),
        ("epoch_edn", r"'epoch_edn'.*mean 'EpochEnd'.*Known: BackwardEnd, BatchEnd,"),
        ("xyz", r"event 'xyz'.*Known: BackwardEnd,"),
        (Event, "Unknown event 'Event'"),
        (int, "Unknown event 'int'"),
        (BatchEnd(), r"Unknown event 'BatchEnd\(\)'"),
        (None, "Unknown event 'None'"),
        ([BatchEnd], "Unknown event "),
    ],
    ids=str,
)
def test_an_unknown_event_is_refused_with_the_nearest_name(bus: Bus, given_event: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        bus.on(given_event, recorder("a", []))
    with pytest.raises(TypeError, match=sentence):
        bus.signal(given_event)
    assert given_event not in [signal.event for signal in bus.signals()]


def test_what_is_not_a_lane_is_refused(bus: Bus) -> None:
    with pytest.raises(TypeError, match=r"got 2\. Known: Lane\.DECIDE,"):
        bus.on(BatchEnd, recorder("a", []), lane=2)  # type: ignore[arg-type]
    assert bus.signal(BatchEnd).chain == ()


class WithoutWeakReferences:
    __slots__ = ()

    def __call__(self, run: Run, event: Event) -> None: ...


def test_a_failed_connect_leaves_nothing_behind(trainer: Trainer) -> None:
    signal = trainer.bus.signal(BatchEnd)
    with pytest.raises(TypeError, match="weak reference"):
        signal.connect(WithoutWeakReferences())
    assert (signal.chain, dict(signal.receivers)) == ((), {})
    assert trainer.plan() == "no handlers"


@dataclass
class Counter:
    """A callable object that cannot be hashed."""

    calls: int = 0

    def __call__(self, run: Run, event: Event) -> None:
        self.calls += 1


def test_an_object_that_cannot_be_hashed_is_a_receiver_like_any_other(run: TrainRun) -> None:
    counter = Counter()
    run.bus.on(BatchEnd, counter)
    run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert counter.calls == 1


@dataclass(frozen=True)
class Equal:
    """Callable objects that are equal, and yet two."""

    received: tuple[list[int], ...]

    def __hash__(self) -> int:
        return 0

    def __call__(self, run: Run, event: Event) -> None:
        self.received[0].append(1)


def test_receivers_that_are_equal_are_two(run: TrainRun) -> None:
    received: list[int] = []
    one, two = Equal((received,)), Equal((received,))
    assert one == two
    for each in (one, two):
        run.bus.on(BatchEnd, each)
    run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert received == [1, 1]


# Errors.


def failing(error: Exception) -> Receiver:
    def fail(run: Run, event: Event) -> None:
        raise error

    return fail


def test_an_error_leaves_at_once_and_is_attributed(run: TrainRun) -> None:
    received: list[str] = []
    error = KeyError("x")
    fail = failing(error)
    run.bus.on(BatchEnd, recorder("before", received))
    run.bus.on(BatchEnd, fail)
    run.bus.on(BatchEnd, recorder("after", received))
    assert run.bus.blamed is None
    with pytest.raises(KeyError) as caught:
        run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert caught.value is error
    assert received == ["before"]
    assert run.bus.blamed == (error, fail.__qualname__, "batch_end")


def test_an_error_in_a_plugin_is_attributed_to_its_name(trainer: Trainer, run: TrainRun) -> None:
    class Breaking(Plugin):
        @on(BatchEnd, when=lambda run: True)
        def fail(self, run: Run, event: BatchEnd) -> None:
            raise KeyError("x")

    trainer.plugins.register(Breaking().named("broken"))
    with pytest.raises(KeyError) as caught:
        run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert run.bus.blamed == (caught.value, "broken", "batch_end")


def test_an_error_is_attributed_to_the_innermost_handler(run: TrainRun) -> None:
    error = KeyError("x")
    fail = failing(error)
    run.bus.on(Custom, fail)
    run.bus.on(BatchEnd, lambda run, event: run.emit(Custom()))
    with pytest.raises(KeyError):
        run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert run.bus.blamed == (error, fail.__qualname__, "custom")


def test_an_error_in_a_filter_is_attributed_to_the_handlers_owner(run: TrainRun) -> None:
    receiver = recorder("a", [])

    def when(run: Run) -> bool:
        raise KeyError("filter")

    run.bus.on(BatchEnd, receiver, when=when)
    with pytest.raises(KeyError, match="filter") as caught:
        run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert run.bus.blamed == (caught.value, receiver.__qualname__, "batch_end")


def test_an_error_is_attributed_also_when_the_chain_has_changed_since(run: TrainRun) -> None:
    error = KeyError("x")
    fail = failing(error)
    handles: list[Handle] = []
    run.bus.on(BatchEnd, recorder("first", [], lambda: handles[0].remove()))
    handles.append(run.bus.on(BatchEnd, recorder("second", [])))
    run.bus.on(BatchEnd, fail, when=lambda run: True)  # a link of its own in every chain
    with pytest.raises(KeyError):
        run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert run.bus.blamed == (error, fail.__qualname__, "batch_end")


def test_emit_each_calls_all_and_returns_the_errors(run: TrainRun) -> None:
    received: list[str] = []
    one, two = KeyError("one"), ValueError("two")
    first, second = failing(one), failing(two)
    run.bus.on(BatchEnd, first)
    run.bus.on(BatchEnd, recorder("between", received))
    run.bus.on(BatchEnd, second)
    run.bus.on(BatchEnd, recorder("last", received))
    errors = list(run.bus.signal(BatchEnd).emit_each(run, BATCH_END))
    assert errors == [(first.__qualname__, one), (second.__qualname__, two)]
    assert received == ["between", "last"]


def test_emit_each_calls_all_also_after_an_interrupt(run: TrainRun) -> None:
    received: list[str] = []

    def interrupt(run: Run, event: Event) -> None:
        raise KeyboardInterrupt

    run.bus.on(BatchEnd, interrupt)
    run.bus.on(BatchEnd, recorder("after", received))
    ((owner, error),) = run.bus.signal(BatchEnd).emit_each(run, BATCH_END)
    assert (owner, type(error), received) == (interrupt.__qualname__, KeyboardInterrupt, ["after"])


# Wrapping.


def test_wrap_all_wraps_what_is_there_and_what_comes(run: TrainRun) -> None:
    received: list[str] = []

    def wrapper(receiver: Receiver, owner: str) -> Receiver:
        def wrapped(run: Run, *, event: Event) -> None:
            received.append(f"before {owner}")
            receiver(run, event=event)

        return wrapped

    def named(run: Run, event: Event) -> None:
        received.append("named")

    def later(run: Run, event: Event) -> None:
        received.append("later")

    run.bus.on(BatchEnd, named)
    unwrap = run.bus.intercept(wrapper)
    run.bus.on(EpochEnd, later, when=lambda run: True)
    assert emitted(run.bus.signal(BatchEnd), run, received) == [f"before {named.__qualname__}", "named"]
    assert emitted(run.bus.signal(EpochEnd), run, received, EpochEnd(0)) == [f"before {later.__qualname__}", "later"]
    unwrap()
    assert emitted(run.bus.signal(BatchEnd), run, received) == ["named"]
    assert emitted(run.bus.signal(EpochEnd), run, received, EpochEnd(0)) == ["later"]
    assert run.bus.signal(BatchEnd).chain == (named,)


def test_several_wrappers_go_around_one_another_and_are_taken_off_in_any_order(run: TrainRun) -> None:
    received: list[str] = []

    def saying(word: str) -> Callable[[Receiver, str], Receiver]:
        def wrapper(receiver: Receiver, owner: str) -> Receiver:
            def wrapped(run: Run, *, event: Event) -> None:
                received.append(word)
                receiver(run, event=event)

            return wrapped

        return wrapper

    def named(run: Run, event: Event) -> None:
        received.append("named")

    run.bus.on(BatchEnd, named)
    take_off = [run.bus.intercept(saying(word)) for word in ("inner", "outer")]
    assert emitted(run.bus.signal(BatchEnd), run, received) == ["outer", "inner", "named"]
    take_off[0]()
    take_off[0]()
    assert emitted(run.bus.signal(BatchEnd), run, received) == ["outer", "named"]
    take_off[1]()
    assert run.bus.signal(BatchEnd).chain == (named,)


def test_errors_are_attributed_through_a_wrapper(run: TrainRun) -> None:
    error = KeyError("x")
    fail = failing(error)
    run.bus.on(BatchEnd, fail)
    run.bus.intercept(lambda receiver, owner: lambda run, *, event: receiver(run, event=event))
    with pytest.raises(KeyError):
        run.bus.signal(BatchEnd).emit(run, BATCH_END)
    assert run.bus.blamed == (error, fail.__qualname__, "batch_end")


# A probe.


class Seen:
    """A probe that notes when each receiver begins and ends, and whose it is."""

    def __init__(self, received: list[str]) -> None:
        self.received = received

    def __call__(self, receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
        for receiver in receivers:
            owner = owners[id(receiver)].rpartition(".")[2]
            self.received.append(f"{owner} begins")
            yield receiver
            self.received.append(f"{owner} ends")


def test_a_probe_sees_each_receiver_begin_and_end(run: TrainRun) -> None:
    received: list[str] = []

    def first(run: Run, event: Event) -> None:
        received.append("first")

    def second(run: Run, event: Event) -> None:
        received.append("second")

    run.bus.on(BatchEnd, first)
    run.bus.on(BatchEnd, second, when=lambda run: True)
    signal = run.bus.signal(BatchEnd)
    signal.probe = Seen(received)
    expected = ["first begins", "first", "first ends", "second begins", "second", "second ends"]
    assert emitted(signal, run, received) == expected
    received.clear()
    assert list(signal.emit_each(run, BATCH_END)) == []
    assert received == expected
    signal.probe = None
    assert emitted(signal, run, received) == ["first", "second"]


def test_a_probe_sees_a_nested_dispatch_within_the_receiver(run: TrainRun) -> None:
    received: list[str] = []

    def outer(run: Run, event: Event) -> None:
        run.emit(Custom())

    def inner(run: Run, event: Event) -> None: ...

    run.bus.on(BatchEnd, outer)
    run.bus.on(Custom, inner)
    run.bus.signal(BatchEnd).probe = run.bus.signal(Custom).probe = Seen(received)
    run.emit(BATCH_END)
    assert received == ["outer begins", "inner begins", "inner ends", "outer ends"]


def test_a_probe_sees_no_further_receiver_after_one_that_fails(run: TrainRun) -> None:
    received: list[str] = []
    error = KeyError("x")
    fail = failing(error)
    run.bus.on(BatchEnd, fail)
    run.bus.on(BatchEnd, recorder("after", received))
    signal = run.bus.signal(BatchEnd)
    signal.probe = Seen(received)
    with pytest.raises(KeyError) as caught:
        signal.emit(run, BATCH_END)
    assert caught.value is error
    assert received == ["fail begins"]
    assert run.bus.blamed == (error, fail.__qualname__, "batch_end")


def test_a_probe_sees_all_receivers_where_failures_are_collected(run: TrainRun) -> None:
    received: list[str] = []
    fail = failing(KeyError("x"))
    run.bus.on(BatchEnd, fail)
    run.bus.on(BatchEnd, recorder("after", received))
    signal = run.bus.signal(BatchEnd)
    signal.probe = Seen(received)
    ((owner, _),) = signal.emit_each(run, BATCH_END)
    assert owner == fail.__qualname__
    assert received == ["fail begins", "fail ends", "receive begins", "after", "receive ends"]


@pytest.mark.parametrize("each", [False, True])
def test_a_probe_sees_a_forgiven_receiver_end_and_those_after_it(trainer: Trainer, run: TrainRun, each: bool) -> None:
    class Breaking(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            raise KeyError("x")

    received: list[str] = []
    trainer.plugins.register(Breaking())
    run.bus.on(BatchEnd, recorder("after", received))
    signal = run.bus.signal(BatchEnd)
    signal.probe = Seen(received)
    if each:
        assert list(signal.emit_each(run, BATCH_END)) == []
    else:
        signal.emit(run, BATCH_END)
    assert received == ["breaking begins", "breaking ends", "receive begins", "after", "receive ends"]


def test_without_a_probe_the_chain_is_walked_as_it_is(run: TrainRun) -> None:
    received: list[str] = []
    receiver = recorder("a", received)
    run.bus.on(BatchEnd, receiver)
    signal = run.bus.signal(BatchEnd)
    signal.probe = Seen(received)
    assert signal.chain == (receiver,)
    signal.probe = None
    assert emitted(signal, run, received) == ["a"]


def test_a_muted_signal_asks_no_probe(run: TrainRun) -> None:
    received: list[str] = []
    run.bus.on(BatchEnd, recorder("a", received))
    signal = run.bus.signal(BatchEnd)
    signal.probe = Seen(received)
    with signal.muted():
        signal.emit(run, BATCH_END)
        assert list(signal.emit_each(run, BATCH_END)) == []
    assert received == []


def test_events_of_one_bus_are_not_received_on_another(run: TrainRun) -> None:
    received: list[str] = []
    Bus().on(BatchStart, recorder("a", received))
    run.bus.signal(BatchStart).emit(run, BatchStart())
    assert received == []
