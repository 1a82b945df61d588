"""Rules at random; `make torture` tries twenty times as many, and with a clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from heliograph.packages.tests.torture import rules
from heliograph.packages.tests.torture.rule_guard import few_calls
from hypothesis import given, settings


def counted(evaluated: Callable[[], str]) -> str:
    """Evaluate a rule, and check how much it does."""
    with few_calls():
        return evaluated()


def test_no_rule_does_what_none_may_do() -> None:
    values = rules.values()
    ends = set[str]()

    @settings(rules.SETTINGS, max_examples=1000, derandomize=True)
    @given(rules.texts())
    def each(text: str) -> None:
        ends.add(rules.outcome(text, values, counted))

    each()
    errors = {"RuleTypeError", "RuleLimitError", "RuleEvaluationError", "MetricUnavailable"}
    refused = {f"refused with Rule{kind}Error" for kind in ("Syntax", "Name", "Type", "Limit")}
    assert ends == {"True", "False"} | errors | refused  # so every end of the language is reached


def test_the_torture_counts_what_came_of_its_rules() -> None:
    ends = rules.torture_rules(50, 1)
    assert ends.total() == 50
    assert ends["True"] > 0


def test_the_torture_notices_a_rule_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_SECONDS", 0.0)
    with pytest.raises(AssertionError, match="0 ms, and 0"):
        rules.in_time(lambda: str(sum(range(1000))))
