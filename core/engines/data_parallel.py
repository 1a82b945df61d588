"""The engine of one process on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from .contract import Modules, Optimizers
from .device import DeviceEngine
from .options import ComputeOptions


class DataParallelEngine(DeviceEngine):
    """One process, several GPUs: `torch.nn.DataParallel` splits each batch among them.

    During a run, calling a module of the task computes on all GPUs; other methods run on the first. With one GPU or
    none, nothing is wrapped and the engine is a `DeviceEngine`. It is slower than one process per GPU (`DDPEngine`),
    but needs no launcher.

    Args:
        gpus: the GPUs' numbers, the first of which has the modules; by default all that torch sees.
        options: `precision`, `deterministic` and `cudnn_benchmark`, as `DeviceEngine`; for all GPUs.

    Raises:
        ValueError: the first GPU does not exist; also as `DeviceEngine`.
    """

    def __init__(self, gpus: Sequence[int] | None = None, **options: Unpack[ComputeOptions]) -> None:
        self.gpus = list(range(torch.cuda.device_count())) if gpus is None else list(gpus)
        self._wrapped: list[tuple[Any, str, Any]] = []
        super().__init__(torch.device("cuda", self.gpus[0]) if self.gpus else None, **options)

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        """Move modules to the first GPU, and make the task call wrappers of those with parameters."""
        super().set_up(task, modules, optimizers)
        if len(self.gpus) > 1:
            parts = dict(task.named_children()) if isinstance(task, nn.Module) else modules
            for name, part in parts.items():
                if next(part.parameters(), None) is not None:
                    # Not registered in an nn.Module, so parameters and state dicts do not change.
                    self._wrapped.append((task, name, vars(task).get(name)))
                    vars(task)[name] = Split(part, device_ids=self.gpus)

    def tear_down(self) -> None:
        """Make the task call its own modules again."""
        while self._wrapped:
            task, name, module = self._wrapped.pop()
            if isinstance(task, nn.Module):
                del vars(task)[name]
            else:
                vars(task)[name] = module

    def abandon(self) -> None:
        self.tear_down()


class Split(nn.DataParallel[nn.Module]):
    """A module whose batches are split among GPUs; it forwards other attributes and methods to the module."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")

        def under_autocast(replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cuda", dtype, enabled):  # a new thread has fp16, not its parent's dtype
                return replica(*args, **kwargs)

        bound: list[Any] = [partial(under_autocast, replica) for replica in replicas]
        return super().parallel_apply(bound, inputs, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
