"""Rules as Python objects: the parsed content of a rule file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Mode = Literal["reset_on_failure", "no_reset_on_failure"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class RulePatience:
    """How often a rule may be true without acting: with a threshold of N it acts every (N+1)-th time.

    Attributes:
        threshold: how often a true rule does not act; 0 acts every time.
        mode: `reset_on_failure` counts consecutive times; `no_reset_on_failure` does not reset the count if the rule is
            false.
    """

    threshold: int = 1
    mode: Mode = "reset_on_failure"


def count_true(patience: RulePatience | None, count: int, *, outcome: bool) -> tuple[int, bool]:
    """Return the new count of true outcomes without an action, and whether the rule acts now."""
    if patience is None:
        return 0, outcome
    if not outcome:
        return (0 if patience.mode == "reset_on_failure" else count), False
    return (0, True) if count >= patience.threshold else (count + 1, False)


OnError = Literal["raise", "warn", "disable"]
ON_ERROR: tuple[OnError, ...] = get_args(OnError)


@dataclass(frozen=True)
class RulePart:
    """A metric that rules read, or an operation that they run.

    Attributes:
        name: the name that rules use.
        kind: the class, or its name.
        arguments: the keywords of the class.
        line: the line in the file.
    """

    name: str
    kind: str | type
    arguments: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RuleSpec:
    """One rule: its triggers, its condition and its operations.

    Attributes:
        name: unique among the rules.
        triggers: the events at which the rule is evaluated, by the names in `docs/packages/rules.md`.
        rule: an expression of the metrics that is true or false.
        operations: the actions in order, as `<operation>.<action>`, for example `hfcontrols.should_training_stop`.
        patience: how often the rule may be true without acting; None acts every time.
        on_error: what an error in the evaluation does: `raise` fails the run, `warn` logs once and counts as false,
            `disable` logs and switches the rule off. None takes the setting of the `RuleController`.
        log_level: the name of the logging level for the line that says that the rule acts.
        line: the line in the file.
        lines: the lines of the rule (`rule`) and of each trigger and operation.
    """

    name: str
    triggers: Sequence[str]
    rule: str | bool
    operations: Sequence[str]
    patience: RulePatience | None = None
    on_error: OnError | None = None
    log_level: str = "debug"
    line: int | None = field(default=None, compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RuleSet:
    """All rules of a file with their metrics and operations.

    Attributes:
        controllers: the rules in the order of their evaluation.
        metrics: the metrics that they read.
        operations: the operations that they run; `hfcontrols` and `control` always exist.
        file: the rule file.
    """

    controllers: Sequence[RuleSpec]
    metrics: Sequence[RulePart] = ()
    operations: Sequence[RulePart] = ()
    file: str | None = None
