"""The worker's side of the mailbox."""

from __future__ import annotations

import logging
import os
import threading
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from ....core.system.extras import require
from .mailbox import Letter, Message, Orders, Pulse

BEAT = 0.5  # seconds until new orders are heard
TICK = 0.1  # the same, while somebody waits for them

logger = logging.getLogger("heliograph")


class Post:
    """Takes a rank's messages to the mailbox, in their order, and brings back the caller's orders; a thread does so.

    When the mailbox is gone, nobody waits for this worker any longer: its process ends.

    Args:
        mailbox: the actor.
        fit: which of Ray's runs this worker belongs to.
        incarnation: which worker group of that one.
        rank: this worker.

    Attributes:
        orders: the newest that have come.
        pulse: where the run is; told with every beat at which it is another one, so that also of a worker that hangs or
            is killed the caller knows how far it came.
    """

    def __init__(self, mailbox: Any, fit: str, incarnation: str, rank: int) -> None:
        self._ray = require("ray", "RayLauncher", extra="ray")
        self._mailbox, self._place = mailbox, (fit, incarnation, rank)
        self._incarnation = incarnation
        self._outgoing: SimpleQueue[Message | threading.Event | None] = SimpleQueue()
        self.orders = Orders()
        self.pulse: Pulse | None = None
        self._thread = threading.Thread(target=self._carry, name="heliograph-post", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message without waiting."""
        self._outgoing.put(message)

    def flush(self) -> None:
        """Wait until the mailbox has everything that was sent before, and new orders are here."""
        delivered = threading.Event()
        self._outgoing.put(delivered)
        delivered.wait()

    def wait_for_release(self, seconds: float) -> None:
        """Wait until the other workers have ended too, at most some seconds."""
        limit = monotonic() + seconds
        while self._incarnation not in self.orders.released and monotonic() < limit:
            threading.Event().wait(TICK)
            self.flush()

    def close(self) -> None:
        """Deliver what is left, and end the thread."""
        self._outgoing.put(None)
        self._thread.join()

    def _carry(self) -> None:
        closing = False
        told: Pulse | None = None
        while not closing:
            parcel = self._collect()
            closing = None in parcel
            letters = [Letter(*self._place, each) for each in parcel if not isinstance(each, threading.Event | None)]
            pulse = self.pulse
            if pulse is not None and pulse is not told:
                letters.append(Letter(*self._place, pulse))
                told = pulse
            try:
                self.orders = self._ray.get(self._mailbox.put.remote(letters))
            except Exception as error:  # noqa: BLE001  # without this thread, the worker would wait for ever
                logger.error("who called this run cannot be reached, so this worker ends: %s", error)
                os._exit(1)
            for each in parcel:
                if isinstance(each, threading.Event):
                    each.set()

    def _collect(self) -> list[Message | threading.Event | None]:
        """Return what is to be sent now; nothing after a beat without anything."""
        try:
            parcel = [self._outgoing.get(timeout=BEAT)]
        except Empty:
            return []
        while not self._outgoing.empty():
            parcel.append(self._outgoing.get())
        return parcel
