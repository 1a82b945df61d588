"""The requests that people made to a recorded run from outside, repeated in a rerun."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
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
RequestMoment = tuple[str, int, int, int, int, int]  # event, roll-backs, epoch, batch, step, validations


class PersonRequest(NamedTuple):
    """A request that a plugin made in the name of a person.

    Attributes:
        request: as recorded.
        moment: of the request.
        is_of_last: made in the last attempt.
        ends: a stop that was neither withdrawn nor vetoed, so it ended the attempt, if no kill did.
    """

    request: Request
    moment: RequestMoment
    is_of_last: bool
    ends: bool


def requests_of_people(recording: Recording, begin: Begin | None) -> list[PersonRequest]:
    """Return the requests of people between a checkpoint, or the beginning, and the end of the training.

    This excludes requests that a kill discarded, because a resumed run does not repeat them. It includes requests that
    a roll-back discarded, because a rerun rolls back too.
    """
    attempts = [attempt for attempt in recording.attempts if attempt.phase == "train"]
    path = _RequestPath(begin)
    for attempt in attempts:
        path.add(attempt, is_last=attempt is attempts[-1])
    return path.requests


class _RequestPath:
    """The requests on the path of a training, attempt by attempt."""

    def __init__(self, begin: Begin | None) -> None:
        self.requests: list[PersonRequest] = []
        self._begin, self._roll_backs, self._validations = begin, 0, 0
        self._saves: dict[Begin, tuple[int, int]] = {}  # at each save: the numbers of requests and roll-backs

    def add(self, attempt: AttemptRecord, *, is_last: bool) -> None:
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
            place = request.epoch, request.batch, request.step
            moment = _moment(request.event, self._roll_backs, place, self._validations)
            self.requests.append(PersonRequest(request, moment, is_last, ends))

    def _load(self, place: Begin, *, is_resume: bool) -> None:
        if not is_resume:
            self._roll_backs += 1
            return
        length, self._roll_backs = self._saves.get(place, (0, 0))
        del self.requests[length:]
        if place == self._begin:
            self._save(place)

    def _save(self, place: Begin) -> None:
        if place == self._begin:
            self.requests.clear()
            self._saves.clear()
            self._roll_backs = 0
        self._saves[place] = len(self.requests), self._roll_backs


def _ends(attempt: AttemptRecord, begin: int) -> bool:
    """True if a stop before entry `begin` was neither withdrawn, nor vetoed until a kill."""
    later = {entry.request.verb for entry in attempt.entries[begin:] if isinstance(entry, RequestEntry)}
    return "withdraw_stop" not in later and (attempt.status == "stopped" or "veto_stop" not in later)


def _place(counters: Counters) -> Begin:
    return counters.epoch, counters.batch, counters.steps


def _moment(event: str, roll_backs: int, place: Begin, validations: int) -> RequestMoment:
    """Return the moment of a request; all batches of a validation are equivalent, since it is served after them."""
    return event, roll_backs, *place, validations if event.startswith("validation_") else 0


class RepeatedRequests:
    """Repeats the requests of people at their events, in their names.

    It leaves out requests that the plugin of the program makes itself again.

    Args:
        requests: in order.
        left_out: the names of plugins that are disabled in the rerun.
        resumes: the rerun starts at a checkpoint.
        exact: refuse a rerun if a request cannot be repeated; otherwise `notes` mentions it.

    Attributes:
        refusal: the error that ended the run.
        notes: the requests that were not repeated.
    """

    def __init__(
        self, requests: Sequence[PersonRequest], left_out: Collection[str], *, resumes: bool, exact: bool
    ) -> None:
        self.refusal: NotExact | None = None
        self.notes: list[str] = []
        self._requests, self._left_out, self._exact = requests, left_out, exact
        self._roll_backs, self._is_over = -resumes, False
        self._waiting: defaultdict[RequestMoment, list[Request]] = defaultdict(list)

    def subscribe(self, trainer: Trainer) -> None:
        """Handle the events of the requests, in the position of `Remote` if the program has one."""
        remotes = [plugin.name for plugin in trainer.plugins if isinstance(plugin, Remote)]
        repeating = set(trainer.plugins.names()) - {*remotes, *self._left_out}
        requests = [request for request in self._requests if request.request.through not in repeating]
        if not requests:
            return
        for request in requests:
            self._waiting[request.moment].append(request.request)
        names = {request.request.event for request in requests}
        for event in [event for event in CATALOGUE if event.name in names]:
            signal: Any = trainer.bus.signal(event)
            positions = [entry.position for entry in signal.subscriptions.values() if entry.owner in remotes]
            position = positions[0] if positions else (Lane.DECIDE, sys.maxsize)
            signal.connect(self.repeat, weak=False, subscription=Subscription(position, NAME))
        before_all = Subscription((Lane.TRANSFORM, -2), NAME)
        trainer.bus.signal(CheckpointLoaded).connect(self.count, weak=False, subscription=before_all)

    def count(self, run: Run, event: CheckpointLoaded) -> None:
        """Count the roll-backs, because the same steps come again after each."""
        self._roll_backs += 1

    def repeat(self, run: Run, event: Event) -> None:
        if self._is_over:
            return
        progress = run.progress
        place = progress.epoch, progress.batch, progress.steps
        for request in self._waiting.pop(_moment(event.name, self._roll_backs, place, progress.validations), ()):
            try:
                self._make(run, request)
            except RefusedCommandError as error:
                self._refuse(request, str(error))

    @property
    def waiting(self) -> list[Request]:
        """The requests that were not repeated yet."""
        return [request for requests in self._waiting.values() for request in requests]

    def stop(self) -> None:
        self._is_over = True

    def _make(self, run: Run, request: Request) -> None:
        if request.verb in SWITCHES and request.target in self._left_out:
            raise RefusedCommandError(f"plugin {request.target!r} is left out of reruns.")
        command = Command(WORDS[request.verb], request.reason, request.target, request.value or 0.0)
        check_command(run, command)  # on all ranks, so that all refuse
        if run.engine.rank == (request.rank or 0):
            make_request(run, command, request.by)

    def _refuse(self, request: Request, reason: str) -> None:
        position = f"epoch {request.epoch}, batch {request.batch}, step {request.step}"
        text = f"cannot repeat {request.what}, requested by {request.by} at {position}: {reason.rstrip('.')}"
        self.notes.append(text)
        if self._exact:
            self.refusal = NotExact((text,))
            raise self.refusal


def repeatable(requests: Sequence[PersonRequest], *, ends: bool) -> list[PersonRequest]:
    """Return the requests without stops after which the training continued.

    If `ends` is true, the rerun ends like the last attempt, so a stop of it is included.
    """
    return [request for request in requests if not request.ends or (ends and request.is_of_last)]
