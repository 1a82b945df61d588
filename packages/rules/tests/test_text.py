"""Values in sentences: short, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph_rules.errors import RuleError, show
from heliograph_rules.metrics.ancestors import EvalMetrics
from heliograph_rules.metrics.history import HistoryBasedMetric
from heliograph_rules.operations.log_control import LogControl
from heliograph_rules.operations.requests import CallFunction, ScaleLearningRate


def giant() -> list[Any]:
    """Return what a file of a few lines can make with anchors: nine lists of the same nine lists of ..."""
    made: list[Any] = ["x"] * 9
    for _ in range(20):
        made = [made] * 9
    return made


def test_what_is_short_is_shown_as_python_writes_it() -> None:
    shown = {"a": [1, 2.5, None], "b": "text"}
    assert show(shown) == repr(shown)


def test_what_is_long_is_shortened() -> None:
    assert len(show("x" * 10**6)) == 100
    assert len(show(giant())) < 2000


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        *[(HistoryBasedMetric, "window_size"), (EvalMetrics, "source_event"), (LogControl, "log_format")],
        *[(CallFunction, "function"), (ScaleLearningRate, "factor")],
    ],
    ids=["window_size", "source_event", "log_format", "function", "factor"],
)
def test_arguments_of_the_wrong_type_are_reported_shortened(kind: Any, argument: str) -> None:
    with pytest.raises(RuleError) as caught:
        kind("it", **{argument: giant()})
    assert len(str(caught.value)) < 2500


def test_a_level_and_a_minimum_of_the_wrong_type_are_reported_shortened() -> None:
    with pytest.raises(RuleError, match="log_level"):
        LogControl("it", "x", giant())  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="minimum must be"):
        ScaleLearningRate("it", 0.5, giant())  # type: ignore[arg-type]
