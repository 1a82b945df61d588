"""Request server thread: accepts connections, reads commands, sends answers."""

from __future__ import annotations

import hmac
import logging
import os
import selectors
import signal
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

from .messages import LONGEST, STATUS, Command, encode, read_command
from .sockets import host_name, peer

CLIENTS = 16  # connected at once, for each listener
WAITING = 64  # requests that the training has not read yet
UNREAD = 64 * 1024  # bytes of answers that a client has not read
PATIENCE = 10.0  # seconds for sending a message, and for reading the answers
SHARE = 0.05  # of one processor, at most: this thread shares Python's lock with the training
LONGEST_PAUSE = 0.5  # seconds
UNVERIFIED = "(by their own account, "
logger = logging.getLogger("heliograph")


@dataclass(slots=True, eq=False)
class Client:
    """A connection.

    Attributes:
        user: verified by the kernel; empty over TCP.
        origin: where an unverified client connects from.
        deadline: when it is disconnected unless it sends or reads something.
        pending: the number of its commands without an outcome.
        is_leaving: whether it is disconnected after `unsent` is sent.
    """

    connection: socket.socket
    listener: socket.socket
    user: str
    origin: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    pending: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ClientCommand:
    command: Command
    by: str
    client: Client


class Server:
    """Reads the commands of clients into `inbox`, for the training to serve.

    It disconnects a client that sends an invalid message, does not read, or sends nothing. All work is done in one
    thread, which rests nineteen times as long as it works.

    Args:
        status: returns the status of the run; called in the thread.

    Attributes:
        inbox: commands that the training has not read; it takes them from the left.
        error: the exception that ended the thread.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self.inbox: deque[ClientCommand] = deque()
        self.error: Exception | None = None
        self._status, self._tokens = status, dict[socket.socket, str]()
        self._paths: list[Path] = []
        self._selector = selectors.DefaultSelector()
        self._clients: set[Client] = set()
        self._answers: deque[tuple[Client, bytes, bool]] = deque()
        self._closing = threading.Event()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="heliograph-remote", daemon=True)
        _SERVERS.add(self)

    def add(self, listener: socket.socket, *, token: str = "", files: tuple[Path, ...] = ()) -> None:
        """Accept the connections of a listener, whose files are removed at the end; call it before `start`."""
        listener.setblocking(False)
        self._tokens[listener] = token
        self._paths += files
        self._selector.register(listener, selectors.EVENT_READ)

    def start(self) -> None:
        self._thread.start()

    def answer(self, client: Client, message: Mapping[str, Any], *, is_outcome: bool) -> None:
        """Send a message to a client, from any thread."""
        self._answers.append((client, encode(message), is_outcome))
        self._wake()

    def close(self) -> None:
        """Send what can be sent at once, disconnect all clients, remove the files; closing twice does nothing."""
        for path in self._paths:
            path.unlink(missing_ok=True)  # first, so that no new client finds it
        self._paths = []
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)  # looking up the name of a user may block
        for listener in self._tokens:
            _shut(listener)
        self._release()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough unread wakes
            self._waker.send(b"\0")

    def _release(self) -> None:
        """Close the file descriptors of this process; after a fork, those of the parent stay open."""
        clients = (client.connection for client in self._clients)
        for descriptor in (*self._tokens, *clients, self._woken, self._waker):
            descriptor.close()
        self._selector.close()

    # In the thread.

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the training's thread handles them
        try:
            while not self._closing.is_set():
                busy_since = thread_time()
                self._work(self._selector.select(1.0 if self._clients else None))
                pause = min((thread_time() - busy_since) * (1 / SHARE - 1), LONGEST_PAUSE)
                self._closing.wait(pause)
            self._deliver()
        except Exception as error:  # the plugin warns of it, and the training continues
            self.error = error
            logger.exception("The remote stopped listening")
        for client in list(self._clients):
            self._drop(client)

    def _work(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in ready:
            if key.fileobj is self._woken:
                self._woken.recv(4096)
            elif isinstance(key.data, Client):
                if key.data in self._clients:
                    self._serve(key.data)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._accept(key.fileobj)
        self._deliver()
        now = monotonic()
        for client in list(self._clients):
            if client.deadline < now and (not client.pending or client.unsent):
                self._drop(client)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # the client has left already, or this process has no file descriptor left
            return
        connection.setblocking(False)
        try:
            user, origin = _identify(connection, address)
        except PermissionError:
            connection.close()
            return
        client = Client(connection, listener, user, origin, monotonic() + PATIENCE)
        if sum(connected.listener is listener for connected in self._clients) >= CLIENTS:
            client.is_leaving = True
            client.unsent += encode(_refusal(f"{CLIENTS} clients are connected already: try again."))
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        if client.is_leaving:
            self._send(client)

    def _serve(self, client: Client) -> None:
        try:
            received = client.connection.recv(LONGEST)
        except BlockingIOError:
            received = None  # the client is ready to read
        except OSError:
            received = b""
        if received == b"":
            self._drop(client)
            return
        if received and not client.is_leaving:
            client.received += received
            self._read(client)
        self._send(client)

    def _read(self, client: Client) -> None:
        while not client.is_leaving and (end := client.received.find(b"\n")) >= 0:
            line = bytes(client.received[:end])
            del client.received[: end + 1]
            client.deadline = monotonic() + PATIENCE
            try:
                self._handle(client, read_command(line))
            except ValueError as error:
                self._disconnect(client, str(error))
        if len(client.received) >= LONGEST:
            self._disconnect(client, f"a message has at most {LONGEST} bytes.")

    def _disconnect(self, client: Client, reason: str) -> None:
        client.unsent += encode(_refusal(reason))
        client.is_leaving = True
        client.received.clear()

    def _handle(self, client: Client, command: Command) -> None:
        token = self._tokens[client.listener]
        if not hmac.compare_digest(command.token.encode("utf-8", "replace"), token.encode("ascii")):
            self._disconnect(client, "the token is not the token of this run.")
        elif command.word == STATUS:
            client.unsent += encode({"state": STATUS, "status": self._status()})
        elif len(self.inbox) >= WAITING or client.pending >= WAITING:
            client.unsent += encode(_refusal(f"{WAITING} requests are waiting already: try again."))
        else:
            client.pending += 1
            by = client.user or f"{command.user or 'somebody'} {UNVERIFIED}{client.origin})"
            client.unsent += encode({"state": "queued", "text": "the run reads the request after its current batch."})
            self.inbox.append(ClientCommand(command, by, client))

    def _deliver(self) -> None:
        while self._answers:
            client, line, is_outcome = self._answers.popleft()
            client.pending -= is_outcome
            if client in self._clients:
                client.unsent += line
                client.deadline = monotonic() + PATIENCE
                self._send(client)

    def _send(self, client: Client) -> None:
        try:
            sent = client.connection.send(client.unsent) if client.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(client)
            return
        del client.unsent[:sent]
        if len(client.unsent) > UNREAD or (client.is_leaving and not client.unsent):
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.connection, events, client)

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        _shut(client.connection)


def _refusal(reason: str) -> dict[str, str]:
    return {"state": "refused", "text": reason}


def _shut(connection: socket.socket) -> None:
    """Close a connection, also for forked processes that have it open."""
    with suppress(OSError):  # the other end has left
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


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
        server._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
