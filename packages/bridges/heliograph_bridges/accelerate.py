"""The engine for the package accelerate."""

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
PREPARED = ("forward", "_original_forward", "_is_accelerate_prepared")  # attributes that `prepare` sets on a module
REFUSED = {
    "FSDP": "FSDPEngine does it",
    "MEGATRON_LM": "it has its own training loop",
    "XLA": "its steps cannot be counted here",
}


class AccelerateEngine(ProcessEngine):
    """Train through an `accelerate.Accelerator`, for DeepSpeed and other devices and backends.

    During a run the task's modules are replaced by the prepared ones, in the attributes that hold them; after it, the
    original modules are restored. Backward passes, steps, clipping and autocast use the accelerator, which plugins can
    access as `run.engine.accelerator`. Data loaders are not prepared: Heliograph shards them among the ranks. Use the
    plugin `GradientAccumulation` for accumulation. Checkpoints are the same as with other engines.

    Tested on the CPU, with one process and with several over gloo, in fp32 and bf16. Not tested: fp16, which needs a
    GPU, and DeepSpeed. DeepSpeed steps the optimizer within the backward pass, before `GradientsReady`, so plugins
    cannot change its gradients. It clips and accumulates according to its own configuration, which must contain
    `train_micro_batch_size_per_gpu`. It saves its own checkpoints, with `accelerator.save_state`. Not supported:
    accelerate's FSDP, Megatron-LM, XLA, and any parallelism except data parallelism.

    Args:
        accelerator: your own accelerator, whose process group is used and kept. By default, each run creates one
            from the options and from the settings of `accelerate launch` or `accelerate config`.
        backend: see `ProcessEngine`.
        device: see `ProcessEngine`; only without your own accelerator.
        precision: `fp32`, `tf32`, `bf16` or `fp16`; by default from `accelerate config`. Only without your own
            accelerator.
        deterministic: see `ProcessEngine`.
        cudnn_benchmark: see `ProcessEngine`.
        timeout: see `ProcessEngine`.
        report_after: see `ProcessEngine`.
        grace: see `ProcessEngine`.
        options: further arguments of `Accelerator`, such as `deepspeed_plugin` or `kwargs_handlers`.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: see `ProcessEngine`; an accelerator was passed together with options for creating one.
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
        settings = {"device": device, "precision": precision, **options}
        if accelerator is not None and (conflicts := [name for name, value in settings.items() if value is not None]):
            raise ValueError(f"Pass either an accelerator or {conflicts[0]}=, not both.")
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
            options["mixed_precision"] = precision if precision in ("bf16", "fp16") else "no"
        self.accelerator = self._given = accelerator
        self._options = options
        self._prepared: Prepared | None = None
        self._unscaled: set[torch.optim.Optimizer] = set()
        self._owns_state = False  # whether to reset the process-wide state of accelerate after the run
        self._is_no_sync = self._has_unsynced = False  # whether synchronization is off; whether gradients lack it

    # Life.

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        """Prepare the modules and optimizers.

        Raises:
            ValueError: the task is itself a module, or yields several losses; the accelerator is not supported.
        """
        self.refuse_several_losses(task, optimizers)
        if isinstance(task, nn.Module):
            raise ValueError(
                f"AccelerateEngine replaces modules in the attributes of a task, but {type(task).__name__} is itself "
                f"a module: make it an attribute of a Task, self.model = {type(task).__name__}(...)."
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
        """Restore the task's modules; release an accelerator that was created for the run."""
        if self._prepared is not None:
            self._prepared.undo()
            self._prepared = None
        self._unscaled.clear()
        self._is_no_sync = self._has_unsynced = False
        if self.accelerator is not None:
            self.accelerator.free_memory()
        self.accelerator = self._given
        if self._owns_state:
            self._owns_state = False
            _forget_state()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return the context of a validation or test; broadcasts the buffers of rank 0 first."""
        with super().evaluating(), self._parts.evaluating():
            yield

    # A step.

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the training step, under autocast if the accelerator uses it."""
        return self._under_autocast(forward)

    def bind_evaluation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a validation or test step, under autocast if the accelerator uses it."""
        return self._under_autocast(forward)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return the context of a micro-batch without gradient synchronization."""
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
        """The function that adds the gradients of a loss, averaged over all ranks."""
        return self._backward

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, averaged over all ranks."""
        self._backward(loss if scale == 1.0 else loss * scale)

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Raise an error: prepared modules synchronize the gradients of all parameters."""
        self.refuse_several()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients; also average those of a window that ended unexpectedly."""
        if self._has_unsynced:
            self._exchange()
        if optimizer not in self._unscaled:
            self._unscaled.add(optimizer)
            self.accelerator.unscale_gradients(self._parts.optimizers[optimizer])

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that steps the optimizer; it returns False if the accelerator skipped the step."""
        prepared = self._parts.optimizers[optimizer]

        def step() -> bool:
            self._unscaled.discard(optimizer)
            prepared.step()
            return not prepared.step_was_skipped

        return step

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a function that clears the gradients of an optimizer's parameters."""
        prepared = self._parts.optimizers[optimizer]

        def zero_grad() -> None:
            prepared.zero_grad()
            self._has_unsynced = False
            if optimizer in self._unscaled:  # the window was dropped, which torch's scaler must know
                self._unscaled.discard(optimizer)
                if self.accelerator.scaler is not None:
                    self.accelerator.scaler.update()

        return zero_grad

    def clip_gradients(self, parameters: Iterable[Tensor], norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their total norm; return the norm before.

        Raises:
            ValueError: DeepSpeed does its own clipping.
        """
        if not self._is_deepspeed:
            return super().clip_gradients(parameters, norm, norm_type)
        if norm is not None:
            raise ValueError("DeepSpeed does its own clipping: set gradient_clipping in its configuration.")
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
        self._has_unsynced = self._is_no_sync

    def _set_holding(self, holds: bool) -> None:
        self._is_no_sync = holds
        self.accelerator.sync_gradients = not holds  # or DeepSpeed would step within the backward pass

    def _exchange(self) -> None:
        if self._is_deepspeed:
            raise RuntimeError(
                "An accumulation window ended early, which DeepSpeed does not support, because it steps within the "
                "backward pass. Use a loader that has a length, and skip no batches."
            )
        if self.group is not None:
            trained = [parameter for parameter in self._modules.parameters() if parameter.requires_grad]
            average_gradients(self.group, trained, "the gradients of a window")
        self._has_unsynced = False

    # State.

    def pack(self, modules: Modules, optimizers: Optimizers) -> States:
        """Return the states by name.

        Raises:
            RuntimeError: DeepSpeed saves its own checkpoints.
        """
        self._refuse_deepspeed()
        return super().pack(modules, optimizers)

    def unpack(
        self, modules: Modules, optimizers: Optimizers, states: tuple[Mapping[str, Any], Mapping[str, Any]]
    ) -> None:
        """Load the states by name.

        Raises:
            RuntimeError: DeepSpeed saves its own checkpoints.
        """
        self._refuse_deepspeed()
        super().unpack(modules, optimizers, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the gradient scaler, if any."""
        scaler = None if self.accelerator is None else self.accelerator.scaler
        return {} if scaler is None else {"scaler": scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the gradient scaler."""
        if self.accelerator.scaler is not None and "scaler" in state:
            self.accelerator.scaler.load_state_dict(dict(state["scaler"]))

    # Parts.

    @property
    def _parts(self) -> Prepared:
        assert self._prepared is not None
        return self._prepared

    @property
    def steps_in_backward(self) -> bool:
        """Whether the optimizer steps within the backward pass, so that plugins cannot change its gradients."""
        return self._is_deepspeed

    @property
    def _is_deepspeed(self) -> bool:
        return self.accelerator is not None and self.accelerator.distributed_type.value == "DEEPSPEED"

    def _made(self) -> Any:
        accelerate = require("accelerate", "AccelerateEngine", extra="accelerate")
        self._owns_state = not accelerate.state.is_initialized()
        accelerator = accelerate.Accelerator(cpu=self.device.type == "cpu", **self._options)
        if accelerator.num_processes != self.world_size:
            raise ValueError(
                f"accelerate has {accelerator.num_processes} processes, but the world size is {self.world_size}: start "
                f"them with accelerate launch, torchrun or heliograph.launch."
            )
        return accelerator

    def _refuse_deepspeed(self) -> None:
        if self._is_deepspeed:
            raise RuntimeError(
                "DeepSpeed partitions weights and optimizer states, so checkpoints cannot contain them. Write a plugin "
                "that calls run.engine.accelerator.save_state(folder) on SavePoint, and load_state(folder) on "
                "TrainStart."
            )


def _forget_state() -> None:
    state = require("accelerate.state", "AccelerateEngine", extra="accelerate")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


class Prepared:
    """The trainable modules and the optimizers, as `Accelerator.prepare` returns them."""

    def __init__(
        self,
        accelerator: Any,
        task: Any,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self._task = task
        self._own = {name: vars(task)[name] for name, module in modules.items() if optimizers and is_trained(module)}
        self._original_attributes = {
            module: {key: vars(module)[key] for key in PREPARED if key in vars(module)} for module in modules.values()
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
        wrapped = {name for name, module in self.modules.items() if isinstance(module, DistributedDataParallel)}
        self._put({name: self._own[name] for name in wrapped})
        try:
            yield
        finally:
            self._put({name: self.modules[name] for name in wrapped})

    def undo(self) -> None:
        self._put(self._own)
        for module, attributes in self._original_attributes.items():
            for key in PREPARED:
                vars(module).pop(key, None)
            vars(module).update(attributes)

    def _put(self, modules: Mapping[str, Any]) -> None:
        for name, module in modules.items():
            setattr(self._task, name, module)


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def check_accelerator(accelerator: Any) -> Any:
    kind = accelerator.distributed_type.value
    if kind in REFUSED:
        raise ValueError(f"AccelerateEngine does not support accelerate's {kind}: {REFUSED[kind]}.")
    if accelerator.parallelism_config is not None:
        raise ValueError("AccelerateEngine supports only data parallelism: omit parallelism_config.")
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"The accelerator divides losses by gradient_accumulation_steps={accelerator.gradient_accumulation_steps}: "
            f"use the plugin GradientAccumulation instead."
        )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None and kind != "DEEPSPEED":
        raise ValueError(f"accelerate has no fp16 on the device {str(accelerator.device)!r}: use bf16, or a GPU.")
    return accelerator
