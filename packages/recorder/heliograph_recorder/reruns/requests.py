"""The requests that people made to a recorded run from outside, repeated in a rerun."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from heliograph import Lane, Run, Trainer
from heliograph.events import CATALOGUE, Event, FunctionName, Request, Subscription

from ..divergence.course import STATES, Begin
from ..format.records import EventEntry, Recording, RequestEntry, walk
from ..remote.messages import VERBS, Command
from ..remote.outcomes import RefusedCommandError, check_command, make_request
from ..remote.plugin import Remote
from .program import NotExact

WORDS = {verb: word for word, verb in VERBS.items() if verb != "stop"}
NAME = FunctionName("the repeated requests")


def requests_of_people(recording: Recording, begin: Begin | None) -> list[Request]:
    """Return the requests of people since a checkpoint, without stops and what a kill or a roll-back discarded."""
    requests: list[Request] = []
    for _, entry, lost in walk(recording):
        if isinstance(entry, EventEntry) and entry.event in STATES:
            at = entry.counters
            if (at.epoch, at.batch, at.steps) == begin:
                requests.clear()
        elif isinstance(entry, RequestEntry) and not lost and entry.request.through and entry.request.verb in WORDS:
            requests.append(entry.request)
    return requests


class RepeatedRequests:
    """Repeats the requests of people at their events, in their names.

    It leaves out requests that the plugin of the program makes itself again.

    Args:
        requests: in order.
        left_out: the names of plugins that are disabled in the rerun.
        exact: refuse a rerun if a request cannot be repeated; otherwise `notes` mentions it.

    Attributes:
        is_over: repeat no more requests.
        notes: the requests that were not repeated.
    """

    def __init__(self, requests: Sequence[Request], left_out: Collection[str], *, exact: bool) -> None:
        self.is_over = False
        self.notes: list[str] = []
        self._requests, self._left_out, self._exact = requests, left_out, exact
        self._waiting: defaultdict[tuple[object, ...], list[Request]] = defaultdict(list)

    def subscribe(self, trainer: Trainer) -> None:
        """Handle the events of the requests, in the position of `Remote` if the program has one."""
        remotes = [plugin.name for plugin in trainer.plugins if isinstance(plugin, Remote)]
        repeating = set(trainer.plugins.names()) - {*remotes, *self._left_out}
        for request in self._requests:
            if request.through not in repeating:
                self._waiting[request.event, request.epoch, request.batch, request.step].append(request)
        names = {event for event, *_ in self._waiting}
        for event in [event for event in CATALOGUE if event.name in names]:
            signal: Any = trainer.bus.signal(event)
            positions = [entry.position for entry in signal.subscriptions.values() if entry.owner in remotes]
            position = positions[0] if positions else (Lane.DECIDE, sys.maxsize)
            signal.connect(self.repeat, weak=False, subscription=Subscription(position, NAME))

    def repeat(self, run: Run, event: Event) -> None:
        at = run.progress
        requests = () if self.is_over else self._waiting.pop((event.name, at.epoch, at.batch, at.steps), ())
        for request in requests:
            command = Command(WORDS[request.verb], request.reason, request.target, request.value or 0.0)
            try:
                if request.target in self._left_out:
                    raise RefusedCommandError(f"plugin {request.target!r} is left out of reruns.")
                check_command(run, command)  # on all ranks, so that all refuse
                if run.engine.rank == (request.rank or 0):
                    make_request(run, command, request.by)
            except RefusedCommandError as error:
                place = f"epoch {request.epoch}, batch {request.batch}, step {request.step}"
                text = f"cannot repeat {request.what}, requested by {request.by} at {place}: {str(error).rstrip('.')}"
                self.notes.append(text)
                if self._exact:
                    raise NotExact((text,)) from None
