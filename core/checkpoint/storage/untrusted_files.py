"""Reading files from any source: no pipe may block, no content may run code or fill the memory."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from io import BufferedReader
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from pickle import UnpicklingError
from typing import Any, NoReturn, Self
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ...system.errors import is_of_machine
from ..state.schema import MAPPINGS, SEQUENCES, check_tree

FOLLOW_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
_FLAGS: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR}


def open_regular(path: Path | str, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: accept a symbolic link that leads to one.

    Raises:
        ValueError: it is something else, such as a folder, a pipe or a device.
        OSError: it does not exist, or cannot be opened.
    """
    return os.fdopen(open_handle(path, follow=follow)[0], "rb")


def read_small(path: Path | str, most: int, *, follow: bool = True) -> bytes:
    """Return all of a regular file.

    Args:
        path: the file.
        most: bytes; a larger file is not read.
        follow: accept a symbolic link that leads to one.

    Raises:
        ValueError: it is larger, or not a regular file; see `open_regular`.
        OSError: it does not exist, or cannot be read.
    """
    handle, size = open_handle(path, follow=follow)
    try:
        if size > most:
            raise ValueError(f"{path} is not a file of ours: it has {size:,} bytes, at most {most:,} are expected")
        content = os.read(handle, size + 1)
        while len(content) < size and (more := os.read(handle, size - len(content))):
            content += more
        return content
    finally:
        os.close(handle)


def open_handle(path: Path | str, *, follow: bool = True) -> tuple[int, int]:
    """Return the handle and the size of a regular file."""
    try:
        handle = os.open(path, _FLAGS | (0 if follow else FOLLOW_NO_LINK))
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_file(path) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise _no_file(path)
    return handle, status.st_size


def _no_file(path: Path | str) -> ValueError:
    return ValueError(f"{path} is not a regular file: a folder, a link, a pipe or a device has that name")


def cause(error: Exception) -> str:
    """Return why reading failed, without torch's advice to read the file unsafely."""
    inner = error.__context__ if isinstance(error, UnpicklingError) else None
    return f"{type(error).__name__}: {inner or error}"


def refuse_unread(what: Path | str, error: Exception, *, is_verified: bool = False) -> NoReturn:
    """Raise the error that reading a file has raised, or ValueError if the file is the cause.

    Args:
        what: the file.
        error: the error.
        is_verified: whether the file has the digest in its manifest. Otherwise a RuntimeError of torch may be damage.
    """
    if not is_of_machine(error, is_verified=is_verified):
        raise ValueError(f"{what} cannot be read: {cause(error)}") from error
    error.add_note(f"{what} could not be read, but no damage was found.")
    raise error


EXPANDED = 2**40  # bytes: an expanded view may be larger than its file, but not than any memory


def check_archive(path: Path) -> None:
    """Compare the sizes of an archive's records with that of the file, before any of them is read.

    Torch does not compress. A compressed record could expand a thousandfold in memory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an archive of torch, a record is compressed, or they claim more bytes than the file has.
    """
    with open_regular(path) as file:
        try:
            with ZipFile(file) as archive:
                parts = archive.infolist()
        except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            what = "is empty" if file.seek(0, 2) == 0 else "is damaged, or was not written by torch.save"
            raise ValueError(f"{path} {what}: {error}") from None
        size = file.seek(0, 2)
    packed = [each.filename for each in parts if each.compress_type != ZIP_STORED]
    if packed:
        raise ValueError(f"{path} is not a file of torch.save: its part {packed[0]!r} is compressed.")
    claimed = sum(each.file_size for each in parts)
    if claimed > size:
        raise ValueError(f"{path} is damaged or forged: its parts claim {claimed:,} bytes, the file has {size:,}.")


def check_content(value: Any, path: Path) -> None:
    """Raise ValueError if the content of a file is not a tree, or a tensor claims more bytes than the file has."""
    try:
        check_tree(value, "its content")
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    size = path.stat().st_size
    for tensor in _tensors(value, set()):
        claimed = prod(tensor.shape) * tensor.element_size()
        if tensor.layout is torch.strided and claimed > max(size, EXPANDED):
            raise ValueError(
                f"{path} is damaged or forged: a tensor of {list(tensor.shape)} claims {claimed:,} bytes, the file has "
                f"{size:,}."
            )


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in a tree; a shared container is visited once."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (*MAPPINGS, *SEQUENCES) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if type(value) in MAPPINGS else value:
            yield from _tensors(item, seen)


PATH = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")


class Record:
    """The attributes of an object that was read without its class; no code of it runs."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        """Keep the arguments for the class; unpickling may not call `__init__`."""
        record = super().__new__(cls)
        if arguments:
            record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # a class with slots gives two
            vars(self).update(part or {})


def plain_path(*parts: str) -> str:
    """Return a path as text: its class may be of another operating system."""
    return str(PurePosixPath(*parts))


def plain_windows_path(*parts: str) -> str:
    """Return a Windows path as text."""
    return str(PureWindowsPath(*parts))


def plain_text(value: Any = "") -> str:
    """Return a member of an enumeration of strings as that string."""
    return str(value)


def read_with_stand_ins(path: Path, records: Collection[str] = (), texts: str = "(?!)") -> Any:
    """Return the content of a file, read with `weights_only=True`, with stand-ins for objects of some classes.

    Args:
        path: a file that `torch.save` wrote.
        records: patterns of classes whose objects are read as `Record`.
        texts: the pattern of enumerations of strings, which are read as strings.

    Raises:
        ValueError: the file is damaged, or holds objects of other classes; their names are listed.
    """
    check_whole(path)
    try:
        known = {name: _stand_in(name, records, texts) for name in get_unsafe_globals_in_checkpoint(path)}
    except Exception as error:  # noqa: BLE001  # what is not a pickle of torch's fails in many ways
        refuse_unread(path, error)
    refuse_unknown(path, [name for name, found in known.items() if found is None])
    try:
        with safe_globals([(found, name) for name, found in known.items() if found is not None]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # raised there
        refuse_unread(path, error)


def check_whole(path: Path) -> None:
    """Raise ValueError if a file without a manifest is damaged, by the checksums of its archive."""
    check_archive(path)
    try:
        with ZipFile(path) as archive:
            broken = archive.testzip()
    except (MemoryError, OSError):
        raise
    except Exception as error:  # a damaged archive fails in many ways
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if broken is not None:
        raise ValueError(
            f"{path} is damaged, or was not written by torch.save: {broken} is not what it was when written."
        )


def refuse_unknown(path: Path, names: list[str]) -> None:
    """Raise ValueError if a file holds objects of classes that are not known to be safe."""
    if names:
        raise ValueError(
            f"{path} holds objects of {', '.join(sorted(names))}: to create them could run code, so it is refused. "
            f"Save weights as torch.save(module.state_dict(), path). For a checkpoint to be migrated, `heliograph "
            f"checkpoint migrate {path} --as-data {sorted(names)[0]}` reads only the attributes of such objects, and "
            f"runs no code."
        )


def _stand_in(name: str, records: Collection[str], texts: str) -> Callable[..., Any] | None:
    path = PATH.fullmatch(name)
    if path:
        return plain_windows_path if path[3] == "Windows" else plain_path
    if re.fullmatch(texts, name):
        return plain_text
    return Record if any(re.fullmatch(each, name) for each in records) else None


def as_plain(value: Any) -> Any:
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
