"""Requests of plugins to the loop: methods write, properties read, and every request records who made it and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast, get_args

from .bus import current_handler, is_within
from .checks import check_number, printable
from .progress import Progress, Skips

Verb = Literal["stop", "veto_stop", "end_epoch", "skip_batch", "skip_step", "hold_step", "scale_loss", "log", "validation", "save", "next_phase", "cut_validation", "roll_back", "veto_save", "withdraw_stop", "withdraw_end_epoch", "withdraw_log", "withdraw_validation", "withdraw_save", "set_learning_rate", "enable_plugin", "disable_plugin"]  # fmt: skip  # noqa: E501
Pending = Literal["stop", "end_epoch", "log", "validation", "save"]  # can be withdrawn
Counter = Literal["skipped_steps", "skipped_batches"]
# Changes of the run, which a boundary serves first.
CHANGES: tuple[Verb, ...] = ("set_learning_rate", "enable_plugin", "disable_plugin")
LOADED = "the loaded state"  # `by` of the plugins that a loaded state enables and disables
COUNTED = ("hold_step", "scale_loss", "veto_stop", "veto_save")  # made at every batch or boundary: counted, not listed
# The verbs that are valid in handlers of one event only: its class and its name.
_ONLY_IN: Mapping[Verb, tuple[str, str]] = {
    "skip_batch": ("BatchStart", "batch_start"),
    "hold_step": ("BatchStart", "batch_start"),
    "scale_loss": ("BatchStart", "batch_start"),
    "skip_step": ("GradientsReady", "gradients_ready"),
    "veto_stop": ("ShouldStop", "should_stop"),
}


@dataclass(slots=True)
class Request:
    """One request in the history: what was requested, by whom, why, and when.

    Attributes:
        verb: the request, such as `stop`.
        by: the plugin or person that made it.
        reason: why, for people.
        epoch: the epoch of the request.
        batch: its batch in the epoch.
        step: its optimizer step.
        times: how often the same request was repeated.
        rank: the process that made the request; None in a single process.
        event: the event whose handler made the request; empty outside of handlers.
        required: whether plugins cannot withdraw the request, nor veto a save.
        target: the plugin or optimizer that a change is for; empty for all optimizers.
        value: the new learning rate.
        through: the plugin whose handler made the request on behalf of `by`; else empty.
        vetoed: True for a stop that was vetoed, so that the run continued. None for a stop loaded from a checkpoint: it
            ended the saved run, and is discarded unless a plugin vetoes it now.
    """

    verb: Verb
    by: str
    reason: str
    epoch: int
    batch: int
    step: int
    times: int = 1
    rank: int | None = None
    event: str = ""
    required: bool = False
    target: str = ""
    value: float | None = None
    through: str = ""
    vetoed: bool | None = False

    @property
    def what(self) -> str:
        """The verb with its target and value, which identifies equal requests."""
        return " ".join([self.verb, *filter(None, [self.target, "" if self.value is None else repr(self.value)])])

    def __str__(self) -> str:
        times = f" (x{self.times})" if self.times > 1 else ""
        asker = self.by if self.rank is None else f"{self.by} on rank {self.rank}"
        where = f"epoch {self.epoch} batch {self.batch} step {self.step}  "
        return printable(f"{where}{asker}: {self.what}{times} - {self.reason}")


class History(deque[Request]):
    """The latest 10,000 requests in order; `str` gives one line for each.

    Attributes:
        total: the number of all requests, including those that were dropped.
        watcher: called at each request, unless it is None.
        drop_watcher: called with a veto that drops a request, unless it is None.
    """

    def __init__(self, requests: Iterable[Request] = (), maxlen: int | None = 10_000) -> None:
        super().__init__(requests, maxlen)
        self.total = len(self)
        self.watcher: Callable[[], None] | None = None
        self.drop_watcher: Callable[[Request], None] | None = None

    def add(self, request: Request) -> Request:
        """Append a request, or count it if the same plugin has just made the same one."""
        for latest in islice(reversed(self), 8) if request.verb in COUNTED else ():
            if (latest.verb, latest.by, latest.reason) == (request.verb, request.by, request.reason):
                latest.times += 1
                return latest
        self.append(request)
        self.total += 1
        if self.watcher is not None:
            self.watcher()
        return request

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no requests"


class Control:
    """Requests to the loop, shared by all plugins; `run.control`, new for every run.

    Attributes:
        history: every request.
        touched: whether there is a request about the current batch.
        pending: whether there is a request for the next boundary.
        skips_batch: whether the current batch is skipped.
        holds_step: whether the current batch is accumulated without an optimizer step.
        drops_step: whether the current gradients are dropped.
        loss_scale: the factor on the loss of the current batch.
        mean_scale: the part of this factor that only turns the sum of a window into a mean.
        stop_request: the first request to stop, or None.
        is_evaluating: whether a validation or test that can be cut short is running.
        cut_request: the request that cuts the running validation or test short, or None.
        skips: batches and steps skipped since the last optimizer step.
        max_skips: the number of consecutive skips that is allowed without an optimizer step; None for any number.
        switches: for each plugin that was enabled or disabled in the run, whether it is enabled.
    """

    __slots__ = (
        "_back_request", "_due", "_end_request", "_later", "_postponed", "_progress", "_save_veto", "_vetoed",
        "agreed", "cut_request", "drops_step", "history", "holds_step", "is_evaluating", "is_shared", "leaving",
        "loss_scale", "max_skips", "mean_scale", "pending", "skips", "skips_batch", "stop_request", "stopped",
        "switches", "touched", "votes_on_batches", "votes_on_steps",
    )  # fmt: skip

    def __init__(self, progress: Progress) -> None:
        self.history = History()
        self.stop_request: Request | None = None
        self.cut_request: Request | None = None
        self._end_request: Request | None = None
        self._back_request: Request | None = None
        self._save_veto: Request | None = None
        self.pending = self.leaving = self.stopped = self._vetoed = False
        self.agreed: BaseException | None = None
        self.votes_on_batches = self.votes_on_steps = self.is_evaluating = self.is_shared = False
        self._progress = progress
        self.max_skips: int | None = None
        self.skips = Skips()
        self.switches: dict[str, bool] = {}
        self._due: dict[str, Request] = {}  # by `Request.what`, in serving order
        self._later: dict[str, Request] = {}  # due at the boundary after the one at which the run was saved
        self._postponed: set[str] = set()
        self.close_batch()

    def __repr__(self) -> str:
        due = {"stop": self.stop_request, "end_epoch": self._end_request, "roll_back": self._back_request} | self._due
        shown = ", ".join(f"{verb} by {request.by}" for verb, request in due.items() if request is not None)
        return f"<Control: {f'requested {shown}' if shown else 'nothing requested'}, {self.history.total} in history>"

    def stop(self, reason: str, *, by: str | None = None, required: bool = False) -> None:
        """End the run at the next boundary. The result names the first request.

        Args:
            reason: why, for people.
            by: who requests it; by default the plugin whose handler calls.
            required: whether plugins cannot withdraw it, for example because the machine is preempted. A veto only
                postpones it.
        """
        request = self.record("stop", reason, by)
        self.stop_request = stop if (stop := self.stop_request) and stop.vetoed is not None else request
        self.stop_request.required |= required
        self.pending = True

    def end_epoch(self, reason: str, *, by: str | None = None) -> None:
        """End the epoch at the next boundary, as if the loader had ended."""
        request = self.record("end_epoch", reason, by)
        self._end_request = self._end_request or request
        self.pending = True

    def request_log(self, reason: str, *, by: str | None = None) -> None:
        """Request a `Log` at the next boundary."""
        self._request("log", reason, by)

    def request_validation(self, reason: str, *, by: str | None = None) -> None:
        """Request a validation at the next boundary."""
        self._request("validation", reason, by)

    def request_save(self, reason: str, *, by: str | None = None, required: bool = False) -> None:
        """Request a `SavePoint` at the next boundary, after its validation.

        Args:
            reason: why, for people.
            by: who requests it; by default the plugin whose handler calls.
            required: whether plugins can neither withdraw nor veto it, for example because the machine is preempted.
        """
        self._request("save", reason, by)
        self._due["save"].required |= required

    def next_phase(self, reason: str, *, by: str | None = None) -> None:
        """End the epoch at the next boundary, and read the next phase's data from then on, if there is one."""
        self._request("next_phase", reason, by)

    def set_learning_rate(self, rate: float, reason: str, *, optimizer: str = "", by: str | None = None) -> None:
        """Set the learning rate at the next boundary; the schedule continues from it.

        The first parameter group gets the rate. The others keep their ratio to it, and the base rates of the scheduler
        are scaled by the same factor. The change is stored in checkpoints.

        In these cases the run continues unchanged, with a warning that gives the reason: no optimizer is named and
        their rates differ, the current rate is 0, or the scheduler stores rates that cannot be scaled.

        Args:
            rate: the new rate, more than 0.
            reason: why, for people.
            optimizer: the name of the optimizer; empty for the only one, or for all if they have the same rate.
            by: who requests it; by default the plugin whose handler calls.
        """
        rate = check_number("control.set_learning_rate(rate)", rate, more_than=0)
        self._request("set_learning_rate", reason, by, optimizer, float(rate))

    def enable_plugin(self, name: str, reason: str, *, by: str | None = None) -> None:
        """Enable a plugin at the next boundary, on all ranks and in resumed runs."""
        self._request("enable_plugin", reason, by, name)

    def disable_plugin(self, name: str, reason: str, *, by: str | None = None) -> None:
        """Disable a plugin at the next boundary, on all ranks and in resumed runs."""
        self._request("disable_plugin", reason, by, name)

    def withdraw(self, verb: Pending, reason: str, *, by: str | None = None) -> bool:
        """Withdraw a request for the next boundary that was not served yet.

        Requests of all plugins are withdrawn. A request made afterwards is served. Several ranks agree on a withdrawal
        at the boundary; it then covers the requests of all ranks until that time.

        Args:
            verb: `stop`, `end_epoch`, `log`, `validation` or `save`.
            reason: why, for people.
            by: who withdraws it; by default the plugin whose handler calls.

        Returns:
            True if there was such a request and it was not required; on several ranks always True, as they agree later.
        """
        _check_reason("withdraw", reason)
        if verb not in get_args(Pending):
            raise ValueError(f"control.withdraw takes one of {', '.join(get_args(Pending))}; got {verb!r}.")
        requests = self.open_requests()
        if (request := requests.pop(verb, None)) is None or request.required:
            return False
        self.record(cast("Verb", f"withdraw_{verb}"), reason, by)
        self.adopt(requests, vetoed=self.vetoed)
        self.pending = True  # a boundary ends a veto
        return True

    def veto_save(self, reason: str, *, by: str | None = None) -> None:
        """Drop the saves of this boundary, or of the next one.

        Call it from an event before `SavePoint`, such as `ValidationEnd`. Required saves are not dropped. After the
        last epoch, the veto lasts until the end of the run.
        """
        if is_within("save_point", "should_stop"):
            raise _too_late("veto_save", "an event before SavePoint, such as BatchEnd or ValidationEnd")
        self._save_veto = self.record("veto_save", reason, by)
        self.pending = True

    # Verbs for one event.

    def skip_batch(self, reason: str, *, by: str | None = None) -> None:
        """Skip this micro-batch; in `BatchStart` only."""
        self.record("skip_batch", reason, by)
        self.skips_batch = self.touched = True

    def hold_step(self, reason: str, *, by: str | None = None) -> None:
        """Accumulate this micro-batch without an optimizer step; in `BatchStart` only.

        The last batch of an epoch is stepped anyway, because windows never cross an epoch.
        """
        self.record("hold_step", reason, by)
        self.holds_step = self.touched = True

    def scale_loss(self, factor: float, reason: str, *, by: str | None = None, averages: bool = False) -> None:
        """Multiply this micro-batch's loss for the backward pass; in `BatchStart` only.

        The factors of several calls are multiplied.

        Args:
            factor: the factor.
            reason: why, for people.
            by: who requests it; by default the plugin whose handler calls.
            averages: whether the factor (1/n) only turns the sum of a window into a mean. It is then not applied to a
                loss that is a sum with its count, because such a window is divided by the counts.
        """
        self.record("scale_loss", reason, by)
        self.loss_scale *= factor
        self.mean_scale *= factor if averages else 1.0
        self.touched = True

    def skip_step(self, reason: str, *, by: str | None = None) -> None:
        """Drop the current gradients without a step; in `GradientsReady` only."""
        self.record("skip_step", reason, by)
        self.drops_step = self.touched = True

    def veto_stop(self, reason: str, *, by: str | None = None) -> None:
        """Postpone a stop until the next boundary; in `ShouldStop` only."""
        self.record("veto_stop", reason, by)
        self._vetoed = True

    def cut_validation(self, reason: str, *, by: str | None = None) -> None:
        """End the running validation or test immediately, without metrics.

        In a training, the validation is postponed, and so is a save that was to include its metrics. This run does not
        repeat them, but a run that is resumed from here does so first. A test, or a validation outside a training, ends
        its run with the status `stopped`.
        """
        if not self.is_evaluating:
            raise _too_late("cut_validation", "a running validation or test")
        self.cut_request = self.record("cut_validation", reason, by)

    @property
    def should_stop(self) -> bool:
        """True if a stop is requested."""
        return self.stop_request is not None

    @property
    def should_end_epoch(self) -> bool:
        """True if an end of this epoch is requested."""
        return self._end_request is not None

    @property
    def is_rolling_back(self) -> bool:
        """True if the run will return to a saved state."""
        return self._back_request is not None

    @property
    def should_log(self) -> bool:
        """True if a log is requested and was not served yet."""
        return "log" in self._due

    @property
    def should_validate(self) -> bool:
        """True if a validation is requested and was not served yet."""
        return "validation" in self._due

    @property
    def keeps_epoch_open(self) -> bool:
        """True if the run ends with a postponed validation, to be done after a resume."""
        return self.stopped and bool(self._postponed)

    @property
    def should_save(self) -> bool:
        """True if a save is requested and was not served yet."""
        return "save" in self._due

    # The methods below are for the loop.

    def stop_once(self, cut: Request) -> None:
        """Stop because an evaluation was cut short, unless a stop is already requested."""
        if not self.should_stop:
            self.stop(cut.reason, by=cut.by)
        self.decide()

    def drop_step(self, reason: str) -> None:
        """Drop the gradients of a window on all ranks."""
        self._add("skip_step", reason, "the loop")
        self.drops_step = self.touched = True

    def leave_out_batch(self, reason: str) -> None:
        """Skip the current batch because the user's own loop was left during it."""
        self._add("skip_batch", reason, "the caller")
        self.skips_batch = self.touched = True

    def count_skip(self, counter: Counter | None, *, by_engine: bool = False) -> None:
        """Count a skipped batch or step.

        Args:
            counter: the counter of the progress; None for an epoch that has ended before its first batch.
            by_engine: whether the engine skipped it instead of a plugin.

        Raises:
            RuntimeError: more than `max_skips` in a row.
        """
        if counter is not None:
            setattr(self._progress, counter, getattr(self._progress, counter) + 1)
        if self.skips.step != self._progress.steps:
            self.skips = Skips(self._progress.steps)
        self.skips.count += 1
        self.skips.by_engine += by_engine
        if self.max_skips is not None and self.skips.count > self.max_skips:
            raise RuntimeError(
                f"{self.skips.count} batches or steps in a row were skipped, without an optimizer step since step "
                f"{self.skips.step}. Who skipped: {self.who_skipped()}. To allow more, raise max_skipped_steps= of fit."
            )

    def who_skipped(self) -> str:
        """Return who skipped batches and steps since the last optimizer step, and why."""
        asked: dict[str, list[str]] = {}
        for request in self.history:
            if request.step == self.skips.step and request.verb in ("skip_batch", "skip_step", "end_epoch"):
                asked.setdefault(request.by, []).append(request.reason)
        who = [f"{by}, {_times(len(reasons))} ({reasons[-1]})" for by, reasons in asked.items()]
        if self.skips.by_engine:
            who.append(f"the engine, {_times(self.skips.by_engine)} (fp16 gradients were infinite or NaN)")
        return "; ".join(who) or "a plugin on another rank"

    def pop_request(self, verb: Verb) -> bool:
        """Remove a request for this boundary; return whether it is to be served."""
        request = self._due.pop(verb, None)
        if request is None or self.is_rolling_back:
            return False
        veto = self._save_veto if verb == "save" and not request.required else None
        if veto is not None and self.history.drop_watcher is not None:
            self.history.drop_watcher(veto)
        return veto is None

    def pop_changes(self) -> list[Request]:
        """Remove and return the requested changes of the run, in order."""
        due = [] if self.is_rolling_back else [key for key, request in self._due.items() if request.verb in CHANGES]
        return [self._due.pop(key) for key in due]

    def close_validation(self) -> Request | None:
        """Return the request that cut the validation short, if any.

        The validation and a save that follows it are then postponed until the next complete validation. The save is
        also served now.
        """
        cut, self.cut_request, self.is_evaluating = self.cut_request, None, False
        if cut is None:
            self._postponed.clear()
        else:
            self._postponed |= {"validation", *(self._due.keys() & {"save"})}
        return cut

    def decide(self, *, served: bool = False, in_epoch: bool = True) -> None:
        """Decide at the end of a boundary whether to end the epoch or the run.

        A veto applies to this boundary only.

        Args:
            served: whether the boundary served requests, whose handlers may have made new ones.
            in_epoch: whether an epoch has begun; if not, a requested end of the epoch has no effect.
        """
        if not in_epoch:
            self._end_request = None
        if (stop := self.stop_request) is not None and self._vetoed:
            stop.vetoed = True
        elif stop is not None and stop.vetoed is None and not stop.required:
            self.stop_request = None
        self.stopped = self.should_stop and not self._vetoed and not self.is_rolling_back
        self.leaving = self.stopped or self.should_end_epoch or self.is_rolling_back
        self.pending = bool(self._due) or self.should_stop or self.leaving
        self._vetoed, self._save_veto = False, None

    def release(self) -> None:
        """Make the saved requests of a resumed run due at its next boundary."""
        self._due, self._later = {**self._later, **self._due}, {}

    def close_batch(self) -> None:
        """Discard the requests about one batch."""
        self.skips_batch = self.holds_step = self.drops_step = self.touched = False
        self.loss_scale = self.mean_scale = 1.0

    def close_epoch(self) -> None:
        """Discard the requests about one epoch."""
        self._end_request = None

    def roll_back(self, reason: str) -> None:
        """Leave the epoch at the next boundary, to continue from another state."""
        self._back_request = self.record("roll_back", reason, None)
        self.pending = True

    def discard_epoch(self) -> None:
        """Discard the requests of an epoch, except a stop."""
        self.close_batch()
        self.close_epoch()
        self._due.clear()
        self._later.clear()
        self._postponed.clear()
        self._back_request, self.leaving, self._vetoed, self._save_veto = None, False, False, None
        self.pending = self.should_stop

    @property
    def vetoed(self) -> bool:
        """True if a stop is vetoed at this boundary."""
        return self._vetoed

    def open_requests(self) -> dict[str, Request]:
        """Return the requests for the next boundary: what this rank proposes to all ranks."""
        single = (self.stop_request, self._end_request, self._back_request)
        return {**self._due, **{request.verb: request for request in single if request is not None}}

    def adopt(self, agreed: Mapping[str, Request], *, vetoed: bool) -> None:
        """Replace the requests of this rank by the requests that all ranks agreed on."""
        mine, due = self.open_requests(), dict(agreed)
        for key in [key for key in due if key not in mine]:
            self.history.add(due[key])
        self.stop_request, self._vetoed = due.pop("stop", None), vetoed
        self._end_request, self._back_request = due.pop("end_epoch", None), due.pop("roll_back", None)
        self._due, self.pending = due, bool(agreed)

    # A subclass overrides these methods to agree on requests between several ranks.

    @property
    def has_boundary(self) -> bool:
        """True if a boundary is needed for requests alone."""
        return self.pending

    def is_due(self, *, window: int, judged: bool) -> bool:
        """Return whether a boundary follows the batch that is done.

        Args:
            window: the micro-batches since the last step.
            judged: whether `ShouldStop` has handlers.
        """
        return (self.pending or judged) and (not window or self.is_rolling_back)

    def open(self) -> None:
        """Begin the run."""

    def agree(self, *, in_epoch: bool = False) -> bool:
        """Agree on the open requests; return whether some must be served now.

        Args:
            in_epoch: whether the epoch continues, so that requests of some ranks may wait until the next boundary.
        """
        return self.pending

    def agree_on_batch(self) -> None:
        """Agree on whether a batch is skipped, held or scaled."""

    def agree_on_step(self) -> None:
        """Agree on whether gradients are dropped."""

    def agree_on_validation(self) -> None:
        """Agree on whether an evaluation was cut short."""

    def agree_on_exit_status(self) -> None:
        """Agree on an exit status."""

    def note_optimizer(self, name: str) -> None:
        """Record which of several optimizers is next."""

    def note_condition(self, change: str) -> None:
        """Record that the condition of a plugin has changed."""

    def is_cut(self) -> bool:
        """Return whether the running evaluation must end now."""
        return self.cut_request is not None

    def state_dict(self, *, is_over: bool = False) -> dict[str, Any]:
        """Return the pending requests, except a stop that is required or ended the run.

        Args:
            is_over: whether the training is over: a stop that was never vetoed came too late to have an effect.
        """
        later = {**self._later, **self._due}
        due = {key for key, request in later.items() if request.verb not in CHANGES} | self._postponed
        state = {"due": sorted(due), "postponed": sorted(self._postponed), "end_epoch": self.should_end_epoch}
        stop, veto, skips = self.stop_request, self._save_veto, self.skips
        if stop and (stop.required or self.stopped or (is_over and not stop.vetoed)):
            stop = None
        requests = filter(None, (*later.values(), self._end_request))
        more = {
            "requests": [[asked.verb, asked.target, asked.value, asked.by, asked.reason] for asked in requests],
            "stop": stop and [stop.by, stop.reason, stop.rank, stop.vetoed],
            "veto_save": veto and [veto.by, veto.reason],
            "skips": [skips.count, skips.by_engine] if skips.count and skips.step == self._progress.steps else None,
            "switches": dict(self.switches),
        }
        return state | {name: value for name, value in more.items() if value}

    def load_state_dict(self, state: Mapping[str, Any], *, at_save_point: bool = False) -> None:
        """Add saved requests to the requests of the new run.

        Args:
            state: a saved state.
            at_save_point: whether it was saved at the end of a boundary. Then only postponed requests are served at
                that boundary, the others at the next one, after `release`.
        """
        place = self._progress
        where = place.epoch, place.batch, place.steps
        saved: dict[str, Request] = {}
        for verb, target, value, by, reason in state.get("requests", ()):
            request = Request(verb, by, reason, *where, target=target, value=value)
            saved[request.what] = request
        for verb in (*state["due"], *["end_epoch"] * state["end_epoch"]):
            saved.setdefault(verb, Request(verb, "the checkpoint", "pending when it was saved", *where))
        self._end_request = self._end_request or saved.pop("end_epoch", None)
        for key, request in saved.items():
            if key in state["due"] or request.verb in CHANGES:  # a verb that is not due was served meanwhile
                is_later = at_save_point and key not in state.get("postponed", ())
                (self._later if is_later else self._due).setdefault(key, request)
        if "stop" in state and self.stop_request is None:
            by, reason, rank, vetoed = state["stop"]
            self.stop_request = Request("stop", by, reason, *where, rank=rank, vetoed=vetoed or None)
        if "veto_save" in state and not at_save_point:
            by, reason = state["veto_save"]
            self._save_veto = Request("veto_save", by, reason, *where)
        self.skips = Skips(place.steps, *state.get("skips", ()))
        self.switches = dict(state.get("switches", {}))
        self.pending = bool(self.pending or self.open_requests())

    def _request(self, verb: Verb, reason: str, by: str | None, of: str = "", value: float | None = None) -> None:
        request = self.record(verb, reason, by)
        request.target, request.value = of, value
        if verb in CHANGES:
            self._due.pop(request.what, None)  # the latest of equal requests is served
        self._due.setdefault(request.what, request)
        self.pending = True

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        """Add a request to the history and return it; every verb calls this first.

        Raises:
            RuntimeError: the verb has no effect in this event.
            TypeError: the reason is not a string.
        """
        owner, event = current_handler()
        event_class, only = _ONLY_IN.get(verb, ("", event))
        if event != only and not is_within(only):
            raise _too_late(verb, event_class)
        asker = by or owner or "the caller"
        return self._add(verb, reason, asker, event, "" if owner is None or owner == asker else owner)

    def _add(self, verb: Verb, reason: str, asker: str, event: str = "", through: str = "") -> Request:
        _check_reason(verb, reason)
        at = self._progress
        return self.history.add(
            Request(verb, asker, reason, at.epoch, at.batch, at.steps, event=event, through=through)
        )


def _check_reason(verb: str, reason: object) -> None:
    if not isinstance(reason, str):
        raise TypeError(f"control.{verb} takes its reason as a string, got {reason!r}.")


def _too_late(verb: Verb, place: str) -> RuntimeError:
    return RuntimeError(f"control.{verb} has no effect here: call it in a handler of {place}.")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
