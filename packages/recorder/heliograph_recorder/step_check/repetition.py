"""The state before a forward pass, and the pass done once more from there; nothing of that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from heliograph.core.rehearsal.objects import KeptObjects
from heliograph.spi import capture, restore
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .outcome import Outcome
from .quiet_run import QuietRun

if TYPE_CHECKING:
    from heliograph import Run


class Repetition:
    """What a forward pass of a batch begins with.

    Made before it. Kept are the random generators, the gradients, and all that the task holds but for the parameters:
    buffers, counters, generators of its own.

    Args:
        run: the run.
        forward: the training step, as the engine runs it.
        batch: what it is called with.

    Attributes:
        parameters: the trained parameters, by name.
    """

    def __init__(self, run: Run, forward: Callable[..., Any], batch: Any) -> None:
        self._run, self._forward = run, forward
        self.parameters = parameters_of(run)
        self._versions = {name: each._version for name, each in self.parameters.items()}
        self._batch = tree_map_only(Tensor, _copy, batch)
        self._gradients = {name: _copy(each.grad) for name, each in self.parameters.items()}
        self._before = self._keep()
        self._loss_gradient: list[Tensor] = []
        self.loss: Tensor | None = None

    def watch(self, returned: Any) -> None:
        """Take what the forward pass has returned; what its backward pass begins with is kept."""
        self.loss = _loss_of(returned)
        self.loss.register_hook(self._loss_gradient.append)  # type: ignore[no-untyped-call]

    @property
    def changed_weights(self) -> list[str]:
        """The parameters that the passes have written to, so that they cannot be repeated from the same state."""
        return [name for name, each in self.parameters.items() if each._version != self._versions[name]]

    def outcome(self) -> Outcome:
        """Return the outcome of the passes that the training has done."""
        assert self.loss is not None  # the passes are over
        return Outcome.now(self.loss, self.parameters)

    @contextmanager
    def repeating(self) -> Iterator[Callable[..., Outcome]]:
        """Return a context with a function that does the passes once more; after it, everything is as it was.

        The function takes a context to do them in, or nothing.
        """
        after = self._keep()
        gradients = {name: each.grad for name, each in self.parameters.items()}
        # DDP may write to the very memory of the gradients that it left
        copies = {name: _copy(each) for name, each in gradients.items()} if self._run.engine.world_size > 1 else {}
        try:
            yield self._repeat
        finally:
            after()
            for name, gradient in gradients.items():
                if gradient is not None and copies:
                    gradient.copy_(copies[name])
                self.parameters[name].grad = gradient

    def _repeat(self, watch: AbstractContextManager[object] | None = None) -> Outcome:
        """Do the passes once more, in a context that sees nothing but them."""
        self._before()
        for name, parameter in self.parameters.items():
            parameter.grad = _copy(self._gradients[name])
        batch = tree_map_only(Tensor, _copy, self._batch)
        with watch or nullcontext(), torch.enable_grad():
            loss = _loss_of(self._forward(QuietRun(self._run), batch))
            torch.autograd.backward(loss, self._loss_gradient[0])
        return Outcome.now(loss, self.parameters)

    def _keep(self) -> Callable[[], None]:
        """Keep what the passes may change, but for gradients and parameters; return what puts it back."""
        run = self._run
        compiled = [each._compiled_call_impl for module in run.modules.values() for each in module.modules()]
        ours = [run, run.bus, run.plugins, run.engine, run.control, *run.plugins]
        objects = KeptObjects([run.task], leave=[*self.parameters.values(), *compiled, *ours])
        engine = dict(vars(run.engine))  # such as whether buffers have been sent to the other ranks
        return partial(_restore, objects, capture(), run.engine, engine)


def parameters_of(run: Run) -> dict[str, Tensor]:
    """Return the parameters that a run trains, by name."""
    found = {
        f"{module}.{name}": parameter
        for module, owner in run.modules.items()
        for name, parameter in owner.named_parameters()
        if parameter.requires_grad
    }
    known = {id(parameter) for parameter in found.values()}
    groups = [group["params"] for optimizer in run.optimizers.values() for group in optimizer.param_groups]
    others = [each for group in groups for each in group if id(each) not in known]
    return found | {f"parameter {number} of the optimizer": each for number, each in enumerate(others)}


def _restore(objects: KeptObjects, draws: Mapping[str, Any], engine: Any, held: dict[str, Any]) -> None:
    objects.restore()
    restore(draws)
    vars(engine).update(held)


def _loss_of(returned: Any) -> Tensor:
    """Return the tensor that is taken backward: of a sum with its count, the sum."""
    loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return loss


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)
