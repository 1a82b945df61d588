"""From a rule's text to its syntax tree, and from a piece of that back to its place in the text."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any
from unicodedata import normalize

from ..errors import RuleLimitError, RuleSyntaxError, RuleTypeError
from .limits import MAX_TEXT

LINE_END = re.compile(r"\r\n|\r|\n")


class Source:
    """A rule's text.

    Args:
        text: one expression.

    Raises:
        RuleLimitError: it is too long.
        RuleSyntaxError: it holds a double underscore.
        RuleTypeError: it is not text.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise RuleTypeError(f"A rule is a text such as 'loss[\"loss\"] < 1.0', got {text!r:.80}.")
        if len(text) > MAX_TEXT:
            raise RuleLimitError(f"The rule has {len(text)} characters, and {MAX_TEXT} are allowed.")
        if "__" in normalize("NFKC", text):  # as Python reads names: there are other underscores
            column = text.find("__") + 1 or None
            raise RuleSyntaxError("A double underscore (__) may not be in a rule.", column=column)
        self.text = text
        self._skipped = len(text) - len(text.lstrip())  # the parser takes it for an indentation
        self._lines = [0, *(found.end() for found in LINE_END.finditer(text.strip()))]

    def parse(self) -> ast.expr:
        """Return the syntax tree.

        Raises:
            RuleLimitError: it is too deep for Python.
            RuleSyntaxError: the text is not an expression of Python.
        """
        stripped = self.text.strip()
        if not stripped:
            raise RuleSyntaxError("The rule is empty: write an expression that is true or false.")
        try:
            with warnings.catch_warnings():  # as of an unknown escape in a text
                warnings.simplefilter("ignore")
                return ast.parse(stripped, mode="eval").body
        except SyntaxError as error:
            problem = f"{error.msg}. A rule is one expression, without any assignment."
            offset = (error.offset or len(stripped) + 1) - 1  # 0 and None are at its end
            raise RuleSyntaxError(problem, column=self._place(error.lineno, offset)) from None
        except (RecursionError, MemoryError):  # the second is what Python's parser raises
            raise RuleLimitError("The rule is nested too deeply to be read.") from None
        except ValueError as error:  # a null character or half a surrogate pair
            raise RuleSyntaxError(f"The rule cannot be read: {error}.") from None

    def column(self, node: Any) -> int:
        """Return where a piece of the tree begins, in characters from 1."""
        start = self._lines[min(node.lineno, len(self._lines)) - 1]
        line = self.text.strip()[start:].encode(errors="replace")[: node.col_offset]  # Python counts bytes
        return self._place(node.lineno, len(line.decode(errors="replace")))

    def segment(self, node: Any) -> str:
        """Return the text of a piece of the tree."""
        return ast.get_source_segment(self.text.strip(), node) or self.text.strip()

    def _place(self, line: int | None, offset: int) -> int:
        start = self._lines[min(line or 1, len(self._lines)) - 1]
        return min(self._skipped + start + max(offset, 0), len(self.text)) + 1
