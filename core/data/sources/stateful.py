"""Loaders that keep their own position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

from ...objects.equality import same
from ...system.extras import kind_of
from ..draws.generators import isolated
from ..draws.keyed import LEFT_OUT, KeyedDataset, KeyedIndex, KeyedPosition, Probe, keyed_batch
from ..draws.keyed_generators import BEGIN, KeyedGenerators, set_epoch
from ..draws.users_code import Plainness
from ..order.shares import ALONE, Share
from .dataloader import apart, start_iterator
from .stateless import SEEKED, Certainty, Reading, Stateless

YIELDED = "_num_yielded"  # by which the state of a `StatefulDataLoader` says its position


class StatefulSource(Stateless):
    """A loader that keeps its own position, through `state_dict` and `load_state_dict`."""

    def __init__(self, loader: Any, share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "stateful", "loader": type(loader).__name__}, share)
        # Generators that a loader saves the state of must not get new keys within an epoch, or its state is wrong.
        known = isinstance(loader, DataLoader)
        self._at_begin = KeyedGenerators(loader) if known else KeyedGenerators()
        self._at_batch = KeyedGenerators(loader.dataset, loader.collate_fn) if known else KeyedGenerators()
        self._probe: Probe | None = None
        self._exhausted = False
        self._given: Mapping[str, Any] | None = None
        self._before: Mapping[str, Any] | None = None
        self._doubts: tuple[str, ...] = ()

    def open(self, reading: Reading) -> Iterator[Any]:
        """Continue at the position of the loader."""
        given, self._given = self._find_given(between_epochs=not reading.batch), None
        assert given is not None or not reading.batch, "a position within an epoch came without the loader's state"
        if given is not None and (given["ended"] or reading.is_over):  # it is before the next epoch
            self._given = {**given, "ended": False, "amid": False} if given["ended"] else None
            return iter(())
        if reading.apart and self._probe is None and self.certainty() == SEEKED and isinstance(self.loader, DataLoader):
            self._probe = _probe_dataset(self.loader, reading)
        if given is not None:
            self.loader.load_state_dict(deepcopy(given["loader"]))
            if not reading.batch and hasattr(self.loader, "restart_on_stop_iteration"):
                # Read to the end of a pass of `torchdata.nodes` that had ended, as the run that is resumed did. The
                # loader does so on its own, but its state would stay at the end during the next pass.
                restarts, self.loader.restart_on_stop_iteration = self.loader.restart_on_stop_iteration, False
                with isolated():
                    next(iter(self.loader), None)
                self.loader.restart_on_stop_iteration = restarts
        set_epoch(self.loader, reading.epoch)
        if isinstance(self.loader, DataLoader):  # one of `datasets` would begin each epoch where it was resumed
            set_epoch(self.loader.dataset, reading.epoch)
        loaded = given["loader"] if given is not None and reading.batch else None
        if not reading.apart:
            return self._follow(iter(self.loader), reading, loaded)
        if given is not None and not reading.batch:
            with isolated():
                self.loader.state_dict()  # torchdata's puts a loaded state in place only now, over the keys
        generators = KeyedGenerators() if reading.batch else self._at_begin
        batches = start_iterator(self.loader, reading, generators, self.share.rank)
        batches = apart(batches, reading, self._at_batch, self.share.rank, first=reading.batch)
        return self._follow(batches, reading, loaded)

    def certainty(self) -> Certainty:
        """Return what is known of its position and draws."""
        if self._doubts:
            return "unknown", self._doubts
        if (sampler := _forgetful(self.loader)) is not None:
            where = kind_of(self.loader)
            return "unknown", (f"{kind_of(sampler)} in {where} saves no state: its order may be another",)
        if _loses_buffer(getattr(self.loader, "dataset", self.loader)):
            return "unknown", (
                "the state of an IterableDataset of `datasets` has no samples of its shuffle buffer, which is filled "
                "with others: give it in a torch DataLoader, which is read again up to the position",
            )
        if isinstance(self.loader, DataLoader) and not self.loader.num_workers:
            return SEEKED
        return "seeked", (f"{kind_of(self.loader)} keeps its own position; its random draws are unknown",)

    def hidden(self) -> tuple[float, list[str]]:
        """Return what was found in its dataset."""
        return (0.0, []) if self._probe is None else self._probe.read()

    def state_dict(self, batch: int) -> dict[str, Any]:
        """Return the loader's state, as it was when the batch in hand had just been read."""
        between_epochs = not batch
        if (given := self._find_given(between_epochs=between_epochs)) is not None:  # not read yet
            return dict(given)
        if between_epochs and not self._exhausted:  # an epoch that was left early begins again, as in the loop
            return {"loader": None, "ended": False, "amid": False}
        own = self.loader.state_dict() if self._exhausted or self._before is None else self._before
        return {"loader": own, "ended": self._exhausted and not between_epochs, "amid": not between_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the loader is read."""
        self._given = None if state["loader"] is None else dict(state)

    def _find_given(self, *, between_epochs: bool) -> Mapping[str, Any] | None:
        """Return the loaded state; of an epoch that was ended before it was read on, only if the loader had ended."""
        given = self._given
        if given is None or not (given["amid"] and between_epochs):
            return given
        return {**given, "ended": False, "amid": False} if given["ended"] else None

    def _compare(self, loaded: Any, number: int) -> None:
        """Doubt a state that was loaded within an epoch, if the loader is elsewhere after the next batch."""
        now, name = self.loader.state_dict(), type(self.loader).__name__
        yielded = now.get(YIELDED, number) if isinstance(now, Mapping) else number
        if same(now, loaded):
            self._doubts = (f"the state of a {name} did not change with a batch, so its position may be another",)
        elif yielded != number:
            self._doubts = (
                f"a {name} is at batch {yielded}, but {number} were read in this epoch: batches may repeat",
            )

    def _follow(self, batches: Iterator[Any], reading: Reading, loaded: Any) -> Iterator[Any]:
        """Note when the loader ends, before its last batch is out: that is part of the state that a save there keeps.

        Where the loop reads ahead, the state from before that is kept, and the end is what comes after the last batch.
        """
        self._exhausted, self._before = False, None
        for number in count(reading.batch + 1):
            if reading.ahead or (self.length is not None and number > self.length):
                self._before = self.loader.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                self._exhausted = True
                return
            if loaded is not None:
                self._compare(loaded, number)
                loaded = None
            is_last = number == self.length and not reading.ahead
            self._before = self.loader.state_dict() if is_last else self._before
            following = list(islice(batches, 1)) if is_last else []
            self._exhausted = is_last and not following
            yield from (batch, *following)
            if self._exhausted:
                return


def is_stateful(loader: Any) -> bool:
    """Return whether a loader keeps its own position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _probe_dataset(loader: DataLoader[Any], reading: Reading) -> Probe:
    """Compare two loads of the dataset's first samples: what the loader reads first, nobody knows before it does."""
    dataset = KeyedDataset(loader.dataset, loader.collate_fn, per_sample=False)
    probe = Probe(type(loader.dataset).__name__, shared=False)
    if Plainness().of(loader.dataset, loader.collate_fn):
        return probe
    if not reading.probes:
        probe.leave_out(LEFT_OUT)
        return probe
    dataset.keyed_probe, position = probe, KeyedPosition((reading.seed, reading.epoch, BEGIN), 0, 1)
    try:
        with isolated():
            if loader.batch_size is None:
                dataset[KeyedIndex(0, position)]
            else:
                dataset.__getitems__(keyed_batch(range(min(loader.batch_size, len(dataset))), position))
    except Exception as error:  # noqa: BLE001  # it may take no numbers; the run reads it in the loader's own way
        probe.leave_out(f"{type(error).__name__}: {error}")
    return probe


def _loses_buffer(dataset: Any) -> bool:
    """Return whether a dataset is an iterable one of `datasets` with a shuffle buffer, which no state of it holds."""
    level = [getattr(dataset, "_ex_iterable", None)]
    while level:
        if any(type(each).__name__.startswith("BufferShuffled") for each in level):
            return True
        inner = [getattr(each, "ex_iterable", None) for each in level if each is not None]
        several = [part for each in level for part in getattr(each, "ex_iterables", ())]
        level = [each for each in (*inner, *several) if each is not None]
    return False


def _forgetful(loader: Any) -> Any:
    """Return the sampler of a stateful loader of which its state holds nothing but how often it was asked."""
    nodes = [loader] if hasattr(loader, "restart_on_stop_iteration") else []
    for node in nodes:  # of `torchdata.nodes`, which sets the epoch of a sampler
        for part in vars(node).values():
            if type(part).__module__.startswith("torchdata.nodes") and not any(part is node for node in nodes):
                nodes.append(part)
            if isinstance(part, Sampler) and not (_repeats(part) or hasattr(part, "set_epoch")):
                return part
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    own = loader.batch_size is None and loader.batch_sampler is not None
    sampler: Any = loader.batch_sampler if own else loader.sampler
    return None if _repeats(sampler) else sampler


def _repeats(sampler: Any) -> bool:
    is_known = type(sampler) is SequentialSampler or type(sampler).__module__.partition(".")[0] == "torchdata"
    return is_known or hasattr(sampler, "state_dict")
