"""Format strings that reach nothing but plain data, and never fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from heliograph_rules.errors import RuleError, RuleSyntaxError
from heliograph_rules.operations.log_control import LogFormat
from hypothesis import given
from hypothesis import strategies as st

STATE = {"epoch": 1.5, "log_history": [{"loss": 2.0}, {"loss": 1.0}], "name": "a", 3: "three", "none": None}
VALUES: dict[str, Any] = {"state": STATE, "rank": 2, "text": "word", "object": SimpleNamespace(secret="hidden")}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("", ""),
        ("no field, {{braces}}", "no field, {braces}"),
        ("Epoch: {state[epoch]:.0f}, Rank: {rank}", "Epoch: 2, Rank: 2"),
        ("{state.epoch:8.3f}|{text!r:>10}|{text:*^9}", "   1.500|    'word'|**word***"),
        ("{state[log_history][0][loss]} {state.log_history[-1].loss}", "2.0 1.0"),
        ("{state[3]} {rank:,} {rank:+03d} {rank:%}", "three 2 +02 200.000000%"),
        ("{state[none]}", "None"),
        ("{state[foo]}", "<missing: state[foo]>"),
        ("{state[log_history][7]}", "<missing: state[log_history][7]>"),
        ("{state[log_history][loss]}", "<missing: state[log_history][loss]>"),
        ("{unknown}", "<missing: unknown>"),
        ("{rank[0]}", "<missing: rank[0]>"),
        ("{state[none][epoch]}", "<missing: state[none][epoch]>"),
        ("{object.secret}", "<missing: object.secret>"),
        ("{object.__class__}", "<missing: object.__class__>"),
        ("{object[__class__]}", "<missing: object[__class__]>"),
        ("{rank.real}", "<missing: rank.real>"),
        ("{state.__class__.__mro__}", "<missing: state.__class__.__mro__>"),
        ("{state.keys}", "<missing: state.keys>"),
        ("{state[none]:.0f} {text:.0f} {state[foo]:.0f}", "None word <missing: state[foo]>"),
    ],
)
def test_a_format_is_filled_in(text: str, filled: str) -> None:
    assert LogFormat(text).fill(VALUES) == filled


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is invalid: Single '{'"),
        ("a } b", "is invalid: Single '}'"),
        ("{}", "field {}"),
        ("{0}", "field {0}"),
        ("{state[}", "is invalid"),
        ("{state[]}", "field {state[]}"),
        ("{state..epoch}", "field {state..epoch}"),
        ("{state[epoch]x}", "field {state[epoch]x}"),
        ("{a b}", "field {a b}"),
        ("{rank!x}", "field {rank}"),
        ("{rank:{state[epoch]}}", "field {rank}"),
    ],
)
def test_a_text_that_is_no_format_is_refused(text: str, problem: str) -> None:
    with pytest.raises(RuleSyntaxError) as caught:
        LogFormat(text)
    assert problem in str(caught.value)


def test_the_names_that_are_read() -> None:
    assert LogFormat("{state[epoch]} {{no}} {rank} {state.name}").names == {"state", "rank"}


@given(st.text(alphabet="{}[]().:!rsa_x0129-%,state epoch rank __class__", max_size=30))
def test_any_text_is_refused_or_filled_in(text: str) -> None:
    try:
        form = LogFormat(text)
    except RuleError:
        return
    form.fill(VALUES)
    assert "hidden" not in form.fill({"object": VALUES["object"]})
