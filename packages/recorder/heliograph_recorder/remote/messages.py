"""Messages between a run and its clients: one JSON object a line, with checked fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
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


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a client; its fields are the fields of a message.

    Attributes:
        ask: one of `VERBS`, or `status`.
        reason: one line without control characters.
        target: the plugin to enable or disable, or the optimizer to set the learning rate of.
        value: the learning rate.
        wait: whether the client waits for the outcome.
        user: the name that the client claims.
        token: the token, over TCP.
    """

    ask: str = ""
    reason: str = ""
    target: str = ""
    value: float = 0.0
    wait: bool = False
    user: str = ""
    token: str = ""


FIELDS: Final = {field.name: type(field.default) for field in fields(Command)}


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line.decode("utf-8"), parse_int=float)  # parsing an int of many digits is slow
    except (ValueError, RecursionError):
        message = None
    if type(message) is not dict:
        raise ValueError("a message is one JSON object in a line of UTF-8.")
    return message


def read_command(line: bytes) -> Command:
    """Parse a command; ValueError names a field that is unknown, missing or invalid."""
    message = decode(line)
    for name, value in message.items():
        if name not in FIELDS:
            raise ValueError(f"{printable(name)[:NAME]!r} is not a field of a message: use {', '.join(FIELDS)}.")
        if FIELDS[name] is not type(value):
            raise ValueError(f"the field {name!r} of a message is {with_article(FIELDS[name].__name__)}.")
    command = Command(**message)
    user, reason = printable(command.user).strip(), printable(command.reason).strip()
    if command.ask not in VERBS and command.ask != STATUS:
        raise ValueError(f"'ask' must be one of {', '.join([*VERBS, STATUS])}.")
    if command.ask != STATUS and not 0 < len(reason) <= REASON:
        raise ValueError(f"a request needs a reason of 1 to {REASON} characters.")
    if len(command.target) > NAME or not command.target.isprintable() or len(user) > NAME:
        raise ValueError(f"a name has at most {NAME} printable characters.")
    if command.ask == "set-lr" and not 0 < command.value < inf:
        raise ValueError(f"set-lr takes a learning rate above 0; got {command.value:g}.")
    return replace(command, user=user, reason=reason)
