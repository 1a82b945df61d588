"""Exceptions in words: where in a run they came up, what is missing, how many there are of something."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
OF_SELF = (
    "log log_dict log_metrics trainer logger current_epoch global_step manual_backward hparams save_hyperparameters"
)
REFUSED = "stop should_stop should_training_stop stop_training save save_checkpoint save_model should_save"
OF_RUN = f"{OF_SELF} {REFUSED} hparams epoch step_count batch_idx iteration state args loggers callbacks model module pl_module lr learning_rate device global_rank local_rank is_global_zero is_world_process_zero backward optimizer_step zero_grad train evaluate"  # noqa: E501
Explain = Callable[[TypeError, Callable[..., Any], int, Any], str]


def error_text(error: BaseException) -> str:
    """Return an exception's text; one whose text cannot be had says so."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as other:  # noqa: BLE001  # said in its place
        return f"<its text raised {type(other).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text."""
    return f"{type(error).__name__}: {error_text(error)}".removesuffix(": ")


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is a Ctrl-C, or a group with one in it."""
    group = error if isinstance(error, BaseExceptionGroup) else None
    return isinstance(error, KeyboardInterrupt) or (group is not None and group.subgroup(KeyboardInterrupt) is not None)


def count(number: float, one: str, several: str) -> str:
    """Return how many there are of something, in words."""
    return f"{number} {one if number == 1 else several}"


def place_of(run: Any) -> str:
    """Return where a run is, in words; of an evaluation, also in which batch of which set."""
    progress, collection = run.progress, run.work.collection
    within = "" if collection is None else collection.place
    return f"in {run.phase}{within}, epoch {progress.epoch}, batch {progress.batch}, step {progress.steps}"


class Missing:
    """An attribute that a class does not have: reading it raises an error that explains what to use instead.

    Args:
        name: the attribute.
        explain: returns the explanation.
    """

    def __init__(self, name: str, explain: Callable[[str], str]) -> None:
        self.name, self.explain = name, explain

    def __get__(self, thing: object, kind: type) -> NoReturn:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}.{self.explain(self.name)}")


class Refused(Missing):
    """One that cannot be set either, since nothing would read it."""

    def __set__(self, thing: object, value: object) -> None:
        self.__get__(thing, type(thing))


def explains_attributes(names: str, explain: Callable[[str], str], refused: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator for a class that lacks these attributes; `hasattr` and `dir` do not see them."""

    def add(kind: type[T]) -> type[T]:
        for name in (missing := [name for name in names.split() if not hasattr(kind, name)]):
            setattr(kind, name, (Refused if name in refused.split() else Missing)(name, explain))
        hidden = set(missing)
        kind.__dir__ = lambda self: set(super(kind, self).__dir__()) - hidden  # type: ignore[method-assign, misc]
        return kind

    return add


def explains_arguments(explain: Explain) -> Callable[[F], F]:
    """Return a decorator for a function whose wrong calls are explained; `explain` returns nothing for other errors."""

    def add(function: F) -> F:
        @wraps(function)
        def call(*values: Any, **options: Any) -> Any:
            try:
                return function(*values, **options)
            except TypeError as error:
                if not (text := explain(error, function, len(values), options)):
                    raise
            raise TypeError(text)

        return call  # type: ignore[return-value]

    return add
