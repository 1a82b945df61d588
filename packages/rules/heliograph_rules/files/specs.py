"""What a rule file says, as Python objects: these can be written instead of a file."""

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
        threshold: how often it is tolerated; 0 never.
        mode: `reset_on_failure`, the times must come in a row; `no_reset_on_failure`, a false one in between does not
            count against them.
    """

    threshold: int = 1
    mode: Mode = "reset_on_failure"


def counted(patience: RulePatience | None, count: int, *, outcome: bool) -> tuple[int, bool]:
    """Return how often a rule is tolerated by now, and whether it acts.

    Args:
        patience: None acts every time.
        count: how often it was tolerated before.
        outcome: what the rule came to.
    """
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
        name: what rules call it.
        kind: its class, or that one's name.
        arguments: the keywords that it is made with.
        line: where it is in its file.
    """

    name: str
    kind: str | type
    arguments: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RuleSpec:
    """One rule: when it is asked, what makes it true, and what is done then.

    Attributes:
        name: unique among the rules.
        triggers: the events at which it is asked, by the names in `docs/rules.md`.
        rule: an expression of the metrics that comes to true or false.
        operations: what to do, in order: `<operation>.<action>`, such as `hfcontrols.should_training_stop`.
        patience: how often it may be true without acting; None acts every time.
        on_error: what happens where it cannot be evaluated: it fails the run (`raise`), is logged once and counts as
            false (`warn`), or is logged and off for the rest (`disable`); None is what the `RuleController` says.
        log_level: the name of the logging level at which it is logged that it acts.
        line: where it is in its file.
        lines: where its rule (`rule`) and each of its triggers and operations are there.
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
    """All rules, and what they are made from.

    Attributes:
        controllers: the rules, in the order in which they are asked.
        metrics: what they read.
        operations: what they run; the one called `hfcontrols` is there anyway.
        file: where they were read from.
    """

    controllers: Sequence[RuleSpec]
    metrics: Sequence[RulePart] = ()
    operations: Sequence[RulePart] = ()
    file: str | None = None
