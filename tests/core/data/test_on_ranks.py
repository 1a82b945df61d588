"""Data and metrics of a run on several ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    DataModule,
    DDPEngine,
    DeviceEngine,
    EpochEnd,
    Every,
    GradientAccumulation,
    Lane,
    Log,
    LogSchedule,
    Plugin,
    RankFailed,
    RNGCapture,
    Run,
    RunClosed,
    RunFailed,
    SavePoint,
    SaveSchedule,
    ShouldStop,
    Supervised,
    TrainEnd,
    Trainer,
    TrainStart,
    ValidationSchedule,
    on,
)
from heliograph.tests.kit import sgd
from heliograph.tests.messages import assert_each, assert_facts, has_facts, pattern
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, default_collate

Reported = dict[str, Any]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Samples of an index and three draws."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draws = random.random(), float(np.random.rand()), float(torch.rand(()))
        return torch.tensor([index, *draws]) / 10, torch.tensor([index / 10])


class Flowing(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of its own on every rank, with so many samples more on every next one."""

    def __init__(self, size: int, more: int = 0) -> None:
        self.size = size + more * rank()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.size):
            yield torch.full((4,), index / 10), torch.tensor([index / 10])


class Sized(Flowing):
    """The same with a length, which may be a lie."""

    def __init__(self, size: int, more: int = 0, says: int | None = None) -> None:
        super().__init__(size, more)
        self.says = self.size if says is None else says

    def __len__(self) -> int:
        return self.says


class Own(Supervised):
    """Counts as samples what its batches say."""

    def batch_size(self, batch: Any) -> int:
        return int(batch[0][:, 0].sum() * 10)


def a_trainer(*plugins: Any) -> Trainer:
    return Trainer(plugins, engine=DDPEngine(device="cpu") if "RANK" in os.environ else DeviceEngine("cpu"))


def a_task(kind: type[Supervised] = Supervised) -> Supervised:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return kind(
        model, nn.functional.mse_loss, metrics={"worst": lambda outputs, targets: (outputs - targets).abs().max()}
    )


def trained(
    data: Any, *plugins: Any, saved: bytes | None = None, cut_at: int | None = None, **options: Any
) -> Reported:
    """Train for two epochs, and report what of it can be compared."""
    reported: Reported = {"batches": [], "samples": [], "places": [], "steps": [], "cut": None}
    trainer, task = a_trainer(*plugins), options.pop("task", None) or a_task()

    def report(run: Run, event: BatchEnd) -> None:
        progress = run.progress
        reported["batches"].append([round(row[0] * 10) for row in run.batch[0].tolist()])
        reported["samples"].append(progress.samples)
        reported["steps"].append(progress.steps)
        reported["places"].append(
            (progress.epoch, progress.batch, run.length.batches_per_epoch, run.data.is_last_batch)
        )

    def keep(run: Run, event: SavePoint) -> None:
        file = BytesIO()
        torch.save(run.state_dict(), file)
        reported["cut"] = file.getvalue()

    trainer.bus.on(BatchEnd, report)
    if cut_at is not None:
        trainer.plugins.register(SaveSchedule(At(steps=cut_at), at_end=False))
        trainer.bus.on(SavePoint, keep, lane=Lane.PERSIST)
    if saved is not None:
        state = torch.load(BytesIO(saved), weights_only=True)
        trainer.bus.on(TrainStart, lambda run, event: run.resume(state))
    with_defaults: Any = {"optimizer": sgd(momentum=0.9), "epochs": 2} | options
    result = trainer.fit(task, data, **with_defaults)
    reported |= {"weights": [each.tolist() for each in task.model.state_dict().values()], "metrics": result.metrics}
    return {**reported, "notes": result.notes, "resume": result.resume, "progress": result.progress.state_dict()}


def rounds(of_ranks: list[Reported]) -> list[list[int]]:
    """Return the samples of each round of batches, in the order of the sampler."""
    rows = zip(*(reported["batches"] for reported in of_ranks), strict=True)
    return [[sample for samples in zip(*row, strict=True) for sample in samples] for row in rows]


def seeded_apart() -> tuple[Reported, int]:
    """Train with the seed of the user, which is not the same on each rank."""
    torch.manual_seed(40 + int(os.environ["RANK"]))
    reported = trained(Drawing(), RNGCapture(), loader_params={"batch_size": 4, "shuffle": True})
    return reported, torch.initial_seed()


def test_the_seed_of_the_main_rank_is_everybody_s(ranks: Pool) -> None:
    alone = trained(Drawing(), RNGCapture(40), loader_params={"batch_size": 8, "shuffle": True})
    of_ranks, seeds = zip(*ranks(2).run(seeded_apart), strict=True)

    assert rounds(list(of_ranks))[:2] == alone["batches"][:2]
    assert any("40, as torch.manual_seed" in note for note in of_ranks[0]["notes"])
    assert seeds == (40, 41)


# Shares of one order.


def shuffled(batch_size: int, **options: Any) -> Reported:
    return trained(DataLoader(Drawing(), batch_size, shuffle=True), RNGCapture(5), **options)


def test_a_loader_is_dealt_out(ranks: Pool) -> None:
    of_ranks, alone = ranks(2).run(shuffled, 4), shuffled(8)

    assert [each[:6] for each in rounds(of_ranks)] == [each[:6] for each in alone["batches"]]
    assert of_ranks[0]["places"] == of_ranks[1]["places"] == alone["places"]
    assert of_ranks[0]["samples"] == of_ranks[1]["samples"] == alone["samples"] == [8, 16, 22, 30, 38, 44]
    assert of_ranks[0]["weights"] == of_ranks[1]["weights"]
    assert not of_ranks[0]["notes"]


def by_params(**params: Any) -> Reported:
    return trained(Drawing(), RNGCapture(5), loader_params=params)


def test_a_dataset_is_dealt_out_with_the_global_batch_that_was_asked_for(ranks: Pool) -> None:
    params: Any = {"global_batch_size": 8, "sampler": WeightedRandomSampler([1.0] * 22, 22)}
    of_ranks, alone = ranks(2).run(by_params, **params), by_params(**params)
    assert rounds(of_ranks) == alone["batches"]
    with pytest.raises(ValueError, match=r"global_batch_size'\] = 9 cannot"):
        ranks(2).run(by_params, global_batch_size=9)


def unseeded() -> tuple[Reported, int | None]:
    torch.manual_seed(7 + rank())
    seeds: list[int | None] = []
    plugin = LogSchedule(Every(steps=1))
    trainer_seed = lambda run, event: seeds.append(run.data.seed)  # noqa: E731
    trainer = a_trainer(plugin)
    trainer.bus.on(BatchEnd, trainer_seed)
    trainer.fit(a_task(), DataLoader(Drawing(), 4, shuffle=True), optimizer=sgd(momentum=0.9), epochs=1)
    return trained(DataLoader(Drawing(), 4, shuffle=True), epochs=1), seeds[0]


def test_without_a_seed_all_ranks_take_the_main_one_s(ranks: Pool) -> None:
    (first, seed), (second, other) = ranks(2).run(unseeded)
    assert seed == other == 7
    assert sorted(chain(*rounds([first, second]))) == list(range(22))


def unlike() -> None:
    trained(DataLoader(Drawing(20 + rank()), 4))


def test_data_that_differ_are_refused_everywhere(ranks: Pool) -> None:
    reported = r"rank 0.*rank 1.*samples.*20.*21"
    with pytest.raises(ValueError, match=reported):
        ranks(2).run(unlike)


def unlike_batches() -> None:
    trained(DataLoader(Drawing(20), 4 + rank()))


def test_so_are_batch_sizes(ranks: Pool) -> None:
    with pytest.raises(ValueError, match="rank 1 differ: batch_size"):
        ranks(2).run(unlike_batches)


def streams_of_other_batches() -> Reported:
    def fit(**options: Any) -> Reported:
        return trained(DataLoader(Flowing(12), 2 + rank()), GradientAccumulation(2), **options)

    return {**fit(saved=fit(cut_at=1)["cut"], epochs=1), "whole": fit(epochs=1)}


def test_loaders_that_are_read_as_they_are_may_have_other_batches(ranks: Pool) -> None:
    first, second = ranks(2).run(streams_of_other_batches)
    assert first["samples"] == second["samples"] == first["whole"]["samples"][2:] == [15, 20]
    assert first["weights"] == second["weights"] == first["whole"]["weights"]
    assert not any("global batch" in note for note in (*first["notes"], *second["notes"]))


class BrokenError(Exception):
    """What a loader of one rank raises."""


class Breaking(Flowing):
    """Breaks on one rank: when its length is asked for, or at a sample."""

    def __init__(self, where: str) -> None:
        super().__init__(12)
        self.where = where

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, sample in enumerate(super().__iter__()):
            if rank() == 1 and self.where == "sample" and number == 5:
                raise BrokenError("no such file")
            yield sample

    def __len__(self) -> int:
        if rank() == 1 and self.where == "length":
            raise BrokenError("no such file")
        raise TypeError


def breaking(where: str) -> tuple[type, str]:
    with pytest.raises((BrokenError, RankFailed)) as info:
        trained(DataLoader(Breaking(where), 2))
    return type(info.value), str(info.value)


@pytest.mark.parametrize("where", ["length", "sample"])
def test_a_loader_that_fails_on_one_rank_fails_all(ranks: Pool, where: str) -> None:
    """Before the ranks agree on their data, or while the others vote on the next batch."""
    (other, reported), own = ranks(2).run(breaking, where)
    assert own == (BrokenError, "no such file")
    assert other is RankFailed
    assert_facts(reported, "rank 1 failed")
    assert "BrokenError: no such file" in reported


def batches_of(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((size, 4), number / 10), torch.zeros(size, 1)) for number, size in enumerate(sizes)]


def dropping(samples: list[Any]) -> Any:
    """Leave samples out, as of broken files."""
    return default_collate([each for each in samples if round(float(each[0][0]) * 10) % 5])


def collated() -> Reported:
    return trained(DataLoader(Drawing(), 4, collate_fn=dropping))


def listed(kind: type[Supervised]) -> Reported:
    at = []

    class Note(Plugin):
        @on(BatchEnd, when=Every(samples=5))
        def note(self, run: Run, event: BatchEnd) -> None:
            at.append(run.progress.batches)

    return {**trained(batches_of([4, 4, 2, 3, 4]), Note(), task=a_task(kind)), "at": at}


def test_samples_are_those_of_all_ranks(ranks: Pool) -> None:
    """Also where these hold batches of different sizes, or count them in their own way."""
    first, second = ranks(2).run(listed, Supervised)
    assert first["samples"] == second["samples"] == [8, 13, 21, 29, 34, 42]
    assert first["at"] == second["at"] == [1, 2, 3, 4, 5, 6]
    first, second = ranks(2).run(listed, Own)
    assert first["samples"] == second["samples"] == [4, 17, 33, 37, 50, 66]
    first, second = ranks(2).run(collated)
    assert first["samples"] == second["samples"] == [6, 12, 17, 23, 29, 34]
    assert [len(batch) for batch in first["batches"]] != [len(batch) for batch in second["batches"]]


# No more data.


def streamed(kind: Callable[..., Any], *sizes: int) -> Reported:
    return trained(DataLoader(kind(*sizes), 2), GradientAccumulation(2))


def test_the_shortest_rank_ends_the_epoch_for_all(ranks: Pool) -> None:
    for kind, length in ((Flowing, None), (Sized, 5)):
        first, second = ranks(2).run(streamed, kind, 10, 4)
        assert first["places"] == second["places"]
        assert first["places"][:5] == [(0, batch, length, batch == 5) for batch in range(1, 6)]
        assert len(first["places"]) == 10
        assert first["steps"] == second["steps"] == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]
        assert first["samples"] == second["samples"]
        assert first["weights"] == second["weights"]
        assert [len(reported["notes"]) for reported in (first, second)] == [2, 2]
        for reported in (first, second):
            assert_facts(reported["notes"][0], "all 2 ranks", "DataLoader")
    assert_facts(first["notes"][1], "5, 7 batches", "shortest")


def test_a_rank_without_a_batch_is_an_error_on_all(ranks: Pool) -> None:
    with pytest.raises(ValueError, match="batch in epoch 0") as info:
        ranks(2).run(streamed, Flowing, 0, 4)
    assert sum("yielded no batch" in note for note in info.value.__notes__) == 2


class OnceOnly(Flowing):
    """A stream that cannot be read again."""

    def __init__(self, size: int, more: int = 0) -> None:
        super().__init__(size, more)
        self.left = super().__iter__()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.left


def ended() -> tuple[Any, ...]:
    trainer, events, task = a_trainer(), list[str](), a_task()
    for kind in (TrainEnd, EpochEnd):
        trainer.bus.on(kind, lambda run, event: events.append(event.name))
    trainer.bus.on(TrainEnd, lambda run, event: run.control.request_save("at the end"))
    trainer.bus.on(SavePoint, lambda run, event: events.append(event.name))
    trainer.bus.on(ShouldStop, lambda run, event: None)  # so that the ranks post once more
    result = trainer.fit(task, DataLoader(OnceOnly(10, 4), 2), optimizer=sgd(), steps=99)
    weights = [each.tolist() for each in task.model.state_dict().values()]
    return result.status, result.reason, result.warnings, result.progress.steps, result.progress.epoch, events, weights


def test_data_that_end_for_good_end_the_run_on_all_ranks(ranks: Pool) -> None:
    """On the second rank the loader has two batches more: they make up for none in the next epoch."""
    first, second = ranks(2).run(ended)
    assert first == second
    status, reason, (warning,), steps, epoch, events, _ = first
    assert (status, steps, epoch) == ("stopped", 5, 1)
    assert_facts(reason, "train loader", "no batch", "epoch 1")
    assert "ended early" in warning
    assert events == ["epoch_end", "train_end", "save_point"]


def lied() -> Reported:
    return trained(DataLoader(Sized(6, 4, says=10), 2))


def test_so_is_one_that_ends_before_its_length(ranks: Pool) -> None:
    with pytest.raises(ValueError, match=pattern("3 batches", "length says 5", "ranks")) as info:
        ranks(2).run(lied)
    assert sum(has_facts(note, "3 batches", "length says 5") for note in info.value.__notes__) == 2


def too_small(saved: bytes | None = None, cut_at: int | None = None) -> Reported:
    data = DataLoader(Sized(10, 4, says=6), 2)
    return trained(data, GradientAccumulation(2), saved=saved, cut_at=cut_at)


def test_a_loader_that_has_more_than_its_length_is_read_until_the_first_rank_ends(ranks: Pool) -> None:
    first, second = ranks(2).run(too_small, None, 2)
    assert [place[:2] for place in first["places"][:5]] == [(0, batch) for batch in range(1, 6)]
    assert first["places"] == second["places"]
    assert first["steps"] == second["steps"] == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]
    resumed, _ = ranks(2).run(too_small, first["cut"])
    assert resumed["steps"] == first["steps"][4:]
    assert resumed["weights"] == first["weights"]


# Evaluations.


def evaluated(size: int, workers: int = 0) -> tuple[Any, ...]:
    sets = {
        "map": DataLoader(Drawing(size), 3, num_workers=workers),
        "list": batches_of([4, 1, 3]),
        "one": DataLoader(Drawing(2), 2),
    }
    result = a_trainer().validate(a_task(), sets)
    return result.metrics, result.progress.evaluated, result.progress.samples, result.notes


def validated() -> Reported:
    """Train without any data in common, so that the weights are the same, and validate on sets that draw."""
    sets = {"map": DataLoader(Drawing(17), 3), "list": batches_of([4, 1, 3]), "stream": DataLoader(Flowing(5), 2)}
    same = [batch for batch in batches_of([4, 4]) for _ in range(int(os.environ.get("WORLD_SIZE", "1")))]
    return trained(same, RNGCapture(5), ValidationSchedule(Every(epochs=1)), validation=sets)


def test_an_evaluation_equals_that_of_one_process(ranks: Pool) -> None:
    """To the last bit: the batches are the same, what they draw, and the order in which the values are added."""
    alone = validated()
    for count in (2, 4):
        for reported in ranks(count).run(validated):
            assert reported["metrics"] == alone["metrics"]
            assert reported["weights"] == alone["weights"]
            assert_each(reported["notes"], (f"all {count} ranks", "DataLoader", "evaluation", "run.engine.rank"))
    assert len(alone["metrics"]) == 6


def test_each_batch_is_read_by_one_rank(ranks: Pool) -> None:
    first, second = ranks(2).run(evaluated, 10)
    assert first == second
    assert first[1:] == (4 + 3 + 1, 10 + 8 + 2, ())


def nothing() -> None:
    a_trainer().validate(a_task(), iter(()))


def test_an_evaluation_without_a_batch_on_any_rank(ranks: Pool) -> None:
    with pytest.raises(ValueError, match="validation loader yielded no"):
        ranks(2).run(nothing)


class Tracking(Plugin):
    """Tracks something of its own; a plugin of the main rank only."""

    ranks = "main"

    @on(BatchEnd)
    def track(self, run: Run, event: BatchEnd) -> None:
        run.track("mine", 7.0 + run.engine.rank)


def logged() -> list[dict[str, float]]:
    logs: list[dict[str, float]] = []
    batches = [(torch.full((1 + number, 4), number / 10), torch.zeros(1 + number, 1)) for number in range(4)]
    trainer = a_trainer(Tracking(), LogSchedule(Every(steps=2)))
    trainer.bus.on(Log, lambda run, event: logs.append(dict(event.metrics)))
    task = a_task()
    task.loss_fn = lambda outputs, targets: outputs.sum() * 0 + len(targets)
    trainer.fit(task, batches, optimizer=sgd(momentum=0.9), epochs=1)
    return logs


def test_means_of_the_training_are_those_of_all_ranks(ranks: Pool) -> None:
    first, second = ranks(2).run(logged)
    assert first == second
    assert first[0]["train/loss"] == (1 * 1 + 2 * 2 + 3 * 3 + 4 * 4) / 10
    assert first[0]["train/mine"] == 7.0


# A data module.


class DiaryModule(DataModule):
    """Keeps a diary."""

    def __init__(self, fails: int | None = None) -> None:
        self.fails = fails
        self.diary: list[str] = []

    def prepare(self) -> None:
        self.diary.append("prepare")
        if self.fails == rank():
            raise ArithmeticError("no space left")

    def set_up(self) -> None:
        self.diary.append("set_up")

    def train(self) -> Any:
        return DataLoader(Drawing(), 4)


def prepared() -> list[str]:
    module = DiaryModule()
    for _ in range(2):
        trained(module)
    return module.diary


def failed() -> tuple[type, str, list[str], list[str]]:
    module, trainer, events = DiaryModule(fails=0), a_trainer(), list[str]()
    trainer.bus.on(RunFailed, lambda run, event: events.append(type(event.error).__name__))
    trainer.bus.on(RunClosed, lambda run, event: events.append(event.status))
    with pytest.raises((ArithmeticError, RankFailed)) as info:
        trainer.fit(a_task(), module, optimizer=sgd(), epochs=1)
    return type(info.value), str(info.value), module.diary, events


def test_one_process_of_a_machine_prepares(ranks: Pool) -> None:
    assert ranks(2).run(prepared) == [["prepare", "set_up", "set_up"], ["set_up", "set_up"]]


def test_where_that_fails_no_rank_waits(ranks: Pool) -> None:
    first, second = ranks(2).run(failed)
    assert first == (ArithmeticError, "no space left", ["prepare"], ["ArithmeticError", "failed"])
    assert (second[0], *second[2:]) == (RankFailed, [], ["RankFailed", "failed"])
    assert_facts(second[1], "rank 0", "ArithmeticError: no space left", "DiaryModule.prepare")


# Other numbers of ranks.


def test_a_larger_number_of_ranks_reports_what_drew_otherwise(ranks: Pool) -> None:
    cut = shuffled(8, cut_at=2)["cut"]
    rest = ranks(2).run(shuffled, 4, saved=cut)[0]
    assert "8 before, 2" in str(rest["resume"])


def test_a_smaller_number_of_ranks_reads_on_in_the_same_order(ranks: Pool) -> None:
    whole = shuffled(8)
    cut = ranks(2).run(shuffled, 4, cut_at=2)[0]["cut"]
    rest = shuffled(8, saved=cut)
    assert rest["batches"] == whole["batches"][2:]
    assert "4 before, 1" in str(rest["resume"])
    with pytest.raises(ValueError, match="is within a batch of 1 process"):
        shuffled(7, saved=cut)
