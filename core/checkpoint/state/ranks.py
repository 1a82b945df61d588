"""What of a cut is not the same on all ranks: kept beside the main rank's, so that each rank goes on from its own."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ....events import Engine, Run
from ....events.errors import describe_error
from ...engines.sharded.states import ShardingEngine, States, empty, joined
from .parameter_groups import settle_groups

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

    from ...engines.contract import LoopEngine


WHOLE = ("control", "data", "last_seen", "unseen", "engine", "task", "metrics", "means", "filters")
BY_NAME = ("progress", "plugins", "plugin_versions")
Place = tuple[str, str]  # a part of the cut, and a name in it where it goes by names


def gathered(engine: Engine, cut: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, by rank, what differs from the main rank's cut: nothing for the main rank. A collective.

    Digests are compared first, so that what is large and the same everywhere is sent by nobody.

    Args:
        engine: connects the ranks.
        cut: this rank's own.
    """
    if engine.world_size == 1:
        return [{}]
    mine = dict(_items(cut))
    digests: list[dict[Place, bytes]] = engine.gather_objects({place: digest(mine[place]) for place in mine})
    of_main = digests[0]
    own = {place: _on_host(item) for place, item in mine.items() if digests[engine.rank][place] != of_main.get(place)}
    own |= {place: None for place in of_main if place not in mine}  # a plugin of the main rank only
    parts: list[dict[Place, Any]] = engine.gather_objects(own)
    return [_nested(each) for each in parts]


def own_part(saved: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return a cut as one of so many ranks goes on from it.

    A rank that the cut does not know takes the main rank's, but has nothing to log yet. What ranks that are gone had
    not logged yet, the main rank logs.
    """
    ranks, means = saved["ranks"], saved.get("means", {})
    if not ranks:  # this very rank's own
        return dict(saved)
    part: Mapping[str, Any] = ranks[rank] if rank < len(ranks) else {"means": {}, "unseen": {}}
    if rank == 0:
        for gone in ranks[world_size:]:
            means = _added(means, gone.get("means", saved["means"]))
        part = {"means": means}
    merged = {name: {**saved.get(name, {}), **part[name]} if name in BY_NAME else part[name] for name in part}
    return {**saved, **merged}


def digest(value: Any) -> bytes:
    """Return what tells nested plain values and tensors apart, to the last bit."""
    state = hashlib.blake2b(digest_size=16)
    for piece in _pieces(value):
        state.update(piece)
    return state.digest()


def _added(means: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved means with those of another rank in them."""
    added = dict(means)
    for name, (host, weight, start, _) in others.items():
        own_host, own_weight, *rest = added.get(name, (0.0, 0.0, 0.0, 0))
        added[name] = [own_host + host + start, own_weight + weight, *rest]
    return added


def _items(cut: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    for part in WHOLE:
        yield (part, ""), cut[part]
    for part in BY_NAME:
        for name, item in cut.get(part, {}).items():
            yield (part, name), item


def _nested(items: Mapping[Place, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (part, name), item in items.items():
        if part in BY_NAME:
            nested.setdefault(part, {})[name] = item
        else:
            nested[part] = item
    return nested


def _on_host(value: Any) -> Any:
    """Return a value whose tensors another process can take, whatever devices it has."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return type(value)({key: _on_host(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)([_on_host(item) for item in value])
    return value


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


def shards_of(path: Path | None) -> Path:
    """Return the folder of a checkpoint's shards.

    Raises:
        ValueError: the state came without a path.
    """
    if path is None:
        raise ValueError("The state's weights lie in shards beside its file: resume from the path of that file.")
    return path.with_suffix(".shards")


def whole(saved: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Return a cut with its weights and the state of its optimizers in it, read from the shards where it has some.

    Args:
        saved: the cut.
        path: its file.
    """
    if "shards" not in saved:
        return dict(saved)
    modules, optimizers = _read_alone(saved["shards"], path)
    rest = {name: value for name, value in saved.items() if name != "shards"}
    return {**rest, "modules": modules, "optimizers": optimizers}


def weights(saved: Mapping[str, Any], path: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """Return the whole weights in a cut by module, read from the shards where it has some. No collective.

    Args:
        saved: the cut.
        path: its file.
    """
    if "shards" not in saved:
        modules: Mapping[str, Mapping[str, Any]] = saved["modules"]
        return modules
    return _read_alone(_weights_only(saved["shards"]), path)[0]


def fitted(saved: Mapping[str, Any], engine: Engine, path: Path | None) -> dict[str, Any]:
    """Return a cut as an engine can load it: as shards only where that holds such."""
    if "shards" not in saved or not isinstance(engine, ShardingEngine):
        return whole(saved, path)
    return {**saved, "optimizers": saved["shards"]["optimizers"]}  # what there is to tell of them


def load_parts(
    run: Run, saved: Mapping[str, Any], optimizers: Mapping[str, Any], path: Path | None, *, drops_added: bool = False
) -> None:
    """Load the modules and some optimizers of a run from a cut. On several ranks a collective.

    Args:
        run: the run.
        saved: the cut.
        optimizers: by name.
        path: the file of the cut.
        drops_added: whether parameter groups may go that the run has added since.

    Raises:
        ValueError: the optimizers cannot have the parameter groups that they had.
    """
    engine = run.engine
    settle_groups(run, saved, optimizers, drops_added=drops_added)
    if "shards" in saved and isinstance(engine, ShardingEngine):
        rest = saved["shards"] if optimizers else _weights_only(saved["shards"])
        read = partial(_read, folder=shards_of(path), process_group=engine.saving_group())
        engine.load_shard_state(run.modules, optimizers, rest, read)
    else:
        saved = whole(saved, path)
        cast("LoopEngine", engine).unpack(run.modules, optimizers, (saved["modules"], saved["optimizers"]))


def _weights_only(rest: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: facts for name, facts in rest["tensors"].items() if name.startswith("modules/")}
    return {**rest, "optimizers": {}, "tensors": tensors}


def _read_alone(rest: Mapping[str, Any], path: Path | None) -> States:
    """Return whole states as shards hold them; every process reads for itself."""
    tensors = empty(rest)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        _read(tensors, shards_of(path), no_dist=True)
    return joined(tensors, rest)


def _read(tensors: dict[str, Any], folder: Path, **how: Any) -> None:
    """Fill tensors from shards.

    Raises:
        ValueError: these cannot be read; on all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(tensors, checkpoint_id=folder, **how)
    except CheckpointException as error:
        raise ValueError(f"The shards in {folder} cannot be read: {told(error)}") from error


def told(error: CheckpointException) -> str:
    """Return what went wrong on which ranks."""
    return "; ".join(f"rank {rank}: {describe_error(each)}" for rank, (each, _) in error.failures.items())
