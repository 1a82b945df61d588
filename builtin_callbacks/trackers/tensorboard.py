"""Metrics, images and more for TensorBoard."""

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

_NUMBERS = count()  # distinguishes files of the same second
_REVERSED, _MASK, _ALL = 0x82F63B78, 0xA282EAD8, 0xFFFFFFFF  # the polynomial of CRC-32C, the mask of TFRecord files


class TensorBoard(Tracker):
    """Write metrics, images, texts, histograms and curves for TensorBoard.

    The learning rates and the throughput are added to the logged metrics: `train/samples_per_second` and, if losses are
    sums over tokens, `train/tokens_per_second`, measured since the last log, including validations. `GradientClipping`
    adds the gradient norm.

    If the folder contains another run, a new one writes to the subfolder `<run>_<date>_<time>`, which TensorBoard shows
    next to it. A resumed or rolled-back run writes to its own folder again and purges the steps after the checkpoint. A
    stored file is shown as the text of its path.

    Args:
        folder: the folder of the event files; created if it does not exist.
    """

    name = "tensorboard"
    rehearses = True
    patience = 2.0  # a disk responds immediately unless it is full
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
        original, self.folder = self.folder, folder
        return [original]

    def prepare(self, run: Run) -> None:
        """Import the module for hyper-parameters, if there are any."""
        if run.hyper_parameters:
            _summaries()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if any(record.kind != "scalars" for record in self._waiting):
            _summaries()

    # The methods below run in the thread.

    def open(self, page: Page) -> str:
        """Select the run's folder; hide the points after the checkpoint."""
        self._path = self.folder / page.id if page.id else self._free_folder(page)
        self._is_new = page.id is None
        self._purge, self._latest, self._parameters = None, {}, {}
        if page.resumed_at is not None:
            self._purge = page.resumed_at + 1
        return self._path.relative_to(self.folder).as_posix()

    def roll_back(self, place: Place) -> None:
        """Hide the points after the position of the checkpoint."""
        self._close_file()
        self._purge = place.step + 1

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        self._latest.update(values)
        self._add(place, *self._scalars(values))

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Store them until the end, because they are shown with the final metrics."""
        self._parameters = values

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Add an image."""
        self._add(place, _summaries().image(name, image, dataformats="HWC"))

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Add a text, which TensorBoard renders as Markdown."""
        self._add(place, _summaries().text(name, text))

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        """Add a histogram."""
        self._add(place, _summaries().histogram(name, values, bins="sturges"))

    def write_curve(self, place: Place, name: str, labels: Any, scores: Any) -> None:
        """Add a precision-recall curve."""
        self._add(place, _summaries().pr_curve(name, labels, scores))

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Add the path of the file as a text."""
        self._add(place, _summaries().text(name, f"`{path}`"))

    def finish(self, status: str) -> None:
        """Write the hyper-parameters with the final metrics, and close the file."""
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
        return [self._summary(value=[value(tag=name, simple_value=number)]) for name, number in values.items()]

    def _add(self, place: Place, *summaries: Any) -> None:
        if self._file is None:
            self._file = EventFile(self._path, purge=self._purge)
            self._purge = None
            if self._is_new and self._path != self.folder:
                self._remark(f"{self.folder} contains another run: the curves of this one are in {self._path}")
        self._file.add(summaries, place.step)

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _free_folder(self, page: Page) -> Path:
        path, number = self.folder, 1
        start = f"{clean(page.name)}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
        while any(path.glob("events.out.tfevents.*")):
            path = self.folder / (start if number == 1 else f"{start}-{number}")
            number += 1
        return path


def _summaries() -> Any:
    """Import the module that creates summaries, which takes a third of a usual start.

    The first call is in the main thread, because a process that is forked during an import in a thread may deadlock.
    """
    return require("torch.utils.tensorboard.summary", "TensorBoard")


def summary_class() -> Any:
    """Return the class of summaries, and import all modules that files need.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    _protocol("event")
    return _protocol("summary").Summary


class EventFile:
    """Appends summaries to a new event file.

    Args:
        folder: the folder of the file; created if it does not exist.
        purge: the first step that TensorBoard hides in older files of the folder; None hides nothing.
        summaries: the first summaries.

    Raises:
        OSError: the file cannot be written; it does not exist then.
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
        name = (
            f"events.out.tfevents.{time.time():010.0f}.{place}.{next(_NUMBERS):05d}"  # TensorBoard reads files by name
        )
        self._file = (folder / name).open("xb", buffering=0)
        self._end = 0
        try:
            self._write([*events, *self._events(summaries, 0)])
        except OSError:  # the next attempt creates another file
            self._file.close()
            (folder / name).unlink()
            raise

    def add(self, summaries: Iterable[Any], step: int) -> None:
        """Append all summaries, or none.

        Raises:
            OSError: the summaries cannot be written; the file is unchanged.
        """
        self._write(self._events(summaries, step))

    def close(self) -> None:
        self._file.close()

    def _events(self, summaries: Iterable[Any], step: int) -> list[Any]:
        return [self._event(wall_time=time.time(), step=step, summary=summary) for summary in summaries]

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
    """Return a TFRecord: length and content, each followed by its checksum."""
    length = struct.pack("<Q", len(content))
    return b"".join((length, _checksum(length), content, _checksum(content)))


def _checksum(content: bytes) -> bytes:
    crc = _ALL
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= _ALL
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & _ALL)


def _of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (_REVERSED if crc & 1 else 0)
    return crc


_TABLE = tuple(map(_of_byte, range(256)))
