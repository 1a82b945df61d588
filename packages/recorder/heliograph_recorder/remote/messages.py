"""The messages between a run and who asks it: a JSON object in a line each, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from heliograph.spi import printable, with_article

LONGEST = 4096  # bytes of a message, with the end of its line
REASON = 500  # characters
NAME = 100  # characters of a plugin's name, an optimizer's, or a user's
VERBS: Final[Mapping[str, str]] = {
    "stop": "stop",
    "save": "save",
    "validate": "validation",
    "log": "log",
    "end-epoch": "end_epoch",
    "set-lr": "set_learning_rate",
    "enable": "enable_plugin",
    "disable": "disable_plugin",
}  # of the control, by the word that is asked with
STATUS = "status"
FIELDS: Final[Mapping[str, type]] = {
    "ask": str,
    "reason": str,
    "target": str,
    "value": float,
    "wait": bool,
    "user": str,
    "token": str,
}


@dataclass(frozen=True, slots=True)
class Command:
    """What somebody asks of a run.

    Attributes:
        word: one of `VERBS`, or `status`.
        reason: why, in one line without control characters.
        target: the name of a plugin to enable or disable, or of the optimizer whose rate is set; else empty.
        value: a learning rate; 0 where none is set.
        waits: whether the asker waits until it is known what became of it.
        user: who the asker says to be.
        token: what the asker proves to be allowed with.
    """

    word: str
    reason: str = ""
    target: str = ""
    value: float = 0.0
    waits: bool = False
    user: str = ""
    token: str = ""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as its line."""
    return json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the object in a line.

    Raises:
        ValueError: it is not an object of JSON.
    """
    try:
        message = json.loads(line.decode("utf-8"), parse_int=float)  # an int of many digits would take long
    except (ValueError, RecursionError):
        raise ValueError("a message is one JSON object in a line of UTF-8.") from None
    if type(message) is not dict:
        raise ValueError("a message is a JSON object.")
    return message


def read_command(line: bytes) -> Command:
    """Return the command in a line.

    Raises:
        ValueError: a field is unknown, missing, or not as it has to be; the text says which.
    """
    message = decode(line)
    for name, value in message.items():
        if name not in FIELDS:
            raise ValueError(f"{printable(name)[:NAME]!r} is not a field of a message.")
        if FIELDS[name] is not type(value):
            raise ValueError(f"the field {name!r} of a message is {with_article(FIELDS[name].__name__)}.")
    word = message.get("ask", "")
    if word not in VERBS and word != STATUS:
        raise ValueError(f"a run is asked for one of {', '.join([*VERBS, STATUS])}.")
    command = Command(
        word,
        printable(message.get("reason", "")).strip(),
        message.get("target", ""),
        message.get("value", 0.0),
        message.get("wait", False),
        printable(message.get("user", "")).strip(),
        message.get("token", ""),
    )
    _check(command)
    return command


def _check(command: Command) -> None:
    word = command.word
    if word == STATUS:
        if command.reason or command.target or command.value or command.waits:
            raise ValueError("status takes nothing else.")
        return
    if not command.reason or len(command.reason) > REASON:
        raise ValueError(f"a request has a reason, of at most {REASON} characters.")
    if len(command.target) > NAME or not command.target.isprintable() or len(command.user) > NAME:
        raise ValueError(f"a name has at most {NAME} characters, which can be printed.")
    if bool(command.target) != (word in ("enable", "disable")) and word != "set-lr":
        raise ValueError("enable and disable take the name of a plugin, the others take none.")
    if word != "set-lr" and command.value:
        raise ValueError("set-lr takes a learning rate, the others take none.")
    if word == "set-lr" and not (isfinite(command.value) and command.value > 0):
        raise ValueError(f"set-lr takes a learning rate, a number above 0; got {command.value:g}.")
