"""States of sharded modules and optimizers: gathered whole, or as shards for `torch.distributed.checkpoint`.

Whole, they are what plain modules and optimizers have: `(weights by module name, optimizer states by name)`, and any
engine reads them. As shards they are two things: the tensors, flat by name, which `dcp.save` writes and `dcp.load`
fills; and the rest, plain types, which is the same on all ranks and says what `dcp.load` is to fill.

To save, on all ranks, with `async_save` in the place of `save` where it is to happen in the background:
            tensors, rest = engine.shard_state(run.modules, run.optimizers)
            dcp.save(tensors, checkpoint_id=folder, process_group=engine.saving_group())  # `rest` belongs in the state
To resume, on all ranks:
            engine.load_shard_state(run.modules, run.optimizers, rest, lambda tensors: dcp.load(tensors, ...))
Without ranks, or on another engine:
            tensors = empty(rest); dcp.load(tensors, checkpoint_id=folder, no_dist=True)
            engine.unpack(run.modules, run.optimizers, joined(tensors, rest))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup

from ..weights import load_module, state_of
from .modules import like, whole

Optimizers = Mapping[str, torch.optim.Optimizer]
Modules = Mapping[str, nn.Module]
States = tuple[dict[str, Any], dict[str, Any]]
Read = Callable[[dict[str, Tensor]], object]


@runtime_checkable
class ShardingEngine(Protocol):
    """An engine whose ranks each hold a part of the state, and can save it so.

    Attributes:
        state: what a checkpoint is to hold: `full`, as `pack` returns it, or `sharded`.
    """

    state: Literal["full", "sharded"]

    def shard_state(self, modules: Modules, optimizers: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors by name, for `dcp.save`, and the rest, which is the same on all ranks.

        The tensors are the live ones: `dcp.save` writes them, and `dcp.async_save` copies them, before it returns.
        """

    def saving_group(self) -> ProcessGroup:
        """Return a gloo group that nothing else uses, so that a thread may save in it. The first time a collective.

        What is being saved has to be done before the run ends: the group ends with it.
        """

    def load_shard_state(self, modules: Modules, optimizers: Optimizers, rest: Mapping[str, Any], read: Read) -> None:
        """Load what `shard_state` gave, from any number of ranks. A collective.

        Args:
            modules: by attribute name; of the same shapes.
            optimizers: by name; of the same kinds.
            rest: as `shard_state` returned it.
            read: fills tensors in place, as `dcp.load` does. Some of them are the live weights.
        """


def gather_state(value: Any, *, keep: bool) -> Any:
    """Return a state with its shards gathered, on the CPU; nothing of it unless `keep`. A collective."""
    if isinstance(value, Mapping):
        return {key: gather_state(each, keep=keep) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_state(each, keep=keep) for each in value)
    if not _is_shard(value):
        return value
    full = whole(value)
    return full.cpu() if keep else None


def load_modules(modules: Modules, weights: Mapping[str, Any]) -> None:
    """Load whole weights into sharded modules. A collective."""
    for name, module in modules.items():
        own = state_of(module)
        laid = {key: _laid(value, own.get(key)) for key, value in weights[name].items()}
        load_module(name, module, laid)


def load_optimizers(optimizers: Optimizers, states: Mapping[str, Any]) -> None:
    """Load whole states into the optimizers of sharded parameters. A collective."""
    for name, optimizer in optimizers.items():
        parts = dict(_numbered(optimizer))
        saved = states[name]
        numbers = list(chain.from_iterable(group["params"] for group in saved["param_groups"]))
        laid = {
            number: {key: _laid(value, parts.get(place)) for key, value in saved["state"][number].items()}
            for place, number in enumerate(numbers)
            if number in saved["state"]
        }
        optimizer.load_state_dict({"state": laid, "param_groups": saved["param_groups"]})


def point(optimizer: torch.optim.Optimizer, parameters: Mapping[Tensor, Tensor]) -> None:
    """Make an optimizer train other parameters in the place of its own, its state laid out as theirs. A collective."""
    state = optimizer.state
    for group in optimizer.param_groups:
        for place, former in enumerate(group["params"]):
            group["params"][place] = new = parameters[former]
            if former in state:
                state[new] = {key: _move(each, new) for key, each in state.pop(former).items()}


def split(states: States) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of states flat by name, and the rest."""
    weights, optimizers = states
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {"modules": {}, "optimizers": {}}
    for name, values in weights.items():
        rest["modules"][name] = _taken(values, f"modules/{name}", tensors)
    for name, state in optimizers.items():
        kept = {
            number: _taken(values, f"optimizers/{name}/{number}", tensors) for number, values in state["state"].items()
        }
        rest["optimizers"][name] = {**state, "state": kept}
    rest["tensors"] = {name: [list(each.shape), str(each.dtype)] for name, each in tensors.items()}
    return tensors, rest


def join_states(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> States:
    """Return the states that `split` took apart."""
    weights = {name: dict(values) for name, values in rest["modules"].items()}
    optimizers = {
        name: {**state, "state": {number: dict(values) for number, values in state["state"].items()}}
        for name, state in rest["optimizers"].items()
    }
    for name, tensor in tensors.items():
        kind, _, place = name.partition("/")
        if kind == "modules":
            module, _, key = place.partition("/")
            weights[module][key] = tensor
        else:
            optimizer, number, key = place.rsplit("/", 2)
            optimizers[optimizer]["state"][int(number)][key] = tensor
    return weights, optimizers


def empty(rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, for `dcp.load` to fill."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in rest["tensors"].items()
    }


def room(modules: Modules, optimizers: Optimizers, rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors for `dcp.load` to fill: the live weights, and new ones laid out for the optimizers' state.

    Raises:
        ValueError: the shards are of other modules.
    """
    live, _ = split(({name: state_of(module) for name, module in modules.items()}, {}))
    parameters = {name: dict(_numbered(optimizer)) for name, optimizer in optimizers.items()}
    saved = {name for name in rest["tensors"] if name.startswith("modules/")}
    odd = [name for name in live if list(live[name].shape) != rest["tensors"].get(name, [None])[0]]
    if odd or saved != live.keys():
        names = ", ".join(sorted(odd or saved ^ live.keys())[:5])
        raise ValueError(f"The shards are of another network than the task's: they differ in {names}.")
    tensors = {name: each for name, each in empty(rest).items() if name not in live}
    for name, tensor in tensors.items():
        optimizer, number, _ = name.removeprefix("optimizers/").rsplit("/", 2)
        parameter = parameters[optimizer][int(number)]
        if tensor.shape == parameter.shape:
            tensors[name] = torch.zeros_like(parameter, dtype=tensor.dtype, requires_grad=False)
    return live | tensors


def _taken(values: Mapping[Any, Any], place: str, tensors: dict[str, Tensor]) -> dict[Any, Any]:
    """Move the tensors of one mapping into `tensors`; return what is left."""
    tensors |= {f"{place}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return {key: value for key, value in values.items() if not isinstance(value, Tensor)}


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Yield the parameters as an optimizer's state dict numbers them."""
    return enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _laid(value: Any, pattern: Any) -> Any:
    """Return a whole value laid out as a pattern is; a copy, so that nothing is shared with what was loaded."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return like(value, pattern) if _is_shard(pattern) and value.shape == pattern.shape else value.clone()


def _move(value: Any, parameter: Tensor) -> Any:
    """Return a part of a parameter's state as another parameter has it; single numbers stay where they are."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return like(whole(value), parameter).to(parameter.device)


def _is_shard(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
