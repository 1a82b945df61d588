"""What plugins ask of the loop: verbs write, properties read, and every request says who asked and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .bus import current_owner
from .progress import Progress

Verb = Literal[
    "stop",
    "veto_stop",
    "end_epoch",
    "skip_batch",
    "skip_step",
    "hold_step",
    "scale_loss",
    "request_log",
    "request_validation",
    "request_save",
]
_DAILY = frozenset({"hold_step", "scale_loss", "veto_stop"})


@dataclass(slots=True)
class Request:
    """One entry of the history; equal daily requests in a row are counted in one entry."""

    verb: Verb
    by: str
    reason: str
    epoch: int
    batch: int
    step: int
    times: int = 1

    def __str__(self) -> str:
        times = f" (x{self.times})" if self.times > 1 else ""
        return f"epoch {self.epoch} batch {self.batch} step {self.step}  {self.by}: {self.verb}{times} - {self.reason}"


class History:
    """The latest requests in the order in which they came; `str` gives a line each."""

    def __init__(self, limit: int = 10_000) -> None:
        self._requests: deque[Request] = deque(maxlen=limit)
        self._daily: dict[tuple[str, str], Request] = {}

    def add(self, request: Request) -> None:
        """Append a request, or count it where the same plugin has just asked for the same."""
        key = request.verb, request.by
        last = self._daily.get(key)
        if last is not None and last.reason == request.reason:
            last.times += 1
            return
        if request.verb in _DAILY:
            self._daily[key] = request
        self._requests.append(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __str__(self) -> str:
        return "\n".join(map(str, self._requests)) or "nobody asked for anything"


class Control:
    """The one mutable object that all plugins share. Fresh for every run; see `run.control`.

    Two dirty bits spare the loop the questions: `touched` (something about this batch) and `pending` (something for
    the next boundary). All resets are in `close_batch`, `close_epoch` and `take`.
    """

    def __init__(self, progress: Progress) -> None:
        self.history = History()
        self.pending = False
        self.touched = False
        self.leaving = False
        self.stopped = False
        self.stage: Literal["", "batch_start", "gradients_ready", "should_stop"] = ""
        self._progress = progress
        self._stop: Request | None = None
        self._veto: Request | None = None
        self._end_epoch: Request | None = None
        self.skips_batch = self.holds_step = self.drops_step = False
        self.loss_scale = 1.0
        self._due: dict[str, Request] = {}

    # Verbs: from any event.

    def stop(self, reason: str, *, by: str | None = None) -> None:
        """End the run at the next boundary; the first one to ask is named in the result.

        Args:
            reason: why, for people.
            by: who asks; found out where it is a handler that calls.
        """
        request = self._record("stop", reason, by)
        self._stop = self._stop or request
        self.pending = True

    def end_epoch(self, reason: str, *, by: str | None = None) -> None:
        """End the epoch at the next boundary, as if the loader had ended."""
        self._end_epoch = self._record("end_epoch", reason, by)
        self.pending = True

    def request_log(self, reason: str, *, by: str | None = None) -> None:
        """Ask for a `Log` at the next boundary."""
        self._request("request_log", reason, by)

    def request_validation(self, reason: str, *, by: str | None = None) -> None:
        """Ask for a validation at the next boundary."""
        self._request("request_validation", reason, by)

    def request_save(self, reason: str, *, by: str | None = None) -> None:
        """Ask for a `SavePoint` at the next boundary, behind its validation."""
        self._request("request_save", reason, by)

    # Verbs: from one event only.

    def skip_batch(self, reason: str, *, by: str | None = None) -> None:
        """Leave this micro-batch out; from `BatchStart` only."""
        self._only_in("batch_start", "skip_batch")
        self._record("skip_batch", reason, by)
        self.skips_batch = self.touched = True

    def hold_step(self, reason: str, *, by: str | None = None) -> None:
        """Accumulate this micro-batch without an optimizer step; from `BatchStart` only.

        The last batch of an epoch is stepped all the same: windows never cross an epoch.
        """
        self._only_in("batch_start", "hold_step")
        self._record("hold_step", reason, by)
        self.holds_step = self.touched = True

    def scale_loss(self, factor: float, reason: str, *, by: str | None = None) -> None:
        """Multiply this micro-batch's loss for the backward pass; factors multiply up; from `BatchStart` only."""
        self._only_in("batch_start", "scale_loss")
        self._record("scale_loss", reason, by)
        self.loss_scale *= factor
        self.touched = True

    def skip_step(self, reason: str, *, by: str | None = None) -> None:
        """Drop the gradients in hand instead of stepping with them; from `GradientsReady` only."""
        self._only_in("gradients_ready", "skip_step")
        self._record("skip_step", reason, by)
        self.drops_step = self.touched = True

    def veto_stop(self, reason: str, *, by: str | None = None) -> None:
        """Put a stop off to the next boundary, where it stands again; from `ShouldStop` only."""
        self._only_in("should_stop", "veto_stop")
        self._veto = self._record("veto_stop", reason, by)

    # Reading.

    @property
    def should_stop(self) -> bool:
        """Whether a stop is asked for."""
        return self._stop is not None

    @property
    def should_end_epoch(self) -> bool:
        """Whether an end of this epoch is asked for."""
        return self._end_epoch is not None

    @property
    def should_log(self) -> bool:
        """Whether a log is asked for and not yet served."""
        return "request_log" in self._due

    @property
    def should_validate(self) -> bool:
        """Whether a validation is asked for and not yet served."""
        return "request_validation" in self._due

    @property
    def should_save(self) -> bool:
        """Whether a save is asked for and not yet served."""
        return "request_save" in self._due

    @property
    def stop_request(self) -> Request | None:
        """The request that a stop goes back to."""
        return self._stop

    # The loop's side.

    def take(self, verb: Verb) -> bool:
        """Return whether a boundary request stands, and serve it."""
        return self._due.pop(verb, None) is not None

    def decide(self) -> None:
        """Settle, at the end of a boundary, whether the loop leaves; a veto lasts for this boundary."""
        self.stopped = self._stop is not None and self._veto is None
        self.leaving = self.stopped or self._end_epoch is not None
        self.pending = bool(self._due) or self._stop is not None or self._end_epoch is not None
        self._veto = None

    def close_batch(self) -> None:
        """Forget what was asked for one batch."""
        self.skips_batch = self.holds_step = self.drops_step = self.touched = False
        self.loss_scale = 1.0

    def close_epoch(self) -> None:
        """Forget what was asked for one epoch."""
        self._end_epoch = None
        self.pending = bool(self._due) or self._stop is not None

    def _request(self, verb: Verb, reason: str, by: str | None) -> None:
        self._due.setdefault(verb, self._record(verb, reason, by))
        self.pending = True

    def _record(self, verb: Verb, reason: str, by: str | None) -> Request:
        if not isinstance(reason, str):
            raise TypeError(f"control.{verb} takes its reason as a string, got {reason!r}.")
        place = self._progress
        asker = by or current_owner() or "the caller"
        request = Request(verb, asker, reason, place.epoch, place.batch, place.steps)
        self.history.add(request)
        return request

    def _only_in(self, stage: str, verb: str) -> None:
        if self.stage != stage:
            event = "".join(part.title() for part in stage.split("_"))
            raise RuntimeError(
                f"control.{verb} is for handlers of {event}: elsewhere it would come too late for this batch. "
                f"Ask for it there."
            )
