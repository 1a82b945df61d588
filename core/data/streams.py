"""`Streams`: several training loaders at once, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import Any, Self

from ...events import Engine
from ...events.checks import check_number, check_whole_number, known_names
from ...events.signatures import show_attributes
from .order.shares import Share
from .order.sizes import length_of
from .sources.choice import source_of
from .sources.contract import Source, Sourced
from .sources.limited import Limit, Limited
from .sources.streams import MODES, Mixture, Mode, StreamsSource, Weighted


class Streams(Sourced):
    """Several streams of training data by name: `fit(task, Streams({"digit": a, "parity": b}, mode="min"))`.

    A batch is a dict with a batch of each stream, `{"digit": ..., "parity": ...}`; with `weighted`, it is a batch of
    one stream, and `run.data.stream` is its name. A dict is the short form of `Streams` with the default mode.

    Args:
        streams: a dataset, a loader or a list of batches for each name.
        mode: `cycle` (the default): the longest stream ends the epoch, and the others begin again, in another order;
            `min`: the shortest ends it; `max`: the longest ends it, and None takes the place of a stream that is over;
            `weighted`: each batch is of one stream, drawn by `weights`, and a stream that is over begins again.
        weights: with `weighted`, how often each stream is drawn, in proportion to the others; by default as many
            batches as each has.
        length: with `cycle` and `weighted`, the batches of an epoch, of each process; by default those of the longest,
            or with `weighted` those of all together. Necessary where a stream has no length.

    Raises:
        TypeError: the streams are not given by name.
        ValueError: an argument is out of its range, or is not for this mode.
    """

    __repr__ = show_attributes

    def __init__(
        self,
        streams: Mapping[str, Any],
        *,
        mode: Mode = "cycle",
        weights: Mapping[str, float] | None = None,
        length: int | None = None,
    ) -> None:
        if not isinstance(streams, Mapping):
            raise TypeError(f"Streams takes loaders or datasets by name, {{'digit': a, 'parity': b}}, got {streams!r}.")
        for name in streams:
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(f"The name of a train stream is a text without '/', got {name!r}.")
        if not streams:
            raise ValueError("Streams takes at least one loader or dataset, by its name.")
        if mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}; got {mode!r}.")
        if length is not None:
            length = check_whole_number("length", length, of="batches", at_least=1)
            if mode in ("min", "max"):
                raise ValueError(f"With mode={mode!r} the streams say how long an epoch is; limit_train= shortens it.")
        self.loaders, self.mode, self.length = dict(streams), mode, length
        self.weights = None if weights is None else _check_weights(weights, streams, mode)
        self._limits: Mapping[str, Limit] = {}
        self._per_sample: Collection[str] = ()

    def made(self, make: Callable[[str, Any], Any], limits: Mapping[str, Limit], per_sample: Collection[str]) -> Self:
        """Return it with loaders.

        Args:
            make: returns the loader of a stream, given its name and what it was given as.
            limits: of some streams, how much of each pass is read.
            per_sample: the streams whose draws are keyed by sample.
        """
        own = copy(self)
        own.loaders = {name: make(name, data) for name, data in self.loaders.items()}
        own._limits, own._per_sample = limits, per_sample
        return own

    def describe(self) -> str:
        """Return the names, with the batches of each as the loaders say, and how they are mixed."""
        lengths = {name: length_of(loader) for name, loader in self.loaders.items()}
        named = [name if length is None else f"{name} ({length} batches)" for name, length in lengths.items()]
        weights = "" if self.weights is None else f" {', '.join(f'{each:g}' for each in self.weights.values())}"
        return f"{', '.join(named)}; {self.mode}{weights}"

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        """Return what reads the share of a process."""
        own: dict[str, Any] = {"mode": self.mode, "streams": sorted(self.loaders)}
        own |= {} if self.weights is None else {"weights": self.weights}
        own |= {} if self.length is None else {"length": self.length}
        weighted = self.mode == "weighted"
        mixture = Weighted(self.weights, self.length) if weighted else Mixture(self.mode, self.length)
        sources = {}
        for name, loader in self.loaders.items():
            keyed_by_sample = name in self._per_sample
            if name in self._limits:
                loader = Limited(loader, self._limits[name], f"train stream {name!r}", per_sample=keyed_by_sample)
            sources[name] = source_of(loader, share, per_sample=keyed_by_sample, engine=engine)
        return StreamsSource(self, sources, mixture, own, share)


def _check_weights(weights: Any, streams: Mapping[str, Any], mode: str) -> dict[str, float]:
    if mode != "weighted":
        raise ValueError(f"weights= is for mode='weighted', got mode={mode!r}.")
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights= takes a number for each stream, {{'digit': 3, 'parity': 1}}, got {weights!r}.")
    for name in weights.keys() - streams.keys():
        raise ValueError(f"weights= has no stream {name!r}.{known_names(str(name), streams)}")
    for name in streams.keys() - weights.keys():
        raise ValueError(f"weights= lacks the stream {name!r}: give the weight of each.")
    return {name: float(check_number(f"weights[{name!r}]", weight, more_than=0)) for name, weight in weights.items()}
