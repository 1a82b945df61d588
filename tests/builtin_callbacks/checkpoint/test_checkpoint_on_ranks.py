"""Checkpoint on several ranks: written once, believed by all, each continues from its own, another number of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    EMA,
    At,
    BatchEnd,
    BatchStart,
    Checkpoint,
    CheckpointLabel,
    CheckpointSaved,
    DDPEngine,
    Every,
    GradientAccumulation,
    GradientsReady,
    Lane,
    LoadBest,
    Plugin,
    Resume,
    RNGCapture,
    Run,
    RunClosed,
    RunFailed,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    TrainStart,
    ValidationSchedule,
    on,
)
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import Files, inventory, reader
from heliograph.events import CheckpointPruned
from heliograph.tests.kit import adam
from heliograph.tests.messages import assert_each, assert_facts, has_facts
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Weights = dict[str, Tensor]
BATCH = 8  # samples of a step, of all ranks together
SAMPLES = 40


class Recorder(Plugin):
    """Notes what a rank trains on, what it draws, and what it learns of checkpoints."""

    affects_training = False

    def __init__(self) -> None:
        self.samples: list[list[int]] = []
        self.drawn: list[float] = []
        self.saved: list[tuple[int, str]] = []

    @on(BatchStart)
    def note_batch(self, run: Run, event: BatchStart) -> None:
        self.samples.append(run.batch[0][:, 0].int().tolist())
        self.drawn.append(torch.rand(1).item() + random.random() + float(np.random.rand()))

    @on(CheckpointSaved)
    def note_saved(self, run: Run, event: CheckpointSaved) -> None:
        self.saved.append((run.progress.batches, event.path.name))


class Own(Plugin):
    """Has a state that is not the same on all ranks."""

    value = 0

    @on(BatchStart)
    def count(self, run: Run, event: BatchStart) -> None:
        self.value += 1 + run.engine.rank

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "common": [1.0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def make_task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 1)), nn.functional.mse_loss)


def make_data(size: int = SAMPLES) -> TensorDataset:
    numbers = torch.arange(float(size))
    return TensorDataset(torch.stack([numbers, numbers / size, -numbers / size], 1), numbers[:, None] / size)


def train(
    checkpoint: Checkpoint, *plugins: Any, batch_size: int, every: Every | None = None, **options: Any
) -> tuple[RunResult, Weights, Recorder]:
    """Train on as many ranks as there are."""
    recorder, task = Recorder(), make_task()
    schedules = [SaveSchedule(every or Every(steps=2), at_end=False), ValidationSchedule(Every(epochs=1))]
    trainer = Trainer([RNGCapture(3), *schedules, *plugins, recorder, checkpoint], engine=DDPEngine(device="cpu"))
    result = trainer.fit(
        task,
        DataLoader(make_data(), batch_size=batch_size, shuffle=True),
        validation=DataLoader(make_data(8), batch_size=4),
        optimizer=adam(),
        **{"epochs": 2, **options},
    )
    return result, {name: value.clone() for name, value in task.model.state_dict().items()}, recorder


def caught(act: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and the text of what is raised."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  # whatever it is
        return type(error).__name__, str(error)
    return "", ""


# The same number of ranks.


def resume_during_an_epoch(folder: Path, background: bool) -> dict[str, Any]:
    own = [Own() for _ in range(3)]
    whole = train(Checkpoint(folder / "whole"), own[0], batch_size=4)
    train(Checkpoint(folder / "halves", background=background), own[1], batch_size=4, steps=7)
    rest = train(Checkpoint(folder / "halves", resume="auto", background=background), own[2], batch_size=4)
    return {
        "equal": all(torch.equal(whole[1][name], rest[1][name]) for name in whole[1]),
        "samples": (whole[2].samples[6:], rest[2].samples),
        "draws": (whole[2].drawn[6:], rest[2].drawn),
        "own": (own[0].value, own[2].value),
        "report": str(rest[0].resume),
        "saved": rest[2].saved,
        "last": rest[0].last_checkpoint,
        "progress": rest[0].progress.samples,
    }


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_is_bit_equal_on_every_rank(ranks: Pool, tmp_path: Path, background: bool) -> None:
    first, second = ranks(2).run(resume_during_an_epoch, tmp_path, background)
    for each in (first, second):
        assert each["equal"]
        for what in ("samples", "draws", "own"):
            assert each[what][0] == each[what][1], what
        assert_facts(each["report"], "verified", "1 repeated step ", "identical")
        assert each["last"] == tmp_path / "halves" / "run_epoch_1_iter_10.pth"
        assert each["progress"] == 2 * SAMPLES
    assert first["draws"][0] != second["draws"][0]
    assert first["own"][0] != second["own"][0]
    assert first["saved"] == second["saved"]
    assert [name for _, name in first["saved"]] == ["run_epoch_1_iter_8.pth", "run_epoch_1_iter_10.pth"]
    if not background:
        assert [batches for batches, _ in first["saved"]] == [8, 10]
    assert sorted(path.name for path in (tmp_path / "halves").iterdir()) == [
        ".verified.jsonl",
        "run.last",
        "run_epoch_1_iter_10.pth",
    ]


def test_a_file_holds_once_what_is_the_same_everywhere(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(resume_during_an_epoch, tmp_path, False)
    state = reader.load(tmp_path / "halves" / "run_epoch_1_iter_10.pth")
    main, other = state["ranks"]
    assert main == {}
    assert other.keys() == {"plugins", "means", "objects"}  # `own` has another value there
    assert other["plugins"].keys() == {"own", "rng_capture"}
    assert other["plugins"]["own"] == {"value": 20, "common": [1.0]}
    assert state["plugins"]["own"] == {"value": 10, "common": [1.0]}
    assert state["world"] == {"size": 2, "batch_size": 4, "accumulation": 1}
    assert len(list((tmp_path / "halves").glob("*.pth"))) == 1


def go_back(folder: Path) -> tuple[list[float], int, int]:
    recorder, own, cuts = Recorder(), Own(), list[dict[str, Any]]()

    class Back(Plugin):
        @on(BatchEnd)
        def remember_and_return(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 2 and not cuts:
                cuts.append(deepcopy(run.state_dict()))
            if run.progress.batches == 4 and len(cuts) == 1:
                cuts.append({})
                run.roll_back(cuts[0])

    trainer = Trainer([RNGCapture(3), recorder, own, Back()], engine=DDPEngine(device="cpu"))
    task, data = make_task(), [(torch.ones(4, 3), torch.ones(4, 1))] * 12
    trainer.fit(task, data, optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1), steps=6)
    return recorder.drawn, own.value, len(cuts[0]["ranks"])


class Unsaved(Own):
    """An observer whose state some ranks cannot save."""

    policy = "observer"

    def __init__(self, failing: tuple[int, ...]) -> None:
        self.failing, self.rank = failing, -1

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        self.rank = run.engine.rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank in self.failing:
            raise SystemExit(self.rank)
        return super().state_dict()


def train_with_unsaved(folder: Path, failing: tuple[int, ...]) -> tuple[str, list[str], list[str], int]:
    own = Own()
    result, _, _ = train(Checkpoint(folder), Unsaved(failing), own, batch_size=4, steps=7)
    notes = [note for note in result.notes if "unsaved" in note]
    rest, _, _ = train(Checkpoint(folder, resume="auto"), Unsaved(()), own, batch_size=4)
    return result.status, notes, [note for note in rest.notes if "unsaved" in note], own.value


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=str)
def test_an_observers_state_that_some_rank_cannot_save_is_left_out_there(
    failing: tuple[int, ...], ranks: Pool, tmp_path: Path
) -> None:
    reported = ranks(2).run(train_with_unsaved, tmp_path, failing)
    for rank, (status, notes, later, value) in enumerate(reported):
        assert status == "completed"
        assert_each(notes, *[("'unsaved'", "not saved", f"SystemExit: {rank}")] * (rank in failing))
        assert_each(later, *[("start fresh", "unsaved")] * (rank in failing))
        assert value == 10 * (1 + rank)


def test_each_rank_goes_back_to_its_own(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(go_back, tmp_path)
    for drawn, _, _ in (main, other):
        assert drawn[2:4] == drawn[4:6]
        assert len(set(drawn)) == len(drawn) - 2
    assert main[0] != other[0]
    assert (main[1], other[1]) == (6, 12)
    assert (main[2], other[2]) == (2, 0)


def go_back_at_once(folder: Path) -> dict[str, Any]:
    """Go back in the first step of a resumed run, when only the main rank still has something to prepare."""

    class Back(Plugin):
        asks = ("skip_step",)
        times = 0

        @on(GradientsReady)
        def go_back(self, run: Run, event: GradientsReady) -> None:
            self.times += 1
            if self.times == 1:
                assert run.checkpoints.last is not None
                run.control.skip_step("test")
                run.roll_back(reader.load(run.checkpoints.last), run.checkpoints.last)

    train(Checkpoint(folder, background=True), batch_size=4, steps=2)
    result, _, recorder = train(Checkpoint(folder, background=True, resume="auto"), Back(), batch_size=4)
    return {"steps": result.progress.steps, "last": result.last_checkpoint, "saved": recorder.saved}


def test_a_return_before_the_first_step_is_learned_of_together(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(go_back_at_once, tmp_path)
    assert main == other
    assert (main["steps"], main["last"]) == (10, tmp_path / "run_epoch_1_iter_10.pth")
    assert [name for _, name in main["saved"]][-1] == "run_epoch_1_iter_10.pth"


# Another number of ranks.


def train_an_attempt(folder: Path, batch_size: int, steps: int, resume: str | None) -> dict[str, Any]:
    checkpoint = Checkpoint(folder, resume=resume)
    result, weights, recorder = train(checkpoint, batch_size=batch_size, epochs=3, steps=steps)
    assert result.resume is not None
    return {
        "weights": weights,
        "samples": recorder.samples,
        "draws": recorder.drawn,
        "reasons": result.resume.reasons,
        "steps": result.progress.steps,
        "seen": result.progress.samples,
    }


def of_steps(attempts: list[dict[str, Any]]) -> list[list[int]]:
    """Return the samples of each step, in order, of all ranks of an attempt."""
    return [
        sorted(chain.from_iterable(together))
        for together in zip(*(attempt["samples"] for attempt in attempts), strict=True)
    ]


def test_two_one_two_ranks_keep_the_order_of_samples(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks(2).run(train_an_attempt, tmp_path / "whole", 4, 12, None)
    first = ranks(2).run(train_an_attempt, tmp_path / "attempts", 4, 4, None)
    second = ranks(1).run(train_an_attempt, tmp_path / "attempts", 8, 8, "auto")
    third = ranks(2).run(train_an_attempt, tmp_path / "attempts", 4, 12, "auto")

    assert [bool(attempt["reasons"]) for attempt in (*first, *second, *third)] == [False] * 2 + [True] * 3
    assert of_steps(first) + of_steps(second) + of_steps(third) == of_steps(whole)
    assert (third[0]["steps"], third[0]["seen"]) == (12, whole[0]["seen"])
    for name, weight in third[0]["weights"].items():
        assert torch.equal(weight, third[1]["weights"][name])
    assert any(has_facts(reason, "2 processes", "1 resumed", "order") for reason in second[0]["reasons"])
    assert any("generators of rank 1" in reason for reason in second[0]["reasons"])
    assert any("saved state: random generators" in text for text in third[1]["reasons"])
    main = first[0]["draws"] + second[0]["draws"] + third[0]["draws"]
    new = first[1]["draws"] + third[1]["draws"]
    assert len(set(main + new)) == len(main + new)  # nobody draws what another rank draws, or what it drew before
    assert first[0]["draws"] == whole[0]["draws"][:4]


def refuse_and_scale(folder: Path) -> dict[str, Any]:
    rates: dict[str, Any] = {}

    def resume(**options: Any) -> None:
        path = folder / "run_epoch_0_iter_2.pth"
        change = options.pop("batch_change", "refuse")
        checkpoint = Checkpoint(folder / "other", resume=Resume(path, batch_change=change))
        recorder, task = Recorder(), make_task()
        plugins = [*options.pop("plugins", ()), SaveSchedule(Every(steps=100), at_end=False), recorder, checkpoint]
        trainer = Trainer(plugins, engine=DDPEngine(device="cpu"))
        data = DataLoader(make_data(), batch_size=options.pop("batch_size"))
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
        result = trainer.fit(task, data, optimizer=optimizer, steps=3)
        rates[change] = optimizer.param_groups[0]["lr"], [note for note in result.notes if "global batch" in note]

    error = caught(lambda: resume(batch_size=8))
    for change in ("keep", "linear", "sqrt"):
        resume(batch_size=8, batch_change=change)
    resume(batch_size=2, plugins=[GradientAccumulation(2)])  # which is the same
    return {"error": error, "rates": rates}


def write_alone(folder: Path) -> None:
    task = make_task()
    trainer = Trainer([SaveSchedule(Every(steps=2), at_end=False), Checkpoint(folder)], device="cpu")
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    trainer.fit(task, DataLoader(make_data(), batch_size=BATCH), optimizer=optimizer, steps=2)


def test_another_global_batch_is_refused_or_scaled(ranks: Pool, tmp_path: Path) -> None:
    write_alone(tmp_path)
    for each in ranks(2).run(refuse_and_scale, tmp_path):
        kind, text = each["error"]
        assert kind == "ValueError"
        assert "batch_size 8 x accumulation" in text
        assert "batch_size 8 x accumulation" in text
        assert "batch_change='keep'" in text
        assert {change: rate for change, (rate, _) in each["rates"].items()} == pytest.approx(
            {"keep": 0.5, "linear": 1.0, "sqrt": 0.5 * 2**0.5, "refuse": 0.5}
        )
        assert each["rates"]["refuse"][1] == []
        assert_facts(each["rates"]["linear"][1][0], "times 2", "linear")


def accumulate_more(folder: Path) -> tuple[tuple[str, str], str, str]:
    def resume(number: int, steps: int, checkpoint: Checkpoint) -> Any:
        task = make_task()
        plugins = [GradientAccumulation(number), SaveSchedule(Every(epochs=1)), checkpoint]
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
        data = DataLoader(make_data(), batch_size=5)
        return Trainer(plugins, engine=DDPEngine(device="cpu")).fit(task, data, optimizer=optimizer, steps=steps)

    resume(1, 4, Checkpoint(folder))
    error = caught(lambda: resume(2, 6, Checkpoint(folder, resume="auto")))
    result = resume(2, 6, Checkpoint(folder, resume=Resume("auto", batch_change="keep")))
    return error, result.resume.reasons, " ".join(result.notes)


def test_so_it_is_on_as_many_ranks(ranks: Pool, tmp_path: Path) -> None:
    for (kind, text), reasons, notes in ranks(2).run(accumulate_more, tmp_path):
        assert kind == "ValueError"
        assert "batch_size 5 x accumulation" in text
        assert "batch_size 5 x accumulation" in text
        assert "the global batch was" in " ".join(reasons)
        assert "accumulation 2: saved learning" in notes


def counted_otherwise(folder: Path, alone: bool) -> Any:
    """Save where a metric is measured; continue with half as many batches, and save where as many were counted then."""
    options: dict[str, Any] = {"keep_last": None, "keep_best": 1, "monitor": "validation/loss"}
    schedule = ValidationSchedule(Every(epochs=1 if alone else 9))
    checkpoint = Checkpoint(folder, resume=None if alone else "auto", **options)
    plugins = [schedule, SaveSchedule(Every(epochs=1)), *([GradientAccumulation(2)] if alone else []), checkpoint]
    task = make_task()
    result = Trainer(plugins, engine=DDPEngine(device="cpu")).fit(
        task,
        DataLoader(make_data(), batch_size=4),
        validation=DataLoader(make_data(8), batch_size=4),
        optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1),
        epochs=1 if alone else 2,
    )
    entries, _ = inventory.entries(folder, "run")
    return result.progress.batches, [entry.judged_by is not None for entry in entries]


def test_a_value_never_stands_for_weights_of_another_count_of_batches(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(1).run(counted_otherwise, tmp_path, True) == [(10, [True])]
    assert ranks(2).run(counted_otherwise, tmp_path, False) == [(10, [False, True])] * 2


# What goes wrong on one rank.


def lack_room(folder: Path, background: bool) -> tuple[tuple[str, str], list[tuple[int, str]], int]:
    recorder, task = Recorder(), make_task()
    saves = 0

    def free(files: Files, folder: Path) -> int:
        nonlocal saves
        saves += 1
        return 10 if saves > 1 else 10**9

    checkpoint = Checkpoint(folder, background=background)
    trainer = Trainer(
        [SaveSchedule(Every(steps=2), at_end=False), recorder, checkpoint], engine=DDPEngine(device="cpu")
    )
    with pytest.MonkeyPatch.context() as patch:
        if trainer.engine.is_main:
            patch.setattr(Files, "free", free)
        data = DataLoader(make_data(), batch_size=4)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
        error = caught(lambda: trainer.fit(task, data, optimizer=optimizer, epochs=20))
    return error, recorder.saved, len(recorder.samples)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_on_the_main_rank_fails_on_all(ranks: Pool, tmp_path: Path, background: bool) -> None:
    main, other = ranks(2).run(lack_room, tmp_path, background)
    assert main == other
    (kind, text), saved, batches = main
    assert kind == "OSError"
    assert "run_epoch_0_iter_4.pth" in text
    assert [name for _, name in saved] == ["run_epoch_0_iter_2.pth"]
    assert background or batches == 4
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run_epoch_0_iter_2.pth"]


def lose_a_peer(folder: Path) -> tuple[str, list[str], list[str]]:
    """Rank 1 fails while the main rank is still writing, which continues only when the main rank knows of it."""
    gate, task, saved, notes = threading.Event(), make_task(), list[str](), list[str]()
    real = storage.Store.save

    def save(*arguments: Any, **options: Any) -> Any:
        gate.wait()
        return real(*arguments, **options)

    def fail(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 4 and run.engine.rank == 1:
            raise ArithmeticError("on purpose")

    trainer = Trainer(
        [SaveSchedule(Every(steps=2), at_end=False), Checkpoint(folder, background=True)],
        engine=DDPEngine(device="cpu"),
    )
    trainer.bus.on(BatchEnd, fail)
    trainer.bus.on(RunFailed, lambda run, event: gate.set())
    trainer.bus.on(CheckpointSaved, lambda run, event: saved.append(event.path.name))
    trainer.bus.on(RunClosed, lambda run, event: notes.extend(run.report.notes), lane=Lane.REPORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.Store, "save", save)
        data = DataLoader(make_data(), batch_size=4)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        kind, _ = caught(lambda: trainer.fit(task, data, optimizer=optimizer, epochs=2))
    return kind, saved, notes


def test_the_main_rank_finishes_what_it_writes_when_a_peer_fails(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(lose_a_peer, tmp_path)
    assert main[:2] == ("RankFailed", ["run_epoch_0_iter_2.pth"])
    assert_each(main[2], ["newest checkpoint"])
    assert other[:2] == ("ArithmeticError", [])
    assert_each(other[2], ["main rank", "without a report"])
    assert reader.load(tmp_path / "run_epoch_0_iter_2.pth")["progress"]["steps"] == 2


def receive_removals(folder: Path, background: bool) -> list[tuple[int, str, str]]:
    pruned = list[tuple[int, str, str]]()

    class Removals(Plugin):
        @on(CheckpointPruned)
        def note(self, run: Run, event: CheckpointPruned) -> None:
            pruned.append((run.progress.batches, event.path.name, event.reason))

    train(Checkpoint(folder, background=background), Removals(), batch_size=4, steps=6)
    return pruned


@pytest.mark.parametrize("background", [False, True])
def test_removals_are_reported_on_every_rank_at_the_same_step(ranks: Pool, tmp_path: Path, background: bool) -> None:
    main, other = ranks(2).run(receive_removals, tmp_path, background)
    assert main == other
    assert [each[1:] for each in main] == [(f"run_epoch_0_iter_{step}.pth", "keep_last=1") for step in (2, 4)]
    if not background:
        assert [batches for batches, *_ in main] == [4, 6]


def lose_a_peer_during_a_removal(folder: Path) -> tuple[str, list[str], tuple[str, ...]]:
    """Rank 1 fails while the main rank removes the first checkpoint, which continues only when it knows of that."""
    gate, task, saved = threading.Event(), make_task(), list[str]()
    pruned, notes = list[str](), list[str]()
    real = storage.Store.remove

    def remove(*arguments: Any) -> bool:
        gate.wait()
        return real(*arguments)

    def fail(run: Run, event: BatchEnd) -> None:
        if len(saved) == 2 and run.engine.rank == 1:
            raise ArithmeticError("on purpose")

    plugins = [SaveSchedule(At(steps=[2, 4])), Checkpoint(folder, background=True)]
    trainer = Trainer(plugins, engine=DDPEngine(device="cpu"))
    trainer.bus.on(BatchEnd, fail)
    trainer.bus.on(RunFailed, lambda run, event: gate.set())
    trainer.bus.on(CheckpointSaved, lambda run, event: saved.append(event.path.name))
    trainer.bus.on(CheckpointPruned, lambda run, event: pruned.append(event.path.name))
    trainer.bus.on(RunClosed, lambda run, event: notes.extend(run.report.notes), lane=Lane.REPORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.Store, "remove", remove)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        kind, _ = caught(
            lambda: trainer.fit(task, DataLoader(make_data(), batch_size=2), optimizer=optimizer, epochs=10_000)
        )
    return kind, pruned, tuple(notes)


def test_a_removal_is_no_save_that_a_rank_gives_up(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(lose_a_peer_during_a_removal, tmp_path)
    assert main[:2] == ("RankFailed", ["run_epoch_0_iter_2.pth"])
    assert_each(main[2], ["newest checkpoint"])
    assert other == ("ArithmeticError", [], ())


def try_to_resume(folder: Path, resume: Path | str) -> tuple[str, str]:
    return caught(lambda: train(Checkpoint(folder, resume=resume), batch_size=4))


def read_only_on_main(folder: Path, hidden: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if DDPEngine(device="cpu").rank == 1:
            if hidden:
                patch.setattr(reader, "_checksum", lambda path: None)

            def refuse(path: Path, **options: Any) -> Any:
                raise ValueError("this rank cannot read")

            patch.setattr("heliograph.builtin_callbacks.checkpoint.resume.load", refuse)
        results: list[Any] = []
        error = caught(lambda: results.append(train(Checkpoint(folder, resume="auto"), batch_size=4, steps=4)))
    return {"error": error, "weights": results[0][1] if results else None}


def test_all_ranks_continue_alike(ranks: Pool, tmp_path: Path) -> None:
    """A missing file, a folder that is taken, a rank that cannot read: one answer for all."""
    missing = ranks(2).run(try_to_resume, tmp_path, tmp_path / "nothing.pth")
    assert missing[0] == missing[1]
    assert missing[0][0] == "FileNotFoundError"
    assert_facts(missing[0][1], tmp_path / "nothing.pth", "Known: none")

    store = storage.Store(tmp_path, "run")
    store.open()
    try:
        taken = ranks(2).run(try_to_resume, tmp_path, "auto")
    finally:
        store.close()
    assert taken[0] == taken[1]
    assert_facts(taken[0][1], "'run'", tmp_path, "process")

    ranks(2).run(train_an_attempt, tmp_path, 4, 4, None)
    unread = ranks(2).run(read_only_on_main, tmp_path, False)
    assert [each["error"] for each in unread] == [("ValueError", "this rank cannot read")] * 2
    sent = ranks(2).run(read_only_on_main, tmp_path, True)
    saved = reader.load(tmp_path / "run_epoch_0_iter_4.pth")["modules"]["model"]
    for each in sent:
        assert each["error"] == ("", "")
        assert all(torch.equal(each["weights"][name], saved[name]) for name in saved)


def ask_for_metadata(folder: Path) -> tuple[list[int], tuple[str, str]]:
    asked: list[int] = []

    def metadata(run: Run) -> str:
        asked.append(run.engine.rank)
        return "metadata"

    train(Checkpoint(folder), CheckpointLabel(metadata), batch_size=4, steps=2)
    together = CheckpointLabel(lambda run: str(run.engine.reduce(1.0)))
    return asked, caught(lambda: train(Checkpoint(folder), together, batch_size=4, steps=2))


def test_only_the_main_rank_is_asked_for_metadata(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(ask_for_metadata, tmp_path)
    assert (main[0], other[0]) == ([0], [])
    assert main[1] == other[1]
    assert main[1][0] == "RuntimeError"
    assert "calls reduce on save_point" in main[1][1]
    assert (tmp_path / "run_epoch_0_iter_2_metadata.pth").exists()


# The best comes back.


def load_back(folder: Path, load_best: Any) -> dict[str, Any]:
    losses = iter((0.5, 0.1, 0.9))

    class Scripted(Supervised):
        def validation_step(self, run: Run, batch: Any) -> dict[str, float]:
            return {"loss": next(losses)}

    seen: list[Weights] = []

    class Look(Plugin):
        @on(CheckpointSaved)
        def look(self, run: Run, event: CheckpointSaved) -> None:
            seen.append({name: value.clone() for name, value in run.task.model.state_dict().items()})

    task = Scripted(make_task().model, nn.functional.mse_loss)
    checkpoint = Checkpoint(folder, keep_best=1, monitor="validation/loss")
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    plugins = [*schedules, Look(), checkpoint, LoadBest(load_best)]
    optimizer = torch.optim.Adam(task.model.parameters())
    result = Trainer(plugins, engine=DDPEngine(device="cpu")).fit(
        task,
        DataLoader(make_data(8), batch_size=4),
        validation=DataLoader(make_data(8), batch_size=4),
        optimizer=optimizer,
        epochs=3,
    )
    now = task.model.state_dict()
    return {
        "is best": [all(torch.equal(now[name], each[name]) for name in now) for each in seen],
        "step": next(iter(optimizer.state.values()))["step"].item(),
        "best": result.best_checkpoint,
        "note": result.notes[-1],
    }


@pytest.mark.parametrize(("load_best", "step"), [("weights", 3), ("everything", 2)])
def test_the_best_comes_back_on_every_rank(ranks: Pool, tmp_path: Path, load_best: str, step: int) -> None:
    for each in ranks(2).run(load_back, tmp_path, load_best):
        assert each["is best"] == [False, True, False]
        assert each["step"] == step
        assert each["best"] == tmp_path / "run_epoch_2_iter_2.pth"
        assert_facts(each["note"], "loaded back", load_best, "best checkpoint", each["best"])


# Of one training.


class Identity(Plugin):
    """Notes of which training a rank is."""

    seen = ""

    @on(BatchStart)
    def note(self, run: Run, event: BatchStart) -> None:
        self.seen = run.checkpoints.training_id


def begin_twice_and_go_on(folder: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    outcomes = []
    for resume in (None, None, "auto"):
        identity = Identity()
        result, *_ = train(Checkpoint(folder, resume=resume), identity, batch_size=4, epochs=1 if resume is None else 2)
        assert result.last_checkpoint is not None
        outcomes.append((identity.seen, result.last_checkpoint.name, result.notes))
    return outcomes


def test_all_ranks_are_of_one_training(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(begin_twice_and_go_on, tmp_path)
    assert first == second
    identities, names, notes = zip(*first, strict=True)
    assert names == ("run_epoch_0_iter_4.pth", "run-2_epoch_0_iter_4.pth", "run-2_epoch_1_iter_10.pth")
    assert identities[0] != identities[1] == identities[2]
    assert any("written as 'run-2'" in note for note in notes[1])
    assert storage.read_manifest(tmp_path / names[2]).training == identities[2]
    assert "training_id" not in reader.load(tmp_path / names[2])["ranks"][1]


# The end of a run.


def end_within_an_epoch(folder: Path, background: bool) -> tuple[Any, ...]:
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    best: dict[str, Any] = {"keep_best": 1, "monitor": "validation/loss"}
    savers = [Checkpoint(folder, background=background, **best), LoadBest()]
    trainer = Trainer([RNGCapture(7), EMA(0.5), *schedules, *savers], engine=DDPEngine(device="cpu"))
    task = make_task()
    result = trainer.fit(
        task,
        make_data(),
        loader_params={"batch_size": 4},
        validation=DataLoader(make_data(8), 4),
        optimizer=adam(0.1),
        steps=3,
    )
    weights = {name: value.clone() for name, value in task.model.state_dict().items()}
    return result.best_checkpoint, result.warnings, result.metrics["validation/loss"], weights


@pytest.mark.parametrize("background", [False, True])
def test_the_end_within_an_epoch_is_saved_judged_and_loaded_back_averaged(
    ranks: Pool, tmp_path: Path, background: bool
) -> None:
    path = tmp_path / "run_epoch_0_iter_3.pth"
    average = None
    for best, warnings, value, weights in ranks(2).run(end_within_an_epoch, tmp_path, background):
        assert (best, warnings) == (path, ())
        assert storage.read_manifest(path).judged_by == ("validation/loss", "min", value)
        average = reader.load(path)["plugins"]["ema"]["weights"]["model"]
        assert weights.keys() == average.keys()
        assert all(torch.equal(weights[name], average[name]) for name in weights)
    assert average is not None
