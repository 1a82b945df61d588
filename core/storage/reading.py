"""Reading checkpoints: verified first, unpickled safely, found by what they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ...events.checks import known_names
from ..sharded import whole
from ..state import check_schema
from ..task import check_fits, modules_of
from .files import digest_of
from .manifest import Entry, claimed_sequence, decode, manifest_path, shards_path
from .names import MANIFEST, SUFFIX, clean

State = dict[str, Any]
MOST = 5  # names of other runs that are told: a search may have hundreds


class OfOthers(str):
    """A sentence on checkpoints that are other runs': worth a note, and no warning."""

    __slots__ = ()


def load(path: Path, *, verify: bool = True, with_shards: bool = True) -> State:
    """Return the state in a checkpoint; of one with shards, without these.

    Args:
        path: the data file.
        verify: hold the data against the manifest before a byte of it is unpickled.
        with_shards: hold the shards against it, too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, has no manifest, holds something else or more than plain types, or is of another
            schema; names what to do.
    """
    if verify:
        check(path, with_shards=with_shards)
    state = read(path)
    try:
        check_schema(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return state  # type: ignore[no-any-return]  # the schema was checked


def read(path: Path, *, map_tensors: bool = False) -> Any:
    """Return whatever lies in a file of torch's, read with `weights_only=True`; neither verified nor checked.

    Args:
        path: the data file.
        map_tensors: leave the tensors on the disk, for who only wants to know what there is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or not safely.
    """
    _check_is_there(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=map_tensors)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file fails in many ways; all of them mean the same
        raise ValueError(f"The checkpoint {path} cannot be read: {cause(error)}") from error


def cause(error: Exception) -> str:
    """Return what went wrong in reading, without torch's advice to read the file unsafely."""
    inner = error.__context__ if isinstance(error, UnpicklingError) else None
    return f"{type(error).__name__}: {inner or error}"


def read_manifest(path: Path) -> Entry:
    """Return what the manifest of a checkpoint tells, at the cost of a small file.

    Args:
        path: the data file, or the manifest itself.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: there is no manifest, or it is damaged, or of a newer version.
    """
    path = path.with_suffix(SUFFIX) if path.suffix == MANIFEST else path
    place = manifest_path(path)
    try:
        entry = decode(place.read_bytes(), place)
    except FileNotFoundError:
        _check_is_file(path)
        raise ValueError(
            f"The checkpoint {path} has no manifest {place.name}, so nothing tells whether it is whole: copy both, or, "
            f"if you trust the file or it was written by an older version, run `python -m heliograph checkpoint "
            f"migrate {path}`."
        ) from None
    return replace(entry, path=path)  # a pair may have been renamed


def check(path: Path, *, with_shards: bool = True) -> Entry:
    """Hold the data of a checkpoint, and its shards, against its manifest: the sizes, then every byte.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: something differs; names the fault.
    """
    _check_is_file(path)
    entry = read_manifest(path)
    _check_bytes(path, entry.size, entry.sha256, f"The checkpoint {path}")
    for name, (size, sha256) in entry.shards.items() if with_shards else ():
        shard = shards_path(path) / name
        if not shard.is_file():
            raise ValueError(f"The checkpoint {path} is damaged: its shard {shard} is not there.")
        _check_bytes(shard, size, sha256, f"The shard {shard} of the checkpoint {path}")
    return entry


def is_complete(entry: Entry) -> bool:
    """Return whether the files of a checkpoint have the sizes that its manifest tells; `check` reads every byte."""
    shards = {shards_path(entry.path) / name: size for name, (size, _) in entry.shards.items()}
    return all(
        path.is_file() and path.stat().st_size == size for path, size in {entry.path: entry.size, **shards}.items()
    )


def _check_bytes(path: Path, size: int, sha256: str, what: str) -> None:
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{what} is damaged: it has {found} bytes, its manifest tells {size}.")
    if digest_of(path)[1] != sha256:
        raise ValueError(f"{what} is damaged: its SHA-256 is not the one in its manifest.")


def entries(folder: Path, run_name: str) -> tuple[list[Entry], list[str]]:
    """Return the checkpoints of a run, newest first, and a sentence for each file that was passed over.

    Only manifests are read: whether the data is whole, `verify` tells. Checkpoints of other runs are none of this run's
    business; they are named if there is nothing else.
    """
    own, others, passed_over = [], set(), []
    for path in _candidates(folder):
        try:
            entry = read_manifest(path)
        except (OSError, ValueError) as error:
            passed_over += [str(error)] if path.suffix == SUFFIX else []
            continue
        if entry.run_name != run_name:
            others.add(entry.run_name)
        elif path.suffix == SUFFIX:
            own.append(entry)
        else:
            passed_over.append(f"The checkpoint {entry.path} is gone: only its manifest {path.name} is left.")
    if others and not own:
        names = ", ".join(map(repr, sorted(others)[:MOST])) + f" and {len(others) - MOST} more" * (len(others) > MOST)
        passed_over.append(OfOthers(f"{folder} has no checkpoint of run {run_name!r}; those in it are of {names}."))
    return sorted(own, key=lambda each: each.order, reverse=True), passed_over


def count(folder: Path, run_name: str) -> int:
    """Return how many checkpoints of a run there are, with those that only their names still tell of."""
    named = {path for path in folder.glob(f"*{SUFFIX}") if path.name.startswith(f"{clean(run_name)}_epoch_")}
    others = set()
    for path in named:
        try:
            read_manifest(path)
        except (OSError, ValueError):
            others.add(path)
    return len(others | {entry.path for entry in entries(folder, run_name)[0]})


def highest_sequence(folder: Path, run_name: str) -> int:
    """Return the highest sequence that any manifest of a run claims, at least 0: migrated ones have negative ones."""
    manifests = (path for path in folder.glob(f"*{MANIFEST}") if path.is_file())
    return max([0, *(claimed_sequence(path.read_bytes(), run_name) for path in manifests)])


def newest(folder: Path, run_name: str) -> tuple[Entry | None, State | None, list[str]]:
    """Return the newest whole checkpoint of a run, what is in it, and a sentence for each one that was passed over."""
    found, passed_over = entries(folder, run_name)
    for entry in found:
        try:
            return entry, load(entry.path), passed_over
        except (OSError, ValueError) as error:
            passed_over.append(str(error))
    return None, None, passed_over


def load_weights(task: Any, path: Path | str) -> dict[str, float]:
    """Load the weights of a checkpoint, and nothing else, into the modules of a task.

    Args:
        task: the task whose modules the checkpoint holds.
        path: the checkpoint.

    Returns:
        The metrics that the run had when it was written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or of other modules.
    """
    state = whole(load(Path(path)), Path(path))
    modules = modules_of(task)
    try:
        check_fits(modules, state["modules"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, module in modules.items():
        module.load_state_dict(state["modules"][name])
    return dict(state["metrics"])


def _candidates(folder: Path) -> list[Path]:
    """Return the data files of a folder, then the manifests that have lost theirs."""
    data = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.is_dir())
    return data + sorted(path for path in folder.glob(f"*{MANIFEST}") if not path.with_suffix(SUFFIX).exists())


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: Checkpoint({str(path)!r}, resume='auto') finds the newest in it.")
    if path.suffix != SUFFIX:
        raise ValueError(f"{path} is no checkpoint: the data of one lies in a file that ends in {SUFFIX}.")
    _check_is_there(path)


def _check_is_there(path: Path) -> None:
    if not path.is_file():
        siblings = [each.name for each in path.parent.glob(f"*{SUFFIX}")] if path.parent.is_dir() else []
        raise FileNotFoundError(f"There is no checkpoint {path}.{known_names(path.name, siblings)}")
