"""Runs in the local database of Trackio."""

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
    """Show a run in Trackio's dashboard: metrics, images, texts, histograms, files and hyper-parameters.

    All that is logged is in the database before a checkpoint is saved: `trackio.log` keeps rows in memory for half a
    second, and a killed process loses them. The steps of Trackio are the optimizer's. Steps that come again after the
    run went back are all there, with `rollbacks`, how often it had gone back; `epoch`, `samples`, `seconds` and
    `attempt` are beside them, too, once for all that is logged there and waits to be written. The run's id in the
    database is in the checkpoints: a resumed run continues its rows, whatever else has the same name. Trackio knows no
    status of runs, so `status` is in the configuration, `running` until the end, and the last row says it as a text.
    Everything is on this machine, in `TRACKIO_DIR`, by default `~/.cache/huggingface/trackio`: `trackio show` draws it,
    and `trackio sync` copies it to a Space.

    Args:
        project: the project in the dashboard.
        name: the run's name there; None is the run's own.
        group: what to group runs by.

    Raises:
        ImportError: trackio is not installed.
        ValueError: Trackio allows no such project, or it is set up to write elsewhere than to a local database.
    """

    name = "trackio"
    shares_rows = is_local = True
    collects = ("scalars", "hyper_parameters", "image", "text", "histogram")
    outages = (OSError, OperationalError)  # the second where another process locks the database, or the disk is full

    def __init__(self, project: str, name: str | None = None, group: str | None = None) -> None:
        super().__init__()
        _storage().validate_project_name(project)
        for variable in REMOTE:
            if os.environ.get(variable):
                raise ValueError(
                    f"Trackio writes to this machine, and {variable} is set: unset it, and run `trackio sync` for a "
                    "copy elsewhere."
                )
        if _trackio("utils").get_storage_mode() != "sqlite":
            raise ValueError(
                f"Trackio cannot write to a database in {_trackio('utils').TRACKIO_DIR}, a network file system: set "
                "TRACKIO_DIR to a local folder, or TRACKIO_STORAGE_MODE=sqlite where only one process writes there."
            )
        self.project, self.title, self.group = project, name, group
        self._id = self._title = ""
        self._step = 0
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}  # by step and all that is beside it but the seconds
        self._config: dict[str, Any] = {}
        self._config_is_new = False
        self._shown: dict[tuple[str, int], int] = {}  # the last step of each name, for each number of rollbacks

    def describe(self, run: Run) -> str:
        """Say which project it is, and where."""
        return f"logs to Trackio's project {self.project}, in {_trackio('utils').TRACKIO_DIR}"

    # In the thread.

    def open(self, page: Page) -> str:
        """Begin a run of the project, or continue one."""
        self._id, self._title = page.id or page.training_id, self.title or page.name
        self._step, self._rows = page.resumed_at or 0, {}
        began = {"_Username": None, "_Created": datetime.now(UTC).isoformat(), "_Group": self.group}
        former = _storage().get_run_config(self.project, run_id=self._id)
        self._config, self._config_is_new = {**began, **(former or {}), "status": "running"}, True
        self._shown = {} if page.resumed_at is None else self._find_shown()
        return self._id

    def holds(self, place: Place, name: str) -> bool:
        """Return whether a resumed run has this already."""
        return place.step <= self._shown.get((name, place.rollbacks), -1)

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Add a row."""
        self._write_row(place, values)

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Add them to the configuration, which the next row brings."""
        self._config |= values
        self._config_is_new = True

    def write_image(self, place: Place, name: str, image: Any) -> None:
        """Add an image."""
        media = _trackio().Image(image)
        media._save(self.project, self._title, place.step)
        self._write_row(place, {name: media._to_dict()})

    def write_text(self, place: Place, name: str, text: str) -> None:
        """Add a text, which Trackio reads as Markdown."""
        self._write_row(place, {name: _trackio().Markdown(text)._to_dict()})

    def write_histogram(self, place: Place, name: str, values: Any) -> None:
        """Add a histogram of the finite values."""
        self._write_row(place, {name: _trackio().Histogram(values)._to_dict()})

    def write_file(self, place: Place, name: str, path: Path) -> None:
        """Keep an artifact; the same name again is its next version."""
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
        """Insert the collected rows, with the configuration where it has changed."""
        if not self._rows:
            return
        config = self._config if self._config_is_new else None
        rows, steps = list(self._rows.values()), [step for step, *_ in self._rows]
        collected, self._rows = self._rows, {}
        try:
            _storage().bulk_log(self.project, self._title, rows, steps=steps, config=config, run_id=self._id)
        except self.outages:
            self._rows = collected
            raise
        self._config_is_new = False

    def finish(self, status: str) -> None:
        """Write how the run ended."""
        self._config["status"], self._config_is_new = status, True
        self._collect((self._step,), {"status": _trackio().Markdown(status)._to_dict()})
        self.flush()

    def _write_row(self, place: Place, values: Mapping[str, Any]) -> None:
        axes = asdict(place)
        self._step = axes.pop("step")
        self._collect(astuple(replace(place, epoch=0.0, seconds=0.0)), {**values, **axes})

    def _collect(self, place: tuple[Any, ...], row: Mapping[str, Any]) -> None:
        """Add values to the row of a place, which begins with the step; where it has others of a name, to a new row."""
        reserved = _trackio("utils").RESERVED_KEYS
        named = {f"__{name}" if name in reserved else name: value for name, value in row.items()}
        former = self._rows.get(place, {})
        if any(former.get(name, value) != value for name, value in named.items() if name not in ("epoch", "seconds")):
            place, former = (*place, len(self._rows)), {}
        self._rows[place] = former | named

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
