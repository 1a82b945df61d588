"""Read files from any source safely: no pipe blocks, no content runs code or fills the memory."""

from __future__ import annotations

import hashlib
import json
import pickletools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from io import BufferedReader
from math import prod
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from types import NoneType
from typing import Any, NamedTuple, NoReturn, Self
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ...system.errors import is_of_machine
from ...system.extras import kind_of
from ..checks import check_tree, describe_schema
from ..schema import SCHEMA
from .archive import tensors_in
from .files import open_regular, records_of
from .manifest import CHECKSUM, FORMAT, MOST, SPECIAL, Entry, JudgedBy, MissingManifestError, SchemaError


def cause(error: Exception) -> str:
    # without torch's advice to read the file unsafely
    inner = error.__context__ if isinstance(error, UnpicklingError) else None
    return f"{type(error).__name__}: {inner or error}"


class UnreadableError(ValueError):
    """A file that matches the digest in its manifest but cannot be read: that is not damage."""


# With `is_verified`, the file matches the digest in its manifest. Otherwise a RuntimeError of torch may be damage.
def refuse_unread(name: Path | str, error: Exception, *, is_verified: bool = False) -> NoReturn:
    if not is_of_machine(error, is_verified=is_verified):
        if is_verified:
            raise UnreadableError(
                f"{name} matches the digest in its manifest, so it is intact, but it cannot be read: {cause(error)}. "
                f"Resume another checkpoint by its path, or move this file away."
            ) from error
        raise ValueError(f"{name} cannot be read: {cause(error)}") from error
    error.add_note(f"{name} could not be read, but no damage was detected.")
    raise error


EXPANDED = 2**40  # bytes: an expanded view may be larger than its file, but not than any memory


def check_archive(file: BufferedReader, path: Path, *, checks_data: bool = False) -> None:
    """Compare the sizes of an archive's records with the size of the file, before any record is read.

    Torch does not compress. A compressed record could expand a thousandfold in memory. `checks_data` also compares the
    records with their checksums.

    Raises:
        ValueError: it is not an archive of torch, a record is compressed, or the records are larger than the file.
    """
    records, size = records_of(file, path), file.seek(0, 2)
    packed = [record.filename for record in records if record.compress_type != ZIP_STORED]
    if packed:
        raise ValueError(f"{path} is not a file of torch.save: its record {packed[0]!r} is compressed.")
    claimed = sum(record.file_size for record in records)
    if claimed > size:
        raise ValueError(f"{path} is damaged or forged: its records claim {claimed:,} bytes, the file has {size:,}.")
    try:
        broken = ZipFile(file).testzip() if checks_data else None
    except (BadZipFile, ValueError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if broken is not None:
        raise ValueError(f"{path} is damaged, or was not written by torch.save: the checksum of {broken} is wrong.")


def check_content(value: Any, path: Path) -> None:
    try:
        check_tree(value, "its content")
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    size = path.stat().st_size
    for tensor in tensors_in(value):
        claimed = prod(tensor.shape) * tensor.element_size()
        if tensor.layout is torch.strided and claimed > max(size, EXPANDED):
            raise ValueError(
                f"{path} is damaged or forged: a tensor of {list(tensor.shape)} claims {claimed:,} bytes, the file has "
                f"{size:,}."
            )


PATH = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")


class Record:
    """The attributes of an object that was read without its class; its code does not run."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)  # unpickling may not call `__init__`

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # a class with slots has two
            vars(self).update(part or {})


# Paths are read as text: their class may be of another operating system.
def plain_path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def plain_text(value: Any = "") -> str:
    return str(value)


def read_foreign(path: Path, records: Collection[str] = (), texts: str = "(?!)") -> Any:
    """Read a file of another program as plain types and tensors; see `read_with_stand_ins`."""
    content = records_as_dicts(read_with_stand_ins(path, records, texts))
    check_content(content, path)
    return content


def read_with_stand_ins(path: Path, records: Collection[str] = (), texts: str = "(?!)") -> Any:
    """Read a file with `weights_only=True`, with stand-ins for objects of some classes.

    Args:
        path: a file that `torch.save` wrote.
        records: patterns of classes whose objects are read as `Record`.
        texts: the pattern of enumerations of strings, which are read as strings.

    Raises:
        ValueError: the file is damaged, or holds objects of other classes; their names are listed.
    """
    with open_regular(path) as file:
        check_archive(file, path, checks_data=True)
    try:
        stand_ins = {name: _stand_in(name, records, texts) for name in get_unsafe_globals_in_checkpoint(path)}
    except Exception as error:  # noqa: BLE001  # another pickle than torch's fails in many ways
        refuse_unread(path, error)
    refuse_unknown(path, [name for name, stand_in in stand_ins.items() if stand_in is None])
    try:
        with safe_globals([(stand_in, name) for name, stand_in in stand_ins.items() if stand_in is not None]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # torch.load fails in many ways, too
        refuse_unread(path, error)


def refuse_unknown(path: Path, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{path} holds objects of {', '.join(sorted(names))}: creating them could run code, so it is refused. "
            f"Save weights as torch.save(module.state_dict(), path). To migrate a checkpoint, `heliograph checkpoint "
            f"migrate {path} --as-data {sorted(names)[0]}`, a command of heliograph-cli, reads only the attributes of "
            f"such objects, and runs no code."
        )


def _stand_in(name: str, records: Collection[str], texts: str) -> Callable[..., Any] | None:
    if PATH.fullmatch(name):
        return plain_path
    if re.fullmatch(texts, name):
        return plain_text
    return Record if any(re.fullmatch(pattern, name) for pattern in records) else None


def records_as_dicts(value: Any) -> Any:
    """Return nested containers with each `Record` as a dict of its attributes, and each set as a list.

    Shared objects stay shared.

    Raises:
        ValueError: something holds itself, or is nested too deep.
    """
    try:
        return _plain(value, {})
    except RecursionError:
        raise ValueError("something in it holds itself, or is nested very deep") from None


def _plain(value: Any, made: dict[int, Any]) -> Any:
    if id(value) not in made:
        made[id(value)] = _make_plain(value, made)
    return made[id(value)]


def _make_plain(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, Record):
        return _plain(vars(value), made)
    if isinstance(value, Mapping) and not isinstance(value, Counter):  # a scheduler counts with one
        return {_plain(key, made): _plain(item, made) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        items = [_plain(item, made) for item in value]
        return tuple(items) if type(value) is tuple else items
    return value


SHARDS = re.compile(r".+\.[0-9a-f]{8}\.shards")
MARK = b'"format": "heliograph checkpoint"'
END, END_SIZE = b"PK\5\6", 22  # the last record of a zip archive; its last two bytes are the length of the comment
NEAR = 4096  # bytes: most manifests are shorter
DIGITS = 64  # of a SHA-256


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


MOST_HEAD = 2**24  # bytes of a pickled state, without its tensors


class Head(NamedTuple):
    """The first facts of a checkpoint whose end is missing.

    Attributes:
        run_name: the name that the program gave the run.
        training: the id of the training.
        saved_at: the time of the save, in seconds since the epoch.
    """

    run_name: str
    training: str
    saved_at: float


def read_head(path: Path) -> Head | None:
    # the state is at the beginning of the file; nothing is unpickled
    facts, last = dict[str, Any](), ""
    with suppress(OSError, ValueError, IndexError), open_regular(path) as file:
        content = file.read(MOST_HEAD)
        for operation, argument, _ in pickletools.genops(content[content.index(b"\x80\x02") :]):
            if argument is None or operation.name in ("BINPUT", "LONG_BINPUT"):
                continue
            if last in ("run_name", "training_id", "saved_at"):
                facts.setdefault(last, argument)
            last = argument if isinstance(argument, str) else ""
            if len(facts) == len(Head._fields):
                break
    run_name, training, saved_at = (facts.get(name) for name in ("run_name", "training_id", "saved_at"))
    if not isinstance(run_name, str) or not isinstance(training, str) or not isinstance(saved_at, float):
        return None
    return Head(run_name, training, saved_at)
