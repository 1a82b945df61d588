"""What checkpoints hold, in words for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from ...core.checkpoint.conversion import files_in, read_any
from ...core.checkpoint.state.schema import WEIGHTS_ONLY
from ...core.checkpoint.storage import reader
from ...core.checkpoint.storage.manifest import PINNED, Entry, Label, manifest_path, pointer_path, shards_path
from ...core.system.extras import printable

HEAD = ("FILE", "RUN", "EPOCH", "BATCH", "STEP", "SAVED", "SIZE", "MARKS", "METRICS")


def describe(path: Path) -> str:
    """Return what is known of one checkpoint; it is not verified.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read.
    """
    entry = reader.read_manifest(path) if manifest_path(path).exists() else None
    if entry is None:
        found = read_any(path)
        state, layout = found.state, f"{found.origin}, without a manifest: run `checkpoint migrate` on it"
    else:
        state, layout = reader.read(path, map_tensors=True), f"schema {entry.schema}"
    with content_of(path):
        lines = [("layout", layout), *_facts(path, state, entry), *_judged(entry), *_contents(state)]
    return "\n".join([printable(path), *(f"    {label:<12}{printable(text)}".rstrip() for label, text in lines)])


def check_folder(folder: Path) -> None:
    """Raise ValueError unless this user can read a folder: globbing one that cannot be read would find nothing."""
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise ValueError(f"The folder {folder} cannot be read: {error.strerror}.") from error


def table(folder: Path) -> tuple[str, list[str]]:
    """Return the checkpoints in a folder, one line each, by run and the newest first; then those that cannot be read.

    One whose files have other sizes than its manifest says is marked as damaged; no more of it is verified.

    Returns:
        The text, and the names of the files that are damaged or have a manifest that cannot be read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the folder cannot be read.
    """
    check_folder(folder)
    found, unreadable, bad = [], [], []
    files = files_in(folder)
    if not files:
        raise FileNotFoundError(f"There is no checkpoint in {folder}.")
    for path in files:
        try:
            found.append(reader.read_manifest(path))
        except (OSError, ValueError) as error:
            unreadable.append(str(error))
            bad += [path.name] * manifest_path(path).exists()
    found.sort(key=lambda each: (each.run_name, -each.sequence, -each.saved_at, each.path.name))
    rows = [HEAD, *(tuple(map(printable, _row(each))) for each in found)] if found else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    bad += [each.path.name for each in found if not reader.is_complete(each)]
    return "\n".join([*lines, *map(printable, unreadable)]), sorted(bad)


@contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Read a file's content in this context: whatever is not as in a checkpoint becomes a ValueError."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path} holds something else than a checkpoint: {type(error).__name__}: {error}") from error


def _row(entry: Entry) -> tuple[str, ...]:
    counters = (str(entry.progress.get(name, "?")) for name in ("epoch", "batch", "steps"))
    damaged = [] if reader.is_complete(entry) else ["damaged"]
    kind = ["weights only"] * entry.weights_only
    marks = ",".join([*damaged, *kind, *_marks(entry.path, entry.run_name)]) or "-"
    metrics = " ".join(f"{name}={value:.4g}" for name, value in sorted(entry.metrics.items()))
    return entry.path.name, entry.run_name, *counters, _time(entry.saved_at), _size(entry.path), marks, metrics


def _facts(path: Path, state: Mapping[str, Any], entry: Entry | None) -> Iterator[tuple[str, str]]:
    asked = state["run_name"]
    name = asked if entry is None else entry.run_name
    place, versions = state["progress"], sorted(state["versions"].items())
    yield "run", name if name == asked else f"{name}, asked for as {asked}"
    yield "training", state["training_id"]
    if origin := state.get("forked_from"):
        yield "fork of", f"training {origin['training']} at step {origin['step']}, {origin['recording']}"
    if state.get(WEIGHTS_ONLY):
        yield "holds", "only weights: for load_weights and `checkpoint export`, not for a resume"
    yield "position", f"epoch {place['epoch']}, batch {place['batch']}, step {place['steps']}"
    tokens = f"{place['tokens']} tokens, " if place.get("tokens") else ""
    trained = f"{place['samples']} samples, {tokens}{place['validations']} validations"
    yield "so far", f"{trained}, {place['earlier_seconds']:.1f} s"
    yield from _several("streams", (f"{name} {count} batches" for name, count in place.get("streams", {}).items()))
    yield "saved", _time(state["saved_at"])
    yield "size", _size(path)
    yield "marks", ", ".join(_marks(path, name)) or "none"
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions) or "unknown"
    yield "processes", str(state["world"]["size"])
    yield from _several("metrics", (f"{name} {value:.6g}" for name, value in sorted(state["metrics"].items())))


def _judged(entry: Entry | None) -> Iterator[tuple[str, str]]:
    if entry is not None and entry.judged_by is not None:
        metric, mode, value = entry.judged_by
        yield "judged by", f"{metric} ({mode}) {value}"


def _contents(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    shards = state.get("shards", {"modules": {}, "tensors": {}, "optimizers": {}})
    sharded = (f"{name}: {_sharded(name, shards['tensors'])}, in shards" for name in shards["modules"])
    kinds, scheduler_kinds = state.get("optimizer_kinds", {}), state.get("scheduler_kinds", {})
    groups = {name: len(each["param_groups"]) for name, each in (state["optimizers"] or shards["optimizers"]).items()}
    optimizers = [f"{name}: {kinds.get(name, 'unknown')}, {groups[name]} groups" for name in groups]
    schedulers = [f"{name}: {scheduler_kinds.get(name, 'unknown')}" for name in state["schedulers"]]
    yield from _several("modules", (f"{name}: {_weights(each)}" for name, each in state["modules"].items()))
    yield from _several("modules", sharded)
    yield from _several("optimizers", optimizers or ["none"])
    yield from _several("schedulers", schedulers or ["none"])
    yield from _several("plugins", (f"{name}: {_keys(each)}" for name, each in sorted(state["plugins"].items())))


def _several(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a line for each text, the first with the label."""
    for text in texts:
        yield label, text
        label = ""


def _weights(module: Mapping[str, Any]) -> str:
    tensors = [each for each in module.values() if isinstance(each, Tensor)]
    return f"{sum(each.numel() for each in tensors):,} values in {len(tensors)} tensors"


def _sharded(name: str, tensors: Mapping[str, Any]) -> str:
    sizes = [prod(shape) for key, (shape, _) in tensors.items() if key.startswith(f"modules/{name}/")]
    return f"{sum(sizes):,} values in {len(sizes)} tensors"


def _keys(state: Any) -> str:
    return (", ".join(map(str, state)) or "no state") if isinstance(state, Mapping) else type(state).__name__


def _marks(path: Path, run_name: str) -> list[str]:
    """Return whether people and tools are pointed to a file, and whether it is pinned."""
    pointers = {label: pointer_path(path.parent, run_name, label) for label in get_args(Label)}
    marks = [label for label, each in pointers.items() if reader.read_pointer(each) == path.name]
    return [*marks, "pinned"] if path.with_suffix(PINNED).exists() else marks


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _size(path: Path) -> str:
    shards = shards_path(path)
    files = [path, *(shards.iterdir() if shards.exists() else ())]
    return f"{sum(each.stat().st_size for each in files) / 1e6:,.3f} MB"
