"""Patience: how often a rule must be true before it acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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
