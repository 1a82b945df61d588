"""Replays a recorded run with rules whose operations do nothing, and lists when they would have acted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from heliograph import NotRecorded, Plugin, Run, RunClosed, on
from heliograph.events import Event
from heliograph.spi import describe_error
from heliograph_recorder import Recording, count_times, replay

from .active_rules import ActiveRules
from .base import Action, RuleFired, RuleMetric, RuleOperation
from .controller import RuleController
from .errors import RuleError, show
from .files.builder import Blueprint

SHOWN = 20  # acts per rule that are printed


@dataclass(frozen=True)
class Act:
    """A rule that would have acted.

    Attributes:
        attempt: the attempt of the run, from 1.
        epoch: the finished epochs of the attempt.
        batch: the consumed micro-batches of the epoch.
        step: the optimizer steps.
        fired: the rule, its trigger, its operations, and the values that it read.
        is_after_end: whether a rule would have stopped the run before.
    """

    attempt: int
    epoch: int
    batch: int
    step: int
    fired: RuleFired
    is_after_end: bool

    def __str__(self) -> str:
        fired = self.fired
        read = ", ".join(f"{name} = {show(value)}" for name, value in fired.metrics.items()) or "no metric"
        place = f"attempt {self.attempt}, epoch {self.epoch} batch {self.batch} step {self.step}, {fired.trigger}"
        end = " (after a stop)" if self.is_after_end else ""
        return f"{place}{end}: {', '.join(fired.operations)}; {read}"


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run; `str` returns a summary.

    Attributes:
        rules: the acts of each rule.
        unavailable: for each unavailable metric, the missing value.
        cut_short: why the evaluation of the rules ended early.
        notes: the notes of the replay.
    """

    rules: Mapping[str, list[Act]]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    cut_short: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = []
        never = "would not have acted before the dry run ended" if self.cut_short else "would never have acted"
        for name, acts in self.rules.items():
            lines.append(f"{name}: {f'would have acted {count_times(len(acts))}' if acts else never}")
            lines += [f"  {act}" for act in acts[:SHOWN]]
            lines += [f"  and {len(acts) - SHOWN} more"] * (len(acts) > SHOWN)
        lines += [f"metric {name} was not available: {text}" for name, text in self.unavailable.items()]
        lines += [f"the dry run ended there: {text}" for text in self.cut_short]
        return "\n".join([*lines, *self.notes])


def dry_run(rules: RuleController, recording: Recording) -> DryRun:
    """Return when rules would have acted in a recorded run; the rules themselves are not changed."""
    watched = _Watched(rules)
    replayed = replay(recording, [watched, notebook := _Notebook(rules.plan)])
    return DryRun(
        rules={ready.name: notebook.acts[ready.name] for ready in rules.plan.controllers},
        unavailable=watched.unavailable,
        cut_short=tuple(text for texts in (replayed.unheld, replayed.failed) for text in texts.get(watched.name, ())),
        notes=tuple(replayed.notes),
    )


class _Watched(RuleController):
    """The rules under test: metrics without recorded data have no value, and operations do nothing."""

    def __init__(self, rules: RuleController) -> None:
        self.unavailable: dict[str, str] = {}
        plan = rules.plan
        self.plan = replace(
            plan,
            metrics={name: partial(_LenientMetric, make, self.unavailable) for name, make in plan.metrics.items()},
            operations={name: partial(_IdleOperation, make) for name, make in plan.operations.items()},
            controllers=tuple(replace(ready, rule=copy(ready.rule), shared=False) for ready in plan.controllers),
            asks_ranks=False,
        )
        self.name, self.ignores = f"dry_run_of_{rules.name}", rules.ignores  # the recorded rules have acted already
        self._active, self._changes = ActiveRules(self.plan), []


class _LenientMetric(RuleMetric):
    """A metric that is unavailable if it needs data that was not recorded."""

    def __init__(self, make: Callable[[], RuleMetric], unavailable: dict[str, str]) -> None:
        self._metric, self._unavailable = make(), unavailable
        super().__init__(self._metric.name)
        self.events, self.when_read, self.parts = self._metric.events, self._metric.when_read, self._metric.parts

    def compute(self, run: Run, event: Event) -> Any:
        try:
            return self._metric.compute(run, event)
        except NotRecorded as missing:
            self._unavailable.setdefault(self.name, str(missing))
            return None
        except Exception as error:
            metric = f"metric {self.name!r} ({type(self._metric).__name__})"  # a replay reports no notes of errors
            raise RuleError(f"in {metric} of the rules: {describe_error(error)}") from error

    def state_dict(self) -> dict[str, Any]:
        return self._metric.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._metric.load_state_dict(state)


class _IdleOperation(RuleOperation):
    def __init__(self, make: Callable[[], RuleOperation]) -> None:
        self._operation = make()
        super().__init__(self._operation.name)

    def actions(self) -> dict[str, Action]:
        return dict.fromkeys(self._operation.actions(), lambda _run, _firing: None)


class _Notebook(Plugin):
    """Records the acts of the rules."""

    def __init__(self, plan: Blueprint) -> None:
        self.acts: dict[str, list[Act]] = {ready.name: [] for ready in plan.controllers}
        self._stopping = {ready.name for ready in plan.controllers if "stop" in ready.asks}
        self._attempt = 1
        self._end: tuple[int, int] | None = None  # attempt and batch of the first stop

    @on(RuleFired)
    def record_act(self, run: Run, event: RuleFired) -> None:
        place = run.progress
        here = (self._attempt, place.batches)
        is_after_end = self._end is not None and here > self._end
        act = Act(self._attempt, place.epoch, place.batch, place.steps, event, is_after_end)
        self.acts[event.controller].append(act)
        if self._end is None and event.controller in self._stopping:
            self._end = here

    @on(RunClosed)
    def count_attempt(self, run: Run, event: RunClosed) -> None:
        self._attempt += 1
