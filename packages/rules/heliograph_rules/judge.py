"""One controller at work in a run: it asks its rule, is patient, and acts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from heliograph import Run
from heliograph.events import Event

from .base import Action, RuleFiring
from .errors import MetricUnavailable, RuleError
from .files.blueprint import Ready
from .files.triggers import Trigger
from .fired import RuleFired
from .patience import counted
from .table import Values
from .text import show

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
