"""A cluster that runs this process: the trainings in it ask its host, such as that of a Ray worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..events import Run
    from ..events.catalogue import Status
    from ..plugins import Plugins
    from .result import RunResult


class Host(Protocol):
    """A launcher's representative within the process of a rank."""

    def prepare(self, plugins: Plugins) -> None:
        """Add what every training here needs to the plugins of its trainer; called as it begins."""

    def ended(self, result: RunResult) -> None:
        """Take note of how a training ended, where it ended without an error."""


_hosts: dict[int, Host | None] = {}  # by process: one that is forked from a rank (a loader's worker, say) has none


def current_host() -> Host | None:
    """Return who runs this process; None where it is not heliograph."""
    return _hosts.get(os.getpid())


def is_preempted(run: Run) -> bool:
    """Return whether a plugin has stopped a run because its process or machine is to be taken away."""
    stops = [each for each in run.control.history if each.verb == "stop"]
    if (
        run.report.is_replay
    ):  # a recording does not hold what plugins declare: who stops, and saves or cuts, is taken for it
        acts = {(one.by, one.step, one.reason) for one in run.control.history if one.verb in ("save", "cut_validation")}
        return any((each.by, each.step, each.reason) in acts for each in stops)
    by = run.plugins.declared("exclusive").get("preemption") if stops else None
    return any(each.by == by for each in stops)


def ended_for_good(run: Run, status: Status) -> bool:
    """Return whether a run ended well, and is not one that is preempted: a resumed run does the rest of that."""
    return status in ("completed", "stopped") and not is_preempted(run)


@contextmanager
def hosted_by(host: Host | None, send: Callable[[bytes], None] | None = None) -> Iterator[None]:
    """Have every training that begins within ask this host; None for no host.

    Args:
        host: the launcher's object.
        send: takes what is put into `run.report.queue`, pickled, to the launcher without waiting.
    """
    if send is not None:
        from .distributed.launch.queue import open_queue  # not needed without a launcher

        open_queue(send)
    previous, _hosts[os.getpid()] = current_host(), host
    try:
        yield
    finally:
        _hosts[os.getpid()] = previous
