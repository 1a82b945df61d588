"""A file that TensorBoard reads, written at once: errors come where they arise, and a kill loses nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from ...core.system.extras import require
from .tensorboard_records import record

_NUMBERS = count()  # files that are made in the same second


def summary_class() -> Any:
    """Return the class of summaries; import all that files need.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    _protocol("event")
    return _protocol("summary").Summary


class EventFile:
    """Appends summaries to a new file.

    Args:
        folder: where the file is made; made, too, where it is missing.
        purge: the first step that TensorBoard hides of older files in the folder; None hides nothing.
        summaries: what the file begins with.

    Raises:
        OSError: there is no room, or the folder cannot be written to; then there is no file.
    """

    def __init__(self, folder: Path, *, purge: int | None = None, summaries: Iterable[Any] = ()) -> None:
        protocol = _protocol("event")
        self._event = protocol.Event
        events = [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        if purge is not None:
            start = protocol.SessionLog
            events.append(self._event(wall_time=time.time(), step=purge, session_log=start(status=start.START)))
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = (folder / name).open("xb", buffering=0)
        self._end = 0
        try:
            self._write([*events, *self._events(summaries, 0)])
        except OSError:  # the next attempt makes another file
            self._file.close()
            (folder / name).unlink()
            raise

    def add(self, summaries: Iterable[Any], step: int) -> None:
        """Append summaries, all or none.

        Raises:
            OSError: there is no room; the file is as it was.
        """
        self._write(self._events(summaries, step))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _events(self, summaries: Iterable[Any], step: int) -> list[Any]:
        return [self._event(wall_time=time.time(), step=step, summary=each) for each in summaries]

    def _write(self, events: Iterable[Any]) -> None:
        content = b"".join(record(event.SerializeToString()) for event in events)
        try:
            self._put(content)
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end += len(content)

    def _put(self, content: bytes) -> None:
        written = 0
        while written < len(content):
            written += self._file.write(content[written:])


def _protocol(part: str) -> Any:
    return require(f"tensorboard.compat.proto.{part}_pb2", "TensorBoard")
