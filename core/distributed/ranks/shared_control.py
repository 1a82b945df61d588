"""How ranks agree: what one of them asks for, by Ctrl-C too, all of them do, at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast
from uuid import uuid4
from zlib import crc32

from ....events import Control, Event, Request, Run, ShouldStop
from ....events.bus import Receiver
from ....events.control import Pending, Verb
from ...data.last_batch import with_last
from ...data.order.sizes import batch_size
from ...data.training_data import TrainingData
from ...system.signals import SignalHook

UNEQUAL = "the ranks had unequally many batches: each epoch ended when the first of them had no more"


class SharedRun(Run, Protocol):
    """A run whose ranks agree.

    Attributes:
        outcome: what becomes its result; ranks agree on its `exit_status`.
        pending_state: a state that is to be applied, and its file, if there is one.
        is_complete: whether the run has its length.
        engine: what connects the ranks.
    """

    outcome: Any
    pending_state: tuple[Mapping[str, Any], Path | None] | None

    @property
    def is_complete(self) -> bool:
        """See the class."""

    @property
    def engine(self) -> Any:
        """What connects the ranks."""

    def when_closed(self, action: Callable[[], object]) -> None:
        """Call `action` when the run is closed."""


@dataclass(slots=True)
class Ballot:
    """What one rank asks of all."""

    requests: dict[Verb, Request]
    vetoes: bool
    interrupted: bool
    vetoes_save: bool
    withdrawn: dict[Verb, Request]


class SharedControl(Control):
    """The control of a run on several ranks: what one of them asks, all of them do, at the same step.

    At a step boundary every rank casts a few numbers in one small all-reduce: whether it asks for anything, where it
    is, and the main rank's clock. Only where some rank asks, the ballots themselves are exchanged, and every rank
    takes over the same requests, with the names of who asked. What came up while they were served is voted on once
    more, so that no rank leaves the loop before the others know.

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
        self._every = int(getattr(run.engine, "agree_every", 1))
        self._judges = self._interrupted = self._drops_alike = False
        self._evaluations = self._optimizer_order = self._condition_order = 0
        self._token = ""
        self._withdrawn: dict[Verb, Request] = {}
        self._should_stop = run.bus.signal(ShouldStop)
        self._hook = SignalHook([signal.SIGINT], self._note_interrupt)

    def open(self) -> None:
        """Turn a Ctrl-C into a flag that joins the vote, and keep handlers of one rank out of collectives.

        What is voted on is decided here, for all ranks: their plugins may differ, and be switched off on some.
        """
        declared = self._engine.gather_objects((list(self._run.plugins.declared("asks")), uuid4().hex))
        asked = {verb for asks, _ in declared for verb in asks}
        self.votes_on_batches, self.votes_on_steps = "skip_batch" in asked, "skip_step" in asked
        self._token = declared[0][1]
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
        """Return whether the ranks vote after this batch: the same on all of them."""
        if window:
            return False
        run, progress = self._run, self._progress
        done = progress.steps + progress.skipped_steps
        return done % self._every == 0 or run.is_last_batch or run.is_complete

    def agree(self) -> None:
        """Make the open requests the same on all ranks.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted; on all of them, in the same place.
            RuntimeError: the ranks are at different steps.
        """
        progress = self._progress
        steps, batches = progress.steps + progress.skipped_steps, progress.batches
        clock = progress.own_seconds if self._engine.is_main else 0.0
        news = self.pending or self.vetoed or self._interrupted or bool(self._withdrawn)
        judges = bool(self._should_stop.chain)
        order, changes = self._optimizer_order, self._condition_order
        voted = [news, judges, clock, steps, -steps, batches, -batches, order, -order, changes, -changes]
        any_news, any_judges, clock, *places = self._engine.vote([float(each) for each in voted])
        self._check_places(places)
        progress.set_seconds(clock)
        self._judges = bool(any_judges)
        if any_news:
            self._exchange()

    def decide(self, *, served: bool = False, in_epoch: bool = True) -> None:
        """Vote once more, where the boundary may have brought up something new; then decide."""
        if served or self._judges:
            self.agree()
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
        """Note which of several optimizers is next; the next vote finds out whether it was the same on all ranks."""
        self._optimizer_order = crc32(name.encode(), self._optimizer_order)

    def withdraw(self, verb: Pending, reason: str, *, by: str | None = None) -> bool:
        """Take back what any rank has requested, at the next vote, unless this rank requests it again before that."""
        if not super().withdraw(verb, reason, by=by):
            self.record(cast("Verb", f"withdraw_{verb}"), reason, by)
        self._withdrawn[verb] = next(each for each in reversed(self.history) if each.verb == f"withdraw_{verb}")
        return True

    def note_condition(self, change: str) -> None:
        """Note a change of a plugin's condition; the next vote finds out whether it was the same on all ranks."""
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
            own = {} if self.cut_request is None else {self.cut_request.verb: self.cut_request}
            cut = next(iter(_merge(self._ballots(own)).values()), None)
            if self.cut_request is None and cut is not None:
                self.history.add(cut)
            self.cut_request = cut

    def agree_on_exit_status(self) -> None:
        """Let all ranks exit with the same status, the highest that any asked for.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted since the last vote.
        """
        mine = self._run.outcome.exit_status
        is_news = self._interrupted and self.agreed is None
        agreed, interrupted = self._engine.vote([-1.0 if mine is None else float(mine), float(is_news)])
        self._run.outcome.exit_status = None if agreed < 0 else int(agreed)
        if interrupted:
            self._ballots({})

    def _exchange(self) -> None:
        ballots = self._ballots(self.open_requests())
        agreed, withdrawn = _merge(ballots), _merge_withdrawals(ballots)
        for verb, request in withdrawn.items():
            if verb not in self._withdrawn:
                self.history.add(request)
            if verb in agreed and not agreed[verb].required:
                del agreed[verb]
        self._withdrawn, self._save_vetoed = {}, any(ballot.vetoes_save for ballot in ballots)
        askers = [rank for rank, ballot in enumerate(ballots) if "roll_back" in ballot.requests]
        self.adopt(agreed, vetoed=any(ballot.vetoes for ballot in ballots))
        if askers and len(askers) < len(ballots):  # the others do not know where to
            self._run.pending_state = self._engine.broadcast(self._run.pending_state, askers[0])

    def _ballots(self, requests: dict[Verb, Request]) -> list[Ballot]:
        withdrawn = {verb: request for verb, request in self._withdrawn.items() if verb not in requests}
        ballot = Ballot(requests, self.vetoed, self._interrupted, self._save_vetoed, withdrawn)
        ballots: list[Ballot] = self._engine.gather_objects(ballot)
        interrupted = [str(rank) for rank, each in enumerate(ballots) if each.interrupted]
        if interrupted:
            self.agreed = KeyboardInterrupt(f"on rank {', '.join(interrupted)}")
            raise self.agreed
        return ballots

    def _check_places(self, places: Sequence[float]) -> None:
        most_steps, fewest_steps, most_batches, fewest_batches, order, other_order, *changes = map(abs, places)
        if most_steps != fewest_steps or most_batches != fewest_batches:
            raise RuntimeError(
                f"The ranks are at different positions: {fewest_steps:.0f} to {most_steps:.0f} steps, "
                f"{fewest_batches:.0f} to {most_batches:.0f} batches. What a handler decides about a batch must be "
                f"decided in the same way on all ranks."
            )
        if order != other_order:
            raise RuntimeError(
                "The ranks stepped different optimizers: training_step must yield the same names on all ranks, in one "
                "order."
            )
        if changes[0] != changes[1]:
            raise RuntimeError(
                "The condition of a plugin held on some ranks only: what plugin.when(...) is given must say the same "
                "on all of them. Let it read run.progress or the metrics of a validation, not the rank, a clock or a "
                "loss; a plugin that is for one rank says so with ranks = 'main'."
            )

    @staticmethod
    def _votes(verb: str, voted: bool, *, asked: bool) -> bool:
        if asked and not voted:
            raise RuntimeError(
                f"control.{verb} was called on one of several ranks, and no plugin declared it when the run began, so "
                f"the ranks do not vote on it: add {verb!r} to the plugin's asks = (...)."
            )
        return voted

    def _wrapped(self, receiver: Receiver, owner: str) -> Receiver:
        if self._run.plugins.ranks_of(owner) == "all":
            return receiver

        def guarded(run: Run, *, event: Event) -> None:
            with self._engine.refusing(owner, event.name):
                receiver(run, event=event)

        return guarded

    def _note_interrupt(self, signum: int) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True


def _merge(ballots: Sequence[Ballot]) -> dict[Verb, Request]:
    """Return what any rank asks, in the name of the lowest rank that asks it, unless all of them do."""
    merged: dict[Verb, Request] = {}
    for rank, ballot in enumerate(ballots):
        for verb, request in ballot.requests.items():
            everybody = all(verb in each.requests and each.requests[verb].by == request.by for each in ballots)
            merged.setdefault(verb, request if everybody else replace(request, rank=rank))
            merged[verb].required |= request.required
    return merged


def _merge_withdrawals(ballots: Sequence[Ballot]) -> dict[Verb, Request]:
    """Return what any rank takes back, in the name of the lowest rank that does."""
    merged: dict[Verb, Request] = {}
    for rank, ballot in enumerate(ballots):
        for verb, request in ballot.withdrawn.items():
            merged.setdefault(verb, replace(request, rank=rank))
    return merged


def read_together(
    batches: Iterator[Any],
    data: TrainingData,
    engine: Any,
    rest: int | None,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    """Return the batches as far as every rank has one; what a rank has beyond the shortest one's end is not read.

    Args:
        batches: this rank's.
        data: what they are read from; it learns how many samples all ranks have in hand.
        engine: connects the ranks.
        rest: how many batches are left, as the loader says; None where it does not.
        size_of: returns the samples in a batch.
        mark_last: called where a loader has no length, with whether the batch that is yielded next is the last; None
            where that one is not to be read ahead.
    """
    data.together = None
    if rest is None and mark_last is not None:
        return _vote(with_last(batches), data, engine, size_of, mark_last)
    if rest is None:
        return _vote(((batch, False) for batch in batches), data, engine, size_of, None)
    left = islice(batches, max(0, rest))
    if data.source is not None and data.source.even and _goes_by_shape(size_of):
        return left  # the ranks have equally many, and equally long ones
    return _vote(((batch, False) for batch in left), data, engine, size_of, None)


def _goes_by_shape(size_of: Callable[[Any], int]) -> bool:
    """Return whether samples are not counted by code of the user's, which may find other numbers on each rank."""
    if size_of is batch_size:
        return True
    from ...data.streams import StreamSizes

    return isinstance(size_of, StreamSizes)


def _vote(
    batches: Iterator[tuple[Any, bool]],
    data: TrainingData,
    engine: Any,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    """Yield batches until a rank has none, or had its last; each vote adds up how many samples they have."""
    while True:
        found = next(batches, None)
        batch, is_last = (None, True) if found is None else found
        sizes = [0.0] * engine.world_size
        sizes[engine.rank] = 0.0 if found is None else float(size_of(batch))
        misses, ends, continues, *sizes = engine.vote([found is None, is_last, not is_last, *sizes])
        if misses:
            if continues and data.together is not None:  # some had batches until now
                data.note_once(UNEQUAL)
            return
        data.together = int(sum(sizes))
        if mark_last is not None:
            mark_last(bool(ends))
        if ends and continues:
            data.note_once(UNEQUAL)
        yield batch
        if ends:
            return
