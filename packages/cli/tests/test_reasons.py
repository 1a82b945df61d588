"""The innermost reason of a message of jsonargparse."""

from __future__ import annotations

import pytest
from heliograph_cli.errors import innermost, key_of, shown

UNION = """Parser key "{key}":
  Does not validate against any of the Union subtypes
  Subtypes: [A, dict[str, A], <class 'NoneType'>]
  Errors:
    - {first}
    - {second}
    - Expected a <class 'NoneType'>
  Given value type: <class 'dict'>
  Given value: {{'a': 1}}"""
WRONG_KIND = "Type A expects a function or a callable class: Dict must include a class_path, but got 1"


def test_the_alternative_that_says_more_is_the_reason() -> None:
    text = UNION.format(key="train", first=WRONG_KIND, second="No module named 'x'")
    assert innermost(text) == "Parser key \"train\":\n  No module named 'x'. Got value: {'a': 1}"


def test_of_several_that_one_is_it_which_has_got_furthest() -> None:
    inner = UNION.format(key="lr", first="Expected a <class 'float'>", second="Expected a <class 'int'>")
    deep = inner.replace("\n", "\n      ")
    text = innermost(UNION.format(key="optimizer", first="Option 'a' is not accepted", second=deep))
    assert key_of(text) == "optimizer.lr"
    assert "Expected a <class 'float'>" in text, "a value that has none of the types is left as it is"
    assert "Option 'a'" not in text


def test_keys_are_joined() -> None:
    assert key_of('Parser key "trainer": Parser key "trainer.plugins": Parser key "every"') == "trainer.plugins.every"
    assert key_of("nothing") == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("NestedArg(key='lr', val='1')", "only its option lr=1"),
        ("Namespace(class_path='a.B', init_args=Namespace(c=1))", "a.B"),
        ("{'class_path': 'a.B', 'init_args': {'c': 1}}", "a.B"),
        ("{'class_path': Namespace(class_path='a.B'), 'c': 1}", "{'class_path': 'a.B', 'c': 1}"),
        ("Namespace(model=3)", "only its options model=3"),
        ("None", "null"),
        ("", "''"),
        ("3", "3"),
    ],
)
def test_a_value_is_shown_as_it_was_written(value: str, expected: str) -> None:
    assert shown(value) == expected
