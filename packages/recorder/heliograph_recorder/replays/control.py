"""The control of a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from heliograph import Control, NotRecorded, Progress, Request
from heliograph.events import Verb
from heliograph.spi import CHANGES

from ..verbs import EVALUATION_VERB, TAKEN_BACK

AT_BOUNDARY: Final = ("stop", "end_epoch", "roll_back", "log", "validation", "save", "next_phase", *CHANGES)


class ReplayControl(Control):
    """A control that recorded requests are added to, and that requests can be removed from.

    Args:
        progress: the counters of the replayed run.
        on_request: called with each request that a replayed plugin makes, also where it is only counted again.

    Attributes:
        is_held: whether the step of the current batch is known to be held.
    """

    __slots__ = ("_loss_scale", "_on_request", "_others_hold", "_scale_is_unknown", "is_held")

    def __init__(self, progress: Progress, on_request: Callable[[Request], None]) -> None:
        super().__init__(progress)
        self._on_request, self._scale_is_unknown, self._others_hold = on_request, False, False

    @property
    def loss_scale(self) -> float:
        if self._scale_is_unknown:
            raise NotRecorded("by how much other plugins scale the loss")
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._loss_scale = value

    @property
    def holds_step(self) -> bool:
        if self._others_hold and not self.is_held:
            raise NotRecorded("whether other plugins hold the step")
        return self.is_held

    @holds_step.setter
    def holds_step(self, value: bool) -> None:
        self.is_held = value

    def scale_loss(self, factor: float, reason: str, *, by: str | None = None, averages: bool = False) -> None:
        unknown, self._scale_is_unknown = self._scale_is_unknown, False
        super().scale_loss(factor, reason, by=by, averages=averages)
        self._scale_is_unknown = unknown

    def add_recorded(self, recorded: Request) -> Request:
        request, requests = replace(recorded), self.open_requests()
        if request.verb in AT_BOUNDARY and request.what not in requests:
            self._replace({**requests, request.what: request}, vetoed=self.vetoed)
            return request
        self.history.append(request)
        self.history.total += 1
        if request.verb == EVALUATION_VERB:
            self.cut_request = request
        match request.verb:
            case "veto_stop":
                self.postpone_stop()
            case "skip_batch":
                self.skips_batch = self.touched = True
            case "hold_step":
                self.is_held = self._others_hold = self.touched = True
            case "skip_step":
                self.drops_step = self.touched = True
            case "scale_loss":
                self._scale_is_unknown = self.touched = True
            case "veto_save":
                self._save_veto, self.pending = request, True
        if request.verb in TAKEN_BACK and request.verb != "veto_save":
            self.remove(TAKEN_BACK[request.verb])
        return request

    def remove(self, what: str) -> None:
        requests = self.open_requests()
        if requests.pop(what, None) is not None:
            self._replace(requests, vetoed=self.vetoed)

    def postpone_stop(self) -> None:
        self._replace(self.open_requests(), vetoed=True)

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        request = super().record(verb, reason, by)
        self._on_request(request)
        return request

    def _replace(self, requests: dict[str, Request], *, vetoed: bool) -> None:
        was_pending = self.pending  # until the boundary ends, whatever is removed
        self.adopt(requests, vetoed=vetoed)
        self.pending |= was_pending
