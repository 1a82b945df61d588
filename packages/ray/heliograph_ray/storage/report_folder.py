"""The folder of a report: hard links to the files of a checkpoint, and of the best one."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heliograph import Progress
from heliograph.core.checkpoint.storage.manifest import manifest_path, run_part, shards_path
from heliograph.core.checkpoint.storage.reader import is_complete
from heliograph.spi import Entry, read_manifest


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
    entry = _read_complete(path)
    folder = path.parent / f".{run_part(run_name)}.report"
    if folder.exists():  # of a process that was killed
        shutil.rmtree(folder)
    folder.mkdir()
    _add(entry, folder)
    if best is not None and best != path and best.exists():
        _add(_read_complete(best), folder)
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


def _read_complete(path: Path) -> Entry:
    entry = read_manifest(path)
    if not is_complete(entry):
        shards = " Shards must be in a folder that all ranks share; without one, Checkpoint(..., sharded=False) "
        raise ValueError(
            f"The checkpoint {path} cannot be reported: files of its manifest are missing, or have another size."
            + f"{shards}gathers everything on the main rank." * bool(entry.shards)
        )
    return entry


def _add(entry: Entry, folder: Path) -> None:
    for each in (entry.path, manifest_path(entry.path)):
        _link(each, folder / each.name)
    if entry.shards:
        shards = folder / shards_path(entry.path).name
        shards.mkdir()
        for name in entry.shards:
            _link(shards_path(entry.path) / name, shards / name)


def _link(old: Path, new: Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
