"""What comes of a rule file that was checked: all that a run needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from heliograph.events import Event

from ..base import RuleMetric, RuleOperation
from ..language.rule import Rule
from ..operations.functions import Function
from .specs import OnError, RuleSpec
from .triggers import Trigger


@dataclass(frozen=True)
class Given:
    """What a `RuleController` is given besides its rules.

    Attributes:
        metrics: classes that the rules may name.
        operations: classes that they may name.
        functions: functions that they may name.
        on_error: what rules do that do not say so themselves.
    """

    metrics: tuple[type[RuleMetric], ...] = ()
    operations: tuple[type[RuleOperation], ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)
    on_error: OnError = "warn"


@dataclass(frozen=True)
class Ready:
    """A controller that was checked.

    Attributes:
        spec: as it is in the file.
        file: the file.
        rule: its rule, compiled.
        triggers: its moments.
        actions: what it does, as (operation, action).
        level: the logging level at which it is logged that it acts.
        on_error: what a failure of it leads to.
        shared: whether all ranks must agree upon it.
        waits_for: what, where it is due at an epoch's end, has new values of what the rule reads.
        asks: what its actions ask the loop for.
    """

    spec: RuleSpec
    file: str | None
    rule: Rule
    triggers: tuple[Trigger, ...]
    actions: tuple[tuple[str, str], ...]
    level: int
    on_error: OnError
    shared: bool
    waits_for: frozenset[type[Event]]
    asks: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def settings(self) -> str:
        """Everything that it acts by, as one line: where this differs, it is another rule."""
        spec, patience = self.spec, self.spec.patience
        patient = "" if patience is None else f" after {patience.threshold}, {patience.mode}"
        return (
            f"{', '.join(spec.triggers)}: {' '.join(self.rule.text.split())} -> {', '.join(spec.operations)}{patient}"
        )


@dataclass(frozen=True)
class Blueprint:
    """All rules of a file.

    Attributes:
        file: the file.
        metrics: makers, by the metrics' names: one is made for every run.
        operations: makers, by the operations' names.
        controllers: in the order of the file.
        events: what must be handled.
        asks: what the rules ask the loop for.
        needs: what some plugin must ask for, or a rule would never be asked; and the data that rules ask to validate.
        asks_ranks: whether several ranks agree on what is due; else this one's word counts.
    """

    file: str | None
    metrics: Mapping[str, Callable[[], RuleMetric]]
    operations: Mapping[str, Callable[[], RuleOperation]]
    controllers: tuple[Ready, ...]
    events: frozenset[type[Event]]
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    asks_ranks: bool = True
