"""The sockets of a run: made so that they are never open to others, found again, removed where their run is dead."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from struct import Struct
from tempfile import mkdtemp

LONGEST = 103  # bytes of an address that every system takes
BACKLOG = 16
SUFFIX = ".sock"
CREDENTIALS = Struct("3i")  # of a process, its user, its group


def host_name() -> str:
    """Return the name of this machine as it is part of a file name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:32] or "host"


def sockets_in(folder: Path) -> list[Path]:
    """Return the sockets of runs in a folder, those of dead runs too."""
    return sorted(path for path in folder.glob(f"remote-*{SUFFIX}") if path.is_socket() and not path.is_symlink())


def listen(folder: Path) -> tuple[socket.socket, Path]:
    """Make the socket of a run in its folder, for the user of this process alone, and remove those of dead runs.

    It is made in a folder that only this user can enter, and gets its name when it listens: so nobody else can ever
    connect, what has the name of a socket is one, and a link that somebody puts there is followed by nobody.

    Raises:
        OSError: the folder, or its file system, can have no socket.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    remove_dead(folder)
    path = folder / f"remote-{host_name()}-{token_hex(4)}{SUFFIX}"
    apart = Path(mkdtemp(prefix=".remote-", dir=folder))
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short(apart / path.name) as name:
            made.bind(name)
        (apart / path.name).chmod(0o600)
        made.listen(BACKLOG)
        (apart / path.name).rename(path)
    except BaseException:  # whatever it is, nothing stays open
        made.close()
        (apart / path.name).unlink(missing_ok=True)
        raise
    finally:
        apart.rmdir()
    return made, path


def remove_dead(folder: Path) -> None:
    """Remove the sockets of this machine's runs that were killed: nobody accepts a connection."""
    for path in sockets_in(folder):
        if path.name.startswith(f"remote-{host_name()}-") and _is_dead(path):
            for each in (path, path.with_suffix(".token")):
                each.unlink(missing_ok=True)


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            with short(path) as name:
                probe.connect(name)
        except ConnectionRefusedError:
            return True
        except OSError:  # it has much to do, is of another user, or was just removed
            return False
    return False


def connect(path: Path, timeout: float) -> socket.socket:
    """Return a connection to the socket of a run.

    Raises:
        OSError: there is no such socket, nobody accepts, or it is of another user.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout)
        with short(path.absolute()) as name:
            made.connect(name)
        served = peer(made)
        if served is not None and os.getuid() not in (served[1], 0):
            raise PermissionError(f"it is served by another user, number {served[1]}")
    except BaseException:  # whatever it is, nothing stays open
        made.close()
        raise
    return made


def peer(connection: socket.socket) -> tuple[int, int] | None:
    """Return the process and the user at the other end of a Unix socket, as the kernel knows them, by their numbers.

    None where it does not know them: Linux says it of both ends.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(given)
    return process, user


@contextmanager
def short(path: Path) -> Iterator[str]:
    """Yield a name of a path that fits into the address of a socket, for as long as the context lasts.

    Raises:
        OSError: the path is too long, and this system knows no other name for it.
    """
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise OSError(
            f"{path} has more than the {LONGEST} bytes that the address of a socket can have: take a shorter folder."
        )
    number = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/{path.name}"
    finally:
        os.close(number)


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user can read; what lies there is replaced, and no link is followed."""
    with suppress(FileNotFoundError):
        path.unlink()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(number, "w", encoding="ascii") as file:
        file.write(text)
