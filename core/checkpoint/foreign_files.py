"""Reading files that other programs saved with torch, such as those of Helios; no code in them runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self
from zipfile import ZipFile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from .storage.untrusted_files import check_archive, open_regular, refuse_unread

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
    with open_regular(path) as file:
        check_archive(file, path)
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
