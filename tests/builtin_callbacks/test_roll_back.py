"""RollBack: back to the last good checkpoint, and the offending batches left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    BatchStart,
    Checkpoint,
    CheckpointLoaded,
    CheckpointSaved,
    DDPEngine,
    Every,
    FSDPEngine,
    GradientAccumulation,
    Lane,
    NaNGuard,
    Plugin,
    RNGCapture,
    RollBack,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    Supervised,
    Trainer,
    on,
)
from heliograph.builtin_callbacks.checkpoint import background_writer
from heliograph.builtin_callbacks.checkpoint.background_writer import BackgroundWorker
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import reader
from heliograph.tests.kit import counters
from heliograph.tests.messages import assert_each, assert_facts

Make = Callable[..., Any]


class Spoil(Plugin):
    """Makes the inputs of some batches, given as (epoch, batch), no numbers."""

    affects_training = False  # a fault from outside

    def __init__(self, *places: tuple[int, int], value: float = math.nan) -> None:
        self.places, self.value = places, value
        self.met: list[tuple[int, int]] = []

    @on(BatchStart, lane=Lane.TRANSFORM)
    def replace(self, run: Run, event: BatchStart) -> None:
        place = run.progress.epoch, run.progress.batch
        if place in self.places:
            self.met.append(place)
            run.batch = (torch.full_like(run.batch[0], self.value), run.batch[1])


class LeaveOut(Plugin):
    """Leaves the same batches out from the beginning."""

    def __init__(self, *places: tuple[int, int]) -> None:
        self.places = places

    @on(BatchStart)
    def leave_out(self, run: Run, event: BatchStart) -> None:
        if (run.progress.epoch, run.progress.batch) in self.places:
            run.control.skip_batch("test")


@pytest.fixture
def fit(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> Make:
    """Return a function that trains two epochs of six batches, with a save every two steps."""

    def make(
        *plugins: Any,
        folder: str = "a",
        every: int = 2,
        resume: Any = None,
        keep: int = 9,
        slow: bool = False,
        at_start: bool = False,
        **options: Any,
    ) -> tuple[RunResult, Any]:
        mine = task(dropout=0.5)
        kept = Checkpoint(tmp_path / folder, keep_last=keep, resume=resume, background=slow)
        saving = [SaveSchedule(Every(steps=every), at_start=at_start), kept]
        trainer = Trainer([*saving, RNGCapture(), *plugins], device="cpu")
        return trainer.fit(mine, batches(6), optimizer=sgd, **{"epochs": 2, **options}), mine

    return make


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("places", [[(0, 2)], [(0, 3), (1, 0)], [(1, 5)], [(0, 4), (0, 5), (1, 1)]])
def test_a_run_that_went_back_equals_one_that_left_the_batches_out(
    places: list[tuple[int, int]], value: float, fit: Make, weights: Make
) -> None:
    spoil, plugin = Spoil(*places, value=value), RollBack()
    result, mine = fit(spoil, plugin)
    plain, theirs = fit(Spoil(*places), LeaveOut(*places), folder="b")
    assert all(map(torch.equal, weights(mine), weights(theirs)))
    assert counters(result) == counters(plain)
    assert (result.status, plugin.times, plugin.skipped) == ("completed", len(places), set(places))
    assert set(spoil.met) == set(places)


def test_a_plugin_that_had_nothing_to_remember_there_forgets(fit: Make, tmp_path: Path) -> None:
    """The average of what is left out is not in the average."""
    average, result, _ = at_start(fit, Spoil((0, 3)), RollBack(), folder="a")
    plain, _, _ = at_start(fit, Spoil((0, 3)), LeaveOut((0, 3)), folder="b")
    assert any("back at step 3" in note and "iter_0" in note for note in result.notes)
    assert average._updates == plain._updates == {"optimizer": 11}
    assert all(map(torch.equal, average.weights["model"].values(), plain.weights["model"].values()))


def at_start(fit: Make, *plugins: Any, folder: str) -> tuple[EMA, RunResult, Any]:
    """Train with an average, and with a save before the first step only."""
    average = EMA(0.9)
    return average, *fit(average, *plugins, every=100, at_start=True, folder=folder)


def test_the_result_reports_it(fit: Make, tmp_path: Path) -> None:
    result, _ = fit(Spoil((0, 3)), RollBack())
    path = tmp_path / "a" / "run_epoch_0_iter_2.pth"
    assert any(f"3 to {path} (1" in line for line in result.notes)
    requests = [(each.verb, each.by, each.reason) for each in result.history if each.by == "roll_back"]
    assert [each[:2] for each in requests] == [(verb, "roll_back") for verb in ("skip_step", "roll_back", "skip_batch")]
    assert_each([each[2] for each in requests], ("epoch 0", "batch 3", "nan"), [path], ("not a number", "roll-back"))


def test_in_a_window_only_the_offending_micro_batches_are_left_out(fit: Make, weights: Make) -> None:
    plugin = RollBack()
    result, mine = fit(Spoil((0, 4)), plugin, GradientAccumulation(3), every=1)
    plain, theirs = fit(Spoil((0, 4)), LeaveOut((0, 4)), GradientAccumulation(3), folder="b", every=1)
    assert plugin.skipped == {(0, 4)}
    assert all(map(torch.equal, weights(mine), weights(theirs)))
    assert counters(result) == counters(plain)


def test_a_batch_that_was_skipped_in_the_window_is_not_blamed(fit: Make) -> None:
    plugin = RollBack()
    fit(Spoil((0, 3), (0, 5)), LeaveOut((0, 4)), plugin, GradientAccumulation(3), every=1)
    assert plugin.skipped == {(0, 3), (0, 5)}
    assert plugin.times == 1


def test_more_often_than_it_may_it_raises(fit: Make) -> None:
    plugin = RollBack(max_times=2)
    with pytest.raises(FloatingPointError, match="epoch 1, batch 1"):
        fit(Spoil((0, 3), (0, 5), (1, 1)), plugin)
    assert plugin.times == 2


def test_without_a_checkpoint_it_says_so(fit: Make) -> None:
    with pytest.raises(FloatingPointError, match="back to: save earlier"):
        fit(Spoil((0, 1)), RollBack())


def test_the_count_and_the_places_survive_a_resume(fit: Make) -> None:
    first, _ = fit(Spoil((0, 3)), RollBack(max_times=1), steps=4)
    assert first.progress.steps == 4
    plugin = RollBack(max_times=1)
    with pytest.raises(FloatingPointError, match="already rolled back 1"):
        fit(Spoil((0, 3), (1, 2)), plugin, resume="auto")
    assert plugin.skipped == {(0, 3)}


def test_another_fit_starts_again(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    plugin = RollBack()
    trainer = Trainer([SaveSchedule(Every(steps=1)), Checkpoint(tmp_path), Spoil((0, 2)), plugin], device="cpu")
    for _ in range(2):
        trainer.fit(task(), batches(), optimizer=sgd, epochs=1)
        assert (plugin.times, plugin.skipped) == (1, {(0, 2)})


class SpoilWeights(Plugin):
    """Makes the weights no numbers right before a save, as a step that nobody looked at does."""

    affects_training = False  # a fault from outside

    def __init__(self, *steps: int, damage: bool = False) -> None:
        self.steps, self.damage = steps, damage

    @on(CheckpointSaved, lane=Lane.REPORT)
    def spoil(self, run: Run, event: CheckpointSaved) -> None:
        if run.progress.steps not in self.steps:
            return
        if self.damage:
            event.path.write_bytes(event.path.read_bytes()[:-7])
        else:
            state = reader.load(event.path)
            state["modules"]["model"]["1.weight"][0, 0] = math.nan
            event.path.unlink()
            store = storage.Store(event.path.parent / "other", run.name)
            store.open()
            entry = store.save(event.path.name, state)
            store.close()
            for suffix in (".pth",):
                entry.path.with_suffix(suffix).replace(event.path.with_suffix(suffix))


@pytest.mark.parametrize("damage", [False, True])
def test_a_checkpoint_that_is_no_good_is_passed_over_for_an_older_one(damage: bool, fit: Make, weights: Make) -> None:
    plugin = RollBack()
    result, mine = fit(Spoil((1, 1)), SpoilWeights(6, damage=damage), plugin)
    _, theirs = fit(Spoil((1, 1)), LeaveOut((1, 1)), folder="b")
    (note,) = [each for each in result.notes if each.startswith("rolled back")]
    assert "back at step 7" in note
    assert "iter_4.pth" in note
    assert all(map(torch.equal, weights(mine), weights(theirs)))


def test_where_none_is_good_the_error_names_them(fit: Make) -> None:
    with pytest.raises(FloatingPointError, match=r"usable checkpoint\. .*1\.weight"):
        fit(Spoil((0, 3)), SpoilWeights(2), RollBack())


def test_a_checkpoint_of_another_training_is_no_candidate(fit: Make) -> None:
    fit(every=3)
    with pytest.raises(FloatingPointError, match=r"no usable checkpoint\."):
        fit(Spoil((0, 4)), SpoilWeights(4, damage=True), RollBack(), every=4)


def test_what_the_run_was_resumed_from_is_a_candidate(fit: Make, tmp_path: Path) -> None:
    fit(RollBack(), steps=4)
    result, _ = fit(Spoil((0, 4)), RollBack(), resume="auto")
    path = tmp_path / "a" / "run_epoch_0_iter_4.pth"
    assert result.resume is not None
    assert (result.resume.path, result.resume.step) == (path, 4)
    notes = [each for each in result.notes if "step 4 " in each]
    place = ("epoch 0", "batch 4", "step 4", path)
    assert_facts(notes[0], "resumed", *place)
    assert_facts(notes[-1], "went back", *place)


def test_a_return_is_no_resume(fit: Make, tmp_path: Path) -> None:
    result, _ = fit(Spoil((0, 3)), RollBack())
    report, path = result.resume, tmp_path / "a" / "run_epoch_0_iter_2.pth"
    assert report is not None
    assert (report.path, report.epoch, report.batch, report.step) == (None, None, None, None)
    assert any(f"step 2 from {path}" in line for line in result.notes)
    assert not any("resumed" in note for note in result.notes)


class SlowWorker(BackgroundWorker):
    """Its disk is so slow that work is done only when somebody waits for it."""

    @property
    def is_idle(self) -> bool:
        return not self._work

    def __init__(self) -> None:
        super().__init__()
        self._work: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []

    def submit(self, work: Callable[[], Any], then: Callable[[Any], object] = lambda _: None) -> None:
        self.drain()
        self._work.append((work, then))

    def poll(self) -> None:
        """Nothing is done yet."""

    def drain(self) -> None:
        while self._work:
            work, then = self._work.pop()
            then(work())


@pytest.mark.parametrize("batch", [2, 4])
def test_a_save_in_flight_is_waited_for_and_gone_back_to(
    batch: int, fit: Make, weights: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writer, "BackgroundWorker", SlowWorker)
    result, mine = fit(Spoil((0, batch)), RollBack(), slow=True)
    _, theirs = fit(Spoil((0, batch)), LeaveOut((0, batch)), folder="b")
    (note,) = [each for each in result.notes if each.startswith("rolled back")]
    assert f"_iter_{batch}.pth (1 of 3)" in note
    assert all(map(torch.equal, weights(mine), weights(theirs)))


class GoBack(Plugin):
    """Goes back to the first checkpoint after the fifth batch, once; the next batch is then no number."""

    def __init__(self, spoil: Spoil) -> None:
        self.spoil = spoil
        self.received: list[tuple[str, str]] = []

    @on(CheckpointSaved, CheckpointLoaded)
    def receive(self, run: Run, event: CheckpointSaved | CheckpointLoaded) -> None:
        assert event.path is not None
        self.received.append((event.name, event.path.stem))

    @on(BatchEnd)
    def go_back(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 5 and not self.spoil.places:
            self.spoil.places = ((0, 2),)
            assert run.checkpoints.last is not None
            path = run.checkpoints.last.with_name("run_epoch_0_iter_2.pth")
            run.roll_back(reader.load(path), path)


@pytest.mark.parametrize("slow", [False, True])
def test_what_was_given_up_is_reported_before_the_return_and_is_no_candidate(
    slow: bool, fit: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writer, "BackgroundWorker", SlowWorker)
    spoil = Spoil()
    back = GoBack(spoil)
    fit(spoil, back, RollBack(), slow=slow, epochs=1)
    first, second = "run_epoch_0_iter_2", "run_epoch_0_iter_4"
    loaded = ("checkpoint_loaded", first)
    assert back.received[:4] == [("checkpoint_saved", first), ("checkpoint_saved", second), loaded, loaded]


def test_it_and_nan_guard_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="both claim non-finite losses"):
        Trainer([NaNGuard("skip"), RollBack()], device="cpu")


def test_it_needs_saves(task: Make, batches: Make, sgd: Any) -> None:
    with pytest.raises(ValueError, match="plugin requests"):
        Trainer([RollBack()], device="cpu").fit(task(), batches(), optimizer=sgd, epochs=1)


@pytest.mark.parametrize("times", [0, -1, 1.5])
def test_arguments_are_checked(times: Any) -> None:
    with pytest.raises(ValueError, match="number, at least 1"):
        RollBack(times)


def test_a_good_run_is_not_touched(fit: Make, weights: Make) -> None:
    result, mine = fit(RollBack())
    _, theirs = fit(folder="b")
    assert all(map(torch.equal, weights(mine), weights(theirs)))
    assert [each.verb for each in result.history if each.by == "roll_back"] == []


def go_back_on_ranks(folder: Path, place: tuple[int, int] | None) -> tuple[int, int, list[torch.Tensor]]:
    """Train on several ranks, the last of which meets what is not a number; return steps, returns and weights."""
    engine = DDPEngine(device="cpu")
    torch.manual_seed(0)
    task = Supervised(torch.nn.Linear(4, 2), torch.nn.functional.mse_loss)
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(12)]
    spoil = [] if place is None or engine.is_main else [Spoil(place)]
    back = RollBack()
    saving = [SaveSchedule(Every(steps=2)), Checkpoint(folder, keep_last=9)]
    trainer = Trainer([*saving, RNGCapture(), *spoil, back], engine=engine)
    result = trainer.fit(task, data, optimizer=partial(torch.optim.SGD, lr=0.1), epochs=2)
    return result.progress.steps, back.times, [each.detach() for each in task.model.parameters()]


def test_what_one_rank_meets_all_ranks_go_back_from(ranks: Any, tmp_path: Path) -> None:
    (steps, times, weights), (other_steps, other_times, others) = ranks(2).run(go_back_on_ranks, tmp_path, (1, 3))
    assert steps == other_steps == 11
    assert (times, other_times) == (0, 1)
    assert all(map(torch.equal, weights, others))


def go_back_from_shards(folder: Path) -> tuple[int, list[str], list[str]]:
    """Spoil the weights of the second step's checkpoint, shards of all ranks; return steps, what was loaded, notes."""
    loaded: list[str] = []

    class SpoilWeights(Plugin):
        done = False

        @on(StepEnd)
        def spoil(self, run: Run, event: StepEnd) -> None:
            if run.progress.steps == 2 and not self.done:
                self.done = True
                with torch.no_grad():
                    run.modules["model"].weight.mul_(math.nan)

    torch.manual_seed(0)
    task = Supervised(torch.nn.Linear(4, 2), torch.nn.functional.mse_loss)
    data = [(torch.randn(2, 4), torch.randn(2, 2)) for _ in range(12)]
    saving = [SaveSchedule(Every(steps=1)), Checkpoint(folder, keep_last=9)]
    trainer = Trainer(
        [*saving, RNGCapture(), SpoilWeights(), RollBack()], engine=FSDPEngine(device="cpu", state="sharded")
    )
    trainer.bus.on(CheckpointLoaded, lambda run, event: loaded.append(event.path.stem if event.path else ""))
    result = trainer.fit(task, data, optimizer=partial(torch.optim.SGD, lr=0.1), epochs=1)
    return result.progress.steps, loaded, [note for note in result.notes if "rolled back" in note]


def test_a_checkpoint_whose_shards_are_no_numbers_is_passed_over(ranks: Any, tmp_path: Path) -> None:
    first = tmp_path / "run_epoch_0_iter_1.pth"
    for steps, kept, notes in ranks(2).run(go_back_from_shards, tmp_path):
        assert (steps, kept) == (5, ["run_epoch_0_iter_1"])
        assert_each(notes, ("step 2", first, "1 of 3", "epoch 0", "batch 2", "nan"))
