"""The summary of a model: its layers with the shapes of their outputs, and its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..events.checks import check_whole_number
from .data.rng import capture, restore
from .engines.movers import move
from .engines.options import modules_of

HEAD = ("layer", "output", "parameters", "")


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of a model.

    Attributes:
        path: where it is in the task, for example `model.0`.
        kind: the name of its class.
        output: the shape of its last output, or the shapes by name; None if it was not called.
        parameters: the number of its own parameters; child modules count theirs.
        is_frozen: whether it has parameters, and none of them is trained.
        shares: the path of the module that has the same parameters, if any.
    """

    path: str
    kind: str
    output: str | None
    parameters: int
    is_frozen: bool
    shares: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The layers and sizes of a model; `print` shows a table.

    Attributes:
        layers: all modules, in their order in the model.
        parameters: the number of parameters; shared ones count once.
        trained: the number of those with `requires_grad`.
        megabytes: the size of parameters and buffers.
    """

    layers: tuple[Layer, ...]
    parameters: int
    trained: int
    megabytes: float

    def __str__(self) -> str:
        rows = [HEAD, *map(_row, self.layers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
        lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        frozen = self.parameters - self.trained
        total = f"{self.parameters:,} parameters: {self.trained:,} trained, {frozen:,} frozen; {self.megabytes:,.2f} MB"
        return "\n".join([*lines, total])


def summary(task: Any, inputs: Any = None, *, depth: int | None = None) -> ModelSummary:
    """Return the layers of a model, their parameters, and with inputs the shapes of their outputs.

    Args:
        task: a task or a module.
        inputs: what the model is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments. The
            call is in eval mode, without gradients, and leaves modes and random generators as they were.
        depth: the number of levels of modules to list; all by default.

    Raises:
        ValueError: there is no module, or inputs are for a task with several modules and none is called `model`.
    """
    modules = modules_of(task)
    if not modules:
        raise ValueError(f"{type(task).__name__} has no module to summarize: pass a task with a module, or a module.")
    if depth is not None:
        check_whole_number("depth", depth, at_least=1)
    outputs = {} if inputs is None else _call(_main_module(task, modules), inputs)
    parts = [(path, part) for name, root in modules.items() for path, part in root.named_modules(prefix=name)]
    parameters = {id(value): value for _, part in parts for value in part.parameters()}.values()
    tensors = {id(value): value for _, part in parts for value in (*part.parameters(), *part.buffers())}.values()
    layers = _layers(parts, outputs)
    return ModelSummary(
        tuple(layer for layer in layers if depth is None or layer.path.count(".") <= depth),
        sum(value.numel() for value in parameters),
        sum(value.numel() for value in parameters if value.requires_grad),
        sum(value.nbytes for value in tensors) / 1e6,
    )


def _main_module(task: Any, modules: Mapping[str, nn.Module]) -> nn.Module:
    if len(modules) > 1 and "model" not in modules:
        names = ", ".join(modules)
        raise ValueError(
            f"{type(task).__name__} has the modules {names}; which of them takes the inputs? Pass one of them: "
            f"summary(task.{next(iter(modules))}, inputs)."
        )
    return modules.get("model", next(iter(modules.values())))


def _call(module: nn.Module, inputs: Any) -> dict[int, str]:
    """Return the shape of the last output of each called module, by its id."""
    outputs: dict[int, str] = {}

    def keep(part: nn.Module, _arguments: object, output: object) -> None:
        outputs[id(part)] = _shape(output)

    modes, draws = [(part, part.training) for part in module.modules()], capture()
    tensor = next(module.parameters(), None)
    inputs = inputs if tensor is None else move(inputs, tensor.device)
    with ExitStack() as stack:
        for part in module.modules():
            stack.callback(part.register_forward_hook(keep).remove)
        stack.callback(restore, draws)
        for part, training in modes:
            stack.callback(setattr, part, "training", training)
        module.eval()
        with torch.no_grad():
            if isinstance(inputs, Mapping):
                module(**inputs)
            else:
                module(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    return outputs


def _layers(parts: list[tuple[str, nn.Module]], outputs: Mapping[int, str]) -> Iterator[Layer]:
    owners: dict[int, str] = {}
    for path, part in parts:
        own = list(part.parameters(recurse=False))
        shares = next((owners[id(value)] for value in own if id(value) in owners), None)
        owners |= {id(value): path for value in own if id(value) not in owners}
        number = sum(value.numel() for value in own)
        frozen = bool(own) and not any(value.requires_grad for value in own)
        yield Layer(path, type(part).__name__, outputs.get(id(part)), number, frozen, shares)


def _row(layer: Layer) -> tuple[str, str, str, str]:
    level, _, name = layer.path.rpartition(".")
    place = f"{'  ' * (level.count('.') + bool(level))}{name}: {layer.kind}"
    remark = f"shared with {layer.shares}" if layer.shares else "frozen" if layer.is_frozen else ""
    return place, layer.output or "", f"{layer.parameters:,}" if layer.parameters else "", remark


def _shape(output: object) -> str:
    if isinstance(output, Tensor):
        return str(list(output.shape))
    if isinstance(output, Mapping):
        return ", ".join(f"{name} {_shape(part)}" for name, part in output.items() if part is not None)
    if isinstance(output, list | tuple):
        return ", ".join(map(_shape, output))
    return type(output).__name__
