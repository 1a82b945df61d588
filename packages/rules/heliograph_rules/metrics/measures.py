"""Metrics of the machine and of the optimizers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from heliograph import EpochEnd, Log, Progress, Run
from heliograph.events import Event
from heliograph.spi import Rates

from ..base import RuleMetric

MIB = 2**20
STATM = Path("/proc/self/statm")


class Throughput(RuleMetric):
    """The speed of the training, as a dict: `samples_per_second` (over all ranks) and `steps_per_second`.

    If losses are sums over tokens, also `tokens_per_second`. Measured at each log and each end of an epoch, over the
    time since the previous measurement, including validations and saves. None before the first one.
    """

    events = (Log, EpochEnd)
    when_read = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._origin: Progress | None = None
        self._measured = Rates()
        self._rates: dict[str, float] | None = None

    def compute(self, run: Run, event: Event) -> dict[str, float] | None:
        if run.origin is not self._origin:
            origin = self._origin = run.origin
            self._measured.start(origin, origin.earlier_seconds)  # run.origin.seconds would continue to run
        if isinstance(event, self.events):
            self._rates = self._measured.read(run.progress, run.progress.seconds) or self._rates
        return self._rates

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = state["rates"]


class GradientNorm(RuleMetric):
    """The mean gradient norm in the newest log that contains one; of several optimizers, a dict by name.

    None before the first one. The plugins `GradientNorm` and `GradientClipping` measure it.
    """

    events = (Log,)
    when_read = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._norm: float | dict[str, float] | None = None

    def compute(self, run: Run, event: Event) -> float | dict[str, float] | None:
        if isinstance(event, Log):
            norm = _gradient_norms(event.metrics)
            self._norm = self._norm if norm is None else norm
        return self._norm

    def state_dict(self) -> dict[str, Any]:
        return {"norm": self._norm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norm = state["norm"]


class LearningRate(RuleMetric):
    """The learning rate of the first parameter group; of several optimizers, a dict by name."""

    when_read = True

    def compute(self, run: Run, event: Event) -> float | dict[str, float] | None:
        rates = {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in run.optimizers.items()}
        return _unwrap_single(rates)


class Memory(RuleMetric):
    """The memory of this process in MiB, as a dict.

    `resident` if the system reports it, as Linux does; on a CUDA device also `device_allocated`, `device_reserved`
    and `device_peak` (the maximum of `device_allocated`).
    """

    when_read = True

    def validate(self) -> bool:
        return STATM.exists() or torch.cuda.is_available()

    def compute(self, run: Run, event: Event) -> dict[str, float]:
        memory = {}
        if STATM.exists():
            memory["resident"] = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
        if torch.device(device := run.engine.device).type == "cuda":
            memory["device_allocated"] = torch.cuda.memory_allocated(device) / MIB
            memory["device_reserved"] = torch.cuda.memory_reserved(device) / MIB
            memory["device_peak"] = torch.cuda.max_memory_allocated(device) / MIB
        return memory


def _gradient_norms(metrics: Mapping[str, float]) -> float | dict[str, float] | None:
    if "train/gradient_norm" in metrics:
        return float(metrics["train/gradient_norm"])
    named = {
        name.removeprefix("train/").removesuffix("_gradient_norm"): float(value)
        for name, value in metrics.items()
        if name.startswith("train/") and name.endswith("_gradient_norm")
    }
    return _unwrap_single(named)


def _unwrap_single(by_optimizer: dict[str, float]) -> float | dict[str, float] | None:
    return next(iter(by_optimizer.values())) if len(by_optimizer) == 1 else by_optimizer or None
