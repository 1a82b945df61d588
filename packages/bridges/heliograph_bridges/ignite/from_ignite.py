"""`from_ignite`: handlers of PyTorch-Ignite as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isroutine, signature
from typing import TYPE_CHECKING, Any, Literal

from heliograph import Run
from heliograph.spi import require

if TYPE_CHECKING:
    from .handlers.plugin import IgnitePlugin


def from_ignite(
    handler: Any,
    event: Any = None,
    *,
    phase: Literal["train", "validation"] = "train",
    output: Callable[[Run], Any] | None = None,
) -> IgnitePlugin:
    """Return a plugin that calls handlers of PyTorch-Ignite in a Heliograph training.

    The handlers get an Ignite `Engine` that follows the training: its `state` has the position of the run, and
    `terminate()` and `terminate_epoch()` are requests by the plugin. With an event, the handler is added to it. Without
    one, an object with `attach` is attached to the engine, and a function can add any handlers, as in a script for
    Ignite:

        def stop_early(trainer, evaluator):
            evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(3, score, trainer))

        Trainer([from_ignite(stop_early), from_ignite(TerminateOnNan(), Events.ITERATION_COMPLETED)])

    Checkpoints contain the states of handlers with `state_dict` and `load_state_dict`, and the values in `engine.state`
    that `engine.state_dict_user_keys` names.

    Args:
        handler: a handler; without an event, an object with `attach(engine)`, or a function of `(trainer)` or
            `(trainer, evaluator)`.
        event: one of `ignite.engine.Events`, with or without a filter, or several joined by `|`.
        phase: `train` adds the handler to the trainer's engine, `validation` to the evaluator's.
        output: makes `engine.state.output` after a batch of this phase from the run, as in
            `lambda run: (run.outputs, run.batch[1])`; by default the detached loss in training, and
            `run.outputs` in validations.

    Raises:
        TypeError: the handler has the wrong type.
        ValueError: the handler or its event is not supported; the message names an alternative.
        ImportError: pytorch-ignite is not installed.
    """
    require("ignite", "from_ignite", extra="ignite")
    from .handlers.engine import LastEvent, RunEngine, check_handler
    from .handlers.plugin import IgnitePlugin

    if phase not in ("train", "validation"):
        raise ValueError(f"phase is 'train' or 'validation', got {phase!r}.")
    check_handler(handler)
    moment = LastEvent()
    trainer, evaluator = RunEngine("trainer", moment), RunEngine("evaluator", moment)
    engine = trainer if phase == "train" else evaluator
    if event is not None:
        engine.add_event_handler(event, handler)
    elif hasattr(handler, "attach"):
        handler.attach(engine)
        engine.keep(handler)
    elif isroutine(handler):
        _attach(handler, trainer, evaluator)
    else:
        raise _no_handler(handler)
    return IgnitePlugin(_name(handler), trainer, evaluator, phase, output)


def _attach(function: Callable[..., Any], trainer: Any, evaluator: Any) -> None:
    count = len(signature(function).parameters)
    if count not in (1, 2):
        raise _no_handler(function)
    function(*(trainer, evaluator)[:count])
    if not (trainer.has_handlers or evaluator.has_handlers):
        raise ValueError(
            f"{_name(function)} was called with the engine but added no handler. To call it at an event, pass the "
            f"event: from_ignite(function, Events.EPOCH_COMPLETED)."
        )


def _no_handler(handler: Any) -> TypeError:
    return TypeError(
        f"from_ignite takes a handler with its event, as in from_ignite(TerminateOnNan(), Events.ITERATION_COMPLETED), "
        f"an object with attach(engine), or a function of (trainer) or (trainer, evaluator) that adds handlers; got "
        f"{handler!r}."
    )


def _name(handler: Any) -> str:
    name = getattr(handler, "__name__", type(handler).__name__)
    return "ignite_handlers" if name == "<lambda>" else str(name)
