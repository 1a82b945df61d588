"""A launcher of several processes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heliograph import launch
from heliograph.core.distributed.launcher import KeptRanks
from heliograph.spi import check_number, check_whole_number


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Runs functions in several new processes on this machine, as `heliograph.launch` does.

    Attributes:
        nprocs: the number of processes; by default, one for each visible GPU.
        grace: seconds that the other ranks have to close and report after one has failed.
        idle: seconds without a call after which a `CreatorTrainer` gives up its processes.

    Raises:
        ValueError: an attribute is out of its range.
    """

    nprocs: int | None = None
    grace: float = 30.0
    idle: float = 60.0

    def __post_init__(self) -> None:
        if self.nprocs is not None:
            check_whole_number("nprocs", self.nprocs, at_least=1, or_else="None for one per visible GPU")
        check_number("grace", self.grace, of="seconds", more_than=0)
        check_number("idle", self.idle, of="seconds", more_than=0)

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_message: Callable[[int, Any], object] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on each rank; see `heliograph.launch`."""
        return launch(fn, *args, nprocs=self.nprocs, grace=self.grace, on_message=on_message, **kwargs)

    def keep_ranks(self) -> KeptRanks:
        """Return processes that stay alive between calls of their `run`, for who calls several functions."""
        return KeptRanks(self.nprocs, grace=self.grace, idle=self.idle)
