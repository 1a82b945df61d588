"""Several streams as one: the choice of the stream of each batch, and the position in each stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, gcd
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ....events import Progress
from ....events.resume_facts import worst
from ..draws.generators import digest
from ..order.shares import Layout, Share
from .contract import Compound, Source, nested
from .limited import left_early
from .stateless import SEEKED, Certainty, Reading

Mode = Literal["cycle", "min", "max", "weighted"]
MODES: tuple[Mode, ...] = get_args(Mode)
Lengths = Mapping[str, int | None]
OVER: Any = object()
Position = tuple[int, int, bool]  # the passes of the epoch that are done, the batches of the next, whether none follows
BEGIN: Position = (0, 0, False)


class Mixture:
    """Which streams the batches of an epoch are of; the base: one batch of each in every batch, as `min` and `max`.

    Args:
        mode: its name.
        batches: of an epoch, where they are given.

    Attributes:
        wraps: whether a stream that has ended begins again.
    """

    def __init__(self, mode: Mode, batches: int | None = None) -> None:
        self.mode, self._batches = mode, batches
        self.wraps = mode in ("cycle", "weighted")

    def length(self, lengths: Lengths) -> int | None:
        """Return the batches of an epoch, given those of each stream; None where that is unknown.

        Raises:
            ValueError: it has to be known.
        """
        if self._batches is not None:
            return self._batches
        unknown = [name for name, length in lengths.items() if length is None]
        if unknown and self.wraps:
            raise ValueError(
                f"mode={self.mode!r} needs the length of an epoch, and the stream {unknown[0]!r} has none: say how "
                f"many batches an epoch has, Streams(..., length=1000), or give mode='min' or 'max'."
            )
        known = [length or 0 for length in lengths.values()]
        return None if unknown else self._of_all(known)

    def passes(self, length: int | None, of_stream: int | None) -> int:
        """Return how many passes over a stream an epoch has at most: as many of its own epochs it takes up."""
        return 1 if not self.wraps or length is None else ceil(length / (of_stream or 1))

    def begin(self, seed: int, epoch: int, length: int | None) -> None:
        """Decide what the batches of an epoch are of."""

    def chosen(self, batch: int) -> str | None:
        """Return the one stream that a batch is of; None where it is of all of them."""
        return None

    def taken(self, stream: str, batch: int) -> int:
        """Return how many batches of a stream are in the first so many ones of the epoch."""
        return batch

    def _of_all(self, lengths: Sequence[int]) -> int:
        return min(lengths) if self.mode == "min" else max(lengths)


class Weighted(Mixture):
    """Each batch is of one stream, drawn independently of the others.

    The draws are a function of seed, epoch and position, all of an epoch at once: to find how far each stream has been
    read takes no data, and about 0.1 s for a million batches.

    Args:
        weights: of each stream; in proportion to the batches of each where there are none.
        batches: of an epoch; those of all streams together where that is None.
    """

    def __init__(self, weights: Mapping[str, float] | None, batches: int | None) -> None:
        super().__init__("weighted", batches)
        self._weights = weights
        self._names: list[str] = []
        self._ends: npt.NDArray[np.float64] = np.zeros(0)
        self._chosen: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def length(self, lengths: Lengths) -> int | None:
        """Return the given number of batches, or the sum."""
        length = super().length(lengths)
        self._names = sorted(lengths)  # so that the draws do not depend on the order in which they are given
        shares: Lengths | Mapping[str, float] = lengths if self._weights is None else self._weights
        self._ends = np.cumsum([float(shares[name] or 0) for name in self._names])
        return length

    def begin(self, seed: int, epoch: int, length: int | None) -> None:
        """Draw the stream of each batch."""
        key = int.from_bytes(digest(seed, epoch, size=16, purpose=b"choice"), "little")
        drawn = np.random.Generator(np.random.PCG64(key)).random(length or 0)
        chosen = np.searchsorted(self._ends[:-1], drawn * self._ends[-1], side="right")
        self._chosen = chosen.astype(np.int32)

    def chosen(self, batch: int) -> str | None:
        """Return what was drawn."""
        return self._names[int(self._chosen[batch])]

    def taken(self, stream: str, batch: int) -> int:
        """Count what was drawn."""
        return int(np.count_nonzero(self._chosen[:batch] == self._names.index(stream)))

    def _of_all(self, lengths: Sequence[int]) -> int:
        return sum(lengths)


class Stream:
    """One of several streams, and where it is.

    Args:
        name: of the stream.
        source: what reads it.
        mode: how the streams are mixed.
        wraps: whether it begins again in the same epoch.

    Attributes:
        position: where it is.
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
        """Whether it is read again up to its position, and has one."""
        return self.is_within and self.source.certainty()[0] == "replayed"

    @property
    def is_within(self) -> bool:
        """Whether it is within a pass."""
        (_, batch, is_over), length = self.position, self.source.length
        return batch > 0 and not is_over and (length is None or batch < length)

    def place(self, reading: Reading, passes: int, position: Position) -> None:
        """Go to a position in an epoch, of so many passes at most; nothing is read."""
        seed = int.from_bytes(digest(reading.seed, self._key, size=7, purpose=b"stream"), "little")
        self._reading, self._first = replace(reading, seed=seed, within=0), reading.epoch * passes
        self.position, self._batches = position, None

    def release(self) -> None:
        """Let the workers of the pass go, which would else wait for more until somebody collects garbage."""
        self._batches = None

    def open(self, **changes: Any) -> Iterator[Any]:
        """Return the rest of the pass, whose number is the stream's own epoch."""
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
            is_whole = length is not None and batch >= length
            if not is_whole or (self._reading is not None and self._reading.ahead):  # which shows its end to the source
                found = next(self._batches if self._batches is not None else self.open(), OVER)
                if found is not OVER and not is_whole:
                    self.position = turn, batch + 1, False
                    return found
                if not is_whole:
                    self._check_end(batch, length)
            self.position = (turn + 1, 0, False) if self._wraps else (turn, batch, True)
            self._batches = None
        return OVER

    def _check_end(self, batch: int, length: int | None) -> None:
        if length is not None:
            raise ValueError(
                f"The train stream {self.name!r} ended after {batch} batches, but its length says {length}: the "
                f"position of each of several streams goes by its length."
            )
        if batch == 0 and (self._mode != "min" or not self._first):  # else the run ends, as with a single loader
            raise ValueError(
                f"The train stream {self.name!r} yielded no batch. A generator can be read only once: give a list, a "
                f"DataLoader, or an object whose __iter__ starts again."
            )


class StreamsSource(Compound):
    """Reads several streams; where each is follows from the position in the epoch, or is kept, without a length.

    Args:
        loader: what the user gave.
        sources: of the streams, by name.
        mixture: which streams a batch is of.
        own: plain facts of the mixture.
        share: the part of this process.
    """

    cuts_batches = False

    def __init__(
        self, loader: Any, sources: Mapping[str, Source], mixture: Mixture, own: dict[str, Any], share: Share
    ) -> None:
        self.loader, self.own = loader, {"source": "streams", **own}
        self.parts: Sequence[Source] = tuple(sources.values())
        self._mixture, self._share = mixture, share
        self._streams = {name: Stream(name, each, mixture.mode, wraps=mixture.wraps) for name, each in sources.items()}
        self._given: dict[str, Position] = {}
        self._is_drawn = self._is_open = False  # whether `_mixture` knows the epoch; whether the streams do
        self.combine()

    def combine(self) -> None:
        """Take over what the ranks have agreed on."""
        parts, is_weighted = self.parts, self._mixture.mode == "weighted"
        self.length = self._mixture.length({name: each.source.length for name, each in self._streams.items()})
        self.even, self.as_it_is = all(each.even for each in parts), all(each.as_it_is for each in parts)
        self._common = all(each.layout.common for each in parts)
        sizes = [each.batch_size for each in parts]
        known = [size for size in sizes if size is not None]
        is_known = len(known) == len(sizes) and (not is_weighted or len(set(known)) == 1)
        self.batch_size = None if not is_known else known[0] if is_weighted else sum(known)
        self.kind = self._kind(gcd(*known) or 1)

    @property
    def layout(self) -> Layout:
        """How its epochs lie in the batches of all processes."""
        share = self._share
        return Layout(share.world_size, self.batch_size, self.length, self._common)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the streams."""
        return tuple(self._streams)

    def chosen(self, batch: int) -> str | None:
        """Return the one stream that a batch of the open epoch is of; None where it is of all."""
        return self._mixture.chosen(batch)

    def open(self, reading: Reading) -> Iterator[Any]:
        """Go to the position of each stream and read."""
        self._mixture.begin(reading.seed, reading.epoch, self.length)
        self._is_drawn = True
        for name, stream in self._streams.items():
            passes = self._mixture.passes(self.length, stream.source.length)
            stream.place(reading, passes, self._position(name, reading.batch))
        self._is_open = True
        within = [each for each in self._streams.values() if each.is_within]
        if reading.is_over or (self.length is not None and reading.batch >= self.length):
            for stream in within:
                if reading.is_over and stream.source.kind["source"] == "stateful":  # which has a state to keep
                    stream.open()
            return iter(())
        self._replay(within, reading)
        return self._read_on(reading.batch)

    def compared(self, batch: Any, number: int) -> Any:
        """Return the parts of a batch that are read again where a run resumes after it."""
        chosen = self._mixture.chosen(number - 1)
        parts = batch if chosen is None else {chosen: batch}
        return {name: parts[name] for name in self._compared_streams(chosen)}

    def certainty(self) -> Certainty:
        """Return the least certain position of the streams, and what is untracked of all."""
        position, untracked = SEEKED
        for name, stream in self._streams.items():
            source = stream.source
            own, sentences = source.certainty() if self._is_whole(source.length) else left_early(source)
            position, untracked = worst(position, own), (*untracked, *(f"{name}: {text}" for text in sentences))
        return position, untracked

    def hidden(self) -> tuple[float, list[str]]:
        """Return what was found when the first batch of each was loaded."""
        found = [each.hidden() for each in self.parts]
        return sum(seconds for seconds, _ in found), [sentence for _, sentences in found for sentence in sentences]

    def state_dict(self, batch: int) -> dict[str, Any]:
        """Return the state and the position of each stream."""
        states, places = {}, {}
        for name, stream in self._streams.items():
            place = self._position(name, batch)
            states[name] = {"source": stream.source.kind["source"], "state": stream.source.state_dict(place[1])}
            places[name] = list(place)
        return {"streams": states, "places": places}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._given, self._is_open = {name: tuple(each) for name, each in state["places"].items()}, False
        self._is_drawn = self._mixture.mode != "weighted"
        for name, stream in self._streams.items():
            saved = state["streams"].get(name)
            if saved is not None and saved["source"] == stream.source.kind["source"]:
                stream.source.load_state_dict(saved["state"])

    def close(self) -> None:
        """Let worker processes go."""
        for stream in self._streams.values():
            stream.release()
            stream.source.close()

    def _position(self, name: str, batch: int) -> Position:
        """Return where a stream is when so many batches of the epoch are consumed."""
        stream, wraps = self._streams[name], self._mixture.wraps
        length = stream.source.length
        if not batch:
            return BEGIN
        if length is not None and self._is_drawn:
            taken = self._mixture.taken(name, batch)
            return (*divmod(taken, length), False) if wraps else (0, min(taken, length), taken >= length)
        known = stream.position if self._is_open else self._given.get(name, BEGIN)
        if wraps:
            return known
        _, read, is_over = known
        is_over = is_over and read < batch  # at its end it is read again, to be compared; one item may be read ahead
        return 0, read if is_over else batch, is_over

    def _compared_streams(self, chosen: str | None) -> list[str]:
        """Return which of the streams of the batch before the position are read again up to there."""
        return [name for name, each in self._streams.items() if chosen in (None, name) and each.is_replayed]

    def _replay(self, within: list[Stream], reading: Reading) -> None:
        """Begin within the passes of streams, and compare what is read again there."""
        whole = sum(each.position[1] for each in within if each.is_replayed)
        found: dict[str, Any] = {}
        done = 0
        for stream in within:
            stream.open(report=_reporter(reading.report, done, whole), check=partial(found.__setitem__, stream.name))
            done += stream.position[1] if stream.is_replayed else 0
        expected = self._compared_streams(self._mixture.chosen(reading.batch - 1)) if within else []
        if expected and found.keys() >= set(expected) and reading.check is not None:
            reading.check({name: found[name] for name in expected})

    def _read_on(self, batch: int) -> Iterator[Any]:
        try:
            while self.length is None or batch < self.length:
                chosen = self._mixture.chosen(batch)
                found = self._read_all() if chosen is None else self._streams[chosen].read()
                if found is OVER:
                    return
                batch += 1
                yield found
                del found
        finally:
            for stream in self._streams.values():
                stream.release()

    def _read_all(self) -> Any:
        """Return a batch of each stream, None of one that is over; OVER at the end of the epoch."""
        found = {}
        for name, stream in self._streams.items():
            part = stream.read()
            if part is OVER and self._mixture.mode == "min":
                return OVER
            found[name] = None if part is OVER else part
        return OVER if all(stream.position[2] for stream in self._streams.values()) else found

    def _is_whole(self, length: int | None) -> bool:
        """Return whether each epoch ends where a stream does."""
        if self._mixture.mode in ("max", "weighted") or not length or self.length is None:
            return self._mixture.mode == "max"
        return self.length % length == 0

    def _kind(self, least: int) -> dict[str, Any]:
        """Return the facts of all streams; those that all share are called as with a single loader.

        Where streams begin again, a position means the same only with the same batches; else with batches of the same
        proportions, of which `least` is the greatest common divisor.
        """
        kind, share = dict(self.own), self._share
        for name, stream in self._streams.items():
            size, length = stream.source.batch_size, stream.source.length
            kind |= {f"{name} {fact}": value for fact, value in stream.source.kind.items()}
            if self._mixture.wraps:
                kind[f"{name} global_batch"] = None if size is None else size * share.world_size
                kind[f"{name} batches"] = length
            else:
                kind[f"{name} part of a batch"] = None if size is None else size // least
        draws = [str(each.kind["draws_per"]) for each in self.parts if "draws_per" in each.kind]
        drops = any(each.kind.get("drop_last") for each in self.parts)
        return kind | ({"draws_per": min(draws)} if draws else {}) | ({"drop_last": True} if drops else {})


def counted(
    source: Source, batches: Iterator[Any], progress: Progress, set_stream: Callable[[str | None], None]
) -> Iterator[Any]:
    """Count the batches of each stream as the loop takes them, and say which one a batch is of."""
    for each in nested(source):
        if isinstance(each, StreamsSource):
            return _counted(each, batches, progress, set_stream)
    return batches


def _counted(
    source: StreamsSource, batches: Iterator[Any], progress: Progress, set_stream: Callable[[str | None], None]
) -> Iterator[Any]:
    for name in source.names:
        progress.streams.setdefault(name, 0)
    for batch in batches:
        chosen = source.chosen(progress.batch)
        set_stream(chosen)
        for name in [name for name, part in batch.items() if part is not None] if chosen is None else [chosen]:
            progress.streams[name] += 1
        yield batch
        del batch


def _reporter(report: Callable[[int, int], None], before: int, whole: int) -> Callable[[int, int], None]:
    """Return what reports the batches of one stream that are read again as a part of those of all."""

    def report_part(done: int, _: int) -> None:
        if done or not before:
            report(before + done, whole)

    return report_part
