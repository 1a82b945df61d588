"""Ray datasets as loaders: materialized ones are entered anywhere, others are executed as they are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import default_convert

from ....core.data.loaders import made
from ....core.data.sources.contract import Known
from ....core.system.extras import require
from ....events.checks import check_whole_number
from .columns import Columns, batcher, chosen, digest, joined, length
from .dealt_rows import USER, columns_of
from .execution import copied
from .stream import RayStream

TAKEN = ("batch_size", "shuffle", "sampler", "drop_last", "as_ranks", "draws_per", "columns", "collate_fn")
COMPARED = 1000  # rows that the digest of a dataset is made of, evenly spread


def loader_of(dataset: Any, params: Mapping[str, Any] | None, split: str) -> Any:
    """Return a loader of a Ray dataset.

    Raises:
        TypeError: nothing says how to batch it.
        ValueError: a parameter is not for Ray datasets, or not for one that is executed as it is read.
    """
    if params is None:
        raise TypeError(
            f"The {split} loader is a Ray dataset: say how to batch it, loader_params={{'batch_size': 32}}."
        )
    _check(params, split)
    names, collate_fn = params.get("columns"), params.get("collate_fn")
    if isinstance(dataset, require("ray.data.dataset", USER, extra="ray").MaterializedDataset):
        rows = RayRows(dataset, names, collate_fn)
        return made(rows, {**params, "num_workers": 0, "collate_fn": collate_fn or default_convert}, split)
    if params.get("shuffle") or params.get("sampler") is not None:
        raise ValueError(
            f"The {split} dataset is executed as it is read, so its order is its own: shuffle with Ray, as in "
            f"ds.random_shuffle(seed=ray.data.RandomSeedConfig(1)), or give ds.materialize()."
        )
    drop_last = params.get("drop_last", False)
    return RayStream(dataset, params.get("batch_size", 1), drop_last=drop_last, columns=names, collate_fn=collate_fn)


class RayDatasets:
    """The adapter of Ray datasets, see `heliograph.core.data.loaders.Adapter`."""

    loader = staticmethod(loader_of)

    @staticmethod
    def accepts(data: Any) -> bool:
        """Return whether something is a dataset of Ray Data."""
        module = sys.modules.get("ray.data")
        return module is not None and isinstance(data, module.Dataset)


class RayRows(Known):
    """A materialized dataset: every process maps all of it into its memory, which the processes of a node share."""

    def __init__(self, dataset: Any, names: Sequence[str] | None, collate_fn: Callable[[Columns], Any] | None) -> None:
        ray = require("ray", USER, extra="ray")
        bundles = copied(dataset).iter_internal_ref_bundles()
        blocks = map(columns_of, ray.get([entry.ref for bundle in bundles for entry in bundle.blocks]))
        self._blocks = [_named(columns, names) for columns in blocks if length(columns)]
        self._ends = np.cumsum([length(columns) for columns in self._blocks])
        self._batch = batcher(names, None) if collate_fn is None else lambda columns: columns
        spread = np.linspace(0, max(0, len(self) - 1), min(len(self), COMPARED), dtype=np.int64)
        self.facts = {"digest": digest(self._taken(spread)) if len(self) else ""}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._blocks else 0

    def __getitems__(self, indices: list[int]) -> Any:
        return self._batch(self._taken(np.asarray(indices)))

    def _taken(self, numbers: Any) -> Columns:
        """Return rows by their numbers, in that order."""
        of_block = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(of_block, kind="stable")
        pieces = []
        for block in np.unique(of_block):
            first = self._ends[block] - length(self._blocks[block])
            pieces.append(chosen(self._blocks[block], numbers[of_block == block] - first))
        return joined(pieces) if len(pieces) == 1 else chosen(joined(pieces), np.argsort(order))


def _named(columns: Columns, names: Sequence[str] | None) -> Columns:
    for missing in set(names or ()) - columns.keys():
        raise ValueError(f"loader_params['columns'] names {missing!r}; the Ray dataset has {sorted(columns)}.")
    return columns if names is None else {name: columns[name] for name in names}


def _check(params: Mapping[str, Any], split: str) -> None:
    for name in params.keys() - set(TAKEN):
        if params[name]:
            raise ValueError(
                f"loader_params[{name!r}] is not for the {split} dataset, which is Ray's: Ray loads ahead by itself, "
                f"in processes of its own."
            )
    names = params.get("columns")
    check_whole_number("loader_params['batch_size'] of a Ray dataset", params.get("batch_size", 1), at_least=1)
    if names is not None and (isinstance(names, str) or not names or not all(isinstance(each, str) for each in names)):
        raise ValueError(f"loader_params['columns'] takes names such as ('image', 'label'), got {names!r}.")
    if params.get("draws_per") == "sample":
        raise ValueError("A Ray dataset draws in processes of Ray's, and only its collate_fn here: keyed by batch.")
