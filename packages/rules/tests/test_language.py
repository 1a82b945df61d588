"""What rules can say, on plain values, on those of NumPy and torch, and on metrics that have none yet."""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict, defaultdict, deque
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from heliograph_rules.errors import (
    MetricUnavailable,
    RuleError,
    RuleEvaluationError,
    RuleLimitError,
    RuleNameError,
    RuleSyntaxError,
    RuleTypeError,
)
from heliograph_rules.language import Rule
from simpleeval import IterableTooLong, NumberTooHigh

VALUES: dict[str, Any] = {
    "loss": {"loss": 0.5, "grad_norm": None, "epoch": 2.0, "step": 40},
    "window": {"size": 3, "loss": deque([3.0, 2.0, 1.0], maxlen=3)},
    "log": [{"loss": 3.0, "step": 1}, {"loss": 1.0, "step": 2}],
    "pairs": ((1, "a"), (2, "b")),
    "x": 5,
    "y": 2.5,
    "word": "rate",
    "yes": True,
    "absent": None,
    "absent_too": None,
}


class Point(NamedTuple):
    x: int
    y: int


class Unit(StrEnum):
    STEPS = "steps"


class Count(IntEnum):
    ONE = 1


def holds(text: str, **values: Any) -> bool:
    names = values or VALUES
    return Rule(text, names).evaluate(names)


@pytest.mark.parametrize(
    "text",
    [
        "True",
        "yes",
        "not False and yes",
        "x > 4 and y < 3 or 1 / 0 > 1",
        "1 < y < x <= 5 != 6",
        "x + y * 2 - 1 == 9",
        "x / 2 == 2.5 and x // 2 == 2 and x % 3 == 2 and x ** 2 == 25 and -x == +(-5)",
        "x & 4 == 4 and x | 2 == 7 and x ^ 1 == 4 and ~x == -6 and ~yes == -2",
        "x << 2 == 20 and x >> 1 == 2",
        "2 ** -1 == 0.5 and 4 ** 0.5 == 2",
        "x in [1, 5] and x not in (1, 2) and 'at' in word and 'loss' in loss and 3.0 in window.loss",
        "None is None and x is not None and yes is True",
        "(1 if x > 9 else 2) == 2",
        "loss['loss'] == loss.loss == 0.5 and loss.grad_norm is None and loss['grad_norm'] == None",
        "window.loss[0] == 3 and window['loss'][-1] == 1 and log[-1:] == [log[1]]",
        "log[-1].loss < log[0]['loss'] and pairs[1][0] == 2 and pairs[0:1] == ((1, 'a'),) and word[1:3] == 'at'",
        "[1, x] == [1, 5] and (1, x) == (1, 5) and {1, x} == {5, 1} and {'a': x} == {'a': 5} and {'a': x}.a == 5",
        "[1] + [2] == [1, 2] and 'a' + 'b' == 'ab' and [0] * 3 == [0, 0, 0] and 2 * 'ab' == 'abab'",
        "{1, 2} | {3} == {1, 2, 3} and {1, 2} - {2} == {1} and {1} <= {1, 2} and [1, 2] < [1, 3]",
        "[entry.loss for entry in log] == [3, 1]",
        "[a for a, b in pairs if b == 'b'] == [2] and {a: b for a, b in pairs} == {1: 'a', 2: 'b'}",
        "[a * b for a in [1, 2] for b in [10, 20] if a * b < 40] == [10, 20, 20]",
        "[x for x in [x]] == [5]",
        "{((1, 2), 'a'): 4}[((1, 2), 'a')] == 4 and {(1, 2)} == {(1, 2)}",
        "[[a for a in [b, b]] for b in [1]] == [[1, 1]]",
        "any(v > 2 for v in window.loss) and all([v > 0 for v in window.loss]) and not any(())",
        "sum(v for v in window.loss) == 6 and max({v for v in window.loss}) == 3 and min(4, x) == 4",
        "sorted(window.loss) == [1, 2, 3] and sorted({'b', 'a'}) == ['a', 'b']",
        "len(window.loss) == window.size and len(word) == 4 and len({1: 2}) == 1",
        "abs(-x) == 5 and round(y) == 2 and round(2.345, 1) == 2.3 and round(1234, -2) == 1200",
        "math_trunc(-y) == -2 and math_floor(-y) == -3 and math_ceil(y) == 3 and math_sqrt(4) == 2",
        "int('12') == 12 and int('ff', 16) == 255 and float('2.5') == y and str(x) == '5' and int(True) == 1",
        "list(word) == ['r', 'a', 't', 'e'] and tuple(window.loss) == (3, 2, 1) and list() == []",
        "set(window.loss) == {1, 2, 3} and dict(pairs) == {1: 'a', 2: 'b'} and dict({'a': 1}).a == 1",
        "f'{x}' == '5' and f'{y:.2f}' == '2.50' and f'{word:>7}' == '   rate' and f'{x:{x}d}' == '    5'",
        "0 <= rand() < 1 and 0 <= randint(3) < 3",
        "loss and log and not []",
        "  x > 4  ",
        "(x >\n 4)",
    ],
)
def test_it_holds(text: str) -> None:
    assert holds(text) is True


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "m == 0.5"),
        (np.int64(7), "m % 4 == 3"),
        (np.bool_(True), "m"),
        (np.bool_(True), "m is True"),
        (np.array(2.5), "m > 2"),
        (np.array([True]), "m"),
        (np.str_("a"), "m == 'a'"),
        (torch.tensor(0.25), "m < 0.3"),
        (torch.tensor(True), "m"),
        (torch.tensor([True]), "m and True"),
        (torch.tensor(3, dtype=torch.int8), "m == 3"),
        (torch.nn.Parameter(torch.tensor(1.0)), "m == 1"),
        ({"a": [torch.tensor(1.0), {"b": np.float64(2.0)}]}, "m.a[1].b == 2 and m == {'a': [1, {'b': 2}]}"),
        ([np.float64(1.0), torch.tensor(2), 3], "sum(m) == 6 and max(m) == 3 and 2 in m"),
        (deque([np.float64(1.0)]), "m[0] == 1 and len(m) == 1 and max(m) == 1"),
        (OrderedDict(a=1), "m.a == 1 and 'a' in m"),
        (defaultdict(int, a=1), "m.a == 1 and 'b' not in m"),
        (Point(1, 2), "m == (1, 2) and m[1] == 2"),
        (frozenset({1, 2}), "m == {1, 2} and 1 in m"),
        (Unit.STEPS, "m == 'steps'"),
        (Count.ONE, "m == 1 and m + 1 == 2"),
        ({np.int64(3): "a", Unit.STEPS: "b"}, "m[3] == 'a' and m.steps == 'b'"),
        (float("nan"), "m != m"),
    ],
    ids=str,
)
def test_values_are_turned_into_plain_ones(value: Any, text: str) -> None:
    assert holds(text, m=value) is True


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.ones(2)], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("text", ["m == 1", "m.inner[0] == 1", "[m] == 1"])
def test_an_array_of_several_values_is_refused(value: Any, text: str) -> None:
    with pytest.raises(RuleTypeError, match=r"contains an? \w+ of shape \(2,\)"):
        holds(text, m={"inner": value} if "inner" in text else value)


def test_the_attributes_of_an_object_are_never_read() -> None:
    with pytest.raises(RuleTypeError, match="only a dict has keys like 'name'"):
        holds("m.name == 1", m=Unit.STEPS)


SIGNS = ("+", "-", "*", "/", "**", "%", "<<", "&", "<", "==", "!=", "in")
NEEDY = """
    None + absent == 1; absent + None == 1; None < absent; 'a' + absent == 1; absent == absent_too
    1 <= absent; absent in [1]; 1 in absent; absent['a'] == 1; absent.a == 1; absent[0:1] == 1; loss[absent] == 1
    absent; not absent; absent and True; 1 if absent else True; -absent == 1; ~absent == 1; log[absent:] == 1
    abs(absent) == 1; len(absent) == 1; round(absent) == 1; int(absent) == 1; float(absent) == 1; str(absent) == ''
    max(1, absent) == 1; any(absent); sum([absent]) == 1; {absent: 1} == 1; {absent} == 1
    [v for v in absent] == []; [v for v in [1] if absent] == []; f'{absent}' == ''; f'{1:{absent}}' == ''
"""


@pytest.mark.parametrize(
    "text",
    [
        *[f"(absent {sign} x) == 1" for sign in SIGNS if sign != "in"],
        *[f"(x {sign} absent) == 1" for sign in SIGNS],
        *[text.strip() for text in NEEDY.strip().replace("\n", ";").split(";")],
    ],
)
def test_a_metric_without_a_value_makes_the_rule_unavailable(text: str) -> None:
    with pytest.raises(MetricUnavailable, match="not available yet: absent") as raised:
        holds(text)
    assert raised.value.args == ("absent",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("absent == None", True),
        ("None == absent", True),
        ("absent is None", True),
        ("None is absent", True),
        ("absent != None", False),
        ("absent is not None", False),
        ("absent != None and absent['loss'] < 1", False),
        ("absent is None or absent['loss'] < 1", True),
        ("loss == None", False),
        ("loss is not None and loss.loss < 1", True),
        ("x if absent == None else False", False),
    ],
)
def test_a_rule_can_guard_itself(text: str, expected: bool) -> None:
    assert holds(text.replace("x if", "False if")) is expected


def test_a_metric_that_was_not_given_is_unavailable() -> None:
    with pytest.raises(MetricUnavailable, match="loss"):
        Rule("loss > 1", ["loss"]).evaluate({})


@pytest.mark.parametrize(
    ("text", "kind", "column", "reported"),
    [
        ("x >", RuleSyntaxError, 4, "invalid syntax"),
        ("x > 1)", RuleSyntaxError, 6, "unmatched"),
        ("  x >< 1", RuleSyntaxError, 6, "invalid syntax"),
        ("", RuleSyntaxError, None, "The rule is empty"),
        ("x = 1", RuleSyntaxError, 3, "Maybe you meant '==' or ':=' instead of '='|invalid syntax"),
        ("x > 1; x > 2", RuleSyntaxError, 6, "A rule is one expression"),
        ("import os", RuleSyntaxError, 1, "A rule is one expression"),
        ("x > 1 and lambda: 1", RuleSyntaxError, 11, "does not have lambda|A rule is one expression"),
        ("x > 1 and (lambda: 1)", RuleSyntaxError, 12, "does not have lambda"),
        ("(z := x) > 1", RuleSyntaxError, 2, "does not have an assignment"),
        ("x > 1 and los.loss < 1", RuleNameError, 11, "Unknown variable 'los'. Did you mean 'loss'"),
        ("x > 1 and true", RuleNameError, 11, "Unknown variable 'true'. Did you mean True\\?$"),
        ("false", RuleNameError, 1, "Did you mean False\\?$"),
        ("x != none", RuleNameError, 6, "Did you mean None\\?$"),
        ("é.loss < 1 and los.x", RuleNameError, 1, "Unknown variable 'é'"),
        ("'é' == word and los", RuleNameError, 17, "Unknown variable 'los'"),
        ("(x >\n  los)", RuleNameError, 8, "Unknown variable 'los'"),
        ("f'{x + los}' == ''", RuleNameError, 8, "Unknown variable 'los'"),
        ("[a for a in window.loss] == a", RuleNameError, 29, "Unknown variable 'a'"),
        ("abs > 1", RuleNameError, 1, "It is a function: call it"),
        ("mas(x, 1) > 1", RuleNameError, 1, "Unknown function 'mas': it is not defined. Did you mean 'max'"),
        ("loss(1) > 1", RuleNameError, 1, "It is a variable"),
        ("word.upper() == 'A'", RuleSyntaxError, 1, "rules have no methods"),
        ("[*log] == 1", RuleSyntaxError, 2, "unpacking"),
    ],
)
def test_what_is_wrong_is_found_when_the_rule_is_read(
    text: str, kind: type[RuleError], column: int | None, reported: str
) -> None:
    with pytest.raises(kind, match=reported) as raised:
        Rule(text, VALUES)
    assert (type(raised.value), raised.value.column) == (kind, column)


@pytest.mark.parametrize(
    ("text", "kind", "cause", "reported"),
    [
        ("1 / (x - 5) > 1", RuleEvaluationError, ZeroDivisionError, "ZeroDivisionError: division by zero"),
        ("loss['los'] > 1", RuleEvaluationError, KeyError, "there is no key 'los'. Did you mean 'loss'"),
        ("loss.los > 1", RuleEvaluationError, KeyError, "there is no key 'los'"),
        ("window.loss[9] > 1", RuleEvaluationError, IndexError, "index out of range"),
        ("int(word) > 1", RuleEvaluationError, ValueError, "invalid literal"),
        ("math_sqrt(-x) > 1", RuleEvaluationError, ValueError, "math domain error"),
        ("10.0 ** 999 > x", RuleEvaluationError, OverflowError, "OverflowError"),
        ("x << -1 > 1", RuleEvaluationError, ValueError, "negative shift count"),
        ("x > 1 and ('a' + 1)", RuleTypeError, TypeError, r"column 12 .*The expression is \"'a' \+ 1\""),
        ("1 in 2", RuleTypeError, TypeError, "not iterable"),
        ("(1).real == 1", RuleTypeError, TypeError, "only a dict has keys like 'real', got 1"),
        ("loss < 1.0", RuleTypeError, TypeError, r"'dict' and 'float'.* by key: metric\.key"),
        ("2+2", RuleTypeError, TypeError, "the rule must return a bool, got int: 4. The expression is '2\\+2'"),
        ("x[0] > 1", RuleTypeError, TypeError, "not subscriptable"),
        ("word.upper == 1", RuleTypeError, TypeError, "only a dict has keys"),
        ("loss[log] == 1", RuleTypeError, TypeError, "unhashable"),
        ("len() == 1", RuleTypeError, TypeError, "exactly one argument"),
        ("loss", RuleTypeError, TypeError, "the rule must return a bool, got dict"),
        ("x and yes and word", RuleTypeError, TypeError, "the rule must return a bool, got str"),
        ("9 ** 9 ** 9 ** 9 > 1", RuleLimitError, NumberTooHigh, "at most 4096 bits"),
        ("'a' * 10 ** 9 == ''", RuleLimitError, IterableTooLong, "too large"),
        ("[1 for a in [0] * 10001] == 1", RuleLimitError, IterableTooLong, "too many elements"),
    ],
)
def test_what_fails_while_it_is_evaluated(
    text: str, kind: type[RuleError], cause: type[Exception] | None, reported: str
) -> None:
    rule = Rule(text, VALUES)
    with pytest.raises(kind, match=reported) as raised:
        rule.evaluate(VALUES)
    assert type(raised.value) is kind
    assert type(raised.value.__cause__) is (cause or type(None))


def test_an_error_says_where_in_the_rule_it_happened() -> None:
    with pytest.raises(RuleEvaluationError, match="rule: The rule failed:"):
        holds("x > 1 and loss.los < 1")


def test_a_rule_knows_what_it_reads() -> None:
    rule = Rule("x > 1 and [x for y in log] == absent", VALUES)
    assert rule.names == {"x", "log", "absent"}
    assert rule.text == "x > 1 and [x for y in log] == absent"


def test_draws_leave_the_global_stream_alone_and_can_be_resumed() -> None:
    def drawn(rule: Rule, times: int) -> list[bool]:
        return [rule.evaluate({}) for _ in range(times)]

    before = random.getstate()
    rule, same, resumed = (Rule("rand() < 0.5 and randint(1000) < 800", ()) for _ in range(3))
    whole = drawn(rule, 40)
    first = drawn(same, 15)
    resumed.load_state_dict(same.state_dict())
    assert first + drawn(resumed, 25) == whole
    assert sorted(set(whole)) == [False, True]
    assert (random.getstate(), rule.state_dict()) == (before, resumed.state_dict())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))], ids=["deep", "pickled"]
)
def test_a_rule_can_be_copied(copied: Any) -> None:
    rule = Rule("rand() < 1 and x == 5", VALUES)
    rule.evaluate(VALUES)
    again = copied(rule)
    assert (again.text, again.names, again.draws) == (rule.text, rule.names, 1)
    assert again.evaluate(VALUES) is True


def test_nothing_is_changed() -> None:
    values = copy.deepcopy(VALUES)
    rule = Rule("sorted(window.loss) == [1, 2, 3] and log + [1] != log", VALUES)
    assert rule.evaluate(values) is True
    assert values == VALUES
