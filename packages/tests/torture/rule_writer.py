"""Rules at random: right ones, nearly right ones, and ones that mean harm."""

from __future__ import annotations

import re
from random import Random

NAMES = ("loss", "epoch", "window", "steps", "state", "log", "flag", "word", "absent", "long", "scalar", "trap", "evil")
FUNCTION_NAMES = (
    "abs len round sum math_trunc math_floor math_ceil math_sqrt rand randint int float str list tuple dict set min "
    "max any all sorted"
)
FUNCTIONS = tuple(FUNCTION_NAMES.split())
HARM = (
    "open('/etc/passwd')",
    "eval('1')",
    "exec('1')",
    "getattr(loss, 'real')",
    "type(loss)",
    "input()",
    "globals()",
    "loss.mro()",
    "loss._private",
    "loss.func_globals",
    "state.gi_frame",
    "word.format(loss)",
    "'{0.real}'.format(loss)",
    "(lambda: loss)()",
    "(loss := 1)",
    "[*window]",
    "{**state}",
    "9 ** 9 ** 9 ** 9",
    "'a' * 999999999",
    "[0] * 999999999",
    "1 << 999999999",
    "f'{1:>999999999}'",
    "f'{1:.999999999f}'",
    "'%999999999d' % 1",
    "round(1, -999999999)",
    "int('9' * 9999)",
    "str(9 ** 1200) * 9",
    "sum([[0]] * 999, [])",
    "sorted(long)",
    "[a for a in long for b in long for c in long]",
    "{a * (2 ** 61 - 1) for a in long}",
    "1e999 - 1e999",
    "-9 ** 0.5",
    "'\\ud800'",
    "1j",
    "b'a'",
    "...",
    "print",
    "abs",
    "_",
    "\uff4coss",
    "loss\u200b",
    "[" * 70 + "]" * 70,
    "not " * 70 + "flag",
    "-" * 99 + "1",
    "1" * 3000,
)
# What can stand for what: pieces without and with such pieces in them. One with a star is inside of a comprehension.
GRAMMAR: dict[str, tuple[list[str], list[str]]] = {
    "truth": (
        ["flag", "True", "False", "absent != None", "epoch > 1", "scalar"],
        [
            *["(<any> <order> <any>)"] * 4,
            *["(<number> <size> <number>)"] * 2,
            "(<truth> <junction> <truth>)",
            "(not <truth>)",
            "(<number> <size> <number> <order> <any>)",
            "<every>(<truth*> for a in <items>)",
        ],
    ),
    "number": (
        [
            *["0", "1", "2.5", "-3", "1e300", "2**64", "True", "0.1", "1180591620717411303423", "<local>", "<local>"],
            *["epoch", "loss['loss']", "window[-1]", "steps[0]", "state.epoch", "log[0].loss", "len(window)"],
        ],
        [
            *["(<number> <binary> <number>)"] * 3,
            "(<unary><number>)",
            *["<calculation>(<number>)"] * 2,
            "<summary>(<items>)",
        ],
    ),
    "items": (
        ["window", "steps", "log", "state", "'abc'", "[]", "[1, 2]", "(1,)", "{1}", "long", "<local>"],
        [
            "[<any>, <any>]",
            "(<any>, <any>)",
            "{<any>: <any>}",
            "{<any>, <any>}",
            "[<any*> for a in <items> if <truth*>]",
            "{<any*>: <any*> for a in <items>}",
            "{<any*> for a, b in <items>}",
            "<items>[<number>:<number>]",
        ],
    ),
    "any": (
        [*NAMES, "None", "1", "0.5", "'loss'", "''", "()", "<local>", "<local>"],
        [
            *["<number>", "<truth>", "<items>"] * 2,
            "<any>[<any>]",
            "<any>.<key>",
            "(<any> if <truth> else <any>)",
            "(<any> <binary> <any>)",
            "<function>()",
            "<function>(<any>)",
            "<function>(<any>, <any>)",
            'f"{<quoted>!r:><width>}"',
            'f"x{<quoted>:<format>}"',
            "<maybe>",
        ],
    ),
    "maybe": ([*HARM, *["<number>"] * 4 * len(HARM)], []),
    "binary": (["+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "and", "or"], []),
    "order": (["<", "<=", ">", ">=", "==", "!=", "in", "not in", "is", "is not"], []),
    "size": (["<", "<=", ">", ">=", "==", "!="], []),
    "junction": (["and", "or"], []),
    "unary": (["+", "-", "~", "not "], []),
    "every": (["any", "all"], []),
    "calculation": (["abs", "round", "int", "float", "math_floor", "math_sqrt", "math_trunc", "randint"], []),
    "summary": (["min", "max", "sum", "len"], []),
    "function": (list(FUNCTIONS), []),
    "key": (["loss", "epoch", "real", "x"], []),
    "width": (["1", "30", "300", "301", "99999"], []),
    "format": (["", ".3f", "d", "_", "%", ",", "=+9.2e", ".999999f"], []),
}
SIGNS = "()[]{}:,.=@~!\\\"'# \n\t\0é\uff3f_"
PIECES = [
    *NAMES,
    *FUNCTIONS,
    *SIGNS,
    *GRAMMAR["binary"][0],
    *GRAMMAR["order"][0],
    "lambda",
    "for",
    "if",
    "else",
    "f'",
    "0",
]
PART = re.compile(r"<([a-z]+)(\*?)>")


class Writer:
    """Writes rules.

    Args:
        random: of all choices.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self._inside = 0  # comprehensions around what is written

    def rule(self) -> str:
        """Return a rule's text; most can be evaluated, some cannot even be read."""
        how, text = self.random.random(), self.write("truth", self.random.randint(1, 4))
        if how < 0.1:
            return self.spoilt(text)
        return " ".join(self.random.choices(PIECES, k=self.random.randint(0, 12))) if how < 0.15 else text

    def spoilt(self, text: str) -> str:
        """Return a text with a piece taken out, put in or doubled."""
        start, stop = sorted(self.random.choices(range(len(text) + 1), k=2))
        piece: str = self.random.choice([text[start:stop] * 2, "", self.random.choice(PIECES)])
        return text[:start] + piece + text[stop:]

    def write(self, what: str, depth: int) -> str:
        """Return a text for a word of the grammar, with at most so many levels."""
        if what == "local":
            return self.random.choice(["a", "a", "a", "b"]) if self._inside else "epoch"
        if what == "quoted":  # as it can stand in an f-string
            return self.write("any", depth).translate({ord('"'): "'", ord("\\"): "", ord("{"): "(", ord("}"): ")"})
        leaves, branches = GRAMMAR[what]
        is_leaf = not branches or depth <= 0 or self.random.random() < 0.1
        template: str = self.random.choice(leaves if is_leaf else branches)
        return PART.sub(lambda found: self._part(found[1], bool(found[2]), depth - 1), template)

    def _part(self, what: str, is_inside: bool, depth: int) -> str:
        self._inside += is_inside
        text = self.write(what, depth)
        self._inside -= is_inside
        return text
