"""What is known about a resume: for each kind of loader, and after a change of the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from heliograph import BatchEnd, GradientAccumulation, Plugin, ResumeReport, Run, Trainer, TrainStart, on
from heliograph.core.checkpoint.checks import check_plain
from heliograph.core.data.training_data import TrainingData
from heliograph.events import Progress
from heliograph.events.progress import worst
from heliograph.tests.messages import assert_each, assert_facts
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

Make = Callable[..., Any]

UNCAPTURED = "untracked: random generators (no plugin saves their state: add RNGCapture())"


def test_the_less_certain_position_counts() -> None:
    assert worst("seeked", "replayed") == worst("replayed", "seeked") == "replayed"
    assert worst("unknown", "replayed") == "unknown"
    assert worst("seeked", "seeked") == "seeked"


@pytest.mark.sample(4)
@pytest.mark.parametrize("step", [1, 5, 6, 7, 11])
@pytest.mark.parametrize("workers", [(0, 0), (2, 0), (0, 1)])
def test_a_map_style_loader_resumes_bitwise_equal(
    step: int, workers: tuple[int, int], drawing: Make, collate: Any, fit: Make
) -> None:
    def made(workers: int) -> DataLoader[Any]:
        return DataLoader(drawing(), 4, shuffle=True, collate_fn=collate, num_workers=workers)

    whole = fit(made(workers[0]), cut_at=[step])
    resumed = fit(made(workers[1]), saved=whole.cuts[step])

    place = whole.cuts[step]["progress"]
    assert resumed.is_tail_of(whole)
    assert whole.result.resume == ResumeReport()
    assert replace(resumed.result.resume, edited=()) == ResumeReport(  # the function that resumes is new
        epoch=place["epoch"], batch=place["batch"], step=step, unclaimed_states=("save_schedule",), world_sizes=(1, 1)
    )


def test_a_chain_of_resumes_is_bitwise_equal(drawing: Make, fit: Make) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(drawing(), 4, sampler=WeightedRandomSampler([1.0, 3.0] * 11, 22), num_workers=1)

    whole = fit(made(), epochs=3)
    saved = fit(made(), epochs=3, cut_at=[2]).cuts[2]
    for step in (6, 9, 13):
        part = fit(made(), saved=saved, cut_at=[step], epochs=3)
        saved = part.cuts[step]
        assert part.is_tail_of(whole)


class LeaveEarly(Plugin):
    """Ends the first epoch after three of its six batches."""

    @on(BatchEnd)
    def leave(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batch == 3 and run.progress.epoch == 0:
            run.control.end_epoch("enough")


@pytest.mark.parametrize("place", [(0, 2), (0, 3), (1, 0), (1, 4)])
def test_an_epoch_that_was_left_early(place: tuple[int, int], drawing: Make, fit: Make) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(drawing(), 4, shuffle=True, num_workers=1, persistent_workers=True)

    whole = fit(made(), plugins=[LeaveEarly()], cut_everywhere=True)
    assert len(whole.batches) == 9
    assert fit(made(), plugins=[LeaveEarly()], saved=whole.places[place]).is_tail_of(whole)


def test_without_rng_capture_only_the_order_is_equal(drawing: Make, fit: Make) -> None:
    torch.manual_seed(3)
    whole = fit(DataLoader(drawing(), 4, shuffle=True), seed=None, cut_at=[3, 8])
    torch.manual_seed(4)
    for step in (3, 8):
        resumed = fit(DataLoader(drawing(), 4, shuffle=True), seed=None, saved=whole.cuts[step])
        assert [[sample[0] for sample in batch] for batch in resumed.batches] == [
            [sample[0] for sample in batch] for batch in whole.batches[step:]
        ]
        assert resumed.batches != whole.batches[step:]
        assert resumed.losses != whole.losses[step:]
        assert resumed.result.resume.reasons == (UNCAPTURED,)
    assert_facts(resumed.result.resume, "step 8", "nothing to verify", UNCAPTURED)
    assert str(resumed.result.resume) in str(resumed.result).splitlines()


def test_an_iterable_dataset_is_replayed(flowing: Make, fit: Make) -> None:
    result = fit(DataLoader(flowing(), 4), seed=None).result
    assert (result.resume.position, result.resume.reasons) == ("replayed", (UNCAPTURED,))


@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader).parameters, reason="no in_order")
@pytest.mark.parametrize(("workers", "position"), [(2, "unknown"), (0, "seeked")])
def test_batches_in_any_order(workers: int, position: str, drawing: Make, fit: Make) -> None:
    loader = DataLoader(drawing(), 4, num_workers=workers, in_order=False)
    resume = fit(loader).result.resume

    assert resume.position == position
    assert ["in_order=False" in reason for reason in resume.reasons] == [True] * (workers > 0)


def test_an_evaluation_has_no_such_thing(drawing: Make, noisy: Make) -> None:
    result = Trainer(device="cpu").test(noisy(), DataLoader(drawing(), 4))
    assert result.resume is None
    assert "resume" not in str(result)


# Changed data.


def test_data_that_changed_during_an_epoch_are_refused(drawing: Make, fit: Make) -> None:
    saved = fit(DataLoader(drawing(), 4, shuffle=True), cut_at=[3]).cuts[3]
    changed: list[tuple[Any, list[str]]] = [
        (DataLoader(drawing(21), 4, shuffle=True), ["samples was 22", "is 21"]),
        (DataLoader(drawing(), 4), ["order was 'shuffle-1'", "is 'sequential'"]),
        (DataLoader(drawing(), 4, shuffle=True, drop_last=True), ["drop_last was False", "is True"]),
        (DataLoader(drawing(20), 5), ["order was", "samples was 22", "is 20"]),
        ([torch.zeros(2, 7).double()] * 9, ["source was 'map'", "is 'sequence'", "batches was None", "is 9"]),
    ]
    for loader, changes in changed:
        with pytest.raises(ValueError, match="written within") as info:
            fit(loader, saved=saved)
        assert all(change in str(info.value) for change in changes)
        assert "Resume with the same" in str(info.value)


def samples(batches: list[Any]) -> list[int]:
    return [int(sample[0]) for batch in batches for sample in batch]


SAMPLERS: list[dict[str, Any]] = [
    {"shuffle": True},
    {"shuffle": True, "num_workers": 1},
    {"sampler": WeightedRandomSampler([1.0, 3.0] * 11, 22)},
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("options", SAMPLERS)
@pytest.mark.parametrize(
    ("size", "sizes"),
    [(2, [2] * 5), (3, [3, 3, 3, 1]), (6, [6, 4]), (12, [10])],
)
def test_other_batches_continue_at_the_same_sample(
    size: int, sizes: list[int], options: dict[str, Any], drawing: Make, fit: Make
) -> None:
    def made(size: int) -> DataLoader[Any]:
        return DataLoader(drawing(), size, **options)

    whole = fit(made(4), epochs=1, cut_at=[3])
    resumed = fit(made(size), epochs=1, saved=whole.cuts[3])

    assert [len(batch) for batch in resumed.batches] == sizes
    assert samples(resumed.batches) == samples(whole.batches[3:])
    assert resumed.result.progress.samples == 22
    assert resumed.result.resume.reasons
    assert f"4 and is {size}:" in str(resumed.result.resume)


def test_the_same_steps_of_other_batches(drawing: Make, fit: Make) -> None:
    def trained(size: int, accumulated: Any, **options: Any) -> Any:
        params = {"batch_size": size, "shuffle": True, "draws_per": "sample"}
        plugins = [] if accumulated is None else [GradientAccumulation(accumulated)]
        return fit(drawing(20), loader_params=params, plugins=plugins, **options)

    saved = trained(4, None, cut_at=[3]).cuts[3]
    alike = ("batch size was 4", "is 2")
    for accumulated in (2, {0: 2, 5: 2}):
        resume = trained(2, accumulated, saved=saved).result.resume
        assert_each(resume.reasons, alike, ["'gradient_accumulation' is new"])

    saved = trained(2, 2, cut_at=[3]).cuts[3]
    gone, fewer = (trained(4, number, saved=saved).result.resume for number in (None, 1))
    assert_each(gone.reasons, ("batch size was 2", "is 4"), ["'gradient_accumulation' is no longer registered"])
    assert_each(fewer.reasons, ("batch size was 2", "is 4"), ["'gradient_accumulation' had schedule = {0: 2}"])
    other = trained(1, {0: 4, 1: 5}, saved=saved).result.resume
    assert any("{0: 4, 1: 5}" in line for line in other.reasons)


def test_what_drop_last_leaves_out_is_said(drawing: Make, fit: Make) -> None:
    saved = fit(DataLoader(drawing(), 4, drop_last=True), cut_at=[3]).cuts[3]
    reasons = fit(DataLoader(drawing(), 3, drop_last=True), saved=saved).result.resume.reasons
    assert any("drop_last drops other samples:" in line for line in reasons)


def test_a_loader_that_iterates_in_its_own_way_keeps_its_batches(drawing: Make, fit: Make) -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    saved = fit(Own(drawing(), 4), cut_at=[3]).cuts[3]
    with pytest.raises(ValueError, match="batch_size was 4"):
        fit(Own(drawing(), 2), saved=saved)


def test_an_iterable_dataset_keeps_its_batches(flowing: Make, fit: Make) -> None:
    saved = fit(DataLoader(flowing(), 4), cut_at=[3]).cuts[3]
    with pytest.raises(ValueError, match="batch_size was 4"):
        fit(DataLoader(flowing(), 2), saved=saved)


def test_draws_by_sample_are_other_draws(drawing: Make, fit: Make) -> None:
    saved = fit(drawing(), loader_params={"batch_size": 4}, cut_at=[3]).cuts[3]
    with pytest.raises(ValueError, match="draws_per was 'batch'"):
        fit(drawing(), loader_params={"batch_size": 4, "draws_per": "sample"}, saved=saved)


def test_a_changed_sampler_of_another_kind(drawing: Make, fit: Make) -> None:
    def made(size: int, sampler: Any) -> DataLoader[Any]:
        return DataLoader(drawing(), size, sampler=sampler)

    saved = fit(made(4, WeightedRandomSampler([1.0] * 22, 22)), cut_at=[3]).cuts[3]
    with pytest.raises(ValueError, match=r"WeightedRandomSampler.* and is .*SubsetRandomSampler"):
        fit(made(4, SubsetRandomSampler(range(22))), saved=saved)


def test_a_refused_state_leaves_the_task_as_it_was(drawing: Make, noisy: Make, fit: Make) -> None:
    saved = fit(DataLoader(drawing(), 4), cut_at=[3]).cuts[3]
    task = noisy()
    before = [each.tolist() for each in task.model.parameters()]
    trainer = Trainer(device="cpu")
    trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    with pytest.raises(ValueError, match="within an epoch"):
        trainer.fit(task, DataLoader(drawing(21), 4), epochs=2, optimizer=torch.optim.SGD)

    assert [each.tolist() for each in task.model.parameters()] == before


def test_between_epochs_a_change_is_said(drawing: Make, flowing: Make, fit: Make) -> None:
    saved = fit(DataLoader(drawing(), 4, shuffle=True), cut_everywhere=True).places[1, 0]
    resumed = fit(DataLoader(drawing(30), 5, shuffle=True), saved=saved)
    other = fit(DataLoader(flowing(), 4), saved=saved)

    assert len(resumed.batches) == 6
    assert_each(
        resumed.result.resume.reasons,
        ("the resume", "samples was 22", "is 30"),
        ("batch_size 4", "accumulation 1", "batch_size 5", "accumulation 1"),
        ("dataset.size was 22", "is 30"),
    )
    assert "'map' and is 'iterable'" in str(other.result.resume.reasons)


def test_a_migrated_state_knows_nothing_of_the_order(drawing: Make, fit: Make) -> None:
    saved = fit(DataLoader(drawing(), 4), cut_at=[3]).cuts[3]
    saved["data"] |= {"source": None, "layout": None, "state": {}, "seed": None}
    resumed = fit(DataLoader(drawing(), 4), saved=saved)

    assert len(resumed.batches) == 9
    (reason,) = resumed.result.resume.reasons
    assert reason.startswith("the order of samples")


# The state.


def test_the_state_is_plain_and_comes_back(drawing: Make) -> None:
    loader = DataLoader(drawing(), 4, shuffle=True)
    data = TrainingData([loader])
    data.key(2**64 + 3)
    state = data.state_dict(Progress())
    check_plain(state, "data")
    other = TrainingData([loader])
    other.load_state_dict(state, {"epoch": 0, "batch": 3})

    assert state == {
        "seed": 2**64 + 3,
        "phase": 0,
        "advances": False,
        "facts": {"hidden": [], "differences": []},
        "source": {
            "source": "map",
            "draws_per": "batch",
            "order": "shuffle-1",
            "seed": None,
            "samples": 22,
            "drop_last": False,
        },
        "layout": {"world_size": 1, "batch_size": 4, "batches": 6, "common": True},
        "last_batch": None,
        "state": {},
    }
    assert other.state_dict(Progress()) == state
    assert other.seed == 2**64 + 3


def test_a_saved_seed_goes_before_the_one_of_the_new_run(drawing: Make, fit: Make) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(drawing(), 4, shuffle=True)

    whole = fit(made(), seed=5, cut_at=[7])
    resumed = fit(made(), seed=99, saved=whole.cuts[7])
    assert resumed.is_tail_of(whole)


def test_a_phase_that_there_is_not(drawing: Make, fit: Make) -> None:
    saved = fit(DataLoader(drawing(), 4), cut_at=[3]).cuts[3]
    saved["data"]["phase"] = 1
    with pytest.raises(ValueError, match="training phase 1,"):
        fit(DataLoader(drawing(), 4), saved=saved)


def test_nothing_to_train_on() -> None:
    data = TrainingData([])
    data.load_state_dict(data.state_dict(Progress()), {"batch": 0})
    assert data.source is None
    assert (data.resume_facts().sentences, data.resume_facts().position) == ((UNCAPTURED,), "seeked")
    data.close()


def test_what_a_finished_run_says(drawing: Make, fit: Make) -> None:
    saved = fit(DataLoader(drawing(), 4), cut_everywhere=True).places[2, 0]
    resumed = fit(DataLoader(drawing(), 4), saved=saved)
    assert (resumed.batches, resumed.result.resume.epoch) == ([], 2)
    assert_facts(resumed.result.reason, "nothing left", "epoch 2", "step 12")


class CountsEpochs(Sampler[int]):
    """Keeps a state that no key reaches."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(22, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Draws(CountsEpochs):
    """Draws its order, and keeps nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22).tolist())


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", [CountsEpochs, Draws])
def test_the_attributes_of_a_sampler_are_compared(
    kind: type[CountsEpochs], batched: bool, drawing: Make, fit: Make
) -> None:
    def made() -> DataLoader[Any]:
        sampler = kind()
        how = {"batch_sampler": BatchSampler(sampler, 4, False)} if batched else {"sampler": sampler, "batch_size": 4}
        return DataLoader(drawing(), **how)

    whole = fit(made(), cut_everywhere=True)
    assert whole.result.resume.reasons == ()
    for place in ((0, 3), (1, 0), (1, 3)):
        resumed = fit(made(), saved=whole.places[place])
        assert resumed.is_tail_of(whole) is (kind is Draws or place[0] == 0)
        changed = ["sampler.epoch was" in reason for reason in resumed.result.resume.reasons]
        assert changed == [True] * (kind is CountsEpochs and place[0] > 0)


def test_another_seed_of_the_sampler_during_an_epoch_is_refused(drawing: Make, fit: Make) -> None:
    def made(seed: int) -> DataLoader[Any]:
        return DataLoader(drawing(), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))

    saved = fit(made(1), cut_at=[2]).cuts[2]

    with pytest.raises(ValueError, match="1 and is 2"):
        fit(made(2), saved=saved)


def test_a_difference_is_reported_by_later_resumes_too(drawing: Make, fit: Make) -> None:
    border = fit(DataLoader(drawing(), 4), cut_everywhere=True).places[1, 0]
    second = fit(DataLoader(drawing(), 2), saved=border, cut_everywhere=True)
    third = fit(DataLoader(drawing(), 2), saved=second.places[1, 3])

    assert second.result.resume.reasons == third.result.resume.reasons
    assert third.result.resume.reasons == (
        "random draws of loading, such as augmentation, are keyed by batch and rank and differ now: 1 process x "
        "batch_size 4 before, 1 process x batch_size 2 now; "
        "to avoid that, start a training with loader_params={'draws_per': 'sample'}",
        "the batch size was 4 and is 2: values computed over a batch differ",
        "the global batch was 1 rank x batch_size 4 x accumulation 1, and is 1 rank x batch_size 2 x accumulation 1",
    )


class Again:
    """Yields the same batches in every pass."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(56, dtype=torch.float64).reshape(4, 2, 7))


def test_what_was_not_compared_is_not_claimed(fit: Make) -> None:
    """Within an epoch the last batch is read again and compared, between two epochs nothing is."""
    whole = fit(Again(), cut_everywhere=True)
    assert fit(Again(), saved=whole.places[0, 2]).result.resume.position == "replayed"
    resume = fit(Again(), saved=whole.places[1, 0]).result.resume
    assert resume.reasons
    assert "not compared" in resume.reasons[-1]
