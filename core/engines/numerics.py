"""What only some options load: determinism, TensorFloat-32, the loss scale of fp16."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast, get_args

import torch
from torch.optim import Optimizer

from .options import PrecisionName

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE = (":4096:8", ":16:8")


class Determinism:
    """torch's determinism settings during a run.

    Args:
        deterministic: use deterministic algorithms only; an operation without one raises.
        cudnn_benchmark: let cuDNN time its algorithms and choose the fastest for each shape; not in a validation or
            test, whose shapes differ.

    Raises:
        ValueError: both are set; they contradict each other.
    """

    def __init__(self, *, deterministic: bool = False, cudnn_benchmark: bool = False) -> None:
        if deterministic and cudnn_benchmark:
            raise ValueError(
                "deterministic=True and cudnn_benchmark=True contradict each other: the fastest algorithm differs from "
                "run to run. Give one of them."
            )
        self.deterministic, self.cudnn_benchmark = deterministic, cudnn_benchmark

    def prepare(self, device: torch.device) -> None:
        """Set the workspace that makes cuBLAS deterministic; cuBLAS reads it once per process, so it remains set.

        Raises:
            ValueError: it has another value, or it is too late.
        """
        if not self.deterministic or device.type != "cuda":
            return
        value, how = os.environ.get(WORKSPACE), f"Set {WORKSPACE}={REPRODUCIBLE[0]} in the environment"
        if value is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no annotation here
            raise ValueError(
                f"deterministic=True comes too late for cuBLAS: the GPU is in use already. {how}, or make the Trainer "
                f"before anything uses the GPU."
            )
        if value not in (None, *REPRODUCIBLE):
            raise ValueError(
                f"deterministic=True does not work with {WORKSPACE}={value!r}, which is set: cuBLAS is deterministic "
                f"with {' or '.join(REPRODUCIBLE)}. {how}, or leave it unset."
            )
        os.environ[WORKSPACE] = value or REPRODUCIBLE[0]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Apply the settings within this context and restore the previous ones; it may be nested."""
        cudnn = torch.backends.cudnn
        before = (cudnn.deterministic, cudnn.benchmark)
        strict = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        try:
            cudnn.benchmark = self.cudnn_benchmark
            if self.deterministic:
                cudnn.deterministic = True
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before
            if self.deterministic:
                torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Do not time algorithms during an evaluation."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before and not self.cudnn_benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


def check_supported(device: torch.device, name: PrecisionName) -> None:
    """Raise ValueError unless the device supports the precision; the error names the supported ones."""
    if not _supports(device, name):
        allowed = ", ".join(name for name in get_args(PrecisionName) if _supports(device, name))
        raise ValueError(
            f"precision={name!r} is not available on the device {str(device)!r}, which allows {allowed}. tf32 is for "
            f"Nvidia GPUs; of these, those before compute capability 8.0 have neither tf32 nor bf16."
        )


def _supports(device: torch.device, name: PrecisionName) -> bool:
    if name == "fp32":
        return True
    if device.type != "cuda":
        return name != "tf32" and torch.amp.is_autocast_available(device.type)
    with torch.cuda.device(device):
        if name == "tf32":
            return torch.cuda.is_tf32_supported()
        return name == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)


@contextmanager
def tensor_float() -> Iterator[None]:
    # torch's older names, which its compiler reads.
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class LossScaling:
    """torch's gradient scaler with one scale for all optimizers of a run.

    The scale is kept while there are gradients that were computed with it. It is updated when the gradients of an
    optimizer are dropped and no other optimizer has any: after each step of alternating optimizers, and once for
    optimizers that end their windows together.
    """

    def __init__(self, device_type: str, optimizers: Iterable[Optimizer] = ()) -> None:
        self.scaler = torch.amp.GradScaler(device_type)
        self._optimizers = tuple(optimizers)
        self._open: dict[Optimizer, _Window] = {}
        self._closed: list[_Window] = []  # the scaler stores their ids, so they must stay alive

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, once per window, without waiting for the device."""
        if optimizer not in self._open:
            window = self._open[optimizer] = _Window(optimizer)
            self.scaler.unscale_(cast(Optimizer, window))

    def step(self, optimizer: Optimizer) -> bool:
        """Step unless a gradient is infinite or NaN; return whether it stepped. Waits once for the device."""
        self.unscale(optimizer)
        window = self._open[optimizer]
        self.scaler.step(cast(Optimizer, window))
        return window.stepped

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients, and update the scale if no others remain; without waiting for the device."""
        optimizer.zero_grad()
        window = self._open.pop(optimizer, None)
        if window is not None:
            self._closed.append(window)
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        if self._closed and all(parameter.grad is None for group in groups for parameter in group["params"]):
            self.scaler.update()
            self._closed.clear()


class _Window:
    # An optimizer as the scaler sees it in one window. A fused optimizer would otherwise decide on the device whether
    # it steps, and skipped steps could not be counted.

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.stepped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.stepped = True
        self.optimizer.step()
