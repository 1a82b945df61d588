"""What is measured of a stretch of a training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul
from typing import Any

from heliograph.events import Event


class Measured(Event):
    """A stretch of a training was measured; the same on all ranks. Times are in seconds, those of the main rank.

    `batches` were consumed in `seconds`, which include those in `validation` and in `save`; both are counted. The parts
    of `sampled` batches were timed. By rank: `batch`, the time of a batch; `load`, of that the wait for its data;
    `forward`, until the end of the forward pass; `memory`, the bytes that the process has in use, 0 where the system
    does not say; `device_memory`, those that tensors take on a GPU, 0 without one.
    """

    seconds: float
    batches: int
    sampled: int
    validation: float
    validations: int
    save: float
    saves: int
    batch: tuple[float, ...]
    load: tuple[float, ...]
    forward: tuple[float, ...]
    memory: tuple[int, ...]
    device_memory: tuple[int, ...]

    @property
    def own(self) -> tuple[float, ...]:
        return tuple(load + forward for load, forward in zip(self.load, self.forward, strict=True))

    @property
    def load_share(self) -> float:
        return min(1.0, self.load[0] / self.batch[0]) if self.sampled and self.batch[0] > 0 else 0.0

    @property
    def useful(self) -> float:
        return max(0.0, self.seconds - self.validation - self.save) * (1 - self.load_share)


def merged(stretches: Sequence[Measured]) -> Measured:
    last = stretches[-1]
    weights = [each.batches if each.sampled else 0 for each in stretches]

    def mean(values: Iterable[float]) -> float:
        return float(sum(map(mul, values, weights))) / max(1, sum(weights))

    def by_rank(name: str) -> tuple[float, ...]:
        return tuple(map(mean, zip(*(getattr(each, name) for each in stretches), strict=True)))

    def total(name: str) -> Any:
        return sum(getattr(each, name) for each in stretches)

    return Measured(
        total("seconds"), total("batches"), total("sampled"), total("validation"), total("validations"),
        total("save"), total("saves"), by_rank("batch"), by_rank("load"), by_rank("forward"), last.memory,
        last.device_memory,
    )  # fmt: skip
