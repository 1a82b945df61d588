"""A worker's end of the mailbox."""

from __future__ import annotations

import logging
import os
import threading
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from heliograph.spi import require

from .mailbox import Commands, Envelope, Message, ProgressUpdate

INTERVAL = 0.5  # seconds between two exchanges with the mailbox while there is nothing to send
RELEASE_INTERVAL = 0.1  # the same while a failed worker waits for its release

logger = logging.getLogger("heliograph")


class WorkerChannel:
    """Sends a rank's messages to the mailbox in order, and receives the caller's commands, in a thread.

    If the mailbox is gone, the driver no longer waits for this worker, and the process exits.

    Args:
        mailbox: the handle of the actor.
        fit: the id of the call of Ray's `fit` that this worker belongs to.
        group_id: the id of its worker group.
        rank: its rank.

    Attributes:
        commands: the newest that were received.
        progress: the progress of the run; sent at each exchange at which it is another one, so that the caller also
            knows how far a worker came that hangs or is killed.
    """

    def __init__(self, mailbox: Any, fit: str, group_id: str, rank: int) -> None:
        self._ray = require("ray", "RayLauncher", extra="ray")
        self._mailbox, self._sender = mailbox, (fit, group_id, rank)
        self._group_id = group_id
        self._outgoing: SimpleQueue[Message | threading.Event | None] = SimpleQueue()
        self.commands = Commands()
        self.progress: ProgressUpdate | None = None
        self._thread = threading.Thread(target=self._exchange, name="heliograph-worker-channel", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message without waiting."""
        self._outgoing.put(message)

    def flush(self) -> None:
        """Wait until the mailbox has all messages sent before, and `commands` is up to date."""
        delivered = threading.Event()
        self._outgoing.put(delivered)
        delivered.wait()

    def wait_for_release(self, seconds: float) -> None:
        """Wait until the other workers have ended too, at most so many seconds."""
        limit = monotonic() + seconds
        while self._group_id not in self.commands.released and monotonic() < limit:
            threading.Event().wait(RELEASE_INTERVAL)
            self.flush()

    def close(self) -> None:
        """Send the remaining messages, and end the thread."""
        self._outgoing.put(None)
        self._thread.join()

    def _exchange(self) -> None:
        is_closing = False
        sent: ProgressUpdate | None = None
        while not is_closing:
            items = self._collect()
            is_closing = None in items
            envelopes = [
                Envelope(*self._sender, each) for each in items if not isinstance(each, threading.Event | None)
            ]
            progress = self.progress
            if progress is not None and progress is not sent:
                envelopes.append(Envelope(*self._sender, progress))
                sent = progress
            try:
                self.commands = self._ray.get(self._mailbox.put.remote(envelopes))
            except Exception as error:  # noqa: BLE001  # without this thread, the worker would wait forever
                logger.error(
                    "the process that called RayLauncher.run cannot be reached, so this worker exits: %s", error
                )
                os._exit(1)
            for each in items:
                if isinstance(each, threading.Event):
                    each.set()

    def _collect(self) -> list[Message | threading.Event | None]:
        """Return what is to be sent now; an empty list after an interval without anything."""
        try:
            items = [self._outgoing.get(timeout=INTERVAL)]
        except Empty:
            return []
        while not self._outgoing.empty():
            items.append(self._outgoing.get())
        return items
