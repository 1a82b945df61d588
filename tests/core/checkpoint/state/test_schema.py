"""The plain types that a state may hold."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph.core.checkpoint.state.schema import (
    FEW,
    brief,
    check_plain,
    check_tree,
)
from hypothesis import given
from hypothesis import strategies as st

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
TREES = st.recursive(
    LEAVES,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each, max_size=4) | st.tuples(each),
    max_leaves=20,
)


def doubled(times: int, kind: type = list) -> Any:
    """Return containers of two containers that are the same, so many levels of them."""
    value: Any = kind()
    for _ in range(times):
        value = kind((value, value)) if kind in (list, tuple) else {"a": value, "b": value}
    return value


@given(TREES)
def test_every_tree_of_plain_values_is_plain(value: Any) -> None:
    check_plain(value, "state")
    check_tree(value, "state")
    check_plain([value] * 3, "state")


@pytest.mark.parametrize(
    "value", [{1, 2}, {"a": [{1}]}, {(1, object()): 1}, [0, (object(),)], {"a": {"b": complex(1)}}, range(3)]
)
def test_what_is_not_plain_is_named_by_its_place(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^(a key of )?state.* is a builtins\.(set|object|complex|range): a checkpoint"
    ):
        check_plain(value, "state")


@pytest.mark.parametrize("check", [check_plain, check_tree])
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_lists_that_are_shared_again_and_again(check: Any, kind: type) -> None:
    check(doubled(10, kind), "state")
    with pytest.raises(ValueError, match=r"^state holds the same lists or dicts again and again, [0-9,]+ items in all"):
        check(doubled(60, kind), "state")


@pytest.mark.parametrize("check", [check_plain, check_tree])
def test_what_is_nested_too_deep_or_in_itself(check: Any) -> None:
    deep: list[Any] = []
    for _ in range(101):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^state\[0\]\[0\].*is nested more than 100 deep"):
        check(deep, "state")
    own: dict[str, Any] = {}
    own["a"] = [own]
    with pytest.raises(ValueError, match=r"^state\['a'\]\[0\] holds itself"):
        check(own, "state")


def test_a_long_list_is_none_of_these() -> None:
    check_tree([0] * (FEW + 1), "state")
    check_tree([[1, 2, 3]] * 1000, "state")


def test_in_short() -> None:
    assert brief("schema") == "'schema'"
    assert brief("x" * 1000) == "'" + "x" * 79
    assert brief(doubled(60)) == "a list"
