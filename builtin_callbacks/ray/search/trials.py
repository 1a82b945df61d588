"""What became of a search: its trials, the best one, and its checkpoint, as the storage has them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.checkpoint import storage
from ....core.distributed.launch.exceptions import rebuild
from ....core.system.extras import require
from ....events.errors import describe_error
from ..storage.checkpoints import StoredFolder
from .places import Place, place_of
from .trainable import TrialFailed

PURPOSE = "heliograph.ray.tune_results"
ENDED = ("TERMINATED", "ERROR")
FACTS = ("epoch", "step")


@dataclass(frozen=True)
class Trial:
    """One trial of a search.

    Attributes:
        number: its place among the trials, from 0.
        name: what Ray calls it.
        config: its hyper-parameters, as they were in the end.
        status: `completed`, `stopped` on purpose, `failed`, or `unfinished`, where the search was interrupted.
        reason: why it ended.
        stopped_by: who asked for the stop, such as `tune`; None unless stopped.
        value: the best value of the metric that the search goes by; None where it was never measured.
        metrics: what was reported last, with `epoch` and `step`.
        error: what its function raised, None unless failed; the traceback there is in its notes.
        notes: what plugins had to say in its last training: resumed from where, changed by Tune, and the like.
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
    path: str
    _stored: Any = field(repr=False)

    def fetch(self, folder: str | Path) -> Path:
        """Copy the checkpoint of the best value into a folder, which is made where it is missing.

        Returns:
            The checkpoint, verified: for `load_weights(task, path)`, or `Checkpoint(resume=path)`.

        Raises:
            ValueError: the trial has stored none, or it is damaged.
            OSError: the storage or the disk did not do it.
        """
        if self._stored is None:
            raise ValueError(
                f"Trial {self.number} has stored no checkpoint: it needs a Checkpoint, and a SaveSchedule."
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = self._stored.manifests()
        self._stored.fetch(folder)
        entries = [storage.read_manifest(folder / Path(name).with_suffix(".pth")) for name in names]
        newest = max(entries, key=lambda entry: entry.order)
        storage.verify(newest.path)
        return newest.path

    def __str__(self) -> str:
        asker = f" by {self.stopped_by}" if self.stopped_by else ""
        value = "not measured" if self.value is None else f"{self.value:.6g}"
        step = f", step {self.metrics['step']:g}" if "step" in self.metrics else ""
        return f"{self.number}: {value}{step}, {self.status}{asker}: {self.reason}; {self.config}"


class Search(list[Trial]):
    """The trials of a search, by number.

    Attributes:
        metric: what the search went by.
        mode: whether smaller (`min`) or larger (`max`) is better.
        path: where the storage has it.
        is_finished: whether nothing is left to do; otherwise, `tune(..., resume="auto")` goes on.
    """

    def __init__(self, trials: Iterable[Trial], metric: str, mode: str, path: str, *, is_finished: bool = True) -> None:
        super().__init__(trials)
        self.metric, self.mode, self.path, self.is_finished = metric, mode, path, is_finished

    @property
    def best(self) -> Trial:
        """The trial with the best value that was ever measured, the first of equal ones.

        Raises:
            ValueError: nothing was measured.
        """
        measured = [trial for trial in self if trial.value is not None]
        if not measured:
            raise ValueError(f"No trial has measured {self.metric!r}:\n{self}")
        return min(measured, key=lambda trial: _rank(trial.value, self.mode))

    def __str__(self) -> str:
        return "\n".join([f"{self.metric} ({self.mode}), {len(self)} trials in {self.path}", *map(str, self)])


def tune_results(storage_path: str | Path | None, name: str) -> Search:
    """Return a search and its trials as the storage has them: of this process or of another, finished or not.

    Nothing is started, and the function that was tuned is not needed. What Ray keeps there is pickled: read only what
    you trust.

    Args:
        storage_path: where Ray keeps it, as `tune` was told; None for `~/ray_results`.
        name: of the search.

    Raises:
        FileNotFoundError: there is no such search.
    """
    place = place_of(storage_path, name)
    if (told := place.read()) is None:
        raise FileNotFoundError(f"There is no search {name!r} of heliograph.ray.tune in {place.storage}.")
    if not place.has_begun():
        raise FileNotFoundError(f"The search {name!r} in {place.storage} was ended before Ray wrote down any trial.")
    return read_search(place, told["metric"], told["mode"])


def read_search(place: Place, metric: str, mode: str) -> Search:
    """Return what the storage has of a search."""
    ray_tune = require("ray.tune", PURPOSE, extra="ray")
    analysis = ray_tune.ExperimentAnalysis(place.path, default_metric=metric, default_mode=mode)
    results = ray_tune.ResultGrid(analysis)
    pairs = sorted(zip(analysis.trials, results, strict=True), key=lambda pair: _turn(pair[0]))
    trials = [_trial(number, place, metric, mode, *pair) for number, pair in enumerate(pairs)]
    is_finished = all(trial.status in ENDED for trial in analysis.trials)
    return Search(trials, metric, mode, place.path, is_finished=is_finished)


def _turn(trial: Any) -> tuple[int, str]:
    """Return when a trial's turn came: Ray counts them in their tags, and keeps them in no order."""
    count = str(trial.experiment_tag).partition("_")[0]
    return int(count) if count.isdecimal() else 0, trial.trial_id


def _trial(number: int, place: Place, metric: str, mode: str, trial: Any, result: Any) -> Trial:
    error = _error(result.error, number)
    end = place.within(Path(result.path).name).read() or {}
    status, reason = end.get("status", "unfinished"), end.get("reason", "it did not end by itself")
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
        config=dict(result.config or trial.config),  # a trial that reported nothing has no result's
        status=status,
        reason=reason,
        stopped_by=end.get("stopped_by") if status == "stopped" else None,
        value=min(values, key=lambda value: _rank(value, mode)) if values else None,
        metrics={name: value for name, value in last.items() if _is_reported(name)},
        error=error,
        notes=tuple(end.get("notes", ())),
        path=result.path,
        _stored=_best_stored(result.best_checkpoints, metric, mode),
    )


def _is_reported(name: str) -> bool:
    """Return whether it is a metric of ours; of a trial that was cloned, Ray tells `config/lr` and the like there."""
    return name in FACTS or ("/" in name and not name.startswith("config/"))


def _best_stored(checkpoints: list[tuple[Any, dict[str, Any]]], metric: str, mode: str) -> StoredFolder | None:
    """Return the stored checkpoint of the best value; of equal ones the earliest, since the others only repeat it."""

    def order(pair: tuple[Any, dict[str, Any]]) -> tuple[float, int]:
        return _rank(pair[1].get(metric), mode), pair[1]["training_iteration"]

    if not checkpoints:
        return None
    checkpoint, _ = min(checkpoints, key=order)
    return StoredFolder(checkpoint.filesystem, checkpoint.path, is_own=False)


def _rank(value: float | None, mode: str) -> float:
    """Return a number that is smaller the better a value is."""
    if value is None or math.isnan(value):
        return math.inf
    return value if mode == "min" else -value


def _error(error: Any, number: int) -> BaseException | None:
    """Return the user's own error where Ray tells of one."""
    if error is None:
        return None
    cause = getattr(error, "cause", error)
    if isinstance(cause, TrialFailed):
        rebuilt = rebuild(cause.error)
        rebuilt.add_note(f"heliograph: raised in trial {number}:\n{cause.error.text.rstrip()}")
        return rebuilt
    return cause if isinstance(cause, BaseException) else RuntimeError(str(cause))
