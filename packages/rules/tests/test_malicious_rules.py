"""Rules that try to run code, to reach the attributes of objects, or to exceed the limits: all are refused."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph_rules.errors import RuleError, RuleLimitError, RuleNameError, RuleSyntaxError
from heliograph_rules.language import Rule

VALUES: dict[str, Any] = {"x": 3, "word": "rate", "state": {"epoch": 1, "a": {"b": 2}}, "window": [3.0, 2.0, 1.0]}

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
    ("abs(x)(x) == 1", RuleSyntaxError),
    ("[abs][0](x) == 1", RuleSyntaxError),
    ("# nothing", RuleSyntaxError),
    ("\N{CYRILLIC SMALL LETTER HA} > 1", RuleNameError),
    ("x\u200b > 1", RuleSyntaxError),
    ("[v for v in [1]] == v", RuleNameError),
    ("[[b for b in [a]] for a in window] == b", RuleNameError),
    ("9" * 5000 + " > 1", RuleSyntaxError),
    ("[" * 300 + "]" * 300 + " == 1", RuleSyntaxError),
    ("-" * 3000 + "1 == 1", RuleLimitError),
]


@pytest.mark.parametrize("text", INVALID)
def test_a_double_underscore_makes_a_rule_invalid(text: str) -> None:
    with pytest.raises(RuleSyntaxError, match="double underscore") as raised:
        Rule(text, VALUES)
    assert raised.value.column == text.find("__") + 1


@pytest.mark.parametrize(("text", "kind"), REFUSED, ids=[ascii(text)[:40] for text, _ in REFUSED])
def test_it_is_refused_when_it_is_read(text: str, kind: type[RuleError]) -> None:
    with pytest.raises(RuleError) as raised:
        Rule(text, VALUES)
    assert type(raised.value) is kind, str(raised.value)
