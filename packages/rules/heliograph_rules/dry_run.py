"""Replays a recorded run with rules whose operations do nothing, and lists when they would have acted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heliograph import Plugin, Run, RunClosed, on
from heliograph_recorder import Recording, count_times, replay

from .active_rules import ActiveRules
from .base import RuleFired
from .controller import RuleController
from .errors import show
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
    unrecorded: dict[str, str] = {}
    watched = _Watched(rules, unrecorded)
    replayed = replay(recording, [watched, notebook := _Notebook(rules.plan)])
    return DryRun(
        rules={ready.name: notebook.acts[ready.name] for ready in rules.plan.controllers},
        unavailable=unrecorded,
        cut_short=tuple(text for texts in (replayed.unheld, replayed.failed) for text in texts.get(watched.name, ())),
        notes=tuple(replayed.notes),
    )


class _Watched(RuleController):
    """The rules under test: metrics without recorded data have no value, and operations do nothing."""

    def __init__(self, rules: RuleController, unrecorded: dict[str, str]) -> None:
        self.plan = replace(rules.plan, unrecorded=unrecorded)
        self.name, self.ignores = f"dry_run_of_{rules.name}", rules.ignores  # the recorded rules have acted already
        self._active, self._changes = ActiveRules(self.plan), []


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
