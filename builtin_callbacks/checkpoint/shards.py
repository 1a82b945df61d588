"""A save to which every rank adds its shards, through `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.checkpoint.state.ranks import cause_of
from ...core.checkpoint.storage.files import digest_of
from ...core.engines.sharded.states import ShardingEngine

Shards = dict[str, tuple[int, str]]  # bytes and digest of files, by name
INDEX = ".metadata"  # written by rank 0 when all others have written


def begin(
    engine: ShardingEngine, tensors: Mapping[str, Tensor], folder: Path, rank: int, *, in_background: bool
) -> Callable[[], Shards]:
    """Return what writes this rank's shards, all ranks together, and returns what was written. A collective.

    Args:
        engine: holds the shards.
        tensors: of this rank, by name.
        folder: where they go; every rank must see it.
        rank: this one.
        in_background: copy the tensors now, and write them in the background.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    # What is on all ranks is the main rank's to write, as in a checkpoint without shards: buffers may differ.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    how: dict[str, Any] = {"checkpoint_id": folder, "planner": planner, "process_group": engine.saving_group()}
    write: Callable[[], object] = partial(save, dict(tensors), **how)
    if in_background:
        saving = async_save(dict(tensors), **how)
        assert isinstance(saving, Future)
        write = saving.result
    return partial(_written, write, folder, rank)


def room_for(tensors: Mapping[str, Tensor], *, is_main: bool) -> int:
    """Return how many bytes this rank will write: its shards, and of what all ranks have, the main rank's."""
    from torch.distributed.tensor import DTensor

    own = [each.to_local() if isinstance(each, DTensor) else each for each in tensors.values()]
    shards = [isinstance(each, DTensor) for each in tensors.values()]
    return sum(each.nbytes for each, shard in zip(own, shards, strict=True) if shard or is_main)


def merge_shards(of_ranks: list[Shards]) -> Shards:
    """Return the files that all ranks have written."""
    return {name: facts for shards in of_ranks for name, facts in shards.items()}


def _written(write: Callable[[], Any], folder: Path, rank: int) -> Shards:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        write()
    except CheckpointException as error:
        raise OSError(f"The shards of a checkpoint could not be written to {folder}: {cause_of(error)}") from error
    files = [*folder.glob(f"__{rank}_*"), *([folder / INDEX] if rank == 0 else [])]
    return {file.name: digest_of(file) for file in files}
