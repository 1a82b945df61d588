"""Limits of the language of rules: an evaluation never takes more than 50 ms, whatever the rule and its metrics are."""

from __future__ import annotations

import re

from ..errors import RuleLimitError, RuleSyntaxError

MAX_TEXT = 4_000  # characters of a rule
MAX_DEPTH = 64  # levels of a rule, and of a value
MAX_BITS = 4_096  # of a whole number
MAX_KEY_BITS = 60  # of a whole number in a set or as a key: larger ones can be chosen to have one hash
MAX_LENGTH = 10_000  # characters of a text, or items of a list, that a rule makes
MAX_DIGITS = 300  # that a number is rounded to, or is written with

WORK = 200_000  # units, of a twentieth of a microsecond or so each
NODE = 10  # units that a piece of a rule costs
TUPLE = 200  # units of a tuple in a set or as a key: tuples can be chosen to have one hash, such as (-1,) and (-2,)

FORMAT = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?([0-9]*)[,_]?(?:\.([0-9]+))?[bcdeEfFgGosxX%]?", re.DOTALL)


class Budget:
    """The work that one evaluation may still do."""

    def __init__(self) -> None:
        self.left = WORK

    def charge(self, units: int) -> None:
        """Take some units.

        Raises:
            RuleLimitError: so many are not left.
        """
        self.left -= units
        if self.left < 0:
            raise RuleLimitError(
                "The rule takes too much work, and was stopped: let it look at fewer values, as of a smaller window, "
                "or at single ones of them."
            )


def check_bits(bits: int) -> None:
    """Raise RuleLimitError where a whole number of so many bits is too large."""
    if bits > MAX_BITS:
        raise RuleLimitError(f"A whole number is too large: it would have {bits} bits, and {MAX_BITS} are allowed.")


def check_length(length: int) -> None:
    """Raise RuleLimitError where a text or a list of such a length is too long."""
    if length > MAX_LENGTH:
        raise RuleLimitError(
            f"A text or a list is too long: it would have {length} characters or items, and {MAX_LENGTH} are allowed."
        )


def check_format(spec: str) -> None:
    """Check how a value is to be written in an f-string.

    Raises:
        RuleLimitError: it would be too long.
        RuleSyntaxError: this is not a format of numbers and texts.
    """
    found = FORMAT.fullmatch(spec)
    if found is None:
        raise RuleSyntaxError(f"{spec!r:.40} is not a format of a number or of a text; one is '.3f'.")
    if any(len(size) > len(str(MAX_DIGITS)) or int(size) > MAX_DIGITS for size in found.groups() if size):
        raise RuleLimitError(f"The format {spec!r:.40} writes too much: {MAX_DIGITS} characters are allowed.")
