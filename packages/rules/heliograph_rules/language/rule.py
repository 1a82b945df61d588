"""The language of rules: an expression of Python's, without anything that could do harm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random
from reprlib import repr as shortened
from typing import Any

from heliograph.spi import require

from ..errors import MetricUnavailable, RuleError, RuleEvaluationError, RuleLimitError, RuleTypeError, show
from .checks import Source
from .kinds import name_kinds
from .values import INCORRECT


def compile_rule(text: str, names: Collection[str]) -> Rule:
    """Read a rule, and check all that can be checked before it is evaluated.

    Args:
        text: one expression that is true or false, such as `loss["loss"] < 1.0`.
        names: the metrics that it may read.

    Raises:
        ImportError: simpleeval is missing.
        RuleError: the rule is wrong; which subclass says how, and `column` where.
    """
    try:
        return Rule(text, names)
    except RecursionError:
        raise RuleLimitError("The rule is nested too deeply to be read here.") from None


class Rule:
    """A checked rule.

    `rand` and `randint` draw from the rule's own numbers: they depend on nothing but its text and on how many it has
    drawn, so they leave the training's random stream alone, and are the same on all ranks. Save `state_dict` where a
    resumed run must continue with the next of them.

    Args:
        text: one expression.
        names: the metrics that it may read.

    Attributes:
        text: as given.
        names: the metrics that it does read.
        draws: how many random numbers it has drawn.

    Raises:
        ImportError: simpleeval is missing.
        RuleError: the rule is wrong.
    """

    def __init__(self, text: str, names: Collection[str]) -> None:
        require("simpleeval", "A rule", extra="rules")
        from .checks import Checker
        from .evaluator import Evaluator

        self._source = Source(text)
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
        """Return whether the rule holds.

        Args:
            values: the metrics' values by name; one that is None, or missing, is not available yet.

        Raises:
            MetricUnavailable: the rule needs a metric that is not available.
            RuleTypeError: something has a type that cannot be, or the rule is neither true nor false.
            RuleLimitError: it would take too long or become too large.
            RuleEvaluationError: it failed otherwise; the cause is Python's own error, such as a KeyError.
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
        """Return how many random numbers were drawn."""
        return {"draws": self.draws}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the next random number."""
        self.draws = state["draws"]

    def _truth(self, value: Any) -> bool:
        if type(value) is not bool:
            kind = name_kinds(frozenset({type(value)}))
            raise RuleTypeError(f"{INCORRECT}: the rule gave {kind}, and it must give bool: {shortened(value)}.")
        return value

    def _type_error(self, problem: str) -> RuleTypeError:
        node = self._evaluator.node
        expression = " ".join((self.text if node is None else self._source.segment(node)).split())
        return RuleTypeError(f"{problem} The expression is {show(expression)}.", column=self._column())

    def _column(self) -> int | None:
        return None if self._evaluator.node is None else self._source.column(self._evaluator.node)

    def _draw(self) -> float:
        self.draws += 1
        return Random(f"{self.draws} {self.text}").random()  # noqa: S311  # nothing secret
