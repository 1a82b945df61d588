"""Manifests: what a checkpoint is said to hold, and how that is known to be true."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from ..state import SCHEMA
from .names import MANIFEST, SHARDS, check_name

FORMAT = "heliograph checkpoint"
JudgedBy = tuple[str, str, float | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint, as its manifest tells. A digest was checked: the manifest's own, not yet that of the data.

    Attributes:
        path: the data file.
        run_name: the run that wrote it.
        sequence: its place in the order of writing; the newest of a run has the highest.
        saved_at: when, in seconds since the epoch; for people.
        size: bytes of the data.
        sha256: their digest, in hexadecimal.
        schema: the version of the state inside.
        progress: the counters of the run.
        metrics: the latest value of every metric.
        versions: the software that wrote it.
        world: how many ranks wrote it, and what else its global batch is made of.
        judged_by: metric, mode and value by which it competes for the best; None where it does not.
        shards: bytes and digest of each file in its folder of shards, by name; none where it has no such folder.
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

    @property
    def order(self) -> tuple[int, float, str]:
        """What the order of writing goes by: the clock decides among equal sequences only."""
        return self.sequence, self.saved_at, self.path.name


def manifest_path(path: Path) -> Path:
    """Return where the manifest of a data file lies."""
    return path.with_suffix(MANIFEST)


def shards_path(path: Path) -> Path:
    """Return the folder in which the shards of a checkpoint lie, where it has some."""
    return path.with_suffix(SHARDS)


def encode(entry: Entry) -> bytes:
    """Return the manifest of an entry: canonical JSON that ends in its own digest."""
    judged_by = entry.judged_by and [*entry.judged_by[:2], _to_json(entry.judged_by[2])]
    shards = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in entry.shards.items()}
    return _sealed(
        {
            "format": FORMAT,
            "schema": entry.schema,
            "run_name": entry.run_name,
            "sequence": entry.sequence,
            "saved_at": entry.saved_at,
            "files": {entry.path.name: {"bytes": entry.size, "sha256": entry.sha256}},
            "progress": dict(entry.progress),
            "metrics": {name: _to_json(value) for name, value in entry.metrics.items()},
            "versions": dict(entry.versions),
            "world": dict(entry.world),
            "judged_by": judged_by,
            **({"shards": shards} if shards else {}),
        }
    )


def decode(content: bytes, place: Path) -> Entry:
    """Return the entry in a manifest; its data file is the one that the manifest names, beside `place`.

    Args:
        content: all bytes of the manifest.
        place: where they were read.

    Raises:
        ValueError: they are no manifest, not the very bytes that were written, or of a newer version.
    """
    try:
        facts = json.loads(content)
        sealed = isinstance(facts, dict) and facts.get("format") == FORMAT
        whole = sealed and _sealed({key: facts[key] for key in facts if key != "sha256"}) == content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The manifest {place} is damaged, or of something else: {error}.") from None
    if not sealed:
        raise ValueError(f"{place} is damaged, or no manifest of a heliograph checkpoint.")
    if not whole:
        raise ValueError(f"The manifest {place} is damaged: its bytes do not have the digest that it tells.")
    try:
        if facts["schema"] > SCHEMA:
            raise ValueError(f"it has schema {facts['schema']}, this version reads up to {SCHEMA}: update heliograph")
        return _entry(facts, place)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"The manifest {place} cannot be used: {error}.") from None


def claimed_sequence(content: bytes, run_name: str) -> int:
    """Return the sequence that a manifest of a run claims, damaged or not; 0 where it is none of that run."""
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("run_name") != run_name:
        return 0
    sequence = facts.get("sequence")
    return sequence if isinstance(sequence, int) else 0


def _entry(facts: Mapping[str, Any], place: Path) -> Entry:
    [(name, file)] = facts["files"].items()
    judged_by = facts["judged_by"]
    return Entry(
        path=place.with_name(check_name(name)),
        run_name=facts["run_name"],
        sequence=facts["sequence"],
        saved_at=facts["saved_at"],
        size=file["bytes"],
        sha256=file["sha256"],
        schema=facts["schema"],
        progress=facts["progress"],
        metrics={name: float(value) for name, value in facts["metrics"].items()},
        versions=facts["versions"],
        world=facts["world"],
        judged_by=judged_by and (judged_by[0], judged_by[1], _from_json(judged_by[2])),
        shards={_bare(name): (each["bytes"], each["sha256"]) for name, each in facts.get("shards", {}).items()},
    )


def _bare(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"the name of a shard is a bare file name, not {name!r}")
    return name


def _sealed(facts: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(_canonical(facts)).hexdigest()
    return _canonical({**facts, "sha256": digest})


def _canonical(facts: Mapping[str, Any]) -> bytes:
    """Return the only spelling of some facts: a changed byte that means the same is damage, too."""
    return (json.dumps(facts, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def _to_json(value: float | None) -> float | str | None:
    """Return a number as strict JSON has it: those that it lacks as strings."""
    return value if value is None or isfinite(value) else str(float(value))


def _from_json(value: float | str | None) -> float | None:
    return None if value is None else float(value)
