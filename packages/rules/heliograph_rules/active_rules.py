"""All rules of a file in one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from heliograph import Log, Run, ValidationEnd
from heliograph.events import Event

from .base import Ending
from .files.blueprint import Blueprint
from .files.triggers import BEFORE_BOUNDARY, Trigger
from .judge import Judge
from .table import Table, Values

MEASURING: tuple[type[Event], ...] = (Log, ValidationEnd)  # as a boundary serves them
Case = tuple[str, str]  # a controller and one of its triggers, by name


class ActiveRules:
    """The metrics, operations and controllers of one run.

    Args:
        plan: what they are made from.
    """

    def __init__(self, plan: Blueprint) -> None:
        self._table = Table({name: make() for name, make in plan.metrics.items()})
        self._operations = {name: make() for name, make in plan.operations.items()}
        actions = {
            f"{name}.{action}": method
            for name, operation in self._operations.items()
            for action, method in operation.actions().items()
        }
        self._judges = {ready.name: Judge(ready, actions) for ready in plan.controllers}
        self._cases = {kind: [each for each in self._all_cases() if kind in each[1].events] for kind in plan.events}
        self._ending, self._asks_ranks = Ending(), plan.asks_ranks
        self._waiting: dict[Case, list[str]] = {}  # the names of the events that each waits for
        self._postponed: dict[Case, Event] = {}  # the events that triggered them; in a resumed run unknown
        self._stop: dict[str, str] | None = None

    def take(self, run: Run, event: Event) -> None:
        """Compute the new values of an event, and ask the rules that it triggers."""
        self._ending.handle(event)
        values = self._table.at(run, event)
        cases = self._cases.get(type(event), [])
        if arrived := self._arrived(event):
            cases = [
                each for each in self._all_cases() if each in cases or (each[0].ready.name, each[1].name) in arrived
            ]
        for judge, trigger in cases:
            case = judge.ready.name, trigger.name
            if case in arrived:
                self._ask(run, self._postponed.pop(case, event), judge, trigger, values)
            elif trigger.comes(run, event) and not self._must_wait(run, event, judge, trigger):
                self._ask(run, event, judge, trigger, values)

    def repeat_stop_after_resume(self, run: Run) -> None:
        """Stop a resumed run that a rule had stopped, unless that rule has changed since."""
        if self._stop is not None:
            run.control.stop(self._stop["reason"])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, by name."""
        return {
            "metrics": self._table.state_dict(),
            "operations": {
                name: {"kind": type(each).__name__, "state": each.state_dict()}
                for name, each in self._operations.items()
            },
            "controllers": {name: judge.state_dict() for name, judge in self._judges.items()},
            "waiting": [[*case, list(events)] for case, events in self._waiting.items()],
            "is_final": self._ending.is_final,
            "stop": None if self._stop is None else dict(self._stop),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue with everything that is as it was; return what is not, in words."""
        metrics, operations = self._table.metrics, self._operations
        news: list[str] = []
        for name in _known("metric", state["metrics"], _kinds(metrics), news):
            self._table.load(name, state["metrics"][name])
        for name in _known("operation", state["operations"], _kinds(operations), news):
            operations[name].load_state_dict(state["operations"][name]["state"])
        settings = {name: judge.ready.settings for name, judge in self._judges.items()}
        same = _known("rule", state["controllers"], settings, news)
        for name in same:
            self._judges[name].load_state_dict(state["controllers"][name])
        self._waiting = {(name, trigger): list(events) for name, trigger, events in state["waiting"] if name in same}
        self._ending.is_final = state["is_final"]
        if state["stop"] is not None and state["stop"]["controller"] in same:
            self._stop = dict(state["stop"])
        return news

    def _all_cases(self) -> Iterator[tuple[Judge, Trigger]]:
        for judge in self._judges.values():
            for trigger in judge.ready.triggers:
                yield judge, trigger

    def _ask(self, run: Run, event: Event, judge: Judge, trigger: Trigger, values: Values) -> None:
        before = run.control.history.total
        if judge.judge(run, event, trigger, values, is_final=self._ending.is_final) and self._stop is None:
            asked = islice(reversed(run.control.history), run.control.history.total - before)
            for reason in [request.reason for request in asked if request.verb == "stop"]:
                self._stop = {"controller": judge.ready.name, "reason": reason}

    def _must_wait(self, run: Run, event: Event, judge: Judge, trigger: Trigger) -> bool:
        """Return whether a rule at an epoch's end is asked when what is due there has brought what it reads."""
        case = judge.ready.name, trigger.name
        self._waiting.pop(case, None)
        if not isinstance(event, BEFORE_BOUNDARY) or not judge.ready.waits_for:
            return False
        due = {Log: run.control.should_log, ValidationEnd: run.control.should_validate}
        awaited = [kind for kind in MEASURING if kind in judge.ready.waits_for and self._is_due(run, asks=due[kind])]
        if awaited:
            self._waiting[case], self._postponed[case] = [kind.name for kind in awaited], event
        return bool(awaited)

    def _is_due(self, run: Run, *, asks: bool) -> bool:
        """Return whether some rank asks: what one of them asks, the next boundary does on all."""
        if self._asks_ranks and run.engine.world_size > 1:
            return bool(run.engine.reduce(float(asks), "max"))
        return asks

    def _arrived(self, event: Event) -> list[Case]:
        """Return the cases that have waited for this event as the last."""
        arrived = []
        for case, awaited in list(self._waiting.items()):
            if event.name in awaited:
                awaited.remove(event.name)
            if not awaited:
                arrived.append(case)
                del self._waiting[case]
        return arrived


def _kinds(parts: Mapping[str, object]) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in parts.items()}


def _known(what: str, saved: Mapping[str, Any], now: Mapping[str, str], news: list[str]) -> list[str]:
    """Return the names of what is as it was, by its kind or settings; add to the news what is not."""
    before = {name: state.get("kind", state.get("settings")) for name, state in saved.items()}
    gone = [f"{what} {name!r} is gone" for name in before if name not in now]
    new = [f"{what} {name!r} is new" for name in now if name not in before]
    changed = [name for name in now if name in before and before[name] != now[name]]
    news += [*gone, *new, *(f"{what} {name!r} has changed, and starts fresh" for name in changed)]
    return [name for name in now if before.get(name) == now[name]]
