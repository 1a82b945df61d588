"""The temporary folder of a run that is done again: one for all ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from heliograph.core.distributed.ranks.membership import membership

PREFIX = "heliograph-goto-"


class CommonFolder:
    """A folder that the main rank makes and removes, and whose path all ranks know.

    Args:
        parent: where it is made, if not where the system makes such folders; on several machines all must see it.

    Attributes:
        path: the folder.
    """

    def __init__(self, parent: str | Path | None) -> None:
        member = membership()
        self._own = None
        if member.rank == 0:
            self._own = TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        name = None if self._own is None else self._own.name
        if member.world_size > 1:  # the program, which has the engine of the run, needs the folder first
            from heliograph.core.engines.parallel.ddp import DDPEngine  # loaded where there are ranks

            engine = DDPEngine(device="cpu")
            with engine.process():
                name = engine.broadcast(name)
        assert name is not None  # the main rank has made it
        self.path = Path(name)

    def remove(self) -> None:
        """Remove it, on the main rank; once more does nothing."""
        if self._own is not None:
            self._own.cleanup()
