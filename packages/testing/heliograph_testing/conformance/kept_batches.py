"""Whether a batch, its outputs or its loss outlive their batch."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from heliograph import BatchEnd, BatchStart, Lane, Plugin, Run, ValidationBatchEnd, ValidationBatchStart, on
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Awaited:
    """Something that is to be gone.

    Attributes:
        what: it is, in words.
        is_gone: whether it is.
        is_same: whether a tensor is it, or shares its memory.
    """

    what: str
    is_gone: Callable[[], bool]
    is_same: Callable[[Tensor], bool]


class BatchWatch(Plugin):
    """Looks whether batches, outputs and losses outlive their batch. To be listed first.

    The loop over batches holds the former one until it has the next, and the former loss is there until the next
    forward. So a batch is gone when the one after the next begins; of the former one, only attributes of the plugin
    are looked at.

    Args:
        plugin: that may keep them.

    Attributes:
        kept: what was kept, in words.
    """

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self._of_batches: defaultdict[str, list[list[Awaited]]] = defaultdict(list)  # by phase, the latest last
        self._numbers = Counter[str]()
        self._place = ""
        self.kept: list[str] = []

    @on(BatchStart, ValidationBatchStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: BatchStart | ValidationBatchStart) -> None:
        """Look for the batches before, and await this one as it was loaded."""
        gc.collect()
        batches = self._of_batches[run.phase]
        for each in batches[-1] if batches else ():
            if (name := self._holder(each)) is not None:
                self.kept.append(f"{each.what} is still in the plugin's attribute {name}")
        if len(batches) > 1:
            self._look(batches.pop(0))
        self._place = f"{run.phase} batch {self._numbers[run.phase]}"
        self._numbers[run.phase] += 1
        batches.append([*self._memories(run)])

    @on(BatchEnd, ValidationBatchEnd, lane=Lane.TRANSFORM)
    def end(self, run: Run, event: BatchEnd | ValidationBatchEnd) -> None:
        """Await the batch as it was used, its outputs and its loss."""
        losses = _tensors(run.loss) if isinstance(event, BatchEnd) else ()
        graphs = (_graph(f"run.loss of {self._place}", loss) for loss in losses)
        self._of_batches[run.phase][-1] += [*self._memories(run), *graphs]

    def look(self) -> None:
        """Look for everything, after the run."""
        gc.collect()
        for batches in self._of_batches.values():
            for batch in batches:
                self._look(batch)

    def _look(self, awaited: list[Awaited]) -> None:
        for each in awaited:
            if not each.is_gone():
                name = self._holder(each)
                where = (
                    "somewhere outside of the plugin's attributes"
                    if name is None
                    else f"in the plugin's attribute {name}"
                )
                self.kept.append(f"{each.what} is still {where}")

    def _holder(self, kept: Awaited) -> str | None:
        for name, value in vars(self._plugin).items():
            if any(map(kept.is_same, _tensors(value))):
                return str(name)
        return None

    def _memories(self, run: Run) -> Iterator[Awaited]:
        for name in ("batch", "outputs"):
            for tensor in _tensors(getattr(run, name)):
                yield _memory(f"run.{name} of {self._place}", tensor)


def _memory(what: str, tensor: Tensor) -> Awaited:
    storage = _weak_storage(tensor)
    return Awaited(what, storage.expired, lambda other: _weak_storage(other).cdata == storage.cdata)


def _weak_storage(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types for it


def _graph(what: str, loss: Tensor) -> Awaited:
    alive = weakref.ref(loss)
    return Awaited(what, lambda: alive() is None, lambda other: other is alive())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
