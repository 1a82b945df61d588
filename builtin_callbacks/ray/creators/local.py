"""Several processes on this machine, as an object."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....core.distributed.launch import RankValues, launch


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Runs functions in several new processes on this machine, as `heliograph.launch` does.

    Attributes:
        nprocs: how many processes; by default, one for each GPU that is visible.
        grace: seconds that the others have to close and report when a rank has failed.

    Raises:
        ValueError: an attribute is out of its range.
    """

    nprocs: int | None = None
    grace: float = 30.0

    def __post_init__(self) -> None:
        count = self.nprocs
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"nprocs is a whole number from 1 on, or None for one per visible GPU; got {count!r}.")
        is_number = isinstance(self.grace, int | float) and not isinstance(self.grace, bool)
        if not is_number or not 0 < self.grace < math.inf:
            raise ValueError(f"grace is a positive number of seconds, got {self.grace!r}.")

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_message: Callable[[int, Any], object] | None = None,
        **kwargs: Any,
    ) -> RankValues:
        """Call `fn(*args, **kwargs)` on each rank; see `heliograph.launch`."""
        return launch(fn, *args, nprocs=self.nprocs, grace=self.grace, on_message=on_message, **kwargs)
