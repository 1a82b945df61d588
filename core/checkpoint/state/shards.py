"""States that ranks saved as shards: how they come back to engines that hold shards, and to those that do not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ....events import Engine, Run
from ....events.errors import describe_error
from ...engines.sharded.states import ShardingEngine, States, empty, joined
from .parameter_groups import settle_groups

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

    from ...engines.contract import LoopEngine


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
