"""Checkpoint in a folder that holds another training: nothing of it is lost, whatever the names are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointPruned,
    EpochEnd,
    Every,
    Lane,
    LogSchedule,
    Plugin,
    Resume,
    RollBack,
    Run,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    TrainStart,
    WeightsCheckpoint,
    on,
)
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import reader
from heliograph.tests.kit import checkpoint_names, contents, damage
from heliograph.tests.messages import assert_facts, has_facts
from heliograph.tests.stores import seal_as
from torch import nn

Make = Callable[..., Any]
FIRST, SECOND = "run_epoch_1_iter_3.pth", "run_epoch_2_iter_6.pth"


def training_of(path: Path | None) -> str:
    assert path is not None
    return storage.read_manifest(path).training


# The identity.


def test_a_training_has_an_identity_that_its_resumes_inherit(fit: Make, tmp_path: Path) -> None:
    first = fit(Checkpoint(tmp_path))
    second = fit(Checkpoint(tmp_path, resume="auto"), epochs=3)
    other = fit(Checkpoint(tmp_path / "other"))
    resumed = fit(Checkpoint(tmp_path / "third", resume=other.last_checkpoint), epochs=3)

    assert first.last_checkpoint == tmp_path / SECOND
    assert len(training_of(second.last_checkpoint)) == 32
    assert checkpoint_names(tmp_path) == ["run_epoch_3_iter_9.pth"]  # the first one's went: it is the same training
    assert training_of(resumed.last_checkpoint) == training_of(other.last_checkpoint)
    assert training_of(other.last_checkpoint) != training_of(second.last_checkpoint)
    saved = reader.load(tmp_path / "run_epoch_3_iter_9.pth")
    assert saved["training_id"] == training_of(second.last_checkpoint)


def test_it_draws_from_no_generator(fit: Make, tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fit(Checkpoint(tmp_path), epochs=1)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    fit(Checkpoint(tmp_path), epochs=1)

    assert torch.equal(torch.get_rng_state(), after)
    assert len({training_of(path) for path in tmp_path.glob("*.pth")}) == 2


def test_a_run_that_rolls_back_stays_the_training_that_it_is(batches: Make, sgd: Any, tmp_path: Path) -> None:
    """Also where it goes back to a checkpoint of another run, from which it began."""

    def train(checkpoint: Checkpoint, bad: int | None, **options: Any) -> RunResult:
        def loss(output: Any, target: Any) -> Any:
            calls.append(1)
            return nn.functional.mse_loss(output, target) * (float("nan") if len(calls) == bad else 1.0)

        calls: list[int] = []
        trainer = Trainer([SaveSchedule(Every(epochs=1)), RollBack(), checkpoint], device="cpu")
        return trainer.fit(Supervised(nn.Linear(4, 2), loss), batches(3), optimizer=sgd, **options)

    pretrained = train(Checkpoint(tmp_path / "a"), None, epochs=1, name="pretrained").last_checkpoint
    tuned = train(Checkpoint(tmp_path / "a", resume=pretrained), 5, epochs=2, name="tuned")

    assert "rolled back" in str(tuned)
    assert any("run 'pretrained': run 'tuned'" in line for line in tuned.notes)
    assert training_of(tuned.last_checkpoint) != training_of(pretrained)
    assert checkpoint_names(tmp_path / "a") == ["pretrained_epoch_1_iter_3.pth", "tuned_epoch_2_iter_4.pth"]


# A branch: a run that is resumed from another checkpoint than the newest of its training.


@pytest.mark.parametrize("on_existing", ["new_name", "refuse", "replace"])
def test_a_resume_from_an_older_checkpoint_branches(fit: Make, tmp_path: Path, on_existing: Any) -> None:
    first = fit(Checkpoint(tmp_path, keep_last=None), epochs=3)
    before = contents(tmp_path)
    branch = fit(Checkpoint(tmp_path, resume=Resume(tmp_path / FIRST, on_existing=on_existing)), epochs=2)

    assert contents(tmp_path).items() >= before.items()
    assert branch.last_checkpoint == tmp_path / "run-2_epoch_2_iter_6.pth"
    assert training_of(branch.last_checkpoint) != training_of(first.last_checkpoint)
    assert branch.resume is not None
    assert (branch.resume.path, branch.resume.step) == (tmp_path / FIRST, 3)
    (note,) = [note for note in branch.notes if note.startswith("branched from")]
    assert f"{tmp_path / FIRST} at step 3" in note
    assert "run_epoch_3_iter_9.pth" in note
    one, other = (reader.load(tmp_path / name)["modules"] for name in (SECOND, "run-2_epoch_2_iter_6.pth"))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


def test_branches_of_branches_and_auto(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), every=Every(steps=2), epochs=2)
    first = contents(tmp_path)
    second = fit(Checkpoint(tmp_path, resume=tmp_path / "run_epoch_0_iter_2.pth", keep_last=None), epochs=3)
    saved = contents(tmp_path)
    third = fit(Checkpoint(tmp_path, resume=tmp_path / "run-2_epoch_1_iter_3.pth"), epochs=2)
    assert contents(tmp_path).items() >= saved.items() >= first.items()
    assert third.last_checkpoint == tmp_path / "run-3_epoch_2_iter_6.pth"

    auto = fit(Checkpoint(tmp_path, resume="auto"), epochs=3)  # the branch that was written last
    assert auto.last_checkpoint == tmp_path / "run-3_epoch_3_iter_9.pth"
    assert contents(tmp_path).items() >= saved.items()
    assert not any("branched" in note for note in auto.notes)
    trained = fit(Checkpoint(tmp_path, resume=second.last_checkpoint), epochs=4)  # the newest of its training
    assert trained.last_checkpoint == tmp_path / "run-2_epoch_4_iter_12.pth"
    assert not any("branched" in note for note in trained.notes)


def test_the_path_of_a_checkpoint_in_another_folder_branches_once_this_one_has_newer_ones(
    fit: Make, tmp_path: Path
) -> None:
    path = fit(Checkpoint(tmp_path / "a"), epochs=1).last_checkpoint
    fit(Checkpoint(tmp_path / "b", resume=path), epochs=2)
    before = contents(tmp_path / "b")
    again = fit(Checkpoint(tmp_path / "b", resume=path), epochs=2)

    assert contents(tmp_path / "b").items() >= before.items()
    assert again.last_checkpoint == tmp_path / "b" / "run-2_epoch_2_iter_6.pth"


def test_from_the_newest_intact_checkpoint_the_training_continues(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None))
    damage(tmp_path / SECOND)
    result = fit(Checkpoint(tmp_path, keep_last=2, resume=tmp_path / FIRST), epochs=3)

    assert any(note.startswith("skipped: ") and SECOND in note for note in result.notes)
    assert result.last_checkpoint == tmp_path / "run_epoch_3_iter_9.pth"


def test_the_second_checkpoint_of_a_branch_replaces_nothing_of_its_parent(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path / "a", keep_last=None), WeightsCheckpoint(tmp_path / "w"), epochs=3)
    before = contents(tmp_path / "w")
    fit(Checkpoint(tmp_path / "a", resume=tmp_path / "a" / FIRST), WeightsCheckpoint(tmp_path / "w"), epochs=2)

    assert contents(tmp_path / "w").items() >= before.items()
    assert checkpoint_names(tmp_path / "w") == ["run-2_epoch_2_iter_6.pth", "run_epoch_3_iter_9.pth"]


# A fresh run with a name that is taken: E2.


def test_a_rerun_without_resume_loses_nothing_of_the_former(
    fit: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    before = contents(tmp_path)
    with caplog.at_level(logging.WARNING, "heliograph"):
        result = fit(Checkpoint(tmp_path), epochs=2)

    [said] = result.notes
    assert_facts(said, tmp_path, "'run'", "1 in total", FIRST, "'run-2'")
    assert ("heliograph", logging.WARNING, said) in caplog.record_tuples
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before
    assert result.last_checkpoint == tmp_path / "run-2_epoch_2_iter_6.pth"
    assert (tmp_path / "run-2.last").read_text() == "run-2_epoch_2_iter_6.pth\n"
    manifest = storage.read_manifest(result.last_checkpoint)
    assert (manifest.run_name, manifest.family, manifest.sequence) == ("run-2", "run", 3)
    assert reader.load(result.last_checkpoint)["run_name"] == "run"


def test_the_same_file_name_is_not_written_over(fit: Make, tmp_path: Path) -> None:
    """The name of the second's files would be that of the first's, but for the number."""
    for _ in range(3):
        fit(Checkpoint(tmp_path), epochs=1)

    assert checkpoint_names(tmp_path) == ["run-2_epoch_1_iter_3.pth", "run-3_epoch_1_iter_3.pth", FIRST]
    assert len({training_of(path) for path in tmp_path.glob("*.pth")}) == 3


def test_a_name_that_a_number_was_added_to_is_taken_too(fit: Make, tmp_path: Path) -> None:
    for _ in range(2):
        fit(Checkpoint(tmp_path), epochs=1)
    fit(Checkpoint(tmp_path), epochs=1, name="run-2")

    assert checkpoint_names(tmp_path) == ["run-2-2_epoch_1_iter_3.pth", "run-2_epoch_1_iter_3.pth", FIRST]


def test_refused_with_the_choices(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="under the name 'run'") as info:
        fit(Checkpoint(tmp_path, resume=Resume(None, on_existing="refuse")))

    for choice in ("resume='auto'", "another name= or folder", "on_existing='new_name'", "'replace'"):
        assert choice in str(info.value)
    assert contents(tmp_path) == before
    assert fit(Checkpoint(tmp_path, resume=Resume(None, on_existing="refuse")), name="other").notes == ()
    assert fit(Checkpoint(tmp_path, resume=Resume("auto", on_existing="refuse"))).progress.epoch == 2


@pytest.mark.parametrize("background", [False, True])
def test_replaced_when_the_first_of_this_run_is_written(fit: Make, tmp_path: Path, background: bool) -> None:
    pinning = Checkpoint(tmp_path, keep_last=None)
    fit(pinning, epochs=2)
    pinning.pin(tmp_path / SECOND)
    events: list[tuple[str, str]] = []

    class Watch(Plugin):
        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches < 3:
                assert checkpoint_names(tmp_path) == [FIRST, SECOND]

        @on(CheckpointPruned)
        def note(self, run: Run, event: CheckpointPruned) -> None:
            events.append((event.path.name, event.reason))

    checkpoint = Checkpoint(tmp_path, background=background, resume=Resume(None, on_existing="replace"))
    result = fit(checkpoint, Watch(), epochs=2)

    assert events[0] == (FIRST, "on_existing='replace'")
    assert "on_existing='replace'" in result.notes[0]
    assert checkpoint_names(tmp_path) == ["run_epoch_2_iter_6-2.pth", SECOND]
    assert storage.read_manifest(result.last_checkpoint).run_name == "run"
    assert training_of(tmp_path / SECOND) != training_of(result.last_checkpoint)


def test_renamed_checkpoints_and_those_of_helios_are_not_replaced(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=3)
    (tmp_path / FIRST).rename(tmp_path / "mine.pth")
    entry = storage.read_manifest(tmp_path / SECOND)
    seal_as(entry.path, replace(entry, versions={"helios": "1.1.0"}))
    before = contents(tmp_path)
    result = fit(Checkpoint(tmp_path, resume=Resume(None, on_existing="replace")), epochs=1)

    assert "1 are removed" in result.notes[0]
    assert checkpoint_names(tmp_path) == ["mine.pth", FIRST, SECOND]
    assert contents(tmp_path)["mine.pth"] == before["mine.pth"]
    assert contents(tmp_path)[SECOND] == before[SECOND]


def test_a_renamed_checkpoint_does_not_hold_the_name_of_the_training(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    (tmp_path / FIRST).rename(tmp_path / "mine.pth")
    fit(Checkpoint(tmp_path, resume=Resume(None, on_existing="replace")), epochs=1)
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=2)

    assert result.last_checkpoint == tmp_path / SECOND
    assert checkpoint_names(tmp_path) == ["mine.pth", SECOND]


def test_nothing_is_replaced_by_a_run_that_saves_nothing(fit: Make, tmp_path: Path) -> None:
    class Fail(Plugin):
        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            raise RuntimeError("at once")

    fit(Checkpoint(tmp_path), epochs=1)
    before = contents(tmp_path)
    with pytest.raises(RuntimeError, match="at once"):
        fit(Checkpoint(tmp_path, resume=Resume(None, on_existing="replace")), Fail())

    assert contents(tmp_path) == before


def test_what_on_existing_may_be() -> None:
    with pytest.raises(ValueError, match="new_name, refuse, replace;"):
        Resume(None, on_existing="overwrite")  # type: ignore[arg-type]


# Continuing where there are several.


def test_auto_begins_afresh_where_the_newest_training_has_nothing_whole_and_names_the_other(
    fit: Make, tmp_path: Path
) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    fit(Checkpoint(tmp_path), epochs=1)
    damaged = tmp_path / "run-2_epoch_1_iter_3.pth"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=1)

    said = f"starts fresh: none of the checkpoints of 'run' in {tmp_path} is usable"
    assert said in result.notes
    assert any(f"path, resume={tmp_path / FIRST}" in line for line in result.notes)
    assert result.progress.steps == 3
    assert {FIRST, damaged.name} < set(checkpoint_names(tmp_path))


def test_auto_resumes_the_one_that_was_written_last_and_warns(
    fit: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    fit(Checkpoint(tmp_path), epochs=1)
    caplog.clear()
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=2)

    facts = ("2 trainings", tmp_path, "'run'", "'run-2'", "run-2_epoch_1_iter_3.pth", FIRST, str(tmp_path / FIRST))
    [said] = [note for note in result.notes if has_facts(note, *facts)]
    assert [each.message for each in caplog.records if each.levelno == logging.WARNING] == [said]
    assert checkpoint_names(tmp_path) == ["run-2_epoch_2_iter_6.pth", FIRST]

    resumed = fit(Checkpoint(tmp_path, resume=tmp_path / FIRST), epochs=3)
    assert not any("holds another training" in note for note in resumed.notes)
    assert checkpoint_names(tmp_path) == ["run-2_epoch_2_iter_6.pth", "run_epoch_3_iter_9.pth"]
    last = fit(Checkpoint(tmp_path, resume="auto"), epochs=4)
    assert last.last_checkpoint == tmp_path / "run_epoch_4_iter_12.pth"


def test_auto_refuses_the_name_that_only_the_files_of_another_have(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path))
    second = fit(Checkpoint(tmp_path), epochs=3)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="run 'run' writes") as caught:
        fit(Checkpoint(tmp_path, resume="auto"), name="run-2", epochs=4)
    assert "set name='run' or resume=" in str(caught.value)
    assert repr(str(second.last_checkpoint)) in str(caught.value)
    assert contents(tmp_path) == before

    continued = fit(Checkpoint(tmp_path, resume="auto"), epochs=4)
    assert training_of(continued.last_checkpoint) == before_id(before, second.last_checkpoint)
    other = fit(Checkpoint(tmp_path), name="run-2")
    assert other.last_checkpoint == tmp_path / "run-2-2_epoch_2_iter_6.pth"


def before_id(before: dict[str, bytes], path: Path | None) -> str:
    """Return the training that a manifest reported."""
    assert path is not None
    return str(json.loads(before[path.name][before[path.name].rindex(b"{\n") :])["training_id"])


def test_from_a_path_into_a_folder_that_holds_another(fit: Make, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    path = fit(Checkpoint(there), epochs=1).last_checkpoint
    fit(Checkpoint(here), epochs=1)
    with pytest.raises(ValueError, match="holds another training"):
        fit(Checkpoint(here, resume=Resume(path, on_existing="refuse")))
    result = fit(Checkpoint(here, resume=path))

    assert checkpoint_names(here) == ["run-2_epoch_2_iter_6.pth", FIRST]
    assert training_of(result.last_checkpoint) == training_of(path)
    assert (here / "run.last").read_text() == f"{FIRST}\n"
    assert checkpoint_names(there) == [FIRST]


@pytest.mark.parametrize("pointer", [f"{FIRST}\n", "", None])
def test_a_checkpoint_that_was_brought_here_takes_no_name_away(fit: Make, tmp_path: Path, pointer: str | None) -> None:
    """Whatever a power cut made of the pointer: as it was, empty, cut short, an older one, or missing."""
    here, there = tmp_path / "here", tmp_path / "there"
    fit(Checkpoint(here), epochs=1)
    for _ in range(2):
        fit(Checkpoint(there, resume="auto"), epochs=2)
    (there / SECOND).rename(here / SECOND)
    (here / "run.last").unlink()
    if pointer is not None:
        (here / "run.last").write_text(pointer)
    result = fit(Checkpoint(here, resume="auto"), epochs=3)

    assert result.last_checkpoint == here / "run-2_epoch_3_iter_9.pth"
    assert checkpoint_names(here) == ["run-2_epoch_3_iter_9.pth", FIRST]
    assert (here / "run.last").exists() == (pointer is not None)
    assert pointer is None or (here / "run.last").read_text() == pointer


def test_switched_off_at_the_start_it_finds_its_name_when_it_is_switched_on(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), epochs=1)

    class Switch(Plugin):
        @on(EpochEnd)
        def switch(self, run: Run, event: EpochEnd) -> None:
            plugins = run.plugins
            (plugins.disable if run.progress.epoch == 3 else plugins.enable)("checkpoint")

    trainer_checkpoint = Checkpoint(tmp_path)
    result = fit(trainer_checkpoint, Switch(), Off(), epochs=4)

    assert checkpoint_names(tmp_path) == ["run-2_epoch_4_iter_12.pth", FIRST]
    assert result.last_checkpoint == tmp_path / "run-2_epoch_4_iter_12.pth"


class Off(Plugin):
    """Switches the checkpoints off at the first batch."""

    @on(BatchEnd)
    def switch(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 1:
            run.plugins.disable("checkpoint")


# Names that cleaning makes alike: B5.


@pytest.mark.parametrize(("one", "other"), [("a b", "a-b"), ("r" * 100 + "1", "r" * 100 + "2"), ("x-", "x")])
def test_names_that_clean_alike_are_two(fit: Make, tmp_path: Path, one: str, other: str) -> None:
    class Nested(Plugin):
        @on(EpochEnd)
        def nest(self, run: Run, event: EpochEnd) -> None:
            assert fit(Checkpoint(tmp_path), epochs=1, name=other).notes == ()

    assert fit(Checkpoint(tmp_path), Nested(), epochs=1, name=one).notes == ()
    assert len(checkpoint_names(tmp_path)) == len(list(tmp_path.glob("*.last"))) == 2
    for name in (one, other):
        resumed = fit(Checkpoint(tmp_path, resume="auto"), epochs=2, name=name)
        assert (resumed.resume.epoch, storage.read_manifest(resumed.last_checkpoint).run_name) == (1, name)


def test_a_training_whose_newest_is_damaged_never_becomes_another_one(fit: Make, tmp_path: Path) -> None:
    former = fit(Checkpoint(tmp_path), epochs=3)
    newest = fit(Checkpoint(tmp_path), epochs=1)
    newest.last_checkpoint.write_bytes(newest.last_checkpoint.read_bytes()[:-1])
    kept = former.last_checkpoint.read_bytes()

    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=3)

    assert result.resume.path is None
    assert result.progress.steps == former.progress.steps
    assert result.last_checkpoint.name.startswith("run-3_")
    assert any(f"path, resume={former.last_checkpoint}" in note for note in result.notes)
    assert former.last_checkpoint.read_bytes() == kept


class ResumesAnother(Plugin):
    """Resumes a state when `Checkpoint` has chosen its own."""

    affects_training = False

    def __init__(self, path: Path) -> None:
        self.path = path

    @on(TrainStart, lane=Lane.REPORT)
    def resume(self, run: Run, event: TrainStart) -> None:
        run.resume(reader.load(self.path), self.path)


def test_where_another_plugin_resumes_another_training_only_its_own_checkpoints_count(
    fit: Make, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"keep_best": 1, "monitor": "train/loss", "keep_last": None}
    fit(Checkpoint(tmp_path / "a", **options), LogSchedule(Every(epochs=1)))
    other = fit(Checkpoint(tmp_path / "b", **options), LogSchedule(Every(epochs=1)))
    best = list[Path | None]()

    class Watch(Plugin):
        @on(EpochEnd)
        def look(self, run: Run, event: EpochEnd) -> None:
            best.append(run.checkpoints.best)

    again = Checkpoint(tmp_path / "a", resume="auto", **options)
    assert other.last_checkpoint is not None
    fit(again, LogSchedule(Every(epochs=1)), ResumesAnother(other.last_checkpoint), Watch(), epochs=3)
    assert best == [None]
