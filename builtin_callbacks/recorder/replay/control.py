"""The control of a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....core.errors import NotRecorded
from ....events import Control, Progress, Request
from ....events.control import Verb


class ReplayControl(Control):
    """A control that tells of every request, that recorded ones are put into, and that others can be taken out of.

    Args:
        progress: where the replayed run is.
        heard: called with each request that is made; a counted one comes again and again.

    Attributes:
        is_held: whether somebody is known to hold the step of the batch in hand.
    """

    __slots__ = ("_heard", "_loss_scale", "_others_hold", "_scale_is_unknown", "is_held")

    def __init__(self, progress: Progress, heard: Callable[[Request], None]) -> None:
        super().__init__(progress)
        self._heard, self._scale_is_unknown, self._others_hold = heard, False, False

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the batch in hand.

        Raises:
            NotRecorded: a plugin scales losses that is not replayed; by how much, and which later ones, nobody knows.
        """
        if self._scale_is_unknown:
            raise NotRecorded("by how much other plugins scale the loss")
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._loss_scale = value

    @property
    def holds_step(self) -> bool:
        """Whether the batch in hand is accumulated.

        Raises:
            NotRecorded: a plugin holds steps that is not replayed; which later ones, nobody knows.
        """
        if self._others_hold and not self.is_held:
            raise NotRecorded("whether other plugins hold the step")
        return self.is_held

    @holds_step.setter
    def holds_step(self, value: bool) -> None:
        self.is_held = value

    def scale_loss(self, factor: float, reason: str, *, by: str | None = None) -> None:
        """Scale it, whatever the others' factors are."""
        unknown, self._scale_is_unknown = self._scale_is_unknown, False
        super().scale_loss(factor, reason, by=by)
        self._scale_is_unknown = unknown

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
                self.is_held = self._others_hold = self.touched = True
            case "skip_step":
                self.drops_step = self.touched = True
            case "scale_loss":
                self._scale_is_unknown = self.touched = True
            case _:
                self._due.setdefault(request.verb, request)
        asked = self.should_stop or self.should_end_epoch or self.is_rolling_back
        self.pending = self.pending or bool(self._due) or asked
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

    def _record(self, verb: Verb, reason: str, by: str | None) -> Request:
        request = super()._record(verb, reason, by)
        self._heard(request)
        return request
