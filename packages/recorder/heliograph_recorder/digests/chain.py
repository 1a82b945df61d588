"""The chain of digests: one number for all batches so far, in their order, that a resumed run continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTOR, LIMIT = 0x9E3779B97F4A7C15, 2**64  # odd, so that no earlier batch is ever multiplied away
_FACTORS = np.random.default_rng(31).integers(0, 2**63, 64, np.uint64) * np.uint64(2) + np.uint64(1)


class Chain:
    """The chain of one run.

    Attributes:
        value: of all batches so far.
        length: how many these are.
    """

    def __init__(self) -> None:
        self.value = self.length = 0

    def add(self, rows: NDArray[np.uint64]) -> None:
        """Add batches, (batches, numbers that each is compared by); in which groups they come makes no difference."""
        count = len(rows)
        each = rows @ _FACTORS[: rows.shape[1]]
        powers = np.full(count, FACTOR, np.uint64)
        powers[-1] = 1
        weights = np.multiply.accumulate(powers[::-1])[::-1]
        self.value = (self.value * pow(FACTOR, count, LIMIT) + int(each @ weights)) % LIMIT
        self.length += count

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"value": f"{self.value:016x}", "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self.value, self.length = int(state["value"], 16), state["length"]
