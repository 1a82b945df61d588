"""Reads files that hold objects of classes that are not there: each is given a harmless stand-in, none is imported."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self
from zipfile import ZipFile

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from . import reader
from .safe_open import check_archive

PATH = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")


class Record:
    """An object that was read without its class: its attributes, and nothing that runs."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        """Keep what the class would have been called with; reading may not call `__init__`."""
        record = super().__new__(cls)
        if arguments:
            record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # a class with slots gives two
            vars(self).update(part or {})


def plain_path(*parts: str) -> str:
    """Return a path as text: the class that wrote it may be another system's."""
    return str(PurePosixPath(*parts))


def plain_windows_path(*parts: str) -> str:
    """Return a path of Windows as text."""
    return str(PureWindowsPath(*parts))


def plain_text(value: Any = "") -> str:
    """Return a member of an enumeration of strings as that string."""
    return str(value)


def read(path: Path, records: Collection[str] = (), texts: str = "(?!)") -> Any:
    """Return what a file holds, read with `weights_only=True`, with stand-ins for paths and for what is named.

    Args:
        path: a file that `torch.save` wrote.
        records: patterns of classes to read as the plain attributes of their objects.
        texts: the pattern of enumerations of strings.

    Raises:
        ValueError: the file is damaged, or holds objects of other classes; their names are listed.
    """
    check_whole(path)
    try:
        known = {name: _stand_in(name, records, texts) for name in get_unsafe_globals_in_checkpoint(path)}
    except Exception as error:  # what is no pickle of torch's fails in many ways
        raise ValueError(f"{path} cannot be read: {reader.cause(error)}") from error
    refuse_unknown(path, [name for name, found in known.items() if found is None])
    try:
        with safe_globals([(found, name) for name, found in known.items() if found is not None]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {reader.cause(error)}") from error


def check_whole(path: Path) -> None:
    """Raise ValueError where a file without a manifest is damaged, going by the checksums that torch writes."""
    check_archive(path)
    try:
        with ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # a damaged archive fails in many ways
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if broken is not None:
        raise ValueError(f"{path} is damaged, or no file of torch.save: {broken} is not what it was when written.")


def refuse_unknown(path: Path, names: list[str]) -> None:
    """Raise ValueError where a file names what nobody vouches for."""
    if names:
        raise ValueError(
            f"{path} holds objects of {', '.join(sorted(names))}: to make them could run foreign code, so the file is "
            f"refused. --as-data {sorted(names)[0]} reads the attributes of such objects instead, and runs nothing."
        )


def _stand_in(name: str, records: Collection[str], texts: str) -> Callable[..., Any] | None:
    path = PATH.fullmatch(name)
    if path:
        return plain_windows_path if path[3] == "Windows" else plain_path
    if re.fullmatch(texts, name):
        return plain_text
    return Record if any(re.fullmatch(each, name) for each in records) else None


def as_plain(value: Any) -> Any:
    """Return nested containers with every `Record` as a dict of its attributes, and every set as a list.

    What stands in several places is made once, and stands in the same places.

    Raises:
        ValueError: something holds itself, or is nested very deep.
    """
    try:
        return _plain(value, {})
    except RecursionError:
        raise ValueError("something in it holds itself, or is nested very deep") from None


def _plain(value: Any, made: dict[int, Any]) -> Any:
    if id(value) not in made:
        made[id(value)] = _made_plain(value, made)
    return made[id(value)]


def _made_plain(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, Record):
        return _plain(vars(value), made)
    if isinstance(value, Mapping) and not isinstance(value, Counter):  # a scheduler counts with one
        return {_plain(key, made): _plain(item, made) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        items = [_plain(item, made) for item in value]
        return tuple(items) if type(value) is tuple else items
    return value
