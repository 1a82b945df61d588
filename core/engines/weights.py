"""The weights of a task's modules: checks, loading, and weights for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ...events.checks import known_names
from .contract import Modules, Optimizers, SavedStates
from .options import is_sharding, parameters_of, plain_name, state_of

EVALUATED = "evaluated with the weights of"  # begins the note of an evaluation with loaded weights
LEFT_WEIGHTS = "the final weights (EMA(load_at_end=True), LoadBest)"  # only one plugin may set them


def refuse_shared_weights(modules: Modules, engine: str, processes: int) -> None:
    """Raise if several processes compute one model together, as in tensor parallelism.

    They would need the same batches, but engines give each process other batches.

    Args:
        modules: of the task, by name.
        engine: its name.
        processes: the world size of the engine.

    Raises:
        ValueError: a parameter or buffer is a `DTensor`, or a layer communicates with some of the processes only.
    """
    from torch.distributed.tensor import DTensor

    for root, module in modules.items():
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if isinstance(tensor, DTensor) and (size := tensor.device_mesh.size()) > 1:
                raise ValueError(
                    f"{root}.{name} is a DTensor that {size} processes share{_other_batches(engine, processes)}"
                )
        for name, part in module.named_modules(prefix=root):
            if (partial_group := _partial_group(part, processes)) is not None:
                attribute, size = partial_group
                raise ValueError(
                    f"{name}.{attribute} is a group of {size} of the {processes} processes"
                    f"{_other_batches(engine, processes)} If each process of that group takes its own batches, keep "
                    f"the group outside of the layers that have parameters."
                )


def _other_batches(engine: str, processes: int) -> str:
    reality = "each process gets other batches" if processes > 1 else "each process trains a separate model"
    return (
        f", so they compute one model together, as in tensor parallelism. They would need the same batches, but with "
        f"{engine} {reality}. Use a model with complete parameters in each process; FSDPEngine() shards a large one. A "
        f"failed run with FSDPEngine leaves a sharded model: build a new task."
    )


def _partial_group(layer: nn.Module, processes: int) -> tuple[str, int] | None:
    # The attribute and the size of a group of some of the processes in a layer with parameters.
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(layer, _NormBase) or next(layer.parameters(recurse=False), None) is None:
        return None  # norms may share statistics of different batches
    for name, value in vars(layer).items():
        sizes = [value.size()] if isinstance(value, ProcessGroup) else []
        sizes += value.mesh.shape if isinstance(value, DeviceMesh) else []
        for size in sizes:
            if 1 < size < processes:
                return name, size
    return None


EXTRA_STATE = "_extra_state"  # torch's suffix for the state of `set_extra_state`


def check_fits(modules: Modules, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise ValueError unless saved weights belong to these modules; loads nothing.

    Modules with their own loading code are skipped: they may accept other names, or change their shapes.
    """
    if saved.keys() != modules.keys():
        raise ValueError(
            f"The checkpoint has the modules {sorted(saved)}, but the task has {sorted(modules)}: use the task that "
            f"wrote it."
        )
    for name, module in modules.items():
        skipped = _self_loading_prefixes(module)
        now, then = (
            {part: value for part, value in state.items() if not part.startswith(skipped)}
            for state in (state_of(module), saved[name])
        )
        if now.keys() != then.keys():
            names = ", ".join(sorted(now.keys() ^ then.keys())[:5])
            is_part = bool(then) and then.keys() < now.keys()
            raise ValueError(
                f"The checkpoint's {name!r} is another network than the task's: they differ in {names}."
                + " It has only a part of the weights, like one of several files, or an export of a checkpoint with "
                "TrainedOnly: load the index, or the checkpoint." * is_part
            )
        for part, value in now.items():
            is_weight = isinstance(value, Tensor) and not is_lazy(value) and not part.endswith(EXTRA_STATE)
            if is_weight and value.shape != then[part].shape:
                raise ValueError(
                    f"The checkpoint's {name}.{part} has the shape {list(then[part].shape)}, the task's "
                    f"{list(value.shape)}: use the task that wrote it."
                )


def load_module(name: str, module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load saved weights into a module.

    Raises:
        ValueError: the module refuses them, which `check_fits` cannot predict for a module with its own loading code.
    """
    names = {plain_name(key): key for key in module.state_dict()}
    try:
        module.load_state_dict({names.get(name, name): value for name, value in weights.items()})
    except RuntimeError as error:
        raise ValueError(
            f"The task's {name!r} does not take the checkpoint's: use the task that wrote it. {error}"
        ) from error


def measured_average(state: Mapping[str, Any]) -> str | None:
    """Return the plugin whose averaged weights the checkpoint's validations used, if any."""
    states = state["plugins"].items()
    return next((name for name, saved in states if saved and saved.get("evaluates") and saved.get("weights")), None)


def load_average(modules: Modules, state: Mapping[str, Any], plugin: str) -> None:
    """Load the averaged weights of a plugin such as `EMA` into modules; buffers do not change.

    Args:
        modules: by name.
        state: of a checkpoint.
        plugin: the plugin's name.

    Raises:
        ValueError: the checkpoint has no such average, or one for other modules.
    """
    average = find_average(modules, state, plugin)
    with torch.no_grad():
        for name, module in modules.items():
            for key, parameter in parameters_of(module):
                parameter.copy_(average[name][key])


def find_average(modules: Modules, state: Mapping[str, Any], plugin: str) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the averaged weights of a plugin, by module and parameter; see `load_average`."""
    states = state["plugins"]
    average: Mapping[str, Mapping[str, Tensor]] = (states.get(plugin) or {}).get("weights") or {}
    if not average:
        plugins = [name for name, saved in states.items() if saved and "weights" in saved and "evaluates" in saved]
        raise ValueError(
            f"The checkpoint has no averaged weights of a plugin {plugin!r}.{known_names(plugin, plugins)}"
        )
    check_average(modules, average, "The checkpoint's average")
    return average


def check_average(modules: Modules, average: Mapping[str, Mapping[str, Tensor]], owner: str) -> None:
    """Raise ValueError unless averaged weights belong to the parameters of these modules; `owner` begins the error."""
    if average.keys() != modules.keys():
        raise ValueError(f"{owner} has the modules {sorted(average)}, but the task has {sorted(modules)}.")
    for name, module in modules.items():
        now = {key: parameter.shape for key, parameter in parameters_of(module)}
        then = {key: weight.shape for key, weight in average[name].items()}
        if now != then:
            parts = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
            shapes = [f"{key} ({_shape(then.get(key))}, now {_shape(now.get(key))})" for key in parts[:3]]
            raise ValueError(f"{owner} belongs to another {name!r}: they differ in {', '.join(shapes)}.")


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def _self_loading_prefixes(module: nn.Module) -> tuple[str, ...]:
    # The prefixes of state names whose module has its own loading code.
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return ("",)
    parts = module.named_modules(remove_duplicate=False)
    return tuple(f"{plain_name(name)}." if name else "" for name, part in parts if _has_loading_code(part))


def _has_loading_code(module: nn.Module) -> bool:
    # Anything but torch's own code that takes part in loading a module's state.
    before: Iterable[Any] = module._load_state_dict_pre_hooks.values()
    after = module._load_state_dict_post_hooks.values()
    functions = [type(module)._load_from_state_dict, *(wrapper.hook for wrapper in before), *after]
    return any(not (getattr(function, "__module__", None) or "").startswith("torch.") for function in functions)


def load_states(modules: Modules, optimizers: Optimizers, states: SavedStates) -> None:
    """Load the states of modules and of optimizers, by name.

    Raises:
        ValueError: a state does not fit, or loading has replaced parameters that an optimizer trains.
    """
    before = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for name, module in modules.items():
        load_module(name, module, states[0][name])
    _check_not_replaced(modules, optimizers, before)
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(deepcopy(states[1][name]))  # torch would keep the tensors of the saved state


def _check_not_replaced(modules: Modules, optimizers: Optimizers, before: set[int]) -> None:
    now = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for name, optimizer in optimizers.items():
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if lost := len((trained & before) - now):
            raise ValueError(
                f"Loading the state replaced {lost} parameters that the optimizer {name!r} trains, so they would no "
                f"longer be trained: if a module has set_extra_state, let it copy_ into its existing parameters."
            )


def with_dense_gradients(parameters: Iterable[Tensor], *, keep: bool = False) -> list[Tensor]:
    """Return parameters; one with a sparse gradient is replaced by a stand-in with a dense gradient of its values.

    Args:
        parameters: with their gradients.
        keep: whether the gradients stay unchanged. Otherwise a sparse gradient is coalesced and shares memory with that
            of its stand-in, so clipping one clips the other.
    """
    dense: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
            if not keep:
                parameter.grad = gradient
            values = gradient._values()
            parameter = values.detach()
            parameter.grad = values.detach() if values.numel() else None  # torch has no maximum of an empty tensor
        dense.append(parameter)
    return dense


class OptimizerModes:
    """Switch optimizers that have `train()` and `eval()`, such as schedule-free ones, which evaluate other weights.

    The trained weights are kept meanwhile and restored bit for bit, which `eval()` and `train()` alone do not ensure.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._trained: list[tuple[Tensor, Tensor]] | None = None  # parameters and their values, in eval mode

    def begin(self, engine: Any) -> None:
        """Begin to train; raise ValueError if the engine shards the weights."""
        if is_sharding(engine):
            raise ValueError(
                f"{type(self._optimizers[0]).__name__} has train() and eval(), which need complete weights, but "
                f"{type(engine).__name__} shards them: use DDPEngine, or another optimizer."
            )
        self.train()

    def eval(self) -> None:
        """Put the weights for evaluation and saving into the model, unless they are there."""
        if self._trained is None:
            self._trained = [(parameter, parameter.detach().clone()) for parameter in self._parameters()]
            for optimizer in self._optimizers:
                optimizer.eval()

    def train(self) -> None:
        """Put the trained weights back into the model."""
        for optimizer in self._optimizers:
            optimizer.train()
        with torch.no_grad():
            for parameter, value in self._trained or ():
                parameter.copy_(value)
        self._trained = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context for a validation or a save."""
        if self._trained is not None:
            yield
            return
        try:
            self.eval()
            yield
        finally:
            self.train()

    def state_dict(self) -> dict[str, Any]:
        """Return the trained weights, in the order of the optimizers, unless the model has them."""
        return {} if self._trained is None else {"trained": [value for _, value in self._trained]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the trained weights. Call it after the model and the optimizers are loaded."""
        trained = state.get("trained", ())
        self._trained = list(zip(self._parameters()[: len(trained)], trained, strict=True))
        self.train()

    def _parameters(self) -> list[Tensor]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]
