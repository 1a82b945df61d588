"""`attach`: our plugins in the loop of an engine of Ignite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from heliograph.spi import require
from torch import nn

from .parts import Parts

if TYPE_CHECKING:
    from .attached import AttachedPlugins


def attach(
    engine: Any,
    plugins: Iterable[Any],
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Any = None,
    loss: nn.Module | Callable[[Any], Any] | None = None,
    evaluator: Any = None,
    validation: Any = None,
    save: Callable[[Any], Any] | None = None,
    name: str = "run",
    hyper_parameters: Mapping[str, Any] | None = None,
) -> AttachedPlugins:
    """Let plugins take part in the trainings of an engine; its `run` emits our events and does what they ask for.

    Call it before handlers that save are added, so that these save what the plugins have decided.

    Args:
        engine: an `ignite.engine.Engine` that trains.
        plugins: plugin objects, in the order in which they run within a lane. Those that ask for what this loop cannot
            do are refused when it starts.
        model: what is trained; several by name.
        optimizer: what the engine's function steps: its steps are counted, and seen before they are taken. Without it
            each iteration counts as one step.
        loss: the module that computes the loss, such as `nn.CrossEntropyLoss()`: then plugins see it before the step,
            and may drop that. Or a function of the engine's output that returns the loss; by default the output, or
            its item `loss`.
        evaluator: the engine that validates; several by the names of their sets. Its metrics become ours, as
            `validation/accuracy`, whoever runs it.
        validation: what the evaluator is run on when a plugin asks for a validation; several by the same names.
        save: called with the engine when a plugin asks for a save, such as an `ignite.handlers.Checkpoint` that has
            what is returned here in its `to_save`.
        name: the run's name, as in file names.
        hyper_parameters: a description for trackers.

    Returns:
        What is attached. Its `state_dict` belongs into the checkpoints of the engine; `result` says how a run ended.

    Raises:
        ImportError: Ignite is not installed.
        TypeError: an argument has another type.
        ValueError: arguments contradict each other, or plugins do; the engine has attached plugins already.
    """
    require("ignite", "attach", extra="ignite")
    from .attached import AttachedPlugins

    parts = Parts(engine, model, optimizer, loss, evaluator, validation, save, name, hyper_parameters)
    return AttachedPlugins(plugins, parts)
