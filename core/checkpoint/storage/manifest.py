"""The names of a run's files, and the text of a manifest: what a checkpoint holds, with digests to verify it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self

from ...system.extras import kind_of
from ..state.schema import SCHEMA, describe_schema

SUFFIX = ".pth"
MANIFEST = ".json"
PINNED = ".pinned"
SHARDS = ".shards"
Label = Literal["last", "best"]
Mode = Literal["min", "max"]
ELSEWHERE = frozenset("/\0" + ("\\:" if os.name == "nt" else ""))  # what a bare file name has not
LONGEST_PART = 90  # bytes: file systems allow 255 for the whole name
NAME_DIGITS = 8  # of a digest of a name that cleaning changed


def checkpoint_name(run_name: str, epoch: int, step: int, metadata: str = "") -> str:
    """Return `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth`, each part cleaned for a file system."""
    tail = f"_{clean(metadata)}" if metadata else ""
    return f"{run_part(run_name)}_epoch_{epoch}_iter_{step}{tail}{SUFFIX}"


def run_part(run_name: str) -> str:
    """Return the prefix of a run's files: its name, with a digest if cleaning changes it.

    So different names have different prefixes: "a b" and "a-b", and long ones with the same beginning.
    """
    if clean(run_name) == run_name:
        return run_name
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:NAME_DIGITS]
    return f"{clean(run_name, LONGEST_PART - NAME_DIGITS - 1)}-{digest}"


def clean(part: str, longest: int = LONGEST_PART) -> str:
    """Return a part of a file name without separators, spaces and other special characters of shells."""
    kept = re.sub(r"[^\w.+=-]+", "-", part).encode()[:longest].decode(errors="ignore")
    return kept.strip("-.") or "unnamed"


def pointer_path(folder: Path, run_name: str, label: Label) -> Path:
    """Return the file that holds, for people and tools, the name of a run's last or best checkpoint."""
    return folder / f"{run_part(run_name)}.{label}"


def check_name(name: str) -> str:
    """Return the file name of a checkpoint; raise ValueError if it has a folder, is hidden or has another suffix."""
    if not ELSEWHERE.isdisjoint(name) or not name.endswith(SUFFIX) or name.startswith("."):
        raise ValueError(f"A checkpoint's name is a bare, visible file name that ends in {SUFFIX}, got {name!r}.")
    return name


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden files of a run: checkpoints that are being written, replaced or removed.

    Attributes:
        data: a checkpoint's data while it is written.
        shards: the folder into which ranks write its shards.
        manifest: its manifest, until the data has its final name.
        former_data: the data that is being replaced under the same name; restored if that fails.
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
        """The prefix of all files of the run."""
        return self.lock.name.removeprefix(".").removesuffix(".lock")

    @classmethod
    def of(cls, folder: Path, run_name: str) -> Self:
        """Return the names for a run."""
        parts = ("data", "shards", "manifest", "former-data", "former-shards", "former-manifest", "pointer")
        ends = [*(f"{part}.tmp" for part in parts), "doomed", "lock"]
        return cls(*(folder / f".{run_part(run_name)}.{end}" for end in ends))


def steps_path(folder: Path, run_name: str, rank: int) -> Path:
    """Return the file of a rank's last batches: `.<run>.steps`, except on the main rank with `.<rank>` added."""
    main = folder / f".{run_part(run_name)}.steps"
    return main if rank == 0 else main.with_name(f"{main.name}.{rank}")


FORMAT = "heliograph checkpoint"
MARK = b'"format": "heliograph checkpoint"'
MOST = 16 * 2**20  # bytes of a manifest: that of a checkpoint with 100,000 shards
CHECKSUM, DIGITS = b'\n  "sha256": "', 64  # two spaces: the manifest's own digest, not one of a file
YEARS_1_TO_9999 = (-6e10, 2.5e11)  # about, in seconds since 1970
JudgedBy = tuple[str, str, float | None]
Claim = tuple[str, int]
_JSON = json.JSONEncoder(sort_keys=True, allow_nan=False)


class MissingManifestError(ValueError):
    """A checkpoint has no manifest."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"The checkpoint {path} has no manifest {manifest_path(path).name}, so it cannot be verified: "
            f"copy both, or, if you trust the file, run `python -m heliograph checkpoint migrate {path}`."
        )


class SchemaError(ValueError):
    """A checkpoint has another schema: it is not damaged, but this version cannot read it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as described by its manifest, whose own digest was verified; the data was not.

    Attributes:
        path: the data file.
        run_name: the name of the files of its training.
        sequence: its number in the order of writing; the newest of a run has the highest.
        saved_at: when, in seconds since the epoch; for people.
        size: bytes of the data.
        sha256: their digest, in hexadecimal.
        schema: the version of the state inside.
        progress: the counters of the run.
        metrics: the latest value of every metric.
        versions: the software that wrote it.
        world: how many ranks wrote it, and what else its global batch is made of.
        judged_by: metric, mode and value by which it is ranked for the best; None if it is not.
        shards: bytes and digest of each file in its folder of shards, by name; empty without such a folder.
        training: the id of its training.
        asked_name: the name that the program gave the run; the files may have it with a number added.
        replaces: the digest of the file without a valid manifest that it replaces; else empty.
        weights_only: whether it holds no more than weights, so that no run can resume it.
        forked_from: the training that its training is a fork of, and the step, in words; empty of others.
        is_renamed: whether the data file has another name than the manifest says.
    """

    path: Path
    run_name: str
    sequence: int
    saved_at: float
    size: int
    sha256: str
    schema: int = SCHEMA
    progress: Mapping[str, int | float] = field(default_factory=dict, hash=False)
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    world: Mapping[str, int | None] = field(default_factory=dict, hash=False)
    judged_by: JudgedBy | None = None
    shards: Mapping[str, tuple[int, str]] = field(default_factory=dict, hash=False)
    training: str = ""
    asked_name: str = ""
    replaces: str = ""
    weights_only: bool = False
    forked_from: str = ""
    is_renamed: bool = False

    @property
    def claim(self) -> Claim:
        """The name that the program gave the run, and the number in the order of writing."""
        return self.family, self.sequence

    @property
    def order(self) -> tuple[int, float, str]:
        """The sort key for the order of writing: the clock decides only between equal sequences."""
        return self.sequence, self.saved_at, self.path.name

    @property
    def is_of_helios(self) -> bool:
        """Whether Helios wrote it: all of a name count as one training, but may be of several."""
        return "helios" in self.versions

    @property
    def family(self) -> str:
        """The name that the program gave the run; trainings with the same one share an order of writing and a lock."""
        return self.asked_name or self.run_name


def best_first(values: Mapping[Entry, float | None], mode: Mode) -> list[Entry]:
    """Return checkpoints, the best first; NaN is the worst, and of equals the one that was written earlier is better.

    Args:
        values: the value of each; a checkpoint without one is left out.
        mode: whether smaller or larger is better.
    """
    sign = 1.0 if mode == "min" else -1.0
    scores = {entry: inf if isnan(value) else value * sign for entry, value in values.items() if value is not None}
    return sorted(scores, key=lambda entry: (scores[entry], *entry.order))


def manifest_path(path: Path) -> Path:
    """Return the path of the manifest of a data file."""
    return path.with_suffix(MANIFEST)


def shards_path(path: Path) -> Path:
    """Return the folder of the shards of a checkpoint, if it has some."""
    return path.with_suffix(SHARDS)


def encode(entry: Entry) -> bytes:
    """Return the manifest of an entry: canonical JSON that contains its own digest."""
    judged_by = entry.judged_by and [*entry.judged_by[:2], _to_json(entry.judged_by[2])]
    shards = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in entry.shards.items()}
    return _with_checksum(
        {
            "format": FORMAT,
            "schema": entry.schema,
            "run_name": entry.run_name,
            "asked_name": entry.family,
            "training_id": entry.training,
            "sequence": entry.sequence,
            "saved_at": entry.saved_at,
            "files": {entry.path.name: {"bytes": entry.size, "sha256": entry.sha256}},
            "progress": dict(entry.progress),
            "metrics": {name: _to_json(value) for name, value in entry.metrics.items()},
            "versions": dict(entry.versions),
            "world": dict(entry.world),
            "judged_by": judged_by,
            **({"shards": shards} if shards else {}),
            **({"replaces": entry.replaces} if entry.replaces else {}),
            **({"weights_only": True} if entry.weights_only else {}),
            **({"forked_from": entry.forked_from} if entry.forked_from else {}),
        }
    )


def decode(content: bytes, path: Path, data: Path | None = None) -> Entry:
    """Return the entry in a manifest; its data file has the name in the manifest, and is in the same folder.

    Args:
        content: all bytes of the manifest.
        path: the path of the manifest.
        data: the path of the data file, used if the name is the same: creating a path takes time.

    Raises:
        SchemaError: it has another schema.
        ValueError: it is not a manifest, or damaged.
    """
    if MARK not in content:
        raise ValueError(f"{path} is damaged, or no manifest of a heliograph checkpoint.")
    try:
        facts = json.loads(content.decode())  # given bytes, it would look for their encoding
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The manifest {path} is damaged, or of something else: {error}.") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged, or no manifest of a heliograph checkpoint.")
    before, _, rest = content.partition(CHECKSUM)
    digest, end, after = rest[:DIGITS], rest[DIGITS : DIGITS + 2], rest[DIGITS + 2 :]
    if not (end == b'",' and hashlib.sha256(before + after).hexdigest().encode() == digest):
        raise ValueError(f"The manifest {path} is damaged: its bytes do not match its own digest.")
    try:
        if (schema := _typed(facts["schema"], "schema", int)) != SCHEMA:
            raise SchemaError(f"The checkpoint of {path} has {describe_schema(schema)}")
        return _entry(facts, path, data)
    except SchemaError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"The manifest {path} cannot be used: {error}.") from None


def claim_of(content: bytes) -> Claim | None:
    """Return the run's name and the sequence in a manifest, damaged or not; None if they cannot be read."""
    try:
        facts = json.loads(content) if MARK in content else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        return None
    asked_name, sequence = facts.get("asked_name"), facts.get("sequence")
    return (asked_name, sequence) if type(asked_name) is str and type(sequence) is int else None


def _entry(facts: Mapping[str, Any], path: Path, data: Path | None) -> Entry:
    """Return the entry of a manifest, with all types checked: a manifest with a correct digest may still be forged."""
    [(name, file)] = facts["files"].items()
    saved_at = _typed(facts["saved_at"], "saved_at", int, float)
    if not YEARS_1_TO_9999[0] < saved_at < YEARS_1_TO_9999[1]:
        raise ValueError(f"saved_at={saved_at!r} is not a time")
    return Entry(
        path=data if data is not None and data.name == name else path.with_name(check_name(name)),
        run_name=_typed(facts["run_name"], "run_name", str),
        sequence=_typed(facts["sequence"], "sequence", int),
        saved_at=saved_at,
        size=_typed(file["bytes"], "bytes", int),
        sha256=_typed(file["sha256"], "sha256", str),
        schema=facts["schema"],
        progress=_each(facts["progress"], "progress", int, float),
        metrics={name: float(value) for name, value in _each(facts["metrics"], "metrics", int, float, str).items()},
        versions=_each(facts["versions"], "versions", str),
        world=_each(facts["world"], "world", int, NoneType),
        judged_by=_judged_by(facts["judged_by"]),
        shards={_bare(name): _shard(each) for name, each in _each(facts.get("shards", {}), "shards", dict).items()},
        training=_typed(facts["training_id"], "training_id", str),
        asked_name=_typed(facts["asked_name"], "asked_name", str),
        replaces=_typed(facts.get("replaces", ""), "replaces", str),
        weights_only=_typed(facts.get("weights_only", False), "weights_only", bool),
        forked_from=_typed(facts.get("forked_from", ""), "forked_from", str),
    )


def _judged_by(saved: Any) -> JudgedBy | None:
    if saved is None:
        return None
    metric, mode, value = _typed(saved, "judged_by", list)
    if mode not in ("min", "max"):
        raise ValueError(f"judged_by has the mode {mode!r}")
    value = _typed(value, "judged_by", int, float, str, NoneType)
    return _typed(metric, "judged_by", str), mode, (None if value is None else float(value))


def _shard(saved: Mapping[str, Any]) -> tuple[int, str]:
    return _typed(saved["bytes"], "bytes", int), _typed(saved["sha256"], "sha256", str)


def _typed(value: Any, name: str, *kinds: type) -> Any:
    """Return a value that has exactly one of these types: a bool is not an int here."""
    if type(value) not in kinds:
        raise TypeError(f"{name} is {kind_of(value)}, not {' or '.join(each.__name__ for each in kinds)}")
    return value


def _each(values: Any, name: str, *kinds: type) -> dict[str, Any]:
    """Return a dict whose values all have exactly one of these types."""
    found = {*map(type, _typed(values, name, dict).values())}
    if wrong := found.difference(kinds):
        names = " and ".join(sorted(each.__name__ for each in wrong))
        raise TypeError(f"{name} holds {names}, not {' or '.join(each.__name__ for each in kinds)}")
    return values  # type: ignore[no-any-return]  # just checked


def _bare(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"the name of a shard is a bare file name, not {name!r}")
    return name


def _with_checksum(facts: Mapping[str, Any]) -> bytes:
    content, after = _canonical(facts), min(name for name in facts if name > "sha256")
    before, line, rest = content.partition(f'\n  "{after}": '.encode())
    return b"".join((before, CHECKSUM, hashlib.sha256(content).hexdigest().encode(), b'",', line, rest))


def _canonical(facts: Mapping[str, Any]) -> bytes:
    """Return canonical JSON, so that any changed byte is damage, even if it means the same.

    A line for each fact: where `json` indents by itself, it does all of its work in python.
    """
    lines = [f'  "{name}": {_JSON.encode(facts[name])}' for name in sorted(facts)]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def _to_json(value: float | None) -> float | str | None:
    """Return a number for strict JSON: NaN and infinities as strings."""
    return value if value is None or isfinite(value) else str(float(value))
