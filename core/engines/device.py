"""The engine of one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from .options import PrecisionName, state_of
from .precision import Precision

if TYPE_CHECKING:
    from ...events.run import Reduction
    from ..distributed.watch import Watch
    from .contract import Modules, Optimizers, SavedStates
    from .numerics import Determinism


class DeviceEngine:
    """One process, one device.

    Args:
        device: `cpu`, `cuda`, `cuda:1`, `mps` and the like; by default a GPU if there is one.
        precision: `fp32`, `tf32`, `bf16` or `fp16`; see `Precision`.
        deterministic: use deterministic algorithms only; an operation without one raises.
        cudnn_benchmark: let cuDNN time its algorithms and choose the fastest; not in a validation or test.

    Raises:
        ValueError: the device is unknown or not available; it does not support the precision; the options contradict
            each other, or the environment of cuBLAS.
    """

    rank = local_rank = 0
    world_size = 1
    is_main = is_local_main = True
    watch: Watch | None = None

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        precision: PrecisionName = "fp32",
        deterministic: bool = False,
        cudnn_benchmark: bool = False,
    ) -> None:
        self.precision = Precision(precision)
        self.determinism: Determinism | None = None
        if deterministic or cudnn_benchmark:
            from .numerics import Determinism

            self.determinism = Determinism(deterministic=deterministic, cudnn_benchmark=cudnn_benchmark)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        self.device = check_device(device)
        if self.determinism is not None:
            self.determinism.prepare(self.device)
        self.precision.check(self.device)

    def __repr__(self) -> str:
        ranks = f", rank={self.rank}, world_size={self.world_size}" * (self.world_size > 1)
        return f"{type(self).__name__}(device='{self.device}', precision={self.precision.name!r}{ranks})"

    def process(self) -> AbstractContextManager[None]:
        """Return a context with torch's settings for a run: a single process belongs to no group."""
        return self.settings()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Set torch's settings for precision and determinism; restore them afterwards."""
        determined = nullcontext() if self.determinism is None else self.determinism.running()
        with determined, self.precision.running():
            yield

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        """Move modules to the device.

        Raises:
            ValueError: several processes compute the model together.
        """
        self.refuse_shared(modules)
        for module in modules.values():
            module.to(self.device)
        self.precision.begin(self.device, optimizers)

    def refuse_shared(self, modules: Modules) -> None:
        """Raise ValueError if several processes compute the model together, as in tensor parallelism."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from .weights import refuse_shared_weights

            refuse_shared_weights(modules, type(self).__name__, self.world_size)

    def tear_down(self) -> None:
        """Do nothing: there are no wrappers."""

    def abandon(self) -> None:
        """Do nothing: there is no other process."""

    def move(self, batch: Any) -> Any:
        """Return a batch on the device."""
        from .movers import move

        return move(batch, self.device)

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches, moved to the device."""
        if self.device.type == "cpu":
            return batches
        from .movers import move

        return (move(batch, self.device) for batch in batches)

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the training step, under autocast if the precision needs it."""
        return self.precision.bind(forward, self.device)

    def bind_evaluation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a validation or test step, under autocast if the precision needs it."""
        return self.precision.bind(forward, self.device)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which cuDNN does not time its algorithms."""
        return nullcontext() if self.determinism is None else self.determinism.evaluating()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self.precision.autocast(self.device)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: one process exchanges no gradients."""
        return nullcontext()

    @property
    def backward(self) -> Callable[[Tensor], None]:
        """Adds the gradients of a loss; in full precision it is torch's own function, without a frame in between."""
        return self.precision.backward

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, without a multiplication in the graph."""
        self.precision.backward_scaled(loss, scale)

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of `scale * loss` to these parameters only."""
        self.precision.backward_for(loss, scale, parameters)

    def exchange_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Do nothing: there is no other process to exchange with."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the loss scale from the gradients, if there is one."""
        self.precision.unscale(optimizer)

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return the optimizer's own step, unless the precision may skip it."""
        return self.precision.bind_step(optimizer)

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return the optimizer's own `zero_grad`, unless the loss scale is updated with it."""
        return self.precision.bind_zero_grad(optimizer)

    def clip_gradients(self, parameters: Iterable[Tensor], norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their total norm; return the norm before clipping."""
        chosen = list(parameters)
        try:
            return _clip_gradients(chosen, norm, norm_type)
        except NotImplementedError:  # torch has no norm of sparse gradients; they are rare, so there is no check before
            from .weights import with_dense_gradients

            return _clip_gradients(with_dense_gradients(chosen, keep=norm is None), norm, norm_type)

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Return a copy of a tensor, or a number; refuse the same values as with several ranks."""
        from ..distributed.exchange import reduce_alone

        return reduce_alone(value, how)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of the only rank."""
        return [tensor]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the object of the only rank."""
        return [value]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of the only rank."""
        return value

    def barrier(self) -> None:
        """Do nothing: there is one rank."""

    @property
    def waited_seconds(self) -> float:
        """Always 0: a single process does not wait for other ranks."""
        return 0.0

    def vote(self, values: Sequence[float]) -> list[float]:
        """Return the values of the only rank."""
        return list(values)

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        """Return a context that does nothing: a single process does not wait."""
        return nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: no other process can fail."""
        return nullcontext()

    def pack(self, modules: Modules, optimizers: Optimizers) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states by name."""
        trained = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        return {name: state_of(module) for name, module in modules.items()}, trained

    def unpack(self, modules: Modules, optimizers: Optimizers, states: SavedStates) -> None:
        """Load the states by name."""
        from .weights import load_states

        load_states(modules, optimizers, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, if there is one."""
        return self.precision.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved loss scale."""
        self.precision.load_state_dict(state)


def _clip_gradients(parameters: list[Tensor], norm: float | None, norm_type: float) -> Tensor:
    if norm is not None:
        return clip_grad_norm_(parameters, norm, norm_type)
    return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], norm_type)


def parse_device(device: str | torch.device) -> torch.device:
    """Return a torch device, available or not; raise ValueError if the name is unknown."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"Unknown device {device!r}: use 'cuda', 'mps' for an Apple GPU, or 'cpu'.") from None


def check_device(device: str | torch.device) -> torch.device:
    """Return an available device; raise ValueError if it is unknown or not available."""
    parsed = parse_device(device)
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"Device {device!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices.")
    if parsed.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"Device {device!r} is not available: torch sees no Apple GPU on this machine.")
    return parsed
