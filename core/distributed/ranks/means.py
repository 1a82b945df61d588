"""Means over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....events import Engine
from ...metrics.means import Computed, Means, MetricUpdate, Totals, added, check_scalar, compute_values, fresh_copy
from ...objects.equality import same


class SharedMeans(Means):
    """Weighted running means over all ranks: each adds its own values, and reading, a collective, adds up their sums.

    The sums are added in float64, in the order of the ranks, so all read the same. A rank need not know every name.

    Args:
        engine: connects the ranks.
        note: see `Means`.
    """

    def __init__(self, engine: Engine, note: Callable[[str], None] | None = None) -> None:
        super().__init__(note)
        self._engine = engine
        self._of_ranks: list[list[str]] = []  # the names of their metric objects

    def for_evaluation(self) -> Means:
        """Return new means for one set of an evaluation: its values are added up when all ranks have theirs."""
        return Terms(self.note)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum of all ranks and its weight by name. A collective."""
        totals: Totals = {}
        of_ranks: list[tuple[Totals, list[str]]]
        of_ranks = self._engine.gather_objects((super().sums(), list(self._objects)))
        self._of_ranks = [names for _, names in of_ranks]
        for sums, _ in of_ranks:
            totals = added(totals, sums)
        return totals

    def computed(self) -> Computed:
        """Return what the metric objects of all ranks have computed; after `sums`. A collective."""
        return compute_together(self._objects, self._of_ranks, self._engine)


def compute_together(objects: dict[str, Any], of_ranks: Sequence[Sequence[str]], engine: Engine) -> Computed:
    """Return what metric objects compute together, each of which synchronises itself, as those of torchmetrics do.

    Every rank calls `compute` of each of them, in the same order. A rank that had no batch does it with a copy that has
    added up nothing.

    Args:
        objects: those of this rank, by name.
        of_ranks: the names that each rank has.
        engine: connects the ranks.

    Returns:
        The numbers by name, then what else they compute.

    Raises:
        ValueError: what they compute is not the same on all ranks.
    """
    names = sorted({name for each in of_ranks for name in each})
    if lacking := {name for name in names if not all(name in each for each in of_ranks)}:
        copies: list[dict[str, Any]] = engine.gather_objects(
            {name: _without_samples(each) for name, each in objects.items() if name in lacking}
        )
        for name in lacking - objects.keys():
            objects[name] = deepcopy(next(each[name] for each in copies if name in each))
            if isinstance(objects[name], nn.Module):
                objects[name].to(engine.device)
    if not names:
        return {}, {}
    values, others = compute_values({name: objects[name] for name in names})
    computed: list[dict[str, Any]] = engine.gather_objects({**values, **others})
    for rank, each in enumerate(computed):
        for name, value in computed[0].items():
            if name not in each or not same(each[name], value):
                raise ValueError(
                    f"The metric {name!r} is {value} on rank 0 and {each.get(name)} on rank {rank}: a metric object "
                    f"adds up its state over the ranks in compute(), as those of torchmetrics do."
                )
    return values, others


def _without_samples(metric: Any) -> Any:
    """Return a copy of a metric object that another rank can synchronise, which has no sample.

    Lists of torchmetrics are joined over the ranks as tensors: an empty one must have their type and dimensions, or
    the collective fails.
    """
    own = fresh_copy(metric)
    if isinstance(own, nn.Module):
        for path, part in metric.named_modules():
            empty = own.get_submodule(path)
            for name, state in getattr(part, "_defaults", {}).items():
                kept = getattr(part, name)
                if isinstance(state, list) and kept and isinstance(kept[0], Tensor) and kept[0].ndim:
                    setattr(empty, name, [kept[0][:0].clone()])
            if hasattr(part, "_update_count"):
                vars(empty)["_update_count"] = 1  # or it would warn that it has none
    return own


class Term(NamedTuple):
    """A value of a mean.

    Attributes:
        batch: in which of its rank's batches it was added.
        value: the value itself; a plain number where it was none but a tensor's.
        dtype: the tensor's, None for a plain number.
        device: the kind of device that the tensor was on.
        weight: how many samples it is of.
        is_sum: whether it is the sum over these, not the mean.
    """

    batch: int
    value: float
    dtype: torch.dtype | None
    device: str
    weight: float
    is_sum: bool


Kept = tuple[int, Tensor | float, Tensor | float, bool]


class Terms(Means):
    """Keeps every value of an evaluation on one of several ranks, so that they add up as one process would add them."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        super().__init__(note)
        self._kept: dict[str, list[Kept]] = {}

    def add(self, name: str, value: Tensor | float | MetricUpdate, weight: float = 1.0) -> None:
        """Keep a value with its weight, on its device; or update a metric object."""
        if isinstance(value, MetricUpdate):
            super().add(name, value)
        else:
            self._keep(name, value, weight, is_sum=False)

    def add_sum(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Keep a sum with its count."""
        self._keep(name, total, count, is_sum=True)

    @property
    def objects(self) -> dict[str, Any]:
        """The metric objects by name."""
        return self._objects

    def take(self) -> dict[str, list[Term]]:
        """Return the values by name, and start again; waits for the device once for each name."""
        kept, self._kept = self._kept, {}
        return {name: _terms(each) for name, each in kept.items()}

    def _keep(self, name: str, value: Tensor | float, weight: Tensor | float, *, is_sum: bool) -> None:
        check_scalar(name, value)
        if isinstance(value, Tensor):
            value = value.detach().reshape(()).clone()
        self._kept.setdefault(name, []).append((self.batch, value, weight, is_sum))


class Merged(Means):
    """The means of all ranks.

    Attributes:
        together: what their metric objects have computed.
    """

    together: Computed = ({}, {})

    def computed(self) -> Computed:
        """Return it."""
        return self.together


def merge_means(
    of_ranks: Sequence[Mapping[str, Iterable[Term]]], engine: Engine, note: Callable[[str], None] | None = None
) -> Merged:
    """Return the means of one process that read all batches: the first of every rank, then the second of every rank.

    That is bit for bit what it would have come to, where the batches are dealt out in turn.

    Args:
        of_ranks: what each rank kept, by rank.
        engine: where they are added up.
        note: see `Means`.
    """
    means = Merged(note)
    for name in {name: None for terms in of_ranks for name in terms}:
        terms = [term for each in of_ranks for term in each.get(name, ())]
        for kind, group in groupby(sorted(terms, key=attrgetter("batch")), key=attrgetter("dtype", "device")):
            same_kind = list(group)
            for value, term in zip(_values(same_kind, *kind, engine), same_kind, strict=True):
                (means.add_sum if term.is_sum else means.add)(name, value, term.weight)
    return means


def _terms(kept: list[Kept]) -> list[Term]:
    terms = []
    for kind, group in groupby(kept, key=lambda each: _kind(each[1])):
        same_kind = list(group)
        values = [value for _, value, _, _ in same_kind]
        plain = torch.stack(values).tolist() if kind[0] is not None else values  # type: ignore[arg-type]  # all tensors
        terms += [
            Term(batch, value, *kind, float(weight), is_sum)
            for (batch, _, weight, is_sum), value in zip(same_kind, plain, strict=True)
        ]
    return terms


def _kind(value: Tensor | float) -> tuple[torch.dtype | None, str]:
    return (value.dtype, value.device.type) if isinstance(value, Tensor) else (None, "")


def _values(terms: list[Term], dtype: torch.dtype | None, device: str, engine: Engine) -> Sequence[Tensor | float]:
    """Return the values as they were."""
    plain = [term.value for term in terms]
    if dtype is None:
        return plain
    where = engine.device if device == engine.device.type else device
    return torch.tensor(plain, dtype=dtype, device=where).unbind()
