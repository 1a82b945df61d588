"""Errors of rules say where, can be caught as the ancestor's were, and survive a trip to another process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from heliograph.packages.tests.facts import assert_facts
from heliograph_rules.errors import (
    MetricUnavailable,
    RuleError,
    RuleEvaluationError,
    RuleKeyError,
    RuleLimitError,
    RuleNameError,
    RuleSyntaxError,
    RuleTypeError,
)

KINDS = [RuleError, RuleSyntaxError, RuleNameError, RuleTypeError, RuleKeyError, RuleLimitError, RuleEvaluationError]


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({}, ("it is wrong",)),
        ({"column": 3}, ("column 3", ": it is wrong")),
        ({"file": "a.yaml", "line": 2}, ("a.yaml, line 2", ": it is wrong")),
        ({"controller": "x"}, ("controller 'x'", ": it is wrong")),
        ({"line": 2, "controller": "x", "column": 3}, ("line 2, controller 'x'", "column 3", ": it is wrong")),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_is_known(kind: type[RuleError], places: dict[str, Any], said: tuple[str, ...]) -> None:
    assert_facts(kind("it is wrong", **places), *said)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_says_more_and_keeps_what_it_had(kind: type[RuleError]) -> None:
    error = kind("it is wrong", column=3)
    error.__cause__ = KeyError("a")
    copy = error.located(file="a.yaml", line=2).located(controller="x")
    assert type(copy) is kind
    assert copy.__cause__ is error.__cause__
    assert (copy.problem, copy.column, copy.file, copy.line, copy.controller) == ("it is wrong", 3, "a.yaml", 2, "x")
    again = pickle.loads(pickle.dumps(copy))
    assert (type(again), str(again), vars(again)) == (kind, str(copy), vars(copy))


@pytest.mark.parametrize(
    ("kind", "old"), [(RuleNameError, NameError), (RuleTypeError, TypeError), (RuleKeyError, KeyError)]
)
def test_they_are_what_the_ancestor_raised(kind: type[RuleError], old: type[Exception]) -> None:
    assert issubclass(kind, old)
    assert issubclass(kind, ValueError)


def test_an_unavailable_metric_is_named() -> None:
    error = MetricUnavailable("loss")
    assert_facts(str(pickle.loads(pickle.dumps(error))), "not available yet", "loss")
    assert not isinstance(error, ValueError)
