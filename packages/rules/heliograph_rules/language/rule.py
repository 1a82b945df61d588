"""A checked rule: an expression in a safe subset of Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random
from reprlib import repr as shortened
from typing import Any

from heliograph.spi import require

from ..errors import MetricUnavailable, RuleError, RuleEvaluationError, RuleLimitError, RuleTypeError, show
from .checks import RuleText
from .kinds import name_kinds
from .values import INCORRECT


def compile_rule(text: str, names: Collection[str]) -> Rule:
    """Parse a rule and check everything that can be checked before its evaluation.

    Args:
        text: an expression that is true or false, for example `loss["loss"] < 1.0`.
        names: the metrics that it may read.

    Raises:
        ImportError: simpleeval is not installed.
        RuleError: the rule is invalid; its subclass tells the kind of error, and `column` the place.
    """
    try:
        return Rule(text, names)
    except RecursionError:
        raise RuleLimitError("The rule is nested too deeply to parse here.") from None


class Rule:
    """A checked rule.

    `rand` and `randint` return numbers that depend only on the text of the rule and on the number of previous draws.
    They do not change the random generators of the training, and are equal on all ranks. Save `state_dict` so that a
    resumed run continues with the next number.

    Attributes:
        text: the expression.
        names: the metrics that it reads.
        draws: the number of random numbers drawn.
    """

    def __init__(self, text: str, names: Collection[str]) -> None:
        require("simpleeval", "A rule", extra="rules")
        from .checks import Checker
        from .evaluator import Evaluator

        self._source = RuleText(text)
        self._tree = self._source.parse()
        checker = Checker(self._source, names)
        checker.check(self._tree)
        self.text = text
        self.names = frozenset(checker.read)
        self.draws = 0
        self._evaluator = Evaluator(self._draw)

    def __reduce__(self) -> tuple[Callable[..., Rule], tuple[str, frozenset[str]], dict[str, int]]:
        return compile_rule, (self.text, self.names), {"draws": self.draws}

    def evaluate(self, values: Mapping[str, Any]) -> bool:
        """Return whether the rule is true.

        Args:
            values: the values of the metrics by name; a value that is None or missing is not available yet.

        Raises:
            MetricUnavailable: the rule needs a metric that is not available.
            RuleTypeError: a value has an invalid type, or the rule is neither true nor false.
            RuleLimitError: the evaluation takes too long, or a value is too large.
            RuleEvaluationError: another error; its cause is Python's own error, for example a KeyError.
        """
        try:
            return self._truth(self._evaluator.result(self._tree, values))
        except MetricUnavailable:
            raise
        except RuleTypeError as error:
            raise self._type_error(error.problem) from error.__cause__
        except RuleError as error:
            error.column = self._column()
            raise
        except (RecursionError, MemoryError) as error:
            raise RuleLimitError("The rule, or a value, is nested too deeply or too large.") from error
        except TypeError as error:
            raise self._type_error(f"{INCORRECT}: {error!s:.200}.") from error
        except Exception as error:
            text = error.args[0] if isinstance(error, KeyError) and error.args else error
            problem = f"The rule failed: {type(error).__name__}: {text!s:.400}"
            raise RuleEvaluationError(problem, column=self._column()) from error

    def state_dict(self) -> dict[str, int]:
        return {"draws": self.draws}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.draws = state["draws"]

    def _truth(self, value: Any) -> bool:
        if type(value) is not bool:
            kind = name_kinds(frozenset({type(value)}))
            raise RuleTypeError(f"{INCORRECT}: the rule must return a bool, got {kind}: {shortened(value)}.")
        return value

    def _type_error(self, problem: str) -> RuleTypeError:
        node = self._evaluator.node
        expression = " ".join((self.text if node is None else self._source.segment(node)).split())
        return RuleTypeError(f"{problem} The expression is {show(expression)}.", column=self._column())

    def _column(self) -> int | None:
        return None if self._evaluator.node is None else self._source.column(self._evaluator.node)

    def _draw(self) -> float:
        self.draws += 1
        return Random(f"{self.draws} {self.text}").random()  # noqa: S311  # not a secret
