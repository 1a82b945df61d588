"""The processes of a host that train together: their engine, and the control by which they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from heliograph.core.distributed.shared_control import SharedControl
from heliograph.events import Request, Verb
from heliograph.spi import ProcessEngine

from .control import check_verb
from .host import Host

if TYPE_CHECKING:
    from .run import HostedRun


class HostedRank(ProcessEngine):
    """One of several processes, whose models the host moves, wraps and synchronises.

    The groups for votes and objects are made next to the host's process group, which stays as it is.

    Args:
        device: where the host computes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)

    def tear_down(self) -> None:
        """Do nothing: nothing was wrapped here."""

    def unwrap(self) -> None:
        """Do nothing: nothing was wrapped here."""


class HostedSharedControl(SharedControl):
    """The control of several processes: at each step boundary they agree on what any of them asks for.

    Args:
        run: the run.
        host: whose loop it is.
    """

    def __init__(self, run: HostedRun, host: Host) -> None:
        super().__init__(run)
        self._host = host

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        """Add a request to the history; RuntimeError where the host cannot serve it."""
        check_verb(self._host, verb)
        return super().record(verb, reason, by)
