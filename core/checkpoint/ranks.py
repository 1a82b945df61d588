"""The state of several ranks: differences from the main rank, and shards."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from pickle import Unpickler, UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...events import Engine
from ...events.checks import describe_error
from ..engines.options import is_sharding
from ..engines.sharded_states import States, empty_tensors, join_states
from ..system.errors import is_of_machine
from .checks import with_numbers
from .schema import map_leaves

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import Metadata


WHOLE = ("control", "data", "last_seen", "objects", "engine", "task", "metrics", "means", "filters")
BY_NAME = ("progress", "plugins", "plugin_versions", "number_types")
Key = tuple[str, str]  # a part of the snapshot, and a name in it if it is a dict by name


def gather_rank_parts(engine: Engine, snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, by rank, the differences from the main rank's snapshot: none for the main rank. A collective.

    Digests are compared first, so that large values that are equal on all ranks are not sent.

    Args:
        engine: connects the ranks.
        snapshot: the snapshot of this rank.
    """
    if engine.world_size == 1:
        return [{}]
    mine = dict(_items(snapshot))
    digests: list[dict[Key, bytes]] = engine.gather_objects({key: digest(mine[key]) for key in mine})
    of_main = digests[0]
    differing = {
        key: map_leaves(item, _to_cpu) for key, item in mine.items() if digests[engine.rank][key] != of_main.get(key)
    }
    differing |= {key: None for key in of_main if key not in mine}  # a plugin of the main rank only
    parts: list[dict[Key, Any]] = engine.gather_objects(differing)
    return [_nested(items) for items in parts]


def select_rank_part(saved: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the snapshot from which one of `world_size` ranks continues.

    A rank that the snapshot lacks gets the main rank's, without metrics to log. The main rank logs the metrics that
    removed ranks had not logged yet.
    """
    ranks, means = saved["ranks"], saved.get("means", {})
    if not ranks:  # a snapshot of this rank only
        return dict(with_numbers(saved, saved.get("number_types")))
    part: Mapping[str, Any] = ranks[rank] if rank < len(ranks) else {"means": {}, "objects": {}}
    if rank == 0:
        for gone in ranks[world_size:]:
            means = _added(means, gone.get("means", saved["means"]))
        part = {"means": means}
    merged = {name: {**saved.get(name, {}), **part[name]} if name in BY_NAME else part[name] for name in part}
    selected = {**saved, **merged}
    return dict(with_numbers(selected, selected.get("number_types")))


def digest(value: Any) -> bytes:
    # equal only for values that are equal bit for bit
    state = hashlib.blake2b(digest_size=16)
    for piece in _pieces(value):
        state.update(piece)
    return state.digest()


def _added(means: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    # means are summed; the states of metric objects cannot be
    added = dict(means)
    for name, saved in more.items():
        if not isinstance(saved, list):
            added.setdefault(name, saved)
            continue
        total, weight = saved
        own_total, own_weight = added.get(name, (0.0, 0.0))
        added[name] = [own_total + total, own_weight + weight]
    return added


def _items(snapshot: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    for part in WHOLE:
        if part in snapshot:  # a training in another loop has fewer
            yield (part, ""), snapshot[part]
    for part in BY_NAME:
        for name, item in snapshot.get(part, {}).items():
            yield (part, name), item


def _nested(items: Mapping[Key, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (part, name), item in items.items():
        if part in BY_NAME:
            nested.setdefault(part, {})[name] = item
        else:
            nested[part] = item
    return nested


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        plain = plain.contiguous() if plain.layout is torch.strided else plain.to_dense()
        yield f"{plain.dtype}{list(plain.shape)}".encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, dict):
        yield b"{%d" % len(value)
        for key, item in value.items():
            yield from _pieces(key)
            yield from _pieces(item)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__}{len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    else:
        yield f"{type(value).__name__}:{value!r};".encode()


def shards_folder(shards: Mapping[str, Any], path: Path | None) -> Path:
    """Return the folder of a checkpoint's shards.

    Args:
        shards: the description of the shards in the state.
        path: the file of the checkpoint.

    Raises:
        ValueError: the state has no path, or the name of the folder is forged.
    """
    if path is None:
        raise ValueError(
            "The weights of the state are in shards in the folder of its file: resume from the path of that file."
        )
    name = shards["folder"]
    if Path(name).name != name or not name.endswith(".shards"):
        raise ValueError(f"{path} is forged: {name!r} is not the name of a folder of shards.")
    return path.with_name(name)


def join_shards(saved: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Return a snapshot with its weights and optimizer states, read from its shards if it has some."""
    if "shards" not in saved:
        return dict(saved)
    modules, optimizers = _read_without_group(saved["shards"], path)
    unsharded = {name: value for name, value in saved.items() if name != "shards"}
    return {**unsharded, "modules": modules, "optimizers": optimizers}


def join_weights(saved: Mapping[str, Any], path: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """Return the full weights of a snapshot by module, from its shards if it has some. Not a collective."""
    if "shards" not in saved:
        modules: Mapping[str, Mapping[str, Any]] = saved["modules"]
        return modules
    return _read_without_group(shards_of_weights(saved["shards"]), path)[0]


def fit_to_engine(saved: Mapping[str, Any], engine: Engine, path: Path | None) -> dict[str, Any]:
    if "shards" not in saved or not is_sharding(engine):
        return join_shards(saved, path)
    # only the description of the optimizers: their tensors stay in the shards
    return {**saved, "optimizers": saved["shards"]["optimizers"]}


def shards_of_weights(shards: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: facts for name, facts in shards["tensors"].items() if name.startswith("modules/")}
    return {**shards, "optimizers": {}, "tensors": tensors}


def _read_without_group(shards: Mapping[str, Any], path: Path | None) -> States:
    tensors = empty_tensors(shards)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        read_tensors(tensors, shards_folder(shards, path), no_dist=True)
    return join_states(tensors, shards)


INDEX = ".metadata"  # in the folder of shards; written by rank 0 after all other ranks
DCP = "torch.distributed.checkpoint"
IN_INDEX = {  # not BytesStorageMetadata, whose content torch unpickles: shards hold only tensors
    f"{DCP}.metadata.Metadata", f"{DCP}.metadata.MetadataIndex", f"{DCP}.metadata.StorageMeta",
    f"{DCP}.metadata.ChunkStorageMetadata", f"{DCP}.metadata.TensorStorageMetadata",
    f"{DCP}.metadata.TensorProperties",
    f"{DCP}.metadata._MEM_FORMAT_ENCODING", f"{DCP}.filesystem._StorageInfo",
    "torch.Size", "torch.serialization._get_layout",
}  # fmt: skip


class _IndexUnpickler(Unpickler):
    """Unpickles only the classes that `torch.distributed.checkpoint` writes into its index of shards."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module.startswith("pathlib") and name.endswith("Path"):
            return PurePosixPath
        if full in IN_INDEX:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise UnpicklingError(f"it holds {full}, which is not part of an index of shards: creating it could run code")


def read_index(path: Path) -> Metadata:
    """Return the index of shards, `.metadata`, which is a pickle, without running code in it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, holds objects of other classes (one is named), or names files in other folders.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    with path.open("rb") as file:
        try:
            index = _IndexUnpickler(file).load()
            if not isinstance(index, Metadata):
                raise TypeError(f"it holds a {type(index).__name__}, not a Metadata")
            names = {info.relative_path for info in index.storage_data.values()}
            elsewhere = [name for name in names if Path(name).name != name]
        except Exception as error:  # another file fails in many ways
            if is_of_machine(error):
                raise
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if elsewhere:
        raise ValueError(f"{path} is forged: it names a file of another folder, {min(elsewhere)!r}.")
    return index


def read_tensors(tensors: dict[str, Any], folder: Path, **how: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class IndexReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return read_index(folder / INDEX)

    try:
        load(tensors, storage_reader=IndexReader(folder), **how)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if is_of_machine(failure):
                raise failure from error
        raise ValueError(f"The shards in {folder} cannot be read: {cause_of(error)}") from error


def cause_of(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {describe_error(failure)}" for rank, (failure, _) in error.failures.items())
