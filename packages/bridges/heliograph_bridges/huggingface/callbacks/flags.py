"""The flags of a `TrainerControl`, and the requests that they are here."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from inspect import isfunction, unwrap
from types import CodeType
from typing import Any, NamedTuple

from heliograph import Control
from heliograph.events import Pending


class Flag(NamedTuple):
    """One flag: what sets it here, and the name of the request."""

    name: str
    ask: Callable[[Control, str], None]
    verb: Pending


FLAGS = (
    Flag("should_training_stop", Control.stop, "stop"),
    Flag("should_epoch_stop", Control.end_epoch, "end_epoch"),
    Flag("should_save", Control.request_save, "save"),
    Flag("should_evaluate", Control.request_validation, "validation"),
    Flag("should_log", Control.request_log, "log"),
)
DECLARED = ("stop", "save", "validation", "log")  # what `asks` of a plugin can name
BOUNDARY = ("should_log", "should_evaluate", "should_save")
# What the Trainer has already read when it calls a method, or clears before it reads it. Such a flag is no request: it
# stays set until the next step, and is read once more only if the epoch ends before that.
LATE: Mapping[str, tuple[str, ...]] = {
    "on_init_end": (*BOUNDARY, "should_training_stop", "should_epoch_stop"),
    "on_train_begin": (*BOUNDARY, "should_epoch_stop"),
    "on_epoch_begin": BOUNDARY,
    "on_log": ("should_log",),
    "on_prediction_step": ("should_log", "should_evaluate"),
    "on_evaluate": ("should_log", "should_evaluate"),
    "on_save": BOUNDARY,
}
Shown = dict[str, bool]


def show(theirs: Any, control: Control, set_here: Iterable[str], clears: tuple[str, ...]) -> Shown:
    """Set the flags as the requests of the run are, and as the Trainer sets and clears them here; return them."""
    shown = {
        "should_training_stop": control.should_stop,
        "should_epoch_stop": control.should_end_epoch,
        "should_save": control.should_save,
        "should_evaluate": control.should_validate,
        "should_log": control.should_log,
    }
    for name in set_here:
        shown[name] = True
    for name in clears:
        shown[name] = False
    vars(theirs).update(shown)
    return shown


def changes(theirs: Any, shown: Shown) -> Iterator[tuple[Flag, bool]]:
    """Yield each flag that a callback has changed, with its value."""
    if vars(theirs) == shown:
        return
    for flag in FLAGS:
        if (value := bool(getattr(theirs, flag.name))) != shown[flag.name]:
            yield flag, value


def asks_of(names: Container[str]) -> tuple[str, ...]:
    """Return what a callback may request, to judge by the names in its code."""
    return tuple(flag.verb for flag in FLAGS if flag.name in names and flag.verb in DECLARED)


def names_in(callback: Any) -> frozenset[str]:
    """Return the names of attributes and globals in the code of a callback's class."""
    return frozenset(name for code in _codes(type(callback)) for name in code.co_names)


def _codes(kind: type) -> Iterator[CodeType]:
    """Yield the code of every method of a class, and of the functions within."""
    waiting: list[CodeType] = []
    for base in kind.__mro__:
        for value in vars(base).values():
            function = unwrap(getattr(value, "__func__", value)) if callable(value) else None
            waiting += [function.__code__] if isfunction(function) else []
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield code
