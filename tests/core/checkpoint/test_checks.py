"""The plain types that a state may hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.checkpoint.checks import brief, check_plain, check_tree, with_numbers
from heliograph.core.checkpoint.schema import FEW
from heliograph.core.loop_state import as_plain
from hypothesis import given
from hypothesis import strategies as st

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(min_size=1, max_size=3)
)
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
    with pytest.raises(TypeError, match=r"^(a key of )?state.*builtins\.(set|object|complex|range)"):
        check_plain(value, "state")


@pytest.mark.parametrize("check", [check_plain, check_tree])
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_lists_that_are_shared_again_and_again(check: Any, kind: type) -> None:
    check(doubled(10, kind), "state")
    with pytest.raises(ValueError, match=r"again and again, [0-9,]+"):
        check(doubled(60, kind), "state")


@pytest.mark.parametrize("check", [check_plain, check_tree])
def test_what_is_nested_too_deep_or_in_itself(check: Any) -> None:
    deep: list[Any] = []
    for _ in range(101):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^state\[0\]\[0\].*is nested more"):
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


NUMBERS = [
    np.float64(0.1),
    np.float32(0.1),
    np.float16(0.1),
    np.float32("inf"),
    np.int64(-3),
    np.uint8(3),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.complex128(1 + 2j),
    1 + 2j,
    np.array(0.1, dtype=np.float32),
    np.array(7),
    np.array(True),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda each: f"{type(each).__name__} {getattr(each, 'dtype', '')}")
def test_numbers_of_numpy_are_stored_as_plain_ones_and_come_back_with_their_type(number: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "a": [1, (number, {"b": number})],
        "c": OrderedDict(d=number),
        "n": Counter(e=1),
        "t": torch.ones(2),
    }
    plain, types = as_plain(state, "state")
    check_plain(plain, "state")
    torch.save((plain, types), tmp_path / "state.pth")
    loaded, loaded_types = torch.load(tmp_path / "state.pth", weights_only=True)
    stored = loaded["a"][1][0]
    assert (complex(*stored) if isinstance(stored, list) else stored) == number
    restored = with_numbers(loaded, loaded_types)
    for found in (restored["a"][1][0], restored["a"][1][1]["b"], restored["c"]["d"]):
        assert type(found) is type(number)
        assert getattr(found, "dtype", None) == getattr(number, "dtype", None)
        assert found == number
    assert (type(restored["c"]), restored["n"], type(restored["a"][1])) == (OrderedDict, Counter(e=1), tuple)
    assert state["a"][1][0] is number  # unchanged


def test_a_state_without_such_numbers_is_returned_as_it_is() -> None:
    state = {"a": [1, {"b": 2.0}], "t": torch.ones(2)}
    assert as_plain(state, "state") == (state, None)
    assert as_plain(state, "state")[0] is state
    mixed: dict[str, Any] = {"weights": OrderedDict(t=torch.ones(2)), "rate": np.float32(1)}
    assert as_plain(mixed, "state")[0]["weights"] is mixed["weights"]


def test_keys_and_texts_of_numpy_become_plain() -> None:
    plain, _ = as_plain({np.int64(3): np.str_("a"), "b": np.float32(2)}, "state")
    assert [(type(key), type(value)) for key, value in plain.items()] == [(int, str), (str, float)]


@pytest.mark.parametrize(
    "value", [np.ones(2), np.ones(1), np.datetime64("2026-01-01"), np.longdouble(1), np.array({1})]
)
def test_what_is_no_number_is_still_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^state\['a'\]"):
        as_plain({"a": value}, "state")


@pytest.mark.parametrize("name", ["object", "V9", "datetime64[s]"])
def test_a_file_names_types_of_numbers_only(name: str) -> None:
    with pytest.raises(ValueError, match="type of a number"):
        with_numbers({"a": 1}, {"a": name})
