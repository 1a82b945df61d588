"""The control of a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ....core.errors import NotRecorded
from ....events import Control, Progress, Request
from ....events.control import Verb

AT_BOUNDARY: Final = ("stop", "end_epoch", "roll_back", "log", "validation", "save", "next_phase")


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
        request, requests = replace(recorded), self.open_requests()
        if request.verb in AT_BOUNDARY and request.verb not in requests:
            self._replace({**requests, request.verb: request}, vetoed=self.vetoed)
            return request
        self.history.append(request)
        self.history.total += 1
        match request.verb:
            case "cut_validation":
                self.cut_request = request
            case "veto_stop":
                self.hold_out()
            case "skip_batch":
                self.skips_batch = self.touched = True
            case "hold_step":
                self.is_held = self._others_hold = self.touched = True
            case "skip_step":
                self.drops_step = self.touched = True
            case "scale_loss":
                self._scale_is_unknown = self.touched = True
        return request

    def drop(self, verb: Verb) -> None:
        """Take out a request that the recorded run did not grant."""
        requests = self.open_requests()
        if requests.pop(verb, None) is not None:
            self._replace(requests, vetoed=self.vetoed)

    def hold_out(self) -> None:
        """Put a stop off, as somebody did in the recorded run."""
        self._replace(self.open_requests(), vetoed=True)

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        """See the base class."""
        request = super().record(verb, reason, by)
        self._heard(request)
        return request

    def _replace(self, requests: dict[Verb, Request], *, vetoed: bool) -> None:
        was_pending = self.pending  # until the boundary ends, whatever is taken out
        self.adopt(requests, vetoed=vetoed)
        self.pending |= was_pending
