"""Unix sockets of runs, and addresses and tokens for TCP."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from struct import Struct

LONGEST_ADDRESS = 103  # bytes, on every system
BACKLOG = 16
SUFFIX = ".sock"
CREDENTIALS = Struct("3i")  # process, user, group
SHORTEST_TOKEN, LONGEST_TOKEN = 16, 500  # characters
LOCAL = "127.0.0.1"


def parse_address(address: int | str) -> tuple[str, int]:
    """Return host and port of `host:port`, `[::1]:port`, or a port alone, which is on 127.0.0.1."""
    host, _, port = str(address).rpartition(":")
    has_host = bool(host) or not isinstance(address, str)
    if isinstance(address, bool) or not port.isdecimal() or int(port) > 65535 or not has_host:
        raise ValueError(f"A TCP address is a port such as 8750, or host:port; got {address!r}.")
    return host.strip("[]") or LOCAL, int(port)


def check_token(token: str) -> str:
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"A token has {SHORTEST_TOKEN} to {LONGEST_TOKEN} printable ASCII characters; got {len(token)} characters."
        )
    return token


def host_name() -> str:
    """Return the name of this machine with the characters that a file name can have."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:32] or "host"


def sockets_in(folder: Path) -> list[Path]:
    """Return the sockets in a folder, including stale ones."""
    return sorted(path for path in folder.glob(f"remote-*{SUFFIX}") if path.is_socket() and not path.is_symlink())


def listen(folder: Path) -> tuple[socket.socket, Path]:
    """Listen on a new socket in the folder of a run, and remove the sockets of killed runs.

    No connection is possible before `listen`, and then only for this user. The rename replaces a link at the path.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    path = folder / f"remote-{host_name()}-{token_hex(4)}{SUFFIX}"
    hidden = path.with_name(
        f".{path.name}"
    )  # until it listens, another run would take it for the socket of a killed one
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short(hidden) as name:
            listener.bind(name)
        hidden.chmod(0o600)
        listener.listen(BACKLOG)
        hidden.rename(path)
    except BaseException:
        listener.close()
        hidden.unlink(missing_ok=True)
        raise
    return listener, path


def remove_stale(folder: Path) -> None:
    """Remove the sockets and tokens of killed runs of this machine."""
    for path in sockets_in(folder):
        if path.name.startswith(f"remote-{host_name()}-") and _is_stale(path):
            path.unlink(missing_ok=True)
            path.with_suffix(".token").unlink(missing_ok=True)


def _is_stale(path: Path) -> bool:
    try:
        connect(path, 0.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # busy, owned by another user, or just removed
        return False
    return False


def connect(path: Path, timeout: float) -> socket.socket:
    """Connect to the socket of a run; OSError if it is gone, stale, or served by another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        with short(path.absolute()) as name:
            connection.connect(name)
        server = peer(connection)
        if server is not None and os.getuid() not in (server[1], 0):
            raise PermissionError(f"it is served by another user, number {server[1]}")
    except BaseException:
        connection.close()
        raise
    return connection


def peer(connection: socket.socket) -> tuple[int, int] | None:
    """Return the process and the user at the other end of a Unix socket; None except on Linux."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    process, user, _ = CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    )
    return process, user


@contextmanager
def short(path: Path) -> Iterator[str]:
    """Yield a name of a path that is short enough for the address of a socket, valid within the context."""
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise OSError(f"{path} has more than the {LONGEST_ADDRESS} bytes of a socket address: use a shorter folder.")
    number = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/{path.name}"
    finally:
        os.close(number)


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user can read; an existing file or link is replaced."""
    with suppress(FileNotFoundError):
        path.unlink()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(number, "w", encoding="ascii") as file:
        file.write(text)
