"""`attach`: plugins in the loop of an Ignite engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from heliograph.spi import require
from torch import nn

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
    """Run plugins in the trainings of an Ignite engine.

    Call `attach` before you add handlers that save, so that these save the decisions of the plugins.

    Args:
        engine: an `ignite.engine.Engine` that trains.
        plugins: plugin objects, in their order within a lane. Unsupported plugins raise an error when the engine
            starts.
        model: the trained module; several by name.
        optimizer: the optimizer that the engine's function steps: its steps are counted and, if `loss` is a module,
            plugins see its gradients before each step. Without it, each iteration counts as one step.
        loss: the module that computes the loss, such as `nn.CrossEntropyLoss()`: plugins then see the loss before the
            step, and may drop the step. Or a function of the engine's output that returns the loss; by default the
            output, or its item `loss`.
        evaluator: the engine that validates; several by the names of their sets. Its metrics are renamed, for example
            to `validation/accuracy`.
        validation: the data of the evaluator for requested validations; several by the same names.
        save: called with the engine to serve a requested save, such as an `ignite.handlers.Checkpoint` with the
            return value of `attach` in its `to_save`.
        name: the run's name, which is part of file names.
        hyper_parameters: a description for trackers.

    Returns:
        The attached plugins. Save their `state_dict` in the checkpoints of the engine; `result` has the result of a
        run.

    Raises:
        ImportError: Ignite is not installed.
        TypeError: an argument has the wrong type.
        ValueError: arguments or plugins contradict each other; the engine already has attached plugins.
    """
    require("ignite", "attach", extra="ignite")
    from .attached import AttachedPlugins, AttachOptions, by_name

    modules, evaluators, sets = by_name(model, "model"), by_name(evaluator), by_name(validation)
    parts = AttachOptions(engine, modules, optimizer, loss, evaluators, sets, save, name, hyper_parameters)
    return AttachedPlugins(plugins, parts)
