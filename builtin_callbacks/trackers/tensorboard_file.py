"""A file that TensorBoard reads, written at once: errors come where they arise, and a kill loses nothing."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ...core.system.extras import require

_NUMBERS = count()  # files that are made in the same second


class EventFile:
    """Appends summaries to a new file.

    Args:
        folder: where the file is made; made, too, where it is missing.
        purge: the first step that TensorBoard hides of older files in the folder; None hides nothing.
    """

    def __init__(self, folder: Path, *, purge: int | None = None) -> None:
        protocol = "tensorboard.compat.proto.event_pb2"
        self._event = require(protocol, "TensorBoard").Event
        records = require("tensorboard.summary.writer.record_writer", "TensorBoard")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = (folder / name).open("xb")
        self._records = records.RecordWriter(self._file)
        try:
            self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
            if purge is not None:
                start = require(protocol, "TensorBoard").SessionLog
                self._write(self._event(wall_time=time.time(), step=purge, session_log=start(status=start.START)))
            self.flush()
        except OSError:  # a full disk: the next attempt makes another file
            with suppress(OSError):  # which fails for the same reason, and closes it all the same
                self._file.close()
            (folder / name).unlink()
            raise

    def add(self, summary: Any, step: int = 0) -> None:
        """Append a summary."""
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Hand what was appended to the system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
