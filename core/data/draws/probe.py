"""Finding state that a dataset hides from the keys of its draws: a batch is loaded twice, and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from ....events.errors import describe_error
from .equality import same
from .held_generators import Held, Traced

if TYPE_CHECKING:
    pass

_ROOM = 4096  # bytes for what was found, which a worker process writes into shared memory
LEFT_OUT = "RNGCapture(probe=False)"
NOT_COMPARED = "was not loaded twice and compared, so hidden state in it was not found"
HIDDEN = (
    "{} loads the same batch differently each time: it holds state that no key reaches (a counter, a cache of what was "
    "drawn, a hidden generator, the clock, os.urandom)"
)
_PLAIN = (TensorDataset, list, tuple)
_AROUND = {Subset: "dataset", ConcatDataset: "datasets", StackDataset: "datasets"}


class Probe:
    """Compares two loads of one batch under one key, in the process that loads it; of several workers, the first.

    Compared are the batches, and the states of the generators afterwards: a number out of a cache is not drawn.

    Args:
        name: of the dataset.
        shared: whether another process is to compare.
        limit: seconds that a worker may take for a batch, 0 for any.
    """

    def __init__(self, name: str, *, shared: bool, limit: float = 0) -> None:
        self._name, self.limit = name, limit
        self._words: Tensor = torch.zeros(_ROOM, dtype=torch.uint8)
        if shared:
            self._words.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation here

    def compare(self, first: Traced, load: Callable[[], Any], elsewhere: Callable[[], Any] | None, held: Held) -> None:
        """Load a batch again.

        Args:
            first: what came the first time.
            load: loads it again under the same key.
            elsewhere: loads it under another key, where the dataset was changed by the first load.
            held: the generators of the dataset.
        """
        began = perf_counter()
        sentences = held.unkeyed(self._name)
        try:
            is_pure = _is_pure(first, load, elsewhere, held)
        except Exception as error:  # noqa: BLE001  # the run has its batch; what is not known is said
            sentences.append(f"{self._name} {NOT_COMPARED}: {describe_error(error)}")
        else:
            sentences += [] if is_pure else [HIDDEN.format(self._name)]
        self._write(perf_counter() - began, sentences)

    def is_due(self) -> bool:
        """Return whether it is this process that compares."""
        worker = get_worker_info()
        return worker is None or worker.id == 0

    def leave_out(self, reason: str, held: Held | None = None) -> None:
        """Say why nothing is loaded twice."""
        known = [] if held is None else held.unkeyed(self._name)
        self._write(0.0, [*known, f"{self._name} {NOT_COMPARED}: {reason}"])

    def read(self) -> tuple[float, list[str]]:
        """Return the seconds that it took, and a sentence for each thing that was found."""
        words = bytes(self._words.numpy()).rstrip(b"\0")
        seconds, *sentences = json.loads(words if words.startswith(b"[") else b"[0.0]")
        return seconds, sentences

    def _write(self, seconds: float, sentences: list[str]) -> None:
        text = [each[:500] for each in sentences]
        while len(words := json.dumps([seconds, *text]).encode()) > _ROOM:
            text.pop(0)
        written = torch.frombuffer(bytearray(words.ljust(_ROOM, b"\0")), dtype=torch.uint8)
        self._words[1:] = written[1:]
        self._words[0] = written[0]  # last: until then there is nothing for another process to read


def _is_pure(first: Traced, load: Callable[[], Any], elsewhere: Callable[[], Any] | None, held: Held) -> bool:
    """Return whether nothing of the first load shows in a later one."""
    again = held.traced(load)
    if not same(first.loaded, again.loaded) or not same(first.states, again.states):
        return False
    if elsewhere is None or not held.has_drawn(first):
        return True
    return not same(first.loaded, elsewhere())  # what is drawn each time may still have been kept from the first


def is_plain(dataset: Any, collate: Any) -> bool:
    """Return whether nothing in a dataset can draw or change: tensors and lists, or subsets of such, simply stacked."""
    return collate in (default_collate, default_convert) and _holds_only(dataset)


def _holds_only(dataset: Any) -> bool:
    kind = type(dataset)
    if kind not in _AROUND:
        return kind in _PLAIN
    inner = getattr(dataset, _AROUND[kind])
    if kind is Subset:
        return type(dataset.indices) in (list, range, tuple) and _holds_only(inner)
    return all(map(_holds_only, inner.values() if isinstance(inner, dict) else inner))
