"""Limits that keep the evaluation of any rule below 50 ms."""

from __future__ import annotations

import re

from ..errors import RuleLimitError, RuleSyntaxError

MAX_TEXT = 4_000  # characters of a rule
MAX_DEPTH = 64  # levels of a rule, and of a value
MAX_BITS = 4_096  # of an integer
MAX_KEY_BITS = 60  # of an integer in a set or as a key: larger integers can be chosen to collide
MAX_LENGTH = 10_000  # characters or items of a text or list that a rule creates
MAX_DIGITS = 300  # in round() and in formats

WORK = 200_000  # units of about 0.05 µs
NODE = 10  # units per node of a rule
TUPLE = 200  # units per tuple in a set or as a key: tuples can be chosen to collide, for example (-1,) and (-2,)

FORMAT = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?([0-9]*)[,_]?(?:\.([0-9]+))?[bcdeEfFgGosxX%]?", re.DOTALL)


class Budget:
    """The remaining work of an evaluation."""

    def __init__(self) -> None:
        self.remaining = WORK

    def charge(self, units: int) -> None:
        self.remaining -= units
        if self.remaining < 0:
            raise RuleLimitError(
                "The rule takes too much work and was stopped: read fewer values, for example a smaller window or "
                "single items."
            )


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise RuleLimitError(f"An integer is too large: it would have {bits} bits, at most {MAX_BITS} are allowed.")


def check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise RuleLimitError(
            f"A text or list is too long: it would have {length} characters or items, at most {MAX_LENGTH} are allowed."
        )


def check_format(spec: str) -> None:
    match = FORMAT.fullmatch(spec)
    if match is None:
        raise RuleSyntaxError(f"{spec!r:.40} is not a format of numbers or text, for example '.3f'.")
    if any(len(size) > len(str(MAX_DIGITS)) or int(size) > MAX_DIGITS for size in match.groups() if size):
        raise RuleLimitError(f"The format {spec!r:.40} is too wide: at most {MAX_DIGITS} characters are allowed.")
