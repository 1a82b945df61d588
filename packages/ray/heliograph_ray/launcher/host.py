"""The host of a Ray worker: it connects the trainings in the worker with the launcher."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from .mailbox import Ended

if TYPE_CHECKING:
    from heliograph import Plugins, RunResult

    from ..session import Session
    from .worker_channel import WorkerChannel


class RayHost:
    """The host of trainings in a worker of the launcher, see `heliograph.core.host.Host`.

    Args:
        session: of this worker.
        channel: sends messages to the caller.
        is_main: whether the caller gets the results of this worker.
    """

    def __init__(self, session: Session, channel: WorkerChannel, *, is_main: bool) -> None:
        self.session = session
        self._channel, self._is_main = channel, is_main

    def prepare(self, plugins: Plugins) -> None:
        """Add `RayReport` to a training that has none."""
        if not any("ray_report" in getattr(plugin, "exclusive", ()) for plugin in plugins):
            plugins.load("ray_report")

    def ended(self, result: RunResult) -> None:
        """Send the result of a training to the caller."""
        if self._is_main:
            self._channel.send(Ended(pickle.dumps(result)))
