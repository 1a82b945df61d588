"""Attributes and arguments of other frameworks: using one raises an error that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

# OF_SELF: attributes that a task or plugin has in other frameworks. OF_RUN: also those of a run or trainer.
OF_SELF = (
    "log log_dict log_metrics trainer logger current_epoch global_step manual_backward hparams save_hyperparameters"
)
REFUSED = "stop should_stop should_training_stop stop_training save save_checkpoint save_model should_save"
OF_RUN = f"{OF_SELF} {REFUSED} epoch step_count batch_idx iteration state args loggers callbacks add_callback model module pl_module lr learning_rate device global_rank local_rank is_global_zero is_world_process_zero backward optimizer_step zero_grad train evaluate"  # noqa: E501
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Missing:
    """An attribute that a class lacks: reading it raises an error with a replacement."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, thing: object, kind: type) -> NoReturn:
        from .providers import hint

        raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}.{hint(self.name, 'attributes')}")


class Refused(Missing):
    """A missing attribute that cannot be set either, because nothing would read it."""

    def __set__(self, thing: object, value: object) -> None:
        self.__get__(thing, type(thing))


def explains_attributes(names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds `Missing` attributes, which `hasattr` ignores."""

    def add(kind: type[T]) -> type[T]:
        hidden = {name for name in names.split() if not hasattr(kind, name)}
        for name in hidden:
            setattr(kind, name, (Refused if name in REFUSED.split() else Missing)(name))
        kind.__dir__ = lambda self: set(super(kind, self).__dir__()) - hidden  # type: ignore[method-assign, misc]
        return kind

    return add


def explains_arguments(function: F) -> F:
    """Decorate a function so that errors of wrong calls explain its arguments."""

    @wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        try:
            return function(*values, **options)
        except TypeError as error:
            from .providers import explain_call

            if not (text := explain_call(error, function, len(values), options)):
                raise
        raise TypeError(text)

    return call  # type: ignore[return-value]
