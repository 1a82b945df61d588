"""The bus: one ordered blinker signal per event type. This is the one file that imports blinker."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from threading import RLock
from time import perf_counter
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from blinker import ANY, Signal
from blinker._utilities import make_id
from blinker.base import ANY_ID

from .catalogue import CATALOGUE, Event
from .checks import check_event, check_receiver, describe, refuse_coroutine
from .run import Run

E = TypeVar("E", bound=Event)
Receiver = Callable[..., Any]
When = Callable[[Run], bool]


class Lane(IntEnum):
    """The order in which the handlers of one event run."""

    TRANSFORM = 0
    MEASURE = 1
    DECIDE = 2
    PERSIST = 3
    REPORT = 4


@dataclass(slots=True)
class Seat:
    """What the signal knows of a receiver: where it sits in the chain, whose it is and when it listens."""

    order: tuple[int, ...]
    owner: str
    arrival: int
    when: When | None = None
    paused: bool = False


class OrderedSignal(Signal, Generic[E]):
    """A blinker signal whose receivers run in a fixed order, from a tuple that is rebuilt only on a change.

    A change during a dispatch takes effect from the next one. Receivers are called as `receiver(run, event=event)`.
    """

    def __init__(self, bus: Bus, event: type[E]) -> None:
        super().__init__(event.__doc__)
        self.event = event
        self.chain: tuple[Receiver, ...] = ()
        self._bus = bus
        self._seats: dict[Any, Seat] = {}
        self._owners: dict[Receiver, str] = {}
        self._arrivals = count()
        self._lock = RLock()  # weak receivers may die in any thread

    def connect(  # type: ignore[override]  # blinker's signature, with keywords behind it
        self,
        receiver: Receiver,
        sender: Any = ANY,
        weak: bool = True,
        *,
        order: tuple[int, ...] = (len(Lane),),
        owner: str | None = None,
        when: When | None = None,
    ) -> Receiver:
        """Connect as blinker does; `order` places the receiver, the default is behind all lanes."""
        refuse_coroutine(receiver)
        with self._lock:
            key = make_id(receiver)
            if key not in self._seats:
                self._seats[key] = Seat(order, owner or describe(receiver), next(self._arrivals), when)
            try:
                return super().connect(receiver, sender, weak)
            finally:
                self.rebuild()

    def pause(self, receiver: Receiver, paused: bool = True) -> None:
        """Silence a receiver, or let it speak again, without losing its place."""
        with self._lock:
            if (seat := self._seats.get(make_id(receiver))) is not None:
                seat.paused = paused
                self.rebuild()

    def place(self, receiver: Receiver, order: tuple[int, ...]) -> None:
        """Move a connected receiver to another place."""
        with self._lock:
            self._seats[make_id(receiver)].order = order
            self.rebuild()

    def emit(self, run: Run, event: E) -> None:
        """Call every receiver in order; a receiver's error leaves at once, unless its owner is forgiven."""
        if self.is_muted:
            return
        receivers = iter(self.chain)
        while True:
            try:
                for receiver in receivers:
                    receiver(run, event=event)
                return
            except Exception as error:  # attributed, then raised unless an observer plugin's
                if not self._bus.forgive(self.owner_of(receiver), run, event, error):
                    raise

    def emit_each(self, run: Run, event: E) -> list[tuple[str, BaseException]]:
        """Call every receiver even if some fail; return the errors with their owners."""
        errors: list[tuple[str, BaseException]] = []
        for receiver in () if self.is_muted else self.chain:
            try:
                receiver(run, event=event)
            except BaseException as error:  # noqa: BLE001  # handed to the caller, which attaches or raises it
                owner = self.owner_of(receiver)
                if not isinstance(error, Exception) or not self._bus.forgive(owner, run, event, error):
                    errors.append((owner, error))
        return errors

    def owner_of(self, receiver: Receiver) -> str:
        """Return the name of the plugin, or of the function, that a link of the chain belongs to."""
        return self._owners.get(receiver) or describe(receiver)

    def listeners(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Yield (owner, order, paused) of every receiver, in the order in which they run."""
        for key in self._sorted():
            seat = self._seats[key]
            yield seat.owner, seat.order, seat.paused

    def receivers_for(self, sender: Any) -> Iterator[Receiver]:  # type: ignore[override]  # any iterator does
        """Yield the receivers in order, so that blinker's own `send` keeps it too."""
        called = set(super().receivers_for(sender))
        for key in self._sorted():
            receiver = self._strong(key)
            if receiver in called and not self._seats[key].paused:
                yield receiver

    def rebuild(self) -> None:
        """Prepare the tuple that `emit` walks."""
        links: list[Receiver] = []
        owners: dict[Receiver, str] = {}
        for key in self._sorted():
            seat = self._seats[key]
            if not seat.paused:
                link = self._bus.timed(self._link(key, seat), seat.owner)
                owners[link] = seat.owner
                links.append(link)
        self._owners, self.chain = owners, tuple(links)

    def _sorted(self) -> list[Any]:
        return sorted(self._seats, key=lambda key: (self._seats[key].order, self._seats[key].arrival))

    def _strong(self, key: Any) -> Receiver | None:
        receiver = self.receivers.get(key)
        return receiver() if isinstance(receiver, weakref.ref) else receiver

    def _link(self, key: Any, seat: Seat) -> Receiver:
        """Return the receiver itself, or a closure where it is weak, filtered or bound to a sender."""
        held = self.receivers[key]
        bound_to = frozenset(self._by_receiver[key])
        any_sender = ANY_ID in bound_to
        if not isinstance(held, weakref.ref) and any_sender and seat.when is None:
            return held
        when = seat.when

        def link(run: Run, *, event: Event) -> None:
            receiver = held() if isinstance(held, weakref.ref) else held
            if receiver is None or not (any_sender or make_id(run) in bound_to):
                return
            if when is None or when(run):
                receiver(run, event=event)

        return link

    def _disconnect(self, receiver_id: Any, sender_id: Any) -> None:
        with self._lock:
            super()._disconnect(receiver_id, sender_id)
            if not self._by_receiver.get(receiver_id):
                self._by_receiver.pop(receiver_id, None)
                self.receivers.pop(receiver_id, None)
                self._seats.pop(receiver_id, None)
            self.rebuild()

    def _clear_state(self) -> None:
        with self._lock:
            super()._clear_state()
            self._seats.clear()
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
        self.signal.pause(self.receiver)

    def resume(self) -> None:
        """Hear again, in the same place."""
        self.signal.pause(self.receiver, paused=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Bus:
    """One per trainer: hands out the ordered signal of each event type."""

    def __init__(self) -> None:
        self._signals: dict[type[Event], OrderedSignal[Any]] = {}
        self._seconds: dict[str, float] | None = None
        self.forgiver: Callable[[str, Run, Event, Exception], bool] | None = None
        self.blamed: tuple[Exception, str, str] | None = None

    def signal(self, event: type[E]) -> OrderedSignal[E]:
        """Return the signal of an event type; any blinker code can connect to it, the sender is the run.

        Raises:
            TypeError: `event` is not a subclass of `Event`, or lacks the frozen dataclass decorator.
        """
        if (signal := self._signals.get(event)) is None:
            check_event(event)
            signal = self._signals[event] = OrderedSignal(self, event)
        return signal

    def signals(self) -> list[OrderedSignal[Any]]:
        """Return the signals in use: the catalogue's order first, then other events as they came."""
        known = [self._signals[event] for event in CATALOGUE if event in self._signals]
        return known + [signal for event, signal in self._signals.items() if event not in CATALOGUE]

    def on(self, event: type[E], receiver: Receiver, *, lane: Lane = Lane.DECIDE, when: When | None = None) -> Handle:
        """Subscribe a function `(run, event)`, behind the plugins of its lane.

        Args:
            event: the event type.
            receiver: called as `receiver(run, event=event)`; held strongly.
            lane: the lane to run in.
            when: a filter such as `Every(steps=10)`; the receiver is called only where it returns true.
        """
        signal = self.signal(event)
        check_receiver(receiver, event)
        signal.connect(receiver, weak=False, order=(lane, sys.maxsize), when=when)
        return Handle(signal, receiver)

    def emit(self, run: Run, event: Event) -> None:
        """Emit an event of your own, or one that the loop does not emit."""
        self.signal(type(event)).emit(run, event)

    def forgive(self, owner: str, run: Run, event: Event, error: Exception) -> bool:
        """Note whose handler failed; return whether the dispatch goes on without it."""
        if self.forgiver is not None and self.forgiver(owner, run, event, error):
            return True
        if self.blamed is None or self.blamed[0] is not error:  # the innermost handler is the one to name
            self.blamed = error, owner, event.name
        return False

    def time_handlers(self) -> dict[str, float]:
        """Begin to sum the seconds in each owner's handlers, at two clock readings a call; return the live sums."""
        self._seconds = {}
        self._rebuild()
        return self._seconds

    def stop_timing(self) -> None:
        """Take the clocks out again."""
        self._seconds = None
        self._rebuild()

    def timed(self, receiver: Receiver, owner: str) -> Receiver:
        """Return the receiver, wrapped in a clock while `time_handlers` is on."""
        seconds = self._seconds
        if seconds is None:
            return receiver
        seconds.setdefault(owner, 0.0)

        def clocked(run: Run, *, event: Event) -> None:
            begin = perf_counter()
            try:
                receiver(run, event=event)
            finally:
                seconds[owner] += perf_counter() - begin

        return clocked

    def _rebuild(self) -> None:
        for signal in self._signals.values():
            signal.rebuild()


_EMITTERS = frozenset({OrderedSignal.emit.__code__, OrderedSignal.emit_each.__code__})


def current_owner() -> str | None:
    """Return whose handler is running, read from the stack: a dispatch pays nothing for it, only a question does."""
    frame = sys._getframe(1)  # CPython's, as `logging` uses it
    while frame is not None:
        if frame.f_code in _EMITTERS:
            signal: OrderedSignal[Any] = frame.f_locals["self"]
            return signal.owner_of(frame.f_locals["receiver"])
        frame = frame.f_back  # type: ignore[assignment]
    return None
