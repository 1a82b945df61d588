"""The event of a rule that acted."""

from __future__ import annotations

from typing import Any

from heliograph.events import Event


class RuleFired(Event):
    """The rule of `controller` was true on `trigger`, and it acted.

    `operations` are those that ran, without one that failed and those after it; `metrics` are those that it reads.
    """

    controller: str
    trigger: str
    rule: str
    operations: tuple[str, ...]
    metrics: dict[str, Any]
