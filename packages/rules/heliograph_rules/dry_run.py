"""When rules would have acted in a recorded run: their metrics read the recording, and their operations do nothing."""

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
from .base import Action, RuleFired, RuleFiring, RuleMetric, RuleOperation
from .controller import RuleController
from .errors import RuleError, show
from .files.builder import Blueprint

SHOWN = 20  # acts of one rule, in full


@dataclass(frozen=True)
class Act:
    """A rule that would have acted.

    Attributes:
        attempt: in which attempt of the run, from 1.
        epoch: finished epochs there.
        batch: micro-batches consumed in the current one.
        step: optimizer steps done.
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
    """What a dry run found; `str` gives a summary.

    Attributes:
        rules: every rule with what it would have done.
        unheld: by metric, what it needs and the recording does not hold.
        cut_short: where, and why, the rules could be asked no more.
        notes: what else there is to know.
    """

    rules: Mapping[str, list[Act]]
    unheld: Mapping[str, str] = field(default_factory=dict)
    cut_short: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = []
        never = "would not have acted as far as it was asked" if self.cut_short else "would never have acted"
        for name, acts in self.rules.items():
            lines.append(f"{name}: {f'would have acted {count_times(len(acts))}' if acts else never}")
            lines += [f"  {act}" for act in acts[:SHOWN]]
            lines += [f"  and {len(acts) - SHOWN} more"] * (len(acts) > SHOWN)
        lines += [f"metric {name} was not available: {text}" for name, text in self.unheld.items()]
        lines += [f"the rules were not asked from there on: {text}" for text in self.cut_short]
        return "\n".join([*lines, *self.notes])


def dry_run(rules: RuleController, recording: Recording) -> DryRun:
    """Return when rules would have acted in a recorded run, which continues as it did.

    Args:
        rules: the rules; they are left as they are.
        recording: the run.
    """
    watched = _Watched(rules)
    replayed = replay(recording, [watched, notebook := _Notebook(rules.plan)])
    return DryRun(
        rules={ready.name: notebook.acts[ready.name] for ready in rules.plan.controllers},
        unheld=watched.unheld,
        cut_short=tuple(text for texts in (replayed.unheld, replayed.failed) for text in texts.get(watched.name, ())),
        notes=replayed.notes,
    )


class _Watched(RuleController):
    """Rules whose metrics have no value where the recording holds none, and whose operations do nothing."""

    def __init__(self, rules: RuleController) -> None:
        self.unheld: dict[str, str] = {}
        plan = rules.plan
        self.plan = replace(
            plan,
            metrics={name: partial(_LenientMetric, make, self.unheld) for name, make in plan.metrics.items()},
            operations={name: partial(_IdleOperation, make) for name, make in plan.operations.items()},
            controllers=tuple(replace(each, rule=copy(each.rule), shared=False) for each in plan.controllers),
            asks_ranks=False,
        )
        self.name, self.ignores = f"dry_run_of_{rules.name}", rules.ignores  # the run's own rules did as they did
        self._active, self._news = ActiveRules(self.plan), []


class _LenientMetric(RuleMetric):
    """A metric that is not available where it needs what is not recorded."""

    def __init__(self, make: Callable[[], RuleMetric], unheld: dict[str, str]) -> None:
        self._metric, self._unheld = make(), unheld
        super().__init__(self._metric.name)
        self.events, self.when_read, self.parts = self._metric.events, self._metric.when_read, self._metric.parts

    def compute(self, run: Run, event: Event) -> Any:
        """Return the value, or None.

        Raises:
            RuleError: the metric failed; says which, since a replay reports an error, and not its notes.
        """
        try:
            return self._metric.compute(run, event)
        except NotRecorded as missing:
            self._unheld.setdefault(self.name, str(missing))
            return None
        except Exception as error:
            where = f"in metric {self.name!r} ({type(self._metric).__name__}) of the rules"
            raise RuleError(f"{where}: {describe_error(error)}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return the metric's."""
        return self._metric.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the metric."""
        self._metric.load_state_dict(state)


class _IdleOperation(RuleOperation):
    """An operation whose actions do nothing."""

    def __init__(self, make: Callable[[], RuleOperation]) -> None:
        self._operation = make()
        super().__init__(self._operation.name)

    def actions(self) -> dict[str, Action]:
        """Return the names of the actions; they do nothing."""
        return dict.fromkeys(self._operation.actions(), _do_nothing)


def _do_nothing(_run: Run, _firing: RuleFiring) -> None:
    """Do nothing."""


class _Notebook(Plugin):
    """Writes down which rules act."""

    def __init__(self, plan: Blueprint) -> None:
        self.acts: dict[str, list[Act]] = {ready.name: [] for ready in plan.controllers}
        self._stopping = {ready.name for ready in plan.controllers if "stop" in ready.asks}
        self._attempt = 1
        self._end: tuple[int, int] | None = None  # the attempt and the batch after which a rule would have stopped it

    @on(RuleFired)
    def write_down(self, run: Run, event: RuleFired) -> None:
        """Write a rule's act down."""
        place = run.progress
        here = (self._attempt, place.batches)
        is_after_end = self._end is not None and here > self._end
        act = Act(self._attempt, place.epoch, place.batch, place.steps, event, is_after_end)
        self.acts[event.controller].append(act)
        if self._end is None and event.controller in self._stopping:
            self._end = here

    @on(RunClosed)
    def turn_over(self, run: Run, event: RunClosed) -> None:
        """Begin the next attempt."""
        self._attempt += 1
