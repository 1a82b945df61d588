"""The base class of plugins: a convenience, not a requirement."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Self

from ..events import Event, Run
from ..events.checks import PLAIN
from ..events.signatures import show_value
from .hints import OF_SELF, explains_arguments, explains_attributes

if TYPE_CHECKING:
    from ..events.bus import When
    from .conditions import Condition

Policy = Literal["critical", "observer"]
Ranks = Literal["all", "main", "local_main"]
ARGUMENTS = "__arguments__"  # in an object's `__dict__`: the text of each constructor argument, by its name


@explains_attributes(OF_SELF)
class Plugin:
    """An object whose `@on` methods are subscribed when it is registered.

    Attributes:
        name: unique among the trainer's plugins; the class name in snake case unless you set another.
        policy: `critical`, an error fails the run; `observer`, it is logged, and counted up to `max_errors`.
        max_errors: after how many errors an observer is switched off.
        ignores: events that this object, with its options, has no use for: their handlers are not connected.
        draws: whether handlers of an observer may draw random numbers: they then run apart from the training's random
            stream where `RNGCapture` keeps one, which takes 4 microseconds. False saves these.
        ranks: on which of several processes its handlers run: `all`, the `main` one, or the `local_main` one of every
            machine. Where they run on one only, they must not call collectives such as `run.engine.reduce`.
        affects_training: False for one that cannot change weights, draws or length, such as one that only writes files;
            it may be added, removed or have other options at a resume. An observer never can.
        exclusive: capabilities that only one plugin at a time may claim.
        asks: what the plugin may request of the loop: `stop`, `validation`, `save`, `log`; on several ranks also
            `skip_batch` and `skip_step`, for which they vote at every batch or step. The other verbs of the control
            where it uses them, so that a loop that cannot serve them, such as another framework's, refuses it at once.
        needs: what some plugin must request, or this one would never act.
        brings: classes of plugins that are registered with this one, made without arguments, unless one of the class is
            registered. One that you register later takes its place; it is unregistered with the plugin that brought it.
        state_version: of the form of its state; raise it when that changes, and write `migrate_state`.
        condition: what `when` was given; None where its handlers are always called.
        rehearses: False for one that is left out of `tuning.rehearse`, since what it does cannot be taken back, such
            as a report to another program.
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
        """Return the class with its first argument and the others that were given; those changed since as they are."""
        texts, now = self.__dict__.get(ARGUMENTS, {}), self.__dict__
        shown = {name: show_value(now[name]) if type(now.get(name, ...)) in PLAIN else texts[name] for name in texts}
        own = ", ".join(text if name.isdecimal() else f"{name}={text}" for name, text in shown.items())
        named = f".named({show_value(self.name)})" if "name" in now.keys() - shown.keys() else ""
        return f"{type(self).__name__}({own}){named}"

    def named(self, name: str) -> Self:
        """Give this object a name of its own, so that two of a class can be registered."""
        self.name = name
        return self

    def when(self, condition: When | None = None, *, phases: Sequence[str] = (), sets: Sequence[str] = ()) -> Self:
        """Call the handlers of this object only while a condition holds; give it before the plugin is registered.

        The condition is asked before each handler. Within a window of micro-batches, and within a validation or test,
        what it said before the first of them counts for the others: none is split. `TrainStart`, `CheckpointLoaded`,
        `RunFailed` and `RunClosed` always come. What several calls are given must all hold. Nothing of it is saved:
        a resumed run asks again.

        Args:
            condition: a function of the run, such as `lambda run: run.progress.epoch >= 3`, or `Between(...)`; on
                several ranks it must say the same on all of them.
            phases: the phases to be called in: `train`, `validation`, `test`.
            sets: names of validation or test sets: of evaluations, to be called for the batches of these only.

        Raises:
            TypeError: nothing is given, or what is no condition.
            ValueError: there is no such phase, or no phase or set in which all calls hold.
        """
        from .conditions import Condition

        self.condition = Condition(self.condition, condition, phases, sets)
        return self

    def reset(self) -> None:
        """Forget the former training: one object may be in several. Called before `TrainStart`, if this takes part.

        A validation or a test on its own resets nothing, nor does a run on a rank where the handlers do not run.
        """

    def describe(self, run: Run) -> str:
        """Return what this will do in a run, such as `saves to runs every 100 steps`; empty where nobody needs to know.

        Called when the run has its state and before its first epoch, and by `trainer.plan(task, train, ...)`, which
        begins no run.
        """
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain types and tensors. Saved under the plugin's name.

        An empty one means that the plugin is as `reset` and `TrainStart` leave it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; called after every `TrainStart` handler, and when a run rolls back.

        It takes whatever `state_dict` returns. An empty state is given when a run rolls back to where this plugin had
        one: be as `reset` and `TrainStart` leave you. At a resume it is not given, as both have just been called.
        """

    def migrate_state(self, state: dict[str, Any], version: int) -> Mapping[str, Any]:
        """Return a state that was saved with an older `state_version` as `load_state_dict` takes it now."""
        raise NotImplementedError

    def rehearse(self, folder: Path) -> Iterable[Path]:
        """Write to `folder` from now on, and return where this would have written instead.

        Called before a rehearsal, in which nothing may be written elsewhere. Set attributes and open nothing: all of
        them are put back after it. Whatever continues what lies in its own place, a resume say, does so in `folder`.
        """
        return ()

    def forecast(self, totals: Mapping[str, float]) -> Mapping[str, int]:
        """Return how often this would request a `log`, a `validation` and a `save` in a run, where that is known.

        One that writes checkpoints also returns how many would be `kept` at once, where it does not keep all.

        Args:
            totals: what the run would count, as far as it is known: `epochs`, `batches`, `samples`, `seconds`, `steps`.
        """
        return {}

    def close(self) -> None:
        """Close files, bars and the like. Called after `RunClosed`, when disabled, when unregistered."""


def _recorded(constructor: FunctionType) -> Callable[..., None]:
    """Return a constructor that keeps the texts of its arguments in the object, for `repr`: no reference to a value."""
    explained = explains_arguments(constructor)

    @wraps(constructor)
    def construct(self: Any, *values: Any, **options: Any) -> None:
        if ARGUMENTS not in self.__dict__:  # or a class of which this one inherits: the first has all arguments
            code, defaults = constructor.__code__, constructor.__defaults__ or ()
            names = code.co_varnames[1 : code.co_argcount]
            given = dict(zip([*names, *map(str, range(len(values)))], values, strict=False)) | options
            if names and len(names) == len(defaults) and defaults[0] is not None:
                given = {names[0]: defaults[0]} | given
            self.__dict__[ARGUMENTS] = {name: show_value(value) for name, value in given.items()}
        explained(self, *values, **options)

    return construct


def snake_case(name: str) -> str:
    """Return a class name as a plugin name: `EarlyStopping` is `early_stopping`, `NaNGuard` is `nan_guard`."""
    name = name.replace("NaN", "Nan")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
