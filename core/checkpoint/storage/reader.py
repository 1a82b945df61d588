"""Read checkpoints: find the newest, verify it, unpickle it safely."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ....events import Engine
from ...distributed.outcomes import WorkOutcome, outcome_of, values_of_ranks
from ..checks import check_schema
from ..ranks import INDEX, read_index
from ..schema import State
from .files import SYSTEM, Files, WatchedReader
from .inventory import FoundFile, Manifests, Scope, check_is_there, entries, files_of, lost, manifests_in, read_manifest
from .manifest import DIGESTS, Entry, MissingManifestError, SchemaError
from .untrusted_files import UnreadableError, check_archive, check_content, refuse_unread

T = TypeVar("T")
MOST_DIGESTS = 2**24  # bytes of that


def load(path: Path, *, with_shards: bool = True, files: Files = SYSTEM) -> State:
    """Return the state in a checkpoint; shards are not loaded.

    Args:
        path: the data file.
        with_shards: verify the shards, too.
        files: the operations on files.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, not even when retried.
        MemoryError, RuntimeError, SystemError: it is intact, but for example there is not enough memory.
        ValueError: it is damaged, has no manifest, is not a checkpoint, holds more than plain types, or has another
            schema; the message says how to fix it.
    """
    entry = verify(path, with_shards=with_shards, files=files)
    if with_shards and entry.shards is not None and (index := shards_path(entry) / INDEX).exists():
        read_index(index)
    state = read(path, is_verified=True, files=files)
    try:
        check_schema(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return state  # type: ignore[no-any-return]  # the schema was checked


def read(path: Path, *, map_tensors: bool = False, is_verified: bool = False, files: Files = SYSTEM) -> Any:
    """Read a file of `torch.save` with `weights_only=True`, without verifying it by a manifest.

    Args:
        path: the data file.
        map_tensors: leave the tensors on the disk (`mmap`), to inspect the state without loading it.
        is_verified: whether the data matches the digest in its manifest: then a RuntimeError is not damage.
        files: the operations on files.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, not even when retried.
        MemoryError, RuntimeError, SystemError: it is intact, but for example there is not enough memory.
        ValueError: it cannot be read safely, or claims more bytes than it has.
    """
    files.patiently(partial(check_is_there, path))
    content = files.patiently(partial(_unpickle, path, map_tensors, is_verified, files))
    check_content(content, path)
    return content


def _unpickle(path: Path, map_tensors: bool, is_verified: bool, files: Files) -> Any:
    with WatchedReader(files.try_open(path).detach()) as file, file.revealing():
        check_archive(file, path)
        file.seek(0)
        try:
            source = path if map_tensors else file
            return torch.load(source, map_location="cpu", weights_only=True, mmap=map_tensors)
        except Exception as error:  # noqa: BLE001  # a damaged file raises many kinds of errors
            refuse_unread(f"The checkpoint {path}", error, is_verified=is_verified)


def read_shards(entry: Entry, *, files: Files = SYSTEM) -> dict[Path, tuple[int, str]]:
    """Return size and digest of the shards of a checkpoint by path, from the verified file of digests in their folder.

    Raises:
        ValueError: that file is damaged or missing.
    """
    if entry.shards is None:
        return {}
    folder = shards_path(entry)
    file = f"{folder / DIGESTS} of the checkpoint {entry.path}"
    try:
        content = files.read(folder / DIGESTS, MOST_DIGESTS)
    except FileNotFoundError:
        raise ValueError(f"The checkpoint {entry.path} is damaged: its shards {folder} are missing.") from None
    if hashlib.sha256(content).hexdigest() != entry.shards[1]:
        raise ValueError(f"{file} is damaged: its SHA-256 does not match the manifest.")
    try:
        shards = {name: (int(size), str(sha256)) for name, (size, sha256) in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is forged: {error}.") from None
    if any(Path(name).name != name for name in shards):
        raise ValueError(f"{file} is forged: the name of a shard must be a bare file name.")
    return {folder / name: facts for name, facts in shards.items()}


def shards_path(entry: Entry) -> Path:
    assert entry.shards is not None
    return entry.path.with_name(entry.shards[0])


def verify(path: Path, *, with_shards: bool = True, files: Files = SYSTEM) -> Entry:
    """Verify the data of a checkpoint, and its shards, by its manifest: the sizes, then the digests.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, not even when retried.
        ValueError: it is damaged; the message says how.
    """
    entry = read_manifest(path, files=files)
    if files.archive_digest(path, entry.size) != entry.sha256:
        raise ValueError(f"The checkpoint {path} is damaged: its SHA-256 does not match its manifest.")
    for shard, facts in read_shards(entry, files=files).items() if with_shards else ():
        damaged = f"The shard {shard} of the checkpoint {path} is damaged:"
        try:
            present = files.digest(shard)
        except FileNotFoundError:
            raise ValueError(f"{damaged} it is missing.") from None
        if present != facts:
            raise ValueError(f"{damaged} its size or its SHA-256 does not match its manifest.")
    return entry


def newest(
    folder: Path | Manifests, run_name: str, training: str | None = None
) -> tuple[Entry | None, State | None, list[str]]:
    """Return the newest intact checkpoint of a run, its state, and a message for each skipped one.

    A file is skipped only if it is damaged or not a checkpoint, and only for an older checkpoint of the same training:
    a run never continues another training of the same name.

    Args:
        folder: the folder.
        run_name: the name that the program gave the run.
        training: the training; by default the one that was saved last.

    Raises:
        OSError: the folder, or a file that may be a checkpoint of the run, cannot be read, not even when retried.
        SchemaError: a checkpoint of the run has another schema.
        UnreadableError: the newest one is intact, and cannot be read.
    """
    manifests, gone = manifests_in(folder), set[Path]()
    scope: Scope = "recent"
    while True:
        with manifests.steady():
            candidates, passed_over = entries(manifests, run_name, scope)
            for file in files_of(manifests, run_name, scope):
                if isinstance(file.problem, OSError | SchemaError) and file.run_name in (None, run_name):
                    raise file.problem  # this file may be the newest
            chosen = training or newest_training(candidates, lost(manifests, run_name, scope))
        for entry in (entry for entry in candidates if entry.training == chosen):
            try:
                return entry, load(entry.path, files=manifests.files), passed_over
            except FileNotFoundError as error:
                if entry.path not in gone:  # just removed by another process: list the folder again
                    gone.add(entry.path)
                    manifests.names(again=True)
                    break
                passed_over.append(str(error))
            except UnreadableError:
                raise
            except ValueError as error:
                passed_over.append(str(error))
        else:
            if scope == "recent":  # none of these is intact
                scope = "run"
                continue
            if other_trainings := [entry for entry in candidates if entry.training != chosen]:
                passed_over.append(
                    f"other trainings of the name are not continued; resume one of them by its path, "
                    f"resume={other_trainings[0].path}"
                )
            return None, None, passed_over


def newest_training(entries: Iterable[Entry], lost: Iterable[FoundFile]) -> str | None:
    """Return the training that was saved last, even if all of its checkpoints are damaged; None without any.

    Args:
        entries: checkpoints.
        lost: damaged files; their number in the order of writing is lost, so their time decides.
    """
    newest = max(entries, key=lambda entry: entry.order, default=None)
    head = max((file.head for file in lost if file.head is not None), key=lambda head: head.saved_at, default=None)
    if head is not None and (newest is None or head.saved_at > newest.saved_at):
        return head.training
    return None if newest is None else newest.training


# Returns the content of a file on every rank, and whether it was sent; a collective. Ranks that see the same file read
# it; if one does not, the main rank sends `value`, its content.
def shared_by_ranks(engine: Engine, path: Path, value: T | None, read: Callable[[], T]) -> tuple[T, bool]:
    is_sent = False
    if engine.world_size > 1:
        is_sent = len(set(engine.gather_objects(_checksum(path)))) > 1
        if is_sent:
            value = engine.broadcast(value)
        else:
            outcome = WorkOutcome(value) if engine.is_main else outcome_of(read)
            values_of_ranks(engine, WorkOutcome(error=outcome.error))
            value = outcome.value
    assert value is not None
    return value, is_sent


def _checksum(path: Path) -> str | None:
    try:
        return read_manifest(path).sha256 if path.is_file() else None
    except MissingManifestError:  # one of Helios, only weights, or the manifest is lost
        return f"{path.stat().st_size} bytes"
    except (OSError, ValueError):
        return None
