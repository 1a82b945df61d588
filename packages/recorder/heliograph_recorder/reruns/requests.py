"""What people requested of a recorded run from outside, requested again where it was."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from heliograph import CheckpointLoaded, Lane, Run, Trainer
from heliograph.events import CATALOGUE, Event, FunctionName, Request, Subscription

from ..divergence.course import Begin
from ..format.records import AttemptRecord, Counters, EventEntry, Recording, RequestEntry
from ..remote.messages import VERBS, Command
from ..remote.outcomes import RefusedCommandError, check_command, make_request
from ..remote.plugin import Remote
from .errors import NotExact

WORDS = {verb: word for word, verb in VERBS.items()}
SWITCHES = ("enable_plugin", "disable_plugin")
NAME = FunctionName("the repeated requests")
Where = tuple[str, int, int, int, int, int]  # the event, roll-backs, epoch, batch, step, validations


class PersonRequest(NamedTuple):
    """A request that a plugin made in the name of somebody else, such as a person who has asked it to.

    Attributes:
        request: as it was recorded.
        where: it was made.
        is_of_last: whether it was made in the last attempt of the training.
        ends: whether it is a stop that was not withdrawn: its attempt ended by it, or by a kill before it was vetoed.
    """

    request: Request
    where: Where
    is_of_last: bool
    ends: bool


def requests_of_people(recording: Recording, begin: Begin | None) -> list[PersonRequest]:
    """Return what people requested on the way from a checkpoint to the end of the training.

    What a killed attempt did after the checkpoint from which the next one resumed is not on the way. What a roll-back
    has discarded is: who does the run again meets it, and rolls back, too.

    Args:
        recording: of the training.
        begin: the epoch, the batches of it and the optimizer steps that were done at the checkpoint; None for the
            beginning.
    """
    attempts = [each for each in recording.attempts if each.phase == "train"]
    way = _Way(begin)
    for attempt in attempts:
        way.add(attempt, is_last=attempt is attempts[-1])
    return way.found


class _Way:
    """What was requested on the way, attempt by attempt."""

    def __init__(self, begin: Begin | None) -> None:
        self.found: list[PersonRequest] = []
        self._begin, self._roll_backs, self._validations = begin, 0, 0
        self._saves: dict[Begin, tuple[int, int]] = {}  # how much was found by then, and the roll-backs

    def add(self, attempt: AttemptRecord, *, is_last: bool) -> None:
        """Add what was requested in an attempt."""
        is_new = True
        for index, entry in enumerate(attempt.entries):
            if isinstance(entry, RequestEntry):
                ends = entry.request.verb == "stop" and _ends(attempt, index + 1)
                self._add_request(entry.request, is_last=is_last, ends=ends)
            elif isinstance(entry, EventEntry):
                self._validations = entry.counters.validations
                if entry.event == "checkpoint_loaded":
                    self._load(_place(Counters(**entry.data["origin"])), is_resume=is_new)
                if entry.event == "save_point":
                    self._save(_place(entry.counters))
                is_new = is_new and entry.event not in ("epoch_start", "save_point")

    def _add_request(self, request: Request, *, is_last: bool, ends: bool) -> None:
        if request.verb in WORDS and request.through:
            at = request.epoch, request.batch, request.step
            where = _where(request.event, self._roll_backs, at, self._validations)
            self.found.append(PersonRequest(request, where, is_last, ends))

    def _load(self, place: Begin, *, is_resume: bool) -> None:
        if not is_resume:
            self._roll_backs += 1
            return
        kept, self._roll_backs = self._saves.get(place, (0, 0))
        del self.found[kept:]
        if place == self._begin:
            self._save(place)

    def _save(self, place: Begin) -> None:
        if place == self._begin:
            self.found.clear()
            self._saves.clear()
            self._roll_backs = 0
        self._saves[place] = len(self.found), self._roll_backs


def _ends(attempt: AttemptRecord, begin: int) -> bool:
    """Return whether a stop was neither withdrawn, nor vetoed until a kill: a resumed run has none of it.

    Args:
        attempt: in which it was requested.
        begin: the number of entries up to the request.
    """
    after = {each.request.verb for each in attempt.entries[begin:] if isinstance(each, RequestEntry)}
    return "withdraw_stop" not in after and (attempt.status == "stopped" or "veto_stop" not in after)


def _place(at: Counters) -> Begin:
    return at.epoch, at.batch, at.steps


def _where(event: str, roll_backs: int, place: Begin, validations: int) -> Where:
    """Return where a request is made; of a validation any batch will do: it is served after the last one."""
    return event, roll_backs, *place, validations if event.startswith("validation_") else 0


class RepeatedRequests:
    """Makes the requests of people again, each at its event, in the name of who made it.

    Not those that come again by themselves, because the plugin through which they were made does again what it did.

    Args:
        requests: in their order.
        left_out: the names of plugins that do nothing when a run is done again.
        resumes: whether the run begins at a checkpoint.
        exact: whether to refuse what cannot be requested again; else it is left out, and noted.

    Attributes:
        refusal: why the run was refused; None if it was not.
        notes: what was not requested.
    """

    def __init__(
        self, requests: Sequence[PersonRequest], left_out: Collection[str], *, resumes: bool, exact: bool
    ) -> None:
        self.refusal: NotExact | None = None
        self.notes: list[str] = []
        self._requests, self._left_out, self._exact = requests, left_out, exact
        self._roll_backs, self._is_over = -resumes, False
        self._waiting: defaultdict[Where, list[Request]] = defaultdict(list)

    def subscribe(self, trainer: Trainer) -> None:
        """Handle the events at which something was requested: where `Remote` does, if the program has one."""
        names = [each.name for each in trainer.plugins if isinstance(each, Remote)]
        own = set(trainer.plugins.names()) - {*names, *self._left_out}
        repeated = [each for each in self._requests if each.request.through not in own]
        if not repeated:
            return
        for each in repeated:
            self._waiting[each.where].append(each.request)
        events = {each.request.event for each in repeated}
        for kind in [each for each in CATALOGUE if each.name in events]:
            signal: Any = trainer.bus.signal(kind)
            known = [each.position for each in signal.subscriptions.values() if each.owner in names]
            position = known[0] if known else (Lane.DECIDE, sys.maxsize)
            signal.connect(self.repeat, weak=False, subscription=Subscription(position, NAME))
        first = Subscription((Lane.TRANSFORM, -2), NAME)
        trainer.bus.signal(CheckpointLoaded).connect(self.count, weak=False, subscription=first)

    def count(self, run: Run, event: CheckpointLoaded) -> None:
        """Count the roll-backs: places come once more after each."""
        self._roll_backs += 1

    def repeat(self, run: Run, event: Event) -> None:
        """Make the requests that were made here."""
        if self._is_over:
            return
        progress = run.progress
        place = progress.epoch, progress.batch, progress.steps
        for request in self._waiting.pop(_where(event.name, self._roll_backs, place, progress.validations), ()):
            try:
                self._make(run, request)
            except RefusedCommandError as error:
                self._refuse(request, str(error))

    @property
    def waiting(self) -> list[Request]:
        """What was not requested again yet."""
        return [request for requests in self._waiting.values() for request in requests]

    def stop(self) -> None:
        """Request nothing any more."""
        self._is_over = True

    def _make(self, run: Run, request: Request) -> None:
        if request.verb in SWITCHES and request.target in self._left_out:
            raise RefusedCommandError(f"plugin {request.target!r} is left out when a run is done again.")
        command = Command(WORDS[request.verb], request.reason, request.target, request.value or 0.0)
        check_command(run, command)  # on every rank: all of them refuse it
        if run.engine.rank == (request.rank or 0):
            make_request(run, command, request.by)

    def _refuse(self, request: Request, why: str) -> None:
        place = f"epoch {request.epoch}, batch {request.batch}, step {request.step}"
        text = f"{request.by} requested {request.what} at {place}, and it cannot be requested again: {why.rstrip('.')}"
        self.notes.append(text)
        if self._exact:
            self.refusal = NotExact((text,))
            raise self.refusal


def repeatable(requests: Sequence[PersonRequest], *, ends: bool) -> Iterator[PersonRequest]:
    """Yield the requests, but for stops that ended an attempt after which the training continued.

    Args:
        requests: of people.
        ends: whether what is done again ends where the last attempt did.
    """
    for each in requests:
        if not each.ends or (ends and each.is_of_last):
            yield each
