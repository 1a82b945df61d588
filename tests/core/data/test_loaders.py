"""Loaders made from datasets with loader_params, and several phases of training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    BatchEnd,
    EpochEnd,
    EpochStart,
    Every,
    Phases,
    Plugin,
    RandomSampler,
    Run,
    StepEnd,
    Trainer,
    TrainStart,
    ValidationSchedule,
    on,
)
from heliograph.core.data.loaders import evaluation_loader, make_loader, params_of_one_process, training_loaders
from heliograph.tests.messages import assert_facts
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

Make = Callable[..., Any]


def epoch(trial: Any, number: int, length: int) -> list[int]:
    """Return the indices of the samples of an epoch."""
    return [int(row[0]) for batch in trial.batches[number * length : (number + 1) * length] for row in batch]


# Datasets.


def test_a_dataset_is_read_in_order(drawing: Make, fit: Make) -> None:
    trial = fit(drawing(), loader_params={"batch_size": 5})
    assert epoch(trial, 0, 5) == epoch(trial, 1, 5) == list(range(22))
    assert trial.result.resume.reasons == ()


def test_by_default_a_batch_is_one_sample(drawing: Make, fit: Make) -> None:
    assert len(fit(drawing(3), loader_params={}).batches) == 6


def test_a_dataset_is_shuffled_again_in_every_epoch(drawing: Make, fit: Make) -> None:
    trials = [fit(drawing(), loader_params={"batch_size": 4, "shuffle": True}, seed=seed) for seed in (5, 5, 6)]
    orders = [epoch(trial, number, 6) for trial in trials for number in (0, 1)]

    assert orders[:2] == orders[2:4]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(22)) for order in orders)
    assert orders[0] == list(RandomSampler(22).indices(5, 0, 0))


def test_a_dataset_is_resumed(drawing: Make, fit: Make) -> None:
    params = {"batch_size": 4, "shuffle": True, "draws_per": "sample"}
    whole = fit(drawing(), loader_params=params, cut_at=[3])
    data = drawing()
    resumed = fit(data, loader_params=params | {"num_workers": 1}, saved=whole.cuts[3])

    assert resumed.is_tail_of(whole)
    assert data.asked == []


def test_every_parameter_reaches_the_loader(drawing: Make) -> None:
    def init(worker: int) -> None: ...

    params: Any = {
        "batch_size": 3,
        "num_workers": 1,
        "drop_last": True,
        "collate_fn": list,
        "pin_memory": False,
        "persistent_workers": True,
        "prefetch_factor": 7,
        "timeout": 9.0,
        "multiprocessing_context": "spawn",
        "worker_init_fn": init,
        "draws_per": "batch",
        "shuffle": True,
    }
    (loader,) = training_loaders(drawing(), params)

    assert type(loader) is DataLoader
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.collate_fn) == (3, 1, True, list)
    assert (loader.persistent_workers, loader.prefetch_factor, loader.timeout) == (True, 7, 9.0)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert loader.worker_init_fn is init
    assert type(loader.sampler) is RandomSampler
    assert len(loader) == 7


def test_a_sampler_is_the_order(drawing: Make, fit: Make) -> None:
    trial = fit(drawing(), loader_params={"batch_size": 2, "sampler": [5, 3, 8]})
    assert epoch(trial, 0, 2) == epoch(trial, 1, 2) == [5, 3, 8]
    with pytest.raises(ValueError, match="train loader is empty"):
        fit(drawing(), loader_params={"sampler": []})


def test_a_dataset_of_whole_batches(drawing: Make, fit: Make) -> None:
    whole = fit(drawing(), loader_params={"batch_size": None, "shuffle": True}, cut_at=[30])
    assert len(whole.batches) == 44
    assert fit(drawing(), loader_params={"batch_size": None, "shuffle": True}, saved=whole.cuts[30]).is_tail_of(whole)


def test_an_iterable_dataset(flowing: Make, fit: Make) -> None:
    trial = fit(flowing(), loader_params={"batch_size": 5, "num_workers": 1})
    assert epoch(trial, 0, 5) == list(range(22))
    assert trial.result.resume.position == "replayed"


def test_a_rank_s_part_of_a_global_batch(drawing: Make) -> None:
    (loader,) = training_loaders(drawing(), {"global_batch_size": 12, "draws_per": "sample"}, 3)
    assert (loader.batch_size, len(loader)) == (4, 6)  # of all ranks: the run deals it out
    assert params_of_one_process({"batch_size": 5}, 3) == {"batch_size": 5}
    assert params_of_one_process(None, 3) is None


def test_a_validation_set_is_read_in_order_and_whole(drawing: Make, fit: Make) -> None:
    data = drawing(10)
    params = {"batch_size": 4, "shuffle": True, "drop_last": True, "sampler": None, "draws_per": "sample"}
    fit(drawing(), loader_params=params, validation=data, plugins=[ValidationSchedule(Every(epochs=2))])

    assert data.asked == list(range(10))
    loader = evaluation_loader(data, {"batch_size": 4, "shuffle": True, "drop_last": True}, "validation")
    assert [len(batch) for batch in loader] == [4, 4, 2]


def test_a_test_of_a_dataset(drawing: Make, noisy: Make) -> None:
    data = drawing(10)
    result = Trainer(device="cpu").test(noisy(), {"a": data, "b": drawing(3)}, loader_params={"batch_size": 4})

    assert data.asked == list(range(10))
    assert result.progress.evaluated == 4
    assert set(result.metrics) == {"test/a/loss", "test/b/loss"}


# What is refused.


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def refused(train: Any, params: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as info:
        training_loaders(train, params)
    return f"{type(info.value).__name__}: {info.value}"


def test_parameters_are_checked(drawing: Make, flowing: Make) -> None:
    data, loader = drawing(), DataLoader(drawing(), 4)
    assert_facts(refused(data, {"batchsize": 4}), "ValueError", "loader_params=", "'batchsize'")
    assert "batch_size" in refused(data, {"batchsize": 4})
    assert_facts(refused(data, {"shuffle": "yes"}), "TypeError", "loader_params['shuffle']", "True or False", "'yes'")
    assert_facts(refused(data, 32), "TypeError", "loader_params=", "{'batch_size': 32")
    assert_facts(refused(data, {"draws_per": "epoch"}), "['draws_per']", "'batch' or 'sample'", "'epoch'")
    for number in (0, 2.0, True, None):
        assert_facts(
            refused(data, {"global_batch_size": number}),
            *("['global_batch_size']", "whole number", "at least 1", f"got {number!r}"),
        )
    for number in (0, 2.0, True):
        assert "batch_size should be a positive integer" in refused(data, {"batch_size": number})
    assert refused(data, {"batch_size": 4, "global_batch_size": 8}).endswith("not both.")
    assert_facts(refused(data, {"sampler": [1], "shuffle": True}), "not both", "sampler", "order")
    assert_facts(refused(loader, {"batch_size": 4}), "ValueError", "DataLoader is already")
    for order in ({"shuffle": True}, {"sampler": [1, 2]}):
        assert refused(flowing(), order) == (
            "ValueError: The train dataset is iterable and defines its own order: remove shuffle, sampler and "
            "draws_per."
        )
    assert refused(drawing(0), {"batch_size": 4}) == "ValueError: The train dataset is empty."
    assert refused(Endless(), {}) == "TypeError: object of type 'Endless' has no len()"
    assert refused(data, {"batch_size": 30, "drop_last": True}).startswith("ValueError: The train loader is empty")


def test_integers_of_numpy_are_welcome(drawing: Make) -> None:
    params: Any = {"batch_size": np.int64(4), "num_workers": np.int32(0)}
    (loader,) = training_loaders(drawing(), params)
    assert (loader.batch_size, type(loader.batch_size)) == (4, int)
    whole: Any = {"global_batch_size": np.int64(6)}
    assert training_loaders(drawing(), whole, 2)[0].batch_size == 3


def test_a_dataset_without_parameters(drawing: Make, noisy: Make) -> None:
    mend = r"is a Drawing, not batches: .* with loader_params=\{'batch_size': 32\}"
    with pytest.raises(TypeError, match=f"train loader {mend}"):
        Trainer(device="cpu").fit(noisy(), drawing(), epochs=1, optimizer=torch.optim.SGD)
    with pytest.raises(TypeError, match=f"test loader {mend}"):
        Trainer(device="cpu").test(noisy(), drawing())


def test_unequal_parts_are_refused(drawing: Make) -> None:
    with pytest.raises(ValueError, match="equally among 4 ranks:"):
        training_loaders(drawing(), {"global_batch_size": 10}, 4)
    with pytest.raises(ValueError, match="equally among 4 ranks:"):
        training_loaders(drawing(), {"global_batch_size": 1}, 4)


def test_parameters_for_an_evaluation_are_checked(drawing: Make, noisy: Make) -> None:
    with pytest.raises(ValueError, match="DataLoader is already"):
        Trainer(device="cpu").test(noisy(), DataLoader(drawing(), 4), loader_params={"batch_size": 4})
    with pytest.raises(ValueError, match="a dataset is empty"):
        Trainer(device="cpu").test(noisy(), {"a": drawing(0)}, loader_params={"batch_size": 4})


def test_torch_s_own_checks_are_made(drawing: Make) -> None:
    assert_facts(refused(drawing(), {"prefetch_factor": 2}), "ValueError", "prefetch_factor")


# Phases.


class Advance(Plugin):
    """Asks for the next phase after some steps, at an event."""

    def __init__(self, event: type, *steps: int) -> None:
        self.event, self.steps = event, steps

    @on(TrainStart, EpochStart)
    def at_a_start(self, run: Run, event: TrainStart | EpochStart) -> None:
        self._ask(run, event)

    @on(StepEnd, BatchEnd, EpochEnd)
    def at_an_end(self, run: Run, event: StepEnd | BatchEnd | EpochEnd) -> None:
        self._ask(run, event)

    def _ask(self, run: Run, event: Any) -> None:
        if type(event) is self.event and run.progress.steps in self.steps:
            run.control.next_phase("it was learned")


def easy(drawing: Make) -> DataLoader[Any]:
    return DataLoader(drawing(12), 4, shuffle=True)


def hard(drawing: Make) -> DataLoader[Any]:
    return DataLoader(drawing(10), 2, shuffle=True, num_workers=1, persistent_workers=True)


def sizes(trial: Any) -> list[int]:
    return [len(batch) for batch in trial.batches]


@pytest.mark.parametrize(
    ("event", "step", "expected"),
    [
        (TrainStart, 0, [2] * 15),
        (EpochStart, 0, [2] * 15),
        (EpochStart, 3, [4, 4, 4, *[2] * 10]),
        (StepEnd, 2, [4, 4, *[2] * 10]),
        (BatchEnd, 3, [4, 4, 4, *[2] * 10]),
        (EpochEnd, 3, [4, 4, 4, *[2] * 10]),
    ],
)
def test_the_next_phase_begins_with_an_epoch(
    event: type, step: int, expected: list[int], drawing: Make, fit: Make
) -> None:
    """And costs none: asked for between two epochs, it ends no epoch."""
    trial = fit(Phases(easy(drawing), hard(drawing)), plugins=[Advance(event, step)], epochs=3)

    assert sizes(trial) == expected
    assert trial.result.progress.epoch == 3


def test_without_a_request_the_first_phase_continues(drawing: Make, fit: Make) -> None:
    assert sizes(fit(Phases(easy(drawing), hard(drawing)), epochs=3)) == [4] * 9


def test_in_the_last_phase_the_request_has_no_effect(drawing: Make, fit: Make) -> None:
    trial = fit(Phases(easy(drawing), hard(drawing)), plugins=[Advance(StepEnd, 2, 3, 4, 8)], epochs=3)
    assert sizes(trial) == [4, 4, *[2] * 10]
    assert [request.verb for request in trial.result.history] == ["next_phase", "end_epoch", *["next_phase"] * 3]
    assert fit([*easy(drawing)], plugins=[Advance(StepEnd, 2)]).result.progress.steps == 6


def test_phases_are_distinguished_by_the_run(drawing: Make, fit: Make) -> None:
    seen: list[tuple[int, int | None, bool]] = []

    class Look(Plugin):
        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            seen.append(
                (run.data.phase, run.length.batches_per_epoch, run.data.train_loader is phases.loaders[run.data.phase])
            )

    phases = Phases(easy(drawing), hard(drawing))
    fit(phases, plugins=[Look(), Advance(StepEnd, 3)])
    assert seen == [(0, 3, True)] * 3 + [(1, 5, True)] * 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("event", [StepEnd, EpochEnd])
def test_a_phase_is_saved_and_resumed(event: type, drawing: Make, fit: Make) -> None:
    def phases() -> Phases:
        return Phases(easy(drawing), hard(drawing), [torch.ones(1, 7).double()] * 2)

    def plugins() -> list[Plugin]:
        at = (2, 7) if event is StepEnd else (3, 8)
        return [Advance(event, *at)]

    whole = fit(phases(), plugins=plugins(), epochs=4, cut_everywhere=True)
    assert sizes(whole) == [4] * (2 + (event is EpochEnd)) + [2] * 5 + [1] * 4
    for saved in whole.places.values():
        if saved["progress"]["steps"] < len(whole.batches):
            resumed = fit(phases(), plugins=plugins(), epochs=4, saved=saved)
            assert resumed.is_tail_of(whole)


def test_phases_of_datasets_and_loaders(drawing: Make, fit: Make) -> None:
    phases = Phases(drawing(12), easy(drawing))
    trial = fit(phases, loader_params={"batch_size": 6}, plugins=[Advance(StepEnd, 2)])
    assert sizes(trial) == [6, 6, 4, 4, 4]


def test_every_phase_is_checked(drawing: Make) -> None:
    with pytest.raises(ValueError, match=r"Phases\(\.\.\.\) takes at least"):
        Phases()
    assert refused(Phases(easy(drawing), []), None).startswith("ValueError: The train loader is empty")
    assert refused(Phases(easy(drawing), 3), None).startswith("TypeError: The train loader must be an iterable")
    assert refused(Phases(easy(drawing), []), {"batch_size": 2}).endswith(
        "DataLoader, list is already a loader: give its dataset."
    )


def test_workers_of_every_phase_are_let_go(drawing: Make, noisy: Make) -> None:
    loaders = [hard(drawing), hard(drawing)]
    trainer = Trainer([Advance(StepEnd, 5)], device="cpu")
    sources: list[Any] = []
    trainer.bus.on(TrainStart, lambda run, event: sources.extend(run.data._sources))
    trainer.fit(noisy(), Phases(*loaders), epochs=2, optimizer=torch.optim.SGD)

    assert [source._copy._iterator for source in sources] == [None, None]


def test_a_sampler_that_weights(drawing: Make, fit: Make) -> None:
    params = {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, *[0.0] * 21], 8)}
    assert epoch(fit(drawing(), loader_params=params), 0, 2) == [0] * 8


def test_another_librarys_dataset_is_recognized_by_its_methods() -> None:
    class Table:
        """Is no torch dataset."""

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([float(index)])

    loader = make_loader(Table(), {"batch_size": 2}, "train")

    assert [batch.flatten().tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0], [4.0]]


def test_an_iterable_dataset_is_not_keyed_by_sample() -> None:
    class Flow(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ValueError, match="draws_per"):
        make_loader(Flow(), {"draws_per": "sample"}, "train")
    assert list(evaluation_loader(Flow(), {"draws_per": "sample", "batch_size": None}, "validation")) == [0, 1, 2]
