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


def test_plain_values_and_what_holds_them_are_not_given_to_deepcopy(monkeypatch: pytest.MonkeyPatch) -> None:
    given_to = list[Any]()

    def deepcopy(state: Any, memo: dict[int, Any]) -> str:
        given_to.append(state)
        return "copy"

    monkeypatch.setattr(states, "deepcopy", deepcopy)
    weight = torch.zeros(2)
    copy = copied({"python": [3, [1] * 625, None], "mixed": [1, {"a": b"c"}, weight], 2: ("b", 1)})

    assert [id(weight), ("b", 1)] == [id(given_to[0]), given_to[1]]
    assert copy == {"python": [3, [1] * 625, None], "mixed": [1, {"a": b"c"}, "copy"], 2: "copy"}
