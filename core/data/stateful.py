"""The source for loaders that keep their own position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ..objects.equality import same
from ..system.extras import kind_of
from . import keyed
from .dataloader import isolated_batches, start_iterator
from .generators import isolated
from .sizes import ALONE, Share
from .source import SEEKED, Certainty, Reading, Source


class StatefulSource(Source):
    """A loader that keeps its own position, with `state_dict` and `load_state_dict`."""

    def __init__(self, loader: Any, share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "stateful", "loader": type(loader).__name__}, share)
        # New keys within an epoch would invalidate the saved state of the loader's generators.
        is_dataloader = isinstance(loader, DataLoader)
        self._at_begin = keyed.KeyedGenerators(loader) if is_dataloader else keyed.KeyedGenerators()
        self._at_batch = (
            keyed.KeyedGenerators(loader.dataset, loader.collate_fn) if is_dataloader else keyed.KeyedGenerators()
        )
        self._probe: keyed.LoadProbe | None = None
        self._exhausted = False
        self._loaded: Mapping[str, Any] | None = None
        self._before: Mapping[str, Any] | None = None
        self._doubts: tuple[str, ...] = ()

    def open(self, reading: Reading) -> Iterator[Any]:
        state, self._loaded = self._usable_state(between_epochs=not reading.batch), None
        assert state is not None or not reading.batch, "a position within an epoch needs the loader's state"
        if state is not None and (state["ended"] or reading.is_over):  # the loader is at the next epoch
            self._loaded = {**state, "ended": False, "amid": False} if state["ended"] else None
            return iter(())
        if (
            reading.isolated
            and self._probe is None
            and self.certainty() == SEEKED
            and isinstance(self.loader, DataLoader)
        ):
            self._probe = _probe_dataset(self.loader, reading)
        if state is not None:
            self.loader.load_state_dict(deepcopy(state["loader"]))
            if not reading.batch and hasattr(self.loader, "restart_on_stop_iteration"):
                # Finish a completed pass of `torchdata.nodes`, as the original run did. The loader would do that
                # itself, but its state would stay at the end during the next pass.
                restarts, self.loader.restart_on_stop_iteration = self.loader.restart_on_stop_iteration, False
                with isolated():
                    next(iter(self.loader), None)
                self.loader.restart_on_stop_iteration = restarts
        keyed.set_epoch(self.loader, reading.epoch)
        if isinstance(
            self.loader, DataLoader
        ):  # a dataset of `datasets` would start each epoch at the resumed position
            keyed.set_epoch(self.loader.dataset, reading.epoch)
        loaded = state["loader"] if state is not None and reading.batch else None
        if not reading.isolated:
            return self._follow(iter(self.loader), reading, loaded)
        if state is not None and not reading.batch:
            with isolated():
                self.loader.state_dict()  # torchdata applies a loaded state only now, and would overwrite the keys
        generators = keyed.KeyedGenerators() if reading.batch else self._at_begin
        batches = start_iterator(self.loader, reading, generators, self.share.rank)
        seed = partial(self._at_batch.seed, reading.seed, reading.epoch, self.share.rank)
        batches = isolated_batches(batches, seed=seed, first=reading.batch)
        return self._follow(batches, reading, loaded)

    def certainty(self) -> Certainty:
        if self._doubts:
            return "unknown", self._doubts
        if (sampler := _forgetful(self.loader)) is not None:
            where = kind_of(self.loader)
            return "unknown", (f"{kind_of(sampler)} in {where} saves no state: its order may differ",)
        if _loses_buffer(getattr(self.loader, "dataset", self.loader)):
            return "unknown", (
                "the state of an IterableDataset of `datasets` lacks the samples in its shuffle buffer: use a torch "
                "DataLoader, which is read again up to the position",
            )
        if isinstance(self.loader, DataLoader) and not self.loader.num_workers:
            return SEEKED
        return "seeked", (f"{kind_of(self.loader)} keeps its own position; its random draws are unknown",)

    def hidden(self) -> list[str]:
        return [] if self._probe is None else self._probe.read()

    def state_dict(self, batch: int) -> dict[str, Any]:
        # The state right after the current batch was read.
        between_epochs = not batch
        if (state := self._usable_state(between_epochs=between_epochs)) is not None:  # not read so far
            return dict(state)
        if between_epochs and not self._exhausted:  # an epoch that ended early starts over, as in the loop
            return {"loader": None, "ended": False, "amid": False}
        state = self.loader.state_dict() if self._exhausted or self._before is None else self._before
        return {"loader": state, "ended": self._exhausted and not between_epochs, "amid": not between_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Loaded when the loader is read.
        self._loaded = None if state["loader"] is None else dict(state)

    def _usable_state(self, *, between_epochs: bool) -> Mapping[str, Any] | None:
        # For an epoch that ended before its next batch was read, only if the loader had ended.
        state = self._loaded
        if state is None or not (state["amid"] and between_epochs):
            return state
        return {**state, "ended": False, "amid": False} if state["ended"] else None

    def _compare(self, loaded: Any, number: int) -> None:
        # A loader that reports another position after the next batch did not load its state correctly.
        now, name = self.loader.state_dict(), type(self.loader).__name__
        # The position in the state of a `StatefulDataLoader`.
        yielded = now.get("_num_yielded", number) if isinstance(now, Mapping) else number
        if same(now, loaded):
            self._doubts = (f"the state of a {name} did not change with a batch, so its position may differ",)
        elif yielded != number:
            self._doubts = (
                f"a {name} is at batch {yielded}, but {number} were read in this epoch: batches may repeat",
            )

    def _follow(self, batches: Iterator[Any], reading: Reading, loaded: Any) -> Iterator[Any]:
        """Note the end of the loader before its last batch is yielded, because the state of a save there includes it.

        If the loop reads ahead, the state before that is saved, and the end follows the last batch.
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
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _probe_dataset(loader: DataLoader[Any], reading: Reading) -> keyed.LoadProbe:
    # The dataset's first samples: which ones the loader reads first is unknown before it does.
    size = loader.batch_size
    dataset = keyed.KeyedDataset(loader.dataset, loader.collate_fn, per_sample=False, is_batched=size is not None)
    probe = keyed.LoadProbe(type(loader.dataset).__name__, shared=False)
    if keyed.is_plain_data(loader.dataset, loader.collate_fn):
        return probe
    if not reading.probes:
        probe.leave_out(keyed.LEFT_OUT)
        return probe
    dataset.keyed_probe, position = probe, keyed.KeyedPosition((reading.seed, reading.epoch, keyed.BEGIN), 0, 1)
    try:
        with isolated():
            dataset.__getitems__(keyed.keyed_batch(range(min(size or 1, len(dataset))), position))
    except Exception as error:  # noqa: BLE001  # it may not accept integers; the run reads it through the loader
        probe.leave_out(f"{type(error).__name__}: {error}")
    return probe


def _loses_buffer(dataset: Any) -> bool:
    # True for an iterable dataset of `datasets` with a shuffle buffer, which its state lacks.
    level = [getattr(dataset, "_ex_iterable", None)]
    while level:
        if any(type(node).__name__.startswith("BufferShuffled") for node in level):
            return True
        inner = [getattr(node, "ex_iterable", None) for node in level if node is not None]
        several = [part for node in level for part in getattr(node, "ex_iterables", ())]
        level = [node for node in (*inner, *several) if node is not None]
    return False


def _forgetful(loader: Any) -> Any:
    # The sampler of a stateful loader, if the state has nothing of it but the number of requests.
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    has_batch_sampler = loader.batch_size is None and loader.batch_sampler is not None
    sampler: Any = loader.batch_sampler if has_batch_sampler else loader.sampler
    is_known = type(sampler) is SequentialSampler or type(sampler).__module__.partition(".")[0] == "torchdata"
    return None if is_known or hasattr(sampler, "state_dict") else sampler
