"""What an evaluation collects: values by name, of the whole set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ...events import Control, Engine

if TYPE_CHECKING:
    import torch

    from .parts import Parts

Key = tuple[str, str]  # a set, a name


class Collected(dict[str, Any]):
    """What was collected, by name; `<set>/<name>` for a named set."""

    def __missing__(self, name: str) -> NoReturn:
        names = f"there are {', '.join(map(repr, self))}" if self else "there is nothing"
        raise KeyError(
            f"Nothing was collected as {name!r}; {names}. A step calls run.collect({name!r}, value), and handlers of "
            f"the end of the validation, test or prediction read run.collected."
        )


def running(collection: Collection | None, control: Control) -> Collection:
    """Return what the running evaluation collects.

    Raises:
        RuntimeError: none runs.
    """
    if collection is None or not control.is_evaluating:
        raise RuntimeError(
            "run.collect is for the batches of a validation, test or prediction: call it in validation_step, test_step "
            "or predict_step, or in a handler of their events. In a training, run.track averages."
        )
    return collection


def whole_of(collection: Collection | None) -> Collected:
    """Return what an evaluation has collected, once all of its sets are done."""
    return Collected() if collection is None else collection.whole


class Collection:
    """What is collected while an evaluation runs.

    Args:
        rank: this process among `world_size`, to which the batches of a set are dealt out in turn.
        world_size: how many processes there are.
        low: the dtype of autocast, in which nothing is kept; None without autocast.

    Attributes:
        dataset: the set that is read.
        is_dealt: whether its batches are dealt out to the ranks.
        batch: how many batches of it this process had before the one in hand; None before the first set and after the
            last.
        whole: what was collected, when all sets are done.
    """

    def __init__(self, rank: int, world_size: int, low: torch.dtype | None = None) -> None:
        self.dataset, self.is_dealt, self.whole = "", True, Collected()
        self.batch: int | None = None
        self._rank, self._world_size, self._low = rank, world_size, low
        self._parts: dict[Key, Parts] = {}

    @property
    def number(self) -> int:
        """The number of the batch in hand, in the order of the data."""
        assert self.batch is not None
        return self.batch * self._world_size + self._rank

    @property
    def place(self) -> str:
        """Where the evaluation is, in words: ` (batch 4 of set 'a')`; empty outside of its batches."""
        if self.batch is None:
            return ""
        return f" (batch {self.batch}{f' of set {self.dataset!r}' if self.dataset else ''})"

    def add(self, name: str, value: Any, size: int) -> None:
        """Keep a copy of a value of the batch in hand, on the CPU.

        Args:
            name: what it is called.
            value: see `heliograph.Run.collect`.
            size: the samples of the batch.

        Raises:
            RuntimeError: there is no batch in hand.
            TypeError: the value is of a type that cannot be joined.
            ValueError: the name is not one, or the value is not like those before; its place in the order of the data
                is unknown.
        """
        if self.batch is None:
            raise RuntimeError("run.collect is for a batch: call it in the step, or in a handler of a batch's events.")
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"run.collect takes a name without '/', such as 'logits'; got {name!r}.")
        self.check_order("collected")
        value = self.widen(value)
        parts = self._parts.get((self.dataset, name))
        if parts is None:
            parts = self._parts[self.dataset, name] = _parts(name)
        parts.add(self.number, value, size)

    def widen(self, value: Any) -> Any:
        """Return outputs in float32 that autocast has computed in fewer bits, which NumPy may not know."""
        if self._low is None:
            return value
        from .parts import mapped

        return mapped(value, lambda tensor: tensor.float() if tensor.dtype == self._low else tensor)

    def check_order(self, done: str) -> None:
        """Raise ValueError where nobody knows the place of a batch of this set in the order of the data."""
        if not self.is_dealt:
            called = f"set {self.dataset!r}" if self.dataset else "loader"
            raise ValueError(
                f"The {called} is read by each of {self._world_size} ranks as it is, so what is {done} of it has no "
                f"order, and may be there several times. Give a list, a dataset with loader_params, or a DataLoader of "
                f"a map-style dataset without a sampler for ranks: its batches are dealt out."
            )

    @property
    def keys(self) -> list[Key]:
        """The sets and names of which this process has collected something."""
        return list(self._parts)

    def join(self) -> None:
        """Join what was collected."""
        self._finish({key: parts.join() for key, parts in self._parts.items()})

    def gather(self, keys: Iterable[Key], engine: Engine) -> None:
        """Join what all ranks have collected. A collective.

        Args:
            keys: what any rank has collected, the same on all of them.
            engine: connects the ranks.
        """
        self._finish({key: self._parts.get(key, _parts(key[1])).gather(engine) for key in sorted(keys)})

    def hold(self, dataset: str, values: Mapping[str, Any]) -> None:
        """Add what was computed of a whole set, by name; what was collected under the same name stays."""
        self.whole = Collected({_named(dataset, name): each for name, each in values.items()} | self.whole)

    def _finish(self, joined: dict[Key, Any]) -> None:
        self._parts.clear()
        self.whole.update({_named(*key): each for key, each in joined.items()})


def _named(dataset: str, name: str) -> str:
    return f"{dataset}/{name}" if dataset else name


def _parts(name: str) -> Parts:
    from .parts import Parts  # loaded where something is collected

    return Parts(f"run.collect({name!r}, ...)")
