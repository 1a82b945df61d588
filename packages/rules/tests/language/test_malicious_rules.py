"""What people with bad intentions, or bad luck, write into rule files."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from heliograph.packages.tests.torture.rule_guard import BEHAVIOUR, TOUCHED, Sprung, few_calls, trap, watch
from heliograph_rules.errors import (
    MetricUnavailable,
    RuleError,
    RuleLimitError,
    RuleNameError,
    RuleSyntaxError,
    RuleTypeError,
)
from heliograph_rules.language.kinds import SIGNATURES
from heliograph_rules.language.limits import MAX_TEXT
from heliograph_rules.language.rule import compile_rule

LONG = 50_000
DRAWN = Random(0)
VALUES: dict[str, Any] = {
    "x": 3,
    "word": "rate",
    "state": {"epoch": 1, "a": {"b": 2}},
    "window": [3.0, 2.0, 1.0],
    "long": deque(DRAWN.random() for _ in range(LONG)),
    "ints": [DRAWN.getrandbits(60) for _ in range(LONG)],
    "texts": [f"{number:x}" for number in range(20_000)],
    "log": [{"loss": 1.0, "step": step, "split": "train"} for step in range(5_000)],
    "huge": "ab" * 500_000,
    "bits": 2**4000 - 1,
    "nan": float("nan"),
}

INVALID = [
    "__import__('os').system('true') == 0",
    "x.__class__ == 1",
    "().__class__.__bases__[0].__subclasses__() == 1",
    "word.__len__() == 4",
    "''.__class__.__mro__[1] == 1",
    "(lambda: 0).__globals__ == 1",
    "[c for c in ().__class__.__base__.__subclasses__()] == 1",
    "__builtins__ == 1",
    "state['__class__'] == 1",
    "'__' in word",
    "f'{x.__class__}' == ''",
    "'{0.__class__}'.format(x) == ''",
    "\uff3f\uff3fimport\uff3f\uff3f('os') == 1",
    "x._\uff3fclass\uff3f_ == 1",
    "_\ufe33import_\ufe34('os') == 1",
]
REFUSED = [
    ("getattr(x, 'real') == 3", RuleNameError),
    ("setattr(x, 'real', 3) == 3", RuleNameError),
    ("type(x) == 3", RuleNameError),
    ("eval('1') == 1", RuleNameError),
    ("exec('1') == 1", RuleNameError),
    ("compile('1', '', 'eval') == 1", RuleNameError),
    ("open('/etc/passwd').read() == ''", RuleSyntaxError),
    ("open('/etc/passwd') == ''", RuleNameError),
    ("input('?') == ''", RuleNameError),
    ("print(x) == 1", RuleNameError),
    ("globals() == 1", RuleNameError),
    ("vars(x) == 1", RuleNameError),
    ("dir(x) == 1", RuleNameError),
    ("breakpoint() == 1", RuleNameError),
    ("exit() == 1", RuleNameError),
    ("os.system('true') == 0", RuleSyntaxError),
    ("os == 1", RuleNameError),
    ("print == 1", RuleNameError),
    ("abs == 1", RuleNameError),
    ("len.real == 1", RuleNameError),
    ("nobody > 1", RuleNameError),
    ("_x > 1", RuleNameError),
    ("state._a == 1", RuleNameError),
    ("state.func_globals == 1", RuleNameError),
    ("word.format == 1", RuleNameError),
    ("word.format_map == 1", RuleNameError),
    ("state.mro == 1", RuleNameError),
    ("state.gi_frame.f_back == 1", RuleNameError),
    ("state.tb_frame == 1", RuleNameError),
    ("[_ for _ in window] == 1", RuleNameError),
    ("word.upper() == ''", RuleSyntaxError),
    ("state.get('a') == 1", RuleSyntaxError),
    ("(lambda: 1)() == 1", RuleSyntaxError),
    ("any(map(lambda v: v, window))", RuleNameError),
    ("[lambda: 1] == 1", RuleSyntaxError),
    ("(y := 1) == 1", RuleSyntaxError),
    ("[y := 1 for z in window] == 1", RuleSyntaxError),
    ("x = 1", RuleSyntaxError),
    ("x += 1", RuleSyntaxError),
    ("import os", RuleSyntaxError),
    ("x > 1; import os", RuleSyntaxError),
    ("x > 1\nimport os", RuleSyntaxError),
    ("del x", RuleSyntaxError),
    ("raise x", RuleSyntaxError),
    ("def f(): pass", RuleSyntaxError),
    ("(yield x) == 1", RuleSyntaxError),
    ("(await x) == 1", RuleSyntaxError),
    ("[v async for v in window] == 1", RuleSyntaxError),
    ("any(v async for v in window)", RuleSyntaxError),
    ("[1 for state.a in window] == 1", RuleSyntaxError),
    ("[1 for window[0] in window] == 1", RuleSyntaxError),
    ("max(*window) > 1", RuleSyntaxError),
    ("max(**state) > 1", RuleSyntaxError),
    ("sorted(window, key=abs) == 1", RuleSyntaxError),
    ("max([1], default=x) == 1", RuleSyntaxError),
    ("abs(x)(x) == 1", RuleSyntaxError),
    ("[abs][0](x) == 1", RuleSyntaxError),
    ("b'a' * 9 == 1", RuleTypeError),
    ("1j ** 2 == 1", RuleTypeError),
    ("x > 1 \0", RuleSyntaxError),
    ("'\ud800' == word", RuleSyntaxError),
    ("# nothing", RuleSyntaxError),
    ("\N{CYRILLIC SMALL LETTER HA} > 1", RuleNameError),
    ("x\u200b > 1", RuleSyntaxError),
    ("[v for v in [1]] == v", RuleNameError),
    ("[[b for b in [a]] for a in window] == b", RuleNameError),
    ("9" * 5000 + " > 1", RuleLimitError),
    ("9" * 3900 + " > 1", RuleLimitError),
    ("0x" + "f" * 3900 + " > 1", RuleLimitError),
    ("[" * 70 + "]" * 70 + " == 1", RuleLimitError),
    ("[" * 300 + "]" * 300 + " == 1", RuleSyntaxError),
    ("not " * 70 + "x", RuleLimitError),
    ("-" * 3000 + "1 == 1", RuleLimitError),
    ("1" + " + 1" * 900 + " > 1", RuleLimitError),
    ("x" * (MAX_TEXT + 1), RuleLimitError),
    ("f'{x:>1000000000}' == ''", RuleLimitError),
    ("f'{x:.1000000000f}' == ''", RuleLimitError),
    ("f'{x:>99999999999999999999}' == ''", RuleLimitError),
]
TOO_MUCH = [
    "9 ** 9 ** 9 ** 9 > 1",
    "2 ** 4097 > 1",
    "x ** x ** x ** x > 1",
    "bits ** 2 > 1",
    "bits * bits > 1",
    "1 << 5000 > 1",
    "1 << 10 ** 18 > 1",
    "'a' * 10 ** 9 == ''",
    "10 ** 9 * 'a' == ''",
    "[0] * 10 ** 9 == []",
    "(0,) * 10001 == []",
    "('a' * 9999 + 'bc') == ''",
    "[huge * 1] == ''",
    "[[0] * 10000 for v in long] == []",
    "[v for v in ints] == []",
    "[1 for a in window for b in long for c in long] == []",
    "[[1 for b in long] for a in long] == []",
    "any(any(a > b for a in long) for b in long)",
    "[c for c in huge] == []",
    "[a for a in long if a in long] == []",
    "[v for v in window if v in texts or long == texts] == [texts, log, texts, log]",
    "sorted(ints + ints) == []",
    "[sorted(texts) for v in window] == []",
    "[sum(long) for v in long] == []",
    "[huge == huge for v in long] == []",
    "['b' * 9 in huge for v in long] == []",
    "[huge[::2] for v in long] == []",
    "str(long) == ''",
    "str(bits) * 9 == ''",
    "[str(bits) for v in long] == []",
    "[f'{bits}' for v in long] == []",
    "[f'{v:.300f}' for v in long] == []",
    "f'{huge}' == ''",
    "f'{huge!r}' == ''",
    "f'{x:{x * 1000}}' == ''",
    "round(bits, -400) > 1",
    "round(1.5, 10 ** 10) > 1",
    "int('f' * 9000, 16) > 1",
    "{v * (2 ** 61 - 1) for v in [2, 3, 4]} == {1}",
    "{bits: 1} == 1",
    "[log == log for v in long] == []",
    "[e.loss for e in log if e in log] == []",
    "[rand() for v in long] == []",
    "set(ints) == set(texts) == set(long)",
    "dict([[v, log] for v in long]) == 1",
]


def nested(levels: int) -> str:
    """Return a list that is small in memory, and doubles with every level for whoever looks into it."""
    text = "[1, 2]"
    for level in range(levels):
        text = f"[[v{level}, v{level}] for v{level} in [{text}]][0]"
    return text


def one_hash(made: str, times: int) -> str:
    """Return what makes something of 2 ** times tuples that have one hash: -1 and -2 have."""
    names = "abcdefghij"[:times]
    return f"{{({', '.join(names)}){made}{''.join(f' for {name} in [-1, -2]' for name in names)}}}"


COLLISIONS = [
    f"{one_hash('', 10)} == {{1}}",
    f"{one_hash(': 1', 10)} == {{}}",
    f"[s == s for s in [{one_hash('', 7)}] for v in long] == []",
    f"[s | s for s in [{one_hash('', 7)}] for v in long] == []",
    f"[d == d for d in [{one_hash(': 1', 7)}] for v in long] == []",
    f"[(1,) in d for d in [{one_hash(': 1', 7)}] for v in long] == []",
    f"[d[1] for d in [{one_hash(': 1', 7)}] for v in long] == []".replace("d[1]", "d[(-1, -1, -1, -1, -1, -1, -1)]"),
    "len({p + q for t in [[(a, b, c, d, e) for a in n for b in n for c in n for d in n for e in n]"
    " for n in [[-1, -2]]] for p in t for q in t}) == 1024",
    "{((a, b, c), (d, e, f), (g, h)) for n in [[-1, -2]] for a in n for b in n for c in n for d in n for e in n"
    " for f in n for g in n for h in n for i in n} == {1}",
]
BILLIONS = [f"{nested(14)} == {nested(14)}", f"str({nested(15)}) == ''", f"sorted({nested(15)}) == 1"]


@pytest.mark.parametrize("text", INVALID)
def test_a_double_underscore_makes_a_rule_invalid(text: str) -> None:
    with pytest.raises(RuleSyntaxError, match="double underscore") as raised:
        compile_rule(text, VALUES)
    assert raised.value.column in (text.find("__") + 1, None)


@pytest.mark.parametrize(("text", "kind"), REFUSED, ids=[ascii(text)[:40] for text, _ in REFUSED])
def test_it_is_refused_when_it_is_read(text: str, kind: type[RuleError]) -> None:
    compile_rule("True", ())
    with watch().watching() as seen, pytest.raises(RuleError) as raised:
        compile_rule(text, VALUES)
    assert type(raised.value) is kind, str(raised.value)
    assert seen in ([], ["compile"])


@pytest.mark.parametrize("text", [*TOO_MUCH, *BILLIONS, *COLLISIONS], ids=lambda text: text[:40])
def test_it_is_given_up_before_it_takes_long(text: str) -> None:
    rule = compile_rule(text, VALUES)
    with pytest.raises(RuleLimitError), few_calls():
        rule.evaluate(VALUES)


def with_frames_left(left: int, function: Callable[[], object]) -> None:
    """Call a function where Python allows only so many calls inside of it."""
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1

    def deeper(levels: int) -> object:
        return deeper(levels - 1) if levels else function()

    deeper(sys.getrecursionlimit() - depth - left)


def test_a_rule_that_is_too_deep_for_python_is_refused() -> None:
    text = "x > 1 and " + "(" * 50 + "-" * 50 + "x" + ")" * 50 + " > 1"
    rule = compile_rule(text, VALUES)
    with pytest.raises(RuleLimitError, match="nested too deeply"):
        with_frames_left(70, lambda: rule.evaluate(VALUES))
    with pytest.raises(RuleLimitError, match="nested too deeply"):
        with_frames_left(70, lambda: compile_rule(text, VALUES))
    assert rule.evaluate(VALUES) is True


def test_tuples_that_have_one_hash_are_no_harm_in_a_metric() -> None:
    tuples = [tuple(-1 - (number >> bit & 1) for bit in range(9)) for number in range(512)]
    assert len(set(map(hash, tuples))) == 1
    values = {"many": set(tuples), "keyed": dict.fromkeys(tuples), "few": set(tuples[:100])}
    for text in ("many == many", "keyed == keyed", "(1,) in keyed", "len([v for v in many]) == 512"):
        with pytest.raises(RuleLimitError):
            compile_rule(text, values).evaluate(values)
    assert compile_rule("(-1,) not in few and len(keyed) == 512", values).evaluate(values) is True


def test_large_windows_are_no_harm() -> None:
    rule = compile_rule("sum(long) / len(long) < max(long) and sorted(long[:9000])[0] < long[-1] + 1", VALUES)
    assert rule.evaluate(VALUES) is True
    assert compile_rule("any(v > 1 for v in long[:2000]) or 'train' == log[-1].split", VALUES).evaluate(VALUES) is True


class Key(str):
    """A key that has the hash of a text, and a mind of its own."""

    __hash__ = str.__hash__
    __eq__ = BEHAVIOUR["__eq__"]


TRAPS: dict[str, Callable[[], Any]] = {
    "object": lambda: trap(object),
    "float": lambda: trap(float, 1.0),
    "int": lambda: trap(int, 1),
    "str": lambda: trap(str, "a"),
    "list": lambda: trap(list, [1]),
    "dict": lambda: trap(dict, {"a": 1}),
    "set": lambda: trap(set, {1}),
    "tuple": lambda: trap(tuple, (1,)),
    "deque": lambda: trap(deque),
    "key": lambda: {Key("a"): 1},
    "exception": lambda: trap(ValueError),
}


@pytest.mark.parametrize("base", TRAPS)
def test_no_method_of_a_value_is_ever_called(base: str) -> None:
    calls = [f"{name}(m) == 1" for name, signature in SIGNATURES.items() if signature.allows(1)]
    places = [
        "m",
        "[m, m]",
        "m['a']",
        "m[0]",
        "m.a",
        "m[0:1]",
        "[v for v in m]",
        "{m}",
        "{m: m}",
        "f'{m}'",
        "f'{m!r:>9}'",
    ]
    operators = ["+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "<", "<=", "==", "!=", "in"]
    texts = [
        *calls,
        *[
            f"{place} {operator} {other} == 1"
            for place in places
            for operator in operators
            for other in ("1", "m", "[m]")
        ],
        *[
            "m",
            "not m",
            "-m == 1",
            "~m == 1",
            "m and True",
            "1 if m else True",
            "m is 1",
            "m is None",
            "x[m] == 1",
            "min(m, m)",
        ],
    ]
    assert len(texts) > 500
    TOUCHED.clear()
    made = TRAPS[base]()
    for text in texts:
        rule = compile_rule(text, ["m", "x"])
        for values in ({"m": made, "x": {"a": 1}}, {"m": {"a": made, 0: [made]}, "x": [1]}):
            with watch().watching() as seen, suppress(RuleError, MetricUnavailable):
                assert rule.evaluate(values) in (True, False)
            assert (seen, TOUCHED) == ([], []), text


def test_the_traps_and_the_watch_work() -> None:
    TOUCHED.clear()
    with pytest.raises(Sprung, match="eq"):
        _ = trap(object) == 1
    with pytest.raises(Sprung, match="getattribute"):
        _ = trap(dict).keys
    assert TOUCHED == ["eq", "getattribute"]
    TOUCHED.clear()
    with watch().watching() as seen:
        compile("1", "", "eval")
    assert seen == ["compile"]


def test_nan_is_like_pythons() -> None:
    assert (
        compile_rule("nan != nan and not nan < 1 and not nan > 1 and max(1, nan) == 1", VALUES).evaluate(VALUES) is True
    )
