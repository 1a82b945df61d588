"""The request server: threads that accept connections, read commands and send answers."""

from __future__ import annotations

import hmac
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any

from .messages import LONGEST, STATUS, Command, encode, read_command
from .sockets import host_name, peer

CLIENTS = 16  # connected at once, for each listener
PAUSE = 0.01  # seconds after each connection: a flood of them would take Python's lock from the training
PATIENCE = 10.0  # seconds for reading a message, and for sending an answer
Answer = dict[str, Any]
logger = logging.getLogger("heliograph")


@dataclass(frozen=True, slots=True, eq=False)
class ClientCommand:
    """A command for the training; `answers` takes its answers, the last one with a state other than `accepted`."""

    command: Command
    by: str
    answers: SimpleQueue[Answer | None]


class Server:
    """Reads the commands of clients into `inbox`, for the training to serve.

    Args:
        status: returns the status of the run; called in other threads.

    Attributes:
        inbox: commands that the training has not read; it takes them from the left.
        clients: the connections.
        error: the exception of a thread.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self.status = status
        self.inbox: deque[ClientCommand] = deque()
        self.clients: set[Client] = set()
        self.error: Exception | None = None
        self.listeners: list[socket.socket] = []
        self._paths: list[Path] = []
        self._threads: list[Thread] = []
        self._closing = Event()
        _SERVERS.add(self)

    def add(self, listener: socket.socket, *, token: str = "", files: tuple[Path, ...] = ()) -> None:
        """Accept the connections of a listener, whose files are removed at the end; call it before `start`."""
        listener.settimeout(1.0)  # not every system ends accept() when the listener is closed
        self.listeners.append(listener)
        self._paths += files
        self._threads.append(Thread(target=self._accept, args=(listener, token), name="heliograph-remote", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Send the remaining answers, disconnect all clients, remove the files; closing twice does nothing."""
        for path in self._paths:
            path.unlink(missing_ok=True)  # first, so that no new client finds it
        self._closing.set()
        for listener in self.listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        _join(self._threads)
        clients = list(self.clients)
        for client in clients:
            client.answers.put(None)
            with suppress(OSError):
                client.connection.shutdown(socket.SHUT_RD)
        _join(clients)
        for listener in self.listeners:
            listener.close()
        self._paths, self._threads = [], []

    def _accept(self, listener: socket.socket, token: str) -> None:
        while not self._closing.wait(PAUSE):
            try:
                connection, address = listener.accept()
            except OSError:  # timeout, the client has left, or this process has no file descriptor left
                continue
            if sum(client.listener is listener for client in self.clients.copy()) < CLIENTS:
                Client(self, listener, token, connection, address).start()
                continue
            with connection, suppress(OSError):
                connection.sendall(encode(_refusal(f"{CLIENTS} clients are connected already: try again.")))


class Client(Thread):
    """Serves one connection: reads its command, and sends the answers."""

    def __init__(
        self, server: Server, listener: socket.socket, token: str, connection: socket.socket, address: Any
    ) -> None:
        super().__init__(name="heliograph-remote", daemon=True)
        self.listener, self.connection = listener, connection
        self.answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._server, self._token, self._address = server, token, address
        server.clients.add(self)

    def run(self) -> None:
        try:
            self._serve(*_identify(self.connection, self._address))
        except OSError:  # the client has left, is too slow, or is another user
            pass
        except Exception as error:  # the plugin warns of it, and the training continues
            self._server.error = error
            logger.exception("Remote failed to serve a client")
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # also for forked processes that have it open
        self.connection.close()
        self._server.clients.discard(self)

    def _serve(self, user: str, origin: str) -> None:
        try:
            command = read_command(self._read_line())
            if not hmac.compare_digest(command.token.encode("utf-8", "replace"), self._token.encode("ascii")):
                raise ValueError("the token is not the token of this run.")
        except ValueError as error:
            self._send(_refusal(str(error)))
            return
        if command.ask == STATUS:
            self._send({"state": STATUS, "status": self._server.status()})
            return
        by = user or f"{command.user or 'a user'} (by their own account, {origin})"
        self._server.inbox.append(ClientCommand(command, by, self.answers))
        self._send({"state": "queued", "text": "the run reads the request after its current batch."})
        while (answer := self.answers.get()) is not None:
            self._send(answer)
            if answer["state"] != "accepted" or not command.wait:
                return
        self._send({"state": "unserved", "text": "the run ended first."})

    def _read_line(self) -> bytes:
        received, deadline = b"", monotonic() + PATIENCE
        while b"\n" not in received:
            if len(received) >= LONGEST:
                raise ValueError(f"a message has at most {LONGEST} bytes.")
            self.connection.settimeout(max(0.001, deadline - monotonic()))
            if not (data := self.connection.recv(LONGEST)):
                raise ConnectionResetError
            received += data
        return received.partition(b"\n")[0]

    def _send(self, message: Mapping[str, Any]) -> None:
        self.connection.settimeout(PATIENCE)
        self.connection.sendall(encode(message))


def _refusal(reason: str) -> Answer:
    return {"state": "refused", "text": reason}


def _join(threads: list[Any]) -> None:
    deadline = monotonic() + PATIENCE  # looking up the name of a user may block
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - monotonic()))


def _identify(connection: socket.socket, address: Any) -> tuple[str, str]:
    """Return the verified user of a client, or where it connects from; PermissionError for a foreign user."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return "", f"from {address[0]}"
    import pwd  # missing on Windows

    credentials = peer(connection)
    user = os.getuid() if credentials is None else credentials[1]
    if user not in (0, os.getuid()):
        raise PermissionError
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:  # a container may have users without names
        name = f"user {user}"
    return f"{name}@{host_name()}", ""


_SERVERS: weakref.WeakSet[Server] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked process, such as a loader's worker, which may outlive its parent."""
    for server in list(_SERVERS):
        for connection in [*server.listeners, *(client.connection for client in server.clients)]:
            connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
