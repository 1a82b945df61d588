"""Metrics of the machine and of the optimizers."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from heliograph import EpochEnd, Log, Progress, Run
from heliograph.events import Event, Rates

from ..base import NewestMetric, RuleMetric

MIB = 2**20
STATM = Path("/proc/self/statm")


class Throughput(NewestMetric):
    """The speed of the training, as a dict: `samples_per_second` (over all ranks) and `steps_per_second`.

    If losses are sums over tokens, also `tokens_per_second`. Measured at each log and each end of an epoch, over the
    time since the previous measurement, including validations and saves. None before the first one.
    """

    events = (Log, EpochEnd)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._origin: Progress | None = None
        self._measured = Rates()

    def measure(self, run: Run, event: Log | EpochEnd) -> dict[str, float] | None:
        if run.origin is not self._origin:
            origin = self._origin = run.origin
            self._measured.start(origin, origin.earlier_seconds)  # run.origin.seconds would continue to run
        return self._measured.read(run.progress, run.progress.seconds) or None


class GradientNorm(NewestMetric):
    """The mean gradient norm in the newest log that contains one; of several optimizers, a dict by name.

    None before the first one. The plugins `GradientNorm` and `GradientClipping` measure it.
    """

    events = (Log,)

    def measure(self, run: Run, event: Log) -> float | dict[str, float] | None:
        if "train/gradient_norm" in event.metrics:
            return float(event.metrics["train/gradient_norm"])
        named = {
            name.removeprefix("train/").removesuffix("_gradient_norm"): float(value)
            for name, value in event.metrics.items()
            if name.startswith("train/") and name.endswith("_gradient_norm")
        }
        return _unwrap_single(named)


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


def _unwrap_single(by_optimizer: dict[str, float]) -> float | dict[str, float] | None:
    return next(iter(by_optimizer.values())) if len(by_optimizer) == 1 else by_optimizer or None
