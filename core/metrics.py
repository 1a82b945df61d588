"""Means over samples, kept on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Means:
    """Weighted running means by name. Adding never waits for the device; `read` waits once."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._floats: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Add a value, a scalar tensor or a number, with its weight.

        Raises:
            ValueError: a tensor of more than one element.
        """
        if isinstance(value, Tensor):
            total = self._totals.get(name)
            if total is None:
                total = self._totals[name] = self._zero(name, value).add_(self._floats.pop(name, 0.0))
            total.add_(value.detach() if value.ndim == 0 else value.detach().reshape(()), alpha=weight)
        else:
            self._floats[name] = self._floats.get(name, 0.0) + float(value) * weight
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def state_dict(self) -> dict[str, list[float]]:
        """Return sum and weight by name."""
        names = {**self._floats, **self._totals}
        sums = {name: self._floats.get(name, 0.0) + self._on_host(name) for name in names}
        return {name: [total, self._weights[name]] for name, total in sums.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Continue from saved sums and weights."""
        self._totals = {}
        self._floats = {name: total for name, (total, _) in state.items()}
        self._weights = {name: weight for name, (_, weight) in state.items()}

    def _on_host(self, name: str) -> float:
        return self._totals[name].item() if name in self._totals else 0.0

    def read(self, scope: str) -> dict[str, float]:
        """Return the means as `<scope>/<name>` and begin anew."""
        sums = dict(self._floats)
        by_device: dict[torch.device, list[str]] = {}
        for name, total in self._totals.items():
            by_device.setdefault(total.device, []).append(name)
        for names in by_device.values():
            values = torch.stack([self._totals[name] for name in names]).tolist()
            for name, value in zip(names, values, strict=True):
                sums[name] = sums.get(name, 0.0) + value
        means = {f"{scope}/{name}": sums[name] / self._weights[name] for name in self._weights if self._weights[name]}
        self.__init__()  # type: ignore[misc]  # begins anew, whatever it holds
        return means

    @staticmethod
    def _zero(name: str, value: Tensor) -> Tensor:
        if value.numel() != 1:
            raise ValueError(
                f"Metric {name!r} must be a scalar to be averaged, got a tensor of shape {list(value.shape)}."
            )
        # Sums of many samples need the digits of float64, which Apple's GPUs do not have.
        dtype = torch.float32 if value.device.type == "mps" else torch.float64
        return torch.zeros((), dtype=dtype, device=value.device)


def plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as python's own numbers: plugins may have added NumPy's, which no checkpoint holds."""
    return {name: float(value) for name, value in metrics.items()}


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
