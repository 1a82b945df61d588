"""What a state takes on the disk: a tensor brings all memory that it is a view of, needed or not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self
from zipfile import ZipFile

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..state.plain import MAPPINGS, SEQUENCES
from . import reader
from .safe_open import check_archive

View = tuple[Any, ...]


def compact(state: Any) -> Any:
    """Return a state whose tensors take no more than they show.

    A tensor is copied where its memory is larger than all that tensors of the state show of it, as of a slice, and
    where tensors of another dtype show the same memory, which torch does not save. All others stay the very tensors,
    and continue to share memory; so do copies of what is the same slice.
    """
    views: dict[int, dict[View, int]] = {}
    sizes: dict[int, int] = {}
    dtypes: dict[int, set[torch.dtype]] = {}  # by address: two storages may have the same memory, as of NumPy's arrays
    addresses: dict[int, int] = {}
    for tensor in _tensors(state):
        storage = tensor.untyped_storage()
        sizes[storage._cdata], addresses[storage._cdata] = storage.nbytes(), storage.data_ptr()
        dtypes.setdefault(storage.data_ptr(), set()).add(tensor.dtype)
        views.setdefault(storage._cdata, {})[_view(tensor)] = tensor.nbytes
    loose = {number for number, size in sizes.items() if size > sum(views[number].values())}
    loose |= {number for number, address in addresses.items() if address and len(dtypes[address]) > 1}
    return _rebuilt(state, loose, {}) if loose else state


def _rebuilt(value: Any, loose: set[int], made: dict[View, Tensor]) -> Any:
    if type(value) in MAPPINGS:
        return type(value)({key: _rebuilt(item, loose, made) for key, item in value.items()})
    if type(value) in SEQUENCES:
        return type(value)([_rebuilt(item, loose, made) for item in value])
    if not _has_memory(value) or value.untyped_storage()._cdata not in loose:
        return value
    view = (value.untyped_storage()._cdata, *_view(value))
    if view not in made:
        made[view] = value.detach().clone(memory_format=torch.contiguous_format)
    form = (*view, type(value), value.requires_grad)  # a frozen view of what another one trains is one of its own
    if form not in made:
        copy = made[view].detach()
        copy = nn.Parameter(copy, requires_grad=False) if type(value) is nn.Parameter else copy
        made[form] = copy.requires_grad_(value.requires_grad)
    return made[form]


def _tensors(value: Any) -> Iterator[Tensor]:
    if type(value) in MAPPINGS:
        value = list(value.values())
    if type(value) in SEQUENCES:
        for item in value:
            yield from _tensors(item)
    elif _has_memory(value):
        yield value


def _has_memory(value: Any) -> bool:
    """Return whether a value is a tensor that is a plain view of its memory; sparse and such are none."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )


def _view(tensor: Tensor) -> View:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


SLACK = 64 * 1024  # the archive's directory, the manifest, a pointer


PER_TENSOR = 512  # a record's header, its padding, its entry in the directory


PER_VALUE = 16


def estimate(state: Any) -> int:
    """Return about how many bytes a state takes on the disk; memory that tensors share counts once."""
    storages: dict[int, int] = {}
    return SLACK + _values(state, storages) + sum(storages.values())


def _values(value: Any, storages: dict[int, int]) -> int:
    if isinstance(value, Tensor):
        return PER_TENSOR + _tensor(value, storages)
    if isinstance(value, Mapping):
        return sum(_values(key, storages) + _values(item, storages) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_values(item, storages) for item in value)
    return PER_VALUE + (len(value) if isinstance(value, str | bytes) else 0)


def _tensor(tensor: Tensor, storages: dict[int, int]) -> int:
    """Return what a tensor takes by itself; one with a storage enters that instead, for it is saved whole, and once."""
    if tensor.layout is not torch.strided:
        return tensor.element_size() * tensor.numel()
    storage = tensor.untyped_storage()
    storages[storage._cdata] = storage.nbytes()
    return 0


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
