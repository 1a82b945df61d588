"""The temporary folder of a run that is done again: one for all ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from heliograph.spi import membership, on_main

PREFIX = "heliograph-goto-"


class CommonFolder:
    """A folder that the main rank makes and removes, and whose path all ranks know.

    Args:
        parent: where it is made, if not where the system makes such folders; on several machines all must see it.

    Attributes:
        path: the folder.

    Raises:
        OSError: the main rank cannot make it; on all ranks.
    """

    def __init__(self, parent: str | Path | None) -> None:
        self._own: TemporaryDirectory[str] | None = None
        if membership().world_size == 1:
            self.path = self._make(parent)
            return
        from heliograph import DDPEngine  # loaded where there are ranks

        engine = DDPEngine(device="cpu")  # the program, which has the engine of the run, needs the folder first
        with engine.process():
            self.path = on_main(engine, lambda: self._make(parent))

    def _make(self, parent: str | Path | None) -> Path:
        self._own = TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        return Path(self._own.name)

    def remove(self) -> None:
        """Remove it, on the main rank; once more does nothing."""
        if self._own is not None:
            self._own.cleanup()
