"""The metrics, operations and rules of one run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from copy import copy
from itertools import islice
from typing import Any

from heliograph import Log, NotRecorded, Run, ValidationEnd
from heliograph.events import Event
from heliograph.spi import describe_error

from .base import Action, EndTracker, RuleFired, RuleFiring, RuleMetric
from .errors import MetricUnavailable, RuleError, show
from .files.builder import Blueprint, CheckedRule
from .files.specs import count_true
from .files.triggers import BEFORE_BOUNDARY, Trigger

logger = logging.getLogger("heliograph")
SKIPPED, FALSE, TRUE = -1, 0, 1  # outcomes of a rule; the maximum over the ranks counts
MEASURING: tuple[type[Event], ...] = (Log, ValidationEnd)  # in the order of a boundary
Case = tuple[str, str]  # the names of a controller and of one of its triggers


class Table:
    """The newest value of each metric; `unrecorded` as in a blueprint."""

    def __init__(self, metrics: Mapping[str, RuleMetric], unrecorded: dict[str, str] | None) -> None:
        self.metrics, self.unrecorded = metrics, unrecorded
        self.values: dict[str, Any] = dict.fromkeys(metrics)
        self._computed_at: dict[type[Event], list[str]] = {}
        for name, metric in metrics.items():
            for kind in metric.events:
                self._computed_at.setdefault(kind, []).append(name)

    def at(self, run: Run, event: Event) -> Values:
        values = Values(self, run, event)
        for name in self._computed_at.get(type(event), ()):
            values.compute(name)
        return values

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {
                "kind": type(metric).__name__,
                "state": metric.state_dict(),
                "value": None if metric.when_read else self.values[name],
            }
            for name, metric in self.metrics.items()
        }

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        self.metrics[name].load_state_dict(state["state"])
        self.values[name] = state["value"]


class Values(Mapping[str, Any]):
    """The values at one event; a `when_read` metric is computed when it is first read."""

    def __init__(self, table: Table, run: Run, event: Event) -> None:
        self._table, self._run, self._event = table, run, event
        self._computed: set[str] = set()

    def compute(self, name: str) -> None:
        metric, unrecorded = self._table.metrics[name], self._table.unrecorded
        self._computed.add(name)
        try:
            self._table.values[name] = metric.compute(self._run, self._event)
        except Exception as error:
            place = f"in metric {name!r} ({type(metric).__name__}) of the rules"
            if unrecorded is None:
                error.add_note(f"heliograph: {place}")
                raise
            if not isinstance(error, NotRecorded):
                raise RuleError(f"{place}: {describe_error(error)}") from error  # a replay reports no notes of errors
            unrecorded.setdefault(name, str(error))

    def __getitem__(self, name: str) -> Any:
        if name not in self._computed and self._table.metrics[name].when_read:
            self.compute(name)
        return self._table.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.metrics)

    def __len__(self) -> int:
        return len(self._table.metrics)


class Judge:
    """Evaluates one controller in a run: its rule, its patience and its actions."""

    def __init__(self, ready: CheckedRule, actions: Mapping[str, Action], *, is_dry_run: bool) -> None:
        self.ready = ready
        self._rule = copy(ready.rule)  # counts its random numbers
        self._actions, self._is_shared = actions, ready.shared and not is_dry_run
        self.counts = dict.fromkeys((trigger.name for trigger in ready.triggers), 0)
        self.is_off = False
        self._reported: set[str] = set()

    def judge(self, run: Run, event: Event, trigger: Trigger, values: Values, *, is_final: bool) -> bool:
        outcome, error = self._outcome(values)
        if self._is_shared and run.engine.world_size > 1:  # before an error is raised: the other ranks wait here
            outcome = int(run.engine.reduce(outcome, "max"))
        if error is not None:
            self._fail(run, error)
        if outcome == SKIPPED:
            return False
        count, acts = count_true(self.ready.spec.patience, self.counts[trigger.name], outcome=outcome == TRUE)
        self.counts[trigger.name] = count
        if acts:
            self._act(run, event, trigger, values, is_final=is_final)
        return acts

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": self.ready.settings,
            "rule": self._rule.state_dict(),
            "counts": dict(self.counts),
            "is_off": self.is_off,
            "told": sorted(self._reported),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state["rule"])
        self.counts |= {name: count for name, count in state["counts"].items() if name in self.counts}
        self.is_off, self._reported = state["is_off"], set(state["told"])

    def __str__(self) -> str:
        spec, file = self.ready.spec, self.ready.file
        line = spec.lines.get("rule", spec.line)
        where = "" if file is None else f" ({file}, line {line})"
        return f"rule {self.ready.name!r}{where}"

    def _outcome(self, values: Values) -> tuple[int, RuleError | None]:
        if self.is_off:
            return SKIPPED, None
        read = {name: values[name] for name in self.ready.rule.names}
        try:
            return TRUE if self._rule.evaluate(read) else FALSE, None
        except MetricUnavailable as missing:
            self._report_once("unavailable", f"{self} is skipped until its metrics have values: {missing}")
            return SKIPPED, None
        except RuleError as error:
            return FALSE, error

    def _act(self, run: Run, event: Event, trigger: Trigger, values: Values, *, is_final: bool) -> None:
        ready = self.ready
        text, operations = ready.rule.text, tuple(ready.spec.operations)
        firing = RuleFiring(ready.name, trigger.name, event, text, values, is_final)
        read = {name: values[name] for name in sorted(ready.rule.names)}
        if logger.isEnabledFor(ready.level):
            metrics = ", ".join(f"{name} = {show(value)}" for name, value in read.items()) or "no metrics"
            action = f"taking action {', '.join(operations)}"
            logger.log(ready.level, "%s", f"controller {ready.name!r} on {trigger.name}: {action}; {text}; {metrics}")
        done = list[str]()
        try:
            for name in operations:
                self._actions[name](run, firing)
                done.append(name)
        except RuleError as error:
            self._fail(run, error)
        run.emit(RuleFired(ready.name, trigger.name, text, tuple(done), read))

    def _fail(self, run: Run, error: RuleError) -> None:
        ready, spec = self.ready, self.ready.spec
        line = spec.lines.get("rule", spec.line)
        located = error.located(file=ready.file, line=line, controller=ready.name)
        if ready.on_error == "raise":
            raise located from error.__cause__
        self.is_off = ready.on_error == "disable"
        effect = "is off for the rest of the run" if self.is_off else "counts as false when it fails"
        note = f"{str(located).removesuffix('.')}; the rule {effect}"
        if self._report_once("error", note, logs=not run.report.is_replay):  # a replay prints the notes
            run.note(note)

    def _report_once(self, about: str, text: str, *, logs: bool = True) -> bool:
        if about in self._reported:
            return False
        self._reported.add(about)
        if logs:
            logger.warning("%s", text)
        return True


class ActiveRules:
    """The metrics, operations and controllers of one run, created from a blueprint."""

    def __init__(self, plan: Blueprint) -> None:
        is_dry_run = plan.unrecorded is not None
        self._table = Table({name: make() for name, make in plan.metrics.items()}, plan.unrecorded)
        self._operations = {name: make() for name, make in plan.operations.items()}
        actions = {
            f"{name}.{action}": _do_nothing if is_dry_run else method
            for name, operation in self._operations.items()
            for action, method in operation.actions().items()
        }
        self._judges = {ready.name: Judge(ready, actions, is_dry_run=is_dry_run) for ready in plan.controllers}
        cases = [(judge, trigger) for judge in self._judges.values() for trigger in judge.ready.triggers]
        self._cases = {
            kind: [(judge, trigger) for judge, trigger in cases if kind in {*trigger.events, *judge.ready.waits_for}]
            for kind in plan.events
        }
        self._ending, self._is_dry_run = EndTracker(), is_dry_run
        # The awaited events, and the one that triggered the case, which a resume loses.
        self._waiting: dict[Case, tuple[set[type[Event]], Event | None]] = {}
        self._stop: dict[str, str] | None = None

    def handle(self, run: Run, event: Event) -> None:
        self._ending.handle(event)
        values = self._table.at(run, event)
        for judge, trigger in self._cases.get(type(event), ()):
            case = judge.ready.name, trigger.name
            if isinstance(event, trigger.events) and (trigger.applies is None or trigger.applies(run, event)):
                if awaited := self._awaited(run, event, judge):
                    self._waiting[case] = awaited, event
                else:
                    self._waiting.pop(case, None)
                    self._ask(run, event, judge, trigger, values)
            elif case in self._waiting:
                awaited, first_event = self._waiting[case]
                awaited.discard(type(event))
                if not awaited:
                    del self._waiting[case]
                    self._ask(run, first_event or event, judge, trigger, values)

    def repeat_stop_after_resume(self, run: Run) -> None:
        if self._stop is not None:
            run.control.stop(self._stop["reason"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "metrics": self._table.state_dict(),
            "operations": {
                name: {"kind": type(operation).__name__, "state": operation.state_dict()}
                for name, operation in self._operations.items()
            },
            "controllers": {name: judge.state_dict() for name, judge in self._judges.items()},
            "waiting": [[*case, sorted(kind.name for kind in awaited)] for case, (awaited, _) in self._waiting.items()],
            "is_final": self._ending.is_final,
            "stop": None if self._stop is None else dict(self._stop),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        metrics, operations = self._table.metrics, self._operations
        changes: list[str] = []
        for name in _unchanged("metric", state["metrics"], _kinds(metrics), changes):
            self._table.load(name, state["metrics"][name])
        for name in _unchanged("operation", state["operations"], _kinds(operations), changes):
            operations[name].load_state_dict(state["operations"][name]["state"])
        settings = {name: judge.ready.settings for name, judge in self._judges.items()}
        same = _unchanged("rule", state["controllers"], settings, changes)
        for name in same:
            self._judges[name].load_state_dict(state["controllers"][name])
        kinds = {kind.name: kind for kind in MEASURING}
        for name, trigger, awaited in state["waiting"]:
            if name in same:
                self._waiting[name, trigger] = {kinds[event] for event in awaited}, None
        self._ending.is_final = state["is_final"]
        if state["stop"] is not None and state["stop"]["controller"] in same:
            self._stop = dict(state["stop"])
        return changes

    def _ask(self, run: Run, event: Event, judge: Judge, trigger: Trigger, values: Values) -> None:
        before = run.control.history.total
        if judge.judge(run, event, trigger, values, is_final=self._ending.is_final) and self._stop is None:
            asked = islice(reversed(run.control.history), run.control.history.total - before)
            for reason in [request.reason for request in asked if request.verb == "stop"]:
                self._stop = {"controller": judge.ready.name, "reason": reason}

    def _awaited(self, run: Run, event: Event, judge: Judge) -> set[type[Event]]:
        # A rule at the end of an epoch is evaluated after the scheduled log and validation that it reads.
        if not isinstance(event, BEFORE_BOUNDARY):
            return set()
        due = {Log: run.control.should_log, ValidationEnd: run.control.should_validate}
        return {kind for kind in MEASURING if kind in judge.ready.waits_for and self._is_due(run, asks=due[kind])}

    def _is_due(self, run: Run, *, asks: bool) -> bool:
        # The next boundary serves a request of any rank on all ranks.
        if not self._is_dry_run and run.engine.world_size > 1:
            return bool(run.engine.reduce(float(asks), "max"))
        return asks


def _do_nothing(_run: Run, _firing: RuleFiring) -> None:
    """Stand in for an operation in a dry run."""


def _kinds(parts: Mapping[str, object]) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in parts.items()}


def _unchanged(part: str, saved: Mapping[str, Any], now: Mapping[str, str], changes: list[str]) -> list[str]:
    before = {name: state.get("kind", state.get("settings")) for name, state in saved.items()}
    gone = [f"{part} {name!r} is gone" for name in before if name not in now]
    new = [f"{part} {name!r} is new" for name in now if name not in before]
    changed = [name for name in now if name in before and before[name] != now[name]]
    changes += [*gone, *new, *(f"{part} {name!r} has changed and starts without its saved state" for name in changed)]
    return [name for name in now if before.get(name) == now[name]]
