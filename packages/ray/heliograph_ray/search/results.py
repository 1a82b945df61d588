"""The results of a search: its trials, the best one, and its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heliograph.spi import Store, describe_error, read_manifest, require

from ..storage import StoredFolder
from .location import Location, search_location
from .trial import TrialFailed

PURPOSE = "heliograph_ray.tune_results"
ENDED = ("TERMINATED", "ERROR")
FACTS = ("epoch", "step")


@dataclass(frozen=True)
class Trial:
    """One trial of a search.

    Attributes:
        number: trials are numbered from 0 in order of their start.
        name: Ray's name for it.
        config: its last hyper-parameters.
        status: `completed`, `stopped` on request, `failed`, or `unfinished` if the search was interrupted.
        reason: why it ended.
        stopped_by: the requester of the stop, such as `tune`; None unless stopped.
        value: the best value of the search's metric; None if it was never measured.
        metrics: the last reported metrics, with `epoch` and `step`.
        error: the exception of its function, with the traceback in its notes; None unless failed.
        notes: the notes of its last training, for example the resumed checkpoint and the changes by Tune.
        warnings: the warnings of its last training: requests that were not served.
        path: its folder in the storage.
    """

    number: int
    name: str
    config: dict[str, Any]
    status: str
    reason: str
    stopped_by: str | None
    value: float | None
    metrics: dict[str, float]
    error: BaseException | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    path: str
    _stored: Any = field(repr=False)

    def fetch(self, folder: str | Path) -> Path:
        """Copy the checkpoint of the best value to a folder, which is created if it is missing.

        Returns:
            The path of the intact checkpoint, for `load_weights(task, path)` or `Checkpoint(resume=path)`.

        Raises:
            ValueError: the trial has stored no checkpoint, or it is damaged.
            OSError: the storage cannot be read, or the disk not be written.
        """
        if self._stored is None:
            raise ValueError(f"Trial {self.number} has no stored checkpoint: add a Checkpoint and a SaveSchedule.")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = self._stored.manifests()
        self._stored.fetch(folder)
        newest = max((read_manifest(folder / name) for name in names), key=lambda entry: entry.order)
        return Store(folder, newest.run_name).verify(newest.path).path

    def __str__(self) -> str:
        by = f" by {self.stopped_by}" if self.stopped_by else ""
        value = "not measured" if self.value is None else f"{self.value:.6g}"
        step = f", step {self.metrics['step']:g}" if "step" in self.metrics else ""
        line = f"{self.number}: {value}{step}, {self.status}{by}: {self.reason}; {self.config}"
        return "\n".join([line, *(f"   WARNING: {warning}" for warning in self.warnings)])


class Search(list[Trial]):
    """The trials of a search, by number.

    Attributes:
        metric: the metric that it optimized.
        mode: whether smaller (`min`) or larger (`max`) is better.
        path: its folder in the storage.
        is_finished: whether all trials have ended; if not, `tune(..., resume="auto")` continues it.
    """

    def __init__(self, trials: Iterable[Trial], metric: str, mode: str, path: str, *, is_finished: bool = True) -> None:
        super().__init__(trials)
        self.metric, self.mode, self.path, self.is_finished = metric, mode, path, is_finished

    @property
    def best(self) -> Trial:
        """The trial with the best measured value, the first of equal ones.

        Raises:
            ValueError: no trial has measured the metric.
        """
        measured = [trial for trial in self if trial.value is not None]
        if not measured:
            raise ValueError(f"No trial has measured {self.metric!r}:\n{self}")
        return min(measured, key=lambda trial: _score(trial.value, self.mode))

    def __str__(self) -> str:
        return "\n".join([f"{self.metric} ({self.mode}), {len(self)} trials in {self.path}", *map(str, self)])


def tune_results(storage_path: str | Path | None, name: str) -> Search:
    """Read a search and its trials from the storage: of this process or of another, finished or not.

    Nothing is started, and the function that was tuned is not needed. Ray's files are pickles: read only what you
    trust.

    Args:
        storage_path: as given to `tune`; None for `~/ray_results`.
        name: the name of the search.

    Raises:
        FileNotFoundError: there is no such search.
    """
    location = search_location(storage_path, name)
    if (goal := location.read()) is None:
        raise FileNotFoundError(f"There is no search {name!r} of heliograph_ray.tune in {location.storage}.")
    if not location.has_state():
        raise FileNotFoundError(f"The search {name!r} in {location.storage} was ended before Ray saved any trial.")
    return read_search(location, goal["metric"], goal["mode"])


def read_search(location: Location, metric: str, mode: str) -> Search:
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    analysis = ray_tune.ExperimentAnalysis(location.path, default_metric=metric, default_mode=mode)
    results = ray_tune.ResultGrid(analysis)
    pairs = sorted(zip(analysis.trials, results, strict=True), key=lambda pair: _start_order(pair[0]))
    trials = [_trial(number, location, metric, mode, *pair) for number, pair in enumerate(pairs)]
    is_finished = all(trial.status in ENDED for trial in analysis.trials)
    return Search(trials, metric, mode, location.path, is_finished=is_finished)


def _start_order(trial: Any) -> tuple[int, str]:
    count = str(trial.experiment_tag).partition("_")[0]
    return int(count) if count.isdecimal() else 0, trial.trial_id


def _trial(number: int, location: Location, metric: str, mode: str, trial: Any, result: Any) -> Trial:
    error = _error(result.error, number)
    end = location.subfolder(Path(result.path).name).read() or {}
    status, reason = end.get("status", "unfinished"), end.get("reason", "its process was killed")
    if error is not None:
        status, reason = "failed", describe_error(error)
    elif trial.status not in ENDED:
        status, reason = "unfinished", "the search was interrupted"
    frame = result.metrics_dataframe
    values = [] if frame is None or metric not in frame else frame[metric].dropna().tolist()
    last = result.metrics or {}
    return Trial(
        number=number,
        name=trial.trial_id,
        config=dict(result.config or trial.config),  # a trial that reported nothing has none in its result
        status=status,
        reason=reason,
        stopped_by=end.get("stopped_by") if status == "stopped" else None,
        value=min(values, key=lambda value: _score(value, mode)) if values else None,
        metrics={name: value for name, value in last.items() if _is_reported(name)},
        error=error,
        notes=tuple(end.get("notes", ())),
        warnings=tuple(end.get("warnings", ())),
        path=result.path,
        _stored=_best_stored(result.best_checkpoints, metric, mode),
    )


def _is_reported(name: str) -> bool:
    return name in FACTS or ("/" in name and not name.startswith("config/"))


def _best_stored(checkpoints: list[tuple[Any, dict[str, Any]]], metric: str, mode: str) -> StoredFolder | None:
    def order(pair: tuple[Any, dict[str, Any]]) -> tuple[float, int]:
        return _score(pair[1].get(metric), mode), pair[1]["training_iteration"]

    if not checkpoints:
        return None
    checkpoint, _ = min(checkpoints, key=order)
    return StoredFolder(checkpoint.filesystem, checkpoint.path)


def _score(value: float | None, mode: str) -> float:
    if value is None or math.isnan(value):
        return math.inf
    return value if mode == "min" else -value


def _error(error: Any, number: int) -> BaseException | None:
    if error is None:
        return None
    cause = getattr(error, "cause", error)
    if isinstance(cause, TrialFailed):
        rebuilt = cause.error.rebuild()
        rebuilt.add_note(f"heliograph: raised in trial {number}:\n{cause.error.text.rstrip()}")
        return rebuilt
    return cause if isinstance(cause, BaseException) else RuntimeError(str(cause))
