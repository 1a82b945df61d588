"""Pages on Weights & Biases."""

from __future__ import annotations

import html
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from heliograph import Lane, Page, Place, Run, RunClosed, Tracker, on
from heliograph.spi import clean, require
from tqdm import tqdm

POINTS: Final = 200  # of a line, at most


def precision_recall(labels: Any, scores: Any) -> tuple[Any, Any]:
    """Return the recall and the precision where all samples with at least a score count as positive.

    Args:
        labels: of each sample whether it is positive, of shape (samples,).
        scores: of each sample its score, of shape (samples,).

    Returns:
        The recall, which rises, and the precision, each of shape (points,): one point for each different score, at most
        200, spread over them. Empty where no sample is positive.
    """
    if not labels.any():
        return np.empty(0), np.empty(0)
    order = np.argsort(-scores, kind="stable")
    positive = np.cumsum(labels[order].astype(np.int64))
    last = np.flatnonzero(np.append(np.diff(scores[order]), 1.0))  # of the samples with the same score
    chosen = last[np.linspace(0, len(last) - 1, min(POINTS, len(last))).round().astype(np.int64)]
    return positive[chosen] / positive[-1], positive[chosen] / (chosen + 1)


FILE_HEADER: Final = 7  # bytes: `:W&B`, a magic number, a version
BLOCK: Final = 32_768  # bytes; no part of a record crosses the end of one
PART_HEADER: Final = 7  # bytes: a checksum (4), a length (2), a kind (1)
WHOLE, FIRST, LAST = 1, 2, 4


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the history in a `.wandb` file, up to where a kill cut it off."""
    messages = require("wandb.proto.wandb_internal_pb2", "WandB", extra="wandb")
    for content in records(path.read_bytes()):
        record = messages.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            yield _row(record.history.item)


def last_steps(folder: Path, page: str) -> dict[tuple[str, int], int]:
    """Return the last step of each name and number of rollbacks in the files of a page: each attempt has one."""
    found: dict[tuple[str, int], int] = {}
    for path in folder.glob(f"*run-*-{page}*/*.wandb"):
        for row in rows(path):
            step, rollbacks = row.get("step", -1), row.get("rollbacks", 0)
            found.update(((name, rollbacks), step) for name in row if step > found.get((name, rollbacks), -1))
    return found


def records(content: bytes) -> Iterator[bytes]:
    """Yield the whole records in the bytes of a file, which is a log of LevelDB after a header."""
    position, record = FILE_HEADER, b""
    while position + PART_HEADER <= len(content):
        if BLOCK - position % BLOCK < PART_HEADER:  # the rest of the block is empty
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        position += PART_HEADER
        part = content[position : position + length]
        if len(part) < length:
            return
        record = part if kind in (WHOLE, FIRST) else record + part
        if kind in (WHOLE, LAST):
            yield record
        position += length


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        name, *inner = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if inner:  # an image and the like is described by several values
            row.setdefault(name, {})[".".join(inner)] = value
        else:
            row[name] = value
    return row


MODES: Final = (None, "online", "offline", "disabled")
EXIT_CODES: Final = {"completed": 0, "stopped": 0, "interrupted": 255}  # W&B shows 255 as killed, 1 as failed
INIT_TIMEOUT: Final = 30.0  # seconds for the server to answer, less than what the end of a run waits
FLUSH: Final = 1.0  # seconds until a row is in the file on this machine


class WandB(Tracker):
    """Show a run on a page of Weights & Biases: metrics, images, texts, histograms, curves, files, hyper-parameters.

    The axis of all charts is `step`, the optimizer's. Steps that come again after the run went back are all there, with
    `rollbacks`, how often it had gone back. `epoch`, `samples`, `seconds` and `attempt` can be chosen as the axis, too.
    The page's id is in the checkpoints: a resumed run continues the page; offline it writes one more folder of the same
    id, and `wandb sync` joins them. How the run ended is the `status` in the page's summary, and its exit code. Nothing
    waits for a key to be typed: where none is known, or the server does not answer at the beginning, the page is
    written to this machine, and the result says so. Later outages are W&B's own to bridge.

    Args:
        project: the project of the page; None leaves it to `WANDB_PROJECT` and the settings of W&B.
        name: the page's name; None is the run's.
        group: what to group pages by.
        mode: `online`, `offline` (files on this machine, which `wandb sync` sends) or `disabled`; None does what
            `WANDB_MODE` and the settings of W&B say.
        tags: tags of the page.
        folder: where W&B's folder `wandb` goes, made where it is missing; None is `WANDB_DIR`, else the current folder.

    Raises:
        ImportError: wandb is not installed.
        TypeError: the tags are one string.
        ValueError: there is no such mode, or it is `online` and no API key is known.
    """

    name = "wandb"
    patience = 60.0
    shares_rows = True
    settles = 30.0  # online, W&B sends every 15 seconds

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        tags: Sequence[str] = (),
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        _wandb()
        if isinstance(tags, str):
            raise TypeError(f"WandB(tags={tags!r}): tags are a list of strings, such as [{tags!r}].")
        if mode not in MODES:
            raise ValueError(f"WandB(mode={mode!r}): it is one of 'online', 'offline', 'disabled' and None.")
        if mode == "online" and not _has_key():
            raise ValueError(
                "WandB(mode='online') needs an API key of W&B, and none is known: run `wandb login`, set "
                "WANDB_API_KEY, or use mode='offline' and run `wandb sync` later."
            )
        self.project, self.title, self.group, self.mode, self.tags = project, name, group, mode, list(tags)
        self.folder = None if folder is None else Path(folder).absolute()
        self._page: Any = None  # W&B's run
        self._unsent = ""  # why it is not sent
        self._shown: dict[tuple[str, int], int] = {}  # the last step of each name, for each number of rollbacks

    def describe(self, run: Run) -> str:
        """Say where the page is."""
        return f"logs to W&B, {self._mode()}"

    def prepare(self, run: Run) -> None:
        """Note where W&B's settings keep the page from being sent."""
        if self._mode() == "disabled":
            run.note("wandb: nothing is logged, since W&B is disabled")
        elif self._mode() == "offline" and (self.mode or _settings_mode()) == "online":
            run.note(
                "wandb: no API key of W&B is known, so the page is written to this machine; `wandb sync` sends it, and "
                "`wandb login` or WANDB_API_KEY lets the next run be sent as it goes"
            )

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """Write how the run ended, and say where the page is if W&B's server did not take it."""
        super().end(run, event)
        if self._unsent:
            run.warn(f"wandb could not begin a page online, so it is on this machine: {self._unsent}.")

    # In the thread.

    def open(self, page: Page) -> str:
        """Begin a page, or continue one."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        name = page.id or page.training_id  # known to a checkpoint that was taken before the page was there
        self._unsent = ""
        try:
            self._page = self._begin(page, name, self._mode())
        except _wandb().errors.CommError as error:
            self._page = self._begin(page, f"{name}-offline", "offline")  # W&B's process still tries the other
            reason = str(error).partition("\n")[0]
            self._unsent = f"`wandb sync --id {name} {self._page.settings.sync_dir}` sends it ({reason})"
        for axis in ("step", "epoch", "samples", "seconds", "attempt", "rollbacks"):
            self._page.define_metric(axis, hidden=True)
        self._page.define_metric("*", step_metric="step")
        if self._mode() == "online" and not self._unsent:
            tqdm.write(f"W&B: {self._page.url}", file=sys.stderr)
        self._shown = {} if page.resumed_at is None else self._find_shown(name)
        return name

    def _begin(self, page: Page, name: str, mode: str) -> Any:
        return _wandb().init(
            project=self.project,
            name=self.title or page.name,
            group=self.group,
            tags=self.tags or None,
            mode=mode,
            dir=self.folder,
            id=name,
            resume=None if page.id is None and page.resumed_at is None else "allow",
            reinit="create_new",  # a run of W&B that the user has is left alone
            settings=_wandb().Settings(
                silent=True,  # its lines would go through the progress bar
                console="wrap",
                console_multipart=True,  # else a resumed run replaces what the console showed before
                x_transaction_log_flush_interval=FLUSH,
                init_timeout=INIT_TIMEOUT,
            ),
        )

    def holds(self, place: Place, name: str) -> bool:
        """Return whether the page of a resumed run shows this already."""
        names = (name, f"{name}_table")  # the points of a curve
        return any(place.step <= self._shown.get((each, place.rollbacks), -1) for each in names)

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Add a row."""
        self._page.log({**values, **asdict(place)})

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Set the page's config."""
        self._page.config.update(values, allow_val_change=True)

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Add an image."""
        self._page.log({name: _wandb().Image(image), **asdict(place)})

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Add a text, as it is."""
        self._page.log({name: _wandb().Html(f"<pre>{html.escape(text)}</pre>", inject=False), **asdict(place)})

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        """Add a histogram of the finite values."""
        bins = np.histogram(values[np.isfinite(values)], bins=64)
        self._page.log({name: _wandb().Histogram(np_histogram=bins), **asdict(place)})

    def write_curve(self, place: Place, name: str, labels: Any, scores: Any) -> None:
        """Draw the precision over the recall."""
        recall, precision = precision_recall(labels, scores)
        points = _wandb().Table(data=np.stack([recall, precision], 1).tolist(), columns=["recall", "precision"])
        self._page.log({name: _wandb().plot.line(points, "recall", "precision", title=name), **asdict(place)})

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Log an artifact; the same name again is its next version."""
        artifact = _wandb().Artifact(clean(f"run-{self._page.id}-{name}"), type="file", metadata=asdict(place))
        artifact.add_file(str(path))
        self._page.log_artifact(artifact)

    def finish(self, status: str) -> None:
        """Write how the run ended, and close the page once all is sent."""
        self._page.summary["status"] = status
        if status == "preempted":
            self._page.mark_preempting()
        self._page.finish(exit_code=EXIT_CODES.get(status, 1))

    def _find_shown(self, name: str) -> dict[tuple[str, int], int]:
        if self._page.offline:
            return last_steps(Path(self._page.settings.wandb_dir), name)
        summary = dict(self._page.summary)  # of the last row; all that went before has been sent, too
        last = int(summary.get("rollbacks", -1))
        former = {(name, each): sys.maxsize for name in summary for each in range(last)}
        return former | {(name, last): int(summary["step"]) for name in summary if last >= 0}

    def _mode(self) -> str:
        mode = self.mode or _settings_mode()
        return "offline" if mode == "online" and not _has_key() else mode


def _wandb() -> Any:
    return require("wandb", "WandB", extra="wandb")


def _settings() -> Any:
    return require("wandb.sdk.wandb_setup", "WandB", extra="wandb").singleton().settings


def _settings_mode() -> str:
    return os.environ.get("WANDB_MODE") or str(_settings().mode)


def _has_key() -> bool:
    """Return whether W&B knows a key, without a prompt and without a request."""
    keys = require("wandb.sdk.lib.wbauth", "WandB", extra="wandb")
    host = _settings().base_url
    return keys.authenticate_session(host=host, source="WandB", prompt=False, update_session=False) is not None
