"""Format strings that reach nothing but plain data, and never fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from heliograph_rules.errors import RuleError, RuleLimitError, RuleSyntaxError
from heliograph_rules.operations.log_control import FormatString
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
        ("{text[0]}", "<missing: text[0]>"),
        ("{state[none][epoch]}", "<missing: state[none][epoch]>"),
        ("{object.secret}", "<missing: object.secret>"),
        ("{object.__class__}", "<missing: object.__class__>"),
        ("{object[__class__]}", "<missing: object[__class__]>"),
        ("{rank.real}", "<missing: rank.real>"),
        ("{state.__class__.__mro__}", "<missing: state.__class__.__mro__>"),
        ("{state.keys}", "<missing: state.keys>"),
        (
            "{state[none]:.0f}",
            "<state[none] cannot be formatted: unsupported format string passed to NoneType.__format__>",
        ),
        ("{text:.0f}", "<text cannot be formatted: Unknown format code 'f' for object of type 'str'>"),
        (
            "{state[epoch]!s:.1f}",
            "<state[epoch] cannot be formatted: Unknown format code 'f' for object of type 'str'>",
        ),
    ],
)
def test_a_format_is_filled_in(text: str, filled: str) -> None:
    assert FormatString(text).fill(VALUES) == filled


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
        ("{rank!x}", "format 'x'"),
        ("{rank:{state[epoch]}}", "format '{state[epoch]}'"),
        ("{rank:%Y-%m}", "format '%Y-%m'"),
    ],
)
def test_a_text_that_is_no_format_is_refused(text: str, problem: str) -> None:
    with pytest.raises(RuleSyntaxError) as caught:
        FormatString(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize("spec", ["201", ">1000000000", ".201f", "99999999999999999999d", "08.9999f"])
def test_a_width_is_bounded(spec: str) -> None:
    with pytest.raises(RuleLimitError, match="200 characters"):
        FormatString(f"{{rank:{spec}}}")
    assert len(FormatString("{rank:200}").fill(VALUES)) == 200


def test_a_field_is_bounded() -> None:
    assert FormatString("{text}.").fill({"text": "x" * 20_000}) == "x" * 10_000 + "...."


def test_a_line_of_many_long_fields_is_cut() -> None:
    filled = FormatString("{text}" * 1000).fill({"text": "x" * 9_000})
    assert filled == "x" * 100_000 + "..."
    assert FormatString("{text}" * 10).fill({"text": "x" * 10_000}) == "x" * 100_000


def test_a_number_that_python_will_not_print_does_no_harm() -> None:
    filled = FormatString("{number} {number:c}").fill({"number": 10**5000})
    assert filled.count("<number cannot be formatted") == 2


def test_the_names_that_are_read() -> None:
    assert FormatString("{state[epoch]} {{no}} {rank} {state.name}").names == {"state", "rank"}


@given(st.text(alphabet="{}[]().:!rsa_x0129-%,state epoch rank __class__", max_size=30))
def test_any_text_is_refused_or_filled_in(text: str) -> None:
    try:
        form = FormatString(text)
    except RuleError:
        return
    assert len(form.fill(VALUES)) <= 30 * 300
    assert "hidden" not in form.fill({"object": VALUES["object"]})
