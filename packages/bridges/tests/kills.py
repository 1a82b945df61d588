"""A training that fails after a save, as a kill would end it."""

from __future__ import annotations

import heliograph as h


class KilledError(Exception):
    """Ends a run as a kill would."""


class Kills(h.Plugin):
    """Fails at a step, after its save."""

    affects_training = False

    def __init__(self, step: int) -> None:
        self.step = step

    @h.on(h.ShouldStop, optional=True)
    def kill(self, run: h.Run, event: h.ShouldStop) -> None:
        if run.progress.steps == self.step:
            raise KilledError
