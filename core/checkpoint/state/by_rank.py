"""What of a cut is not the same on all ranks: kept beside the main rank's, so that each rank goes on from its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....events import Engine

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
