"""Means over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...events import Engine
from ..metrics import Computed, MetricUpdate
from ..metrics.means import Means, Totals, added, check_scalar
from ..metrics.metric_objects import compute_values, fresh_copy
from ..objects.equality import same


class SharedMeans(Means):
    """Weighted running means over all ranks. Each rank adds its own values; reading, a collective, sums them.

    The sums are added in float64, in the order of the ranks, so all ranks read the same. A rank may lack some names.

    Args:
        engine: connects the ranks.
        note: see `Means`.
    """

    def __init__(self, engine: Engine, note: Callable[[str], None] | None = None) -> None:
        super().__init__(note)
        self._engine = engine
        self._of_ranks: list[list[str]] = []  # the names of the ranks' metric objects

    def for_evaluation(self) -> Means:
        """Return new means for one set of an evaluation, whose values are joined at its end."""
        return Terms(self.note)

    def sums(self) -> dict[str, tuple[float, float]]:
        totals: Totals = {}
        of_ranks: list[tuple[Totals, list[str]]]
        of_ranks = self._engine.gather_objects((super().sums(), list(self._objects)))
        self._of_ranks = [names for _, names in of_ranks]
        for sums, _ in of_ranks:
            totals = added(totals, sums)
        return totals

    def computed(self) -> Computed:
        return compute_together(self._objects, self._of_ranks, self._engine)


def compute_together(objects: dict[str, Any], of_ranks: Sequence[Sequence[str]], engine: Engine) -> Computed:
    """Return the results of metric objects that synchronize themselves in `compute`, as in torchmetrics.

    Every rank calls `compute` of each object, in the same order. A rank without batches uses an empty copy.

    Args:
        objects: by name, on this rank.
        of_ranks: the names on each rank.
        engine: connects the ranks.

    Returns:
        The numbers by name, and the other results by name.

    Raises:
        ValueError: a result differs between ranks.
    """
    names = sorted({name for names in of_ranks for name in names})
    if missing := {name for name in names if not all(name in rank_names for rank_names in of_ranks)}:
        copies: list[dict[str, Any]] = engine.gather_objects(
            {name: _without_samples(metric) for name, metric in objects.items() if name in missing}
        )
        for name in missing - objects.keys():
            objects[name] = deepcopy(next(metrics[name] for metrics in copies if name in metrics))
            if isinstance(objects[name], nn.Module):
                objects[name].to(engine.device)
    if not names:
        return {}, {}
    numbers, objects_computed = compute_values({name: objects[name] for name in names})
    computed: list[dict[str, Any]] = engine.gather_objects({**numbers, **objects_computed})
    for rank, results in enumerate(computed):
        for name, value in computed[0].items():
            if name not in results or not same(results[name], value):
                raise ValueError(
                    f"The metric {name!r} is {value} on rank 0 and {results.get(name)} on rank {rank}: compute() of a "
                    f"metric object must sum its state over the ranks, as in torchmetrics."
                )
    return numbers, objects_computed


def _without_samples(metric: Any) -> Any:
    """Return a copy of a metric object without samples that another rank can synchronize.

    torchmetrics joins lists over the ranks as tensors: an empty list must have their type and dimensions, or the
    collective fails.
    """
    copy = fresh_copy(metric)
    if isinstance(copy, nn.Module):
        for path, part in metric.named_modules():
            empty = copy.get_submodule(path)
            for name, state in getattr(part, "_defaults", {}).items():
                samples = getattr(part, name)
                if isinstance(state, list) and samples and isinstance(samples[0], Tensor) and samples[0].ndim:
                    setattr(empty, name, [samples[0][:0].clone()])
            if hasattr(part, "_update_count"):
                vars(empty)["_update_count"] = 1  # else it warns that it was never updated
    return copy


# Of the values of one name: the numbers of their batches, the values, their weights, and whether they are sums.
Columns = tuple[list[int], Tensor | list[float], list[float], list[bool]]


class Terms(Means):
    """Stores every value of an evaluation, so that all ranks together sum them like a single process."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        super().__init__(note)
        self._entries: dict[str, list[tuple[int, Tensor | float, Tensor | float, bool]]] = {}

    def add(self, name: str, value: Tensor | float | MetricUpdate, weight: float = 1.0) -> None:
        if isinstance(value, MetricUpdate):
            super().add(name, value)
        else:
            self._append(name, value, weight, is_sum=False)

    def add_sum(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self._append(name, total, count, is_sum=True)

    @property
    def objects(self) -> dict[str, Any]:
        return self._objects

    def take(self) -> dict[str, Columns]:
        """Return the values by name and start again; waits for the device once per name."""
        entries, self._entries = self._entries, {}
        taken: dict[str, Columns] = {}
        for name, rows in entries.items():
            batches, values, weights, are_sums = map(list, zip(*rows, strict=True))
            if all(isinstance(value, Tensor) for value in values):
                column: Any = torch.stack(values).cpu()
            else:
                column = [float(value) for value in values]
            taken[name] = batches, column, [float(weight) for weight in weights], are_sums
        return taken

    def _append(self, name: str, value: Tensor | float, weight: Tensor | float, *, is_sum: bool) -> None:
        check_scalar(name, value)
        if isinstance(value, Tensor):
            value = value.detach().reshape(()).clone()
        self._entries.setdefault(name, []).append((self.batch, value, weight, is_sum))


class Merged(Means):
    """The means of all ranks; `together` has the results of their metric objects."""

    together: Computed = ({}, {})

    def computed(self) -> Computed:
        return self.together


def merge_means(
    of_ranks: Sequence[Mapping[str, Columns]], engine: Engine, note: Callable[[str], None] | None = None
) -> Merged:
    """Return the means of a single process that reads the first batch of every rank, then the second of every rank.

    If the batches are dealt out in turn, the result is bitwise identical to that of one process.

    Args:
        of_ranks: the values of each rank.
        engine: its device sums them.
        note: see `Means`.
    """
    means = Merged(note)
    for name in {name: None for columns in of_ranks for name in columns}:
        rows: list[tuple[int, Tensor | float, float, bool]] = []
        for batches, values, weights, are_sums in (columns[name] for columns in of_ranks if name in columns):
            parts = values.to(engine.device).unbind() if isinstance(values, Tensor) else values
            rows += zip(batches, parts, weights, are_sums, strict=True)
        for _, value, weight, is_sum in sorted(rows, key=itemgetter(0)):  # of one batch, by rank
            (means.add_sum if is_sum else means.add)(name, value, weight)
    return means
