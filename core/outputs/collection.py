"""The values that an evaluation collects with `run.collect`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ...events import Control, Engine
from ..metrics.means import for_tensors

if TYPE_CHECKING:
    import torch

    from .parts import OutputParts

Key = tuple[str, str]  # (set, name)


class Collected(dict[str, Any]):
    """Collected values by name; `<set>/<name>` for a named set."""

    def __missing__(self, name: str) -> NoReturn:
        names = f"collected: {', '.join(map(repr, self))}" if self else "nothing was collected"
        raise KeyError(
            f"There is no collected value {name!r}; {names}. Call run.collect({name!r}, value) in a step, and read "
            f"run.collected at the end of the validation, test or prediction."
        )


def running(collection: Collection | None, control: Control) -> Collection:
    # The collection of the running evaluation.
    if collection is None or not control.is_evaluating:
        raise RuntimeError(
            "run.collect needs a batch of a validation, test or prediction: call it in validation_step, test_step or "
            "predict_step, or in a handler of their events. In a training, use run.track, which averages."
        )
    return collection


def whole_of(collection: Collection | None) -> Collected:
    return Collected() if collection is None else collection.whole


class Collection:
    """The values that an evaluation collects.

    Args:
        rank: of this process, among `world_size` processes that share the batches of a set in turn.
        world_size: the number of processes.
        low: the dtype of autocast, in which nothing is stored; None without autocast.

    Attributes:
        dataset: the current set.
        is_dealt: whether its batches are divided among the ranks.
        batch: the number of batches of the set on this process before the current one; None outside of the sets.
        whole: the collected values, after all sets are complete.
    """

    def __init__(self, rank: int, world_size: int, low: torch.dtype | None = None) -> None:
        self.dataset, self.is_dealt, self.whole = "", True, Collected()
        self.batch: int | None = None
        self._rank, self._world_size, self._low = rank, world_size, low
        self._parts: dict[Key, OutputParts] = {}

    @property
    def number(self) -> int:
        assert self.batch is not None
        return self.batch * self._world_size + self._rank

    @property
    def place(self) -> str:
        # For error messages: ` (batch 4 of set 'a')`; empty outside of the batches.
        if self.batch is None:
            return ""
        return f" (batch {self.batch}{f' of set {self.dataset!r}' if self.dataset else ''})"

    def add(self, name: str, value: Any, size: int) -> None:
        """Store a copy of a value of the current batch, on the CPU.

        Args:
            name: of the value.
            value: see `heliograph.Run.collect`.
            size: the samples of the batch.

        Raises:
            RuntimeError: there is no current batch.
            TypeError: values of this type cannot be joined.
            ValueError: the name is invalid, the value differs in structure from earlier ones, or its position in the
                order of the data is unknown.
        """
        if self.batch is None:
            raise RuntimeError(
                "run.collect needs a current batch: call it in the step, or in a handler of the events of a batch."
            )
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"run.collect takes a name without '/', such as 'logits'; got {name!r}.")
        self.check_order("collected")
        value = self.widen(value)
        parts = self._parts.get((self.dataset, name))
        if parts is None:
            parts = self._parts[self.dataset, name] = _parts(name)
        parts.add(self.number, value, size)

    def widen(self, value: Any) -> Any:
        # NumPy may not have the dtype of autocast.
        if self._low is None:
            return value
        return for_tensors(lambda tensor: tensor.float() if tensor.dtype == self._low else tensor, value)

    def check_order(self, done: str) -> None:
        if not self.is_dealt:
            called = f"set {self.dataset!r}" if self.dataset else "loader"
            raise ValueError(
                f"All {self._world_size} ranks read the whole {called}, so the {done} values have no order and may be "
                f"duplicates. Give a list, a dataset with loader_params, or a DataLoader of a map-style dataset "
                f"without a distributed sampler: these are divided among the ranks."
            )

    @property
    def keys(self) -> list[Key]:
        return list(self._parts)

    def join(self) -> None:
        self._finish({key: parts.join() for key, parts in self._parts.items()})

    def gather(self, keys: Iterable[Key], engine: Engine) -> None:
        """Join what all ranks have collected. A collective.

        Args:
            keys: the union over all ranks, the same on each.
            engine: connects the ranks.
        """
        self._finish({key: self._parts.get(key, _parts(key[1])).gather(engine) for key in sorted(keys)})

    def hold(self, dataset: str, values: Mapping[str, Any]) -> None:
        # A value that was collected under the same name wins.
        self.whole = Collected({_named(dataset, name): value for name, value in values.items()} | self.whole)

    def _finish(self, joined: dict[Key, Any]) -> None:
        self._parts.clear()
        self.whole.update({_named(*key): value for key, value in joined.items()})


def _named(dataset: str, name: str) -> str:
    return f"{dataset}/{name}" if dataset else name


def _parts(name: str) -> OutputParts:
    from .parts import OutputParts  # loaded when something is collected

    return OutputParts(f"run.collect({name!r}, ...)")
