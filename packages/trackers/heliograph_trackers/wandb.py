"""The Weights & Biases tracker."""

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
from heliograph import Lane, Run, RunClosed, on
from heliograph.spi import Page, Place, Tracker, clean, require
from tqdm import tqdm

POINTS: Final = 200  # maximum of a curve


def precision_recall(labels: Any, scores: Any) -> tuple[Any, Any]:
    """Return recall and precision for each threshold on the scores.

    Args:
        labels: whether each sample is positive, of shape (samples,).
        scores: the score of each sample, of shape (samples,).

    Returns:
        The increasing recall and the precision, both of shape (points,): one point per distinct score, at most 200.
        Empty if no sample is positive.
    """
    if not labels.any():
        return np.empty(0), np.empty(0)
    order = np.argsort(-scores, kind="stable")
    positive = np.cumsum(labels[order].astype(np.int64))
    last = np.flatnonzero(np.append(np.diff(scores[order]), 1.0))  # last index of each distinct score
    chosen = last[np.linspace(0, len(last) - 1, min(POINTS, len(last))).round().astype(np.int64)]
    return positive[chosen] / positive[-1], positive[chosen] / (chosen + 1)


FILE_HEADER: Final = 7  # bytes: `:W&B`, a magic number, a version
BLOCK: Final = 32_768  # bytes; records are split at block boundaries
PART_HEADER: Final = 7  # bytes: a checksum (4), a length (2), a kind (1)
FULL, FIRST, LAST = 1, 2, 4


def rows(path: Path) -> Iterator[dict[str, Any]]:
    # A kill may have truncated the file.
    messages = require("wandb.proto.wandb_internal_pb2", "WandB", extra="wandb")
    for content in records(path.read_bytes()):
        record = messages.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            yield _row(record.history.item)


def last_steps(folder: Path, page: str) -> dict[tuple[str, int], int]:
    # Last step per name and number of rollbacks; each attempt has a file.
    steps: dict[tuple[str, int], int] = {}
    for path in folder.glob(f"*run-*-{page}*/*.wandb"):
        for row in rows(path):
            step, rollbacks = row.get("step", -1), row.get("rollbacks", 0)
            steps.update(((name, rollbacks), step) for name in row if step > steps.get((name, rollbacks), -1))
    return steps


def records(content: bytes) -> Iterator[bytes]:
    # The file is a LevelDB log after a header.
    position, record = FILE_HEADER, b""
    while position + PART_HEADER <= len(content):
        if BLOCK - position % BLOCK < PART_HEADER:  # padding
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        position += PART_HEADER
        part = content[position : position + length]
        if len(part) < length:
            return
        record = part if kind in (FULL, FIRST) else record + part
        if kind in (FULL, LAST):
            yield record
        position += length


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        name, *inner = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if inner:  # for example an image
            row.setdefault(name, {})[".".join(inner)] = value
        else:
            row[name] = value
    return row


MODES: Final = (None, "online", "offline", "disabled")
EXIT_CODES: Final = {"completed": 0, "stopped": 0, "interrupted": 255}  # W&B shows 255 as killed, 1 as failed
INIT_TIMEOUT: Final = 30.0  # seconds, less than the end of a run waits
FLUSH: Final = 1.0  # seconds until a row is in the local file


class WandB(Tracker):
    """Track a run on Weights & Biases: metrics, images, texts, histograms, curves, files, hyper-parameters.

    The axis of all charts is `step`, the optimizer step; `epoch`, `samples`, `seconds` and `attempt` are available too.
    Steps that are repeated after a rollback are shown with `rollbacks`, the number of rollbacks before them.
    Checkpoints contain the id of the page, and a resumed run continues it; offline it writes another folder with the
    same id, which `wandb sync` joins. The summary has the `status` of the run, and the exit code matches it. The
    tracker never prompts: without an API key, or if the server does not answer at the start, the page is written to
    this machine, and the result notes it. W&B bridges later outages itself.

    Args:
        project: the project; None uses `WANDB_PROJECT` and the settings of W&B.
        name: the name of the page; None is the name of the run.
        group: the group of the page.
        mode: `online`, `offline` (files on this machine for `wandb sync`) or `disabled`; None uses `WANDB_MODE` and the
            settings of W&B.
        tags: tags of the page.
        folder: the parent of W&B's folder `wandb`, created if it does not exist; None is `WANDB_DIR` or the current
            folder.

    Raises:
        ImportError: wandb is not installed.
        TypeError: the tags are a single string.
        ValueError: the mode is unknown, or it is `online` without an API key.
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
            raise TypeError(f"tags must be a list of strings, for example [{tags!r}], got {tags!r}.")
        if mode not in MODES:
            raise ValueError(f"mode must be 'online', 'offline', 'disabled' or None, got {mode!r}.")
        if mode == "online" and not _has_key():
            raise ValueError(
                "WandB(mode='online') needs an API key of W&B: run `wandb login`, set WANDB_API_KEY, or use "
                "mode='offline' and run `wandb sync` later."
            )
        self.project, self.title, self.group, self.mode, self.tags = project, name, group, mode, list(tags)
        self.folder = None if folder is None else Path(folder).absolute()
        self._page: Any = None  # W&B's run
        self._unsent = ""  # why the page is not online
        self._shown: dict[tuple[str, int], int] = {}  # last step per name and number of rollbacks

    def describe(self, run: Run) -> str:
        return f"logs to W&B, {self._mode()}"

    def prepare(self, run: Run) -> None:
        if self._mode() == "disabled":
            run.note("wandb: nothing is logged, because W&B is disabled")
        elif self._mode() == "offline" and self.mode != "offline":
            why, then = "the mode is offline by WANDB_MODE or the settings of W&B", ""
            if _settings_mode() == "online":
                why, then = "no API key", ", and set a key by `wandb login` or WANDB_API_KEY for the next run"
            run.note(f"wandb: {why}, so the page is written to this machine: send it by `wandb sync`{then}")

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        super().end(run, event)
        if self._unsent:
            run.warn(f"wandb could not start a page online, so it is on this machine: {self._unsent}.")

    # In the thread.

    def open(self, page: Page) -> str:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        name = page.id or page.training_id  # known before the page exists
        self._unsent = ""
        try:
            self._page = self._begin(page, name, self._mode())
        except _wandb().errors.CommError as error:
            self._page = self._begin(page, f"{name}-offline", "offline")  # W&B still retries the first id
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
            reinit="create_new",  # does not end a W&B run of the user
            settings=_wandb().Settings(
                silent=True,  # its output would break the progress bar
                console="wrap",
                console_multipart=True,  # else a resumed run replaces the earlier console output
                x_transaction_log_flush_interval=FLUSH,
                init_timeout=INIT_TIMEOUT,
            ),
        )

    def holds(self, place: Place, name: str) -> bool:
        names = (name, f"{name}_table")  # points of a curve
        return any(place.step <= self._shown.get((key, place.rollbacks), -1) for key in names)

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        self._page.log({**values, **asdict(place)})

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        self._page.config.update(values, allow_val_change=True)

    def write_image(self, place: Place, name: str, image: Any) -> None:
        self._page.log({name: _wandb().Image(image), **asdict(place)})

    def write_text(self, place: Place, name: str, text: str) -> None:
        self._page.log({name: _wandb().Html(f"<pre>{html.escape(text)}</pre>", inject=False), **asdict(place)})

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        bins = np.histogram(values[np.isfinite(values)], bins=64)
        self._page.log({name: _wandb().Histogram(np_histogram=bins), **asdict(place)})

    def write_curve(self, place: Place, name: str, labels: Any, scores: Any) -> None:
        recall, precision = precision_recall(labels, scores)
        points = _wandb().Table(data=np.stack([recall, precision], 1).tolist(), columns=["recall", "precision"])
        self._page.log({name: _wandb().plot.line(points, "recall", "precision", title=name), **asdict(place)})

    def write_file(self, place: Place, name: str, path: Path) -> None:
        artifact = _wandb().Artifact(clean(f"run-{self._page.id}-{name}"), type="file", metadata=asdict(place))
        artifact.add_file(str(path))
        self._page.log_artifact(artifact)

    def finish(self, status: str) -> None:
        self._page.summary["status"] = status
        if status == "preempted":
            self._page.mark_preempting()
        self._page.finish(exit_code=EXIT_CODES.get(status, 1))

    def _find_shown(self, name: str) -> dict[tuple[str, int], int]:
        if self._page.offline:
            return last_steps(Path(self._page.settings.wandb_dir), name)
        summary = dict(self._page.summary)  # of the last row; all earlier rows were sent
        last = int(summary.get("rollbacks", -1))
        earlier = {(name, rollbacks): sys.maxsize for name in summary for rollbacks in range(last)}
        return earlier | {(name, last): int(summary["step"]) for name in summary if last >= 0}

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
    # Without a prompt and without a request.
    keys = require("wandb.sdk.lib.wbauth", "WandB", extra="wandb")
    host = _settings().base_url
    return keys.authenticate_session(host=host, source="WandB", prompt=False, update_session=False) is not None
