"""What every bridge to a loop of another framework shows to its user."""

from __future__ import annotations

from heliograph import Plugins, RunResult

from .training import HostedTraining


class PluginOwner:
    """Holds plugins that take part in the trainings of a host."""

    _training: HostedTraining

    @property
    def plugins(self) -> Plugins:
        """The plugins: to look one up, to enable or disable it."""
        return self._training.plugins

    @property
    def result(self) -> RunResult | None:
        """How the last training ended; None before the first, and while one is under way."""
        return self._training.result
