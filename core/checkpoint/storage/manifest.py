"""File names of a run, and manifests: what a checkpoint holds, with digests to verify it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from ..schema import SCHEMA

SUFFIX = ".pth"
PINNED = ".pinned"
DIGESTS = "digests.json"  # in a folder of shards
Label = Literal["last", "best"]
Mode = Literal["min", "max"]
SPECIAL = frozenset("/\0" + ("\\:" if os.name == "nt" else ""))  # not in a bare file name
LONGEST_PART = 90  # bytes: file systems allow 255 for the whole name
NAME_DIGITS = 8  # of a digest of a name that cleaning changed


def checkpoint_name(run_name: str, epoch: int, step: int, metadata: str = "") -> str:
    """Return `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth`, each part cleaned."""
    tail = f"_{clean(metadata)}" if metadata else ""
    return f"{run_part(run_name)}_epoch_{epoch}_iter_{step}{tail}{SUFFIX}"


@lru_cache
def run_part(run_name: str) -> str:
    # the digest gives "a b" and "a-b", and long names with the same beginning, different prefixes
    if clean(run_name) == run_name:
        return run_name
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:NAME_DIGITS]
    return f"{clean(run_name, LONGEST_PART - NAME_DIGITS - 1)}-{digest}"


def clean(part: str, longest: int = LONGEST_PART) -> str:
    """Replace characters of a file name part that are special for shells or file systems."""
    cleaned = re.sub(r"[^\w.+=-]+", "-", part).encode()[:longest].decode(errors="ignore")
    return cleaned.strip("-.") or "unnamed"


def pointer_path(folder: Path, run_name: str, label: Label) -> Path:
    return folder / f"{run_part(run_name)}.{label}"


def check_name(name: str) -> str:
    if not SPECIAL.isdisjoint(name) or not name.endswith(SUFFIX) or name.startswith("."):
        raise ValueError(f"A checkpoint's name is a bare, visible file name that ends in {SUFFIX}, got {name!r}.")
    return name


class Hidden(NamedTuple):
    """The hidden files of a run. Those that end in `.tmp` are not finished: the next start removes them.

    Attributes:
        data: a checkpoint while it is written, or a checkpoint with shards while it is removed.
        shards: the folder into which ranks write shards.
        small: a small file while it is written.
        lock: the lock file of the process that writes.
    """

    data: Path
    shards: Path
    small: Path
    lock: Path

    @classmethod
    def of(cls, folder: Path, run_name: str) -> Self:
        ends = ("data.tmp", "shards.tmp", "small.tmp", "lock")
        return cls(*(folder / f".{run_part(run_name)}.{end}" for end in ends))


FORMAT = "heliograph checkpoint"
MOST = 2**16 - 1  # bytes of a manifest, as of any comment of a zip archive
CHECKSUM = b'\n  "sha256": "'  # two spaces: the manifest's own digest, not the digest of the data
JudgedBy = tuple[str, str, float | None]
_JSON = json.JSONEncoder(sort_keys=True, allow_nan=False)


class MissingManifestError(ValueError):
    """A file without a manifest: not a checkpoint of heliograph, or one of Helios that was not migrated.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} has no manifest, so it is not a checkpoint of heliograph. If it is one of Helios, run "
            f"`python -m heliograph checkpoint migrate {path}`, a command of heliograph-cli."
        )


class SchemaError(ValueError):
    """A checkpoint with another schema: not damaged, but this version cannot read it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as described by its manifest; only the manifest's own digest was verified.

    Attributes:
        path: the file.
        run_name: the prefix of the files of its training.
        sequence: its number in the order of writing; the newest checkpoint of a run has the highest.
        saved_at: the time of the save in seconds since the epoch, for people.
        size: bytes of the file before the manifest.
        sha256: the hexadecimal digest of these bytes without the last two, which are the length of the manifest.
        progress: the counters of the run.
        metrics: the latest value of every metric.
        versions: the software that wrote it.
        judged_by: metric, mode and value that rank it for `keep_best`; None if it is not ranked.
        shards: the name of its shard folder and the digest of that folder's index; None without shards.
        former_shards: the shard folder of the checkpoint that it replaced; empty if there was none.
        training: the id of its training.
        asked_name: the name that the program gave the run; the files may have it with a number added.
        weights_only: whether it holds only weights, so that it cannot be resumed.
        name: the name under which the file was saved.
    """

    path: Path
    run_name: str
    sequence: int
    saved_at: float
    size: int
    sha256: str
    progress: Mapping[str, int | float] = field(default_factory=dict, hash=False)
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    judged_by: JudgedBy | None = None
    shards: tuple[str, str] | None = None
    former_shards: str = ""
    training: str = ""
    asked_name: str = ""
    weights_only: bool = False
    name: str = ""

    @property
    def order(self) -> tuple[int, float, str]:
        """The sort key for the order of writing: the clock decides only between equal sequences."""
        return self.sequence, self.saved_at, self.path.name

    @property
    def is_of_helios(self) -> bool:
        """Whether Helios wrote it. All checkpoints of a name then form one training."""
        return "helios" in self.versions

    @property
    def is_renamed(self) -> bool:
        """Whether the file was renamed after it was saved."""
        return self.name not in ("", self.path.name)

    @property
    def is_removable(self) -> bool:
        """False if the file was renamed or written by Helios: no rule removes it."""
        return not (self.is_renamed or self.is_of_helios)

    @property
    def family(self) -> str:
        """The name that the program gave the run; its trainings share an order of writing and a lock."""
        return self.asked_name or self.run_name


def best_first(values: Mapping[Entry, float | None], mode: Mode) -> list[Entry]:
    """Sort checkpoints, best first. NaN is the worst; of equal values the earlier checkpoint is better.

    Args:
        values: the value of each checkpoint; one without a value is left out.
        mode: whether smaller or larger values are better.
    """
    sign = 1.0 if mode == "min" else -1.0
    scores = {entry: inf if isnan(value) else value * sign for entry, value in values.items() if value is not None}
    return sorted(scores, key=lambda entry: (scores[entry], *entry.order))


def encode(entry: Entry) -> bytes:
    """Return the manifest of an entry: canonical JSON that contains its own digest.

    If it is too long, for example with a thousand metrics, the metrics are left out; the state has them too.

    Raises:
        ValueError: it is too long even without metrics.
    """
    facts = {
        "format": FORMAT,
        "schema": SCHEMA,
        "name": entry.name or entry.path.name,
        "run_name": entry.run_name,
        "asked_name": entry.family,
        "training_id": entry.training,
        "sequence": entry.sequence,
        "saved_at": entry.saved_at,
        "data": {"bytes": entry.size, "sha256": entry.sha256},
        "progress": dict(entry.progress),
        "metrics": {name: _to_json(value) for name, value in entry.metrics.items()},
        "versions": dict(entry.versions),
        "judged_by": entry.judged_by and [*entry.judged_by[:2], _to_json(entry.judged_by[2])],
        "shards": entry.shards and [*entry.shards],
        "former_shards": entry.former_shards,
        "weights_only": entry.weights_only,
    }
    content = _with_checksum(facts)
    if len(content) > MOST:
        facts |= {"metrics": {}, "left_out": ["metrics"]}
        content = _with_checksum(facts)
    if len(content) > MOST:
        longest = max(facts, key=lambda name: len(_JSON.encode(facts[name])))
        raise ValueError(
            f"The manifest of the checkpoint {entry.path} has {len(content)} bytes without metrics, and at most {MOST} "
            f"fit: shorten {longest!r}."
        )
    return content


def _with_checksum(facts: Mapping[str, Any]) -> bytes:
    content, after = _canonical(facts), min(name for name in facts if name > "sha256")
    before, line, tail = content.partition(f'\n  "{after}": '.encode())
    return b"".join((before, CHECKSUM, hashlib.sha256(content).hexdigest().encode(), b'",', line, tail))


def _canonical(facts: Mapping[str, Any]) -> bytes:
    # canonical: any changed byte is damage, even if it means the same; indent= would make `json` work in pure Python
    lines = [f'  "{name}": {_JSON.encode(facts[name])}' for name in sorted(facts)]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def _to_json(value: float | None) -> float | str | None:
    return value if value is None or isfinite(value) else str(float(value))
