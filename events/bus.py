"""The bus: one ordered blinker signal for each event type. No other file imports blinker."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import IntEnum
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
Position = tuple[int, ...]  # the lane, and the place in it
Interceptor = Callable[[Receiver, str], Receiver]
Probe = Callable[[Iterator[Receiver], Mapping[int, str]], Iterator[Receiver]]
Lane = IntEnum("Lane", ["TRANSFORM", "MEASURE", "DECIDE", "PERSIST", "REPORT"])
Lane.__doc__ = "The order in which the handlers of one event run."


class FunctionName(str):
    """The owner name of a function that no plugin connected.

    The type distinguishes it from a plugin of the same name.
    """


class PluginName(str):
    """The owner name of a registered plugin.

    The type distinguishes it from a function of the same name.
    """


@dataclass(slots=True)
class Subscription:
    """How a signal calls a receiver.

    Attributes:
        position: its position among the receivers.
        owner: the plugin that has the handler or connected it within a handler; else the receiver's name.
        when: the filter; None passes every event.
        gate: the condition of its plugin, evaluated before the filter; None if there is none.
        paused: whether the receiver is skipped.
        idle_until: returns the count until which it need not be called; None if it may always be due. A filter may have
            this attribute instead.
    """

    position: Position
    owner: str = ""
    when: When | None = None
    paused: bool = False
    gate: Gate | None = None
    idle_until: Idle | None = None


class OrderedSignal(Signal, Generic[E]):
    """A blinker signal that calls its receivers in a fixed order.

    Receivers are called as `receiver(run, event=event)`. A change during an emission takes effect from the next one.

    Attributes:
        chain: the receivers in their order; every change creates a new tuple.
        subscriptions: the `Subscription` of each receiver, by blinker's key.
        probe: wraps the iterator of receivers, to observe when each begins and ends. It is called with the iterator and
            the owners' names by `id`. Setting it for a single batch is cheap, because it does not rebuild the chain.
    """

    # A subclass instead of a wrapper: blinker emits no signal when a weakly referenced receiver is collected.
    # Slots for the attributes that an emission reads: three times as fast as blinker's `__dict__`.
    __slots__ = ("_alarms", "_bus", "_owners", "chain", "is_muted", "probe")

    def __init__(self, bus: Bus, event: type[E]) -> None:
        super().__init__(event.__doc__)
        self.event = event
        self.chain: tuple[Receiver, ...] = ()
        self.probe: Probe | None = None
        self.subscriptions: dict[Any, Subscription] = {}
        self._bus = bus
        self._owners: dict[int, str] = {}
        self._called: list[tuple[Any, Subscription]] = []  # active subscriptions in order, by blinker's key
        self._alarms: Alarms | None = None  # None if no receiver is ever idle
        self._arrivals = count()
        self._lock = RLock()  # weak receivers may be collected in any thread

    def __repr__(self) -> str:
        owners = [subscription.owner for _, subscription in self._sort()]
        return f"<OrderedSignal of {self.event.__name__}: {', '.join(owners) or 'no receivers'}>"

    def connect(
        self, receiver: Any, sender: Any = ANY, weak: bool = True, subscription: Subscription | None = None
    ) -> Any:
        """Connect a receiver, as in blinker.

        Args:
            receiver: called as `receiver(run, event=event)`.
            sender: the run to receive from; by default any.
            weak: whether the signal holds only a weak reference to the receiver.
            subscription: for a receiver whose signature was already checked. Without it the signature is checked, and
                the receiver runs after all lanes.
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
            try:
                return super().connect(receiver, sender, weak)
            finally:
                if key not in self.receivers:
                    self.subscriptions.pop(key, None)
                self.rebuild()

    def pause(self, receiver: Receiver, *, paused: bool) -> None:
        """Pause a connected receiver, or resume it."""
        with self._lock:
            subscription = self.subscriptions.get(key := make_id(receiver))
            if subscription is not None and subscription.paused != paused:
                self.subscriptions[key] = replace(subscription, paused=paused)
                self.rebuild()

    def move(self, positions: Iterable[tuple[Receiver, Position]]) -> None:
        """Set the positions of receivers; receivers that are not connected are ignored."""
        with self._lock:
            moved = {make_id(receiver): position for receiver, position in positions}
            moved = {key: position for key, position in moved.items() if key in self.subscriptions}
            for key, position in moved.items():
                self.subscriptions[key] = replace(self.subscriptions[key], position=position)
            self.rebuild()

    def emit(self, run: Run, event: E) -> None:
        """Call every receiver in order; raise the first error that is not forgiven."""
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
            except BaseException as error:
                if not self._bus.forgive(owners[id(receiver)], run, event, error):
                    raise
        if self._bus.deferred:
            self._bus.run_deferred(sys._getframe(1))

    def emit_each(self, run: Run, event: E) -> Iterator[tuple[str, BaseException]]:
        """Call every receiver even if some fail; yield each error with its owner.

        A second Ctrl-C is raised immediately.
        """
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
        """Yield the receivers of a sender in order, also for blinker's own `send`."""
        called = {make_id(receiver): receiver for receiver in super().receivers_for(sender)}
        return iter([called[key] for key, subscription in self._sort() if key in called and not subscription.paused])

    def listeners(self) -> Iterator[tuple[Receiver, Subscription]]:
        """Yield the active receivers in order, with their subscriptions."""
        for key, subscription in self._called:
            reference = self.receivers.get(key)  # None if a weak receiver was collected meanwhile
            receiver = reference() if isinstance(reference, weakref.ref) else reference
            if receiver is not None:
                yield receiver, subscription

    def rebuild(self) -> None:
        """Rebuild the chain with the current interceptors."""
        with self._lock:
            called = [(key, subscription) for key, subscription in self._sort() if not subscription.paused]
            chain = tuple(self._link(key, subscription) for key, subscription in called)
            subscriptions = [subscription for _, subscription in called]
            alarms = None
            if any(item.idle_until is not None or item.when is not None for item in subscriptions):
                from .alarms import alarms_of  # loaded only if a receiver may be idle

                alarms = alarms_of(subscriptions, chain, self._bus.forgive)
            self._bus.receiver_count += len(chain) - len(self.chain)
            self._owners = {id(link): item.owner for link, item in zip(chain, subscriptions, strict=True)}
            self.chain, self._alarms, self._called = chain, alarms, called

    def _sort(self) -> list[tuple[Any, Subscription]]:
        items = self.subscriptions.copy().items()  # a copy: weak receivers may be collected in any thread
        return [item for item in sorted(items, key=lambda item: item[1].position) if item[0] in self.receivers]

    def _link(self, key: Any, subscription: Subscription) -> Receiver:
        reference, senders = self.receivers[key], self._by_receiver[key]
        when, gate = subscription.when, subscription.gate
        if not isinstance(reference, weakref.ref) and ANY_ID in senders and when is None and gate is None:
            return self._bus.intercepted(reference, subscription.owner)

        def link(run: Run, *, event: Event) -> None:
            receiver = reference() if isinstance(reference, weakref.ref) else reference
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
            self.rebuild()

    def _clear_state(self) -> None:
        with self._lock:
            super()._clear_state()
            self.subscriptions.clear()
            self.rebuild()


@dataclass(frozen=True, slots=True)
class Handle:
    """A subscription that can be removed, paused and resumed.

    As a context manager, it removes the subscription at the end.
    """

    signal: OrderedSignal[Any]
    receiver: Receiver

    def __repr__(self) -> str:
        return f"<Handle of {describe(self.receiver)} on {self.signal.event.__name__}>"

    def remove(self) -> None:
        """Disconnect the receiver; a second call has no effect."""
        self.signal.disconnect(self.receiver)

    def pause(self) -> None:
        """Stop calling the receiver, from the next event on."""
        self.signal.pause(self.receiver, paused=True)

    def resume(self) -> None:
        """Call the receiver again, in the same position."""
        self.signal.pause(self.receiver, paused=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Bus:
    """The signals of a trainer, one for each event type.

    Attributes:
        receiver_count: the number of receivers of all signals; without any, the loop skips most of its work.
        deferred: actions to run when no handler is running, each with the name of its plugin.
        forgiver: returns True if a run continues after an error of a handler.
        blamed: the error that last failed a run, with the plugin and the event of the handler that raised it.
        interrupted: whether a run is being closed because of a Ctrl-C.
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
        signals = [signal for signal in self.signals() if signal.subscriptions]
        counts = [f"{len(signal.subscriptions)} of {signal.event.__name__}" for signal in signals]
        return f"<Bus: receivers {', '.join(counts) or 'none'}>"

    def signal(self, event: type[E]) -> OrderedSignal[E]:
        """Return the signal of an event type; blinker code can connect to it.

        The sender of its emissions is the run.

        Raises:
            TypeError: `event` is not a subclass of `Event`.
        """
        if not isinstance(event, type) or (signal := self._signals.get(event)) is None:
            check_event(event)
            signal = self._signals[event] = OrderedSignal(self, event)
        return signal

    def signals(self) -> list[OrderedSignal[Any]]:
        """Return the signals in use: in the order of the catalogue, then other events."""
        events = [*CATALOGUE, *(event for event in self._signals if event not in CATALOGUE)]
        return [self._signals[event] for event in events if event in self._signals]

    def on(self, event: type[E], receiver: Receiver, *, lane: Lane = Lane.DECIDE, when: When | None = None) -> Handle:
        """Subscribe a function `(run, event)`, to run after the plugins of its lane.

        If a handler calls this, the function belongs to the handler's plugin.

        Args:
            event: the event class.
            receiver: called as `receiver(run, event=event)`. The bus keeps a reference to it.
            lane: the lane to run in.
            when: a filter such as `Every(steps=10)`, which is copied. The receiver is called only if it returns true.

        Raises:
            TypeError: the signature or annotation of the receiver does not fit the event, or `lane` or `when` is
                invalid.
            ValueError: the receiver is already subscribed to this event.
        """
        from .signatures import check_filter, check_lane, check_receiver

        check_lane(lane, Lane)
        check_filter("when=", when)
        signal = self.signal(event)
        if make_id(receiver) in signal.subscriptions:
            raise ValueError(
                f"{describe(receiver)} is already subscribed to {event.__name__}: remove its handle first."
            )
        check_receiver(receiver, event)
        if not ismethod(when):  # a copy would detach the method from its object
            when = deepcopy(when)
        signal.connect(receiver, weak=False, subscription=Subscription((lane, sys.maxsize), when=when))
        return Handle(signal, receiver)

    def forgive(self, owner: str, run: Run, event: Event, error: BaseException) -> bool:
        """Record whose handler failed; return True if the emission continues."""
        if self.blamed is not None and self.blamed[0] is error:
            return False  # the innermost handler is recorded, and the policy of its plugin applies
        if self.forgiver is not None and self.forgiver(owner, run, event, error):
            return True
        self.blamed = error, owner, event.name
        return False

    def is_second_interrupt(self, error: BaseException) -> bool:
        """Return True for a Ctrl-C while a run is being closed because of an earlier one."""
        was_interrupted, is_interrupt = self.interrupted, isinstance(error, KeyboardInterrupt)
        self.interrupted = was_interrupted or is_interrupt
        return was_interrupted and is_interrupt

    def run_deferred(self, caller: FrameType | None = None) -> None:
        """Run the deferred actions unless a handler is running; its emission does it then."""
        while self.deferred and current_owner(caller) is None:
            self.deferred.pop(0)[1]()

    def intercepted(self, receiver: Receiver, owner: str) -> Receiver:
        """Return a receiver wrapped by all interceptors, the first one innermost."""
        for interceptor in self._interceptors:
            receiver = interceptor(receiver, owner)
        return receiver

    def intercept(self, interceptor: Interceptor) -> Callable[[], None]:
        """Wrap every current and future handler, for example to time it.

        Args:
            interceptor: called with a handler and its owner's name; returns the function to call instead.

        Returns:
            A function that removes the interceptor.
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


# Handlers are found on the stack, so emissions pay nothing for this.
_EMITTERS = frozenset({OrderedSignal.emit.__code__, OrderedSignal.emit_each.__code__})


def current_owner(frame: FrameType | None = None) -> str | None:
    """Return the owner of the running handler, or None outside of handlers."""
    return current_handler(frame or sys._getframe(1))[0]


def is_within(*names: str) -> bool:
    """True if a handler of an event with one of these names is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _EMITTERS and frame.f_locals["event"].name in names:
            return True
        frame = frame.f_back
    return False


def current_handler(frame: FrameType | None = None) -> tuple[str | None, str]:
    """Return the owner of the running handler and the name of its event."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code in _EMITTERS and "receiver" in (variables := frame.f_locals):
            return str(variables["owners"][id(variables["receiver"])]), variables["event"].name
        frame = frame.f_back
    return None, ""
