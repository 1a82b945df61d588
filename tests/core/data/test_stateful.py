"""Loaders that keep their own position through state_dict and load_state_dict."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    CheckpointLoaded,
    EpochStart,
    GradientAccumulation,
    Plugin,
    Replay,
    Run,
    SavePoint,
    SaveSchedule,
    Trainer,
    TrainStart,
    on,
)
from heliograph.core.data.source_choice import source_of
from heliograph.core.data.stateful import StatefulSource
from heliograph.tests.messages import assert_facts
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torchdata.nodes import IterableWrapper, Loader, Mapper, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_sampler

Make = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata with torch 2.13


class Shards:
    """A stream of batches that never starts again: an epoch is five of them, wherever it stands."""

    def __init__(self, per_epoch: int = 5) -> None:
        self.position = 0
        self.per_epoch = per_epoch
        self.read = 0
        self.looked = 0

    def __iter__(self) -> Iterator[Tensor]:
        end = self.position - self.position % self.per_epoch + self.per_epoch
        while self.position < end:
            self.position += 1
            self.read += 1
            noise = random.random() + np.random.rand() + torch.rand(1, dtype=torch.float64)
            yield torch.full((2, 7), float(self.position), dtype=torch.float64) + noise

    def state_dict(self) -> dict[str, Any]:
        self.looked += 1
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class SizedShards(Shards):
    def __len__(self) -> int:
        return self.per_epoch


class Dealing:
    """Holds a generator, and saves its state: the order is drawn when an epoch begins."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(4)
        self.rest: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        if not self.rest:
            self.rest = list(range(8))
        while self.rest:
            number = self.rest.pop(int(self.generator.integers(len(self.rest))))
            yield torch.full((2, 7), float(number), dtype=torch.float64)

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, Any]:
        return {"rest": list(self.rest), "generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rest, self.generator.bit_generator.state = list(state["rest"]), state["generator"]


@pytest.mark.parametrize("kind", [Shards, SizedShards])
@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_a_stream_continues_where_it_stood(kind: Any, step: int, fit: Make) -> None:
    whole = fit(kind(), cut_at=[step])
    loader = kind()
    resumed = fit(loader, saved=whole.cuts[step])

    assert resumed.is_tail_of(whole)
    assert (loader.position, loader.read) == (10, 10 - step)
    (reason,) = resumed.result.resume.reasons
    assert_facts(reason, kind.__name__, "its own position")


def test_a_generator_whose_state_a_loader_saves_is_left_alone(fit: Make) -> None:
    whole = fit(Dealing(), cut_at=[3, 8, 13])
    for step in (3, 8, 13):
        assert fit(Dealing(), saved=whole.cuts[step]).is_tail_of(whole)
    assert whole.batches[:8] != whole.batches[8:]


def test_a_chain_of_resumes_saved_before_anything_is_read(fit: Make, noisy: Make) -> None:
    """The loader was given its state, and not yet read: that state is still the one to save."""
    whole = fit(Shards(), cut_at=[3, 5])
    for step in (3, 5):
        saved: dict[str, Any] = {}
        trainer = Trainer([SaveSchedule(At(steps=99), at_end=False)], device="cpu")
        trainer.bus.on(TrainStart, lambda run, event, step=step: run.resume(whole.cuts[step]))
        trainer.bus.on(CheckpointLoaded, lambda run, event: run.control.request_save("at once"))
        trainer.bus.on(SavePoint, lambda run, event, saved=saved: saved or saved.update(run.state_dict()))
        trainer.fit(noisy(), Shards(), epochs=2, optimizer=torch.optim.SGD)

        assert saved["data"]["state"] == whole.cuts[step]["data"]["state"]


def test_its_state_is_asked_for_at_a_save_and_where_its_length_ends(fit: Make) -> None:
    loader = SizedShards()
    fit(loader, cut_at=[2, 7])
    assert loader.looked == 2 + 2


def nodes(sampler: Any = None) -> Any:
    """A pipeline of torchdata's nodes."""
    rows = [torch.full((2, 7), float(number), dtype=torch.float64) for number in range(5)]
    if sampler is None:
        return Loader(IterableWrapper(rows))
    return Loader(Mapper(SamplerWrapper(sampler(rows)), rows.__getitem__))


@pytest.mark.sample(3)
@pytest.mark.parametrize("sampler", [None, SequentialSampler, partial(DistributedSampler, num_replicas=1, rank=0)])
@pytest.mark.parametrize("cuts", [(5, 8), (3, 4), (5, 7, 9)])
def test_nodes_continue_in_every_resume(sampler: Any, cuts: tuple[int, ...], fit: Make) -> None:
    whole, saved = fit(nodes(sampler), epochs=3), None
    for cut, stop in pairwise((0, *cuts, 15)):
        part = fit(nodes(sampler), saved=saved, cut_at=[stop], epochs=3)
        assert part.batches == whole.batches[cut:]
        saved = part.cuts.get(stop)
    assert part.weights == whole.weights
    assert part.result.resume.reasons


class Stale(Shards):
    """Gives the state that it began with."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 0}


def test_a_state_that_does_not_follow_the_position_is_not_believed(fit: Make) -> None:
    resume = fit(Stale(), saved=fit(Stale(), cut_at=[3]).cuts[3]).result.resume
    assert resume.reasons
    assert "did not change" in resume.reasons[0]


class Longer(Shards):
    """Has two batches more than its length says."""

    def __len__(self) -> int:
        return self.per_epoch - 2


class LongerPlain(list[Tensor]):
    """Keeps no position, and says too small a length."""

    def __len__(self) -> int:
        return 3


def plain() -> LongerPlain:
    return LongerPlain(torch.full((2, 7), float(number), dtype=torch.float64) for number in range(5))


@pytest.mark.parametrize("make", [Longer, plain])
@pytest.mark.parametrize("factor", [1, 2])
def test_windows_stay_whole_beyond_the_length_also_after_a_resume(make: Any, factor: int, fit: Make) -> None:
    whole = fit(make(), cut_everywhere=True, plugins=[GradientAccumulation(factor)])
    assert len(whole.batches) == 10
    assert whole.result.progress.steps == (10 if factor == 1 else 6)
    assert "ended after 5 batches," in whole.result.warnings[0]
    for place in whole.places.keys() - {(1, 5), (2, 0)}:
        cut = whole.places[place]
        assert fit(make(), saved=cut, plugins=[GradientAccumulation(factor)]).is_tail_of(whole)


def test_nothing_is_read_again(noisy: Make, fit: Make) -> None:
    saved = fit(Shards(), cut_at=[3], seed=None).cuts[3]
    reported: list[Any] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    trainer.bus.on(Replay, lambda run, event: reported.append(event))
    trainer.fit(noisy(), Shards(), epochs=2, optimizer=torch.optim.SGD)

    assert reported == []


def test_an_epoch_that_was_left_early_is_begun_again(noisy: Make) -> None:
    """As `iter(loader)` does, so the state is not kept across its border."""
    saved: dict[int, Any] = {}
    trainer = Trainer([SaveSchedule(At(steps=3), at_end=False)], device="cpu")

    def leave(run: Any, event: BatchEnd) -> None:
        if run.progress.steps == 2:
            run.control.end_epoch("enough")
            run.control.request_save("now")
        if run.progress.steps == 3:
            run.control.stop("enough")

    trainer.bus.on(BatchEnd, leave)
    trainer.bus.on(SavePoint, lambda run, event: saved.update({run.progress.steps: run.state_dict()}))
    trainer.fit(noisy(), Dealing(), epochs=3, optimizer=torch.optim.SGD)

    assert saved[2]["progress"]["batch"] == 2
    assert saved[3]["data"]["state"]["loader"]["rest"] != []


# torchdata's.


def stateful(data: Any, **how: Any) -> Any:
    return StatefulDataLoader(data, batch_size=4, **how)


@pytest.mark.sample(5)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("place", [(0, 2), (0, 6), (1, 0), (1, 2)])
@pytest.mark.parametrize("given", [True, False])
def test_torchdata_s_loader_in_this_process_is_exact(
    shuffle: bool, place: tuple[int, int], given: bool, drawing: Make, collate: Any, fit: Make
) -> None:
    def made() -> Any:
        torch.seed()  # its sampler draws a seed when it is made
        generator = torch.Generator() if given else None
        return stateful(drawing(), shuffle=shuffle, collate_fn=collate, generator=generator)

    whole = fit(made(), cut_everywhere=True)
    resumed = fit(made(), saved=whole.places[place])

    assert resumed.is_tail_of(whole)
    assert resumed.result.resume.reasons == ()
    assert whole.batches[:6] != whole.batches[6:]
    assert ([row[0] for row in whole.batches[0]] == [0, 1, 2, 3, -1]) is not shuffle


class LeaveEarly(Plugin):
    """Ends the first epoch after three batches; asks again for a save before anything else is read."""

    @on(BatchEnd)
    def leave(self, run: Run, event: BatchEnd) -> None:
        if (run.progress.epoch, run.progress.batch) == (0, 3):
            run.control.end_epoch("enough")

    @on(EpochStart, CheckpointLoaded)
    def save(self, run: Run, event: EpochStart | CheckpointLoaded) -> None:
        run.control.request_save("a chain of resumes")


@pytest.mark.parametrize("sized", [True, False])
def test_an_epoch_of_it_that_was_left_early(sized: bool, drawing: Make, flowing: Make, fit: Make) -> None:
    """A state from during an epoch is not that of the next one, which starts again."""

    def made() -> Any:
        return stateful(drawing(), shuffle=True) if sized else stateful(flowing())

    whole = fit(made(), plugins=[LeaveEarly()], cut_everywhere=True)
    assert len(whole.batches) == 9
    for place in ((0, 2), (0, 3), (1, 0), (1, 3)):
        resumed = fit(made(), plugins=[LeaveEarly()], saved=whole.places[place], cut_everywhere=True)
        assert resumed.is_tail_of(whole)
        again = fit(made(), plugins=[LeaveEarly()], saved=resumed.places[max(place, (0, 2))], cut_everywhere=True)
        assert again.is_tail_of(whole)


def test_a_sampler_in_it_that_draws_all_along_is_exact(drawing: Make, fit: Make) -> None:
    def made() -> Any:
        data = drawing(99)
        return stateful(data, sampler=torchdata_sampler.RandomSampler(data, replacement=True))

    whole = fit(made(), cut_at=[13, 25, 30])
    for step in (13, 25, 30):
        resumed = fit(made(), saved=whole.cuts[step])
        assert resumed.is_tail_of(whole)
        assert resumed.result.resume.reasons == ()


def test_a_sampler_in_it_that_keeps_no_state_is_not_believed(drawing: Make, fit: Make) -> None:
    class Kept(SubsetRandomSampler):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    data = drawing()
    batched = BatchSampler(SubsetRandomSampler(range(9)), 4, drop_last=False)
    known = [
        source_of(loader).certainty()[1]
        for loader in (
            stateful(data, sampler=SubsetRandomSampler(range(9))),
            StatefulDataLoader(data, batch_sampler=batched),
            StatefulDataLoader(data, batch_size=None, sampler=SubsetRandomSampler(range(9))),
            stateful(data, sampler=Kept(range(9))),
        )
    ]
    assert [len(sentences) for sentences in known] == [1, 1, 1, 0]
    assert_facts(known[0][0], "SubsetRandomSampler", "StatefulDataLoader", "no state")
    assert known[1][0].startswith("a BatchSampler in a")


def test_torchdata_s_loader_with_workers_keeps_the_order(drawing: Make, fit: Make) -> None:
    def made() -> Any:
        return stateful(drawing(), shuffle=True, num_workers=1)

    def order(trial: Any) -> list[list[float]]:
        return [[row[0] for row in batch] for batch in trial.batches]

    whole = fit(made(), cut_at=[2, 8])
    for step in (2, 8):
        resumed = fit(made(), saved=whole.cuts[step])
        assert order(resumed) == order(whole)[step:]
        (reason,) = resumed.result.resume.reasons
        assert "StatefulDataLoader keeps" in reason


@pytest.mark.parametrize("sized", [True, False])
def test_torchdata_s_loader_of_an_iterable_dataset(sized: bool, flowing: Make, sized_flowing: Make, fit: Make) -> None:
    def made() -> Any:
        return stateful((sized_flowing if sized else flowing)())

    whole = fit(made(), cut_at=[2, 9])
    for step in (2, 9):
        resumed = fit(made(), saved=whole.cuts[step])
        assert [[row[0] for row in batch] for batch in resumed.batches] == [
            [row[0] for row in batch] for batch in whole.batches[step:]
        ]


def test_it_leaves_the_training_s_stream_alone(drawing: Make, reading: Any, training_stream: Any) -> None:
    source = source_of(stateful(drawing(), shuffle=True))
    assert isinstance(source, StatefulSource)
    before = training_stream()
    batches = reading(source)
    for _ in batches:
        assert training_stream() == before
    assert training_stream() == before


def test_without_rng_capture_its_epochs_differ_all_the_same(drawing: Make, reading: Any) -> None:
    source = source_of(stateful(drawing(), shuffle=True, num_workers=1))
    epochs = [[batch.tolist() for batch in reading(source, epoch, apart=False)] for epoch in (0, 1)]

    assert epochs[0] != epochs[1]
    assert epochs[0][0][0][1] != epochs[1][0][0][1]


def test_a_plain_loader_with_these_methods_is_believed(drawing: Make) -> None:
    class Loader(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    assert isinstance(source_of(Loader(drawing(), 4)), StatefulSource)


class Numbers(Dataset[Tensor]):
    """Draws by a generator that it makes when it is first asked."""

    rng: Any = None
    count = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.rng = self.rng or random.Random(1)
        return torch.tensor([index, self.rng.random(), 0, 0, 0, 0, 0], dtype=torch.float64)


class Counting(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        self.count += 1
        return super().__getitem__(index) + self.count


class ByName(Numbers):
    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__({"a": 0, "b": 1}[index])


@pytest.mark.parametrize(("kind", "hidden"), [(Numbers, None), (Counting, "Counting loads the same")])
def test_the_first_samples_are_loaded_twice(kind: Any, hidden: str | None, fit: Make) -> None:
    def make() -> Any:
        return StatefulDataLoader(kind(), 3)

    whole = fit(make(), cut_at=[2])
    tail = fit(make(), saved=whole.cuts[2])

    assert tail.is_tail_of(whole) is (hidden is None)
    for trial in (whole, tail):
        if hidden is None:
            assert trial.result.resume.reasons == ()
        else:
            assert hidden in trial.result.resume.untracked["train loader"]


def test_of_a_dataset_that_takes_no_numbers_it_is_said(fit: Make) -> None:
    sampler = torchdata_sampler.BatchSampler(["a", "b"], 1, drop_last=False)
    resume = fit(StatefulDataLoader(ByName(), batch_sampler=sampler)).result.resume

    assert "ByName was not checked" in resume.reasons[-1]
    assert "KeyError: 0" in resume.reasons[-1]
