"""Means over samples, kept on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FOLD = 64


class Sum:
    """A weighted sum of scalars on one device.

    A few terms at a time are added up in the precision of a loss, which costs two thirds of mixing in float64; then
    they are folded into float64, which sums of many samples need.
    """

    __slots__ = ("host", "part", "pending", "start", "total", "weight")

    def __init__(self, host: float = 0.0, weight: float = 0.0, start: float = 0.0, pending: int = 0) -> None:
        self.host, self.weight = host, weight
        self.start, self.pending = start, pending
        self.total: Tensor | None = None
        self.part: Tensor | None = None

    def add(self, name: str, value: Tensor, weight: float) -> None:
        """Add a scalar tensor without waiting for its device."""
        part = self.part
        if part is None:
            part = self._begin(name, value)
        part.add_(value.detach() if value.ndim == 0 else value.detach().reshape(()), alpha=weight)
        self.pending += 1
        if self.pending == FOLD and self.total is not None:
            self.total.add_(part)
            part.zero_()
            self.pending = 0

    def on_device(self) -> Tensor:
        """Return the sum of all tensor terms so far."""
        assert self.total is not None
        assert self.part is not None
        return self.total + self.part

    def state(self) -> list[float]:
        """Return what `Sum(*state)` continues from, to the last bit; waits for the device."""
        if self.total is None or self.part is None:
            return [self.host, self.weight, self.start, self.pending]
        return [self.host + self.total.item(), self.weight, self.part.item(), self.pending]

    def _begin(self, name: str, value: Tensor) -> Tensor:
        check_scalar(name, value)
        long = torch.float32 if value.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        short = long if value.dtype == torch.float64 else torch.float32
        self.total = torch.zeros((), dtype=long, device=value.device).add_(self.host)
        self.part = torch.zeros((), dtype=short, device=value.device).add_(self.start)
        self.host = self.start = 0.0
        return self.part


class Means:
    """Weighted running means by name. Adding never waits for the device; `read` waits once.

    Attributes:
        batch: the number of the batch in hand, where values of an evaluation are kept by batch.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._sums: dict[str, Sum] = {}

    def add(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Add a value, a scalar tensor or a number, with its weight.

        Raises:
            ValueError: a tensor of more than one element.
        """
        entry = self._sums.get(name)
        if entry is None:
            entry = self._sums[name] = Sum()
        if isinstance(value, Tensor):
            entry.add(name, value, weight)
        else:
            entry.host += float(value) * weight
        entry.weight += weight

    def for_evaluation(self) -> Means:
        """Return new means for one set of an evaluation."""
        return Means()

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums by name."""
        return {name: entry.state() for name, entry in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Continue from saved sums."""
        self._sums = {
            name: Sum(host, weight, start, int(pending)) for name, (host, weight, start, pending) in state.items()
        }

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum and its weight by name; waits for the device once."""
        sums = {name: entry.host + entry.start for name, entry in self._sums.items()}
        by_device: dict[torch.device, list[str]] = {}
        for name, entry in self._sums.items():
            if entry.total is not None:
                by_device.setdefault(entry.total.device, []).append(name)
        for names in by_device.values():
            values = torch.stack([self._sums[name].on_device() for name in names]).tolist()
            for name, value in zip(names, values, strict=True):
                sums[name] += value
        return {name: (value, self._sums[name].weight) for name, value in sums.items()}

    def read(self, scope: str) -> dict[str, float]:
        """Return the means as `<scope>/<name>`, and start again."""
        sums = self.sums()
        self._sums = {}
        return {f"{scope}/{name}": value / weight for name, (value, weight) in sums.items() if weight}


def check_scalar(name: str, value: Tensor) -> None:
    """Raise ValueError unless a tensor has one element."""
    if value.numel() != 1:
        raise ValueError(f"Metric {name!r} must be a scalar to be averaged, got a tensor of shape {list(value.shape)}.")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose largest output is the target class, a scalar tensor.

    Args:
        outputs: scores, (batch, classes).
        targets: class indices, (batch,).

    Raises:
        ValueError: the outputs are not of that shape.
    """
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ValueError(
            f"accuracy takes scores of shape (batch, classes), two classes or more, got {list(outputs.shape)}."
        )
    return (outputs.argmax(dim=1) == targets).double().mean()
