"""How ranks agree: what one of them asks, all of them do, at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4
from zlib import crc32

from ....events import Event, Request, Run
from ....events.bus import Receiver
from ....events.control import Verb
from ...system.signals import SignalHook

if TYPE_CHECKING:
    from ...context import RunContext


class Alone:
    """The agreement of a single process, which costs it nothing."""

    agreed: BaseException | None = None
    on_batches = on_steps = False

    def open(self) -> None:
        """Do nothing."""

    def is_due(self) -> bool:
        """Say no: a boundary is reached where something is asked for."""
        return False

    def settle(self) -> None:
        """Do nothing."""

    def conclude(self, *, served: bool) -> None:
        """Do nothing."""

    def settle_batch(self) -> None:
        """Do nothing."""

    def settle_step(self) -> None:
        """Do nothing."""

    def note_turn(self, name: str) -> None:
        """Do nothing."""

    def hears_of_cut(self) -> bool:
        """Say no: this process knows of its own requests only."""
        return False

    def settle_validation(self) -> None:
        """Do nothing."""

    def settle_exit(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Ballot:
    """What one rank asks of all."""

    requests: dict[Verb, Request]
    vetoes: bool
    interrupted: bool


class Agreement:
    """The vote of one run on several ranks.

    At a step boundary every rank casts a few numbers in one small all-reduce: whether it asks for anything, where it
    stands, and the main rank's clock. Only where somebody asks, the ballots themselves are exchanged, and every rank
    takes over the same requests, with the names of who asked. What came up while they were served is voted on once
    more, so that no rank leaves the loop before the others know.

    Args:
        run: the run.

    Attributes:
        agreed: what all ranks raised together, each in the same place.
        on_batches: whether the ranks vote on every batch, since a plugin of some rank may skip one.
        on_steps: whether they vote on every step, since a plugin of some rank may drop one.
    """

    def __init__(self, run: RunContext) -> None:
        self.agreed: BaseException | None = None
        self._run, self._engine = run, run.engine
        self._every = int(getattr(run.engine, "agree_every", 1))
        self._judges = self._interrupted = self.on_batches = self.on_steps = False
        self._evaluations = self._turns = 0
        self._token = ""
        self._hook = SignalHook([signal.SIGINT], self._hear)

    def open(self) -> None:
        """Turn a Ctrl-C into a flag that joins the vote, and keep handlers of one rank out of collectives.

        What is voted on is settled here, for all ranks: their plugins may differ, and be switched off on some.
        """
        told = self._engine.gather_objects((list(self._run.plugins.declared("asks")), uuid4().hex))
        asked = {verb for asks, _ in told for verb in asks}
        self.on_batches, self.on_steps = "skip_batch" in asked, "skip_step" in asked
        self._token = told[0][1]
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not None:
            self._hook.install()
            self._run.after.callback(self._hook.restore)
        self._run.after.callback(self._run.bus.wrap_all(self._wrapped))
        if self._engine.watch is not None:
            self._run.after.callback(self._engine.watch.follow(self._run))

    def is_due(self) -> bool:
        """Return whether the ranks vote behind this batch: the same on all of them."""
        run = self._run
        if run.window:
            return False
        done = run.progress.steps + run.progress.skipped_steps
        return done % self._every == 0 or run.is_last_batch or run.progress.steps >= run.last_step

    def settle(self) -> None:
        """Make the standing requests the same on all ranks.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted; on all of them, in the same place.
            RuntimeError: the ranks stand at different steps.
        """
        control, progress = self._run.control, self._run.progress
        steps, batches = progress.steps + progress.skipped_steps, progress.batches
        clock = progress.own_seconds if self._engine.is_main else 0.0
        news = control.pending or control.vetoed or self._interrupted
        judges = bool(self._run.hot.should_stop.chain)
        cast = [news, judges, clock, steps, -steps, batches, -batches, self._turns, -self._turns]
        any_news, any_judges, clock, *places = self._engine.vote([float(each) for each in cast])
        self._check_places(places)
        progress.set_seconds(clock)
        self._judges = bool(any_judges)
        if any_news:
            self._exchange()

    def conclude(self, *, served: bool) -> None:
        """Vote once more, where the boundary may have brought up something new."""
        if served or self._judges:
            self.settle()

    def settle_batch(self) -> None:
        """Let a batch that one rank skips be skipped by all, where some plugin declares that it may.

        Raises:
            RuntimeError: a rank skips that is not expected to, or the ranks do not hold the same batches.
        """
        control = self._run.control
        if not self._votes("skip_batch", self.on_batches, asked=control.skips_batch):
            return
        skips, holds, steps = self._engine.vote([control.skips_batch, control.holds_step, not control.holds_step])
        if holds and steps:
            raise RuntimeError(
                "Some ranks hold the step of this batch and others do not: hold_step must be asked for by all ranks."
            )
        if skips:
            control.skips_batch = control.touched = True

    def settle_step(self) -> None:
        """Let gradients that one rank drops be dropped by all, where some plugin declares that it may.

        Raises:
            RuntimeError: a rank drops them that is not expected to.
        """
        control = self._run.control
        dropped = self._votes("skip_step", self.on_steps, asked=control.drops_step)
        if dropped and self._engine.vote([control.drops_step])[0]:
            control.drops_step = control.touched = True

    def note_turn(self, name: str) -> None:
        """Note which of several optimizers is next; the next vote finds out whether it was the same on all ranks."""
        self._turns = crc32(name.encode(), self._turns)

    def hears_of_cut(self) -> bool:
        """Return whether the running evaluation is to be left, as some rank asked; tell the others if this one did.

        Raises:
            RankFailed: another rank failed: an evaluation may be long, and meet no collective for as long.
        """
        watch, topic = self._engine.watch, f"{self._token}: evaluation {self._evaluations} is cut short"
        if watch is None:
            return self._interrupted
        watch.check()
        if self._interrupted or self._run.control.cut_request is not None:
            watch.tell(topic, "")
            return True
        return watch.told(topic) is not None

    def settle_validation(self) -> None:
        """Let an evaluation that one rank cut short be cut short for all.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted.
        """
        self._evaluations += 1
        control = self._run.control
        if self._engine.vote([float(control.cut_request is not None or self._interrupted)])[0]:
            own = {} if control.cut_request is None else {control.cut_request.verb: control.cut_request}
            agreed = _merged(self._ballots(own))
            if control.cut_request is None and agreed:
                control.history.add(agreed["cut_validation"])
            control.cut_request = agreed.get("cut_validation")

    def settle_exit(self) -> None:
        """Let all ranks exit with the same status, the highest that any asked for.

        Raises:
            KeyboardInterrupt: one of the ranks was interrupted since the last vote.
        """
        mine = self._run.exit_status
        is_news = self._interrupted and self.agreed is None
        agreed, interrupted = self._engine.vote([-1.0 if mine is None else float(mine), float(is_news)])
        self._run.exit_status = None if agreed < 0 else int(agreed)
        if interrupted:
            self._ballots({})

    def _exchange(self) -> None:
        run, control = self._run, self._run.control
        ballots = self._ballots(control.standing())
        agreed = _merged(ballots)
        askers = [rank for rank, ballot in enumerate(ballots) if "roll_back" in ballot.requests]
        control.adopt(agreed, vetoed=any(ballot.vetoes for ballot in ballots))
        if askers and len(askers) < len(ballots):  # the others do not know where to
            run.saved, run.saved_path = self._engine.broadcast((run.saved, run.saved_path), askers[0])

    def _ballots(self, requests: dict[Verb, Request]) -> list[Ballot]:
        ballot = Ballot(requests, self._run.control.vetoed, self._interrupted)
        ballots: list[Ballot] = self._engine.gather_objects(ballot)
        interrupted = [str(rank) for rank, each in enumerate(ballots) if each.interrupted]
        if interrupted:
            self.agreed = KeyboardInterrupt(f"on rank {', '.join(interrupted)}")
            raise self.agreed
        return ballots

    def _check_places(self, places: Sequence[float]) -> None:
        most_steps, fewest_steps, most_batches, fewest_batches, turns, others = (abs(place) for place in places)
        if most_steps != fewest_steps or most_batches != fewest_batches:
            raise RuntimeError(
                f"The ranks stand at different places: {fewest_steps:.0f} to {most_steps:.0f} steps, "
                f"{fewest_batches:.0f} to {most_batches:.0f} batches. What a handler decides about a batch must be "
                f"decided alike on all ranks."
            )

        if turns != others:
            raise RuntimeError(
                "The ranks stepped different optimizers: training_step must yield the same names on all ranks, in one "
                "order."
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

    def _hear(self, signum: int) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True


def _merged(ballots: Sequence[Ballot]) -> dict[Verb, Request]:
    """Return what any rank asks, in the name of the lowest rank that asks it, unless all of them do."""
    merged: dict[Verb, Request] = {}
    for rank, ballot in enumerate(ballots):
        for verb, request in ballot.requests.items():
            everybody = all(verb in each.requests and each.requests[verb].by == request.by for each in ballots)
            merged.setdefault(verb, request if everybody else replace(request, rank=rank))
    return merged
