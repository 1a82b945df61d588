"""Migration from each schema to the present one; the plain types that a state may hold."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from heliograph.core.checkpoint.state.schema import (
    FEW,
    SCHEMA,
    STEPS,
    brief,
    check_plain,
    check_schema,
    check_tree,
    is_older,
    migrate_state,
)
from hypothesis import given
from hypothesis import strategies as st

Make = Callable[..., dict[str, Any]]


def test_there_is_a_step_from_every_schema_to_the_next() -> None:
    assert sorted(STEPS) == list(range(3, SCHEMA))


def test_an_older_schema_becomes_the_present_one(state: Make, older: Make) -> None:
    present = state(3)
    old = older(present)
    before = deepcopy(old)
    migrated, changes = migrate_state(old)
    check_schema(migrated)
    assert repr(dict(sorted(migrated.items()))) == repr(dict(sorted(present.items())))
    assert changes == [f"schema {SCHEMA - 1} to {SCHEMA}: 'place' is called 'data'"]
    assert (is_older(old), is_older(migrated)) == (True, False)
    assert repr(old) == repr(before)


def test_every_step_is_done_in_its_order(state: Make, older: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def migrate(state: dict[str, Any]) -> list[str]:
        state["place"] = state.pop("position")
        return []

    monkeypatch.setitem(STEPS, SCHEMA - 2, migrate)
    old = older(state(3, data={"seed": 5})) | {"schema": SCHEMA - 2}
    old["position"] = old.pop("place")
    migrated, changes = migrate_state(old)
    assert (migrated["schema"], migrated["data"]) == (SCHEMA, {"seed": 5})
    assert changes == [f"schema {SCHEMA - 1} to {SCHEMA}: 'place' is called 'data'"]


def test_the_present_schema_is_left_alone(state: Make) -> None:
    present = state(3)
    migrated, changes = migrate_state(present)
    assert changes == []
    assert migrated == present


@pytest.mark.parametrize("schema", [0, 1, 2, SCHEMA + 1, "1", None])
def test_other_schemas_are_refused(schema: Any, state: Make) -> None:
    with pytest.raises(ValueError, match=f"has schema {schema!r}, this version reads 3 to {SCHEMA}"):
        migrate_state(state(3, schema=schema))


def test_what_lacks_parts_is_refused(state: Make) -> None:
    present = state(3)
    del present["modules"]
    with pytest.raises(ValueError, match=f"says schema {SCHEMA}, but lacks modules"):
        migrate_state(present)


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
