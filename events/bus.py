"""The bus: one ordered blinker signal per event type. This is the one file that imports blinker."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from inspect import ismethod
from itertools import count
from threading import RLock
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from blinker import ANY, Signal
from blinker._utilities import make_id
from blinker.base import ANY_ID

from .catalogue import CATALOGUE, Event
from .checks import check_event, describe

if TYPE_CHECKING:
    from .alarms import Alarms, Idle
    from .run import Run

E = TypeVar("E", bound=Event)
Receiver = Callable[..., Any]
When = Callable[["Run"], bool]
Gate = Callable[["Run", Event], bool]
Position = tuple[int | Fraction, ...]  # the lane, and the position in it
Interceptor = Callable[[Receiver, str], Receiver]
Probe = Callable[[Iterator[Receiver], Mapping[int, str]], Iterator[Receiver]]
Lane = IntEnum("Lane", ["TRANSFORM", "MEASURE", "DECIDE", "PERSIST", "REPORT"])
Lane.__doc__ = "The order in which the handlers of one event run."


class FunctionName(str):
    """The name of a function that no plugin connected, so that a plugin may have the same name."""


class PluginName(str):
    """The name of a registered plugin, so that a function may have the same name."""


@dataclass(slots=True)
class Subscription:
    """What a signal knows of a receiver.

    Attributes:
        position: where it runs among the receivers.
        owner: the plugin whose handler it is, or that connected it within a handler; else its own name.
        when: the filter; None lets every event pass.
        gate: the condition of its plugin, asked before the filter; None for none.
        paused: whether it is not called.
        idle_until: says until which count it has nothing to do, so that it is not called before; None where it may
            always have. A filter may say it of itself.
    """

    position: Position
    owner: str = ""
    when: When | None = None
    paused: bool = False
    gate: Gate | None = None
    idle_until: Idle | None = None


class OrderedSignal(Signal, Generic[E]):
    """A blinker signal that calls its receivers in a fixed order, as `receiver(run, event=event)`.

    A change during an emission takes effect from the next one. This is a subclass, not a wrapper: blinker emits no
    signal when a weakly held receiver is collected, so nothing else could remove it from the chain.

    Attributes:
        chain: the receivers in their order; every change makes a new tuple.
        subscriptions: what is known of each receiver, by blinker's key.
        probe: is given the receivers and their owners' names by `id`, and yields them, so that it sees when each
            begins and ends. None costs nothing. It is not an interceptor since it may be set for a single batch, and
            must not rebuild the chain for that.
    """

    # What an emission reads: a slot is found in a third of the time that an entry of blinker's `__dict__` takes.
    __slots__ = ("_alarms", "_bus", "_owners", "chain", "is_muted", "probe")

    def __init__(self, bus: Bus, event: type[E]) -> None:
        super().__init__(event.__doc__)
        self.event = event
        self.chain: tuple[Receiver, ...] = ()
        self.probe: Probe | None = None
        self.subscriptions: dict[Any, Subscription] = {}
        self._bus = bus
        self._owners: dict[int, str] = {}
        self._positions: list[Position] = []  # of the chain's receivers
        self._chained: dict[Any, Position] = {}
        self._alarms: Alarms | None = None  # of the receivers that say until when they are idle, if there are some
        self._may_idle = False
        self._arrivals = count()
        self._lock = RLock()  # weak receivers may die in any thread

    def __repr__(self) -> str:
        owners = [each.owner for _, each in self._sort()]
        return f"<OrderedSignal of {self.event.__name__}: {', '.join(owners) or 'no receivers'}>"

    def connect(
        self, receiver: Any, sender: Any = ANY, weak: bool = True, subscription: Subscription | None = None
    ) -> Any:
        """Connect as blinker does.

        Args:
            receiver: called as `receiver(run, event=event)`.
            sender: the run to receive from; by default any.
            weak: whether the receiver is dropped when nothing else refers to it.
            subscription: of a receiver whose signature was checked; without one it is checked, and runs after all
                lanes.
        """
        if subscription is None:
            from .signatures import check_receiver

            check_receiver(receiver, self.event)
            subscription = Subscription((len(Lane) + 1,))
        with self._lock:
            if (key := make_id(receiver)) not in self.subscriptions:
                position = (*subscription.position, next(self._arrivals))
                owner = subscription.owner or current_owner() or FunctionName(describe(receiver))
                self.subscriptions[key] = replace(subscription, position=position, owner=owner)
                self._may_idle |= subscription.idle_until is not None or subscription.when is not None
            try:
                return super().connect(receiver, sender, weak)
            finally:
                if key not in self.receivers:
                    self.subscriptions.pop(key, None)
                self._update_chain(key)

    def pause(self, receiver: Receiver, *, paused: bool) -> None:
        """Stop calling a connected receiver, or call it again."""
        with self._lock:
            known = self.subscriptions.get(key := make_id(receiver))
            if known is not None and known.paused != paused:
                self.subscriptions[key] = replace(known, paused=paused)
                self._update_chain(key)

    def move(self, positions: Iterable[tuple[Receiver, Position]]) -> None:
        """Give receivers new positions; those that are not connected are ignored."""
        with self._lock:
            moved = {make_id(receiver): position for receiver, position in positions}
            moved = {key: position for key, position in moved.items() if key in self.subscriptions}
            for key, position in moved.items():
                self.subscriptions[key] = replace(self.subscriptions[key], position=position)
            self._update_chain(*moved)

    def emit(self, run: Run, event: E) -> None:
        """Call every receiver in order; an error is raised at once, unless its owner's errors are forgiven."""
        if self.is_muted:
            return
        alarms, owners = self._alarms, self._owners
        receivers = iter(self.chain if alarms is None else alarms.receivers(run, event))
        if self.probe is not None:
            receivers = self.probe(receivers, owners)
        while True:
            try:
                for receiver in receivers:
                    receiver(run, event=event)
                break
            except BaseException as error:  # whose it is is noted, then it is raised unless it is an observer's
                if not self._bus.forgive(owners[id(receiver)], run, event, error):
                    raise
        if self._bus.deferred:
            self._bus.run_deferred(sys._getframe(1))

    def emit_each(self, run: Run, event: E) -> Iterator[tuple[str, BaseException]]:
        """Call every receiver even if some fail; yield each error, with its owner, at once. A second Ctrl-C raises."""
        receivers, owners = iter(() if self.is_muted else self.chain), self._owners
        if self.probe is not None:
            receivers = self.probe(receivers, owners)
        for receiver in receivers:
            try:
                receiver(run, event=event)
            except BaseException as error:  # the caller attaches or raises it
                if self._bus.is_second_interrupt(error):
                    raise
                if not self._bus.forgive(owners[id(receiver)], run, event, error):
                    yield owners[id(receiver)], error

    def receivers_for(self, sender: Any) -> Iterator[Receiver]:  # type: ignore[override]  # any iterator does
        """Yield the receivers in order, so that blinker's own `send` keeps it too."""
        called = {make_id(receiver): receiver for receiver in super().receivers_for(sender)}
        return iter([called[key] for key, each in self._sort() if key in called and not each.paused])

    def listeners(self) -> Iterator[tuple[Receiver, Subscription]]:
        """Yield the receivers that are called, in order, each with what is known of it."""
        for key, each in self._sort():
            held = self.receivers.get(key)  # a weak one may be gone by now
            receiver = held() if isinstance(held, weakref.ref) else held
            if receiver is not None and not each.paused:
                yield receiver, each

    def rebuild(self) -> None:
        """Make the whole chain again, with the present interceptors."""
        with self._lock:
            called = [(key, each) for key, each in self._sort() if not each.paused]
            chain = tuple(self._link(key, each) for key, each in called)
            self._bus.receiver_count += len(chain) - len(self.chain)
            self._owners = {id(link): each.owner for link, (_, each) in zip(chain, called, strict=True)}
            self._positions = [each.position for _, each in called]
            self._chained = {key: each.position for key, each in called}
            self.chain = chain
            self._set_alarms()

    def _update_chain(self, *keys: Any) -> None:
        """Remove receivers from the chain, and insert those that are called; the rest stays as it is."""
        receiver_count = len(self.chain)
        for key in keys:
            if (position := self._chained.pop(key, None)) is not None:
                index = bisect_left(self._positions, position)
                del self._positions[index]
                self._owners = self._owners.copy()  # an emission that has not ended uses the former
                self._owners.pop(id(self.chain[index]), None)
                self.chain = self.chain[:index] + self.chain[index + 1 :]
        for key in keys:
            if key in self.receivers and not (known := self.subscriptions[key]).paused:
                link, index = self._link(key, known), bisect_left(self._positions, known.position)
                self._positions.insert(index, known.position)
                self._chained[key] = known.position
                self._owners[id(link)] = known.owner
                self.chain = (*self.chain[:index], link, *self.chain[index:])
        self._bus.receiver_count += len(self.chain) - receiver_count
        self._set_alarms()

    def _set_alarms(self) -> None:
        self._alarms = None  # until the rest is there: weak receivers die in any thread
        if self._may_idle:
            from .alarms import alarms_of  # loaded where somebody may be idle

            self._alarms = alarms_of(self.subscriptions, self._chained, self.chain, self._bus.forgive)

    def _sort(self) -> list[tuple[Any, Subscription]]:
        known = self.subscriptions.copy().items()  # weak receivers may die in any thread
        return [(key, each) for key, each in sorted(known, key=lambda one: one[1].position) if key in self.receivers]

    def _link(self, key: Any, subscription: Subscription) -> Receiver:
        """Return the receiver itself, or a closure where it is weak, filtered or bound to a sender; intercepted."""
        held, senders, when, gate = self.receivers[key], self._by_receiver[key], subscription.when, subscription.gate
        if not isinstance(held, weakref.ref) and ANY_ID in senders and when is None and gate is None:
            return self._bus.intercepted(held, subscription.owner)

        def link(run: Run, *, event: Event) -> None:
            receiver = held() if isinstance(held, weakref.ref) else held
            passes = (ANY_ID in senders or make_id(run) in senders) and (gate is None or gate(run, event))
            if receiver is not None and passes and (when is None or when(run)):
                receiver(run, event=event)

        return self._bus.intercepted(link, subscription.owner)

    def _disconnect(self, receiver_id: Any, sender_id: Any) -> None:
        with self._lock:
            super()._disconnect(receiver_id, sender_id)
            if not self._by_receiver.get(receiver_id):
                for table in (self._by_receiver, self.receivers, self.subscriptions):
                    table.pop(receiver_id, None)
            self._update_chain(receiver_id)

    def _clear_state(self) -> None:
        with self._lock:
            super()._clear_state()
            self.subscriptions.clear()
            self.rebuild()


@dataclass(frozen=True, slots=True)
class Handle:
    """A subscription: `remove`, `pause` and `resume` it, or use it as a context that removes it at the end."""

    signal: OrderedSignal[Any]
    receiver: Receiver

    def __repr__(self) -> str:
        return f"<Handle of {describe(self.receiver)} on {self.signal.event.__name__}>"

    def remove(self) -> None:
        """Disconnect for good; doing it twice does no harm."""
        self.signal.disconnect(self.receiver)

    def pause(self) -> None:
        """Stop being called, from the next event on."""
        self.signal.pause(self.receiver, paused=True)

    def resume(self) -> None:
        """Be called again, in the same position."""
        self.signal.pause(self.receiver, paused=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Bus:
    """One per trainer: has the ordered signal of each event type.

    Attributes:
        receiver_count: how many receivers all signals have: without any, the loop can skip much.
        deferred: what is done when no handler runs, each with the name of the plugin that it is for.
        forgiver: decides whether a run continues in spite of a handler's error.
        blamed: the error that last failed a run, with the plugin and the event whose handler raised it.
        interrupted: whether a run is closed because of a Ctrl-C.
    """

    def __init__(self) -> None:
        self._signals: dict[type[Event], OrderedSignal[Any]] = {}
        self._interceptors: list[Interceptor] = []
        self.receiver_count = 0
        self.deferred: list[tuple[str, Callable[[], None]]] = []
        self.forgiver: Callable[[str, Run, Event, BaseException], bool] | None = None
        self.blamed: tuple[BaseException, str, str] | None = None
        self.interrupted = False

    def __repr__(self) -> str:
        counts = [
            f"{len(each.subscriptions)} of {each.event.__name__}" for each in self.signals() if each.subscriptions
        ]
        return f"<Bus: receivers {', '.join(counts) or 'none'}>"

    def signal(self, event: type[E]) -> OrderedSignal[E]:
        """Return the signal of an event type; any blinker code can connect to it, the sender is the run.

        Raises:
            TypeError: `event` is not a subclass of `Event`.
        """
        if not isinstance(event, type) or (signal := self._signals.get(event)) is None:
            check_event(event)
            signal = self._signals[event] = OrderedSignal(self, event)
        return signal

    def signals(self) -> list[OrderedSignal[Any]]:
        """Return the signals in use: the catalogue's order first, then other events as they came."""
        events = [*CATALOGUE, *(event for event in self._signals if event not in CATALOGUE)]
        return [self._signals[event] for event in events if event in self._signals]

    def on(self, event: type[E], receiver: Receiver, *, lane: Lane = Lane.DECIDE, when: When | None = None) -> Handle:
        """Subscribe a function `(run, event)`, after the plugins of its lane; within a handler, in its plugin's name.

        Args:
            event: the event type.
            receiver: called as `receiver(run, event=event)`; held strongly.
            lane: the lane to run in.
            when: a filter such as `Every(steps=10)`, copied; the receiver is called only where it returns true.

        Raises:
            TypeError: the receiver's signature or annotation does not fit the event; not a lane, or not a filter.
            ValueError: it is subscribed to this event already.
        """
        from .signatures import check_filter, check_lane, check_receiver

        check_lane(lane, Lane)
        check_filter("when=", when)
        signal = self.signal(event)
        if make_id(receiver) in signal.subscriptions:
            raise ValueError(f"{describe(receiver)} is subscribed to {event.__name__}: remove its handle first.")
        check_receiver(receiver, event)
        own = when if ismethod(when) else deepcopy(when)  # a filter has state, a method's state is its object's
        signal.connect(receiver, weak=False, subscription=Subscription((lane, sys.maxsize), when=own))
        return Handle(signal, receiver)

    def forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        """Note whose handler failed; return whether the emission continues with the next one."""
        if self.blamed is not None and self.blamed[0] is error:
            return False  # the innermost handler is named, and its plugin's policy applies
        if self.forgiver is not None and self.forgiver(owner, run, event, error):
            return True
        self.blamed = error, owner, event.name
        return False

    def is_second_interrupt(self, error: BaseException) -> bool:
        """Return whether this is a Ctrl-C while a run is closed because of an earlier one."""
        again, is_interrupt = self.interrupted, isinstance(error, KeyboardInterrupt)
        self.interrupted = again or is_interrupt
        return again and is_interrupt

    def run_deferred(self, caller: FrameType | None = None) -> None:
        """Do what was deferred, unless a handler is running: then the emission does it at its end."""
        while self.deferred and current_owner(caller) is None:
            self.deferred.pop(0)[1]()

    def intercepted(self, receiver: Receiver, owner: str) -> Receiver:
        """Return a receiver as all interceptors wrap it, the first of them innermost."""
        for interceptor in self._interceptors:
            receiver = interceptor(receiver, owner)
        return receiver

    def intercept(self, interceptor: Interceptor) -> Callable[[], None]:
        """Wrap every handler, present and future.

        Args:
            interceptor: is given a handler and its owner's name when a chain is made, and returns what is called
                instead, such as a handler that is timed.

        Returns:
            What removes the interceptor.
        """
        self._interceptors.append(interceptor)
        self._rebuild()

        def remove() -> None:
            if interceptor in self._interceptors:
                self._interceptors.remove(interceptor)
                self._rebuild()

        return remove

    def _rebuild(self) -> None:
        for signal in self._signals.values():
            signal.rebuild()


_EMITTERS = frozenset({OrderedSignal.emit.__code__, OrderedSignal.emit_each.__code__})


def current_owner(frame: FrameType | None = None) -> str | None:
    """Return whose handler is running, None outside of any."""
    return current_handler(frame or sys._getframe(1))[0]


def is_within(*names: str) -> bool:
    """Return whether a handler of an event of one of these names runs; found on the stack: only asking costs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _EMITTERS and frame.f_locals["event"].name in names:
            return True
        frame = frame.f_back
    return False


def current_handler(frame: FrameType | None = None) -> tuple[str | None, str]:
    """Return whose handler is running, and the event's name; found on the stack, so that only asking costs."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code in _EMITTERS and "receiver" in (held := frame.f_locals):
            return str(held["owners"][id(held["receiver"])]), held["event"].name
        frame = frame.f_back
    return None, ""
