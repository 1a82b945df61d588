"""File names of a run, and manifests: what a checkpoint holds, with digests to verify it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite, isnan
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, Self

from ...system.extras import kind_of
from ..schema import SCHEMA, describe_schema

SUFFIX = ".pth"
PINNED = ".pinned"
SHARDS = re.compile(r".+\.[0-9a-f]{8}\.shards")
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
MARK = b'"format": "heliograph checkpoint"'
END, END_SIZE = b"PK\5\6", 22  # the last record of a zip archive; its last two bytes are the length of the comment
NEAR = 4096  # bytes: most manifests are shorter
MOST = 2**16 - 1  # bytes of a manifest, as of any comment of a zip archive
CHECKSUM, DIGITS = b'\n  "sha256": "', 64  # two spaces: the manifest's own digest, not the digest of the data
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


def decode(content: bytes, path: Path, begin: int | None = None) -> Entry:
    """Parse a manifest.

    Args:
        content: all bytes of the manifest.
        path: the checkpoint.
        begin: the position of the manifest in the file.

    Raises:
        SchemaError: it has another schema.
        ValueError: it is not a manifest, or it is damaged.
    """
    try:  # given bytes, json would look for their encoding
        facts = json.loads(content.decode()) if MARK in content else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its manifest cannot be read: {error}.") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged, or not a checkpoint of heliograph: it does not end with a manifest.")
    before, _, signed = content.partition(CHECKSUM)
    digest, end, after = signed[:DIGITS], signed[DIGITS : DIGITS + 2], signed[DIGITS + 2 :]
    if not (end == b'",' and hashlib.sha256(before + after).hexdigest().encode() == digest):
        raise ValueError(f"{path} is damaged: the bytes of its manifest do not match its own digest.")
    if type(schema := facts.get("schema")) is int and schema != SCHEMA:
        raise SchemaError(f"The checkpoint {path} has {describe_schema(schema)}")
    try:
        entry = _entry(facts, path)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"The manifest of {path} cannot be used: {error}.") from None
    if begin not in (None, entry.size):
        raise ValueError(f"{path} is damaged: it has {begin} bytes before its manifest, which says {entry.size}.")
    return entry


def find_tail(read: Callable[[int], tuple[bytes, int]], path: Path) -> tuple[bytes, int]:
    """Return the manifest of a file and its position, with one or two reads at the end of the file.

    Args:
        read: returns up to that many bytes from the end of the file, and its size.
        path: for messages.

    Raises:
        MissingManifestError: it has none.
        ValueError: it is damaged, or is not an archive.
    """
    for near in (NEAR, MOST + END_SIZE):
        tail, size = read(near)
        if (at := tail.rfind(END)) >= 0:
            break
    comment = tail[at + END_SIZE :]
    if at < 0 or len(tail) - at - END_SIZE != int.from_bytes(tail[at + END_SIZE - 2 : at + END_SIZE], "little"):
        problem = "is empty" if size == 0 else "is damaged, or was not written by torch.save"
        raise ValueError(f"{path} {problem}: the end of the archive is missing, the file may be cut short.")
    if not comment:
        raise MissingManifestError(path)
    return comment, size - len(comment)


def read_entry(read: Callable[[int], tuple[bytes, int]], path: Path) -> Entry:
    content, begin = find_tail(read, path)
    return decode(content, path, begin)


def _entry(facts: Mapping[str, Any], path: Path) -> Entry:
    # a manifest with a correct digest may still be forged, so all types are checked
    _typed(facts["schema"], "schema", int)
    shards, former_shards = facts["shards"], _typed(facts["former_shards"], "former_shards", str)
    return Entry(
        path=path,
        run_name=_typed(facts["run_name"], "run_name", str),
        sequence=_typed(facts["sequence"], "sequence", int),
        saved_at=_typed(facts["saved_at"], "saved_at", int, float),
        size=_typed(facts["data"]["bytes"], "bytes", int),
        sha256=_typed(facts["data"]["sha256"], "sha256", str),
        progress=_all_typed(facts["progress"], "progress", int, float),
        metrics={
            name: float(value) for name, value in _all_typed(facts["metrics"], "metrics", int, float, str).items()
        },
        versions=_all_typed(facts["versions"], "versions", str),
        judged_by=_judged_by(facts["judged_by"]),
        shards=None if shards is None else _shards(*_typed(shards, "shards", list)),
        former_shards=former_shards and _shards(former_shards, "")[0],
        training=_typed(facts["training_id"], "training_id", str),
        asked_name=_typed(facts["asked_name"], "asked_name", str),
        weights_only=_typed(facts["weights_only"], "weights_only", bool),
        name=_typed(facts["name"], "name", str),
    )


def _judged_by(saved: Any) -> JudgedBy | None:
    if saved is None:
        return None
    metric, mode, value = _typed(saved, "judged_by", list)
    if mode not in ("min", "max"):
        raise ValueError(f"judged_by has the mode {mode!r}")
    value = _typed(value, "judged_by", int, float, str, NoneType)
    return _typed(metric, "judged_by", str), mode, (None if value is None else float(value))


def _shards(name: Any, sha256: Any) -> tuple[str, str]:
    if type(name) is not str or type(sha256) is not str or not SPECIAL.isdisjoint(name) or not SHARDS.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a folder of shards")
    return name, sha256


def _typed(value: Any, name: str, *kinds: type) -> Any:
    # exactly one of these types: a bool is not an int here
    if type(value) not in kinds:
        raise TypeError(f"{name} is {kind_of(value)}, not {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _all_typed(values: Any, name: str, *kinds: type) -> dict[str, Any]:
    types = {*map(type, _typed(values, name, dict).values())}
    if wrong := types.difference(kinds):
        names = " and ".join(sorted(kind.__name__ for kind in wrong))
        raise TypeError(f"{name} holds {names}, not {' or '.join(kind.__name__ for kind in kinds)}")
    return values  # type: ignore[no-any-return]  # just checked


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
