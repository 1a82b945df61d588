"""Messages from a rank to the process that launched it: frames, and the queue for the user's objects."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple


class RankQueue:
    """Sends objects to the process that called `launch`: to its `on_message`, or to the `messages` of its result.

    Args:
        send: sends a pickled object without waiting.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def put(self, value: Any) -> None:
        """Send an object in its current state, without waiting. The objects of one rank arrive in order.

        Args:
            value: can be pickled; a tensor is copied, and one on a GPU is better moved to the CPU first.
        """
        self._send(pickle.dumps(value))


_queues: dict[int, RankQueue] = {}  # by process id: a process forked from a rank, such as a loader's worker, has none


def child_queue() -> RankQueue | None:
    """Return the queue to the process that launched this one; None unless `heliograph.launch` did."""
    return _queues.get(os.getpid())


def open_queue(send: Callable[[bytes], None]) -> None:
    """Make `child_queue` return a queue in this rank."""
    _queues[os.getpid()] = RankQueue(send)


Kind = Literal["began", "message", "value", "error", "acknowledged", "ended", "signal"]


class Frame(NamedTuple):
    """A message; the parent's own events, `ended` and `signal`, do not cross the pipe.

    Attributes:
        kind: of the message.
        rank: its source.
        payload: pickled, if the kind has content.
        signum: the signal that arrived.
    """

    kind: Kind
    rank: int = -1
    payload: bytes = b""
    signum: int = 0


def send(pipe: Connection, frame: Frame) -> None:
    # Call it from one thread only, and not from the main thread: a signal could interrupt a frame.
    pipe.send_bytes(frame.kind.encode())
    pipe.send_bytes(frame.payload)


def receive(pipe: Connection, rank: int) -> Frame:
    """Read a frame.

    Raises:
        EOFError: the other side is gone.
        OSError: it ended within a frame.
    """
    kind: Kind = pipe.recv_bytes().decode()  # type: ignore[assignment]  # written by `send`
    return Frame(kind, rank, pipe.recv_bytes())
