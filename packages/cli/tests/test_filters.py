"""Filters in a configuration, there and back."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph.plugins.conditions import Between
from heliograph.plugins.filters import At, Every, Filter, Once
from heliograph_cli.parser import filter_of, plain_form

FORMS: list[tuple[dict[str, Any], type[Filter], str]] = [
    ({"epochs": 1}, Every, "every epoch"),
    ({"steps": 100, "after": 1000}, Every, "every 100 steps after 1000"),
    ({"fraction": 0.5}, Every, "every 0.5 of the run"),
    ({"steps": [10, 100]}, At, "at 10, 100 steps"),
    ({"Between": {"epochs": [2, 5]}}, Between, "between 2, 5 epochs"),
    ({"Once": {}}, Once, "once 1 emissions"),
]


@pytest.mark.parametrize(("form", "kind", "text"), FORMS)
def test_a_form_makes_the_filter_and_the_filter_the_form(form: dict[str, Any], kind: type[Filter], text: str) -> None:
    made = filter_of(form)
    assert type(made) is kind
    assert str(made) == text
    assert plain_form(made) == form


@pytest.mark.parametrize("form", [3, "epochs", {}, [1], {"Between": 3}, {"Once": {}, "Between": {"epochs": [2, 5]}}])
def test_another_form_is_refused(form: object) -> None:
    with pytest.raises(ValueError, match=r"\{epochs: 1\} for Every\(epochs=1\)"):
        filter_of(form)


def test_a_counter_that_there_is_not_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'steps'"):
        filter_of({"step": 1})
