"""What goes from a rank to the process that launched it: messages in frames, and the queue for the user's objects."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple


class RankQueue:
    """Takes objects to the process that called `launch`: to its `on_message`, or to `messages` of what it returns.

    Args:
        send: what takes a pickled object there, without waiting.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def put(self, value: Any) -> None:
        """Send an object, as it is now; do not wait. Those of one rank arrive in their order.

        Args:
            value: what can be pickled; a tensor is copied, and one on a GPU is better moved to the CPU first.

        Raises:
            TypeError: it cannot be pickled.
        """
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"The queue takes what can be pickled, and this {type(value).__qualname__} cannot: {error}. Put plain "
                f"data."
            ) from error
        self._send(pickled)


_queues: dict[int, RankQueue] = {}  # by process: one that is forked from a rank (a loader's worker, say) has none


def child_queue() -> RankQueue | None:
    """Return the queue to the process that launched this one; None where `heliograph.launch` did not."""
    return _queues.get(os.getpid())


def open_queue(send: Callable[[bytes], None]) -> None:
    """In a rank that begins: have `child_queue` return a queue."""
    _queues[os.getpid()] = RankQueue(send)


Kind = Literal["began", "message", "value", "error", "acknowledged", "ended", "signal"]


class Frame(NamedTuple):
    """One of them; the parent's own events, `ended` and `signal`, never cross the pipe.

    Attributes:
        kind: what it is.
        rank: of which rank.
        payload: pickled, where the kind has something to carry.
        signum: which signal came.
    """

    kind: Kind
    rank: int = -1
    payload: bytes = b""
    signum: int = 0


def send(pipe: Connection, frame: Frame) -> None:
    """Write a frame; to be called from one thread only, and not from the main one: a signal would tear the frame."""
    pipe.send_bytes(frame.kind.encode())
    pipe.send_bytes(frame.payload)


def receive(pipe: Connection, rank: int) -> Frame:
    """Read a frame.

    Raises:
        EOFError: the other side is gone.
        OSError: it went in the middle of a frame.
    """
    kind: Kind = pipe.recv_bytes().decode()  # type: ignore[assignment]  # what `send` wrote
    return Frame(kind, rank, pipe.recv_bytes())
