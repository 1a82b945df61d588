"""All rules of a file in one run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from heliograph import Log, Run, ValidationEnd
from heliograph.events import Event

from .base import Action, Ending, RuleFired, RuleFiring, RuleMetric
from .errors import MetricUnavailable, RuleError, show
from .files.builder import Blueprint, Ready
from .files.specs import counted
from .files.triggers import BEFORE_BOUNDARY, Trigger

PLAIN: tuple[type[Any], ...] = (bool, int, float, str)


class Table:
    """Every metric with its newest value, from event to event.

    Args:
        metrics: by their names, made for this run.
    """

    def __init__(self, metrics: Mapping[str, RuleMetric]) -> None:
        self.metrics = metrics
        self.values: dict[str, Any] = dict.fromkeys(metrics)
        self._brought: dict[type[Event], list[str]] = {}
        for name, metric in metrics.items():
            for kind in metric.events:
                self._brought.setdefault(kind, []).append(name)

    def at(self, run: Run, event: Event) -> Values:
        """Return the values at an event, its new ones computed."""
        values = Values(self, run, event)
        for name in self._brought.get(type(event), ()):
            values.compute(name)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics' states and, of those that cannot be computed at any time, the values."""
        return {
            name: {
                "kind": type(metric).__name__,
                "state": metric.state_dict(),
                "value": None if metric.when_read else plain(self.values[name]),
            }
            for name, metric in self.metrics.items()
        }

    def load(self, name: str, state: Mapping[str, Any]) -> None:
        """Continue with one metric."""
        self.metrics[name].load_state_dict(state["state"])
        self.values[name] = state["value"]


class Values(Mapping[str, Any]):
    """The values at one event; that of a metric which can be asked at any time is computed when it is first read."""

    def __init__(self, table: Table, run: Run, event: Event) -> None:
        self._table, self._run, self._event = table, run, event
        self._computed: set[str] = set()

    def compute(self, name: str) -> None:
        """Compute a metric again."""
        metric = self._table.metrics[name]
        self._computed.add(name)
        try:
            self._table.values[name] = metric.compute(self._run, self._event)
        except Exception as error:
            error.add_note(f"heliograph: in metric {name!r} ({type(metric).__name__}) of the rules")
            raise

    def __getitem__(self, name: str) -> Any:
        if name not in self._computed and self._table.metrics[name].when_read:
            self.compute(name)
        return self._table.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.metrics)

    def __len__(self) -> int:
        return len(self._table.metrics)


def plain(value: Any) -> Any:
    """Return a value as plain types, for a checkpoint; None where it has no such form."""
    try:
        return _plain(value)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    for kind in PLAIN:
        if isinstance(value, kind):  # NumPy's are of these kinds too, but a checkpoint does not hold them
            return kind(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy's, or of torch
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} is not a plain type")


logger = logging.getLogger("heliograph")
SKIPPED, FALSE, TRUE = -1, 0, 1  # what a rule comes to; of several ranks the largest counts


class Judge:
    """A controller in one run.

    Args:
        ready: the controller.
        actions: what it does, by `<operation>.<action>`.

    Attributes:
        ready: the controller.
        counts: how often each trigger has been tolerated.
        is_off: whether an error has switched it off.
    """

    def __init__(self, ready: Ready, actions: Mapping[str, Action]) -> None:
        self.ready = ready
        self._actions = actions
        self.counts = dict.fromkeys((trigger.name for trigger in ready.triggers), 0)
        self.is_off = False
        self._reported: set[str] = set()
        ready.rule.load_state_dict({"draws": 0})

    def judge(self, run: Run, event: Event, trigger: Trigger, values: Values, *, is_final: bool) -> bool:
        """Ask the rule, and act where its patience is over; return whether it acted. For shared ones, a collective.

        Raises:
            RuleError: it cannot be evaluated, or an operation fails, and it says `on_error: raise`.
        """
        outcome, error = self._outcome(values)
        if self.ready.shared and run.engine.world_size > 1:  # before an error leaves: the others wait here
            outcome = int(run.engine.reduce(outcome, "max"))
        if error is not None:
            self._fail(run, error)
        if outcome == SKIPPED:
            return False
        count, acts = counted(self.ready.spec.patience, self.counts[trigger.name], outcome=outcome == TRUE)
        self.counts[trigger.name] = count
        if acts:
            self._act(run, event, trigger, values, is_final=is_final)
        return acts

    def state_dict(self) -> dict[str, Any]:
        """Return what it has counted, and whether it is off."""
        return {
            "settings": self.ready.settings,
            "rule": self.ready.rule.state_dict(),
            "counts": dict(self.counts),
            "is_off": self.is_off,
            "told": sorted(self._reported),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue."""
        self.ready.rule.load_state_dict(state["rule"])
        self.counts |= {name: count for name, count in state["counts"].items() if name in self.counts}
        self.is_off, self._reported = state["is_off"], set(state["told"])

    def __str__(self) -> str:
        spec, file = self.ready.spec, self.ready.file
        line = spec.lines.get("rule", spec.line)
        where = "" if file is None else f" ({file}, line {line})"
        return f"rule {self.ready.name!r}{where}"

    def _outcome(self, values: Values) -> tuple[int, RuleError | None]:
        """Return what the rule comes to, and the error that it comes to it by."""
        if self.is_off:
            return SKIPPED, None
        read = {name: values[name] for name in self.ready.rule.names}
        try:
            return TRUE if self.ready.rule.evaluate(read) else FALSE, None
        except MetricUnavailable as missing:
            self._report_once("unavailable", f"{self} is skipped where a metric has no value: {missing}")
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
        what = "is off for the rest of the run" if self.is_off else "counts as false where it fails"
        note = f"{str(located).removesuffix('.')}; the rule {what}"
        if self._report_once("error", note, logs=not run.report.is_replay):  # a replay prints the notes
            run.note(note)

    def _report_once(self, about: str, text: str, *, logs: bool = True) -> bool:
        """Log a warning, unless one of this kind was logged; return whether it is the first."""
        if about in self._reported:
            return False
        self._reported.add(about)
        if logs:
            logger.warning("%s", text)
        return True


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
