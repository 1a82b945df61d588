"""Finding and reading checkpoints: listed by their manifests, verified, then unpickled safely."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable
from functools import partial
from io import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ....events.checks import known_names
from ..state.ranks import INDEX, read_index
from ..state.schema import check_schema
from .files import SYSTEM, Files, WatchedReader
from .folder import FoundFile, Manifests
from .manifest import SUFFIX, Entry, MissingManifestError, SchemaError, decode, find_tail, run_part
from .untrusted_files import UnreadableError, check_archive, check_content, read_small, refuse_unread

State = dict[str, Any]
LONGEST_NAME = 255  # bytes, on most file systems
DIGESTS = "digests.json"  # in a folder of shards
MOST_DIGESTS = 2**24  # bytes of that
SHOWN = 5  # names of other runs that are listed: a search may have hundreds


class OfOthers(str):
    """A sentence about checkpoints of other runs: a note, not a warning."""

    __slots__ = ()


def load(path: Path, *, verify: bool = True, with_shards: bool = True, files: Files = SYSTEM) -> State:
    """Return the state in a checkpoint; shards are not loaded.

    Args:
        path: the data file.
        verify: verify the data by the manifest before it is unpickled.
        with_shards: verify the shards, too.
        files: the operations on files.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, not even when retried.
        MemoryError, RuntimeError, SystemError: it is intact, but there is not enough memory for example.
        ValueError: it is damaged, has no manifest, is not a checkpoint, holds more than plain types, or has another
            schema; the message says what to do.
    """
    if verify:
        entry = check(path, with_shards=with_shards, files=files)
        for shard in read_shards(entry, files=files) if with_shards else ():
            if shard.name == INDEX:
                read_index(shard)
    state = read(path, is_verified=verify, files=files)
    try:
        check_schema(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return state  # type: ignore[no-any-return]  # the schema was checked


def read(path: Path, *, map_tensors: bool = False, is_verified: bool = False, files: Files = SYSTEM) -> Any:
    """Return the content of a file of `torch.save`, read with `weights_only=True`, not verified by a manifest.

    Args:
        path: the data file.
        map_tensors: leave the tensors on the disk (`mmap`), to inspect the state without loading it.
        is_verified: whether the data has the digest in its manifest: then a RuntimeError is no damage.
        files: the operations on files.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, not even when retried.
        MemoryError, RuntimeError, SystemError: it is intact, but there is not enough memory for example.
        ValueError: it cannot be read safely, or claims more bytes than it has.
    """
    files.patiently(partial(check_is_there, path))
    files.patiently(partial(check_archive, path))
    content = files.patiently(partial(_unpickle, path, map_tensors, is_verified, files))
    check_content(content, path)
    return content


def _unpickle(path: Path, map_tensors: bool, is_verified: bool, files: Files) -> Any:
    with WatchedReader(files.try_open(path).detach()) as file:
        try:
            source = path if map_tensors else file
            return torch.load(source, map_location="cpu", weights_only=True, mmap=map_tensors)
        except Exception as error:  # noqa: BLE001  # a damaged file raises many kinds of errors
            if file.failure is not None:
                raise file.failure from None
            refuse_unread(f"The checkpoint {path}", error, is_verified=is_verified)


def read_manifest(path: Path, *, source: BinaryIO | None = None, files: Files = SYSTEM) -> Entry:
    """Return the entry in the manifest of a checkpoint, without reading its data.

    Args:
        path: the checkpoint.
        source: the file, opened for reading, if it is in another storage; its end is read.
        files: the operations on files.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: there is no manifest, it is damaged, or it has another schema.
    """
    if source is not None:
        opened = source

        def read(begin: int) -> bytes:
            opened.seek(begin)
            return opened.read()

        content, begin = find_tail(read, source.seek(0, SEEK_END), path)
        return decode(content, path, begin)
    if not path.name.startswith("."):
        _check_is_file(path)
    content, begin = files.read_tail(path)
    return decode(content, path, begin)


def read_shards(entry: Entry, *, files: Files = SYSTEM) -> dict[Path, tuple[int, str]]:
    """Return bytes and digest of the shards of a checkpoint, by the file of digests in their folder, which is verified.

    Raises:
        ValueError: that file is damaged, or not there.
    """
    if entry.shards is None:
        return {}
    folder, what = shards_path(entry), f"{shards_path(entry) / DIGESTS} of the checkpoint {entry.path}"
    try:
        content = files.read(folder / DIGESTS, MOST_DIGESTS)
    except FileNotFoundError:
        raise ValueError(f"The checkpoint {entry.path} is damaged: its shards {folder} are not there.") from None
    if hashlib.sha256(content).hexdigest() != entry.shards[1]:
        raise ValueError(f"{what} is damaged: its SHA-256 is not the one in the manifest.")
    try:
        shards = {name: (int(size), str(sha256)) for name, (size, sha256) in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{what} is forged: {error}.") from None
    if any(Path(name).name != name for name in shards):
        raise ValueError(f"{what} is forged: the name of a shard is a bare file name.")
    return {folder / name: facts for name, facts in shards.items()}


def shards_path(entry: Entry) -> Path:
    """Return the folder of the shards of a checkpoint that has some."""
    assert entry.shards is not None
    return entry.path.with_name(entry.shards[0])


def read_pointer(pointer: Path) -> str | None:
    """Return the file name in a pointer; None if it is missing or not a regular, small file."""
    try:
        return read_small(pointer, LONGEST_NAME + 1, follow=False).decode().removesuffix("\n")
    except (OSError, ValueError):
        return None


def check(path: Path, *, with_shards: bool = True, files: Files = SYSTEM) -> Entry:
    """Verify the data of a checkpoint, and its shards, by its manifest: the sizes, then the digests.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, not even when retried.
        ValueError: it is damaged; the message says how.
    """
    entry = read_manifest(path, files=files)
    if files.archive_digest(path, entry.size) != entry.sha256:
        raise ValueError(f"The checkpoint {path} is damaged: its SHA-256 is not the one in its manifest.")
    for shard, (size, sha256) in read_shards(entry, files=files).items() if with_shards else ():
        if not files.patiently(shard.is_file):
            raise ValueError(f"The checkpoint {path} is damaged: its shard {shard} is not there.")
        what = f"The shard {shard} of the checkpoint {path}"
        if (found := files.patiently(shard.stat).st_size) != size:
            raise ValueError(f"{what} is damaged: it has {found} bytes, its manifest says {size}.")
        if files.digest(shard)[1] != sha256:
            raise ValueError(f"{what} is damaged: its SHA-256 is not the one in its manifest.")
    return entry


def is_complete(entry: Entry) -> bool:
    """Return whether the shards of a checkpoint have the sizes in its manifest; only `check` verifies the content."""
    try:
        shards = read_shards(entry)
    except ValueError:
        return False
    return all(path.is_file() and path.stat().st_size == size for path, (size, _) in shards.items())


def entries(folder: Path | Manifests, run_name: str) -> tuple[list[Entry], list[str]]:
    """Return the checkpoints of a run, newest first, and a sentence for each file that was skipped.

    Only manifests are read; `check` verifies the data. Checkpoints of other runs are listed only if this run has none.

    Raises:
        OSError: the folder cannot be read.
    """
    manifests = _manifests(folder)
    found = manifests.look()
    if run_name not in manifests.listed:  # sorting 10,000 takes as long as looking at them again
        manifests.listed[run_name] = _entries(manifests.folder, found, run_name)
    own, passed_over = manifests.listed[run_name]
    return own.copy(), passed_over.copy()


def _entries(folder: Path, files: Iterable[FoundFile], run_name: str) -> tuple[list[Entry], list[str]]:
    own, others, passed_over = [], set(), []
    for found in files:
        entry = found.entry
        if entry is None:
            passed_over.append(str(found.problem))
        elif entry.family != run_name:
            others.add(entry.family)
        else:
            own.append(entry)
    if others and not own:
        names = ", ".join(map(repr, sorted(others)[:SHOWN])) + f" and {len(others) - SHOWN} more" * (
            len(others) > SHOWN
        )
        sentence = f"{folder} has no checkpoint of run {run_name!r}; those in it are of {names}."
        passed_over.append(OfOthers(sentence))
    return sorted(own, key=lambda each: each.order, reverse=True), passed_over


def under(folder: Path | Manifests, name: str) -> tuple[list[Entry], list[FoundFile]]:
    """Return the checkpoints of trainings whose files have a name, and other files of that name."""
    found = _manifests(folder).look()
    known = [each.entry for each in found if each.entry is not None and each.entry.run_name == name]
    return known, [each for each in found if each.entry is None and _is_named_after(name, each.path)]


def lost(folder: Path | Manifests, run_name: str) -> list[FoundFile]:
    """Return the damaged files that were checkpoints of a run, as their beginning says."""
    return [each for each in _manifests(folder).look() if each.head is not None and each.head.run_name == run_name]


def files_without_manifest(folder: Path, run_name: str) -> list[Path]:
    """Return the files that are named like checkpoints of a run, and have no manifest."""
    found = (each for each in Manifests(folder).look() if isinstance(each.problem, MissingManifestError))
    return [each.path for each in found if _is_named_after(run_name, each.path)]


def count(folder: Path | Manifests, run_name: str) -> int:
    """Return how many checkpoints of a run there are, including files that are only named like one."""
    found = _manifests(folder).look()
    unknown = sum(each.run_name is None and _is_named_after(run_name, each.path) for each in found)
    return unknown + sum(each.run_name == run_name for each in found)


def highest_sequence(found: Iterable[FoundFile], run_name: str) -> int:
    """Return the highest sequence of a run, at least 0: those of Helios have negative ones."""
    entries = (each.entry for each in found if each.entry is not None)
    return max([0, *(entry.sequence for entry in entries if entry.family == run_name)])


def refused(manifests: Manifests) -> list[str]:
    """Return a sentence for each manifest, of any run, that could not be read at the last look."""
    found = [each for each in manifests.seen if isinstance(each.problem, OSError)]
    unknown = "whose it is, and its place in the order of writing, is not known"
    return [f"{each.path} cannot be read ({each.problem}): {unknown}" for each in found]


def newest(folder: Path | Manifests, run_name: str) -> tuple[Entry | None, State | None, list[str]]:
    """Return the newest intact checkpoint of a run, its state, and a sentence for each one that was skipped.

    A file is skipped only if it is damaged or no checkpoint, and only for an older checkpoint of the same training: a
    run never continues another training of the same name.

    Raises:
        OSError: the folder, or what may be a checkpoint of the run, cannot be read, not even when retried.
        SchemaError: a checkpoint of the run has another schema.
        UnreadableError: the newest one is intact, and cannot be read.
    """
    manifests, gone = _manifests(folder), set[Path]()
    while True:
        found, passed_over = entries(manifests, run_name)
        _check_listed(manifests, run_name)
        training = newest_training(found, lost(manifests, run_name))
        for entry in (each for each in found if each.training == training):
            try:
                return entry, load(entry.path, files=manifests.files), passed_over
            except FileNotFoundError as error:
                if entry.path not in gone:  # just removed by another process: list the folder again
                    gone.add(entry.path)
                    manifests.look_again()
                    break
                passed_over.append(str(error))
            except UnreadableError:
                raise
            except ValueError as error:
                passed_over.append(str(error))
        else:
            if others := [each for each in found if each.training != training]:
                passed_over.append(
                    f"other trainings of the name are left as they are; resume one of them by its path, "
                    f"resume={others[0].path}"
                )
            return None, None, passed_over


def newest_training(entries: Iterable[Entry], lost: Iterable[FoundFile]) -> str | None:
    """Return the training that was saved last, even if all of its checkpoints are damaged; None without any.

    Args:
        entries: checkpoints.
        lost: damaged files; they have lost their number in the order of writing, so their time decides.
    """
    newest = max(entries, key=lambda entry: entry.order, default=None)
    head = max((each.head for each in lost if each.head is not None), key=lambda head: head.saved_at, default=None)
    if head is not None and (newest is None or head.saved_at > newest.saved_at):
        return head.training
    return None if newest is None else newest.training


def _check_listed(manifests: Manifests, run_name: str) -> None:
    """Raise the error of a manifest that may be of a run and could not be read, but is not damaged."""
    for each in manifests.seen:
        if isinstance(each.problem, OSError | SchemaError) and each.run_name in (None, run_name):
            raise each.problem


def _manifests(folder: Path | Manifests) -> Manifests:
    return folder if isinstance(folder, Manifests) else Manifests(folder)


def _is_named_after(run_name: str, path: Path) -> bool:
    return path.name.startswith(f"{run_part(run_name)}_epoch_")


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: Checkpoint({str(path)!r}, resume='auto') finds the newest in it.")
    if path.suffix != SUFFIX:
        raise ValueError(f"{path} is not a checkpoint: the data of one lies in a file that ends in {SUFFIX}.")
    check_is_there(path)


def check_is_there(path: Path) -> None:
    """Raise OSError unless a file is there; ValueError where a folder, a pipe or a device has its name."""
    if path.is_symlink() and not path.exists():  # into storage that is not mounted, perhaps: it may come back
        raise OSError(errno.EIO, f"it is a link to {path.readlink()}, which is not there", str(path))
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a checkpoint: a folder, a pipe or a device has that name.")
    if not path.is_file():
        siblings = [each.name for each in path.parent.glob(f"*{SUFFIX}")] if path.parent.is_dir() else []
        raise FileNotFoundError(f"There is no checkpoint at {path}.{known_names(path.name, siblings)}")
