"""Copies of states: equal, apart, and shared where the state shares."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph.plugins import states
from heliograph.plugins.states import copied
from hypothesis import given
from hypothesis import strategies as st

TREES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each, max_size=4) | st.tuples(each),
    max_leaves=20,
)


@given(TREES)
def test_a_copy_is_equal_and_apart(state: Any) -> None:
    before, copy = deepcopy(state), copied(state)
    assert copy == state

    def spoil(value: Any) -> None:
        for each in value.values() if type(value) is dict else value if type(value) in (list, tuple) else ():
            spoil(each)
        if type(value) in (dict, list):
            value.clear()

    spoil(copy)
    assert state == before


def test_what_is_shared_stays_shared_and_what_holds_itself_ends() -> None:
    numbers, weight = [1, 2, 3], torch.zeros(2)
    state: dict[str, Any] = {"a": numbers, "b": (numbers, [weight]), "weight": weight}
    state["own"] = state
    copy = copied(state)

    assert copy["a"] is copy["b"][0] is not numbers
    assert copy["weight"] is copy["b"][1][0] is not weight
    assert copy["own"] is copy


def test_long_lists_are_not_copied_number_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    memos: list[dict[int, Any]] = []
    monkeypatch.setattr(states, "deepcopy", lambda state, memo: memos.append(memo))
    python, numpy, mixed = [1] * 625, [2] * 624, [1, [2]]
    copied({"python": [3, python, None], "numpy": {"keys": numpy}, "mixed": mixed})

    assert {id(python), id(numpy), id(mixed[1])} == set(memos[0])
    assert memos[0][id(python)] == python
