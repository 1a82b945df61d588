"""What plugins request of the loop: verbs write, properties read, and every request says who asked and why."""

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
Pending = Literal["stop", "end_epoch", "log", "validation", "save"]  # what can be withdrawn
Counter = Literal["skipped_steps", "skipped_batches"]  # of the progress
# Of the run, at a boundary before all else there.
CHANGES: tuple[Verb, ...] = ("set_learning_rate", "enable_plugin", "disable_plugin")
LOADED = "the loaded state"  # the name by which a loaded state enables and disables plugins
COUNTED = ("hold_step", "scale_loss", "veto_stop", "veto_save")  # for every batch or boundary: counted, not listed
# The verbs that have an effect from handlers of one event only.
_ONLY_IN: Mapping[Verb, tuple[str, str]] = {
    "skip_batch": ("BatchStart", "batch_start"),
    "hold_step": ("BatchStart", "batch_start"),
    "scale_loss": ("BatchStart", "batch_start"),
    "skip_step": ("GradientsReady", "gradients_ready"),
    "veto_stop": ("ShouldStop", "should_stop"),
}


@dataclass(slots=True)
class Request:
    """One entry of the history: who asked for what, why, and where the run was.

    `rank` is the process that asked, where the ranks have agreed on it; None where this process is the only one.
    `event` is the one whose handler asked, empty where no handler did, and `through` the plugin that has this handler,
    where it asked in the name of somebody else. `required` is one that is neither withdrawn nor vetoed. Of a change of
    the run, `target` is what is changed: the name of a plugin, or of an optimizer, empty for all of them; and `value`
    is its new learning rate. `vetoed` marks a stop in spite of which the run has continued; None marks one of a loaded
    state that ended the saved run, unless a plugin vetoes it now.
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
        """The verb, with the target and the value: what requests for the same thing have in common."""
        return " ".join([self.verb, *filter(None, [self.target, "" if self.value is None else repr(self.value)])])

    def __str__(self) -> str:
        times = f" (x{self.times})" if self.times > 1 else ""
        asker = self.by if self.rank is None else f"{self.by} on rank {self.rank}"
        where = f"epoch {self.epoch} batch {self.batch} step {self.step}  "
        return printable(f"{where}{asker}: {self.what}{times} - {self.reason}")


class History(deque[Request]):
    """The latest 10,000 requests in the order in which they came; `str` gives a line each.

    Attributes:
        total: how many there were, including those dropped since.
        watcher: called at each request, unless it is None.
        drop_watcher: called where a veto drops what was requested, with that veto, unless it is None.
    """

    def __init__(self, requests: Iterable[Request] = (), maxlen: int | None = 10_000) -> None:
        super().__init__(requests, maxlen)
        self.total = len(self)
        self.watcher: Callable[[], None] | None = None
        self.drop_watcher: Callable[[Request], None] | None = None

    def add(self, request: Request) -> Request:
        """Append a request, or count it where its plugin has just made the same one."""
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
        return "\n".join(map(str, self)) or "nobody asked for anything"


class Control:
    """The one mutable object that all plugins share. Fresh for every run; see `run.control`.

    Two flags show the loop whether to look at all: `touched` (something about this batch) and `pending` (something for
    the next boundary). All resets are in `close_batch`, `close_epoch`, `decide`, `pop_request`, `close_validation` and
    `discard_epoch`.

    Attributes:
        history: every request.
        skips_batch: whether the current batch is skipped.
        holds_step: whether it is accumulated without an optimizer step.
        drops_step: whether the current gradients are dropped.
        loss_scale: the factor on its loss.
        mean_scale: what of it only makes the mean of a window.
        stop_request: the first request to stop, None without.
        is_evaluating: whether a validation or test runs, which can be cut short.
        cut_request: the request that cuts the running validation or test short, None without.
        skips: what was skipped since the last optimizer step.
        max_skips: how many skips in a row, without an optimizer step in between, are no error; None for any number.
        switches: of each plugin that was enabled or disabled in the run, whether it is enabled.
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
        self._due: dict[str, Request] = {}  # by `Request.what`, in the order in which they are to be served
        self._later: dict[str, Request] = {}  # due at the boundary after the one in which a run was saved
        self._postponed: set[str] = set()
        self.close_batch()

    def __repr__(self) -> str:
        due = {"stop": self.stop_request, "end_epoch": self._end_request, "roll_back": self._back_request} | self._due
        shown = ", ".join(f"{verb} by {request.by}" for verb, request in due.items() if request is not None)
        return f"<Control: {f'requested {shown}' if shown else 'nothing requested'}, {self.history.total} in history>"

    # Verbs for any event.

    def stop(self, reason: str, *, by: str | None = None, required: bool = False) -> None:
        """End the run at the next boundary; the first one to ask is named in the result.

        Args:
            reason: why, for people.
            by: who asks; by default the plugin whose handler calls.
            required: whether no plugin may withdraw it, as where the machine is taken away.
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
            by: who asks; by default the plugin whose handler calls.
            required: whether no plugin may withdraw or veto it, as where the machine is taken away.
        """
        self._request("save", reason, by)
        self._due["save"].required |= required

    def next_phase(self, reason: str, *, by: str | None = None) -> None:
        """End the epoch at the next boundary, and read the next phase's data from then on, if there is one."""
        self._request("next_phase", reason, by)

    def set_learning_rate(self, rate: float, reason: str, *, optimizer: str = "", by: str | None = None) -> None:
        """Set the learning rate at the next boundary, for good: the schedule continues from there.

        The first parameter group gets the rate. The others keep their ratio to it, and what the scheduler computes
        rates from is scaled likewise. It is state: a checkpoint holds it. Where it cannot be done (there are several
        optimizers with different rates and none is named, the rate is 0 now, or the scheduler keeps rates of its own),
        the run continues as before, with a warning that gives the reason.

        Args:
            rate: more than 0.
            reason: why, for people.
            optimizer: the name of the one that is meant; empty for the only one, or for all that have the same rate.
            by: who asks; by default the plugin whose handler calls.
        """
        rate = check_number("control.set_learning_rate(rate)", rate, more_than=0)
        self._request("set_learning_rate", reason, by, optimizer, float(rate))

    def enable_plugin(self, name: str, reason: str, *, by: str | None = None) -> None:
        """Enable a plugin at the next boundary, on all ranks; a run that is resumed later does so, too."""
        self._request("enable_plugin", reason, by, name)

    def disable_plugin(self, name: str, reason: str, *, by: str | None = None) -> None:
        """Disable a plugin at the next boundary, on all ranks; a run that is resumed later does so, too."""
        self._request("disable_plugin", reason, by, name)

    def withdraw(self, verb: Pending, reason: str, *, by: str | None = None) -> bool:
        """Take back what was requested for the next boundary, by whomever, and was not served yet.

        Who asks again afterwards is served. On several ranks they agree on it as on a request, and it takes back what
        any rank has asked for until then.

        Args:
            verb: `stop`, `end_epoch`, `log`, `validation` or `save`.
            reason: why, for people.
            by: who takes it back; by default the plugin whose handler calls.

        Returns:
            Whether there was something to take back, and it was not required; on several ranks True: they agree on it.
        """
        _check_reason("withdraw", reason)
        if verb not in get_args(Pending):
            raise ValueError(f"control.withdraw takes one of {', '.join(get_args(Pending))}; got {verb!r}.")
        rest = self.open_requests()
        if (found := rest.pop(verb, None)) is None or found.required:
            return False
        self.record(cast("Verb", f"withdraw_{verb}"), reason, by)
        self.adopt(rest, vetoed=self.vetoed)
        self.pending = True  # a boundary ends a veto
        return True

    def veto_save(self, reason: str, *, by: str | None = None) -> None:
        """From any event before `SavePoint`, such as `ValidationEnd`: let this boundary, or the next, write nothing.

        What was requested for it is dropped, but for a save that is required. After a training it holds until its end.
        """
        if is_within("save_point", "should_stop"):
            raise _too_late("veto_save", "an event before SavePoint, such as BatchEnd or ValidationEnd")
        self._save_veto = self.record("veto_save", reason, by)
        self.pending = True

    # Verbs for one event.

    def skip_batch(self, reason: str, *, by: str | None = None) -> None:
        """From `BatchStart`: skip this micro-batch."""
        self.record("skip_batch", reason, by)
        self.skips_batch = self.touched = True

    def hold_step(self, reason: str, *, by: str | None = None) -> None:
        """From `BatchStart`: accumulate this micro-batch without an optimizer step.

        The last batch of an epoch is stepped all the same: windows never cross an epoch.
        """
        self.record("hold_step", reason, by)
        self.holds_step = self.touched = True

    def scale_loss(self, factor: float, reason: str, *, by: str | None = None, averages: bool = False) -> None:
        """From `BatchStart`: multiply this micro-batch's loss for the backward pass; several factors multiply up.

        Args:
            factor: what to multiply by.
            reason: why, for people.
            by: who asks; by default the plugin whose handler calls.
            averages: whether the factor only makes the mean over a window, as 1/n does. A loss that is a sum, with its
                count, does without it: its window is divided by the counts.
        """
        self.record("scale_loss", reason, by)
        self.loss_scale *= factor
        self.mean_scale *= factor if averages else 1.0
        self.touched = True

    def skip_step(self, reason: str, *, by: str | None = None) -> None:
        """From `GradientsReady`: drop the current gradients instead of stepping with them."""
        self.record("skip_step", reason, by)
        self.drops_step = self.touched = True

    def veto_stop(self, reason: str, *, by: str | None = None) -> None:
        """From `ShouldStop`: postpone a stop until the next boundary."""
        self.record("veto_stop", reason, by)
        self._vetoed = True

    def cut_validation(self, reason: str, *, by: str | None = None) -> None:
        """From an event of a validation or test before its end: end it at once, without metrics.

        In a training, the validation is postponed, and so is a save that was to include its metrics: this run does not
        repeat them, but a run that is resumed from here does so first. A test, or a validation outside a training,
        ends its run as stopped.
        """
        if not self.is_evaluating:
            raise _too_late("cut_validation", "a running validation or test")
        self.cut_request = self.record("cut_validation", reason, by)

    # Reading.

    @property
    def should_stop(self) -> bool:
        """Whether a stop is asked for."""
        return self.stop_request is not None

    @property
    def should_end_epoch(self) -> bool:
        """Whether an end of this epoch is asked for."""
        return self._end_request is not None

    @property
    def is_rolling_back(self) -> bool:
        """Whether the run is to go back to a saved state."""
        return self._back_request is not None

    @property
    def should_log(self) -> bool:
        """Whether a log is asked for and not yet served."""
        return "log" in self._due

    @property
    def should_validate(self) -> bool:
        """Whether a validation is asked for and not yet served."""
        return "validation" in self._due

    @property
    def keeps_epoch_open(self) -> bool:
        """Whether the run ends with a postponed validation, which a resumed run does first."""
        return self.stopped and bool(self._postponed)

    @property
    def should_save(self) -> bool:
        """Whether a save is asked for and not yet served."""
        return "save" in self._due

    # The loop's side.

    def stop_once(self, cut: Request) -> None:
        """Stop because an evaluation was cut short, unless a stop is asked for, and decide at once."""
        if not self.should_stop:
            self.stop(cut.reason, by=cut.by)
        self.decide()

    def drop_step(self, reason: str) -> None:
        """Drop the gradients of a window, as all ranks do."""
        self._add("skip_step", reason, "the loop")
        self.drops_step = self.touched = True

    def leave_out_batch(self, reason: str) -> None:
        """Skip the current batch, at which the user's own loop was left."""
        self._add("skip_batch", reason, "the caller")
        self.skips_batch = self.touched = True

    def count_skip(self, counter: Counter | None, *, by_engine: bool = False) -> None:
        """Count what was skipped.

        Args:
            counter: of the progress; None for an epoch that has ended before its first batch.
            by_engine: whether no plugin asked for it.

        Raises:
            RuntimeError: too much was skipped in a row.
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
                f"{self.skips.step}. Who skipped: {self.who_skipped()}. If that is meant, allow more: "
                f"max_skipped_steps= of fit takes a number, None for any."
            )

    def who_skipped(self) -> str:
        """Return who skipped batches and steps since the last optimizer step, how often, and the last reason."""
        asked: dict[str, list[str]] = {}
        for each in self.history:
            if each.step == self.skips.step and each.verb in ("skip_batch", "skip_step", "end_epoch"):
                asked.setdefault(each.by, []).append(each.reason)
        who = [f"{by}, {_times(len(reasons))} ({reasons[-1]})" for by, reasons in asked.items()]
        if self.skips.by_engine:
            who.append(f"the engine, {_times(self.skips.by_engine)} (gradients in fp16 were infinite or not numbers)")
        return "; ".join(who) or "a plugin on another rank"

    def pop_request(self, verb: Verb) -> bool:
        """Return whether something was requested for the boundary, and count it as served; never while rolling back."""
        request = self._due.pop(verb, None)
        if request is None or self.is_rolling_back:
            return False
        veto = self._save_veto if verb == "save" and not request.required else None
        if veto is not None and self.history.drop_watcher is not None:
            self.history.drop_watcher(veto)
        return veto is None

    def pop_changes(self) -> list[Request]:
        """Return the changes of the run that were requested, in order, and count them as served."""
        due = [] if self.is_rolling_back else [key for key, each in self._due.items() if each.verb in CHANGES]
        return [self._due.pop(key) for key in due]

    def close_validation(self) -> Request | None:
        """Return the request that cut a validation short; postpone the validation and the save due after it.

        The save is served now as well. The next complete validation clears what was postponed.
        """
        cut, self.cut_request, self.is_evaluating = self.cut_request, None, False
        if cut is None:
            self._postponed.clear()
        else:
            self._postponed |= {"validation", *(self._due.keys() & {"save"})}
        return cut

    def decide(self, *, served: bool = False, in_epoch: bool = True) -> None:
        """Decide, at the end of a boundary, whether the loop ends the epoch or the run; a veto lasts for this boundary.

        Args:
            served: whether the boundary served requests, which may have brought up others.
            in_epoch: whether an epoch has begun; if none has, an end of the epoch that is asked for ends none.
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
        """Make what a resumed run is to serve at its next boundary due."""
        self._due, self._later = {**self._later, **self._due}, {}

    def close_batch(self) -> None:
        """Forget what was asked for one batch."""
        self.skips_batch = self.holds_step = self.drops_step = self.touched = False
        self.loss_scale = self.mean_scale = 1.0

    def close_epoch(self) -> None:
        """Forget what was asked for one epoch."""
        self._end_request = None

    def roll_back(self, reason: str) -> None:
        """Leave the epoch at the next boundary, to continue from another state."""
        self._back_request = self.record("roll_back", reason, None)
        self.pending = True

    def discard_epoch(self) -> None:
        """Forget the requests of an epoch that is discarded, except a stop."""
        self.close_batch()
        self.close_epoch()
        self._due.clear()
        self._later.clear()
        self._postponed.clear()
        self._back_request, self.leaving, self._vetoed, self._save_veto = None, False, False, None
        self.pending = self.should_stop

    @property
    def vetoed(self) -> bool:
        """Whether a stop is postponed at this boundary."""
        return self._vetoed

    def open_requests(self) -> dict[str, Request]:
        """Return every request that the next boundary is to act upon: what this rank asks of all."""
        single = (self.stop_request, self._end_request, self._back_request)
        return {**self._due, **{request.verb: request for request in single if request is not None}}

    def adopt(self, agreed: Mapping[str, Request], *, vetoed: bool) -> None:
        """Replace the requests of this rank by those that all ranks agreed on."""
        mine, due = self.open_requests(), dict(agreed)
        for what in [what for what in due if what not in mine]:
            self.history.add(due[what])
        self.stop_request, self._vetoed = due.pop("stop", None), vetoed
        self._end_request, self._back_request = due.pop("end_epoch", None), due.pop("roll_back", None)
        self._due, self.pending = due, bool(agreed)

    # A subclass agrees on requests among several ranks; a single process has nothing to do.

    @property
    def has_boundary(self) -> bool:
        """Whether a boundary has something to do where none of its own is due."""
        return self.pending

    def is_due(self, *, window: int, judged: bool) -> bool:
        """Return whether a boundary follows the batch that is done.

        Args:
            window: the micro-batches since the last step.
            judged: whether `ShouldStop` has handlers.
        """
        return (self.pending or judged) and (not window or self.is_rolling_back)

    def open(self) -> None:
        """Begin."""

    def agree(self, *, in_epoch: bool = False) -> bool:
        """Agree on the open requests; return whether there are some to serve now.

        Args:
            in_epoch: whether the epoch continues, so that what some ranks ask for may wait until the next boundary.
        """
        return self.pending

    def agree_on_batch(self) -> None:
        """Agree on what becomes of a batch."""

    def agree_on_step(self) -> None:
        """Agree on whether gradients are dropped."""

    def agree_on_validation(self) -> None:
        """Agree on whether an evaluation was cut short."""

    def agree_on_exit_status(self) -> None:
        """Agree on an exit status."""

    def note_optimizer(self, name: str) -> None:
        """Note which of several optimizers is next."""

    def note_condition(self, change: str) -> None:
        """Note which plugin's condition holds from now on, or does not."""

    def is_cut(self) -> bool:
        """Return whether the running evaluation is to be left."""
        return self.cut_request is not None

    def state_dict(self, *, is_over: bool = False) -> dict[str, Any]:
        """Return the pending requests, but for a stop that is required or has ended the run.

        Args:
            is_over: whether the training is over: a stop that was not vetoed before came too late to be one.
        """
        later = {**self._later, **self._due}
        changes = [each for each in later.values() if each.verb in CHANGES]
        due = {what for what, each in later.items() if each.verb not in CHANGES} | self._postponed
        state = {"due": sorted(due), "postponed": sorted(self._postponed), "end_epoch": self.should_end_epoch}
        has_skipped = self.skips.count and self.skips.step == self._progress.steps
        stop, veto = self.stop_request, self._save_veto
        if stop and (stop.required or self.stopped or (is_over and not stop.vetoed)):
            stop = None
        asked = [each for each in (*later.values(), self._end_request) if each is not None and each.verb not in CHANGES]
        more = {
            "asked": {each.verb: [each.by, each.reason] for each in asked},
            "stop": stop and [stop.by, stop.reason, stop.rank, stop.vetoed],
            "veto_save": veto and [veto.by, veto.reason],
            "skips": [self.skips.count, self.skips.by_engine] if has_skipped else None,
            "changes": [[each.verb, each.target, each.value, each.by, each.reason] for each in changes],
            "switches": dict(self.switches),
        }
        return state | {name: value for name, value in more.items() if value}

    def load_state_dict(self, state: Mapping[str, Any], *, at_save_point: bool = False) -> None:
        """Add saved requests to those of the new run.

        Args:
            state: what was saved.
            at_save_point: whether that was at the end of a boundary: only what was postponed is served in it, the rest
                at the next one, after `release`.
        """
        place = self._progress
        where = place.epoch, place.batch, place.steps
        for verb in (*state["due"], *(["end_epoch"] if state["end_epoch"] else [])):
            by, reason = state.get("asked", {}).get(verb, ("the checkpoint", "it was due there"))
            request = Request(verb, by, reason, *where)
            if verb == "end_epoch":
                self._end_request = self._end_request or request
            else:
                is_later = at_save_point and verb not in state.get("postponed", ())
                (self._later if is_later else self._due).setdefault(verb, request)
        for verb, target, value, by, reason in state.get("changes", ()):
            request = Request(verb, by, reason, *where, target=target, value=value)
            (self._later if at_save_point else self._due).setdefault(request.what, request)
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
            self._due.pop(request.what, None)  # of what is asked for twice, the last is the one that counts
        self._due.setdefault(request.what, request)
        self.pending = True

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        """Add a request to the history and return it; every verb calls this first.

        Raises:
            RuntimeError: the verb has no effect from the handler that calls it.
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
    return RuntimeError(f"control.{verb} is for handlers of {place}: elsewhere it comes too late. Ask there.")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
