"""The Trackio tracker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import OperationalError
from typing import Any, Final

from heliograph import Run
from heliograph.spi import Page, Place, Tracker, clean, require

REMOTE: Final = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio(Tracker):
    """Track a run in Trackio's dashboard: metrics, images, texts, histograms, files and hyper-parameters.

    All values are in the database before a checkpoint is saved; `trackio.log` keeps rows in memory for half a second,
    which a killed process would lose. Steps are optimizer steps. Steps that are repeated after a rollback are shown
    with `rollbacks`, the number of rollbacks before them; rows also have `epoch`, `samples`, `seconds` and `attempt`.
    Checkpoints contain the id of the run in the database, so a resumed run continues its rows. Trackio has no status of
    runs, so `status` is in the configuration, `running` until the end, and the last row has it as text. All data are on
    this machine, in `TRACKIO_DIR`, by default `~/.cache/huggingface/trackio`: `trackio show` displays them, and
    `trackio sync` copies them to a Space.

    Args:
        project: the project in the dashboard.
        name: the name there; None is the name of the run.
        group: the group of the run.

    Raises:
        ImportError: trackio is not installed.
        ValueError: the name of the project is not allowed, or Trackio is configured for a remote database.
    """

    name = "trackio"
    shares_rows = is_local = True
    collects = ("scalars", "hyper_parameters", "image", "text", "histogram")
    outages = (OSError, OperationalError)  # a locked database, or a full disk

    def __init__(self, project: str, name: str | None = None, group: str | None = None) -> None:
        super().__init__()
        _storage().validate_project_name(project)
        for variable in REMOTE:
            if os.environ.get(variable):
                raise ValueError(
                    f"Trackio writes to this machine, but {variable} is set: unset it, and run `trackio sync` for a "
                    "remote copy."
                )
        if _trackio("utils").get_storage_mode() != "sqlite":
            raise ValueError(
                f"Trackio cannot write to a database in {_trackio('utils').TRACKIO_DIR}, a network file system: set "
                "TRACKIO_DIR to a local folder, or TRACKIO_STORAGE_MODE=sqlite where only one process writes there."
            )
        self.project, self.title, self.group = project, name, group
        self._id = self._title = ""
        self._step = 0
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}  # by place, without seconds
        self._config: dict[str, Any] = {}
        self._config_is_new = False
        self._shown: dict[tuple[str, int], int] = {}  # last step per name and number of rollbacks

    def describe(self, run: Run) -> str:
        return f"logs to Trackio's project {self.project}, in {_trackio('utils').TRACKIO_DIR}"

    # In the thread.

    def open(self, page: Page) -> str:
        self._id, self._title = page.id or page.training_id, self.title or page.name
        self._step, self._rows = page.resumed_at or 0, {}
        metadata = {"_Username": None, "_Created": datetime.now(UTC).isoformat(), "_Group": self.group}
        previous = _storage().get_run_config(self.project, run_id=self._id)
        self._config, self._config_is_new = {**metadata, **(previous or {}), "status": "running"}, True
        self._shown = {} if page.resumed_at is None else self._find_shown()
        return self._id

    def holds(self, place: Place, name: str) -> bool:
        return place.step <= self._shown.get((name, place.rollbacks), -1)

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        self._write_row(place, values)

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        # Written with the next row.
        self._config |= values
        self._config_is_new = True

    def write_image(self, place: Place, name: str, image: Any) -> None:
        media = _trackio().Image(image)
        media._save(self.project, self._title, place.step)
        self._write_row(place, {name: media._to_dict()})

    def write_text(self, place: Place, name: str, text: str) -> None:
        self._write_row(place, {name: _trackio().Markdown(text)._to_dict()})

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        self._write_row(place, {name: _trackio().Histogram(values)._to_dict()})

    def write_file(self, place: Place, name: str, path: Path) -> None:
        artifact = _trackio().Artifact(clean(f"run-{self._id}-{name}"), type="file", metadata=asdict(place))
        artifact.add_file(path)
        _storage().commit_artifact_version(
            project=self.project,
            name=artifact.name,
            type=artifact.type,
            description=None,
            manifest=artifact._build_manifest(self.project),
            metadata=artifact.metadata,
            aliases=[],
            run_name=self._title,
            run_id=self._id,
        )

    def flush(self) -> None:
        if not self._rows:
            return
        config = self._config if self._config_is_new else None
        rows, steps = list(self._rows.values()), [step for step, *_ in self._rows]
        _storage().bulk_log(self.project, self._title, rows, steps=steps, config=config, run_id=self._id)
        self._config_is_new = False

    def discard(self) -> None:
        self._rows = {}

    def finish(self, status: str) -> None:
        self._config["status"], self._config_is_new = status, True
        self._collect((self._step,), {"status": _trackio().Markdown(status)._to_dict()})
        self.flush()

    def _write_row(self, place: Place, values: Mapping[str, Any]) -> None:
        axes = asdict(place)
        self._step = axes.pop("step")
        self._collect(astuple(replace(place, epoch=0.0, seconds=0.0)), {**values, **axes})

    def _collect(self, place: tuple[Any, ...], row: Mapping[str, Any]) -> None:
        # A row with another value of the same name starts a new row.
        reserved = _trackio("utils").RESERVED_KEYS
        named = {f"__{name}" if name in reserved else name: value for name, value in row.items()}
        collected = self._rows.get(place, {})
        if any(
            collected.get(name, value) != value for name, value in named.items() if name not in ("epoch", "seconds")
        ):
            place, collected = (*place, len(self._rows)), {}
        self._rows[place] = collected | named

    def _find_shown(self) -> dict[tuple[str, int], int]:
        shown: dict[tuple[str, int], int] = {}
        for row in _storage().get_logs(self.project, run_id=self._id):
            step, rollbacks = row["step"], row.get("rollbacks", 0)
            shown.update(((name, rollbacks), max(step, shown.get((name, rollbacks), -1))) for name in row)
        return shown


def _trackio(module: str = "") -> Any:
    return require(f"trackio.{module}" if module else "trackio", "Trackio", extra="trackio")


def _storage() -> Any:
    return _trackio("sqlite_storage").SQLiteStorage
