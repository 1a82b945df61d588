"""The weights of a task's modules: refused where shared, compared with saved ones, loaded, switched to evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ...events.checks import known_names
from .options import COMPILED

EVALUATED = "evaluated with the weights of"  # begins the note of a run that loaded weights before its evaluation
LEFT_WEIGHTS = "the weights that a run leaves (EMA(load_at_end=True), LoadBest)"  # which one plugin may claim


def plain_name(name: str) -> str:
    """Return the name of a parameter or part of a module as it is if no part is compiled by `torch.compile`."""
    return ".".join(part for part in name.split(".") if part != COMPILED) if COMPILED in name else name


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module by plain names."""
    return {plain_name(name): value for name, value in module.state_dict().items()}


def parameters_of(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module by plain names."""
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        yield plain_name(name), parameter


def refuse_shared_weights(modules: Mapping[str, nn.Module], engine: str, processes: int) -> None:
    """Raise where several processes compute one model together, such as a tensor-parallel one.

    They need the same batches, and engines give each process batches of its own.

    Args:
        modules: of the task, by name.
        engine: its name.
        processes: how many the engine trains with.

    Raises:
        ValueError: a parameter or buffer is a `DTensor`, or a layer communicates with some of the processes only.
    """
    from torch.distributed.tensor import DTensor

    for root, module in modules.items():
        for name, each in _tensors(module):
            if isinstance(each, DTensor) and (size := each.device_mesh.size()) > 1:
                found = f"{root}.{name} is a DTensor, of which each of {size} processes has a part or a copy"
                raise ValueError(f"{found}{_other_batches(engine, processes)}")
        if processes > 1:
            for name, part in module.named_modules(prefix=root):
                if (held := _partial_group(part, processes)) is not None:
                    attribute, size = held
                    found = f"{name}.{attribute} is a group of {size} of the {processes} processes"
                    raise ValueError(
                        f"{found}{_other_batches(engine, processes)} If each process of that group takes a batch of "
                        f"its own, keep the group outside of the layers that have parameters."
                    )


def _other_batches(engine: str, processes: int) -> str:
    each = "each process gets other batches" if processes > 1 else "each process trains a model of its own"
    return (
        f", so they compute one model together, as in tensor parallelism: they need the same batches, and with "
        f"{engine} {each}. Give a model with whole parameters in each process; FSDPEngine() divides a large one. A run "
        f"with FSDPEngine that failed leaves a model divided: build a new task."
    )


def _partial_group(layer: nn.Module, processes: int) -> tuple[str, int] | None:
    """Return the attribute and size of a group of some of the processes that a layer with parameters holds."""
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(layer, _NormBase) or next(layer.parameters(recurse=False), None) is None:
        return None  # norms share statistics of different batches
    for name, value in vars(layer).items():
        sizes = [value.size()] if isinstance(value, ProcessGroup) else []
        sizes += value.mesh.shape if isinstance(value, DeviceMesh) else []
        for size in sizes:
            if 1 < size < processes:
                return name, size
    return None


def loadable(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Give the expanded tensors of a module their values; return a saved state as its `load_state_dict` takes it then.

    Raises:
        ValueError: one was saved with different values in the places that show one.
    """
    state = dict(saved)
    for name, own in _tensors(module):
        if is_spread(own) and isinstance(saved.get(name), Tensor):
            _fill(own.detach(), saved[name], name)
            state[name] = own  # which torch copies nothing into
    return state


def is_spread(tensor: Tensor) -> bool:
    """Return whether a tensor shows one value in many places."""
    return tensor.layout is torch.strided and any(_dimensions(tensor))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _dimensions(tensor: Tensor) -> list[bool]:
    return [stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]


def _fill(own: Tensor, saved: Tensor, name: str) -> None:
    value, shown = saved, own
    for dimension, is_one in enumerate(_dimensions(own)):
        if is_one:
            value, shown = value.narrow(dimension, 0, 1), shown.narrow(dimension, 0, 1)
    if not _is_same(value.expand_as(saved), saved):
        raise ValueError(
            f"{name} is an expanded tensor, which shows one value in many places; the checkpoint holds different "
            f"values there: clone() it in your program."
        )
    with torch.no_grad():
        shown.copy_(value)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether values are equal; NaN is."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


EXTRA_STATE = "_extra_state"  # in torch, what the name ends with of what a module's `set_extra_state` takes


def check_fits(modules: Mapping[str, nn.Module], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise ValueError unless saved weights are of these modules; nothing is loaded then.

    What a module loads in a way of its own is not looked at: it may take other names, or change its shapes.
    """
    if saved.keys() != modules.keys():
        raise ValueError(
            f"The checkpoint holds the modules {sorted(saved)}, the task has {sorted(modules)}: use the task that "
            f"wrote it."
        )
    for name, module in modules.items():
        own = _own_ways(module)
        now, then = (
            {part: value for part, value in state.items() if not part.startswith(own)}
            for state in (state_of(module), saved[name])
        )
        if now.keys() != then.keys():
            names = ", ".join(sorted(now.keys() ^ then.keys())[:5])
            is_part = bool(then) and then.keys() < now.keys()
            raise ValueError(
                f"The checkpoint's {name!r} is another network than the task's: they differ in {names}."
                + " It holds only a part of the weights, as one file of several does, or an export of a checkpoint "
                "with TrainedOnly: load the index, or the checkpoint." * is_part
            )
        for part, value in now.items():
            is_weight = isinstance(value, Tensor) and not is_lazy(value) and not part.endswith(EXTRA_STATE)
            if is_weight and value.shape != then[part].shape:
                raise ValueError(
                    f"The checkpoint's {name}.{part} has the shape {list(then[part].shape)}, the task's "
                    f"{list(value.shape)}: use the task that wrote it" + _room_for(module, part) + "."
                )


def _room_for(module: nn.Module, part: str) -> str:
    """Return how a buffer that changes its shape in the training comes back; nothing for a parameter."""
    if part not in [plain_name(name) for name, _ in module.named_buffers(remove_duplicate=False)]:
        return ""
    owner = type(module.get_submodule(part.rpartition(".")[0])).__name__
    return (
        f"; or, if the training changes the shape of this buffer, give {owner} a _load_from_state_dict that makes room "
        f"for it (torch does not call load_state_dict of an inner module)"
    )


def load_module(name: str, module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load saved weights into a module.

    Raises:
        ValueError: the module does not take them, which `check_fits` cannot foresee where it loads in its own way.
    """
    names = {plain_name(own): own for own in module.state_dict()}
    try:
        module.load_state_dict(loadable(module, {names.get(name, name): value for name, value in weights.items()}))
    except RuntimeError as error:
        raise ValueError(
            f"The task's {name!r} does not take the checkpoint's: use the task that wrote it. {error}"
        ) from error


def measured_average(state: Mapping[str, Any]) -> str | None:
    """Return the name of the plugin whose averaged weights a checkpoint's validations were measured on, if any."""
    states = state["plugins"].items()
    return next((name for name, each in states if each and each.get("evaluates") and each.get("weights")), None)


def load_average(modules: Mapping[str, nn.Module], state: Mapping[str, Any], plugin: str) -> None:
    """Load the weights that a plugin such as `EMA` has averaged into modules; buffers are left as they are.

    Args:
        modules: by name.
        state: that of a checkpoint.
        plugin: the plugin's name.

    Raises:
        ValueError: the checkpoint has no such average, or one of other modules.
    """
    average = find_average(modules, state, plugin)
    with torch.no_grad():
        for name, module in modules.items():
            for key, parameter in parameters_of(module):
                parameter.copy_(average[name][key])


def find_average(
    modules: Mapping[str, nn.Module], state: Mapping[str, Any], plugin: str
) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the weights that a plugin has averaged, by module and parameter; see `load_average`."""
    states = state["plugins"]
    average: Mapping[str, Mapping[str, Tensor]] = (states.get(plugin) or {}).get("weights") or {}
    if not average:
        holds = [name for name, each in states.items() if each and "weights" in each and "evaluates" in each]
        raise ValueError(f"There are no weights that a plugin {plugin!r} has averaged.{known_names(plugin, holds)}")
    check_average(modules, average, "The checkpoint's average")
    return average


def check_average(modules: Mapping[str, nn.Module], average: Mapping[str, Mapping[str, Tensor]], what: str) -> None:
    """Raise ValueError unless averaged weights are of the parameters of these modules."""
    if average.keys() != modules.keys():
        raise ValueError(f"{what} is of the modules {sorted(average)}, not of {sorted(modules)}.")
    for name, module in modules.items():
        own = {key: each.shape for key, each in parameters_of(module)}
        then = {key: each.shape for key, each in average[name].items()}
        if own != then:
            parts = sorted(key for key in own.keys() | then.keys() if own.get(key) != then.get(key))
            shapes = [f"{key} ({_shape(then.get(key))}, now {_shape(own.get(key))})" for key in parts[:3]]
            raise ValueError(f"{what} is of another {name!r}, they differ in {', '.join(shapes)}.")


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def _own_ways(module: nn.Module) -> tuple[str, ...]:
    """Return what the names of those parts of a module's state begin with that are loaded in a way of its own."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return ("",)
    parts = module.named_modules(remove_duplicate=False)
    return tuple(f"{plain_name(name)}." if name else "" for name, part in parts if _loads_in_its_own_way(part))


def _loads_in_its_own_way(module: nn.Module) -> bool:
    """Return whether anything but torch's own code takes part in loading a module's own state."""
    before: Iterable[Any] = module._load_state_dict_pre_hooks.values()
    after = module._load_state_dict_post_hooks.values()
    loading = [type(module)._load_from_state_dict, *(each.hook for each in before), *after]
    return any(not (getattr(each, "__module__", None) or "").startswith("torch.") for each in loading)


def load_states(
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    states: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> None:
    """Load the states of modules and of optimizers, by name.

    Raises:
        ValueError: a state does not fit, or loading has put other parameters into a module than an optimizer trains.
    """
    before = {id(each) for module in modules.values() for each in module.parameters()}
    for name, module in modules.items():
        load_module(name, module, states[0][name])
    _check_trained(modules, optimizers, before)
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(deepcopy(states[1][name]))  # torch would keep these tensors


def _check_trained(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], before: set[int]
) -> None:
    """Raise ValueError where loading has put other parameters into a module than an optimizer trains."""
    now = {id(each) for module in modules.values() for each in module.parameters()}
    for name, optimizer in optimizers.items():
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if lost := len((trained & before) - now):
            raise ValueError(
                f"Loading the state replaced {lost} parameters that the optimizer {name!r} trains, so they would be "
                f"trained no longer: where a module has set_extra_state, let it copy_ into the parameters that are "
                f"there."
            )


def with_dense_gradients(parameters: Iterable[Tensor], *, keep: bool = False) -> list[Tensor]:
    """Return parameters, with stand-ins that have the values of a sparse gradient as their gradient.

    Args:
        parameters: with their gradients.
        keep: whether the gradients stay as they are. Otherwise a sparse one is coalesced, and shares memory with that
            of its stand-in, so clipping one clips the other.
    """
    found: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
            if not keep:
                parameter.grad = gradient
            values = gradient._values()
            parameter = values.detach()
            parameter.grad = values.detach() if values.numel() else None  # the largest of no values is an error
        found.append(parameter)
    return found


class OptimizerModes:
    """Switch optimizers with `train()` and `eval()`, such as schedule-free ones, which evaluate other weights.

    The trained weights are kept meanwhile and come back bit for bit, which `eval()` and `train()` alone do not ensure.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._trained: list[tuple[Tensor, Tensor]] | None = None  # parameters and their values, in eval mode

    def begin(self, engine: Any) -> None:
        """Begin to train; raise ValueError if the engine divides the weights."""
        if getattr(engine, "shard_state", None) is not None:
            raise ValueError(
                f"{type(self._optimizers[0]).__name__} has train() and eval(), which switch whole weights, and "
                f"{type(engine).__name__} divides them: use DDPEngine, or another optimizer."
            )
        self.train()

    def eval(self) -> None:
        """Put the weights to evaluate and to save into the model, unless they are there."""
        if self._trained is None:
            self._trained = [(each, each.detach().clone()) for each in self._parameters()]
            for optimizer in self._optimizers:
                optimizer.eval()

    def train(self) -> None:
        """Put the weights to train back into the model."""
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
        """Return the trained weights, in the order of the optimizers, unless they are in the model."""
        return {} if self._trained is None else {"trained": [value for _, value in self._trained]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights to train. Call it after the model and the optimizers are loaded."""
        trained = state.get("trained", ())
        self._trained = list(zip(self._parameters()[: len(trained)], trained, strict=True))
        self.train()

    def _parameters(self) -> list[Tensor]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [each for group in groups for each in group["params"]]
