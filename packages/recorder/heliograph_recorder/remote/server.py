"""Request server threads: accept connections, read commands, send answers."""

from __future__ import annotations

import hmac
import logging
import os
import signal
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .messages import LONGEST, STATUS, Command, encode, read_command
from .sockets import host_name, peer

CLIENTS = 16  # connected at once, for each listener
WAITING = 64  # requests that the training has not read yet
PATIENCE = 10.0  # seconds for sending a message
PERIOD = 1.0  # seconds between two looks for the end of the run, where a shutdown does not wake `wait`
PAUSE = 0.01  # seconds between two connections: a flood of them would take Python's lock from the training
UNVERIFIED = "(by their own account, "
logger = logging.getLogger("heliograph")


@dataclass(slots=True, eq=False)
class Client:
    """A connection.

    Attributes:
        user: verified by the kernel; empty over TCP.
        origin: where an unverified client connects from.
        pending: the number of its commands without an outcome.
        guard: held while a message is sent.
    """

    connection: socket.socket
    listener: socket.socket
    user: str
    origin: str
    pending: int = 0
    guard: threading.RLock = field(default_factory=threading.RLock)

    def send(self, message: Mapping[str, Any], *, outcomes: int = 0, commands: int = 0) -> None:
        """Send a message without waiting; disconnect a client that does not read."""
        data = encode(message)
        with self.guard:
            self.pending += commands - outcomes
            try:
                is_sent = self.connection.send(data) == len(data)
            except OSError:  # its buffer is full, or it has left
                is_sent = False
        if not is_sent:
            _shut_down(self.connection)


@dataclass(frozen=True, slots=True, eq=False)
class ClientCommand:
    command: Command
    by: str
    client: Client


class Server:
    """Reads the commands of clients into `inbox`, for the training to serve.

    Each listener and each client has a thread. A client is disconnected if it sends an invalid message, does not read,
    or sends nothing.

    Args:
        status: returns the status of the run; called in the threads.

    Attributes:
        inbox: commands that the training has not read; it takes them from the left.
        error: the exception that ended a thread.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self.inbox: deque[ClientCommand] = deque()
        self.error: Exception | None = None
        self._status, self._tokens = status, dict[socket.socket, str]()
        self._paths: list[Path] = []
        self._clients: set[Client] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        _SERVERS.add(self)

    def add(self, listener: socket.socket, *, token: str = "", files: tuple[Path, ...] = ()) -> None:
        """Accept the connections of a listener, whose files are removed at the end; call it before `start`."""
        listener.setblocking(False)
        self._tokens[listener] = token
        self._paths += files

    def start(self) -> None:
        for listener in self._tokens:
            self._start(self._accept_all, listener)

    def close(self) -> None:
        """Disconnect all clients, and remove the files; closing twice does nothing."""
        for path in self._paths:
            path.unlink(missing_ok=True)  # first, so that no new client finds it
        self._paths = []
        self._closing.set()
        for descriptor in (*self._tokens, *(client.connection for client in list(self._clients))):
            _shut_down(descriptor)
        for thread in list(self._threads):
            thread.join(PATIENCE)  # looking up the name of a user may block
        for listener in self._tokens:
            listener.close()

    def release(self) -> None:
        """Close the file descriptors of this process; after a fork, those of the parent stay open."""
        for descriptor in (*self._tokens, *(client.connection for client in self._clients)):
            descriptor.close()

    def _start(self, target: Callable[[Any], None], subject: Any) -> None:
        def run() -> None:
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the training's thread handles them
            try:
                target(subject)
            except Exception as error:  # the plugin warns of it, and the training continues
                self.error = error
                logger.exception("A thread of Remote failed")
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name="heliograph-remote", daemon=True)
        self._threads.add(thread)
        thread.start()

    # In the threads.

    def _accept_all(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            if wait([listener], PERIOD):
                with suppress(OSError):  # the client has left, is another user, or no file descriptor is left
                    self._accept(listener)
                self._closing.wait(PAUSE)

    def _accept(self, listener: socket.socket) -> None:
        connection, address = listener.accept()
        try:
            connection.setblocking(False)
            user, origin = _identify(connection, address)
            client = Client(connection, listener, user, origin)
            if sum(connected.listener is listener for connected in self._clients) >= CLIENTS:
                client.send(_refusal(f"{CLIENTS} clients are connected already: try again."))
                raise PermissionError
        except OSError:
            connection.close()
            raise
        self._clients.add(client)
        self._start(self._serve, client)

    def _serve(self, client: Client) -> None:
        received = bytearray()
        try:
            while wait([client.connection], PATIENCE) or client.pending:
                with suppress(BlockingIOError):  # it waits for the outcome of a command
                    data = client.connection.recv(LONGEST)
                    if not data:
                        return
                    received += data
                while (end := received.find(b"\n")) >= 0:
                    line = bytes(received[:end])
                    del received[: end + 1]
                    self._handle(client, read_command(line))
                if len(received) >= LONGEST:
                    raise ValueError(f"a message has at most {LONGEST} bytes.")
        except ValueError as error:
            client.send(_refusal(str(error)))
        except OSError:  # the client has left
            pass
        finally:
            self._clients.discard(client)
            _shut_down(client.connection)
            client.connection.close()

    def _handle(self, client: Client, command: Command) -> None:
        token = self._tokens[client.listener]
        if not hmac.compare_digest(command.token.encode("utf-8", "replace"), token.encode("ascii")):
            raise ValueError("the token is not the token of this run.")
        if command.word == STATUS:
            client.send({"state": STATUS, "status": self._status()})
        elif len(self.inbox) >= WAITING or client.pending >= WAITING:
            client.send(_refusal(f"{WAITING} requests are waiting already: try again."))
        else:
            by = client.user or f"{command.user or 'somebody'} {UNVERIFIED}{client.origin})"
            with client.guard:  # so that no answer of the training overtakes this one
                self.inbox.append(ClientCommand(command, by, client))
                text = "the run reads the request after its current batch."
                client.send({"state": "queued", "text": text}, commands=1)


def _refusal(reason: str) -> dict[str, str]:
    return {"state": "refused", "text": reason}


def _shut_down(connection: socket.socket) -> None:
    """End a connection, also for forked processes that have it open; its thread closes it."""
    with suppress(OSError):  # the other end has left
        connection.shutdown(socket.SHUT_RDWR)


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


def _release_in_child() -> None:
    """Close the connections in a forked process, such as a loader's worker, which may outlive its parent."""
    for server in list(_SERVERS):
        server.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
