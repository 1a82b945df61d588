"""What a report's folder holds: the files of a checkpoint, and of the best one, in hard links."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ....core.checkpoint.storage import Entry, read_manifest
from ....core.checkpoint.storage.manifest import manifest_path, run_part, shards_path
from ....core.checkpoint.storage.reader import is_complete
from ....events import Progress


@dataclass(frozen=True, slots=True)
class Staged:
    """A folder that is ready to be reported.

    Attributes:
        folder: with the files; whoever reports it removes it.
        facts: the metrics that the checkpoint was saved with, and where the run was.
    """

    folder: Path
    facts: dict[str, float]


def stage(run_name: str, path: Path, best: Path | None) -> Staged:
    """Gather the files of a checkpoint, and of the best one where that is another.

    Args:
        run_name: whose they are.
        path: the checkpoint.
        best: the best, if there is one.

    Raises:
        ValueError: there is no manifest, or some file is not there as it tells.
        OSError: a file could be neither linked nor copied.
    """
    entry = _whole(path)
    folder = path.parent / f".{run_part(run_name)}.report"
    if folder.exists():  # of a process that was killed
        shutil.rmtree(folder)
    folder.mkdir()
    _add(entry, folder)
    if best is not None and best != path and best.exists():
        _add(_whole(best), folder)
    progress = entry.progress
    facts = {**entry.metrics, "epoch": progress["epoch"], "step": progress["steps"]}
    return Staged(folder, facts)


def facts_of(progress: Progress, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with where the run is."""
    return {**metrics, "epoch": progress.epoch, "step": progress.steps}


def are_among(metrics: Mapping[str, float], facts: Mapping[str, float]) -> bool:
    """Return whether all metrics are among others, with the same values; NaN is the same as NaN here."""
    return all(
        name in facts and (value == facts[name] or (math.isnan(value) and math.isnan(facts[name])))
        for name, value in metrics.items()
    )


def _whole(path: Path) -> Entry:
    entry = read_manifest(path)
    if not is_complete(entry):
        shards = " Shards must lie in a folder that all ranks share; without one, Checkpoint(..., sharded=False) "
        raise ValueError(
            f"The checkpoint {path} cannot be reported: not all of its files are there as its manifest tells."
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
