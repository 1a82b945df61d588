"""What goes through the pipe between a rank and the process that launched it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

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
