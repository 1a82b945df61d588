"""Checkpoint: whose the files in a folder are, pinning, pointers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointSaved,
    EpochEnd,
    Every,
    Lane,
    Plugin,
    Run,
    RunClosed,
    RunResult,
    SaveSchedule,
    Trainer,
    ValidationSchedule,
    ValidationStart,
    on,
)
from heliograph.builtin_callbacks.checkpoint.folder import CheckpointFolder, Retention
from heliograph.core.checkpoint import storage
from heliograph.events import CheckpointPruned, Event
from heliograph.tests.kit import adam, checkpoint_names, contents
from heliograph.tests.messages import assert_each

Make = Callable[..., Any]
MONITOR: dict[str, Any] = {"keep_best": 1, "monitor": "validation/loss"}


@pytest.fixture
def fit(scripted: Make, batches: Make) -> Callable[..., RunResult]:
    """Return a function that trains an epoch of one batch per scripted loss, validating and saving after each."""

    def run(checkpoint: Checkpoint, values: list[float], *plugins: Any, **options: Any) -> RunResult:
        schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
        trainer = Trainer([*schedules, *plugins, checkpoint], device="cpu")
        options = {"epochs": len(values), "optimizer": adam(0.1), "task": scripted(values), **options}
        return trainer.fit(options.pop("task"), batches(1), validation=batches(1), **options)

    return run


class TakeAway(Plugin):
    """Moves the checkpoint of the second step away, before the validation at the same step."""

    affects_training = False

    def __init__(self) -> None:
        self.pruned: list[str] = []

    @on(ValidationStart)
    def take(self, run: Run, event: ValidationStart) -> None:
        if run.progress.steps == 2 and run.checkpoints.last is not None:
            run.checkpoints.last.rename(run.checkpoints.last.with_name("elsewhere"))

    @on(CheckpointPruned)
    def note(self, run: Run, event: CheckpointPruned) -> None:
        self.pruned.append(event.path.name)


def test_a_judgement_of_a_checkpoint_that_was_moved_away(scripted: Make, batches: Make, tmp_path: Path) -> None:
    taking = TakeAway()
    schedules = [SaveSchedule(Every(steps=1), at_end=False), ValidationSchedule(Every(epochs=1))]
    checkpoint = Checkpoint(tmp_path, keep_last=2, **MONITOR)
    trainer = Trainer([*schedules, taking, checkpoint], device="cpu")
    task = scripted([0.5, 0.4, 0.3])
    result = trainer.fit(task, batches(1), validation=batches(1), optimizer=adam(0.1), epochs=3)

    assert (tmp_path / "elsewhere").exists()
    assert result.best_checkpoint == result.last_checkpoint
    assert "run_epoch_1_iter_2.pth" not in {*taking.pruned, *checkpoint_names(tmp_path)}
    assert checkpoint_names(tmp_path)[0] == "run_epoch_0_iter_1.pth"  # the second newest of those that are there


@pytest.mark.parametrize("is_new", [True, False])
def test_the_older_ones_stay_if_the_newest_was_moved_away(
    tmp_path: Path, opened: Make, state: Make, is_new: bool
) -> None:
    folder = CheckpointFolder(Retention(1, 0, None))
    store = folder.open(cast(Run, SimpleNamespace(name="run", checkpoints=SimpleNamespace(source=None))), tmp_path)
    first, _ = folder.write("a.pth", None, state(1), None, read_back=False)
    second, _ = folder.write("b.pth", None, state(2), None, read_back=False)
    second.rename(tmp_path / "elsewhere")

    assert folder.tidy(second, ("validation/loss", "min", 0.5), is_new=is_new) == (None, [])
    assert [entry.path for entry in store.own()] == [first]
    assert (tmp_path / "run.last").read_text() == "a.pth\n"
    folder.close()


# Whose checkpoints.


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("options", [{"keep_last": None}, {"keep_last": 1}, {"keep_last": 1, **MONITOR}])
def test_a_branch_removes_only_its_own_checkpoints(
    fit: Make, tmp_path: Path, options: dict[str, Any], background: bool
) -> None:
    fit(Checkpoint(tmp_path, keep_last=None, **MONITOR), [0.5, 0.4, 0.3, 0.2])
    before = contents(tmp_path)
    path = tmp_path / "run_epoch_2_iter_2.pth"
    branch = Checkpoint(tmp_path, resume=path, background=background, **options)
    result = fit(branch, [0.7, 0.8], epochs=4)

    third, last = "run-2_epoch_3_iter_3.pth", "run-2_epoch_4_iter_4.pth"
    kept = [last] if options == {"keep_last": 1} else [third, last]
    assert contents(tmp_path).items() >= before.items()
    assert [name for name in checkpoint_names(tmp_path) if name.startswith("run-2")] == kept
    assert result.best_checkpoint == (tmp_path / third if "monitor" in options else None)


def test_a_renamed_checkpoint_is_neither_removed_nor_overwritten(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), [1.0, 1.0, 1.0])
    for old, new in (("run_epoch_1_iter_1", "mine"), ("run_epoch_2_iter_2", "run_epoch_4_iter_4")):
        (tmp_path / f"{old}.pth").rename(tmp_path / f"{new}.pth")
    renamed = {
        path.name: path.read_bytes() for path in tmp_path.glob("*") if path.stem in ("mine", "run_epoch_4_iter_4")
    }
    fit(Checkpoint(tmp_path, resume="auto"), [1.0], epochs=4)

    assert contents(tmp_path).items() >= renamed.items()
    assert checkpoint_names(tmp_path) == ["mine.pth", "run_epoch_4_iter_4-2.pth", "run_epoch_4_iter_4.pth"]


def test_retention_is_rebuilt_from_the_folder_where_the_state_is_lost(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None, **MONITOR), [1.0, 3.0, 2.0])
    result = fit(Checkpoint(tmp_path, resume="auto", **MONITOR).named("saver"), [4.0], epochs=4)

    assert any(line.endswith(" start fresh: saver") for line in result.notes)
    assert checkpoint_names(tmp_path) == ["run_epoch_1_iter_1.pth", "run_epoch_4_iter_4.pth"]
    assert result.best_checkpoint == tmp_path / "run_epoch_1_iter_1.pth"


@pytest.mark.parametrize("resumes", [1, 2])
def test_an_earlier_run_of_the_same_name_is_left_alone(fit: Make, tmp_path: Path, resumes: int) -> None:
    """It started fresh, so it is another training: its checkpoints neither go nor compete."""
    fit(Checkpoint(tmp_path, **MONITOR), [0.1, 0.2])
    fit(Checkpoint(tmp_path, **MONITOR), [0.9, 0.8])
    for epoch in range(resumes):
        result = fit(Checkpoint(tmp_path, resume="auto", **MONITOR), [0.85], epochs=3 + epoch)

    assert checkpoint_names(tmp_path) == [
        "run-2_epoch_2_iter_2.pth",
        f"run-2_epoch_{2 + resumes}_iter_{2 + resumes}.pth",
        "run_epoch_1_iter_1.pth",
        "run_epoch_2_iter_2.pth",
    ]
    assert result.best_checkpoint == tmp_path / "run-2_epoch_2_iter_2.pth"


def test_the_numbers_of_another_folder_mean_nothing(fit: Make, tmp_path: Path) -> None:
    """A run resumed from elsewhere finds its own checkpoints again, and leaves alone what was there before it."""
    first, second = tmp_path / "first", tmp_path / "second"
    fit(Checkpoint(first), [1.0, 1.0, 1.0])
    fit(Checkpoint(second), [1.0])
    fit(Checkpoint(second, resume=first / "run_epoch_3_iter_3.pth"), [1.0], epochs=4)
    assert checkpoint_names(second) == ["run-2_epoch_4_iter_4.pth", "run_epoch_1_iter_1.pth"]

    fit(Checkpoint(second, resume="auto"), [1.0], epochs=5)
    assert checkpoint_names(second) == ["run-2_epoch_5_iter_5.pth", "run_epoch_1_iter_1.pth"]
    assert checkpoint_names(first) == ["run_epoch_3_iter_3.pth"]


def test_a_value_is_remembered_for_a_save_at_the_resumed_step(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, **MONITOR), [0.5])
    at_start = SaveSchedule(Every(epochs=1), at_start=True).named("start")
    result = fit(Checkpoint(tmp_path, resume="auto", **MONITOR), [0.7], at_start, epochs=2)

    assert result.best_checkpoint == tmp_path / "run_epoch_1_iter_1.pth"
    assert storage.read_manifest(result.best_checkpoint).judged_by == ("validation/loss", "min", 0.5)
    assert checkpoint_names(tmp_path) == ["run_epoch_1_iter_1.pth", "run_epoch_2_iter_2.pth"]


def test_manifests_show_what_a_checkpoint_competes_by(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None, **MONITOR), [0.5, float("nan")])
    first, second = (storage.read_manifest(tmp_path / name).judged_by for name in checkpoint_names(tmp_path))

    assert first == ("validation/loss", "min", 0.5)
    assert second is not None
    assert str(second[2]) == "nan"


def test_pointers_name_the_last_and_the_best(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, **MONITOR), [0.5, 0.1, 0.9], name="my run")

    assert (tmp_path / "my-run-d33e7609.last").read_text() == "my-run-d33e7609_epoch_3_iter_3.pth\n"
    assert (tmp_path / "my-run-d33e7609.best").read_text() == "my-run-d33e7609_epoch_2_iter_2.pth\n"


def test_there_is_no_best_without_a_monitor(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), [0.5])

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.last",
        "run_epoch_1_iter_1.pth",
    ]


class Nested(Plugin):
    """Tries to train another run of the same name in the same folder in the midst of this one."""

    def __init__(self, fit: Callable[[], RunResult]) -> None:
        self.fit = fit

    @on(EpochEnd)
    def nest(self, run: Run, event: EpochEnd) -> None:
        self.fit()


def test_a_second_writer_is_refused_and_harms_nothing(fit: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoints of run 'run'") as info:
        fit(Checkpoint(tmp_path), [1.0], Nested(lambda: fit(Checkpoint(tmp_path), [1.0])))

    assert "in checkpoint on train_start" in str(info.value.__notes__)
    assert fit(Checkpoint(tmp_path), [1.0]).status == "completed"


def test_another_run_may_write_to_the_same_folder(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), [1.0], Nested(lambda: fit(Checkpoint(tmp_path), [1.0], name="other")))

    assert checkpoint_names(tmp_path) == ["other_epoch_1_iter_1.pth", "run_epoch_1_iter_1.pth"]


def test_switched_off_it_lets_go_of_the_folder_and_on_again_it_continues(fit: Make, tmp_path: Path) -> None:
    checkpoint, locked = Checkpoint(tmp_path, keep_last=2), list[bool]()

    class Switch(Plugin):
        @on(EpochEnd)
        def switch(self, run: Run, event: EpochEnd) -> None:
            trainer_plugins = run.plugins
            (trainer_plugins.disable if run.progress.epoch == 2 else trainer_plugins.enable)("checkpoint")

        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            locked.append((tmp_path / ".run.lock").exists())

    fit(checkpoint, [1.0] * 4, Switch())

    assert locked == [True, True, False, True]
    assert checkpoint_names(tmp_path) == ["run_epoch_3_iter_3.pth", "run_epoch_4_iter_4.pth"]
    assert not (tmp_path / ".run.lock").exists()


# What was removed is reported.


class Removals(Plugin):
    """Notes what it learns of checkpoints, and when the run closes."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, ...]] = []
        self.threads: set[str] = set()

    @on(CheckpointSaved, CheckpointPruned, lane=Lane.REPORT)
    def note(self, run: Run, event: CheckpointSaved | CheckpointPruned) -> None:
        reason = (event.reason,) if isinstance(event, CheckpointPruned) else ()
        self.reported.append((event.name.removeprefix("checkpoint_"), event.path.stem.split("_")[2], *reason))
        self.threads.add(threading.current_thread().name)
        assert event.path.exists() == isinstance(event, CheckpointSaved)

    @on(RunClosed, lane=Lane.REPORT)
    def close_up(self, run: Run, event: RunClosed) -> None:
        self.reported.append((event.name,))

    def of(self, kind: type[Event]) -> list[tuple[str, ...]]:
        return [each for each in self.reported if each[0] == kind.name.removeprefix("checkpoint_")]


@pytest.mark.parametrize("background", [False, True])
def test_each_removal_is_reported_once_with_its_reason_before_the_run_is_closed(
    fit: Make, tmp_path: Path, background: bool
) -> None:
    removals, plain = Removals(), "keep_last=1"
    fit(Checkpoint(tmp_path, background=background), [1.0] * 3, removals)

    assert removals.of(CheckpointPruned) == [("pruned", "1", plain), ("pruned", "2", plain)]
    assert removals.reported[-1] == ("run_closed",)
    assert removals.threads == {threading.main_thread().name}
    if not background:
        assert [each[:2] for each in removals.reported[:-1]] == [
            ("saved", "1"),
            ("saved", "2"),
            ("pruned", "1"),
            ("saved", "3"),
            ("pruned", "2"),
        ]


def test_the_reason_names_the_best_that_are_kept_too(fit: Make, tmp_path: Path) -> None:
    removals = Removals()
    fit(Checkpoint(tmp_path, keep_last=2, **MONITOR), [2.0, 1.0, 3.0, 4.0, 5.0], removals)

    removed = removals.of(CheckpointPruned)
    assert [each[:2] for each in removed] == [("pruned", "1"), ("pruned", "3")]
    assert_each([each[2] for each in removed], *[("keep_last=2", "keep_best=1")] * 2)


def test_what_is_kept_or_pinned_is_not_reported(fit: Make, tmp_path: Path) -> None:
    removals, checkpoint = Removals(), Checkpoint(tmp_path)
    fit(Checkpoint(tmp_path / "all", keep_last=None), [1.0] * 3, removals)
    fit(checkpoint, [1.0] * 2, Pin(checkpoint, 1), removals)

    assert removals.of(CheckpointPruned) == []


@pytest.mark.parametrize("background", [False, True])
def test_what_a_resumed_run_tidies_is_reported(fit: Make, tmp_path: Path, background: bool) -> None:
    """A kill may have come between the last save and its tidying: a smaller `keep_last` leaves as much to do."""
    removals = Removals()
    fit(Checkpoint(tmp_path, keep_last=None), [1.0] * 3)
    fit(Checkpoint(tmp_path, resume="auto", background=background), [], removals, epochs=3)

    assert removals.reported == [("pruned", "1", "keep_last=1"), ("pruned", "2", "keep_last=1"), ("run_closed",)]
    assert checkpoint_names(tmp_path) == ["run_epoch_3_iter_3.pth"]


def test_a_run_that_fails_reports_what_was_removed_after_it(fit: Make, tmp_path: Path) -> None:
    class Fail(Plugin):
        @on(BatchEnd, when=Every(batches=3))
        def fail(self, run: Run, event: BatchEnd) -> None:
            raise RuntimeError("during the third")

    removals = Removals()
    with pytest.raises(RuntimeError, match="during the third"):
        fit(Checkpoint(tmp_path, background=True), [1.0] * 3, Fail(), removals)

    assert removals.reported[-2:] == [("pruned", "1", "keep_last=1"), ("run_closed",)]


# Pinning.


class Pin(Plugin):
    """Pins the checkpoint of an epoch when it is saved."""

    def __init__(self, checkpoint: Checkpoint, epoch: int) -> None:
        self.checkpoint, self.epoch = checkpoint, epoch

    @on(CheckpointSaved)
    def pin(self, run: Run, event: CheckpointSaved) -> None:
        if run.progress.epoch == self.epoch:
            assert self.checkpoint.pin() == event.path


def test_a_pinned_one_stays_and_is_not_counted(fit: Make, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, keep_last=2)
    fit(checkpoint, [1.0] * 5, Pin(checkpoint, 2))

    assert checkpoint_names(tmp_path) == [f"run_epoch_{epoch}_iter_{epoch}.pth" for epoch in (2, 4, 5)]
    assert (tmp_path / "run_epoch_2_iter_2.pinned").exists()

    (tmp_path / "run_epoch_2_iter_2.pinned").unlink()
    fit(Checkpoint(tmp_path, keep_last=2, resume="auto"), [1.0], epochs=6)
    assert checkpoint_names(tmp_path) == ["run_epoch_5_iter_5.pth", "run_epoch_6_iter_6.pth"]


def test_pinning_after_the_run_and_by_path(fit: Make, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, keep_last=None)
    fit(checkpoint, [1.0, 1.0])

    assert checkpoint.pin() == tmp_path / "run_epoch_2_iter_2.pth"
    assert Checkpoint(tmp_path).pin(str(tmp_path / "run_epoch_1_iter_1.pth")) == tmp_path / "run_epoch_1_iter_1.pth"
    fit(Checkpoint(tmp_path, resume="auto"), [1.0, 1.0], epochs=4)
    assert checkpoint_names(tmp_path) == [f"run_epoch_{epoch}_iter_{epoch}.pth" for epoch in (1, 2, 4)]


def test_what_cannot_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No checkpoint is written"):
        Checkpoint(tmp_path).pin()
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*x.pth"):
        Checkpoint(tmp_path).pin(tmp_path / "x.pth")


def test_without_validation_data_there_is_no_best_and_that_is_said(
    scripted: Make, batches: Make, tmp_path: Path
) -> None:
    trainer = Trainer([Checkpoint(tmp_path, every=Every(epochs=1), **MONITOR)], device="cpu")
    result = trainer.fit(scripted([1.0, 2.0]), batches(1), optimizer=adam(0.1), epochs=2)
    assert_each(result.warnings, ("'validation/loss'", "no validation data"))
    assert result.best_checkpoint is None
    assert checkpoint_names(tmp_path) == ["run_epoch_2_iter_2.pth"]
