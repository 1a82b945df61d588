"""How ranks agree: what one of them asks for, by Ctrl-C too, all of them do, at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from struct import Struct
from typing import Any, Protocol, cast
from uuid import uuid4
from zlib import crc32

from torch import Tensor

from ....events import Control, Event, Request, Run, ShouldStop
from ....events.bus import Receiver
from ....events.control import Pending, Verb
from ....events.errors import error_text
from ...system.signals import SignalHook
from .failure import is_late

# Optimizer steps, with those that were skipped; micro-batches; a checksum of which optimizers were stepped; one of how
# the conditions of plugins changed.
Place = tuple[float, ...]


@dataclass(slots=True)
class Ballot:
    """What one rank asks of all, and what the others must know of it."""

    place: Place
    judges: bool
    requests: dict[str, Request]
    vetoes: bool
    interrupted: bool
    save_veto: Request | None
    withdrawn: dict[Verb, Request]
    goes_back_to: str  # the file of the state that a roll-back is to apply, empty where there is no file


def check_places(places: Sequence[Sequence[float]]) -> None:
    """Raise RuntimeError unless all ranks are at the same place.

    Args:
        places: for each part of a `Place`, its values on all ranks.
    """
    steps, batches, optimizers, conditions = places
    if len(set(steps)) > 1 or len(set(batches)) > 1:
        raise RuntimeError(
            f"The ranks are at different positions: {min(steps):.0f} to {max(steps):.0f} steps, "
            f"{min(batches):.0f} to {max(batches):.0f} batches. What a handler decides about a batch must be "
            f"decided in the same way on all ranks."
        )
    if len(set(optimizers)) > 1:
        raise RuntimeError(
            "The ranks stepped different optimizers: training_step must yield the same names on all ranks, in one "
            "order."
        )
    if len(set(conditions)) > 1:
        raise RuntimeError(
            "The condition of a plugin held on some ranks only: what plugin.when(...) is given must say the same "
            "on all of them. Let it read run.progress or the metrics of a validation, not the rank, a clock or a "
            "loss; a plugin that is for one rank says so with ranks = 'main'."
        )


def merge_requests(ballots: Sequence[Ballot]) -> dict[str, Request]:
    """Return what any rank asks, in the name of the lowest rank that asks it, unless all of them do.

    The order is that of the lowest rank, then of the next: on all ranks the same.
    """
    merged: dict[str, Request] = {}
    for rank, ballot in enumerate(ballots):
        for what, request in ballot.requests.items():
            everybody = all(what in each.requests and each.requests[what].by == request.by for each in ballots)
            merged.setdefault(what, request if everybody else replace(request, rank=rank))
            merged[what].required |= request.required
    return merged


def merge_vetoes(ballots: Sequence[Ballot]) -> Request | None:
    """Return the veto of a save by the lowest rank that has one, as one request."""
    for rank, ballot in enumerate(ballots):
        if (veto := ballot.save_veto) is not None:
            return replace(veto, rank=rank if veto.rank is None else veto.rank, times=1)
    return None


def merge_withdrawals(ballots: Sequence[Ballot]) -> dict[Verb, Request]:
    """Return what any rank takes back, in the name of the lowest rank that does."""
    merged: dict[Verb, Request] = {}
    for rank, ballot in enumerate(ballots):
        for verb, request in ballot.withdrawn.items():
            merged.setdefault(verb, replace(request, rank=rank))
    return merged


def check_alike(what: str, of_ranks: Sequence[Sequence[str]], mend: str) -> None:
    """Raise ValueError unless all ranks have the same.

    Args:
        what: it is.
        of_ranks: what each rank has, part by part, in words.
        mend: how to make it the same.
    """
    for rank, parts in enumerate(of_ranks):
        for first, other in zip_longest(of_ranks[0], parts, fillvalue="nothing more"):
            if first != other:
                raise ValueError(
                    f"{what} not the same on all ranks: rank 0 has {first}, and rank {rank} has {other}. {mend}"
                )


def settings_in_words(settings: Any) -> list[str]:
    """Return what a run is called with and no rank may have alone: lengths, sets, limits and optimizers."""
    return [
        f"epochs={settings.epochs}",
        f"steps={settings.steps}",
        f"max_skipped_steps={settings.max_skipped_steps}",
        ", ".join(_sets(settings)) or "no sets to validate on",
        *_optimizers(settings),
    ]


def _sets(settings: Any) -> Iterator[str]:
    for phase, sets in settings.evaluations.items():
        for name in sets:
            which = f"{phase} set {name!r}" if name else f"{phase} set"
            limit, every = settings.limits.get(name), settings.every.get(name, 1)
            yield f"the {which}" + f" with limit {limit}" * (limit is not None) + f" with every={every}" * (every != 1)


def _optimizers(settings: Any) -> Iterator[str]:
    for name, optimizer in settings.optimizers.items():
        which, groups = f"optimizer {name!r}" if settings.several else "optimizer", optimizer.param_groups
        scheduler = settings.schedulers.get(name)
        by = "no scheduler" if scheduler is None else f"the scheduler {type(scheduler).__name__}"
        several = f"{len(groups)} parameter group" + "s" * (len(groups) > 1)
        yield f"the {which} {type(optimizer).__name__} with {several}, {by}"
        for number, group in enumerate(groups):
            for key, value in group.items():
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                if isinstance(plain, int | float | tuple):
                    yield f"{key}={plain} in parameter group {number} of the {which}"


SUMMARY = Struct("<2d4dd")  # whether a rank asks for something; whether it judges; its place; its clock
COMPARED = SUMMARY.size - 8  # all but the clock
LEFT = (
    "The loop over the batches was left on some ranks only: the others wait for the gradients of this one. Leave it on "
    "all ranks after the same batch; or call control.end_epoch(reason), which is for all ranks."
)


class SharedRun(Run, Protocol):
    """A run whose ranks agree.

    Attributes:
        settings: what it was called with.
        is_complete: whether the run has its length.
        engine: what connects the ranks.
    """

    settings: Any

    @property
    def hooks(self) -> Any:
        """Ranks agree on its `exit_status`."""

    @property
    def checkpoints(self) -> Any:
        """Has the `pending_state` that is to be applied."""

    @property
    def is_complete(self) -> bool:
        """See the class."""

    @property
    def engine(self) -> Any:
        """What connects the ranks."""

    def when_closed(self, action: Callable[[], object]) -> None:
        """Call `action` when the run is closed."""


class SharedControl(Control):
    """The control of a run on several ranks: what one of them asks, all of them do, at the same step.

    At each step boundary every rank posts a summary: whether it asks for anything, where it is, and its clock. A rank
    that asks for nothing reads the summaries at its next boundary; one that asks for something waits for them at once.
    If all asked for something, they agree now; if only some did, all of them agree at the next boundary; if none did,
    nothing happens. To agree is to exchange the ballots themselves: every rank takes over the same requests, with the
    names of who asked.

    A boundary at which nothing may stay open settles: the ranks wait for all summaries and agree there. These are those
    of the last batch, of the end of an epoch and of the run, the first of a resumed run, and whatever follows a request
    that was served, so that no rank leaves the loop, or saves, before the others know. docs/ranks.md has the proof.

    Args:
        run: the run.

    Attributes:
        agreed: what all ranks raised together, each in the same place.
        votes_on_batches: whether the ranks vote on every batch, since a plugin of some rank may skip one.
        votes_on_steps: whether they vote on every step, since a plugin of some rank may drop one.
    """

    def __init__(self, run: SharedRun) -> None:
        super().__init__(run.progress)
        self.is_shared = True
        self._run, self._engine = run, run.engine
        self._post_summary: Callable[[bytes], None]
        self._read_summaries: Callable[[], list[list[bytes]]]
        self._open: list[list[bytes]] = []  # summaries that were read, and are for the next boundary
        self._is_open = self._judges = self._interrupted = self._drops_alike = False
        self._evaluations = self._optimizer_order = self._condition_order = 0
        self._token, self._of_some_ranks = "", set[str]()  # the names of plugins that others lack
        self._withdrawn: dict[Verb, Request] = {}
        self._aside: dict[str, Request] = {}  # what this rank asks for, in the last word of an open boundary
        self._should_stop = run.bus.signal(ShouldStop)
        self._hook = SignalHook([signal.SIGINT], self._note_interrupt)

    def open(self) -> None:
        """Turn a Ctrl-C into a flag that joins the requests, and keep handlers of some ranks out of collectives.

        What they vote on is decided here, for all ranks: their plugins may differ, and be switched off on some.

        Raises:
            ValueError: what the run was called with is not the same on all ranks.
        """
        plugins = self._run.plugins
        enabled = [name for name in plugins.names() if plugins.is_enabled(name)]
        own = settings_in_words(self._run.settings), list(plugins.declared("asks")), enabled, uuid4().hex
        settings, asks, names, tokens = zip(*self._engine.gather_objects(own), strict=True)
        check_alike("The arguments of the run are", settings, "Give all ranks the same.")
        asked = {verb for each in asks for verb in each}
        self.votes_on_batches, self.votes_on_steps = "skip_batch" in asked, "skip_step" in asked
        self._of_some_ranks = set().union(*names).difference(set(names[0]).intersection(*names))
        self._token = tokens[0]
        self._post_summary, self._read_summaries = self._engine.post_summary, self._engine.read_summaries
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not None:
            self._hook.install()
            self._run.when_closed(self._hook.restore)
        self._run.when_closed(self._run.bus.intercept(self._wrapped))
        if self._engine.watch is not None:
            self._run.when_closed(self._engine.watch.follow(self._run))

    @property
    def has_boundary(self) -> bool:
        """Say yes: other ranks may have asked for something."""
        return True

    def is_due(self, *, window: int, judged: bool) -> bool:
        """Return whether a boundary follows this batch: the same on all ranks."""
        return not window

    def agree(self, *, in_epoch: bool = False) -> bool:
        """Make the open requests the same on all ranks; return whether there are some to serve now.

        Args:
            in_epoch: whether the epoch continues, so that what some ranks ask for may wait until the next boundary.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted; on all of them, in the same place.
            RuntimeError: the ranks are at different steps; the user's own loop was left on some ranks only.
        """
        self._is_open, run, end = False, self._run, self._end_request
        try:
            if self._close_summaries():
                self._exchange()
            else:
                self._post(settles=not in_epoch or run.data.is_last_batch or run.is_complete)
        except RuntimeError as error:
            if self.leaving and end is not None and end.by == "the caller" and is_late(error):
                raise RuntimeError(f"{LEFT} ({error_text(error)})") from error
            raise
        if self._is_open and self.leaving:
            raise RuntimeError(LEFT)
        if self._is_open:
            # Handlers of `ShouldStop` see only requests that all ranks agree on.
            self._aside = self.open_requests()
            self.stop_request = self._end_request = self._back_request = None
            self._due = {}
        return self.pending and not self._is_open

    def _take_back(self) -> None:
        """Ask again for what was set aside, in the name of who asked first; of states to go back to, the latest."""
        aside, self._aside = self._aside, {}
        back = self._back_request or aside.get("roll_back")
        for what, request in self.open_requests().items():
            aside.setdefault(what, request).required |= request.required
        self.stop_request, self._end_request = aside.pop("stop", None), aside.pop("end_epoch", None)
        aside.pop("roll_back", None)
        self._back_request, self._due = back, aside

    def decide(self, *, served: bool = False, in_epoch: bool = True) -> None:
        """Post once more, where the boundary may have brought up something new; then decide on what is agreed on."""
        if self._is_open:
            self._take_back()
        if self._is_open and self._judges:
            self._post(settles=False)
        elif served or self._judges:
            self.agree()
        if self._is_open:  # what is asked for, stays so
            self._vetoed = False
        else:
            super().decide(in_epoch=in_epoch)

    def agree_on_batch(self) -> None:
        """Let a batch that one rank skips be skipped by all, where some plugin declares that it may.

        Raises:
            RuntimeError: a rank skips that is not expected to, or the ranks do not hold the same batches.
        """
        if not self._votes("skip_batch", self.votes_on_batches, asked=self.skips_batch):
            return
        skips, holds, steps = self._engine.vote([self.skips_batch, self.holds_step, not self.holds_step])
        if holds and steps:
            raise RuntimeError(
                "Some ranks hold the step of this batch and others do not: hold_step must be asked for by all ranks."
            )
        if skips:
            self.skips_batch = self.touched = True

    def drop_step(self, reason: str) -> None:
        """See the base class; there is nothing to vote on."""
        super().drop_step(reason)
        self._drops_alike = True

    def agree_on_step(self) -> None:
        """Let gradients that one rank drops be dropped by all, where some plugin declares that it may.

        Raises:
            RuntimeError: a rank drops them that is not expected to.
        """
        if self._drops_alike:
            self._drops_alike = False
            return
        dropped = self._votes("skip_step", self.votes_on_steps, asked=self.drops_step)
        if dropped and self._engine.vote([self.drops_step])[0]:
            self.drops_step = self.touched = True

    def note_optimizer(self, name: str) -> None:
        """Note which of several optimizers is next; the next summary shows whether it was the same on all ranks."""
        self._optimizer_order = crc32(name.encode(), self._optimizer_order)

    def withdraw(self, verb: Pending, reason: str, *, by: str | None = None) -> bool:
        """Take back what any rank has requested, when they agree, unless this rank requests it again before that."""
        if verb in self._aside and not self._aside[verb].required:
            del self._aside[verb]
        if not super().withdraw(verb, reason, by=by):
            self.record(cast("Verb", f"withdraw_{verb}"), reason, by)
        self._withdrawn[verb] = next(each for each in reversed(self.history) if each.verb == f"withdraw_{verb}")
        return True

    def note_condition(self, change: str) -> None:
        """Note a change of a plugin's condition; the next summary shows whether it was the same on all ranks."""
        self._condition_order = crc32(change.encode(), self._condition_order)

    def is_cut(self) -> bool:
        """Return whether the running evaluation is to be left, as some rank asked; inform the others if this one did.

        Raises:
            RankFailed: another rank failed: an evaluation may be long, and meet no collective for as long.
        """
        watch, topic = self._engine.watch, f"{self._token}: evaluation {self._evaluations} is cut short"
        if watch is None:
            return self._interrupted
        watch.check()
        if self._interrupted or self.cut_request is not None:
            watch.post(topic, "")
            return True
        return watch.posted(topic) is not None

    def agree_on_validation(self) -> None:
        """Let an evaluation that one rank cut short be cut short for all.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted.
        """
        self._evaluations += 1
        if self._engine.vote([float(self.cut_request is not None or self._interrupted)])[0]:
            own: dict[str, Request] = {} if self.cut_request is None else {self.cut_request.verb: self.cut_request}
            cut = next(iter(merge_requests(self._ballots(own)).values()), None)
            if self.cut_request is None and cut is not None:
                self.history.add(cut)
            self.cut_request = cut

    def agree_on_exit_status(self) -> None:
        """Let all ranks exit with the same status, the highest that any asked for.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted since they agreed.
        """
        mine = self._run.hooks.exit_status
        is_news = self._interrupted and self.agreed is None
        agreed, interrupted = self._engine.vote([-1.0 if mine is None else float(mine), float(is_news)])
        self._run.hooks.exit_status = None if agreed < 0 else int(agreed)
        if interrupted:
            self._ballots({})

    def _post(self, *, settles: bool) -> None:
        """Post a summary, and agree at once if that is due."""
        has_news, judges = self._has_news, bool(self._should_stop.chain)
        self._post_summary(SUMMARY.pack(has_news, judges, *self._place, self._progress.own_seconds))
        self._is_open = True
        if settles or has_news:
            self._open += self._read_summaries()
            if settles or all(SUMMARY.unpack(each)[0] for each in self._open[-1]):
                self._is_open = False
                if self._close_summaries():
                    self._exchange()

    def _close_summaries(self) -> bool:
        """Apply the summaries that are open, in their order; return whether any rank asked for something in them."""
        self._open += self._read_summaries()
        asks = False
        for summaries in self._open:
            first = summaries[0][:COMPARED]
            read = summaries[:1]  # if all say the same, as they nearly always do, one will do
            for each in summaries:
                if each[:COMPARED] != first:
                    read = summaries
            news, judges, *places, clocks = zip(*map(SUMMARY.unpack, read), strict=True)
            if read is summaries:
                check_places(places)
            self._progress.set_seconds(clocks[0])  # the main rank's
            self._judges = any(judges)
            asks = asks or any(news)
        self._open.clear()
        return asks

    @property
    def _has_news(self) -> bool:
        """Whether this rank asks for something."""
        singles = self.stop_request or self._end_request or self._back_request
        return bool(singles or self._due or self._interrupted or self._withdrawn or self._save_veto)

    @property
    def _place(self) -> Place:
        progress = self._progress
        steps = progress.steps + progress.skipped_steps
        return steps, progress.batches, self._optimizer_order, self._condition_order

    def _exchange(self) -> None:
        ballots = self._ballots(self.open_requests())
        check_places([*zip(*(ballot.place for ballot in ballots), strict=True)])  # later than in the summaries
        self._judges = any(ballot.judges for ballot in ballots)
        agreed, withdrawn = merge_requests(ballots), merge_withdrawals(ballots)
        for verb, request in withdrawn.items():
            if verb not in self._withdrawn:
                self.history.add(request)
            if verb in agreed and not agreed[verb].required:
                del agreed[verb]
        self._withdrawn = {}
        if self._save_veto is None and (veto := merge_vetoes(ballots)) is not None:
            self._save_veto = self.history.add(veto)
        askers = [rank for rank, ballot in enumerate(ballots) if "roll_back" in ballot.requests]
        self.adopt(agreed, vetoed=any(ballot.vetoes for ballot in ballots))
        first = ballots[askers[0]].goes_back_to if askers else ""
        if askers and not (first and all(ballot.goes_back_to == first for ballot in ballots)):  # not one file for all
            self._run.checkpoints.pending_state = self._engine.broadcast(self._run.checkpoints.pending_state, askers[0])

    def _ballots(self, requests: dict[str, Request]) -> list[Ballot]:
        withdrawn = {verb: request for verb, request in self._withdrawn.items() if verb not in requests}
        judges = bool(self._should_stop.chain)
        state = self._run.checkpoints.pending_state
        back_to = "" if state is None else str(state[1] or "")
        ballot = Ballot(
            self._place, judges, requests, self.vetoed, self._interrupted, self._save_veto, withdrawn, back_to
        )
        ballots: list[Ballot] = self._engine.gather_objects(ballot)
        interrupted = [str(rank) for rank, each in enumerate(ballots) if each.interrupted]
        if interrupted:
            self.agreed = KeyboardInterrupt(f"on rank {', '.join(interrupted)}")
            raise self.agreed
        return ballots

    @staticmethod
    def _votes(verb: str, voted: bool, *, asked: bool) -> bool:
        if asked and not voted:
            raise RuntimeError(
                f"control.{verb} was called on one of several ranks, and no plugin declared it when the run began, so "
                f"the ranks do not vote on it: add {verb!r} to the plugin's asks = (...)."
            )
        return voted

    def _wrapped(self, receiver: Receiver, owner: str) -> Receiver:
        if self._run.plugins.ranks_of(owner) == "all" and owner not in self._of_some_ranks:
            return receiver
        group = self._engine.group

        def guarded(run: Run, *, event: Event) -> None:
            before, group.refusal = group.refusal, (owner, event.name)  # without a context: a bar is called every step
            try:
                receiver(run, event=event)
            finally:
                group.refusal = before

        return guarded

    def _note_interrupt(self, signum: int) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
