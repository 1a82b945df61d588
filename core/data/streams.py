"""`Streams`: several named training loaders as one source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from ...events import Engine, Progress
from ...events.checks import check_number, check_whole_number
from ...events.progress import worst
from ...events.signatures import show_attributes
from .limited import Limit, Limited, left_early
from .rng import digest
from .sizes import Share, length_of
from .source import SEEKED, Certainty, Reading, Source, Sourced, nested
from .source_choice import source_of

Mode = Literal["cycle", "min", "max", "weighted"]
MODES: tuple[Mode, ...] = get_args(Mode)
OVER: Any = object()
Position = tuple[int, int, bool]  # completed passes of the epoch, batches of the current pass, whether it is the end
BEGIN: Position = (0, 0, False)


class Mixture:
    """The streams of each batch of an epoch: one of every stream, or with `weighted`, one of a drawn stream.

    The draws of an epoch are a function of seed, epoch and position, all computed at once: the positions of the streams
    need no data, and about 0.1 s for a million batches.

    Args:
        mode: its name.
        batches: the length of an epoch; by default of the longest or shortest stream, with `weighted` the sum of all.
        weights: with `weighted`, of each stream; None for its number of batches.

    Attributes:
        wraps: whether an exhausted stream starts over.
        is_weighted: whether a batch is of one stream.
    """

    def __init__(self, mode: Mode, batches: int | None, weights: Mapping[str, float] | None) -> None:
        self.mode, self._batches, self._weights = mode, batches, weights
        self.wraps, self.is_weighted = mode in ("cycle", "weighted"), mode == "weighted"
        self._names: list[str] = []
        self._ends: npt.NDArray[np.float64] = np.zeros(0)
        self._chosen: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def length(self, lengths: Mapping[str, int | None]) -> int | None:
        """Return the batches of an epoch for the given lengths of the streams; None if unknown.

        Raises:
            ValueError: it is unknown, but the mode needs it.
        """
        self._names = sorted(lengths)  # the draws must not depend on the order of the arguments
        shares: Mapping[str, float | None] = lengths if self._weights is None else self._weights
        self._ends = np.cumsum([float(shares[name] or 0) for name in self._names])
        if self._batches is not None:
            return self._batches
        unknown = [name for name, length in lengths.items() if length is None]
        if unknown and self.wraps:
            raise ValueError(
                f"mode={self.mode!r} needs the length of an epoch, but the stream {unknown[0]!r} has no length: give "
                f"the batches of an epoch, Streams(..., length=1000), or use mode='min' or 'max'."
            )
        total = sum if self.is_weighted else min if self.mode == "min" else max
        return None if unknown else total([length or 0 for length in lengths.values()])

    def begin(self, seed: int, epoch: int, length: int | None) -> None:
        """Draw the streams of the batches of an epoch, if necessary."""
        if self.is_weighted:
            key = int.from_bytes(digest(seed, epoch, size=16, purpose=b"choice"), "little")
            drawn = np.random.Generator(np.random.PCG64(key)).random(length or 0)
            chosen = np.searchsorted(self._ends[:-1], drawn * self._ends[-1], side="right")
            self._chosen = chosen.astype(np.int32)

    def chosen(self, batch: int) -> str | None:
        # None if a batch has all streams.
        return self._names[int(self._chosen[batch])] if self.is_weighted else None

    def taken(self, stream: str, batch: int) -> int:
        # The batches of a stream in the first `batch` batches of the epoch.
        if not self.is_weighted:
            return batch
        return int(np.count_nonzero(self._chosen[:batch] == self._names.index(stream)))


class Stream:
    """A stream and its position.

    Args:
        name: of the stream.
        source: reads the stream.
        mode: of the mixture.
        wraps: whether it starts over within an epoch.

    Attributes:
        position: the current one.
    """

    def __init__(self, name: str, source: Source, mode: str, *, wraps: bool) -> None:
        self.name, self.source, self.position = name, source, BEGIN
        self._mode, self._wraps = mode, wraps
        self._reading: Reading | None = None
        self._first = 0
        self._batches: Iterator[Any] | None = None
        self._key = int.from_bytes(digest(*name.encode(), size=7, purpose=b"stream"), "little")

    @property
    def is_replayed(self) -> bool:
        # Whether reaching its position needs a replay.
        return self.is_within and self.source.certainty()[0] == "replayed"

    @property
    def is_within(self) -> bool:
        # Whether it is within a pass.
        (_, batch, is_over), length = self.position, self.source.length
        return batch > 0 and not is_over and (length is None or batch < length)

    def place(self, reading: Reading, passes: int, position: Position) -> None:
        # Sets the position within an epoch of at most `passes` passes; reads nothing.
        seed = int.from_bytes(digest(reading.seed, self._key, size=7, purpose=b"stream"), "little")
        self._reading, self._first = replace(reading, seed=seed), reading.epoch * passes
        self.position, self._batches = position, None

    def release(self) -> None:
        # Otherwise the workers of the pass wait until garbage collection.
        self._batches = None

    def open(self, **changes: Any) -> Iterator[Any]:
        # The rest of the pass, whose number is the stream's own epoch.
        assert self._reading is not None
        self.release()
        turn, batch, _ = self.position
        self._batches = self.source.open(replace(self._reading, epoch=self._first + turn, batch=batch, **changes))
        return self._batches

    def read(self) -> Any:
        """Return the next batch, or OVER.

        Raises:
            ValueError: it ended before its length, or has no batch.
        """
        while not self.position[2]:
            (turn, batch, _), length = self.position, self.source.length
            is_complete = length is not None and batch >= length
            if not is_complete or (self._reading is not None and self._reading.ahead):  # the source must see its end
                loaded = next(self._batches if self._batches is not None else self.open(), OVER)
                if loaded is not OVER and not is_complete:
                    self.position = turn, batch + 1, False
                    return loaded
                if not is_complete:
                    self._check_end(batch, length)
            self.position = (turn + 1, 0, False) if self._wraps else (turn, batch, True)
            self._batches = None
        return OVER

    def _check_end(self, batch: int, length: int | None) -> None:
        if length is not None:
            raise ValueError(
                f"The train stream {self.name!r} ended after {batch} batches, but its length is {length}: the "
                f"positions of several streams are computed from their lengths."
            )
        if batch == 0 and (self._mode != "min" or not self._first):  # otherwise the run ends, as with a single loader
            raise ValueError(
                f"The train stream {self.name!r} yielded no batch. A generator can be read only once: use a list, a "
                f"DataLoader, or an object whose __iter__ starts over."
            )


class StreamsSource(Source):
    """Reads several streams.

    Their positions follow from the position in the epoch, or are saved if a length is unknown.

    Args:
        loader: the user's.
        sources: of the streams, by name.
        mixture: chooses the streams of a batch.
        facts: of the mixture, plain values.
        share: the part of this process.
    """

    def __init__(
        self, loader: Any, sources: Mapping[str, Source], mixture: Mixture, facts: dict[str, Any], share: Share
    ) -> None:
        self.loader, self.share, self.facts = loader, share, {"source": "streams", **facts}
        self.parts, self._mixture = tuple(sources.values()), mixture
        self._streams = {
            name: Stream(name, source, mixture.mode, wraps=mixture.wraps) for name, source in sources.items()
        }
        self._loaded: dict[str, Position] = {}
        self._is_drawn = self._is_open = False  # whether the mixture, and whether the streams, have begun the epoch
        self.combine()

    def combine(self) -> None:
        parts, is_weighted = self.parts, self._mixture.is_weighted
        self.length = self._mixture.length({name: stream.source.length for name, stream in self._streams.items()})
        self.even, self.as_it_is = all(part.even for part in parts), all(part.as_it_is for part in parts)
        self.common = all(part.common for part in parts)
        sizes = [part.batch_size for part in parts if part.batch_size is not None]
        is_known = len(sizes) == len(parts) and (not is_weighted or len(set(sizes)) == 1)
        self.batch_size = None if not is_known else sizes[0] if is_weighted else sum(sizes)
        self.kind = self._kind()

    def chosen(self, batch: int) -> str | None:
        # Of the open epoch.
        return self._mixture.chosen(batch)

    def open(self, reading: Reading) -> Iterator[Any]:
        self._mixture.begin(reading.seed, reading.epoch, self.length)
        self._is_drawn = True
        for name, stream in self._streams.items():
            # The maximal number of passes over the stream in an epoch. Each pass is an epoch of the stream.
            passes = ceil(self.length / (stream.source.length or 1)) if self._mixture.wraps and self.length else 1
            stream.place(reading, passes, self._position(name, reading.batch))
        self._is_open = True
        within = [stream for stream in self._streams.values() if stream.is_within]
        if reading.is_over or (self.length is not None and reading.batch >= self.length):
            for stream in within:
                if reading.is_over and stream.source.kind["source"] == "stateful":  # it has a state to save
                    stream.open()
            return iter(())
        self._replay(within, reading)
        return self._read_on(reading.batch)

    def compared(self, batch: Any, number: int) -> Any:
        chosen = self._mixture.chosen(number - 1)
        parts = batch if chosen is None else {chosen: batch}
        return {name: parts[name] for name in self._compared_streams(chosen)}

    def certainty(self) -> Certainty:
        position, untracked = SEEKED
        for name, stream in self._streams.items():
            source = stream.source
            of_stream, sentences = source.certainty() if self._ends_with(source.length) else left_early(source)
            position, untracked = worst(position, of_stream), (*untracked, *(f"{name}: {text}" for text in sentences))
        return position, untracked

    def state_dict(self, batch: int) -> dict[str, Any]:
        states, places = {}, {}
        for name, stream in self._streams.items():
            place = self._position(name, batch)
            states[name] = {"source": stream.source.kind["source"], "state": stream.source.state_dict(place[1])}
            places[name] = list(place)
        return {"streams": states, "places": places}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded, self._is_open = {name: tuple(place) for name, place in state["places"].items()}, False
        self._is_drawn = not self._mixture.is_weighted
        for name, stream in self._streams.items():
            saved = state["streams"].get(name)
            if saved is not None and saved["source"] == stream.source.kind["source"]:
                stream.source.load_state_dict(saved["state"])

    def close(self) -> None:
        for stream in self._streams.values():
            stream.release()
        super().close()

    def _position(self, name: str, batch: int) -> Position:
        # After `batch` consumed batches of the epoch.
        stream, wraps = self._streams[name], self._mixture.wraps
        length = stream.source.length
        if not batch:
            return BEGIN
        if length is not None and self._is_drawn:
            taken = self._mixture.taken(name, batch)
            return (*divmod(taken, length), False) if wraps else (0, min(taken, length), taken >= length)
        position = stream.position if self._is_open else self._loaded.get(name, BEGIN)
        if wraps:
            return position
        _, read, is_over = position
        is_over = is_over and read < batch  # at its end it is read again for a comparison; one item may be read ahead
        return 0, read if is_over else batch, is_over

    def _compared_streams(self, chosen: str | None) -> list[str]:
        # The streams of the last batch before the position that are read again.
        return [name for name, stream in self._streams.items() if chosen in (None, name) and stream.is_replayed]

    def _replay(self, within: list[Stream], reading: Reading) -> None:
        # Starts within the passes of streams, and compares the batches that are read again.
        last: dict[str, Any] = {}
        for stream in within:
            stream.open(check=partial(last.__setitem__, stream.name))
        expected = self._compared_streams(self._mixture.chosen(reading.batch - 1)) if within else []
        if expected and last.keys() >= set(expected) and reading.check is not None:
            reading.check({name: last[name] for name in expected})

    def _read_on(self, batch: int) -> Iterator[Any]:
        try:
            while self.length is None or batch < self.length:
                chosen = self._mixture.chosen(batch)
                loaded = self._read_all() if chosen is None else self._streams[chosen].read()
                if loaded is OVER:
                    return
                batch += 1
                yield loaded
                del loaded
        finally:
            for stream in self._streams.values():
                stream.release()

    def _read_all(self) -> Any:
        # None for an exhausted stream; OVER at the end of the epoch.
        parts = {}
        for name, stream in self._streams.items():
            part = stream.read()
            if part is OVER and self._mixture.mode == "min":
                return OVER
            parts[name] = None if part is OVER else part
        return OVER if all(stream.position[2] for stream in self._streams.values()) else parts

    def _ends_with(self, length: int | None) -> bool:
        # Whether each epoch ends at the end of a pass.
        if self._mixture.mode in ("max", "weighted") or not length or self.length is None:
            return self._mixture.mode == "max"
        return self.length % length == 0

    def _kind(self) -> dict[str, Any]:
        # The facts of all streams; common facts have the same names as for a single loader.
        kind = dict(self.facts)
        for name, stream in self._streams.items():
            size = stream.source.batch_size
            kind |= {f"{name} {fact}": value for fact, value in stream.source.kind.items()}
            kind[f"{name} global_batch"] = None if size is None else size * self.share.world_size
            if self._mixture.wraps:
                kind[f"{name} batches"] = stream.source.length
        draws = [str(part.kind["draws_per"]) for part in self.parts if "draws_per" in part.kind]
        drops = any(part.kind.get("drop_last") for part in self.parts)
        return kind | ({"draws_per": min(draws)} if draws else {}) | ({"drop_last": True} if drops else {})


def counted(
    source: Source, batches: Iterator[Any], progress: Progress, set_stream: Callable[[str | None], None]
) -> Iterator[Any]:
    # Counts the batches of each stream as the loop takes them, and sets the stream of the current batch.
    for part in nested(source):
        if isinstance(part, StreamsSource):
            return _counted(part, batches, progress, set_stream)
    return batches


def _counted(
    source: StreamsSource, batches: Iterator[Any], progress: Progress, set_stream: Callable[[str | None], None]
) -> Iterator[Any]:
    for name in source.loader.loaders:
        progress.streams.setdefault(name, 0)
    for batch in batches:
        chosen = source.chosen(progress.batch)
        set_stream(chosen)
        for name in [name for name, part in batch.items() if part is not None] if chosen is None else [chosen]:
            progress.streams[name] += 1
        yield batch
        del batch


class Streams(Sourced):
    """Several named streams of training data.

    For example: `fit(task, Streams({"digit": a, "parity": b}, mode="min"))`. A batch is a dict with one batch of each
    stream, `{"digit": ..., "parity": ...}`. With `weighted` it is the batch of one stream, whose name is
    `run.data.stream`. A plain dict is short for `Streams` with the default mode.

    Args:
        streams: a dataset, a loader or a list of batches for each name.
        mode: `cycle` (the default): the longest stream ends the epoch, and shorter ones start over in a new order.
            `min`: the shortest stream ends the epoch. `max`: the longest ends it, and exhausted streams yield None.
            `weighted`: each batch is of one stream, drawn by `weights`; exhausted streams start over.
        weights: with `weighted`, the relative frequency of each stream; by default its number of batches.
        length: with `cycle` and `weighted`, the batches of an epoch per process; by default the batches of the longest
            stream, or with `weighted` of all streams. Required if a stream has no length.

    Raises:
        TypeError: the streams are not given by name.
        ValueError: an argument is out of range, or does not apply to the mode.
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
        if not isinstance(streams, Mapping) or not streams:
            raise TypeError(
                f"Streams takes a dict of loaders or datasets, {{'digit': a, 'parity': b}}, got {streams!r}."
            )
        for name in streams:
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(f"The name of a train stream is a string without '/', got {name!r}.")
        if mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}; got {mode!r}.")
        if length is not None:
            length = check_whole_number("length", length, of="batches", at_least=1)
            if mode in ("min", "max"):
                raise ValueError(
                    f"With mode={mode!r} the streams define the length of an epoch: remove length=, or shorten it with "
                    f"limit_train=."
                )
        self.loaders, self.mode, self.length = dict(streams), mode, length
        self.weights = None if weights is None else _check_weights(weights, streams, mode)
        self._limits: Mapping[str, Limit] = {}
        self._per_sample: Collection[str] = ()

    def made(self, make: Callable[[str, Any], Any], limits: Mapping[str, Limit], per_sample: Collection[str]) -> Self:
        """Return a copy with loaders instead of datasets.

        Args:
            make: returns the loader of a stream, given its name and data.
            limits: of some streams, how much of each pass is read.
            per_sample: the streams whose draws are keyed by sample.
        """
        made = copy(self)
        made.loaders = {name: make(name, data) for name, data in self.loaders.items()}
        made._limits, made._per_sample = limits, per_sample
        return made

    def describe(self) -> str:
        """Return the names and lengths of the streams and the mode, as text."""
        lengths = {name: length_of(loader) for name, loader in self.loaders.items()}
        named = [name if length is None else f"{name} ({length} batches)" for name, length in lengths.items()]
        weights = "" if self.weights is None else f" {', '.join(f'{weight:g}' for weight in self.weights.values())}"
        return f"{', '.join(named)}; {self.mode}{weights}"

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        """Return the source that reads the share of a process."""
        facts: dict[str, Any] = {"mode": self.mode, "streams": sorted(self.loaders)}
        facts |= {} if self.weights is None else {"weights": self.weights}
        facts |= {} if self.length is None else {"length": self.length}
        mixture = Mixture(self.mode, self.length, self.weights)
        sources = {}
        for name, loader in self.loaders.items():
            keyed_by_sample = name in self._per_sample
            if name in self._limits:
                loader = Limited(loader, self._limits[name], f"train stream {name!r}", per_sample=keyed_by_sample)
            sources[name] = source_of(loader, share, per_sample=keyed_by_sample, engine=engine)
        return StreamsSource(self, sources, mixture, facts, share)


def _check_weights(weights: Any, streams: Mapping[str, Any], mode: str) -> dict[str, float]:
    if mode != "weighted":
        raise ValueError(f"weights= is for mode='weighted', got mode={mode!r}.")
    if not isinstance(weights, Mapping) or weights.keys() != streams.keys():
        raise ValueError(f"weights= takes a number for each of the streams {', '.join(streams)}; got {weights!r}.")
    return {name: float(check_number(f"weights[{name!r}]", weight, more_than=0)) for name, weight in weights.items()}
