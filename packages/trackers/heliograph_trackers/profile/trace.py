"""A trace by torch's profiler: begun where none runs, marked step by step, written whole."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from heliograph import Run
from heliograph.spi import require


class Trace:
    """A trace under way.

    Args:
        run: the run that is traced.
        settings: of `torch.profiler.profile`.
        is_kept: whether it is one to write.

    Attributes:
        steps: which ones have begun in it.

    Raises:
        RuntimeError: another profiler of torch runs.
    """

    def __init__(self, run: Run, settings: dict[str, Any], *, is_kept: bool) -> None:
        if _is_profiling():  # a second one would end the first silently
            raise RuntimeError(
                "Profile cannot trace this run: another profiler of torch runs already, and there is one at a time. "
                "Stop it before, or leave Profile out."
            )
        self.run, self.is_kept = run, is_kept
        self.steps: list[int] = []
        self._range: Any = None
        self._profiler = torch_profiler().profile(**settings)
        self._profiler.prepare_trace()
        self._profiler.start_trace()

    def mark(self, step: int) -> None:
        """Begin the range of a step, unless that has begun."""
        if step in self.steps[-1:]:
            return
        self._end_range()
        self.steps.append(step)
        self._range = torch_profiler().record_function(f"ProfilerStep#{step}")
        self._range.__enter__()

    def stop(self) -> None:
        """End the trace.

        Raises:
            RuntimeError: another profiler has ended it.
        """
        self._end_range()
        if not _is_profiling():
            raise RuntimeError(
                "Profile has lost its trace: another profiler of torch was started during it, and only one can run."
            )
        self._profiler.stop_trace()

    def write(self, folder: Path) -> None:
        """Write a trace that was stopped; under its name it is whole.

        Raises:
            OSError: it could not be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json"
        aside = path.with_name(f"{path.name}.tmp")
        try:
            self._profiler.export_chrome_trace(str(aside))
            if not _is_whole(aside):  # torch says nothing
                raise OSError(f"torch.profiler could not write {path}: is the folder writable, and the disk not full?")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def _end_range(self) -> None:
        last, self._range = self._range, None
        if last is not None:
            last.__exit__(None, None, None)


def torch_profiler() -> Any:
    """Return torch's module, imported where it is used first."""
    return require("torch.profiler", "Profile")


def _is_profiling() -> bool:
    """Return whether a profiler of torch runs, in whatever thread."""
    return bool(require("torch.autograd.profiler", "Profile")._is_profiler_enabled)


def kinds(activities: tuple[str, ...] | None) -> list[Any]:
    """Return torch's names of what is to be traced."""
    supported = {kind.name.lower(): kind for kind in torch_profiler().supported_activities()}
    if missing := [name for name in activities or () if name not in supported]:
        raise ValueError(f"torch cannot trace {', '.join(missing)} here, only {', '.join(sorted(supported))}.")
    return [supported[name] for name in activities or supported]


def _is_whole(path: Path) -> bool:
    """Return whether a file holds a JSON object to its end."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        return file.read().rstrip().endswith(b"}")
