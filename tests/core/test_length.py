"""The length of a run before it: how many optimizer steps are planned, and a fraction of an epoch at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    Between,
    Checkpoint,
    DataModule,
    EpochEnd,
    EpochStart,
    Every,
    GradientAccumulation,
    GradientsReady,
    LastBoundary,
    Phases,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    TrainEnd,
    Trainer,
    on,
    tuning,
)
from heliograph.tests import kit
from heliograph.tests.kit import Losses, class_batches, fit, linear_classifier, make_run
from heliograph.tests.ranks_pool import Pool
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Schedule = int | dict[int, int]


def dataset(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size) % 2)


def trainer_of(accumulation: Schedule = 1, *plugins: Any, **options: Any) -> Trainer:
    return Trainer([GradientAccumulation(accumulation), *plugins], **({"device": "cpu"} | options))


class Unsized(IterableDataset[Any]):
    """Batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(class_batches(5))


# The number of steps.


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    accumulation=st.one_of(
        st.integers(1, 5), st.builds(lambda one, first, other: {0: one, first: other}, *[st.integers(1, 4)] * 3)
    ),
    epochs=st.one_of(st.integers(1, 4), st.sampled_from([0.1, 0.5, 1.25, 1.1, 7 / 3, 2.5, 3.99])),
    steps=st.none() | st.integers(1, 30),
)
@settings(deadline=None, max_examples=60)
def test_a_run_makes_as_many_steps_as_are_planned(
    size: int, batch_size: int, drop_last: bool, accumulation: Schedule, epochs: float, steps: int | None
) -> None:
    params: Any = {"batch_size": min(size, batch_size), "drop_last": drop_last, "shuffle": True}
    trainer, data = trainer_of(accumulation), dataset(size)

    planned = tuning.planned_steps(trainer, data, epochs=epochs, steps=steps, loader_params=params)
    result = fit(trainer, train=data, epochs=epochs, steps=steps, loader_params=params)

    assert result.progress.steps == planned


@pytest.mark.parametrize(
    ("accumulation", "options", "steps"),
    [
        (1, {"epochs": 3}, 21),
        (2, {"epochs": 3}, 12),  # windows of 2, 2, 2 and 1 batches
        ({0: 1, 2: 4}, {"epochs": 3}, 7 + 7 + 2),
        ({0: 1, 5: 4}, {"epochs": 3}, 21),
        (2, {"epochs": 1.5}, 6),
        (2, {"epochs": 1.5, "steps": 5}, 5),
        (2, {"epochs": 1.5, "steps": 50}, 6),
        (4, {"steps": 50}, 50),
    ],
)
def test_windows_and_schedules_of_accumulation_are_counted(
    accumulation: Schedule, options: dict[str, Any], steps: int
) -> None:
    assert tuning.planned_steps(trainer_of(accumulation), class_batches(7), **options) == steps


def test_a_switched_off_accumulation_does_not_count() -> None:
    trainer = trainer_of(4)
    trainer.plugins.disable("gradient_accumulation")
    assert tuning.planned_steps(trainer, class_batches(7), epochs=1) == 7


def test_a_run_knows_its_planned_steps_and_which_part_is_done() -> None:
    seen = []
    trainer = trainer_of()
    trainer.bus.on(
        BatchEnd,
        lambda run, event: seen.append(
            (run.length.planned_steps, run.length.fraction, run.length.epoch_fraction, run.length.max_epochs)
        ),
    )
    fit(trainer, train=class_batches(4), epochs=1.5)
    assert seen == [(6, step / 6, step / 4, 1.5) for step in range(1, 7)]


def test_a_skipped_step_is_a_part_of_a_run_by_epochs_but_not_of_one_by_steps() -> None:
    def parts(**length: int) -> list[float | None]:
        seen: list[float | None] = []
        trainer = Trainer([Skips()], device="cpu")
        trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.length.fraction))
        fit(trainer, train=class_batches(2), **length)
        return seen

    class Skips(Plugin):
        asks = ("skip_step",)

        @on(GradientsReady)
        def skip_the_first(self, run: Run, event: GradientsReady) -> None:
            if run.progress.batches == 0:
                run.control.skip_step("the first")

    assert parts(epochs=2) == [0.25, 0.5, 0.75, 1.0]
    assert parts(steps=2) == [0.0, 0.5, 1.0]


def test_neither_part_is_known_without_a_length() -> None:
    seen = []
    trainer = trainer_of()
    trainer.bus.on(
        StepEnd,
        lambda run, event: seen.append((run.length.planned_steps, run.length.fraction, run.length.epoch_fraction)),
    )
    fit(trainer, train=DataLoader(Unsized(), batch_size=None), epochs=1)
    assert set(seen) == {(None, None, None)}


@pytest.mark.parametrize(
    ("train", "options", "words"),
    [
        (DataLoader(Unsized(), batch_size=None), {"epochs": 2}, "steps= instead of epochs=.*__len__"),
        (DataLoader(Unsized(), batch_size=None), {"epochs": 2, "steps": 3}, "loader has no length"),
        (Phases(class_batches(3), class_batches(5)), {"epochs": 2}, "phases.*not equally long"),
        (class_batches(3), {}, "no length.*epochs= or steps="),
    ],
)
def test_an_unknown_number_is_refused_with_the_mend(train: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"run, and .*{words}"):
        tuning.planned_steps(trainer_of(), train, **options)


def test_phases_that_are_equally_long_or_cut_by_steps_are_counted() -> None:
    assert tuning.planned_steps(trainer_of(), Phases(class_batches(3), class_batches(3)), epochs=2) == 6
    assert tuning.planned_steps(trainer_of(), Phases(class_batches(3), class_batches(5)), epochs=2, steps=6) == 6


class Accumulates(Plugin):
    """Adds up two batches, and may say so."""

    exclusive = ("accumulation",)

    def __init__(self, number: int | None) -> None:
        if number is not None:
            self.number = lambda epoch: number


def test_an_accumulation_on_a_condition_is_refused() -> None:
    accumulation = GradientAccumulation(4).when(Between(epochs=(2, 5)))
    trainer = Trainer([accumulation], device="cpu")
    with pytest.raises(ValueError, match="a schedule instead of a condition"):
        tuning.planned_steps(trainer, class_batches(8), epochs=4)
    assert tuning.planned_steps(trainer, class_batches(8), steps=4) == 4


def test_a_plugin_of_others_that_accumulates_is_asked_for_its_number() -> None:
    assert tuning.planned_steps(Trainer([Accumulates(2)], device="cpu"), class_batches(5), epochs=2) == 6
    with pytest.raises(ValueError, match="'accumulates' accumulates gradients"):
        tuning.planned_steps(Trainer([Accumulates(None)], device="cpu"), class_batches(5), epochs=2)


def test_a_data_module_is_set_up_and_torn_down_for_it() -> None:
    calls = []

    class Digits(DataModule):
        def __init__(self) -> None:
            self.loader_params = {"batch_size": 4}

        def set_up(self) -> None:
            calls.append("set up")

        def tear_down(self) -> None:
            calls.append("torn down")

        def train(self) -> Dataset[Any]:
            return dataset(10)

    assert tuning.planned_steps(trainer_of(), Digits(), epochs=2) == 6
    assert calls == ["set up", "torn down"]


def plan_and_fit(size: int, accumulation: Schedule, epochs: float, params: Any) -> list[int]:
    trainer = Trainer([GradientAccumulation(accumulation)], engine="ddp", device="cpu")
    planned = tuning.planned_steps(trainer, dataset(size), epochs=epochs, loader_params=params)
    result = fit(trainer, train=dataset(size), epochs=epochs, loader_params=params)
    return [planned, result.progress.steps, result.progress.batches]


@pytest.mark.parametrize(
    ("accumulation", "epochs", "more", "found"),
    [
        (1, 2, {}, [6, 6, 6]),  # 22 samples are 6 batches of 4, of which each rank reads 3
        (2, 2, {}, [4, 4, 6]),
        (1, 2, {"drop_last": True}, [4, 4, 4]),
        (1, 1.5, {}, [5, 5, 5]),
        ({0: 1, 1: 2}, 1.5, {}, [4, 4, 5]),
    ],
)
def test_on_two_ranks_each_reads_its_share(
    ranks: Pool, accumulation: Schedule, epochs: float, more: dict[str, Any], found: list[int]
) -> None:
    params = {"batch_size": 4, **more}
    for each in ranks(2).run(plan_and_fit, 22, accumulation, epochs, params):
        assert each == found


# A fraction of an epoch.


def events_of(accumulation: Schedule = 1, **options: Any) -> tuple[list[str], RunResult]:
    """Return what happens, but for batches, in a run of 5 batches an epoch."""
    trainer, names = trainer_of(accumulation), list[str]()
    for event in (EpochStart, StepEnd, EpochEnd, LastBoundary, TrainEnd):
        trainer.bus.on(event, lambda run, event: names.append(event.name))
    return names, fit(trainer, train=class_batches(5), **options)


def test_one_and_a_half_epochs_end_within_the_second_without_its_end() -> None:
    names, result = events_of(epochs=1.5)
    first = ["epoch_start", *["step_end"] * 5, "epoch_end"]
    assert names == [*first, "epoch_start", *["step_end"] * 3, "last_boundary", "train_end"]
    assert (result.progress.epoch, result.progress.batch, result.progress.steps) == (1, 3, 8)
    assert (result.status, result.reason, result.warnings) == ("completed", "1.5 epochs done", ())


def test_the_fraction_is_of_steps_and_ends_with_a_whole_window() -> None:
    names, result = events_of({0: 1, 1: 2}, epochs=1.5)  # 3 steps in the second epoch, of which 1.5 are 2
    assert names.count("step_end") == 7
    assert (result.progress.epoch, result.progress.batch) == (1, 4)


def test_a_fraction_that_rounds_up_to_the_whole_ends_the_epoch() -> None:
    names, result = events_of(epochs=1.9)
    assert names.count("epoch_end") == 2
    assert (result.progress.epoch, result.progress.batch, result.reason) == (2, 0, "2 epochs done")


def test_the_error_of_a_float_is_not_rounded_up() -> None:
    """1.1 x 10 is 11.000000000000002."""
    assert tuning.planned_steps(trainer_of(), class_batches(10), epochs=1.1) == 11
    assert tuning.planned_steps(trainer_of(), class_batches(3), epochs=7 / 3) == 7


def test_epochs_that_are_a_whole_float_are_whole() -> None:
    names, result = events_of(epochs=2.0)
    assert names.count("epoch_end") == 2
    assert result.reason == "2 epochs done"


def test_a_loop_of_ones_own_ends_there_too() -> None:
    run = kit.go_through(make_run(Trainer(device="cpu"), 5, epochs=1.5))  # type: ignore[arg-type]
    assert (run.progress.epoch, run.progress.batch, run.result.status) == (1, 3, "completed")


def test_skipped_batches_do_not_move_the_end() -> None:
    class Skips(Plugin):
        asks = ("skip_batch",)

        @on(BatchStart)
        def skip(self, run: Run, event: BatchStart) -> None:
            if run.progress.batches in (1, 6):
                run.control.skip_batch("two of them")

    result = fit(Skips(), train=class_batches(5), epochs=1.5)
    assert (result.progress.epoch, result.progress.batch, result.progress.steps) == (1, 3, 6)


@pytest.mark.parametrize("train", [Unsized(), iter(class_batches(5))], ids=["dataset", "iterator"])
def test_a_fraction_is_refused_without_a_length(train: Any) -> None:
    loader = DataLoader(train, batch_size=None) if isinstance(train, Unsized) else train
    with pytest.raises(ValueError, match=r"^epochs=1.5 ends within"):
        fit(train=loader, epochs=1.5)


def test_a_fraction_is_refused_where_nobody_knows_what_a_step_is() -> None:
    with pytest.raises(ValueError, match=r"^epochs=0.5 ends within"):
        fit(Accumulates(None), epochs=0.5)


def test_each_phase_has_a_length_that_the_fraction_is_of() -> None:
    def advance(run: Run, event: EpochEnd) -> None:
        run.control.next_phase("after the first epoch")

    trainer = trainer_of()
    trainer.bus.on(EpochEnd, advance)
    result = fit(trainer, train=Phases(class_batches(3), class_batches(8)), epochs=1.25)
    assert (result.progress.epoch, result.progress.batch, result.progress.steps) == (1, 2, 5)


def weights(task: Any) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in task.model.state_dict().items()}


def train_to(folder: Path, epochs: float, workers: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    losses, task = Losses(), linear_classifier()
    plugins = [RNGCapture(), SaveSchedule(Every(epochs=5)), Checkpoint(folder, resume="auto")]  # the end is saved, too
    params: Any = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    fit(
        *plugins,
        GradientAccumulation(2),
        losses,
        task=task,
        train=dataset(30),
        epochs=epochs,
        loader_params=params,
    )
    return losses.values, weights(task)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_ended_within_an_epoch_is_extended_bit_for_bit(tmp_path: Path, workers: int) -> None:
    whole, expected = train_to(tmp_path / "whole", 2.75, workers)
    parts = [train_to(tmp_path / "parts", epochs, workers) for epochs in (0.5, 1.5, 1.5, 2.75)]

    assert [loss for losses, _ in parts for loss in losses] == whole
    assert [len(losses) for losses, _ in parts] == [4, 8, 0, 10]
    assert {name: each.tolist() for name, each in parts[-1][1].items()} == {
        name: each.tolist() for name, each in expected.items()
    }


def extend_on_ranks(folder: Path) -> tuple[list[float], list[float], bool]:
    def train(name: str, epochs: float) -> tuple[list[float], dict[str, Tensor]]:
        losses, task = Losses(), linear_classifier()
        plugins = [RNGCapture(), SaveSchedule(Every(epochs=5)), Checkpoint(folder / name, resume="auto"), losses]
        trainer = Trainer([*plugins, GradientAccumulation(2)], engine="ddp", device="cpu")
        fit(trainer, task=task, train=dataset(30), epochs=epochs, loader_params={"batch_size": 2, "shuffle": True})
        return losses.values, weights(task)

    whole, expected = train("whole", 2.5)
    (first, _), (second, found) = train("parts", 1.5), train("parts", 2.5)
    return whole, [*first, *second], all(expected[name].equal(found[name]) for name in expected)


def test_on_two_ranks_it_is_extended_bit_for_bit(ranks: Pool, tmp_path: Path) -> None:
    for whole, parts, is_equal in ranks(2).run(extend_on_ranks, tmp_path):
        assert parts == whole
        assert len(whole) == 8 + 8 + 4
        assert is_equal
