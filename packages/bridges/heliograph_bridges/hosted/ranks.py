"""Several processes of a host: their engine and their shared control."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from heliograph.core.distributed.shared_control import SharedControl
from heliograph.events import Request, Verb
from heliograph.spi import ProcessEngine

from .host import HostLoop, check_verb

if TYPE_CHECKING:
    from .run import HostedRun


class HostedRank(ProcessEngine):
    """One of several processes whose models the host moves, wraps and synchronizes.

    Additional process groups for votes and objects are created; the host's own group is not changed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)

    def tear_down(self) -> None: ...

    def unwrap(self) -> None: ...


class HostedSharedControl(SharedControl):
    """The control of several processes, which exchange their requests at each step boundary."""

    def __init__(self, run: HostedRun, host: HostLoop) -> None:
        super().__init__(run)
        self._host = host

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        check_verb(self._host, verb)
        return super().record(verb, reason, by)
