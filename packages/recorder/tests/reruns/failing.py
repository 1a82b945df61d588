"""A plugin that ends a training as a kill would: at a step, with an error."""

from __future__ import annotations

import heliograph as h


class Failing(h.Plugin):
    """Fails at a step.

    Args:
        step: the optimizer steps that are done then.
    """

    affects_training = False

    def __init__(self, step: int) -> None:
        self.step = step

    @h.on(h.StepEnd)
    def fail(self, run: h.Run, event: h.StepEnd) -> None:
        """Fail."""
        if run.progress.steps == self.step:
            raise RuntimeError("killed")
