"""Repeats the forward and backward pass of a batch from the state before it, and restores the state after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from heliograph.core.rehearsal.objects import KeptObjects
from heliograph.spi import capture, restore
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from heliograph import Run

DROPPED = frozenset(
    "collect emit log_curve log_figure log_file log_histogram log_image log_text note track warn".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a forward and backward pass; a parameter may have no gradient."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]

    @classmethod
    def now(cls, loss: Tensor, parameters: Mapping[str, Tensor]) -> Outcome:
        """Return the current outcome, with the gradients themselves instead of copies."""
        return cls(loss.detach(), {name: parameter.grad for name, parameter in parameters.items()})

    def clone(self) -> Outcome:
        copies = {name: None if tensor is None else tensor.clone() for name, tensor in self.gradients.items()}
        return Outcome(self.loss.clone(), copies)

    def differences(self, second: Outcome) -> list[str]:
        """Return the names of tensors that differ; waits for the device."""
        differences = [] if has_same_bits(self.loss, second.loss) else ["the loss"]
        return differences + [
            f"the gradient of {name}"
            for name, gradient in self.gradients.items()
            if not has_same_bits(gradient, second.gradients[name])
        ]


def has_same_bits(first: Tensor | None, second: Tensor | None) -> bool:
    """True if two tensors are bitwise identical: a NaN equals itself, and 0.0 differs from -0.0."""
    if first is None or second is None:
        return first is second
    if (first.dtype, first.shape, first.layout) != (second.dtype, second.shape, second.layout):
        return False
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.contiguous().view(-1).view(torch.uint8)


class QuietRun:
    """A run without its side effects: it tracks, emits and requests nothing."""

    _run: Run

    def __init__(self, run: Run) -> None:
        vars(self)["_run"] = run

    def __getattr__(self, name: str) -> Any:
        if name in DROPPED:
            return _do_nothing
        value = getattr(self._run, name)
        return QuietPart(value, name == "control") if name in ("control", "stepping") else value

    def __setattr__(self, name: str, value: object) -> None:
        pass


class QuietPart:
    """The control of a run without its methods, or its stepping without `weigh`."""

    def __init__(self, part: Any, is_control: bool) -> None:
        self._part, self._is_control = part, is_control

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return _do_nothing if name == "weigh" or (self._is_control and callable(value)) else value


def _do_nothing(*args: object, **options: object) -> None:
    pass


class Repetition:
    """Repeats the passes of a batch. Create it before the forward pass.

    It copies the random generators, the gradients, and the state of the task except the parameters: buffers, counters,
    and its own generators.

    Args:
        run: the run.
        forward: the training step, as the engine runs it.
        batch: the batch.

    Attributes:
        parameters: the trained parameters, by name.
    """

    def __init__(self, run: Run, forward: Callable[..., Any], batch: Any) -> None:
        self._run, self._forward = run, forward
        self.parameters = _trained_parameters(run)
        self._versions = {name: parameter._version for name, parameter in self.parameters.items()}
        self._batch = tree_map_only(Tensor, _copy, batch)
        self._gradients = {name: _copy(parameter.grad) for name, parameter in self.parameters.items()}
        self._restore_before = self._snapshot()
        self._loss_gradient: list[Tensor] = []
        self.loss: Tensor | None = None

    def watch(self, returned: Any) -> None:
        """Take the result of the forward pass, and record the gradient that its backward pass starts with."""
        self.loss = _loss_of(returned)
        self.loss.register_hook(self._loss_gradient.append)  # type: ignore[no-untyped-call]

    @property
    def changed_weights(self) -> list[str]:
        """The parameters that the passes wrote to, so that they cannot be repeated from the same state."""
        versions = self._versions
        return [name for name, parameter in self.parameters.items() if parameter._version != versions[name]]

    def outcome(self) -> Outcome:
        """Return the outcome of the passes of the training."""
        assert self.loss is not None
        return Outcome.now(self.loss, self.parameters)

    @contextmanager
    def repeating(self) -> Iterator[Callable[..., Outcome]]:
        """Yield a function that repeats the passes, in a context if it is given one; restore the state at the end."""
        restore_after = self._snapshot()
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        # DDP may write to the memory of these gradients.
        copies = (
            {name: _copy(gradient) for name, gradient in gradients.items()} if self._run.engine.world_size > 1 else {}
        )
        try:
            yield self._repeat
        finally:
            restore_after()
            for name, gradient in gradients.items():
                if gradient is not None and copies:
                    gradient.copy_(copies[name])
                self.parameters[name].grad = gradient

    def _repeat(self, context: AbstractContextManager[object] | None = None) -> Outcome:
        self._restore_before()
        for name, parameter in self.parameters.items():
            parameter.grad = _copy(self._gradients[name])
        batch = tree_map_only(Tensor, _copy, self._batch)
        with context or nullcontext(), torch.enable_grad():
            loss = _loss_of(self._forward(QuietRun(self._run), batch))
            torch.autograd.backward(loss, self._loss_gradient[0])
        return Outcome.now(loss, self.parameters)

    def _snapshot(self) -> Callable[[], None]:
        """Copy the state that the passes may change, except gradients and parameters; return what restores it."""
        run = self._run
        compiled = [part._compiled_call_impl for module in run.modules.values() for part in module.modules()]
        ours = [run, run.bus, run.plugins, run.engine, run.control, *run.plugins]
        objects = KeptObjects([run.task], leave=[*self.parameters.values(), *compiled, *ours])
        engine = dict(vars(run.engine))  # for example whether buffers were broadcast
        return partial(_restore, objects, capture(), run.engine, engine)


def _trained_parameters(run: Run) -> dict[str, Tensor]:
    parameters = {
        f"{module}.{name}": parameter
        for module, owner in run.modules.items()
        for name, parameter in owner.named_parameters()
        if parameter.requires_grad
    }
    ids = {id(parameter) for parameter in parameters.values()}
    groups = [group["params"] for optimizer in run.optimizers.values() for group in optimizer.param_groups]
    unnamed = [parameter for group in groups for parameter in group if id(parameter) not in ids]
    return parameters | {f"parameter {number} of the optimizer": tensor for number, tensor in enumerate(unnamed)}


def _restore(objects: KeptObjects, draws: Mapping[str, Any], engine: Any, attributes: dict[str, Any]) -> None:
    objects.restore()
    restore(draws)
    vars(engine).update(attributes)


def _loss_of(returned: Any) -> Tensor:
    """Return the tensor of the backward pass: the loss, or the sum of (sum, count)."""
    loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return loss


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)
