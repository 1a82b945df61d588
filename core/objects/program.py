"""The program and the data of a run as digests: compared at a resume, not restored."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import io
import marshal
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ...events import SavePoint
from ...plugins.plugin import ARGUMENTS
from ..data.rng import KINDS
from ..data.source import loaders_of
from ..data.users_code import attributes, is_by_user, is_ours, is_users, set_by_epoch
from ..engines.options import COMPILED
from ..system.extras import kind_of
from .equality import digest, is_scalar, scalar_bits
from .graph import Node, Parts, Roots, Walk, family, type_name

if TYPE_CHECKING:
    from ...events import Run

Value = Mapping[str, str]
NOT_THERE: Final = {"text": "not there"}
SHOWN: Final = 60  # characters of a value in a message
CONTAINERS: Final = (dict, list, tuple, deque, set, frozenset)
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
    if is_scalar(value):
        return _encode_scalar(scalar_bits(value))
    walk, encoded = _Digests(is_data=is_data), {"text": show(value)}
    slot = walk.value(value, "", 0)
    if walk.graph.untracked:
        path, kind = next(iter(walk.graph.untracked.items()))
        encoded["unseen"] = f"{path}: {kind}" if path else kind
    return encoded | {"digest": digest(scalar_bits([slot, walk.graph.nodes]))}


@lru_cache(maxsize=1000)  # options of the program are the same at every save
def _encode_scalar(bits: bytes) -> dict[str, str]:
    return {"text": show(marshal.loads(bits)), "digest": digest(bits)}  # noqa: S302  # not from a file


def differing(before: Mapping[str, Value], now: Mapping[str, Value]) -> Iterator[tuple[str, Value, Value]]:
    """Yield name, previous and present value of each difference; `NOT_THERE` if a value is missing."""
    for name in {**before, **now}:
        was, value = before.get(name, NOT_THERE), now.get(name, NOT_THERE)
        if was.get("digest") != value.get("digest"):
            yield name, was, value


def show_both(was: Value, value: Value) -> tuple[str, str]:
    before, now = was["text"], value["text"]
    return before, now if now != before else "one with other values"


def show(value: Any) -> str:
    text = repr(value) if _is_short(value) else ""
    return text if 0 < len(text) <= SHOWN else describe(value)


def describe(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{'a tensor' if isinstance(value, Tensor) else 'an array'} {list(value.shape)}"
    is_sized = isinstance(value, str | bytes | list | tuple | dict | set)
    return f"{kind_of(value)} of {len(value)}" if is_sized else kind_of(value)


def _is_short(value: Any, depth: int = 3) -> bool:
    if is_scalar(value) or isinstance(value, (*NAMED, np.generic)):
        return True
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 0
    if type(value) not in (list, tuple, dict) or len(value) > FEW or not depth:
        return False
    items = chain.from_iterable(value.items()) if type(value) is dict else value
    return all(_is_short(item, depth - 1) for item in items)


def _is_iterator(kind: type) -> bool:
    return hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)


class _Digests(Walk):
    def __init__(self, *, is_data: bool) -> None:
        self.is_data = is_data
        super().__init__(Roots({}))

    def value(self, value: Any, path: str, depth: int) -> object:
        return {"named": repr(value)} if isinstance(value, NAMED) else super().value(value, path, depth)

    def take_apart(self, value: Any, path: str) -> Parts | Node:
        kind: type = type(value)
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self.numbers(value)
        if self.is_data and not _is_iterator(kind):
            is_librarys = family(kind) in ("object", "opaque", "stateful", "file") and not is_by_user(kind)
            if is_librarys or isinstance(value, KINDS):
                return {"skip": type_name(value)}
            if isinstance(value, CONTAINERS) and len(value) > SAMPLE:
                items = () if isinstance(value, set | frozenset) else value
                pairs = enumerate(islice(dict.items(value) if isinstance(value, dict) else items, SAMPLE))
                return Parts("sample", [(f"[{number}]", item) for number, item in pairs], len(value))
        return super().take_apart(value, path)

    def give_up(self, value: object, path: str, why: str = "") -> Node:
        is_skipped = self.is_data and not _is_iterator(type(value))
        return {"skip": type_name(value)} if is_skipped else super().give_up(value, path, why)

    def numbers(self, value: Any) -> Parts | Node:
        if isinstance(value, Tensor) and value.is_meta:
            return {"skip": "meta"}
        leaf = [str(value.dtype), list(value.shape)]
        if value.dtype == object:
            return Parts("numbers", [("[]", value.tolist())], leaf)
        if self.is_data and value.nbytes > SAMPLE_BYTES:
            flat = value.reshape(-1)
            parts = [flat[:SAMPLE], flat[:: 1 + len(flat) // SAMPLE]]
            value = torch.cat(parts) if isinstance(value, Tensor) else np.concatenate(parts)
        return Parts("numbers", [], leaf, value)


READERS: Final = ("dataset", "sampler", "batch_sampler", "collate_fn")
OF_TORCH: Final[dict[type, str]] = {
    Subset: "indices", TensorDataset: "tensors", WeightedRandomSampler: "weights", SubsetRandomSampler: "indices",
}  # fmt: skip


def encode_data(run: Run) -> dict[str, Value]:
    """Return digests of the attributes of datasets, samplers and collate functions, by path.

    Of other iterables, only numbers and texts are read: they may hold all batches. A digest has a key `by_epoch` if
    `set_epoch` sets the attribute: it sets it again before anything is read.
    """
    loaders = dict(loaders_of(run.data.train_loader))
    loaders |= {f"validation {name}": loader for name, loader in run.data.validation_loaders.items()}
    encoded: dict[str, Value] = {
        path: encode(value, is_data=True) | ({"by_epoch": "yes"} if follows_epoch else {})
        for prefix, loader in loaders.items()
        for name in READERS
        for path, value, follows_epoch in _attributes(
            _reader(loader, name), f"{prefix.strip()} {name.replace('_', ' ')}".strip()
        )
    }
    for prefix, loader in loaders.items():
        if not isinstance(loader, DataLoader) and not hasattr(loader, "state_dict"):
            for path, value, follows_epoch in _attributes(loader, f"{prefix.strip()} loader".strip()):
                if is_scalar(value):
                    encoded[path] = encode(value) | ({"by_epoch": "yes"} if follows_epoch else {})
    return encoded


def _reader(loader: Any, name: str) -> Any:
    reader = getattr(loader, name, None)
    if type(reader) is not BatchSampler:
        return reader
    return None if reader.sampler is loader.sampler else reader.sampler  # torch makes it from the sampler


def _attributes(reader: Any, path: str) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(reader, FunctionType | partial):
        yield path, reader, False
    elif isinstance(reader, ConcatDataset | StackDataset):
        datasets = reader.datasets
        for name, part in datasets.items() if isinstance(datasets, dict) else enumerate(datasets):
            yield from _attributes(part, f"{path} {name}")
    elif name := OF_TORCH.get(type(reader)):
        yield f"{path}.{name}", getattr(reader, name), False
        yield from _attributes(getattr(reader, "dataset", None), path)
    elif is_by_user(type(reader)):
        by_epoch = set_by_epoch(type(reader))
        for name, value in attributes(reader):
            if not isinstance(value, KINDS):  # their draws are keyed
                yield f"{path}.{name}", value, name in by_epoch


Program = Mapping[str, Any]
DERIVED: Final = {"name", "needs", "ignores", ARGUMENTS}  # attributes that follow from others


def describe_program(run: Run) -> dict[str, Any]:
    engine = run.engine
    device = torch.device(str(engine.device))
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    cudnn = torch.backends.cudnn
    settings = {
        "the precision": str(getattr(getattr(engine, "precision", None), "name", "unknown")),
        "torch's default dtype": str(torch.get_default_dtype()),
        "the device": f"{device.type} {model}".strip(),
        "the list of compiled modules": _compiled(run.task),
        "the engine": type(engine).__name__,
        "the number of torch's threads": torch.get_num_threads(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuDNN's (deterministic, benchmark, allow_tf32)": [cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32],
        "torch's float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    named = zip(run.plugins.names(), run.plugins, strict=True)
    plugins = {
        name: {"class": encode(type_name(plugin)), "enabled": encode(run.plugins.is_enabled(name))}
        | (plugin_options(plugin) if is_ours(type(plugin).__module__) else {})  # others are in the graph
        for name, plugin in named
        if affects_training(plugin)
    }
    return {"settings": settings, "ranks": engine.world_size, "plugins": plugins}


def _compiled(task: Any) -> list[str]:
    roots = {"task": task} if isinstance(task, nn.Module) else getattr(task, "__dict__", {})
    return [
        f"{name}.{path}".rstrip(".").replace(f".{COMPILED}", "")
        for name, root in roots.items()
        if isinstance(root, nn.Module)
        for path, module in root.named_modules()
        if COMPILED in module._modules
    ]


def affects_training(plugin: Any) -> bool:
    return getattr(plugin, "policy", "critical") != "observer" and bool(getattr(plugin, "affects_training", True))


def report_late_listeners(run: Run, saver: str) -> None:
    """Report plugins that listen to `SavePoint` after the saving plugin: their changes there are not saved.

    Args:
        run: the run.
        saver: the name of the plugin that saves.
    """
    owners = [subscription.owner for _, subscription in run.bus.signal(SavePoint).listeners()]
    names = set(run.plugins.names())
    for name in dict.fromkeys(owners[owners.index(saver) + 1 :] if saver in owners else ()):
        plugin = run.plugins[name] if name in names else None
        if is_users(type(plugin).__module__) and affects_training(plugin) and getattr(plugin, "state_dict", dict)():
            reason = "after the state is saved, so a resume loses its changes"
            run.data.report_untracked(
                f"plugins.{name}",
                f"plugin {name!r} listens to SavePoint {reason}: use a lane before PERSIST, or set affects_training = "
                f"False if it only observes",
            )


def plugin_options(plugin: Any) -> dict[str, Value]:
    is_builtin = is_ours(type(plugin).__module__)
    names = [name for name in vars(plugin) if name not in DERIVED and not (is_builtin and name.startswith("_"))]
    return {name: encode(_plain(getattr(plugin, name))) for name in names}


def _plain(option: Any) -> Any:
    # of a class of heliograph its `str` if it has one, else its attributes
    kind = type(option)
    if not is_ours(kind.__module__):
        return option
    if any("__str__" in vars(base) for base in kind.__mro__[:-1]):
        return str(option)
    return {name: value for name, value in getattr(option, "__dict__", {}).items() if not name.startswith("_")}


def encode_options(run: Run) -> dict[str, Value]:
    # not the learning rate that a scheduler has set: the program's is in `initial_lr`
    options: dict[str, Value] = {}
    for name, optimizer in run.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            group_name = name if len(optimizer.param_groups) == 1 else f"group {number} of {name}"
            skip = {"params", "param_names"} | ({"lr"} if "initial_lr" in group else set())
            options |= {f"{key} of {group_name}": encode(value) for key, value in group.items() if key not in skip}
    return options | encode_scheduler_options(run)


def encode_scheduler_options(run: Run) -> dict[str, Value]:
    return {
        f"{key} of the scheduler of {name}": encode(value)
        for name, scheduler in run.schedulers.items()
        for key, value in scheduler.state_dict().items()
        if key != "_last_lr"  # made of base_lrs
    }
