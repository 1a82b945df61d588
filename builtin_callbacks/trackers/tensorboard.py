"""Curves, images and more for TensorBoard."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from ...core.checkpoint.storage import clean
from ...core.system.extras import require
from ...events import Event, Run
from .tracker import Page, Place, Tracker

_NUMBERS = count()  # files that are made in the same second
_REVERSED, _MASK, _ALL = 0x82F63B78, 0xA282EAD8, 0xFFFFFFFF  # the polynomial of CRC-32C; what TFRecord files add


class TensorBoard(Tracker):
    """Write metrics, learning rates, images, texts, histograms and curves for TensorBoard.

    The throughput, `train/samples_per_second` and, where losses are sums over tokens, `train/tokens_per_second`, is
    measured over the time since the last log, validation included. The gradient norm is there when
    `GradientClipping` is. Where the folder holds the curves of another run, a fresh one writes to a folder in it,
    `<run>_<date>_<time>`, which TensorBoard shows beside them. A run that is resumed or goes back writes to its own
    folder again; steps beyond the checkpoint are purged. A file that is kept is shown as the text of its path.

    Args:
        folder: where the event files go; made where it is missing.
    """

    name = "tensorboard"
    rehearses = True
    patience = 2.0  # a disk answers at once, or it is full
    is_local = True

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._summary = summary_class()
        self._file: EventFile | None = None
        self._purge: int | None = None
        self._path = self.folder  # of this run
        self._is_new = True
        self._parameters: Mapping[str, Any] = {}
        self._latest: dict[str, float] = {}

    def describe(self, run: Run) -> str:
        return f"logs to {self.folder / (self._page_id or '')}"

    def rehearse(self, folder: Path) -> list[Path]:
        former, self.folder = self.folder, folder
        return [former]

    def prepare(self, run: Run) -> None:
        """Import what shows hyper-parameters, if there are some."""
        if run.hyper_parameters:
            _summaries()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if any(each.kind != "scalars" for each in self._waiting):
            _summaries()

    # In the thread.

    def open(self, page: Page) -> str:
        """Write to the run's own folder, or a new one; hide only what was drawn after the checkpoint."""
        self._path = self.folder / page.id if page.id else self._free_folder(page)
        self._is_new = page.id is None
        self._purge, self._latest, self._parameters = None, {}, {}
        if page.resumed_at is not None:
            self._purge = page.resumed_at + 1
        return self._path.relative_to(self.folder).as_posix()

    def roll_back(self, place: Place) -> None:
        """Hide what was drawn after the place that the run goes back to."""
        self._close_file()
        self._purge = place.step + 1

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        self._latest.update(values)
        self._add(place, *self._scalars(values))

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Keep them for the end: TensorBoard shows them beside the final metrics."""
        self._parameters = values

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Add an image."""
        self._add(place, _summaries().image(name, image, dataformats="HWC"))

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Add a text, which TensorBoard reads as Markdown."""
        self._add(place, _summaries().text(name, text))

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        """Add a histogram."""
        self._add(place, _summaries().histogram(name, values, bins="sturges"))

    def write_curve(self, place: Place, name: str, labels: Any, scores: Any) -> None:
        """Add a precision-recall curve."""
        self._add(place, _summaries().pr_curve(name, labels, scores))

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Add where the file lies."""
        self._add(place, _summaries().text(name, f"`{path}`"))

    def finish(self, status: str) -> None:
        """Write the hyper-parameters beside the final metrics, and how the run ended, and close the file."""
        if self._file is not None and self._parameters:
            chosen = _summaries().hparams(dict(self._parameters), self._latest)
            EventFile(self._path / "hyper_parameters", summaries=[*chosen, *self._scalars(self._latest)]).close()
        self._close_file()

    def close(self) -> None:
        super().close()
        self._close_file()

    def _put_payload(self, run: Run, event: Event) -> None:
        _summaries()
        super()._put_payload(run, event)

    def _scalars(self, values: Mapping[str, float]) -> list[Any]:
        value = self._summary.Value
        return [self._summary(value=[value(tag=name, simple_value=each)]) for name, each in values.items()]

    def _add(self, place: Place, *summaries: Any) -> None:
        if self._file is None:
            self._file = EventFile(self._path, purge=self._purge)
            self._purge = None
            if self._is_new and self._path != self.folder:
                self._remark(f"{self.folder} holds the curves of another run: those of this one are in {self._path}")
        self._file.add(summaries, place.step)

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _free_folder(self, page: Page) -> Path:
        """Return a folder that holds no other run."""
        path, number = self.folder, 1
        start = f"{clean(page.name)}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
        while any(path.glob("events.out.tfevents.*")):
            path = self.folder / (start if number == 1 else f"{start}-{number}")
            number += 1
        return path


def _summaries() -> Any:
    """Return what draws all but curves; imported where something is logged, as it takes a third of a usual start.

    The first call is not in the thread: a process that is forked during an import may wait for its end for ever.
    """
    return require("torch.utils.tensorboard.summary", "TensorBoard")


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
        place = f"{socket.gethostname()}.{os.getpid()}"
        name = f"events.out.tfevents.{time.time():010.0f}.{place}.{next(_NUMBERS):05d}"  # read in order of the names
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


def record(content: bytes) -> bytes:
    """Return a record: the length of its content, and the content, each with its checksum after it."""
    length = struct.pack("<Q", len(content))
    return b"".join((length, _checksum(length), content, _checksum(content)))


def _checksum(content: bytes) -> bytes:
    crc = _ALL
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= _ALL
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & _ALL)


def _of_byte(rest: int) -> int:
    for _ in range(8):
        rest = rest >> 1 ^ (_REVERSED if rest & 1 else 0)
    return rest


_TABLE = tuple(map(_of_byte, range(256)))
