"""Messages between a run and its clients: one JSON object a line, with checked fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from heliograph.spi import printable, with_article

LONGEST = 4096  # bytes of a message, including its newline
REASON = 500  # characters
NAME = 100  # characters of the name of a plugin, an optimizer or a user
# Verbs of the control, by the word of a message.
VERBS: Final[Mapping[str, str]] = {
    "stop": "stop",
    "save": "save",
    "validate": "validation",
    "log": "log",
    "end-epoch": "end_epoch",
    "set-lr": "set_learning_rate",
    "enable": "enable_plugin",
    "disable": "disable_plugin",
}
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
    """A command of a client.

    Attributes:
        word: one of `VERBS`, or `status`.
        reason: one line without control characters.
        target: the plugin to enable or disable, or the optimizer to set the learning rate of; else empty.
        value: the learning rate; 0 for other commands.
        waits: whether the client waits for the outcome.
        user: the name that the client claims.
        token: the token, over TCP.
    """

    word: str
    reason: str = ""
    target: str = ""
    value: float = 0.0
    waits: bool = False
    user: str = ""
    token: str = ""


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line.decode("utf-8"), parse_int=float)  # parsing an int of many digits is slow
    except (ValueError, RecursionError):
        raise ValueError("a message is one JSON object in a line of UTF-8.") from None
    if type(message) is not dict:
        raise ValueError("a message is a JSON object.")
    return message


def read_command(line: bytes) -> Command:
    """Parse a command; ValueError names a field that is unknown, missing or invalid."""
    message = decode(line)
    for name, value in message.items():
        if name not in FIELDS:
            raise ValueError(f"{printable(name)[:NAME]!r} is not a field of a message: use {', '.join(FIELDS)}.")
        if FIELDS[name] is not type(value):
            raise ValueError(f"the field {name!r} of a message is {with_article(FIELDS[name].__name__)}.")
    word = message.get("ask", "")
    if word not in VERBS and word != STATUS:
        raise ValueError(f"'ask' must be one of {', '.join([*VERBS, STATUS])}.")
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
            raise ValueError("status takes no other fields.")
        return
    if not command.reason or len(command.reason) > REASON:
        raise ValueError(f"a request needs a reason of 1 to {REASON} characters.")
    if len(command.target) > NAME or not command.target.isprintable() or len(command.user) > NAME:
        raise ValueError(f"a name has at most {NAME} printable characters.")
    if bool(command.target) != (word in ("enable", "disable")) and word != "set-lr":
        raise ValueError("enable and disable need the name of a plugin; only set-lr may also have a target.")
    if word != "set-lr" and command.value:
        raise ValueError("only set-lr takes a value.")
    if word == "set-lr" and not (isfinite(command.value) and command.value > 0):
        raise ValueError(f"set-lr takes a learning rate above 0; got {command.value:g}.")
