"""What must hold after every kill, and at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import inventory, reader
from heliograph.core.objects.equality import leaves
from heliograph.tests.kit import newest_log
from heliograph_recorder.demo.training import NAME

CLOCKS = ("time", "attempt", "training")
BY_THE_CLOCK = ("checkpoint_saved", "run_closed")  # when a background save is reported depends on the disk
SPEED = "train/samples_per_second"
BESIDE = ("log*.jsonl", f"{NAME}_*.log", f"{NAME}_*.recording*", "tensorboard/**/events.out.tfevents.*", "output.txt")


def checkpoints(folder: Path) -> Path:
    """Return where the demo saves."""
    return folder / "checkpoints"


def newest_whole(folder: Path) -> int:
    """Verify everything that calls itself a checkpoint; return the sequence of the newest one, 0 where there is none.

    Raises:
        AssertionError: one is not whole, or is not read back.
    """
    found, _ = inventory.entries(checkpoints(folder), NAME)
    for path in checkpoints(folder).glob("[!.]*.pth"):
        try:
            reader.verify(path)
        except (OSError, ValueError) as error:
            raise AssertionError(f"a kill left a checkpoint that is not whole: {error}") from error
    entry, _, _ = reader.newest(checkpoints(folder), NAME)
    first = found[0].sequence if found else 0
    assert first == (0 if entry is None else entry.sequence), f"the newest, number {first}, is not read back"
    return first


def first_difference(folder: Path, undisturbed: Path) -> str | None:
    """Return in words where two runs do not end alike, None where they do."""
    return next(_differences(folder, undisturbed), None)


def _differences(folder: Path, undisturbed: Path) -> Iterator[str]:
    names, expected = (
        sorted(path.name for path in checkpoints(each).iterdir() if path.name != ".verified.jsonl")
        for each in (folder, undisturbed)
    )
    if names != expected:
        yield f"the checkpoint folder holds {names}, not {expected}"
        return
    known = {path for pattern in BESIDE for path in folder.glob(pattern)}
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent != checkpoints(folder))
    yield from (f"a file was left over: {path.relative_to(folder)}" for path in files if path not in known)
    for name in expected:
        yield from _of_file(checkpoints(folder) / name, checkpoints(undisturbed) / name)
    logs = _log(folder), _log(undisturbed)
    for number, (line, other) in enumerate(zip(*logs, strict=False)):
        if line != other:
            yield f"record {number} of the log is {line}, not {other}"
    if len(logs[0]) != len(logs[1]):
        yield f"the log has {len(logs[0])} records, not {len(logs[1])}"


def _of_file(mine: Path, its: Path) -> Iterator[str]:
    if mine.suffix == ".pth":
        yield from _of_values(mine.name, _state(mine), _state(its))
        yield from _of_values(mine.name, _manifest(mine), _manifest(its))
    elif mine.read_text() != its.read_text():
        yield f"{mine.name} says {mine.read_text()!r}, not {its.read_text()!r}"


def _of_values(name: str, mine: Any, its: Any) -> Iterator[str]:
    one, other = leaves(mine), leaves(its)
    for path in {**other, **one}:
        if one.get(path) != other.get(path):
            here, there = (each[path].sample if path in each else "missing" for each in (one, other))
            yield f"{path} in {name} is {here}, not {there}"


def _state(path: Path) -> dict[str, Any]:
    """Return a state without what depends on the clock, or names a file by the date."""
    state = reader.load(path)
    del state["saved_at"], state["progress"]["earlier_seconds"]
    del state["training_id"]
    for name in ("file_log", "jsonl_log", "recorder", "tensorboard"):  # dates, and the names of attempts
        state["plugins"].pop(name, None)
    state["metrics"].pop(SPEED, None)
    state.pop("log_history", None)  # durations
    return state


def _manifest(path: Path) -> Any:
    """Return an entry without what depends on the clock, the bytes of the data included."""
    entry = storage.read_manifest(path)
    progress = {name: value for name, value in entry.progress.items() if name != "earlier_seconds"}
    metrics = {name: value for name, value in entry.metrics.items() if name != SPEED}
    return replace(
        entry, path=Path(path.name), saved_at=0, size=0, sha256="", training="", progress=progress, metrics=metrics
    )


def _log(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in newest_log(folder).read_text().splitlines()]
    kept = [record for record in records if record["event"] not in BY_THE_CLOCK]
    for record in kept:
        record["metrics"].pop(SPEED, None)
    return [{name: value for name, value in record.items() if name not in CLOCKS} for record in kept]
