"""RulePatience: the exact counting of the ancestor."""

from __future__ import annotations

import pytest
from heliograph_rules.files.specs import Mode, RulePatience, count_true
from hypothesis import given
from hypothesis import strategies as st


def acts(patience: RulePatience | None, outcomes: list[bool]) -> list[int]:
    """Return the numbers, from 1, of the outcomes at which a rule acts."""
    count, acting = 0, []
    for number, outcome in enumerate(outcomes, 1):
        count, does = count_true(patience, count, outcome=outcome)
        acting += [number] * does
    return acting


@pytest.mark.parametrize(
    ("patience", "expected"),
    [
        (None, [1, 2, 3, 4, 5, 6]),
        (RulePatience(), [2, 4, 6]),
        (RulePatience(0), [1, 2, 3, 4, 5, 6]),
        (RulePatience(2), [3, 6]),
        (RulePatience(5), [6]),
        (RulePatience(6), []),
    ],
    ids=["none", "default", "zero", "two", "five", "six"],
)
def test_a_threshold_of_n_acts_at_every_n_plus_first_time(patience: RulePatience | None, expected: list[int]) -> None:
    assert acts(patience, [True] * 6) == expected


@pytest.mark.parametrize(("mode", "expected"), [("reset_on_failure", [6]), ("no_reset_on_failure", [4])])
def test_a_false_outcome_resets_in_one_mode_only(mode: Mode, expected: list[int]) -> None:
    assert acts(RulePatience(2, mode), [True, True, False, True, True, True]) == expected


@given(st.integers(0, 5), st.lists(st.booleans()))
def test_without_reset_only_the_true_ones_count(threshold: int, outcomes: list[bool]) -> None:
    numbers = [number for number, outcome in enumerate(outcomes, 1) if outcome]
    assert acts(RulePatience(threshold, "no_reset_on_failure"), outcomes) == numbers[threshold :: threshold + 1]


@given(st.integers(0, 5), st.lists(st.booleans()))
def test_with_reset_it_acts_after_so_many_true_ones_in_a_row(threshold: int, outcomes: list[bool]) -> None:
    expected, row = [], 0
    for number, outcome in enumerate(outcomes, 1):
        row = row + 1 if outcome else 0
        if outcome and row % (threshold + 1) == 0:
            expected.append(number)
    assert acts(RulePatience(threshold), outcomes) == expected
