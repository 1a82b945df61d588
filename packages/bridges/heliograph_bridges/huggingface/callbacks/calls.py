"""Calls of a callback's methods, and requests from its control flags."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from inspect import isfunction, unwrap
from types import CodeType
from typing import Any, NamedTuple

from heliograph import Control, Run
from heliograph.events import Pending
from heliograph.spi import require

from ...own_states import OwnStates

DECLARED = ("stop", "save", "validation", "log")  # the verbs allowed in `asks` of a plugin
# Flags that ask for what is being done: as in the Trainer, they have no effect.
IGNORED = {"on_log": "should_log", "on_evaluate": "should_evaluate", "on_save": "should_save"}
Shown = dict[str, bool]


class Flag(NamedTuple):
    """A flag of `TrainerControl`, the property and the method of `Control` for the same, and its verb."""

    name: str
    read: Callable[[Control], bool]
    ask: Callable[[Control, str], None]
    verb: Pending


FLAGS = (
    Flag("should_training_stop", lambda control: control.should_stop, Control.stop, "stop"),
    Flag("should_epoch_stop", lambda control: control.should_end_epoch, Control.end_epoch, "end_epoch"),
    Flag("should_save", lambda control: control.should_save, Control.request_save, "save"),
    Flag("should_evaluate", lambda control: control.should_validate, Control.request_validation, "validation"),
    Flag("should_log", lambda control: control.should_log, Control.request_log, "log"),
)


def show(theirs: Any, control: Control) -> Shown:
    shown = {flag.name: flag.read(control) for flag in FLAGS}
    vars(theirs).update(shown)
    return shown


def changes(theirs: Any, shown: Shown) -> Iterator[tuple[Flag, bool]]:
    if vars(theirs) == shown:
        return
    for flag in FLAGS:
        if (value := bool(getattr(theirs, flag.name))) != shown[flag.name]:
            yield flag, value


def asks_of(names: Container[str]) -> tuple[str, ...]:
    return tuple(flag.verb for flag in FLAGS if flag.name in names and flag.verb in DECLARED)


def names_in(callback: Any) -> frozenset[str]:
    return frozenset(name for code in _codes(type(callback)) for name in code.co_names)


def _codes(kind: type) -> Iterator[CodeType]:
    waiting: list[CodeType] = []
    for base in kind.__mro__:
        for value in vars(base).values():
            function = unwrap(getattr(value, "__func__", value)) if callable(value) else None
            waiting += [function.__code__] if isfunction(function) else []
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code


class CallbackCaller:
    """Calls the methods of a callback, and turns changed flags into requests.

    Args:
        callback: the callback.
        base: `transformers.TrainerCallback`, whose methods do nothing.
        own_states: records a stop that the callback requests.

    Attributes:
        kind: the name of its class.
        methods: its methods, by name.
        called: the names of the methods called in this training.
        run: the current run.
        args: its `args`.
        keywords: its keyword arguments.
    """

    def __init__(self, callback: Any, base: type, own_states: OwnStates) -> None:
        kind, self._own_states = type(callback), own_states
        self.kind = kind.__name__
        self.methods = {
            name: getattr(callback, name)
            for name in dir(base)
            if name.startswith("on_") and (getattr(kind, name) is not getattr(base, name) or name in vars(callback))
        }
        self._control = require("transformers", "from_huggingface", extra="transformers").TrainerControl()
        self.args: Any = None
        self.keywords: dict[str, Any] = {}
        self.begin()
        self.leave()

    def begin(self) -> None:
        self.called: set[str] = set()

    def meet(self, run: Run, args: Any, keywords: Mapping[str, Any]) -> None:
        self.run: Run | None = run
        self.args, self.keywords = args, dict(keywords)

    def leave(self) -> None:
        self.run, self.args, self.keywords = None, None, {}

    def has(self, *names: str) -> bool:
        return any(name in self.methods for name in names)

    def uncalled(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self.methods and name not in self.called]

    def __call__(self, run: Run, name: str, state: Any, **more: Any) -> None:
        method = self.methods.get(name)
        if method is None:
            return
        self.called.add(name)
        control = self._control
        shown = show(control, run.control)
        returned = method(self.args, state, control, **self.keywords, **more)
        if returned is not None and returned is not control:
            if not isinstance(returned, type(control)):
                raise TypeError(
                    f"{self.kind}.{name} returned {returned!r}: a callback must return its control, or None."
                )
            self._control = control = returned
        for flag, value in changes(control, shown):
            if flag.name != IGNORED.get(name):
                self._apply(run, flag, name, value=value)

    def _apply(self, run: Run, flag: Any, name: str, *, value: bool) -> None:
        reason = f"{flag.name} = {value} in {self.kind}.{name}"
        if value:
            flag.ask(run.control, reason)
        else:
            run.control.withdraw(flag.verb, reason)
        if flag.verb == "stop":
            self._own_states.stop_reason = reason if value else ""
