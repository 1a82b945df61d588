"""The folder of a report: hard links to the files of a checkpoint, and of the best one."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heliograph import Progress
from heliograph.spi import Store, read_manifest


@dataclass(frozen=True, slots=True)
class StagedReport:
    """A report that is ready to be sent.

    Attributes:
        folder: holds the files; the caller removes it.
        metrics: the metrics that the checkpoint was saved with, `epoch` and `step`.
    """

    folder: Path
    metrics: dict[str, float]


def stage_report(run_name: str, path: Path, best: Path | None) -> StagedReport:
    """Collect the files of a checkpoint, and of the best one if it is another.

    Args:
        run_name: the name of the run.
        path: the checkpoint.
        best: the best checkpoint, if there is one.

    Raises:
        ValueError: there is no manifest, or a file does not match it.
        OSError: a file can be neither linked nor copied.
    """
    store = Store(path.parent, run_name)
    files = _files_of(store, path)
    if best is not None and best != path and best.exists():
        files |= _files_of(store, best)
    folder = store.scratch("report")
    if folder.exists():  # of a process that was killed
        shutil.rmtree(folder)
    folder.mkdir()
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        _link(file, folder / name)
    entry = read_manifest(path)
    progress = entry.progress
    return StagedReport(folder, {**entry.metrics, "epoch": progress["epoch"], "step": progress["steps"]})


def add_progress(metrics: Mapping[str, float], progress: Progress) -> dict[str, float]:
    """Return metrics with `epoch` and `step`."""
    return {**metrics, "epoch": progress.epoch, "step": progress.steps}


def contains_all(metrics: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Return whether metrics contain all others with the same values; NaN equals NaN."""
    return all(
        name in metrics and (value == metrics[name] or (math.isnan(value) and math.isnan(metrics[name])))
        for name, value in others.items()
    )


def _files_of(store: Store, path: Path) -> dict[Path, Path]:
    """Return the files of a checkpoint by their paths relative to its folder."""
    try:
        return {file.relative_to(path.parent): file for file in store.files_of(path)}
    except ValueError as error:
        raise ValueError(
            f"{error} It cannot be reported. Shards must be in a folder that all ranks share; without one, "
            f"FSDPEngine(state='full') gathers everything on the main rank."
        ) from error


def _link(old: Path, new: Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
