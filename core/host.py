"""The host of this process: a cluster launcher, such as Ray's, that runs its trainings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..events import Run, Status
    from ..plugins import Plugins
    from .result import RunResult


class Host(Protocol):
    """The launcher's object within the process of a rank."""

    def prepare(self, plugins: Plugins) -> None:
        """Add the plugins that every training here needs; called when a training begins."""

    def ended(self, result: RunResult) -> None:
        """Receive the result of a training that ended without an error."""


_hosts: dict[int, Host | None] = {}  # by process id: a process forked from a rank, such as a loader's worker, has none


def current_host() -> Host | None:
    """Return the host of this process, or None if heliograph did not start it."""
    return _hosts.get(os.getpid())


def is_preempted(run: Run) -> bool:
    """Return True if a plugin stopped the run because its process or machine will be taken away."""
    stops = [request for request in run.control.history if request.verb == "stop"]
    if run.report.is_replay:
        # A recording lacks the declarations of plugins. One that stops and also saves or cuts is taken for preemption.
        acts = {
            (request.by, request.step, request.reason)
            for request in run.control.history
            if request.verb in ("save", "cut_validation")
        }
        return any((stop.by, stop.step, stop.reason) in acts for stop in stops)
    by = run.plugins.declared("exclusive").get("preemption") if stops else None
    return any(stop.by == by for stop in stops)


def ended_for_good(run: Run, status: Status) -> bool:
    """Return True if a run ended without failure or preemption, so that nothing is left to resume."""
    return status in ("completed", "stopped") and not is_preempted(run)


@contextmanager
def hosted_by(host: Host | None, send: Callable[[bytes], None] | None = None) -> Iterator[None]:
    """Use a host for every training that begins within this context; None for no host.

    Args:
        host: the launcher's object.
        send: sends objects put into `run.report.queue`, pickled, to the launcher without waiting.
    """
    if send is not None:
        from .distributed.launcher import open_queue  # not needed without a launcher

        open_queue(send)
    previous, _hosts[os.getpid()] = current_host(), host
    try:
        yield
    finally:
        _hosts[os.getpid()] = previous
