"""Rules at random: none may fail in another way than the documented ones, reach anything, or take longer than 50 ms.

Run `python packages/tests/torture/rules.py --cases 20000 --seed 0`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from time import process_time
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy
import torch
from heliograph.packages.tests.torture.rule_guard import TOUCHED, trap, watch
from heliograph.packages.tests.torture.rule_writer import NAMES, Writer
from heliograph_rules.errors import MetricUnavailable, RuleError
from heliograph_rules.language.rule import Rule, compile_rule
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

MOST_SECONDS = 0.05  # for one evaluation
# What fails is not made smaller: to find out would try it again, with all that Hypothesis itself does meanwhile.
SETTINGS = settings(
    database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False
)
FUNCTIONS_OF_PYTHON: dict[str, Any] = {
    **{f"math_{name}": getattr(math, name) for name in ("trunc", "floor", "ceil", "sqrt")},
    **{kind.__name__: kind for kind in (int, float, str, list, tuple, dict, set)},
    **{function.__name__: function for function in (abs, len, round, sum, min, max, any, all, sorted)},
}


class Keyed(dict[str, Any]):
    """A dict whose keys Python, too, finds after a dot."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def values() -> dict[str, Any]:
    """Return values for every metric of the rules."""
    compile_rule("abs(1) == f'{1}'", ()).evaluate({})  # imports what it needs, before anybody watches
    return {
        "loss": Keyed(loss=0.9, epoch=1.5, grad=torch.tensor(2.0), nan=math.nan),
        "epoch": 1.5,
        "window": deque([3.0, 2.0, 1.0, math.inf], maxlen=4),
        "steps": [1, 2, 3],
        "state": Keyed(epoch=2, best=None, flags=(True, False), log=[Keyed(loss=1.0)], deep=Keyed(x=Keyed(x=1))),
        "log": [Keyed(loss=1.0 / step, epoch=step) for step in range(1, 9)],
        "flag": True,
        "word": "loss",
        "absent": None,
        "long": deque((float(value % 97) for value in range(20_000)), maxlen=20_000),
        "scalar": numpy.bool_(True),
        "trap": trap(object),
        "evil": [trap(float, 1.0), {"x": trap(int, 2), "y": trap(object)}, trap(str, "a"), trap(list, [1]), trap(dict)],
    }


def texts() -> st.SearchStrategy[str]:
    """Return rules, and what is none."""
    written = st.binary(min_size=16, max_size=16).map(lambda number: Writer(Random(number)).rule())
    return st.sampled_from([st.text(max_size=60), *[written] * 9]).flatmap(lambda strategy: strategy)


def outcome(text: str, given_values: dict[str, Any], around: Callable[[Callable[[], str]], str]) -> str:
    """Read and evaluate a rule; return what came of it: `True`, `False` or the name of an error.

    Args:
        text: the rule's.
        given_values: the metrics'.
        around: calls the evaluation that it is given, and measures it.

    Raises:
        AssertionError: something else happened than what is documented.
    """
    TOUCHED.clear()
    rule = read(text)
    if isinstance(rule, RuleError):
        return f"refused with {type(rule).__name__}"

    def evaluated() -> str:
        with watch().watching() as seen:
            try:
                reported = str(rule.evaluate(given_values))
            except (RuleError, MetricUnavailable) as error:
                reported = type(error).__name__
        assert seen == [], f"{text!r} reached {seen}"
        return reported

    reported = around(evaluated)
    assert TOUCHED == [], f"{text!r} touched {TOUCHED}"
    if reported in ("True", "False") and not rule.draws and not rule.names & {"absent", "trap", "evil"}:
        assert python_says(text, given_values) in (reported, None), f"{text!r} is {reported}, and Python disagrees"
    return reported


def read(text: str) -> Rule | RuleError:
    """Return a rule, or why it was refused."""
    made: Rule | RuleError
    with watch().watching() as seen:
        try:
            made = compile_rule(text, NAMES)
        except RuleError as error:
            made = error
    assert seen in ([], ["compile"]), f"{text!r} reached {seen} while it was read"
    column = made.column if isinstance(made, RuleError) else None
    assert column is None or 1 <= column <= len(text) + 1, f"column {column} of {text!r}"
    return made


def python_says(text: str, given_values: dict[str, Any]) -> str | None:
    """Return what Python itself makes of a rule that was found to be harmless; None where the languages differ."""
    if " is " in text or "{" in text:  # the identity of values, and the order of sets, are our own
        return None
    plain = {name: list(value) if type(value) is deque else value for name, value in given_values.items()}
    plain |= {"scalar": bool(plain["scalar"]), "loss": Keyed(plain["loss"], grad=2.0)}
    with catch_warnings():
        simplefilter("ignore")
        try:
            return str(bool(eval(text.strip(), {"__builtins__": {}, **FUNCTIONS_OF_PYTHON, **plain})))
        except AttributeError:  # a key after a dot, in a dict that the rule made
            return None


def in_time(evaluated: Callable[[], str]) -> str:
    """Evaluate a rule within the time that is allowed; twice more where it was not, as the machine may be busy."""
    took = list[float]()
    while True:
        began = process_time()
        reported = evaluated()
        took.append(process_time() - began)
        if took[-1] <= MOST_SECONDS:
            return reported
        assert len(took) < 3, f"took {min(took) * 1e3:.0f} ms, and {MOST_SECONDS * 1e3:g} are allowed"


def torture_rules(cases: int, number: int) -> Counter[str]:
    """Read and evaluate rules at random; return how often they came to what.

    Args:
        cases: how many.
        number: decides all of them.

    Raises:
        AssertionError: one did what none may do; names it.
    """
    ends = Counter[str]()
    metrics = values()

    @seed(number)
    @settings(SETTINGS, max_examples=cases)
    @given(texts())
    def each(text: str) -> None:
        ends[outcome(text, metrics, in_time)] += 1

    each()
    return ends


def main() -> int:
    """Run the torture; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="how many rules (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all of them (%(default)s)")
    options = parser.parse_args()
    try:
        ends = torture_rules(options.cases, options.seed)
    except AssertionError as error:
        print(f"FAILED with seed {options.seed}: {error}", file=sys.stderr)
        return 1
    for end, times in ends.most_common():
        print(f"{times:>6} {end}")
    print(f"{ends.total()} rules: none did what none may do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
