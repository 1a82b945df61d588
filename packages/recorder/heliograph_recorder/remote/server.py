"""The thread that talks with who asks: bounded in memory, in connections, and in its share of the processor."""

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
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

from .clients import OWN_ACCOUNT, Asked, Client, identify, shut
from .messages import LONGEST, STATUS, Command, encode, read_command

CLIENTS = 16  # at once, of each way to connect
WAITING = 64  # requests that the training has not seen yet
UNREAD = 64 * 1024  # bytes that a client has not read
PATIENCE = 10.0  # seconds for a message, and for reading the answers
SHARE = 0.05  # of the time, at most: else the training, which shares Python's lock with this thread, would notice
LONGEST_PAUSE = 0.5  # seconds
logger = logging.getLogger("heliograph")


class Server:
    """Accepts connections and reads commands; what becomes of them, the training answers.

    A message that is no command, a client that does not read, or that sends nothing, is disconnected. All work is done
    in one thread, which rests for nineteen times as long as it has worked.

    Args:
        status: returns what a run can say of itself at any moment. Called in the thread.

    Attributes:
        inbox: the commands that the training has not seen; it takes them out on the left.
        error: what ended the thread, None where nothing did.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self.inbox: deque[Asked] = deque()
        self.error: Exception | None = None
        self._status, self._tokens = status, dict[socket.socket, str]()
        self._paths: list[Path] = []
        self._selector = selectors.DefaultSelector()
        self._clients: set[Client] = set()
        self._answers: deque[tuple[Client, bytes, bool]] = deque()
        self._closing = threading.Event()
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="heliograph-remote", daemon=True)
        _SERVERS.add(self)

    def add(self, listener: socket.socket, *, token: str = "", files: tuple[Path, ...] = ()) -> None:
        """Accept the connections of a socket that listens, before `start`.

        Args:
            listener: the socket.
            token: what each message has to hold; empty where nobody else can connect.
            files: what is removed with it.
        """
        listener.setblocking(False)
        self._tokens[listener] = token
        self._paths += files
        self._selector.register(listener, selectors.EVENT_READ)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def answer(self, client: Client, message: Mapping[str, Any], *, last: bool) -> None:
        """Send a message to a client, from any thread.

        Args:
            client: the client.
            message: the message.
            last: whether it says what became of a command.
        """
        self._answers.append((client, encode(message), last))
        self._wake()

    def close(self) -> None:
        """Send what can be sent at once, disconnect everybody, remove the files; closing twice does nothing."""
        for path in self._paths:
            path.unlink(missing_ok=True)  # first: nobody else can find it
        self._paths = []
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)  # it may wait for the system to name a user
        for listener in self._tokens:
            shut(listener)
        self._release()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # there are wakes enough that it has not read
            self._waker.send(b"\0")

    def _release(self) -> None:
        """Close all that this process holds; in a forked one, the parent keeps its own."""
        for each in (*self._tokens, *(client.connection for client in self._clients), self._woken, self._waker):
            each.close()
        self._selector.close()

    # In the thread.

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the training's thread
        try:
            while not self._closing.is_set():
                busy_since = thread_time()
                self._work(self._selector.select(1.0 if self._clients else None))
                pause = min((thread_time() - busy_since) * (1 / SHARE - 1), LONGEST_PAUSE)
                self._closing.wait(pause)
            self._deliver()
        except Exception as error:  # the plugin reports it, and the training continues
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
                assert isinstance(key.fileobj, socket.socket)  # only sockets are registered
                self._accept(key.fileobj)
        self._deliver()
        now = monotonic()
        for client in [each for each in self._clients if each.due < now and (not each.open or each.unsent)]:
            self._drop(client)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # who asked has left already, or this process has no number left for another file
            return
        connection.setblocking(False)
        try:
            asker, origin = identify(connection, address)
        except PermissionError:
            connection.close()
            return
        client = Client(connection, listener, asker, origin, monotonic() + PATIENCE)
        if sum(each.listener is listener for each in self._clients) >= CLIENTS:
            client.is_leaving = True
            client.unsent += encode(_refusal(f"{CLIENTS} others are connected: try again."))
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        if client.is_leaving:
            self._send(client)

    def _serve(self, client: Client) -> None:
        """Read what a client has sent, and send it what it has not read."""
        try:
            received = client.connection.recv(LONGEST)
        except BlockingIOError:
            received = None  # it can be written to
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
            client.due = monotonic() + PATIENCE
            try:
                self._handle(client, read_command(line))
            except ValueError as error:
                self._refuse(client, str(error))
        if len(client.received) >= LONGEST:
            self._refuse(client, f"a message has at most {LONGEST} bytes.")

    def _refuse(self, client: Client, why: str) -> None:
        """Say why, and disconnect."""
        client.unsent += encode(_refusal(why))
        client.is_leaving = True
        client.received.clear()

    def _handle(self, client: Client, command: Command) -> None:
        token = self._tokens[client.listener]
        if not hmac.compare_digest(command.token.encode("utf-8", "replace"), token.encode("ascii")):
            self._refuse(client, "the token is not the one of this run.")
        elif command.word == STATUS:
            client.unsent += encode({"state": STATUS, "status": self._status()})
        elif len(self.inbox) >= WAITING or client.open >= WAITING:
            client.unsent += encode(_refusal(f"{WAITING} requests wait already: try again."))
        else:
            client.open += 1
            by = client.asker or f"{command.user or 'somebody'} {OWN_ACCOUNT}{client.origin})"
            client.unsent += encode({"state": "queued", "text": "the run looks at it after its present batch."})
            self.inbox.append(Asked(command, by, client))

    def _deliver(self) -> None:
        while self._answers:
            client, line, last = self._answers.popleft()
            client.open -= last
            if client in self._clients:
                client.unsent += line
                client.due = monotonic() + PATIENCE
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
        shut(client.connection)


def _refusal(why: str) -> dict[str, str]:
    return {"state": "refused", "text": why}


_SERVERS: weakref.WeakSet[Server] = weakref.WeakSet()


def _release_in_child() -> None:
    """Let a forked process, such as a worker of a loader, keep no connection open that its parent closes."""
    for server in list(_SERVERS):
        server._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
