"""How ranks agree: a request of one rank, or its Ctrl-C, takes effect on all ranks at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from struct import Struct
from typing import Any, cast
from uuid import uuid4
from zlib import crc32

from torch import Tensor

from ...events import Control, Event, Request, Run, ShouldStop
from ...events.bus import Receiver
from ...events.control import Pending, Verb
from ..data.last_batch import with_last
from ..data.sizes import SampleCounter
from ..data.training_data import TrainingData
from ..system.signals import SignalHook

# Optimizer steps, including skipped ones; micro-batches; checksums of the names of stepped optimizers and of the
# changes of plugins' conditions.
Place = tuple[float, ...]


@dataclass(slots=True)
class Ballot:
    """The requests of one rank, and what the other ranks must know about it."""

    place: Place
    judges: bool
    requests: dict[str, Request]
    vetoes: bool
    interrupted: bool
    save_veto: Request | None
    withdrawn: dict[Verb, Request]
    goes_back_to: str  # the checkpoint of a rollback; empty if there is no file


def check_places(places: Sequence[Sequence[float]]) -> None:
    """Raise RuntimeError unless all ranks are at the same place.

    Args:
        places: for each part of a `Place`, its values on all ranks.
    """
    steps, batches, optimizers, conditions = places
    if len(set(steps)) > 1 or len(set(batches)) > 1:
        raise RuntimeError(
            f"The ranks are at different positions: {min(steps):.0f} to {max(steps):.0f} steps, "
            f"{min(batches):.0f} to {max(batches):.0f} batches. Handlers must make the same decisions about a batch on "
            f"all ranks."
        )
    if len(set(optimizers)) > 1:
        raise RuntimeError(
            "The ranks stepped different optimizers: training_step must yield the same names in the same order on all "
            "ranks."
        )
    if len(set(conditions)) > 1:
        raise RuntimeError(
            "The condition of a plugin was true on some ranks only: the argument of plugin.when(...) must return the "
            "same on all ranks. Let it read run.progress or the metrics of a validation, not the rank, a clock or a "
            "loss; for a plugin of one rank, set ranks = 'main'."
        )


def merge_requests(ballots: Sequence[Ballot]) -> dict[str, Request]:
    """Return the requests of all ranks; one that is not on all ranks gets the number of the lowest rank that has it.

    The order is that of the lowest rank, then of the next: the same on all ranks.
    """
    merged: dict[str, Request] = {}
    for rank, ballot in enumerate(ballots):
        for key, request in ballot.requests.items():
            on_all = all(key in voter.requests and voter.requests[key].by == request.by for voter in ballots)
            merged.setdefault(key, request if on_all else replace(request, rank=rank))
            merged[key].required |= request.required
    return merged


def check_equal_on_ranks(subject: str, of_ranks: Sequence[Sequence[str]], remedy: str) -> None:
    """Raise ValueError unless all ranks have the same.

    Args:
        subject: begins the error, with its verb.
        of_ranks: the parts of each rank, in words.
        remedy: ends the error.
    """
    for rank, parts in enumerate(of_ranks):
        for expected, actual in zip_longest(of_ranks[0], parts, fillvalue="nothing more"):
            if expected != actual:
                raise ValueError(
                    f"{subject} not the same on all ranks: rank 0 has {expected}, and rank {rank} has {actual}. "
                    f"{remedy}"
                )


def settings_in_words(settings: Any) -> list[str]:
    """Return the arguments of a run that must be the same on all ranks: lengths, sets, limits and optimizers."""
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


SUMMARY = Struct("<2d4dd")  # has requests; has handlers of ShouldStop; the place; the clock
COMPARED = SUMMARY.size - 8  # everything but the clock
LEFT = (
    "The loop over the batches was left on some ranks only, while the others wait for the gradients of this rank. "
    "Leave it on all ranks after the same batch; or call control.end_epoch(reason), which ends it on all ranks."
)


class SharedControl(Control):
    """The control of a run on several ranks: a request of one rank takes effect on all of them, at the same step.

    At each step boundary every rank posts a summary: whether it has requests, its place, and its clock. A rank without
    requests reads the summaries at its next boundary; one with requests waits for them at once. If all ranks have
    requests, they agree now; if only some have, all ranks agree at the next boundary; if none has, nothing happens. To
    agree, ranks exchange their ballots: every rank adopts the same requests, with their sources.

    Some boundaries settle: the ranks wait for all summaries and agree there. These are the boundaries of the last
    batch, of the end of an epoch and of the run, the first one of a resumed run, and those that follow a served
    request. So no rank leaves the loop, or saves, before the other ranks know. docs/explanation/ranks.md has the proof.

    Args:
        run: the run.

    Attributes:
        agreed: an error that all ranks raised together, at the same place.
        votes_on_batches: whether the ranks vote on every batch, because a plugin of some rank may skip one.
        votes_on_steps: whether they vote on every step, because a plugin of some rank may drop one.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run.progress)
        self.is_shared = True
        self._run, self._engine = run, run.engine
        self._post_summary: Callable[[bytes], None]
        self._read_summaries: Callable[[], list[list[bytes]]]
        self._open: list[list[bytes]] = []  # summaries that were read for the next boundary
        self._is_open = self._judges = self._interrupted = self._drops_alike = False
        self._evaluations = self._optimizer_order = self._condition_order = 0
        self._token, self._of_some_ranks = "", set[str]()  # plugins that some ranks lack
        self._withdrawn: dict[Verb, Request] = {}
        self._aside: dict[str, Request] = {}  # this rank's requests, while ShouldStop of an open boundary runs
        self._should_stop = run.bus.signal(ShouldStop)
        self._hook = SignalHook([signal.SIGINT], self._note_interrupt)

    def open(self) -> None:
        """Turn Ctrl-C into a request, and refuse collectives in handlers of plugins that only some ranks have.

        Also fix for all ranks what they vote on: their plugins may differ, and be disabled on some.

        Raises:
            ValueError: the arguments of the run differ between ranks.
        """
        plugins = self._run.plugins
        enabled = [name for name in plugins.names() if plugins.is_enabled(name)]
        facts = settings_in_words(self._run.settings), list(plugins.declared("asks")), enabled, uuid4().hex
        settings, asks, names, tokens = zip(*self._engine.gather_objects(facts), strict=True)
        check_equal_on_ranks("The arguments of the run are", settings, "Pass the same to all ranks.")
        declared = set().union(*asks)
        self.votes_on_batches, self.votes_on_steps = "skip_batch" in declared, "skip_step" in declared
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
        """Always True: other ranks may have requests."""
        return True

    def is_due(self, *, window: int, judged: bool) -> bool:
        """Return True if a boundary follows this batch: the same on all ranks."""
        return not window

    def agree(self, *, in_epoch: bool = False) -> bool:
        """Make the open requests the same on all ranks; return True if there are some to serve now.

        Args:
            in_epoch: whether the epoch continues, so that requests of some ranks may wait until the next boundary.

        Raises:
            KeyboardInterrupt: a rank was interrupted; raised on all ranks at the same place.
            RuntimeError: the ranks are at different steps; the user's own loop was left on some ranks only.
        """
        self._is_open, run = False, self._run
        if self._close_summaries():
            self._exchange()
        else:
            self._post(settles=not in_epoch or run.data.is_last_batch or run.is_complete)
        if self._is_open and self.leaving:
            raise RuntimeError(LEFT)
        if self._is_open:
            # Handlers of `ShouldStop` see only requests that all ranks agree on.
            self._aside = self.open_requests()
            self.stop_request = self._end_request = self._back_request = None
            self._due = {}
        return self.pending and not self._is_open

    def _restore_requests(self) -> None:
        # A repeated request keeps its first source; the newest state of a rollback counts.
        aside, self._aside = self._aside, {}
        back = self._back_request or aside.get("roll_back")
        for key, request in self.open_requests().items():
            aside.setdefault(key, request).required |= request.required
        self.stop_request, self._end_request = aside.pop("stop", None), aside.pop("end_epoch", None)
        aside.pop("roll_back", None)
        self._back_request, self._due = back, aside

    def decide(self, *, served: bool = False, in_epoch: bool = True) -> None:
        """Post another summary if handlers of the boundary may have added requests; then decide on the agreed ones."""
        if self._is_open:
            self._restore_requests()
        if self._is_open and self._judges:
            self._post(settles=False)
        elif served or self._judges:
            self.agree()
        if self._is_open:  # the requests stay open
            self._vetoed = False
        else:
            super().decide(in_epoch=in_epoch)

    def agree_on_batch(self) -> None:
        """Skip a batch on all ranks if one rank skips it and a plugin has declared that it may.

        Raises:
            RuntimeError: a rank skips without such a declaration, or the ranks do not hold the same batches.
        """
        if not self._votes("skip_batch", self.votes_on_batches, requested=self.skips_batch):
            return
        skips, holds, steps = self._engine.vote([self.skips_batch, self.holds_step, not self.holds_step])
        if holds and steps:
            raise RuntimeError(
                "Some ranks hold the step of this batch and others do not: all ranks must request hold_step."
            )
        if skips:
            self.skips_batch = self.touched = True

    def drop_step(self, reason: str) -> None:
        # All ranks drop it, so there is no vote.
        super().drop_step(reason)
        self._drops_alike = True

    def agree_on_step(self) -> None:
        """Drop gradients on all ranks if one rank drops them and a plugin has declared that it may.

        Raises:
            RuntimeError: a rank drops them without such a declaration.
        """
        if self._drops_alike:
            self._drops_alike = False
            return
        dropped = self._votes("skip_step", self.votes_on_steps, requested=self.drops_step)
        if dropped and self._engine.vote([self.drops_step])[0]:
            self.drops_step = self.touched = True

    def note_optimizer(self, name: str) -> None:
        """Record which of several optimizers is next; the next summary compares it over the ranks."""
        self._optimizer_order = crc32(name.encode(), self._optimizer_order)

    def withdraw(self, verb: Pending, reason: str, *, by: str | None = None) -> bool:
        """Withdraw a request of any rank at the next agreement, unless this rank requests it again before."""
        if verb in self._aside and not self._aside[verb].required:
            del self._aside[verb]
        if not super().withdraw(verb, reason, by=by):
            self.record(cast("Verb", f"withdraw_{verb}"), reason, by)
        self._withdrawn[verb] = next(entry for entry in reversed(self.history) if entry.verb == f"withdraw_{verb}")
        return True

    def note_condition(self, change: str) -> None:
        """Record a change of a plugin's condition; the next summary compares it over the ranks."""
        self._condition_order = crc32(change.encode(), self._condition_order)

    def is_cut(self) -> bool:
        """Return True if some rank cuts the running evaluation short; inform the other ranks if this one does.

        Raises:
            RankFailed: another rank failed: a long evaluation may have no collective that would show it.
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
        """Cut an evaluation short on all ranks if one rank did.

        Raises:
            KeyboardInterrupt: a rank was interrupted.
        """
        self._evaluations += 1
        if self._engine.vote([float(self.cut_request is not None or self._interrupted)])[0]:
            requests = {} if self.cut_request is None else {str(self.cut_request.verb): self.cut_request}
            cut = next(iter(merge_requests(self._ballots(requests)).values()), None)
            if self.cut_request is None and cut is not None:
                self.history.add(cut)
            self.cut_request = cut

    def agree_on_exit_status(self) -> None:
        """Give all ranks the highest requested exit status.

        Raises:
            KeyboardInterrupt: a rank was interrupted since the last agreement.
        """
        status = self._run.hooks.exit_status
        is_news = self._interrupted and self.agreed is None
        agreed, interrupted = self._engine.vote([-1.0 if status is None else float(status), float(is_news)])
        self._run.hooks.exit_status = None if agreed < 0 else int(agreed)
        if interrupted:
            self._ballots({})

    def _post(self, *, settles: bool) -> None:
        has_news, judges = self._has_news, bool(self._should_stop.chain)
        self._post_summary(SUMMARY.pack(has_news, judges, *self._place, self._progress.own_seconds))
        self._is_open = True
        if settles or has_news:
            self._open += self._read_summaries()
            if settles or all(SUMMARY.unpack(summary)[0] for summary in self._open[-1]):
                self._is_open = False
                if self._close_summaries():
                    self._exchange()

    def _close_summaries(self) -> bool:
        # Applies the open summaries in order; returns True if any rank has requests.
        self._open += self._read_summaries()
        has_requests = False
        for summaries in self._open:
            first = summaries[0][:COMPARED]
            distinct = summaries[:1]  # usually all are equal, and one is enough
            for summary in summaries:
                if summary[:COMPARED] != first:
                    distinct = summaries
            news, judges, *places, clocks = zip(*map(SUMMARY.unpack, distinct), strict=True)
            if distinct is summaries:
                check_places(places)
            self._progress.set_seconds(clocks[0])  # the main rank's
            self._judges = any(judges)
            has_requests = has_requests or any(news)
        self._open.clear()
        return has_requests

    @property
    def _has_news(self) -> bool:
        singles = self.stop_request or self._end_request or self._back_request
        return bool(singles or self._due or self._interrupted or self._withdrawn or self._save_veto)

    @property
    def _place(self) -> Place:
        progress = self._progress
        steps = progress.steps + progress.skipped_steps
        return steps, progress.batches, self._optimizer_order, self._condition_order

    def _exchange(self) -> None:
        ballots = self._ballots(self.open_requests())
        # The places are newer than the summaries.
        check_places([*zip(*(ballot.place for ballot in ballots), strict=True)])
        self._judges = any(ballot.judges for ballot in ballots)
        agreed, withdrawn = merge_requests(ballots), dict[Verb, Request]()
        for rank, ballot in enumerate(ballots):  # the lowest rank with a withdrawal is its source
            for verb, request in ballot.withdrawn.items():
                withdrawn.setdefault(verb, replace(request, rank=rank))
        for verb, request in withdrawn.items():
            if verb not in self._withdrawn:
                self.history.add(request)
            if verb in agreed and not agreed[verb].required:
                del agreed[verb]
        self._withdrawn = {}
        for rank, ballot in enumerate(ballots):  # the veto of the lowest rank, as a single request
            if self._save_veto is None and (veto := ballot.save_veto) is not None:
                veto = replace(veto, rank=rank if veto.rank is None else veto.rank, times=1)
                self._save_veto = self.history.add(veto)
        sources = [rank for rank, ballot in enumerate(ballots) if "roll_back" in ballot.requests]
        self.adopt(agreed, vetoed=any(ballot.vetoes for ballot in ballots))
        path = ballots[sources[0]].goes_back_to if sources else ""
        if sources and not (path and all(ballot.goes_back_to == path for ballot in ballots)):  # not the same file
            checkpoints = self._run.checkpoints
            checkpoints.pending_state = self._engine.broadcast(checkpoints.pending_state, sources[0])

    def _ballots(self, requests: dict[str, Request]) -> list[Ballot]:
        withdrawn = {verb: request for verb, request in self._withdrawn.items() if verb not in requests}
        judges = bool(self._should_stop.chain)
        state = self._run.checkpoints.pending_state
        back_to = "" if state is None else str(state[1] or "")
        facts = self._place, judges, requests, self.vetoed, self._interrupted, self._save_veto, withdrawn, back_to
        ballots: list[Ballot] = self._engine.gather_objects(Ballot(*facts))
        if interrupted := [str(rank) for rank, voter in enumerate(ballots) if voter.interrupted]:
            self.agreed = KeyboardInterrupt(f"on rank {', '.join(interrupted)}")
            raise self.agreed
        return ballots

    @staticmethod
    def _votes(verb: str, voted: bool, *, requested: bool) -> bool:
        if requested and not voted:
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
            before, group.refusal = group.refusal, (owner, event.name)  # no context manager, for speed
            try:
                receiver(run, event=event)
            finally:
                group.refusal = before

        return guarded

    def _note_interrupt(self, signum: int) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True


UNEQUAL = "the ranks had different numbers of batches: each epoch ended with the shortest rank"


def read_together(
    batches: Iterator[Any],
    data: TrainingData,
    engine: Any,
    remaining: int | None,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    """Return the batches that every rank has; batches after the end of the shortest rank are not read.

    Args:
        batches: this rank's.
        data: their source; its `together` becomes the number of samples of all ranks.
        engine: connects the ranks.
        remaining: the number of remaining batches by the loader's length; None if it has none.
        size_of: returns the samples in a batch.
        mark_last: called with whether the next batch is the last, if a loader has no length or has reached it; None to
            disable reading ahead.
    """
    data.together, source = None, data.source
    if remaining is not None and (mark_last is None or source is None or not source.as_it_is):
        batches, mark_last = islice(batches, max(0, remaining)), None
        if source is not None and source.even and isinstance(getattr(size_of, "__self__", None), SampleCounter):
            return batches  # the ranks have equally many batches of equal sizes, unless user code counts samples
    if mark_last is None:
        return _read_in_step(((batch, False) for batch in batches), data, engine, size_of, None)
    # A loader may have more batches than its length.
    before = ((batch, False) for batch in islice(batches, max(0, (remaining or 0) - 1)))
    return _read_in_step(chain(before, with_last(batches)), data, engine, size_of, mark_last)


def _read_in_step(
    batches: Iterator[tuple[Any, bool]],
    data: TrainingData,
    engine: Any,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    # Ends when a rank has no batch, or had its last one. Before each batch, the samples of all ranks are summed.
    while True:
        item = next(batches, None)
        batch, is_last = (None, True) if item is None else item
        size = None if item is None else int(size_of(batch))
        sizes, ends = zip(*engine.gather_objects((size, is_last)), strict=True)
        if None in sizes:
            if not all(ends) and data.together is not None:  # some ranks had more
                data.note_once(UNEQUAL)
            return
        data.together = sum(sizes)
        if mark_last is not None:
            mark_last(any(ends))
        if any(ends) and not all(ends) and (data.source is None or data.source.length is None):
            data.note_once(UNEQUAL)
        yield batch
        if any(ends):
            return
