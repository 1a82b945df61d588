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
    from .run import Run

E = TypeVar("E", bound=Event)
Receiver = Callable[..., Any]
When = Callable[["Run"], bool]
Place = tuple[int | Fraction, ...]  # the lane, and where in it
Wrapper = Callable[[Receiver, str], Receiver]
Probe = Callable[[Iterator[Receiver], Mapping[int, str]], Iterator[Receiver]]
Lane = IntEnum("Lane", ["TRANSFORM", "MEASURE", "DECIDE", "PERSIST", "REPORT"])
Lane.__doc__ = "The order in which the handlers of one event run."


class FunctionName(str):
    """The name of a function that no plugin connected, so that a plugin may have the same name."""


class PluginName(str):
    """The name of a registered plugin, so that a function may have the same name."""


@dataclass(slots=True)
class Seat:
    """What the signal knows of a receiver: where it sits in the chain, whose it is and when it listens.

    Without an owner it is the plugin's whose handler connects it, else its own.
    """

    order: Place
    owner: str = ""
    when: When | None = None
    paused: bool = False


class OrderedSignal(Signal, Generic[E]):
    """A blinker signal whose receivers run in a fixed order, from a tuple that a change alone replaces.

    A change during a dispatch takes effect from the next one. Receivers are called as `receiver(run, event=event)`.

    Attributes:
        chain: the receivers in their order.
        probe: hands the receivers on, given their owners' names by `id`, and so sees when each begins and ends; None
            costs nothing.
    """

    def __init__(self, bus: Bus, event: type[E]) -> None:
        super().__init__(event.__doc__)
        self.event = event
        self.chain: tuple[Receiver, ...] = ()
        self.probe: Probe | None = None
        self.seats: dict[Any, Seat] = {}
        self._bus = bus
        self._owners: dict[int, str] = {}
        self._orders: list[Place] = []  # of the chain's receivers
        self._linked: dict[Any, Place] = {}
        self._arrivals = count()
        self._lock = RLock()  # weak receivers may die in any thread

    def connect(self, receiver: Any, sender: Any = ANY, weak: bool = True, seat: Seat | None = None) -> Any:
        """Connect as blinker does; a seat places the receiver, without one it runs behind all lanes.

        A receiver with a seat was checked by whoever gave it the seat.
        """
        if seat is None:
            from .signatures import check_receiver

            check_receiver(receiver, self.event)
            seat = Seat((len(Lane) + 1,))
        owner = seat.owner or current_owner() or FunctionName(describe(receiver))
        with self._lock:
            if (key := make_id(receiver)) not in self.seats:
                self.seats[key] = replace(seat, order=(*seat.order, next(self._arrivals)), owner=owner)
            try:
                return super().connect(receiver, sender, weak)
            finally:
                if key not in self.receivers:
                    self.seats.pop(key, None)
                self._relink(key)

    def pause(self, receiver: Receiver, *, paused: bool) -> None:
        """Silence a connected receiver, or let it hear again."""
        with self._lock:
            if (seat := self.seats.get(key := make_id(receiver))) is not None and seat.paused != paused:
                self.seats[key] = replace(seat, paused=paused)
                self._relink(key)

    def move(self, orders: Iterable[tuple[Receiver, Place]]) -> None:
        """Give receivers new places; those that are not connected are passed over."""
        with self._lock:
            places = {key: order for receiver, order in orders if (key := make_id(receiver)) in self.seats}
            self.seats |= {key: replace(self.seats[key], order=order) for key, order in places.items()}
            self._relink(*places)

    def emit(self, run: Run, event: E) -> None:
        """Call every receiver in order; a receiver's error leaves at once, unless its owner is forgiven."""
        if self.is_muted:
            return
        receivers, owners = iter(self.chain), self._owners
        if self.probe is not None:
            receivers = self.probe(receivers, owners)
        while True:
            try:
                for receiver in receivers:
                    receiver(run, event=event)
                break
            except BaseException as error:  # attributed, then raised unless an observer plugin's
                if not self._bus.forgive(owners[id(receiver)], run, event, error):
                    raise
        if self._bus.deferred:
            self._bus.settle(sys._getframe(1))

    def emit_each(self, run: Run, event: E) -> Iterator[tuple[str, BaseException]]:
        """Call every receiver even if some fail; yield each error with its owner, at once. A second Ctrl-C leaves."""
        receivers, owners = iter(() if self.is_muted else self.chain), self._owners
        if self.probe is not None:
            receivers = self.probe(receivers, owners)
        for receiver in receivers:
            try:
                receiver(run, event=event)
            except BaseException as error:  # handed to the caller, which attaches or raises it
                if self._bus.is_second_interrupt(error):
                    raise
                if not self._bus.forgive(owners[id(receiver)], run, event, error):
                    yield owners[id(receiver)], error

    def receivers_for(self, sender: Any) -> Iterator[Receiver]:  # type: ignore[override]  # any iterator does
        """Yield the receivers in order, so that blinker's own `send` keeps it too."""
        called = {make_id(receiver): receiver for receiver in super().receivers_for(sender)}
        return iter([called[key] for key in self._sorted() if key in called and not self.seats[key].paused])

    def listeners(self) -> Iterator[tuple[Receiver, Seat]]:
        """Yield the receivers that are called, in order, each with what is known of it."""
        for key in self._sorted():
            held, seat = self.receivers.get(key), self.seats.get(key)  # a weak one may be gone by now
            receiver = held() if isinstance(held, weakref.ref) else held
            if receiver is not None and seat is not None and not seat.paused:
                yield receiver, seat

    def rebuild(self) -> None:
        """Prepare the tuple that `emit` walks."""
        with self._lock:
            seats = [(key, self.seats[key]) for key in self._sorted() if not self.seats[key].paused]
            chain = tuple(self._link(key, seat) for key, seat in seats)
            self._bus.receiver_count += len(chain) - len(self.chain)
            self._owners = {id(link): seat.owner for link, (_, seat) in zip(chain, seats, strict=True)}
            self._orders = [seat.order for _, seat in seats]
            self._linked = {key: seat.order for key, seat in seats}
            self.chain = chain

    def _relink(self, *keys: Any) -> None:
        """Bring the place of some receivers in the chain up to date; the rest of the chain stays as it is."""
        receiver_count = len(self.chain)
        for key in keys:
            if (order := self._linked.pop(key, None)) is not None:
                place = bisect_left(self._orders, order)
                del self._orders[place]
                self._owners = self._owners.copy()  # a dispatch that goes on has the former
                self._owners.pop(id(self.chain[place]), None)
                self.chain = self.chain[:place] + self.chain[place + 1 :]
        for key in keys:
            if key in self.receivers and not (seat := self.seats[key]).paused:
                link, place = self._link(key, seat), bisect_left(self._orders, seat.order)
                self._orders.insert(place, seat.order)
                self._linked[key] = seat.order
                self._owners[id(link)] = seat.owner
                self.chain = (*self.chain[:place], link, *self.chain[place:])
        self._bus.receiver_count += len(self.chain) - receiver_count

    def _sorted(self) -> list[Any]:
        seats = self.seats.copy().items()  # weak receivers may die in any thread
        return [key for key, _ in sorted(seats, key=lambda each: each[1].order) if key in self.receivers]

    def _link(self, key: Any, seat: Seat) -> Receiver:
        """Return the receiver itself, or a closure where it is weak, filtered or bound to a sender."""
        held, senders, when = self.receivers[key], self._by_receiver[key], seat.when
        if not isinstance(held, weakref.ref) and ANY_ID in senders and when is None:
            return self._bus.wrap(held, seat.owner)

        def link(run: Run, *, event: Event) -> None:
            receiver = held() if isinstance(held, weakref.ref) else held
            sent_here = ANY_ID in senders or make_id(run) in senders
            if receiver is not None and sent_here and (when is None or when(run)):
                receiver(run, event=event)

        return self._bus.wrap(link, seat.owner)

    def _disconnect(self, receiver_id: Any, sender_id: Any) -> None:
        with self._lock:
            super()._disconnect(receiver_id, sender_id)
            if not self._by_receiver.get(receiver_id):
                for table in (self._by_receiver, self.receivers, self.seats):
                    table.pop(receiver_id, None)
            self._relink(receiver_id)

    def _clear_state(self) -> None:
        with self._lock:
            super()._clear_state()
            self.seats.clear()
            self.rebuild()


@dataclass(frozen=True, slots=True)
class Handle:
    """A subscription: `remove`, `pause` and `resume` it, or use it as a context that removes it at the end."""

    signal: OrderedSignal[Any]
    receiver: Receiver

    def remove(self) -> None:
        """Disconnect for good; doing it twice does no harm."""
        self.signal.disconnect(self.receiver)

    def pause(self) -> None:
        """Stop hearing from the next event on."""
        self.signal.pause(self.receiver, paused=True)

    def resume(self) -> None:
        """Hear again, in the same place."""
        self.signal.pause(self.receiver, paused=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Bus:
    """One per trainer: hands out the ordered signal of each event type."""

    def __init__(self) -> None:
        self._signals: dict[type[Event], OrderedSignal[Any]] = {}
        self._wrappers: list[Wrapper] = []
        self.receiver_count = 0  # how many receivers listen to anything: without any, much can be spared
        self.deferred: list[tuple[str, Callable[[], None]]] = []
        self.forgiver: Callable[[str, Run, Event, BaseException], bool] | None = None
        self.blamed: tuple[BaseException, str, str] | None = None
        self.interrupted = False  # a run closes because of a Ctrl-C, or in spite of one

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
        """Subscribe a function `(run, event)`, behind the plugins of its lane; within a handler, in its plugin's name.

        Args:
            event: the event type.
            receiver: called as `receiver(run, event=event)`; held strongly.
            lane: the lane to run in.
            when: a filter such as `Every(steps=10)`, copied; the receiver is called only where it returns true.

        Raises:
            TypeError: the receiver's signature or annotation does not fit the event.
            ValueError: it hears this event already.
        """
        from .signatures import check_receiver

        signal = self.signal(event)
        if make_id(receiver) in signal.seats:
            raise ValueError(f"{describe(receiver)} hears {event.__name__} already: remove its handle first.")
        check_receiver(receiver, event)
        own = when if ismethod(when) else deepcopy(when)  # a filter has state, a method's state is its object's
        signal.connect(receiver, weak=False, seat=Seat((lane, sys.maxsize), when=own))
        return Handle(signal, receiver)

    def forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        """Note whose handler failed; return whether the dispatch goes on without it."""
        if self.blamed is not None and self.blamed[0] is error:
            return False  # the innermost handler is the one to name, and the one to judge by
        if self.forgiver is not None and self.forgiver(owner, run, event, error):
            return True
        self.blamed = error, owner, event.name
        return False

    def is_second_interrupt(self, error: BaseException) -> bool:
        """Return whether this is a Ctrl-C while a run closes upon an earlier one."""
        again, is_interrupt = self.interrupted, isinstance(error, KeyboardInterrupt)
        self.interrupted = again or is_interrupt
        return again and is_interrupt

    def settle(self, caller: FrameType | None = None) -> None:
        """Do what was put off, unless the caller is within a dispatch: then that dispatch does it at its end."""
        while self.deferred and current_owner(caller) is None:
            self.deferred.pop(0)[1]()

    def wrap(self, receiver: Receiver, owner: str) -> Receiver:
        """Return a link of a chain as `wrap_all` wants it."""
        for wrapper in self._wrappers:
            receiver = wrapper(receiver, owner)
        return receiver

    def wrap_all(self, wrapper: Wrapper) -> Callable[[], None]:
        """Put every handler, given with its owner's name, into a wrapper (a clock, say); return what takes it off."""
        self._wrappers.append(wrapper)
        self._rebuild()

        def unwrap() -> None:
            if wrapper in self._wrappers:
                self._wrappers.remove(wrapper)
                self._rebuild()

        return unwrap

    def _rebuild(self) -> None:
        for signal in self._signals.values():
            signal.rebuild()


_EMITTERS = frozenset({OrderedSignal.emit.__code__, OrderedSignal.emit_each.__code__})


def current_owner(frame: FrameType | None = None) -> str | None:
    """Return whose handler is running, None outside of any."""
    return current_handler(frame or sys._getframe(1))[0]


def is_within(*names: str) -> bool:
    """Return whether a handler of an event of one of these names runs; found on the stack: only a question costs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _EMITTERS and frame.f_locals["event"].name in names:
            return True
        frame = frame.f_back
    return False


def current_handler(frame: FrameType | None = None) -> tuple[str | None, str]:
    """Return whose handler is running, and the event's name; from the stack, so only a question costs anything."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code in _EMITTERS:
            held = frame.f_locals
            return str(held["owners"][id(held["receiver"])]), held["event"].name
        frame = frame.f_back
    return None, ""
