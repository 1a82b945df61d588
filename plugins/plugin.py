"""`Plugin`, the optional base class of plugins, and `@on(SomeEvent)`, which marks a method as a handler.

Any object with `@on` methods can be registered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypedDict, TypeVar, Unpack, overload

from ..events import Event, Lane
from ..events.bus import When
from ..events.checks import PLAIN, check_event
from ..events.signatures import check_filter, check_lane, show_value
from .hints import OF_SELF, explains_arguments, explains_attributes

if TYPE_CHECKING:
    from ..events import Run
    from .conditions import Condition

P = TypeVar("P")
E = TypeVar("E", bound=Event)
E1 = TypeVar("E1", bound=Event)
E2 = TypeVar("E2", bound=Event)
E3 = TypeVar("E3", bound=Event)
E4 = TypeVar("E4", bound=Event)
E_co = TypeVar("E_co", bound=Event, covariant=True)
_MARK = "__heliograph_mark__"
Policy = Literal["critical", "observer"]
Ranks = Literal["all", "main", "local_main"]
ARGUMENTS = "__arguments__"  # key in `__dict__` of the texts of the constructor arguments, for `repr`


class MarkOptions(TypedDict, total=False):
    lane: Lane
    before: str | tuple[str, ...]
    after: str | tuple[str, ...]
    when: When | None
    optional: bool
    idle_until: str


@dataclass(frozen=True, slots=True)
class Marker(Generic[E_co]):
    """The arguments of `@on`, as a decorator that does not change the method."""

    events: tuple[type[Event], ...]
    lane: Lane = Lane.DECIDE
    before: str | tuple[str, ...] = ()
    after: str | tuple[str, ...] = ()
    when: When | None = None
    optional: bool = False
    idle_until: str = ""

    def __call__(self: Marker[E], method: Callable[[P, Run, E], None]) -> Callable[[P, Run, E], None]:
        if hasattr(method, _MARK):
            name = method.__qualname__
            raise TypeError(f"{name} is marked with @on twice: name both events in one, @on(EpochEnd, TrainEnd).")
        setattr(method, _MARK, self)
        return method

    @property
    def names_before(self) -> Sequence[str]:
        return (self.before,) if isinstance(self.before, str) else self.before

    @property
    def names_after(self) -> Sequence[str]:
        return (self.after,) if isinstance(self.after, str) else self.after


@overload
def on(event: type[E1], /, **options: Unpack[MarkOptions]) -> Marker[E1]: ...
@overload
def on(event: type[E1], event2: type[E2], /, **options: Unpack[MarkOptions]) -> Marker[E1 | E2]: ...
@overload
def on(
    event: type[E1], event2: type[E2], event3: type[E3], /, **options: Unpack[MarkOptions]
) -> Marker[E1 | E2 | E3]: ...
@overload
def on(
    event: type[E1], event2: type[E2], event3: type[E3], event4: type[E4], /, **options: Unpack[MarkOptions]
) -> Marker[E1 | E2 | E3 | E4]: ...
@overload
def on(*events: type[Event], **options: Unpack[MarkOptions]) -> Marker[Event]: ...
def on(*events: type[Event], **options: Unpack[MarkOptions]) -> Marker[Any]:
    """Mark a method `(self, run, event)` as a handler of one or more events.

    Args:
        *events: event classes.
        **options: `lane` is one of `TRANSFORM`, `MEASURE`, `DECIDE` (the default), `PERSIST` and `REPORT`. `before` and
            `after` are names of plugins: the handler runs before or after their handlers of the same lane. `when` is a
            filter such as `Every(steps=10)`; every plugin object gets a copy. `optional=True` suppresses the warning
            that the result has if a training never calls the handler. `idle_until` is the name of a method `(self,
            run)` that returns the count at which the handler is next due, such as `(attrgetter("steps"), 1000)`, or
            None if it is unknown; the handler is not called before.

    Raises:
        TypeError: no event is passed, an event is not an event class, or `lane` or `when` is invalid.
    """
    if not events:
        raise TypeError("@on() needs at least one event class, as in @on(EpochEnd).")
    for event in events:
        check_event(event)
    check_lane(options.get("lane", Lane.DECIDE), Lane)
    check_filter("when=", options.get("when"))
    return Marker(events, **options)


def marked_methods(kind: type) -> Iterator[tuple[str, Marker[Any]]]:
    """Yield the names and marks of a class's handlers.

    An override without a mark keeps the inherited mark, except its `idle_until`, which need not fit the override.
    """
    marks: dict[str, Marker[Any]] = {}
    for base in reversed(kind.__mro__):
        for name, method in vars(base).items():
            if isinstance(mark := getattr(method, _MARK, 0), Marker):
                marks[name] = mark
            elif name in marks:
                marks[name] = replace(marks[name], idle_until="")
    yield from marks.items()


@explains_attributes(OF_SELF)
class Plugin:
    """Base class of plugins: objects whose `@on` methods are called with the events.

    Attributes:
        name: unique among the trainer's plugins; by default the class name in snake case.
        policy: `critical`: an error fails the run. `observer`: an error is logged and counted, up to `max_errors`.
        max_errors: the number of errors after which an observer is switched off.
        ignores: events whose handlers are not connected, because this object does not need them with its options.
        draws: whether an observer's handlers may draw random numbers. With `RNGCapture` they then run isolated from the
            training's generators, which takes some 50 microseconds for each call; False avoids this.
        ranks: the processes on which its handlers run: `all`, the `main` one, or the `local_main` one of every machine.
            Handlers that do not run on all ranks must not call collectives such as `run.engine.reduce`.
        affects_training: False if it cannot change weights, random numbers or the length, for example because it only
            writes files. It may then be added, removed or changed at a resume. An observer never affects the training.
        exclusive: capabilities that only one registered plugin may claim.
        asks: what the plugin may request of the loop: `stop`, `validation`, `save`, `log`, and other verbs of
            `Control`. On several ranks `skip_batch` and `skip_step` must be declared, because the ranks vote on them. A
            loop that cannot serve a declared verb, such as another framework's, refuses the plugin immediately.
        needs: requests that another plugin must make, because this one has no effect without them.
        brings: plugin classes to register together with this plugin, created without arguments, unless a plugin of the
            class is registered. If you register one later, it replaces the brought one. Brought plugins are
            unregistered together with this plugin.
        state_version: the version of the state's format. If you change the format, increase it and write
            `migrate_state`.
        condition: the condition of `when`, or None.
        rehearses: False to omit the plugin from `tuning.rehearse`, because its effects cannot be undone, such as a
            report to another program.
    """

    name: str = "plugin"
    policy: Policy = "critical"
    max_errors: int = 3
    ignores: tuple[type[Event], ...] = ()
    draws: bool = True
    ranks: Ranks = "all"
    affects_training: bool = True
    exclusive: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    brings: tuple[type[Plugin], ...] = ()
    state_version: int = 1
    condition: Condition | None = None
    rehearses: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = snake_case(cls.__name__)
        if isinstance(constructor := cls.__dict__.get("__init__"), FunctionType):
            cls.__init__ = _recorded(constructor)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Return the constructor call with the passed arguments, or their current values."""
        texts, now = self.__dict__.get(ARGUMENTS, {}), self.__dict__
        shown = {name: show_value(now[name]) if type(now.get(name, ...)) in PLAIN else texts[name] for name in texts}
        arguments = ", ".join(text if name.isdecimal() else f"{name}={text}" for name, text in shown.items())
        named = f".named({show_value(self.name)})" if "name" in now.keys() - shown.keys() else ""
        return f"{type(self).__name__}({arguments}){named}"

    def named(self, name: str) -> Self:
        """Set the name of this object, so that two plugins of a class can be registered."""
        self.name = name
        return self

    def when(self, condition: When | None = None, *, phases: Sequence[str] = (), sets: Sequence[str] = ()) -> Self:
        """Call the handlers only while a condition holds.

        Call this before the plugin is registered. The condition is evaluated before each handler, but it never splits a
        window of micro-batches, a validation or a test: its value at the first handler applies to all of it.
        `TrainStart`, `CheckpointLoaded`, `RunFailed` and `RunClosed` are always handled. The conditions of several
        calls must all hold. Conditions are not saved: a resumed run evaluates them again.

        Args:
            condition: a function of the run, such as `lambda run: run.progress.epoch >= 3`, or `Between(...)`. It must
                return the same on all ranks.
            phases: the phases in which to call the handlers: `train`, `validation`, `test`.
            sets: the names of validation or test sets; in evaluations, only their batches are handled.

        Raises:
            TypeError: there is no argument, or the condition is invalid.
            ValueError: a phase is unknown, or several calls exclude each other.
        """
        from .conditions import Condition

        self.condition = Condition(self.condition, condition, phases, sets)
        return self

    def reset(self) -> None:
        """Discard what the object remembers of an earlier training.

        Called before `TrainStart` of every training in which the plugin takes part. A validation or test alone resets
        nothing, nor does a run on a rank where its handlers do not run.
        """

    def describe(self, run: Run) -> str:
        """Return the plugin's part in a run, such as `saves to runs every 100 steps`.

        Called after the run has restored its state and before its first epoch, and by `trainer.plan(task, train, ...)`,
        which starts no run. Return an empty text if there is nothing to say.
        """
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, as plain types and tensors.

        An empty state means that the plugin is as `reset` and `TrainStart` leave it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Called after every handler of `TrainStart`, and when a run rolls back. It must accept every result of
        `state_dict`. A roll-back also passes an empty state: restore what `reset` and `TrainStart` set. A resume does
        not pass empty states.
        """

    def migrate_state(self, state: dict[str, Any], version: int) -> Mapping[str, Any]:
        """Convert a state of an older `state_version` to the current format."""
        raise NotImplementedError

    def rehearse(self, folder: Path) -> Iterable[Path]:
        """Write to `folder` from now on; return the paths that it would write to.

        Called before a rehearsal, which must not write anywhere else. Set attributes, but do not open files: the
        attributes are restored afterwards. A plugin that continues from existing files, such as a resume, reads them
        from `folder`.
        """
        return ()

    def forecast(self, totals: Mapping[str, float]) -> Mapping[str, int]:
        """Return how many `log`, `validation` and `save` requests it will make in a run.

        Omit numbers that are unknown. A plugin that writes checkpoints also returns how many are `kept` at the same
        time, if it removes some.

        Args:
            totals: the known totals of the run: `epochs`, `batches`, `samples`, `seconds`, `steps`.
        """
        return {}

    def close(self) -> None:
        """Close files, progress bars and so on.

        Called after `RunClosed`, and when the plugin is disabled or unregistered.
        """


def _recorded(constructor: FunctionType) -> Callable[..., None]:
    explained = explains_arguments(constructor)

    @wraps(constructor)
    def construct(self: Any, *values: Any, **options: Any) -> None:
        if ARGUMENTS not in self.__dict__:  # else this is the constructor of a base class
            code, defaults = constructor.__code__, constructor.__defaults__ or ()
            names = code.co_varnames[1 : code.co_argcount]
            arguments = dict(zip([*names, *map(str, range(len(values)))], values, strict=False)) | options
            if names and len(names) == len(defaults) and defaults[0] is not None:
                arguments = {names[0]: defaults[0]} | arguments
            self.__dict__[ARGUMENTS] = {name: show_value(value) for name, value in arguments.items()}
        explained(self, *values, **options)

    return construct


def snake_case(name: str) -> str:
    """Return a class name as a plugin name: `NaNGuard` becomes `nan_guard`."""
    name = name.replace("NaN", "Nan")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
