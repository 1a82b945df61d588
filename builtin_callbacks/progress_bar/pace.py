"""How fast a run is, and how long it will still take, by its own clock."""

from __future__ import annotations

from collections import deque

from ...events import Run

LOOKS = 6  # the speed is that since the fifth look before


class Pace:
    """Measures from one look at a run to the next.

    Args:
        run: at its beginning, or where it continues.
    """

    def __init__(self, run: Run) -> None:
        self._begin = _counts(run)
        self._looks = deque([self._begin], LOOKS)

    def look(self, run: Run) -> list[str]:
        """Return the recent speed, and the time that is left where that is known: `45.2 steps/s`, `ETA 01:20`."""
        self._looks.append(_counts(run))
        batches, steps = self._speeds(self._looks[0])
        left = [
            (run.max_steps - run.progress.steps) / steps if run.max_steps is not None and steps else None,
            _batches_left(run) / batches if run.max_epochs is not None and run.batches_per_epoch and batches else None,
        ]
        known = [each for each in left if each is not None]
        return [*_speed(steps), *([f"ETA {duration(min(known))}"] if known and min(known) > 0 else [])]

    def whole(self, run: Run) -> list[str]:
        """Return the speed since the beginning."""
        self._looks.append(_counts(run))
        return _speed(self._speeds(self._begin)[1])

    def _speeds(self, since: tuple[float, int, int]) -> tuple[float, float]:
        """Return batches and steps in a second."""
        seconds, batches, steps = (now - then for now, then in zip(self._looks[-1], since, strict=True))
        return (batches / seconds, steps / seconds) if seconds > 0 else (0.0, 0.0)


def duration(seconds: float) -> str:
    """Return a time such as 01:20 or 1:01:20, as bars show it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _counts(run: Run) -> tuple[float, int, int]:
    return run.progress.seconds, run.progress.batches, run.progress.steps


def _batches_left(run: Run) -> float:
    progress = run.progress
    return ((run.max_epochs or 0) - progress.epoch) * (run.batches_per_epoch or 0) - progress.batch


def _speed(steps: float) -> list[str]:
    if not steps:
        return []
    return [
        f"{steps:.3g} steps/s"
        if 1 <= steps < 999.5
        else f"{steps:.0f} steps/s"
        if steps > 1
        else f"{1 / steps:.3g} s/step"
    ]
