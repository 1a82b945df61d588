"""What a worker of the launcher has to do with the trainings in it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from .mailbox import Ended

if TYPE_CHECKING:
    from ....core.result import RunResult
    from ....plugins import Plugins
    from ..session import Session
    from .worker_channel import Post


class RayHost:
    """The launcher's representative in a worker.

    Args:
        session: the line to what runs this worker.
        post: takes messages to the caller.
        is_main: whether this is the worker whose results the caller gets.
    """

    def __init__(self, session: Session, post: Post, *, is_main: bool) -> None:
        self.session = session
        self._post, self._is_main = post, is_main

    def prepare(self, plugins: Plugins) -> None:
        """Have every training report to Ray, unless it does so already."""
        if not any("ray_report" in getattr(plugin, "exclusive", ()) for plugin in plugins):
            plugins.load("ray_report")

    def ended(self, result: RunResult) -> None:
        """Tell the caller how a training ended."""
        if self._is_main:
            self._post.send(Ended(pickle.dumps(result)))
