"""How fast a training goes: samples, steps and tokens per second."""

from __future__ import annotations

from ...events import Progress

UNITS = ("samples", "steps", "tokens")


class Rates:
    """What was trained on per second, since the rates were last read."""

    def __init__(self) -> None:
        self._since: tuple[float, tuple[int, ...]] | None = None

    def start(self, progress: Progress, seconds: float) -> None:
        """Measure from here.

        Args:
            progress: the counters of the run.
            seconds: of the clock that `read` is given, too.
        """
        self._since = seconds, tuple(getattr(progress, unit) for unit in UNITS)

    def read(self, progress: Progress, seconds: float) -> dict[str, float]:
        """Return `samples_per_second`, `steps_per_second` and, where losses have counts, `tokens_per_second`.

        Of all ranks, over the time since the last call that gave some. Empty where none was started, and where no
        sample was trained on since, or no time has passed.
        """
        if self._since is None:
            self.start(progress, seconds)
            return {}
        before, counts = self._since
        if seconds <= before or progress.samples == counts[0]:
            return {}
        rates = {
            f"{unit}_per_second": (getattr(progress, unit) - count) / (seconds - before)
            for unit, count in zip(UNITS, counts, strict=True)
            if unit != "tokens" or progress.tokens
        }
        self.start(progress, seconds)
        return rates
