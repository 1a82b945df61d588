"""Names of files: for people and for the order of a folder, never trusted for what is inside."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

SUFFIX = ".pth"
MANIFEST = ".json"
PINNED = ".pinned"
SHARDS = ".shards"
Label = Literal["last", "best"]
LONGEST_PART = 90  # bytes: file systems allow 255 for the whole name


def checkpoint_name(run_name: str, epoch: int, step: int, metadata: str = "") -> str:
    """Return `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth`, with every part fit for a file system."""
    tail = f"_{clean(metadata)}" if metadata else ""
    return f"{clean(run_name)}_epoch_{epoch}_iter_{step}{tail}{SUFFIX}"


def clean(part: str) -> str:
    """Return a file-name part without separators, spaces and other marks that a shell or file system minds."""
    kept = re.sub(r"[^\w.+=-]+", "-", part).encode()[:LONGEST_PART].decode(errors="ignore")
    return kept.strip("-.") or "unnamed"


def pointer_path(folder: Path, run_name: str, label: Label) -> Path:
    """Return the file that tells people and tools which checkpoint is a run's last or its best."""
    return folder / f"{clean(run_name)}.{label}"


def check_name(name: str) -> str:
    """Return the file name of a checkpoint; ValueError where it would lie elsewhere or be overlooked."""
    if Path(name).name != name or not name.endswith(SUFFIX) or name.startswith("."):
        raise ValueError(f"A checkpoint's name is a bare, visible file name that ends in {SUFFIX}, got {name!r}.")
    return name


@dataclass(frozen=True, slots=True)
class Hidden:
    """The files of a run that are not yet, or no longer, checkpoints.

    Attributes:
        data: a checkpoint's data while it is written.
        shards: the folder of its shards, where ranks write them.
        manifest: its manifest, until all are in place.
        former_data: what is about to be replaced under the same name; comes back if the replacing fails.
        former_shards: its shards.
        former_manifest: its manifest.
        pointer: a pointer while it is written.
        doomed: the manifest of a checkpoint that is being removed.
        lock: held by the process that writes.
    """

    data: Path
    shards: Path
    manifest: Path
    former_data: Path
    former_shards: Path
    former_manifest: Path
    pointer: Path
    doomed: Path
    lock: Path

    @classmethod
    def of(cls, folder: Path, run_name: str) -> Self:
        """Return the names for a run."""
        parts = ("data", "shards", "manifest", "former-data", "former-shards", "former-manifest", "pointer")
        ends = [*(f"{part}.tmp" for part in parts), "doomed", "lock"]
        return cls(*(folder / f".{clean(run_name)}.{end}" for end in ends))
