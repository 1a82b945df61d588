"""The control of a run in the loop of a host: verbs that this loop cannot serve are errors."""

from __future__ import annotations

from heliograph import Control, Progress
from heliograph.events import Request, Verb

from .host import MENDS, Host
from .refusals import DONE_BY_ALL

TAKES_BACK = "withdraw_"


class HostedControl(Control):
    """The control of one process.

    Args:
        progress: the counters of the run.
        host: whose loop it is.
    """

    __slots__ = ("_host",)

    def __init__(self, progress: Progress, host: Host) -> None:
        self._host = host
        super().__init__(progress)

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        """Add a request to the history; RuntimeError where the host cannot serve it."""
        check_verb(self._host, verb)
        return super().record(verb, reason, by)


def check_verb(host: Host, verb: Verb) -> None:
    """Raise RuntimeError where a host cannot serve a verb."""
    if not (verb in DONE_BY_ALL - host.cannot or verb in host.verbs or verb.startswith(TAKES_BACK)):
        mend = host.mend(verb) if verb in MENDS else "train with heliograph.Trainer"
        raise RuntimeError(f"control.{verb} cannot be served in {host.name}. To have its effect, {mend}.")
