"""Checkpoint: names, retention, failures, resume."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointLabel,
    CheckpointLoaded,
    CheckpointSaved,
    EarlyStopping,
    EpochEnd,
    EpochStart,
    Every,
    GradientAccumulation,
    Lane,
    Log,
    LogSchedule,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    Supervised,
    Task,
    Trainer,
    ValidationSchedule,
    load_weights,
    on,
)
from heliograph.core.checkpoint.storage import Files, reader
from heliograph.tests.kit import adam
from heliograph.tests.messages import assert_each
from heliograph.tests.stores import unseal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Make = Callable[..., Any]


class CrashError(Exception):
    """What the tests interrupt a run with."""


def crash_at(trainer: Trainer, batches: int) -> None:
    def crash(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == batches:
            raise CrashError

    trainer.bus.on(BatchEnd, crash)


def names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, and check that nothing is there but what belongs to them."""
    found = {path.name for path in folder.iterdir()}
    data = sorted(name for name in found if name.endswith(".pth"))
    belonging = {f"{name.removesuffix('.pth')}{end}" for name in data for end in (".pth", ".pinned")}
    assert {name for name in found - belonging if not name.endswith((".last", ".best", ".steps", ".jsonl"))} == set()
    return data


def rename(path: Path, name: str) -> None:
    """Give a checkpoint another name."""
    path.rename(path.with_name(name))


def remove(path: Path) -> None:
    """Remove a checkpoint, as people do."""
    path.unlink()


@pytest.fixture
def fit_scripted(scripted: Make, batches: Make, sgd: Any) -> Callable[..., RunResult]:
    """Return a function that trains an epoch per scripted validation loss, and checks what every file holds."""

    def run(
        checkpoint: Checkpoint, values: list[float], held: dict[str, Tensor], *plugins: Any, **options: Any
    ) -> RunResult:
        schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
        trainer = Trainer([*schedules, checkpoint, *plugins], device="cpu")

        cuts: list[Tensor] = []

        def cut(run: Run, event: SavePoint) -> None:
            cuts.append(run.task.model.weight.detach().clone())

        def remember(run: Run, event: CheckpointSaved) -> None:
            held[event.path.name] = cuts.pop(0)

        trainer.bus.on(SavePoint, cut)
        trainer.bus.on(CheckpointSaved, remember)
        options.setdefault("epochs", len(values))
        return trainer.fit(scripted(values), batches(2), validation=batches(1), optimizer=sgd, **options)

    return run


# Names.


def test_the_name_has_run_epoch_and_step(fit: Make, tmp_path: Path) -> None:
    result = fit(Checkpoint(tmp_path / "deep" / "er", keep_last=None), name="digits")

    assert names(tmp_path / "deep" / "er") == ["digits_epoch_1_iter_3.pth", "digits_epoch_2_iter_6.pth"]
    assert result.last_checkpoint == tmp_path / "deep" / "er" / "digits_epoch_2_iter_6.pth"
    assert result.best_checkpoint is None


def test_steps_and_batches_differ_under_accumulation(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), GradientAccumulation(2), every=Every(steps=1), epochs=1)

    assert names(tmp_path) == ["run_epoch_0_iter_1.pth", "run_epoch_0_iter_2.pth"]


def test_a_long_run_name_keeps_its_checkpoints_apart(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), name="r" * 300)

    assert len(names(tmp_path)) == 2
    assert all("_epoch_" in name and name.endswith(".pth") for name in names(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_last": 0}, "keep_last.*at least 1.*got 0"),
        ({"keep_best": 1}, "keep_best=1, monitor=None, mode=None"),
        ({"monitor": "validation/loss"}, "keep_best=0, monitor='validation/loss', mode=None"),
        ({"mode": "min"}, "keep_best=0, monitor=None, mode='min'"),
        ({"keep_best": -1, "monitor": "validation/loss"}, "keep_best.*at least 0.*got -1"),
        ({"keep_best": 1, "monitor": "loss"}, "<split>/<name>"),
        ({"keep_best": 1, "monitor": "validation/loss", "mode": "best"}, "mode='min'"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Checkpoint(tmp_path, **options)


def test_without_a_save_schedule_it_would_never_act(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'checkpoint' would never act:"):
        Trainer([Checkpoint(tmp_path)], device="cpu").fit(task(), batches(), optimizer=sgd, epochs=1)


# Retention.


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (None, [1, 2, 3, 4])])
def test_keep_last(fit: Make, tmp_path: Path, keep: int | None, kept: list[int], background: bool) -> None:
    fit(Checkpoint(tmp_path, keep_last=keep, background=background), epochs=4)

    assert names(tmp_path) == [f"run_epoch_{epoch}_iter_{3 * epoch}.pth" for epoch in kept]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("values", "options", "kept", "best"),
    [
        ([3.0, 1.0, 2.0, 4.0], {"keep_best": 1}, [2, 4], 2),
        ([3.0, 1.0, 2.0, 4.0], {"keep_best": 2}, [2, 3, 4], 2),
        ([3.0, 1.0, 2.0, 4.0], {"keep_best": 1, "mode": "max"}, [4], 4),
        ([4.0, 1.0, 2.0, 3.0], {"keep_best": 2, "mode": "max"}, [1, 4], 1),
        ([1.0, 1.0, 1.0, 1.0], {"keep_best": 1}, [1, 4], 1),  # among equals the earliest
        ([float("nan"), 2.0, float("nan"), 3.0], {"keep_best": 1}, [2, 4], 2),
        ([1.0, float("nan"), 2.0, 3.0], {"keep_best": 1, "keep_last": 2}, [1, 3, 4], 1),
        ([4.0, 3.0, 2.0, 1.0], {"keep_best": 2, "keep_last": None}, [1, 2, 3, 4], 4),
    ],
)
def test_keep_best_holds_the_best_weights(
    fit_scripted: Make,
    tmp_path: Path,
    values: list[float],
    options: dict[str, Any],
    kept: list[int],
    best: int,
    background: bool,
) -> None:
    held: dict[str, Tensor] = {}
    checkpoint = Checkpoint(tmp_path, monitor="validation/loss", background=background, **options)
    result = fit_scripted(checkpoint, values, held)

    assert names(tmp_path) == [f"run_epoch_{epoch}_iter_{2 * epoch}.pth" for epoch in kept]
    assert result.best_checkpoint == tmp_path / f"run_epoch_{best}_iter_{2 * best}.pth"
    assert result.last_checkpoint == tmp_path / "run_epoch_4_iter_8.pth"
    assert not torch.equal(held["run_epoch_1_iter_2.pth"], held["run_epoch_4_iter_8.pth"])
    for name in names(tmp_path):
        state = torch.load(tmp_path / name, weights_only=True)
        assert torch.equal(state["modules"]["model"]["weight"], held[name])


def test_checkpoint_saved_reports_the_best(scripted: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    plugins = [
        ValidationSchedule(Every(epochs=1)),
        SaveSchedule(Every(epochs=1)),
        Checkpoint(tmp_path, keep_best=2, monitor="validation/loss"),
    ]
    trainer = Trainer(plugins, device="cpu")
    seen: list[tuple[str, bool, bool]] = []
    trainer.bus.on(
        CheckpointSaved, lambda run, event: seen.append((event.path.name, event.is_best, event.path.exists()))
    )
    trainer.fit(scripted([2.0, 1.0, 1.5]), batches(1), validation=batches(1), optimizer=sgd, epochs=3)

    assert seen == [
        ("run_epoch_1_iter_1.pth", True, True),
        ("run_epoch_2_iter_2.pth", True, True),
        ("run_epoch_3_iter_3.pth", False, True),
    ]


def test_an_older_one_is_removed_only_when_the_new_one_is_there(fit: Make, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Watch(Plugin):
        @on(CheckpointSaved)
        def look(self, run: Run, event: CheckpointSaved) -> None:
            seen.append(sorted(path.name for path in tmp_path.glob("*.pth")))

    fit(Checkpoint(tmp_path), Watch())

    assert seen == [["run_epoch_1_iter_3.pth"], ["run_epoch_1_iter_3.pth", "run_epoch_2_iter_6.pth"]]


def test_two_saves_at_one_place_are_one_file(fit: Make, tmp_path: Path) -> None:
    """Steps are not finished by skipped batches: the same name is written twice, and never removed as its own elder."""
    result = fit(Checkpoint(tmp_path), every=Every(batches=1), epochs=1)

    assert names(tmp_path) == ["run_epoch_0_iter_3.pth"]
    assert result.last_checkpoint == tmp_path / "run_epoch_0_iter_3.pth"

    again = fit(Checkpoint(tmp_path / "again", keep_last=2), SaveSchedule(Every(batches=1)).named("more"), epochs=1)
    assert names(tmp_path / "again") == ["run_epoch_0_iter_2.pth", "run_epoch_1_iter_3.pth"]
    assert again.last_checkpoint == tmp_path / "again" / "run_epoch_1_iter_3.pth"


@pytest.mark.parametrize("background", [False, True])
def test_retention_continues_after_a_resume(fit_scripted: Make, tmp_path: Path, background: bool) -> None:
    def checkpoint(**options: Any) -> Checkpoint:
        options |= {"keep_best": 1, "monitor": "validation/loss", "background": background}
        return Checkpoint(tmp_path, resume="auto", **options)

    first = fit_scripted(checkpoint(keep_last=2), [1.0, 3.0, 2.0], {})
    assert names(tmp_path) == ["run_epoch_1_iter_2.pth", "run_epoch_2_iter_4.pth", "run_epoch_3_iter_6.pth"]
    nothing = fit_scripted(checkpoint(keep_last=2), [], {}, epochs=3)
    assert nothing.best_checkpoint == first.best_checkpoint == tmp_path / "run_epoch_1_iter_2.pth"
    assert nothing.last_checkpoint == first.last_checkpoint == tmp_path / "run_epoch_3_iter_6.pth"

    second = fit_scripted(checkpoint(keep_last=2), [4.0], {}, epochs=4)
    assert names(tmp_path) == ["run_epoch_1_iter_2.pth", "run_epoch_3_iter_6.pth", "run_epoch_4_iter_8.pth"]
    assert second.best_checkpoint == tmp_path / "run_epoch_1_iter_2.pth"

    third = fit_scripted(checkpoint(keep_last=1), [0.5], {}, epochs=5)  # a changed setting takes effect
    assert names(tmp_path) == ["run_epoch_5_iter_10.pth"]
    assert third.best_checkpoint == third.last_checkpoint


def test_a_file_that_somebody_removed_is_forgotten(fit_scripted: Make, tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_best": 1, "monitor": "validation/loss", "resume": "auto", "keep_last": 2}
    fit_scripted(Checkpoint(tmp_path, **options), [1.0, 3.0, 2.0], {})
    remove(tmp_path / "run_epoch_1_iter_2.pth")
    result = fit_scripted(Checkpoint(tmp_path, **options), [2.5], {}, epochs=4)

    assert names(tmp_path) == ["run_epoch_3_iter_6.pth", "run_epoch_4_iter_8.pth"]
    assert result.best_checkpoint == tmp_path / "run_epoch_3_iter_6.pth"  # the better one of those that are left


class TwoMetrics(Task):
    """Its validation returns scripted pairs of loss and accuracy."""

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        self.model = nn.Linear(4, 2)
        self.pairs = iter(pairs)

    def training_step(self, run: Run, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, run: Run, batch: Any) -> dict[str, float]:
        loss, accuracy = next(self.pairs)
        return {"loss": loss, "accuracy": accuracy}


def test_a_changed_monitor_judges_again(batches: Make, sgd: Any, tmp_path: Path) -> None:
    def fit(monitor: str, mode: Any, pairs: list[tuple[float, float]], epochs: int) -> RunResult:
        checkpoint = Checkpoint(tmp_path, keep_best=1, monitor=monitor, mode=mode, resume="auto")
        plugins = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1)), checkpoint]
        trainer = Trainer(plugins, device="cpu")
        return trainer.fit(TwoMetrics(pairs), batches(1), validation=batches(1), optimizer=sgd, epochs=epochs)

    first = fit("validation/accuracy", "max", [(0.9, 0.9), (0.8, 0.1)], 2)
    second = fit("validation/loss", "min", [(0.3, 0.2), (0.5, 0.2)], 4)

    assert first.best_checkpoint == tmp_path / "run_epoch_1_iter_1.pth"
    assert second.best_checkpoint == tmp_path / "run_epoch_3_iter_3.pth"
    assert {"run_epoch_3_iter_3.pth", "run_epoch_4_iter_4.pth"} <= set(names(tmp_path))


def test_state_round_trip(tmp_path: Path) -> None:
    state = {"value": 0.25, "measured_at": 30}
    checkpoint = Checkpoint(tmp_path, keep_best=2, monitor="validation/loss")
    assert checkpoint.state_dict() == {"value": None, "measured_at": -1}
    checkpoint.load_state_dict({"since": 7, **state})  # as it was when trainings had no identity

    assert checkpoint.state_dict() == state


# Failures.


def failing_save(number: int, error: BaseException) -> Callable[..., None]:
    """Return a `torch.save` that fails halfway at the given call."""
    calls: list[int] = []
    real = torch.save

    def save(state: Any, file: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            file.write(b"half")
            raise error
        real(state, file, **options)

    return save


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("write failed")])
def test_a_failing_save_raises_and_leaves_the_former_ones(
    fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr(torch, "save", failing_save(2, error))
    with pytest.raises(OSError, match=r"written \([\d.]+ MB") as info:
        fit(checkpoint, epochs=3)

    assert "run_epoch_2_iter_6.pth" in str(info.value)
    assert info.value.__cause__ is error
    assert names(tmp_path) == ["run_epoch_1_iter_3.pth"]
    assert torch.load(tmp_path / "run_epoch_1_iter_3.pth", weights_only=True)["progress"]["steps"] == 3


def test_a_failing_sync_is_a_failing_save(fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        fit(Checkpoint(tmp_path))

    assert names(tmp_path) == []


def test_a_failing_rename_is_a_failing_save(fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(files: Files, old: Path, new: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Files, "rename", refuse)
    with pytest.raises(OSError, match=r"written .* Permission"):
        fit(Checkpoint(tmp_path))

    assert names(tmp_path) == []


def test_a_name_that_is_somebody_else_s_gets_a_number(fit: Make, tmp_path: Path) -> None:
    (tmp_path / "run_epoch_1_iter_3.pth").write_text("mine")
    result = fit(Checkpoint(tmp_path), epochs=1)

    assert result.last_checkpoint == tmp_path / "run-2_epoch_1_iter_3.pth"
    assert names(tmp_path) == ["run-2_epoch_1_iter_3.pth", "run_epoch_1_iter_3.pth"]
    assert (tmp_path / "run_epoch_1_iter_3.pth").read_text() == "mine"


def test_a_file_that_the_kernel_refuses_to_let_grow(fit: Make, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="no resource limits")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Limit(Plugin):
        @on(EpochEnd)
        def limit(self, run: Run, event: EpochEnd) -> None:
            if run.progress.epoch == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    try:
        with pytest.raises(OSError, match=r"written .* MB"):
            fit(Checkpoint(tmp_path), Limit())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    assert names(tmp_path) == ["run_epoch_1_iter_3.pth"]
    assert reader.load(tmp_path / "run_epoch_1_iter_3.pth")["progress"]["steps"] == 3


def test_an_interrupt_in_a_save_leaves_no_temporary_file(
    fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr(torch, "save", failing_save(2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoint)

    assert names(tmp_path) == ["run_epoch_1_iter_3.pth"]


def test_a_folder_that_went_away(fit: Make, tmp_path: Path) -> None:
    class Remove(Plugin):
        @on(EpochEnd)
        def remove(self, run: Run, event: EpochEnd) -> None:
            shutil.rmtree(tmp_path / "c")

    with pytest.raises(OSError, match="could not be written"):
        fit(Checkpoint(tmp_path / "c"), Remove())


def test_an_unwritable_folder_is_an_error_at_the_start(fit: Make, task: Make, tmp_path: Path, weights: Make) -> None:
    (tmp_path / "file").touch()
    mine = task()
    before = weights(mine)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="Nothing can be saved"):
            fit(Checkpoint(folder), task=mine)

    assert all(map(torch.equal, before, weights(mine)))


def test_permission_bits_follow_the_umask(fit: Make, tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        fit(Checkpoint(tmp_path), epochs=1)
    finally:
        os.umask(former)

    assert (tmp_path / "run_epoch_1_iter_3.pth").stat().st_mode & 0o777 == 0o640


class Remembering(Plugin):
    """Has whatever state it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    @on(EpochEnd)
    def nothing(self, run: Run, event: EpochEnd) -> None:
        """A plugin receives something."""

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [1, {"value": self.value}]}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["deep"][1]["value"]


def test_state_that_is_not_plain_is_refused_with_its_path(fit: Make, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['plugins'\]\['remembering'\]\['deep'\]\[1\]\['value'\] is a .*Path"):
        fit(Checkpoint(tmp_path), Remembering(tmp_path))

    assert names(tmp_path) == []


def test_a_checkpoint_loads_with_weights_only(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), RNGCapture(), Remembering({"tensor": torch.ones(2), "b": b"x"}))
    state = torch.load(tmp_path / "run_epoch_2_iter_6.pth", weights_only=True)

    assert state["run_name"] == "run"
    assert state["progress"]["steps"] == 6
    assert set(state["plugins"]) >= {"rng_capture", "checkpoint", "save_schedule", "remembering"}


# Resume.


def test_the_default_begins_afresh(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path))
    again = fit(Checkpoint(tmp_path / "elsewhere"))

    assert again.progress.steps == 6
    assert again.notes == ()


def test_resume_from_a_path(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=3)
    path = tmp_path / "run_epoch_1_iter_3.pth"
    for given, folder in ((path, tmp_path / "other"), (str(path), tmp_path / "third")):
        result = fit(Checkpoint(folder, keep_last=None, resume=given), epochs=2)
        assert any(f"step 3 from {path}" in line for line in result.notes)
        assert names(folder) == ["run_epoch_2_iter_6.pth"]


def test_a_missing_path_is_fatal_and_lists_the_others(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*iter_7.pth. Did"):
        fit(Checkpoint(tmp_path, resume=tmp_path / "run_epoch_2_iter_7.pth"))
    with pytest.raises(FileNotFoundError, match=r"Known: none"):
        fit(Checkpoint(tmp_path, resume=tmp_path / "nowhere" / "x.pth"))
    with pytest.raises(ValueError, match=r"folder: Checkpoint\(.*, resume='auto'\)"):
        fit(Checkpoint(tmp_path, resume=tmp_path))
    with pytest.raises(ValueError, match="resume is None, 'auto',"):
        Checkpoint(tmp_path, resume="Auto")


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_a_broken_path_is_fatal(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path))
    path = tmp_path / "run_epoch_2_iter_6.pth"
    truncate(path)
    with pytest.raises(ValueError, match=r"run_epoch_2_iter_6.pth is damaged,"):
        fit(Checkpoint(tmp_path, resume=path))


def test_auto_says_that_it_begins_afresh(fit: Make, tmp_path: Path) -> None:
    result = fit(Checkpoint(tmp_path, resume="auto"))

    assert_each(result.notes, ("starts fresh", "'run'", tmp_path))
    assert result.progress.steps == 6


def test_auto_without_a_name_warns_where_only_named_runs_are(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), name="a")
    forgotten = fit(Checkpoint(tmp_path, resume="auto"))
    (warning,) = forgotten.warnings
    assert f"name=: {tmp_path}" in warning
    named = fit(Checkpoint(tmp_path, resume="auto"), name="b")  # the first start of a second run is as it should be
    assert named.warnings == ()
    assert_each(named.notes, (tmp_path, "'b'", "'a', 'run'"), ("starts fresh", "'b'", tmp_path))
    assert fit(Checkpoint(tmp_path, resume="auto"), epochs=3).warnings == ()


def test_a_result_says_whether_it_was_resumed_or_can_be(fit: Make, tmp_path: Path) -> None:
    def said(result: RunResult) -> list[str]:
        return [line.split()[0].strip(":") for line in str(result).splitlines() if line.startswith("resum")]

    fresh = fit(Checkpoint(tmp_path, resume="auto"), RNGCapture())
    assert f"resumable: {fresh.resume}" in str(fresh).splitlines()
    assert said(fresh) == ["resumable"]
    resumed = fit(Checkpoint(tmp_path, resume="auto"), RNGCapture(), epochs=3)
    assert str(resumed.resume) in str(resumed).splitlines()
    assert said(resumed)[0] == "resumed"
    without = fit(RNGCapture())
    assert without.resume is not None
    assert said(without) == []  # there is nothing to resume from


def test_auto_says_that_none_of_this_run_s_can_be_used(
    fit: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=3)
    truncate(tmp_path / "run_epoch_1_iter_3.pth")
    unseal(tmp_path / "run_epoch_2_iter_6.pth")
    (tmp_path / "run_epoch_3_iter_9.pth").write_text("torn")
    fit(Checkpoint(tmp_path), epochs=1, name="other")
    with caplog.at_level(logging.WARNING, "heliograph"):
        result = fit(Checkpoint(tmp_path, resume="auto"))

    said = f"starts fresh: none of the checkpoints of 'run' in {tmp_path} is usable"
    assert said in result.notes
    assert not any("no checkpoint of 'run'" in note for note in result.notes)
    assert ("heliograph", logging.WARNING, said) in caplog.record_tuples


def test_auto_continues_from_the_newest_valid_and_says_what_it_passed_over(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=3)
    truncate(tmp_path / "run_epoch_3_iter_9.pth")
    (tmp_path / "empty.pth").touch()
    torch.save({"weight": torch.ones(1)}, tmp_path / "run_epoch_8_iter_24.pth")
    torch.save(torch.ones(1), tmp_path / "run_epoch_9_iter_27.pth")
    (tmp_path / "notes.txt").write_text("not looked at")
    fit(Checkpoint(tmp_path, keep_last=None), epochs=5, name="other")
    result = fit(Checkpoint(tmp_path, resume="auto", keep_last=None), epochs=3)
    notes = "\n".join(result.notes)

    assert f"step 6 from {tmp_path / 'run_epoch_2_iter_6.pth'}" in notes
    assert result.progress.steps == 9
    for name, why in [
        ("run_epoch_3_iter_9.pth", "is damaged"),
        ("empty.pth", "is empty"),
        ("run_epoch_8_iter_24.pth", "has no manifest"),
        ("run_epoch_9_iter_27.pth", "has no manifest"),
    ]:
        assert any(line.startswith("skipped") and name in line and why in line for line in result.notes)


def test_auto_says_whose_checkpoints_it_found(fit: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(Checkpoint(tmp_path), epochs=5, name="other")
    result = fit(Checkpoint(tmp_path, resume="auto"))

    assert any("skipped" in line and "only of 'other'" in line for line in result.notes)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    (tmp_path / "aside.pth").touch()
    fit(Checkpoint(tmp_path, resume="auto"), name="third")
    (warned,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "aside.pth is empty" in warned


def test_auto_judges_by_content_and_not_by_name(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=3)
    rename(tmp_path / "run_epoch_3_iter_9.pth", "aside.pth")
    rename(tmp_path / "run_epoch_1_iter_3.pth", "run_epoch_99_iter_999.pth")
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=4)

    assert any(f"step 9 from {tmp_path / 'aside.pth'}" in line for line in result.notes)


def test_a_finished_run_resumed_does_nothing_says_so_and_writes_nothing(
    fit: Make, task: Make, tmp_path: Path, weights: Make
) -> None:
    mine, again = task(), task()
    first = fit(Checkpoint(tmp_path), SaveSchedule(Every(epochs=1), at_end=True).named("end"), task=mine)
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted(tmp_path.iterdir())]
    plugins = [SaveSchedule(Every(epochs=1), at_end=True).named("end")]
    result = fit(Checkpoint(tmp_path, resume="auto"), *plugins, task=again)

    assert result.progress.state_dict() | {"earlier_seconds": 0} == first.progress.state_dict() | {"earlier_seconds": 0}
    assert result.status == "completed"
    assert "nothing left to do" in str(result)
    assert [(path.name, path.stat().st_mtime_ns) for path in sorted(tmp_path.iterdir())] == before
    assert all(map(torch.equal, weights(mine), weights(again)))
    assert result.last_checkpoint == first.last_checkpoint


def test_a_resumed_run_does_only_the_rest(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), epochs=2)
    by_epochs = fit(Checkpoint(tmp_path, resume="auto"), epochs=5)
    by_steps = fit(Checkpoint(tmp_path, resume="auto"), epochs=None, steps=17, every=Every(steps=1))

    assert (by_epochs.progress.epoch, by_epochs.progress.steps) == (5, 15)
    assert (by_steps.progress.epoch, by_steps.progress.batch, by_steps.progress.steps) == (5, 2, 17)


def test_changed_intervals_take_effect(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=1)
    fit(Checkpoint(tmp_path, keep_last=None, resume="auto"), every=Every(steps=2), epochs=2)

    assert names(tmp_path) == [
        "run_epoch_1_iter_3.pth",
        "run_epoch_1_iter_4.pth",
        "run_epoch_1_iter_6.pth",
    ]


def test_a_changed_accumulation_takes_effect(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    result = fit(Checkpoint(tmp_path, resume="auto"), GradientAccumulation(3), epochs=3)

    assert result.progress.steps == 3 + 2


def test_unknown_and_missing_plugin_state_is_noted(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), Remembering(1), epochs=1)
    result = fit(Checkpoint(tmp_path, resume="auto"), Remembering(2).named("newcomer"), epochs=2)
    notes = "\n".join(result.notes)

    assert "start fresh: newcomer" in notes
    assert "without a plugin, ignored:" in notes


def test_plugin_state_is_restored_under_its_name(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), Remembering(7), epochs=1)
    plugin = Remembering()
    fit(Checkpoint(tmp_path, resume="auto"), plugin, epochs=2)

    assert plugin.value == 7


@pytest.mark.parametrize("name", ["modules", "progress", "schema", "plugins"])
def test_a_plugin_may_be_called_like_a_part_of_the_checkpoint(fit: Make, tmp_path: Path, name: str) -> None:
    fit(Checkpoint(tmp_path), Remembering(7).named(name), epochs=1)
    plugin = Remembering().named(name)
    result = fit(Checkpoint(tmp_path, resume="auto"), plugin, epochs=2)

    assert (plugin.value, result.progress.steps) == (7, 6)


@pytest.mark.parametrize("name", ["epoch", "iter_epoch", "my_epoch_9_iter_99"])
def test_a_run_may_be_called_like_a_place(fit: Make, tmp_path: Path, name: str) -> None:
    fit(Checkpoint(tmp_path), epochs=1, name=name)
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=2, name=name)

    assert any(f"step 3 from {tmp_path / f'{name}_epoch_1_iter_3.pth'}" in line for line in result.notes)
    assert names(tmp_path) == [f"{name}_epoch_2_iter_6.pth"]


def test_another_task_is_an_error(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path))
    other = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    other.extra = nn.Linear(1, 1)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"task has \['extra', 'model'\]"):
        fit(Checkpoint(tmp_path, resume="auto"), task=other)


def test_loaded_is_reported_once_with_its_path(fit: Make, tmp_path: Path) -> None:
    seen: list[tuple[Path | None, int]] = []

    class Watch(Plugin):
        @on(CheckpointLoaded)
        def look(self, run: Run, event: CheckpointLoaded) -> None:
            seen.append((event.path, run.progress.steps))

    fit(Checkpoint(tmp_path, resume="auto"), Watch(), epochs=1)
    fit(Checkpoint(tmp_path, resume="auto"), Watch(), epochs=2)

    assert seen == [(tmp_path / "run_epoch_1_iter_3.pth", 3)]


def test_a_stopped_run_can_be_resumed_in_the_midst_of_its_epoch(fit: Make, tmp_path: Path) -> None:
    class Stop(Plugin):
        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 4:
                run.control.stop("enough")
                run.control.request_save("before it stops")

    first = fit(Checkpoint(tmp_path), Stop())
    second = fit(Checkpoint(tmp_path, resume="auto"))

    assert (first.status, first.progress.epoch, first.progress.batch) == ("stopped", 1, 1)
    assert (second.status, second.progress.epoch, second.progress.steps) == ("completed", 2, 6)
    assert second.resume.path == first.last_checkpoint == tmp_path / "run_epoch_1_iter_4.pth"
    assert (second.resume.epoch, second.resume.batch, second.resume.step) == (1, 1, 4)


def test_two_fits_and_a_test_on_one_trainer(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    """Trap 17: the folder is the same for every call."""
    trainer = Trainer([SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path / "c")], device="cpu")
    first = trainer.fit(task(), batches(2), optimizer=sgd, epochs=2)
    trainer.test(task(), batches(1))
    second = trainer.fit(task(), batches(2), optimizer=sgd, epochs=3, name="second")

    assert first.last_checkpoint == tmp_path / "c" / "run_epoch_2_iter_4.pth"
    assert second.last_checkpoint == tmp_path / "c" / "second_epoch_3_iter_6.pth"
    assert names(tmp_path / "c") == ["run_epoch_2_iter_4.pth", "second_epoch_3_iter_6.pth"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_load_weights_of_a_checkpoint(fit: Make, task: Make, weights: Make, tmp_path: Path) -> None:
    trained, fresh = task(), task(seed=5)
    result = fit(Checkpoint(tmp_path), task=trained)
    assert result.last_checkpoint is not None
    load_weights(fresh, result.last_checkpoint)

    assert all(map(torch.equal, weights(trained), weights(fresh)))


def test_an_early_stopped_run_is_not_trained_further(scripted: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    results = []
    for values in ([1.0, 2.0, 3.0, 4.0], []):
        plugins = [
            ValidationSchedule(Every(epochs=1)),
            EarlyStopping(patience=2),
            SaveSchedule(Every(epochs=1)),
            Checkpoint(tmp_path, resume="auto"),
        ]
        trainer = Trainer(plugins, device="cpu")
        results.append(trainer.fit(scripted(values), batches(1), validation=batches(1), optimizer=sgd, epochs=4))

    assert [result.progress.steps for result in results] == [3, 3]
    assert [result.status for result in results] == ["stopped", "stopped"]


# Resumed equals uninterrupted, bit for bit.


class Whole:
    """Builds the same run again and again: dropout, Adam, a shuffled loader, validation that draws."""

    def __init__(
        self,
        folder: Path,
        *,
        n: int,
        every: Any,
        at_start: bool = False,
        drawing: bool = False,
        asking: bool = False,
        background: bool = False,
    ) -> None:
        self.folder, self.n, self.every = folder, n, every
        self.at_start, self.drawing, self.asking, self.background = at_start, drawing, asking, background

    def fit(self, crash: int | None = None) -> tuple[list[Tensor], list[float], RunResult | None]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        inputs, targets = torch.randn(20, 4), torch.randn(20, 2)
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
        plugins: list[Any] = [
            RNGCapture(),
            GradientAccumulation(self.n),
            ValidationSchedule(Every(epochs=1)),
            LogSchedule(Every(steps=2)),
            SaveSchedule(self.every, at_start=self.at_start),
            Checkpoint(self.folder, keep_last=2, resume="auto", background=self.background),
        ]
        trainer = Trainer(plugins, device="cpu")
        losses: list[float] = []
        trainer.bus.on(BatchEnd, lambda run, event: losses.append(run.loss.item()))
        if self.drawing:
            trainer.bus.on(EpochStart, lambda run, event: torch.rand(1).item() and None)
        if self.asking:
            trainer.bus.on(EpochStart, lambda run, event: run.control.request_save("before the first batch"))
        torch.rand(7)  # what happened before a run does not matter
        mine = DrawingTask(model, nn.functional.mse_loss)
        if crash is not None:
            crash_at(trainer, crash)
        result = None
        try:
            result = trainer.fit(
                mine,
                loader,
                validation=[(inputs, targets)],
                optimizer=adam(),
                epochs=3,
            )
        except CrashError:
            assert crash is not None
        return [each.detach().clone() for each in model.parameters()], losses, result


class DrawingTask(Supervised):
    """Its validation draws from the global generators."""

    def validation_step(self, run: Run, batch: Any) -> Any:
        torch.rand(3)
        return super().validation_step(run, batch)


def assert_resumes(whole: Callable[[str], Whole], crashes: list[int]) -> None:
    weights, losses, uninterrupted = whole("uninterrupted").fit()
    broken = whole("broken")
    for crash in crashes:
        broken.fit(crash)
    resumed_weights, resumed_losses, result = broken.fit()

    assert result is not None
    assert uninterrupted is not None
    assert all(map(torch.equal, weights, resumed_weights))
    assert losses[-len(resumed_losses) :] == resumed_losses
    assert len(resumed_losses) < len(losses)
    assert result.metrics == uninterrupted.metrics
    clock = {"earlier_seconds": 0}
    assert result.progress.state_dict() | clock == uninterrupted.progress.state_dict() | clock


@pytest.mark.sample(3)
@pytest.mark.parametrize("crash", [2, 4, 6, 7, 11, 14])
@pytest.mark.parametrize("n", [1, 2])
def test_a_resume_at_any_step_is_bit_equal(tmp_path: Path, crash: int, n: int) -> None:
    crash = max(crash, n + 1)
    assert_resumes(lambda name: Whole(tmp_path / name, n=n, every=Every(steps=1)), [crash])


@pytest.mark.parametrize("n", [1, 3])
def test_a_resume_at_an_epoch_border_is_bit_equal(tmp_path: Path, n: int) -> None:
    assert_resumes(lambda name: Whole(tmp_path / name, n=n, every=Every(epochs=1)), [8])


@pytest.mark.parametrize("background", [False, True])
def test_a_run_resumed_again_and_again_is_bit_equal(tmp_path: Path, background: bool) -> None:
    def whole(name: str) -> Whole:
        return Whole(tmp_path / name, n=1, every=Every(steps=2), background=background)

    assert_resumes(whole, [4, 6, 9, 13])


def test_a_save_at_the_start_of_a_resumed_run_keeps_the_state_true(tmp_path: Path) -> None:
    """The second crash comes before any later save: the third run continues from what the second wrote at its start."""
    assert_resumes(lambda name: Whole(tmp_path / name, n=1, every=Every(steps=3), at_start=True), [4, 5])


def test_a_save_that_is_asked_for_before_the_loader_is_positioned_keeps_the_state_true(tmp_path: Path) -> None:
    assert_resumes(lambda name: Whole(tmp_path / name, n=1, every=Every(steps=3), asking=True), [4, 5])


def test_a_handler_that_draws_at_the_epoch_s_start_does_not_matter(tmp_path: Path) -> None:
    assert_resumes(lambda name: Whole(tmp_path / name, n=1, every=Every(steps=1), drawing=True), [8])


def test_an_unsized_loader_resumes_bit_equal(
    batches: Make, task: Make, sgd: Any, weights: Make, tmp_path: Path
) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches(5))

    def fit(folder: str, crash: int | None = None) -> list[Tensor]:
        plugins = [
            RNGCapture(),
            GradientAccumulation(2),
            SaveSchedule(Every(steps=1)),
            Checkpoint(tmp_path / folder, resume="auto"),
        ]
        trainer = Trainer(plugins, device="cpu")
        mine = task(dropout=0.5)
        if crash is None:
            trainer.fit(mine, Unsized(), optimizer=sgd, epochs=3)
        else:
            crash_at(trainer, crash)
            with pytest.raises(CrashError):
                trainer.fit(mine, Unsized(), optimizer=sgd, epochs=3)
        result: list[Tensor] = weights(mine)
        return result

    whole = fit("whole")
    fit("broken", 9)
    assert all(map(torch.equal, whole, fit("broken")))


def test_saves_are_after_the_validation_of_their_boundary(
    scripted: Make, batches: Make, sgd: Any, tmp_path: Path
) -> None:
    plugins = [
        SaveSchedule(Every(epochs=1)),
        Checkpoint(tmp_path, keep_last=None),
        CheckpointLabel("{validation/loss}"),
        ValidationSchedule(Every(epochs=1)),
    ]
    trainer = Trainer(plugins, device="cpu")
    order: list[str] = []
    trainer.bus.on(SavePoint, lambda run, event: order.append(f"save {run.metrics['validation/loss']}"))
    trainer.bus.on(Log, lambda run, event: order.append("log"))
    trainer.fit(scripted([0.5, 0.25]), batches(1), validation=batches(1), optimizer=sgd, epochs=2)

    assert order == ["save 0.5", "save 0.25"]
    assert names(tmp_path) == ["run_epoch_1_iter_1_0.5.pth", "run_epoch_2_iter_2_0.25.pth"]


class Counts(Plugin):
    """Counts the saves, and keeps that."""

    def __init__(self) -> None:
        self.saves = 0

    def state_dict(self) -> dict[str, Any]:
        return {"saves": self.saves}

    def load_state_dict(self, state: Any) -> None:
        self.saves = state["saves"]


class CountsLate(Counts):
    @on(SavePoint, lane=Lane.REPORT)
    def count(self, run: Run, event: SavePoint) -> None:
        self.saves += 1


class CountsEarly(Counts):
    @on(SavePoint)
    def count(self, run: Run, event: SavePoint) -> None:
        self.saves += 1


class Looks(CountsLate):
    affects_training = False


@pytest.mark.parametrize(("kind", "is_lost"), [(CountsLate, True), (CountsEarly, False), (Looks, False)])
def test_what_a_plugin_changes_after_the_state_is_saved_is_reported(
    tmp_path: Path, task: Make, batches: Make, sgd: Any, kind: type[Counts], is_lost: bool
) -> None:
    plugins = [RNGCapture(), SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path), kind()]
    result = Trainer(plugins, device="cpu").fit(task(), batches(3), optimizer=sgd, epochs=1)
    assert result.resume is not None
    assert bool(result.resume.untracked) is is_lost
    if is_lost:
        assert "lane before PERSIST" in result.resume.untracked["plugins.counts_late"]
