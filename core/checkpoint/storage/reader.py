"""Finding and reading checkpoints: listed by their manifests, verified, then unpickled safely."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable
from functools import partial
from io import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from ....events.checks import known_names
from ..state.ranks import INDEX, read_index
from ..state.schema import check_schema
from .files import SYSTEM, Files, WatchedReader
from .folder import FoundFile, Manifests
from .manifest import SUFFIX, Entry, SchemaError, read_entry, run_part
from .untrusted_files import UnreadableError, check_archive, check_content, refuse_unread

State = dict[str, Any]
Scope = Literal["recent", "run", "folder"]
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
        shards = read_shards(check(path, with_shards=with_shards, files=files), files=files) if with_shards else ()
        for index in (each for each in shards if each.name == INDEX):
            read_index(index)
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
        opened, size = source, source.seek(0, SEEK_END)

        def read(most: int) -> tuple[bytes, int]:
            opened.seek(max(0, size - most))
            return opened.read(), size

        return read_entry(read, path)
    try:
        return read_entry(lambda most: files.read_range(path, -most, most), path)
    except (OSError, ValueError):
        if not path.name.startswith("."):
            _check_is_file(path)  # it says more
        raise


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
        what = f"The shard {shard} of the checkpoint {path} is damaged:"
        try:
            found = files.digest(shard)
        except FileNotFoundError:
            raise ValueError(f"{what} it is not there.") from None
        if found[0] != size:
            raise ValueError(f"{what} it has {found[0]} bytes, its manifest says {size}.")
        if found[1] != sha256:
            raise ValueError(f"{what} its SHA-256 is not the one in its manifest.")
    return entry


def is_complete(entry: Entry) -> bool:
    """Return whether the shards of a checkpoint have the sizes in its manifest; only `check` verifies the content."""
    try:
        shards = read_shards(entry)
    except ValueError:
        return False
    return all(path.is_file() and path.stat().st_size == size for path, (size, _) in shards.items())


def entries(folder: Path | Manifests, run_name: str, scope: Scope = "run") -> tuple[list[Entry], list[str]]:
    """Return the checkpoints of a run, newest first, and a sentence for each file that was skipped.

    Only manifests are read; `check` verifies the data. Checkpoints of other runs are listed only if this run has none.

    Args:
        folder: the folder.
        run_name: the name that the program gave the run.
        scope: which manifests are read: those that may be of the newest checkpoints of the run, those that may be of
            the run by the names of their files, or all in the folder.

    Raises:
        OSError: the folder cannot be read.
    """
    manifests = _manifests(folder)
    found = _files_of(manifests, run_name, scope)
    own = [each.entry for each in found if each.entry is not None and each.run_name == run_name]
    passed_over = [str(each.problem) for each in found if each.entry is None]
    if not own and (of_others := _of_others(manifests, run_name)):
        passed_over.append(of_others)
    return sorted(own, key=lambda each: each.order, reverse=True), passed_over


def _files_of(manifests: Manifests, run_name: str, scope: Scope) -> list[FoundFile]:
    if scope == "recent":
        return manifests.recent(run_name)
    return manifests.look(manifests.may_be_of(run_name)) if scope == "run" else manifests.look()


def _of_others(manifests: Manifests, run_name: str) -> OfOthers | None:
    """Return a sentence on the other runs in a folder; one manifest is read of each name."""
    names = {name.partition("_epoch_")[0]: name for name in sorted(manifests.names()) if name.endswith(SUFFIX)}
    shown = {*[*names.values()][: SHOWN + 1]}
    families = sorted({each.entry.family for each in manifests.look(shown.__contains__) if each.entry} - {run_name})
    if not families:
        return None
    more = len(names) - SHOWN
    listed = ", ".join(map(repr, families[:SHOWN])) + f" and {more} more" * (more > 0)
    return OfOthers(f"{manifests.folder} has no checkpoint of run {run_name!r}; those in it are of {listed}.")


def under(folder: Path | Manifests, run_name: str, name: str) -> tuple[list[Entry], list[FoundFile], int]:
    """Return the checkpoints of trainings whose files have a name, other files of that name, and how many there are.

    Only the newest ones are returned, if one of them has the name. Files that were renamed no longer have it.
    """
    manifests = _manifests(folder)
    number = sum(_is_named_after(name, file) for file in manifests.names())
    for look in (partial(manifests.recent, run_name), partial(_files_of, manifests, name, "run")):
        found = look()
        entries = (each.entry for each in found if each.entry is not None)
        known = [each for each in entries if each.run_name == name and not each.is_renamed]
        unknown = [each for each in found if each.entry is None and _is_named_after(name, each.path.name)]
        if known or len(unknown) == number:
            break
    return known, unknown, max(number, len(known) + len(unknown))


def lost(folder: Path | Manifests, run_name: str, scope: Scope = "run") -> list[FoundFile]:
    """Return the damaged files that were checkpoints of a run, as their beginning says."""
    found = _files_of(_manifests(folder), run_name, scope)
    return [each for each in found if each.head is not None and each.head.run_name == run_name]


def highest_sequence(found: Iterable[FoundFile], run_name: str) -> int:
    """Return the highest sequence of a run, at least 0: those of Helios have negative ones."""
    return max([0, *(each.entry.sequence for each in found if each.entry and each.run_name == run_name)])


def refused(found: Iterable[FoundFile]) -> list[str]:
    """Return a sentence for each manifest, of any run, that could not be read."""
    unknown = "whose it is, and its place in the order of writing, is not known"
    refused = (each for each in found if isinstance(each.problem, OSError))
    return [f"{each.path} cannot be read ({each.problem}): {unknown}" for each in refused]


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
    scope: Scope = "recent"
    while True:
        with manifests.steady():
            found, passed_over = entries(manifests, run_name, scope)
            for each in _files_of(manifests, run_name, scope):
                if isinstance(each.problem, OSError | SchemaError) and each.run_name in (None, run_name):
                    raise each.problem  # it may be the newest
            training = newest_training(found, lost(manifests, run_name, scope))
        for entry in (each for each in found if each.training == training):
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


def _manifests(folder: Path | Manifests) -> Manifests:
    return folder if isinstance(folder, Manifests) else Manifests(folder)


def _is_named_after(run_name: str, name: str) -> bool:
    return name.endswith(SUFFIX) and name.startswith(f"{run_part(run_name)}_epoch_")


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: Checkpoint({str(path)!r}, resume='auto') finds the newest in it.")
    if path.suffix != SUFFIX:
        raise ValueError(f"{path} is not a checkpoint: the name of a checkpoint ends in {SUFFIX}.")
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
