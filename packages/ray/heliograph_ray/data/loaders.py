"""Ray datasets as loaders: materialized datasets are indexed, others are streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from heliograph.core.data.loaders import make_loader as make_torch_loader
from heliograph.core.data.source import FactsDataset
from heliograph.spi import check_whole_number, require
from torch.utils.data import default_convert

from .stream import (
    PURPOSE,
    Columns,
    RayStream,
    block_columns,
    concatenate,
    copy_dataset,
    digest,
    length,
    make_batcher,
    select_rows,
)

ALLOWED = ("batch_size", "shuffle", "sampler", "drop_last", "draws_per", "columns", "collate_fn")
DIGEST_ROWS = 1000  # in the digest of a dataset, evenly spaced


def make_loader(dataset: Any, params: Mapping[str, Any] | None, split: str) -> Any:
    if params is None:
        raise TypeError(
            f"The {split} loader is a Ray dataset, which needs a batch size: loader_params={{'batch_size': 32}}."
        )
    _check(params, split)
    names, collate_fn = params.get("columns"), params.get("collate_fn")
    if isinstance(dataset, require("ray.data.dataset", PURPOSE, extra="ray").MaterializedDataset):
        rows = RayRows(dataset, names, collate_fn)
        return make_torch_loader(rows, {**params, "num_workers": 0, "collate_fn": collate_fn or default_convert}, split)
    if params.get("shuffle") or params.get("sampler") is not None:
        raise ValueError(
            f"The {split} dataset is streamed, so the loader cannot choose its order: shuffle with Ray, "
            f"as in ds.random_shuffle(seed=ray.data.RandomSeedConfig(1)), or pass ds.materialize()."
        )
    drop_last = params.get("drop_last", False)
    return RayStream(dataset, params.get("batch_size", 1), drop_last=drop_last, columns=names, collate_fn=collate_fn)


class RayDatasets:
    """The adapter of Ray datasets, see `heliograph.core.data.loaders.Adapter`."""

    loader = staticmethod(make_loader)

    @staticmethod
    def accepts(data: Any) -> bool:
        module = sys.modules.get("ray.data")
        return module is not None and isinstance(data, module.Dataset)


class RayRows(FactsDataset):
    """A materialized dataset. Every process maps it into memory; processes of a node share the pages."""

    def __init__(self, dataset: Any, names: Sequence[str] | None, collate_fn: Callable[[Columns], Any] | None) -> None:
        ray = require("ray", PURPOSE, extra="ray")
        bundles = copy_dataset(dataset).iter_internal_ref_bundles()
        blocks = map(block_columns, ray.get([entry.ref for bundle in bundles for entry in bundle.blocks]))
        self._blocks = [_named(columns, names) for columns in blocks if length(columns)]
        self._ends = np.cumsum([length(columns) for columns in self._blocks])
        self._batch = make_batcher(names, None) if collate_fn is None else lambda columns: columns
        rows = np.linspace(0, max(0, len(self) - 1), min(len(self), DIGEST_ROWS), dtype=np.int64)
        self.facts = {"digest": digest(self._select(rows)) if len(self) else ""}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._blocks else 0

    def __getitems__(self, indices: list[int]) -> Any:
        return self._batch(self._select(np.asarray(indices)))

    def _select(self, indices: Any) -> Columns:
        blocks = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(blocks, kind="stable")
        pieces = []
        for block in np.unique(blocks):
            first = self._ends[block] - length(self._blocks[block])
            pieces.append(select_rows(self._blocks[block], indices[blocks == block] - first))
        return concatenate(pieces) if len(pieces) == 1 else select_rows(concatenate(pieces), np.argsort(order))


def _named(columns: Columns, names: Sequence[str] | None) -> Columns:
    for missing in set(names or ()) - columns.keys():
        raise ValueError(f"loader_params['columns'] names {missing!r}; the Ray dataset has {sorted(columns)}.")
    return columns if names is None else {name: columns[name] for name in names}


def _check(params: Mapping[str, Any], split: str) -> None:
    for name in params.keys() - set(ALLOWED):
        if params[name]:
            raise ValueError(
                f"loader_params[{name!r}] is not supported for the {split} dataset: Ray prefetches it in its own "
                f"processes. Allowed: {', '.join(ALLOWED)}."
            )
    names = params.get("columns")
    check_whole_number("loader_params['batch_size'] of a Ray dataset", params.get("batch_size", 1), at_least=1)
    if names is not None and (isinstance(names, str) or not names):
        raise ValueError(f"loader_params['columns'] takes names such as ('image', 'label'), got {names!r}.")
    if params.get("draws_per") == "sample":
        raise ValueError(
            "draws_per='sample' is not supported for a Ray dataset: only its collate_fn draws random numbers in this "
            "process. Use 'batch'."
        )
