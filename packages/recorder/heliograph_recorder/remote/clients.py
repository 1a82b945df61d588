"""Who is connected to a run, and what they have asked for."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .messages import Command
from .sockets import host_name, peer

OWN_ACCOUNT = "(by their own account, "


@dataclass(slots=True, eq=False)
class Client:
    """A connection.

    Attributes:
        connection: its socket.
        listener: by which it came.
        asker: who asks, as far as this machine knows it; empty where it does not.
        origin: where from, in words, for an asker who is not known.
        due: when it is closed unless it sends or reads something.
        received, unsent: bytes.
        open: how many of its commands wait for what becomes of them.
        is_leaving: whether it is closed when all is sent.
    """

    connection: socket.socket
    listener: socket.socket
    asker: str
    origin: str
    due: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    open: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A command, by whom it is, and whose it is."""

    command: Command
    by: str
    client: Client


def shut(connection: socket.socket) -> None:
    """End a connection, also for a forked process that has it open, and close it."""
    with suppress(OSError):  # the other end has left
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def identify(connection: socket.socket, address: Any) -> tuple[str, str]:
    """Return who is at the other end, if the kernel says it, and where from.

    Raises:
        PermissionError: it is neither the user of this process nor root.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return "", f"from {address[0]}"
    known = peer(connection)
    user = None if known is None else known[1]
    if user not in (None, 0, os.getuid()):
        raise PermissionError
    return f"{_user_name(os.getuid() if user is None else user)}@{host_name()}", ""


def _user_name(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a container may have users without names
        return f"user {number}"
