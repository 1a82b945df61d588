"""The control of a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...events import Control, Progress, Request
from ...events.control import Verb


class ReplayControl(Control):
    """A control that tells of every request, that recorded ones are put into, and that others can be taken out of.

    Args:
        progress: where the replayed run is.
        heard: called with each request that is made; a counted one comes again and again.
    """

    __slots__ = ("_heard",)

    def __init__(self, progress: Progress, heard: Callable[[Request], None]) -> None:
        super().__init__(progress)
        self._heard = heard

    def put(self, recorded: Request) -> Request:
        """Let a request stand that a plugin of the recorded run had made; return its entry in the history."""
        request = replace(recorded)
        self.history.append(request)
        self.history.total += 1
        match request.verb:
            case "stop":
                self.stop_request = self.stop_request or request
            case "end_epoch":
                self._end_request = self._end_request or request
            case "roll_back":
                self._back_request = request
            case "cut_validation":
                self.cut_request = request
            case "veto_stop":
                self._vetoed = True
            case "skip_batch":
                self.skips_batch = self.touched = True
            case "hold_step":
                self.holds_step = self.touched = True
            case "skip_step":
                self.drops_step = self.touched = True
            case "scale_loss":  # by how much is not recorded
                self.touched = True
            case _:
                self._due.setdefault(request.verb, request)
        self.pending = self.pending or bool(self._due) or self.should_stop or self.should_end_epoch or self.turns_back
        return request

    def drop(self, verb: Verb) -> None:
        """Take out a request that the recorded run did not grant."""
        match verb:
            case "stop":
                self.stop_request = None
            case "end_epoch":
                self._end_request = None
            case "roll_back":
                self._back_request = None
            case _:
                self._due.pop(verb, None)

    def hold_out(self) -> None:
        """Put a stop off, as somebody did in the recorded run."""
        self._vetoed = True

    def _record(self, verb: Verb, reason: str, by: str | None, stage: str = "") -> Request:
        request = super()._record(verb, reason, by, stage)
        self._heard(request)
        return request
