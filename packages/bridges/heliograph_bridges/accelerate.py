"""The engine that hands modules, optimizers and backward passes to the package accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from heliograph.spi import ProcessEngine, average_gradients, require
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Modules = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]
States = tuple[dict[str, Any], dict[str, Any]]
MIXED = {"bf16": "bf16", "fp16": "fp16"}
LEFT = ("forward", "_original_forward", "_is_accelerate_prepared")  # what `prepare` leaves on a module
REFUSED = {
    "FSDP": "FSDPEngine does it",
    "MEGATRON_LM": "it has a training loop of its own",
    "XLA": "nothing here counts the steps for it",
}


class AccelerateEngine(ProcessEngine):
    """What an `accelerate.Accelerator` reaches, without code of ours: DeepSpeed, and other devices and backends.

    During a run the task's modules are replaced by the prepared ones, in the attributes that hold them; after it, the
    former are back. Backward passes, steps, clipping and autocast go through the accelerator, which a plugin finds as
    `run.engine.accelerator`. Data loaders stay ours, keyed and dealt out to the ranks by our samplers, and are never
    prepared; accumulation is asked of the plugin `GradientAccumulation`. Checkpoints are those of any engine.

    Tried, on the CPU: one process, and several over gloo; fp32 and bf16. Not tried here: fp16, which needs a GPU, and
    DeepSpeed. DeepSpeed takes the optimizer's step within the backward pass, before `GradientsReady`, so nothing can
    change its gradients, and it clips and accumulates as its own configuration says: that has to give
    `train_micro_batch_size_per_gpu`. It keeps its own checkpoints, by `accelerator.save_state`. Refused are the FSDP of
    accelerate, Megatron-LM, XLA, and parallelism other than by data.

    Args:
        accelerator: one of your own; the process group that it has initialised is used, and left as it is. By default
            one is made for each run, from the options and from what `accelerate launch` or `accelerate config` say.
        backend: as `ProcessEngine`.
        device: as `ProcessEngine`; without an accelerator of your own.
        precision: `fp32`, `tf32`, `bf16` or `fp16`, by default as `accelerate config` says; without an accelerator of
            your own.
        deterministic: as `ProcessEngine`.
        cudnn_benchmark: as `ProcessEngine`.
        timeout: as `ProcessEngine`.
        report_after: as `ProcessEngine`.
        grace: as `ProcessEngine`.
        options: further arguments of `Accelerator`, such as `deepspeed_plugin` or `kwargs_handlers`.

    Raises:
        ImportError: accelerate is not installed; gives the exact command.
        ValueError: as `ProcessEngine`; an accelerator is given together with options for making one.
    """

    def __init__(
        self,
        accelerator: Any = None,
        *,
        backend: Literal["gloo", "nccl"] | None = None,
        device: str | torch.device | None = None,
        precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None,
        deterministic: bool = False,
        cudnn_benchmark: bool = False,
        timeout: float = 600.0,
        report_after: float = 60.0,
        grace: float = 30.0,
        **options: Any,
    ) -> None:
        require("accelerate", "AccelerateEngine", extra="accelerate")
        asked = {"device": device, "precision": precision, **options}
        if accelerator is not None and (given := [name for name, value in asked.items() if value is not None]):
            raise ValueError(f"Give an accelerator or {given[0]}=, not both: an accelerator knows.")
        super().__init__(
            backend,
            device=device if accelerator is None else accelerator.device,
            precision="tf32" if precision == "tf32" else "fp32",
            deterministic=deterministic,
            cudnn_benchmark=cudnn_benchmark,
            timeout=timeout,
            report_after=report_after,
            grace=grace,
        )
        if precision is not None:
            options["mixed_precision"] = MIXED.get(precision, "no")
        self.accelerator = self._given = accelerator
        self._options = options
        self._prepared: Prepared | None = None
        self._unscaled: set[torch.optim.Optimizer] = set()
        self._owns_state = False  # whether the process-wide state of accelerate is to go with the run
        self._holds = self._owes = False  # whether gradients are not exchanged now; whether some were not yet

    # Life.

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        """Prepare the modules and optimizers.

        Raises:
            ValueError: the task is a module itself, or yields several losses; the accelerator works in another way.
        """
        self.refuse_several_losses(task, optimizers)
        if isinstance(task, nn.Module):
            raise ValueError(
                f"AccelerateEngine replaces the modules among a task's attributes, {type(task).__name__} is one "
                f"itself: give it to a Task as an attribute, self.model = {type(task).__name__}(...)."
            )
        try:
            if self._given is None:
                self.accelerator = self._made()
            check_accelerator(self.accelerator)
            super().set_up(task, modules, optimizers)
            self._prepared = Prepared(self.accelerator, task, modules, optimizers)
        except BaseException:
            self.unwrap()
            raise

    def unwrap(self) -> None:
        """Give the task its own modules back; an accelerator that was made for the run is gone then."""
        if self._prepared is not None:
            self._prepared.undo()
            self._prepared = None
        self._unscaled.clear()
        self._holds = self._owes = False
        if self.accelerator is not None:
            self.accelerator.free_memory()
        self.accelerator = self._given
        if self._owns_state:
            self._owns_state = False
            _forget_state()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return the context of a validation or test; the buffers are made those of rank 0 before."""
        with super().evaluating(), self._parts.evaluating():
            yield

    # A step.

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the training step, under autocast where the accelerator wants that."""
        return self._under_autocast(forward)

    def bind_evaluation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a validation or test step, under autocast where the accelerator wants that."""
        return self._under_autocast(forward)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return the context of a micro-batch whose gradients are not yet exchanged."""
        with ExitStack() as stack:
            for module in self._parts.modules.values():
                stack.enter_context(self.accelerator.no_sync(module))
            self._set_holding(True)
            try:
                yield
            finally:
                self._set_holding(False)

    @property
    def backward(self) -> Callable[[Tensor], None]:
        """What adds the gradients of a loss, averaged over all ranks."""
        return self._backward

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, averaged over all ranks."""
        self._backward(loss if scale == 1.0 else loss * scale)

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Refuse: what is prepared exchanges the gradients of all parameters."""
        self.refuse_several()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients true ones; those of a window that ended unforeseen are exchanged only here."""
        if self._owes:
            self._exchange()
        if optimizer not in self._unscaled:
            self._unscaled.add(optimizer)
            self.accelerator.unscale_gradients(self._parts.optimizers[optimizer])

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps the optimizer, and returns False where the accelerator skipped that."""
        prepared = self._parts.optimizers[optimizer]

        def step() -> bool:
            self._unscaled.discard(optimizer)
            prepared.step()
            return not prepared.step_was_skipped

        return step

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that drops the gradients of an optimizer's parameters."""
        prepared = self._parts.optimizers[optimizer]

        def zero_grad() -> None:
            prepared.zero_grad()
            self._owes = False
            if optimizer in self._unscaled:  # a window that was dropped: torch's scaler has to be informed of its end
                self._unscaled.discard(optimizer)
                if self.accelerator.scaler is not None:
                    self.accelerator.scaler.update()

        return zero_grad

    def clip_gradients(self, parameters: Iterable[Tensor], norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their total norm; return the norm before.

        Raises:
            ValueError: DeepSpeed clips by itself.
        """
        if not self._is_deepspeed:
            return super().clip_gradients(parameters, norm, norm_type)
        if norm is not None:
            raise ValueError("DeepSpeed clips within its step: set gradient_clipping in its configuration.")
        return torch.as_tensor(self.accelerator.clip_grad_norm_(parameters, torch.inf))

    def _under_autocast(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        accelerator = self.accelerator
        if not accelerator.native_amp:
            return forward

        @wraps(forward)
        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with accelerator.autocast():
                return forward(*args, **kwargs)

        return under_autocast

    def _backward(self, loss: Tensor) -> None:
        with self.exchanging("backward"):
            self.accelerator.backward(loss)
        self._owes = self._holds

    def _set_holding(self, holds: bool) -> None:
        self._holds = holds
        self.accelerator.sync_gradients = not holds  # DeepSpeed steps within the backward pass unless it knows

    def _exchange(self) -> None:
        """Average the gradients of a window whose last micro-batch was not foreseen as such."""
        if self._is_deepspeed:
            raise RuntimeError(
                "A window of micro-batches ended before its time, which DeepSpeed cannot make up for: it steps within "
                "the backward pass. Give a loader that has a length, and skip no batches."
            )
        if self.group is not None:
            trained = [each for each in self._modules.parameters() if each.requires_grad]
            average_gradients(self.group, trained, "the gradients of a window")
        self._owes = False

    # State.

    def pack(self, modules: Modules, optimizers: Optimizers) -> States:
        """Return the states by name.

        Raises:
            RuntimeError: DeepSpeed keeps them.
        """
        self._refuse_deepspeed()
        return super().pack(modules, optimizers)

    def unpack(
        self, modules: Modules, optimizers: Optimizers, states: tuple[Mapping[str, Any], Mapping[str, Any]]
    ) -> None:
        """Load the states by name.

        Raises:
            RuntimeError: DeepSpeed keeps them.
        """
        self._refuse_deepspeed()
        super().unpack(modules, optimizers, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale of the losses, where there is one."""
        scaler = None if self.accelerator is None else self.accelerator.scaler
        return {} if scaler is None else {"scaler": scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved scale."""
        if self.accelerator.scaler is not None and "scaler" in state:
            self.accelerator.scaler.load_state_dict(dict(state["scaler"]))

    # Parts.

    @property
    def _parts(self) -> Prepared:
        assert self._prepared is not None
        return self._prepared

    @property
    def steps_in_backward(self) -> bool:
        """Whether the optimizer is stepped within the backward pass, so that nothing can change its gradients."""
        return self._is_deepspeed

    @property
    def _is_deepspeed(self) -> bool:
        return self.accelerator is not None and self.accelerator.distributed_type.value == "DEEPSPEED"

    def _made(self) -> Any:
        """Return an accelerator for one run, in the group that is there."""
        accelerate = require("accelerate", "AccelerateEngine", extra="accelerate")
        self._owns_state = not accelerate.state.is_initialized()
        accelerator = accelerate.Accelerator(cpu=self.device.type == "cpu", **self._options)
        if accelerator.num_processes != self.world_size:
            raise ValueError(
                f"accelerate sees {accelerator.num_processes} processes, there are {self.world_size}: start them by "
                f"accelerate launch, torchrun or heliograph.launch."
            )
        return accelerator

    def _refuse_deepspeed(self) -> None:
        if self._is_deepspeed:
            raise RuntimeError(
                "DeepSpeed keeps weights and optimizer states in parts of its own, so no checkpoint of ours holds "
                "them. Write a plugin that calls run.engine.accelerator.save_state(folder) on SavePoint, and "
                "load_state(folder) on TrainStart."
            )


def _forget_state() -> None:
    """Undo what an accelerator that nobody else uses has set for the whole process: it knows a group that ends."""
    state = require("accelerate.state", "AccelerateEngine", extra="accelerate")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


class Prepared:
    """Modules with something to train, and optimizers, as `Accelerator.prepare` returns them.

    Args:
        accelerator: prepares them.
        task: whose attributes the modules are.
        modules: by attribute name.
        optimizers: by name.
    """

    def __init__(
        self,
        accelerator: Any,
        task: Any,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self._task = task
        self._own = {name: vars(task)[name] for name, module in modules.items() if optimizers and is_trained(module)}
        self._former = {
            module: {key: vars(module)[key] for key in LEFT if key in vars(module)} for module in modules.values()
        }
        parts = [*self._own.values(), *optimizers.values()]
        prepared = (
            [accelerator.prepare(*parts)] if len(parts) == 1 else list(accelerator.prepare(*parts) if parts else ())
        )
        self.modules = dict(zip(self._own, prepared, strict=False))
        self.optimizers = dict(zip(optimizers.values(), prepared[len(self._own) :], strict=True))
        self._put(self.modules)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the task have its own modules back where the prepared ones exchange buffers in every forward."""
        wrapped = {name for name, module in self.modules.items() if isinstance(module, DistributedDataParallel)}
        self._put({name: self._own[name] for name in wrapped})
        try:
            yield
        finally:
            self._put({name: self.modules[name] for name in wrapped})

    def undo(self) -> None:
        """Give the task its own modules back, as they were."""
        self._put(self._own)
        for module, former in self._former.items():
            for key in LEFT:
                vars(module).pop(key, None)
            vars(module).update(former)

    def _put(self, modules: Mapping[str, Any]) -> None:
        for name, module in modules.items():
            setattr(self._task, name, module)


def is_trained(module: nn.Module) -> bool:
    """Return whether a module has parameters to train."""
    return any(each.requires_grad for each in module.parameters())


def check_accelerator(accelerator: Any) -> Any:
    """Return an accelerator whose runs are like those of other engines.

    Raises:
        ValueError: it works in another way; says what to do.
    """
    kind = accelerator.distributed_type.value
    if kind in REFUSED:
        raise ValueError(f"AccelerateEngine does not go with accelerate's {kind}: {REFUSED[kind]}.")
    if accelerator.parallelism_config is not None:
        raise ValueError("AccelerateEngine deals data out to all ranks: leave parallelism_config out.")
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"The accelerator divides losses by gradient_accumulation_steps={accelerator.gradient_accumulation_steps}: "
            f"leave that to the plugin GradientAccumulation, which every engine obeys."
        )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None and kind != "DEEPSPEED":
        raise ValueError(f"accelerate has no fp16 on the device {str(accelerator.device)!r}: take bf16, or a GPU.")
    return accelerator
