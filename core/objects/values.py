"""Digests of values that are compared but not restored: options, and attributes of data objects."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import io
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import PurePath
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ...events import Run
from ..data.generators import KINDS
from ..data.streams import Streams
from ..data.users_code import set_by_epoch
from ..system.extras import kind_of
from .equality import digest, digest_of, is_scalar, scalar_bits
from .graph import Node, Roots, Walk, family, is_by_user, type_name

Value = Mapping[str, str]
MISSING: Final = {"text": "not there"}
SHOWN: Final = 60  # characters of a value in a message
FEW: Final = 20  # numbers of a tensor that are shown
SAMPLE: Final = 1000  # items of a container of data, and numbers of a large array
SAMPLE_BYTES: Final = 2**16
NAMED: Final = (
    PurePath, range, slice, enum.Enum, np.dtype, torch.dtype, torch.device, torch.Size, fractions.Fraction,
    decimal.Decimal, datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip


def encode(value: Any, *, is_data: bool = False) -> dict[str, str]:
    """Return the digest of a value, with a `text` for messages; `unseen` names parts that cannot be read.

    Args:
        value: any value.
        is_data: whether it may be a data set: then large values are sampled, objects of installed libraries are not
            read, and states of generators are ignored because their draws are keyed.
    """
    encoded = {"text": show(value)}
    if is_scalar(value):
        return encoded | {"digest": digest(scalar_bits(value))}
    walk = (_Sample if is_data else _Fingerprint)(Roots({}))
    slot = walk.value(value, "", 0)
    if walk.graph.untracked:
        path, kind = next(iter(walk.graph.untracked.items()))
        encoded["unseen"] = f"{path}: {kind}" if path else kind
    return encoded | {"digest": digest(scalar_bits([slot, walk.graph.nodes]))}


def differing(before: Mapping[str, Value], now: Mapping[str, Value]) -> Iterator[tuple[str, Value, Value]]:
    """Yield name, previous and present value of each difference; `MISSING` if a value is missing."""
    for name in {**before, **now}:
        was, value = before.get(name, MISSING), now.get(name, MISSING)
        if was.get("digest") != value.get("digest"):
            yield name, was, value


def show_both(was: Value, value: Value) -> tuple[str, str]:
    before, now = was["text"], value["text"]
    return before, now if now != before else "one with other values"


def show(value: Any) -> str:
    if is_scalar(value) or isinstance(value, (*NAMED, np.generic)) or _is_short(value):
        text = repr(value)
        if len(text) <= SHOWN:
            return text
    return describe(value)


def describe(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{'a tensor' if isinstance(value, Tensor) else 'an array'} {list(value.shape)}"
    is_sized = isinstance(value, str | bytes | list | tuple | dict | set)
    return f"{kind_of(value)} of {len(value)}" if is_sized else kind_of(value)


def _is_short(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 0
    if type(value) not in (list, tuple, dict) or len(value) > FEW or not depth:
        return False
    items = chain.from_iterable(value.items()) if type(value) is dict else value
    return all(is_scalar(item) or _is_short(item, depth - 1) for item in items)


def _is_iterator(kind: type) -> bool:
    return hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)


class _Fingerprint(Walk):
    most: int | None = None  # items of a container; all of them by default

    def value(self, value: Any, path: str, depth: int) -> object:
        return {"named": repr(value)} if isinstance(value, NAMED) else super().value(value, path, depth)

    def tensor(self, value: Tensor, path: str, depth: int) -> object:
        return {"skip": "meta"} if value.is_meta else self.numbers(value, path)

    def array(self, value: Any, path: str, depth: int) -> object:
        if value.dtype.hasobject:
            return self.items(value, value.reshape(-1).tolist(), path, depth)
        return self.numbers(value, path)

    def numbers(self, value: Any, path: str) -> Node:
        node = self.leaf(value, path, "numbers", [str(value.dtype), list(value.shape)])
        self.graph.nodes[node["ref"]]["digest"] = digest_of(self.sampled(value))
        return node

    def sampled(self, value: Any) -> Any:
        return value

    def items(self, value: Any, items: Iterable[object], path: str, depth: int) -> Node:
        slots = ((f"[{number}]", item) for number, item in enumerate(islice(items, self.most)))
        return self.add(value, path, "sample", depth, slots, len(value))


class _Sample(_Fingerprint):
    most = SAMPLE

    def value(self, value: Any, path: str, depth: int) -> object:
        kind: type = type(value)
        is_librarys = family(kind) in ("object", "opaque", "stateful", "file") and not is_by_user(kind)
        is_left_out = is_librarys and not _is_iterator(kind)
        return {"skip": type_name(value)} if is_left_out else super().value(value, path, depth)

    def give_up(self, value: object, path: str, why: str = "") -> Node:
        return super().give_up(value, path, why) if _is_iterator(type(value)) else {"skip": type_name(value)}

    def generator(self, value: Any, path: str, depth: int) -> object:
        return {"skip": type_name(value)}

    def mapping(self, value: Any, path: str, depth: int) -> object:
        if len(value) > SAMPLE:
            return self.items(value, chain.from_iterable(dict.items(value)), path, depth)
        return super().mapping(value, path, depth)

    def sequence(self, value: Any, path: str, depth: int) -> object:
        return self.items(value, value, path, depth) if len(value) > SAMPLE else super().sequence(value, path, depth)

    def set(self, value: Any, path: str, depth: int) -> object:
        return self.items(value, (), path, depth) if len(value) > SAMPLE else super().set(value, path, depth)

    def sampled(self, value: Any) -> Any:
        if value.nbytes <= SAMPLE_BYTES:
            return value
        flat = value.reshape(-1)
        parts = [flat[:SAMPLE], flat[:: 1 + len(flat) // SAMPLE]]
        return torch.cat(parts) if isinstance(value, Tensor) else np.concatenate(parts)


READERS: Final = ("dataset", "sampler", "batch_sampler", "collate_fn")


def encode_data(run: Run, *, only_by_epoch: bool = False) -> dict[str, Value]:
    """Return digests of the attributes of datasets, samplers and collate functions, by path.

    Args:
        run: the run.
        only_by_epoch: only the attributes that `set_epoch` sets: it sets them again before anything is read.
    """
    sets, train = run.data.validation_loaders, run.data.train_loader
    loaders = (
        {f"{name} ": loader for name, loader in train.loaders.items()} if isinstance(train, Streams) else {"": train}
    )
    loaders |= {f"validation {name} ".replace("  ", " "): loader for name, loader in sets.items()}
    encoded: dict[str, Value] = {}
    for prefix, loader in loaders.items():
        for name in READERS:
            reader = getattr(loader, name, None)
            if type(reader) is BatchSampler:  # torch makes it from the sampler
                reader = None if reader.sampler is loader.sampler else reader.sampler
            for path, value, follows_epoch in _attributes(reader, prefix + name.replace("_", " ")):
                if follows_epoch or not only_by_epoch:
                    encoded[path] = encode(value, is_data=True)
    return encoded


def _attributes(reader: Any, path: str) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(reader, Subset):
        yield f"{path}.indices", reader.indices if type(reader.indices) is list else list(reader.indices), False
        yield from _attributes(reader.dataset, path)
    elif isinstance(reader, ConcatDataset):
        for number, part in enumerate(reader.datasets):
            yield from _attributes(part, f"{path} {number}")
    elif isinstance(reader, TensorDataset):
        for number, tensor in enumerate(reader.tensors):
            yield f"{path}.tensors {number}", tensor, False
    elif isinstance(reader, WeightedRandomSampler | SubsetRandomSampler):
        name = "weights" if isinstance(reader, WeightedRandomSampler) else "indices"
        yield f"{path}.{name}", getattr(reader, name), False
    elif isinstance(reader, FunctionType | partial):
        yield path, reader, False
    elif reader is not None and is_by_user(type(reader)):
        by_epoch = set_by_epoch(type(reader))
        for name, value in getattr(reader, "__dict__", {}).items():
            if not isinstance(value, KINDS) and name[:2] != "__":  # their draws are keyed
                yield f"{path}.{name}", value, name in by_epoch
