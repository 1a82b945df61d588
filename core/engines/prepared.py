"""What accelerate prepared for a run instead of the user's own objects, and how these are put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LEFT = ("forward", "_original_forward", "_is_accelerate_prepared")  # what `prepare` leaves on a module
REFUSED = {
    "FSDP": "FSDPEngine does it",
    "MEGATRON_LM": "it has a training loop of its own",
    "XLA": "nothing here counts the steps for it",
}


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
        self._own = {name: module for name, module in modules.items() if optimizers and is_trained(module)}
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
