"""Names of files: for people and for the order of a folder, never trusted for what is inside."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

SUFFIX = ".pth"
MANIFEST = ".json"
PINNED = ".pinned"
SHARDS = ".shards"
Label = Literal["last", "best"]
ELSEWHERE = frozenset("/\0" + ("\\:" if os.name == "nt" else ""))  # what a bare file name has not
LONGEST_PART = 90  # bytes: file systems allow 255 for the whole name
DIGITS = 8  # of a digest of a name that cleaning changed


def checkpoint_name(run_name: str, epoch: int, step: int, metadata: str = "") -> str:
    """Return `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth`, with every part fit for a file system."""
    tail = f"_{clean(metadata)}" if metadata else ""
    return f"{run_part(run_name)}_epoch_{epoch}_iter_{step}{tail}{SUFFIX}"


def run_part(run_name: str) -> str:
    """Return what the files of a run begin with: its name, with a digest of it where cleaning changes it.

    So no two names are one: neither "a b" and "a-b", nor long ones that begin alike.
    """
    if clean(run_name) == run_name:
        return run_name
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:DIGITS]
    return f"{clean(run_name, LONGEST_PART - DIGITS - 1)}-{digest}"


def clean(part: str, longest: int = LONGEST_PART) -> str:
    """Return a file-name part without separators, spaces and other marks that a shell or file system minds."""
    kept = re.sub(r"[^\w.+=-]+", "-", part).encode()[:longest].decode(errors="ignore")
    return kept.strip("-.") or "unnamed"


def pointer_path(folder: Path, run_name: str, label: Label) -> Path:
    """Return the file that tells people and tools which checkpoint is a run's last or its best."""
    return folder / f"{run_part(run_name)}.{label}"


def check_name(name: str) -> str:
    """Return the file name of a checkpoint; ValueError where it would lie elsewhere or be overlooked."""
    if not ELSEWHERE.isdisjoint(name) or not name.endswith(SUFFIX) or name.startswith("."):
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

    @property
    def prefix(self) -> str:
        """What all names of files that belong to the run begin with."""
        return self.lock.name.removeprefix(".").removesuffix(".lock")

    @classmethod
    def of(cls, folder: Path, run_name: str) -> Self:
        """Return the names for a run."""
        parts = ("data", "shards", "manifest", "former-data", "former-shards", "former-manifest", "pointer")
        ends = [*(f"{part}.tmp" for part in parts), "doomed", "lock"]
        return cls(*(folder / f".{run_part(run_name)}.{end}" for end in ends))


def steps_path(folder: Path, run_name: str, rank: int) -> Path:
    """Return the file of a rank's last batches: `.<run>.steps`, of another rank than the main `.<run>.steps.<rank>`."""
    main = folder / f".{run_part(run_name)}.steps"
    return main if rank == 0 else main.with_name(f"{main.name}.{rank}")
