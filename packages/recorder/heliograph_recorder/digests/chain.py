"""The digest chain: one number for all batches so far, in order, which a resumed run continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTOR, LIMIT = 0x9E3779B97F4A7C15, 2**64  # odd, so that every earlier batch keeps its effect
_FACTORS = np.random.default_rng(31).integers(0, 2**63, 64, np.uint64) * np.uint64(2) + np.uint64(1)


class Chain:
    """A digest of all batches so far.

    Attributes:
        value: 64 bits.
        length: the number of batches.
    """

    def __init__(self) -> None:
        self.value = self.length = 0

    def add(self, rows: NDArray[np.uint64]) -> None:
        """Add rows of shape (batches, digests); their grouping does not matter."""
        count = len(rows)
        sums = rows @ _FACTORS[: rows.shape[1]]
        powers = np.full(count, FACTOR, np.uint64)
        powers[-1] = 1
        weights = np.multiply.accumulate(powers[::-1])[::-1]
        self.value = (self.value * pow(FACTOR, count, LIMIT) + int(sums @ weights)) % LIMIT
        self.length += count

    def state_dict(self) -> dict[str, Any]:
        return {"value": f"{self.value:016x}", "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.length = int(state["value"], 16), state["length"]
