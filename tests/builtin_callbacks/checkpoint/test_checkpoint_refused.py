"""Checkpoint where the system refuses to read, or what is there is damaged: nothing good goes, and nothing unsaid."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import BatchEnd, Checkpoint, CheckpointLabel, Plugin, Resume, Run, on
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import reader
from heliograph.core.checkpoint.storage.files import PAUSES, SYSTEM
from heliograph.tests.kit import checkpoint_names, contents, damage
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.stores import seal, seal_as, unseal

Make = Callable[..., Any]

FIRST, SECOND, THIRD = (f"run_epoch_{epoch}_iter_{3 * epoch}.pth" for epoch in (1, 2, 3))


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Return a function that lets an operation on files fail so many times; it returns the pauses that were made."""

    def refuse(operation: str, name: str, times: float, number: int = errno.EIO) -> list[float]:
        real, left, pauses = getattr(SYSTEM, operation), [times], list[float]()

        def operate(path: Path, *arguments: Any) -> Any:
            if path.name == name and left[0] > 0:
                left[0] -= 1
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments)

        monkeypatch.setattr(SYSTEM, operation, operate)
        monkeypatch.setattr(SYSTEM, "pause", pauses.append)
        return pauses

    return refuse


# One refusal to read the only checkpoint: E2.


@pytest.mark.parametrize(("operation", "name"), [("try_open", FIRST), ("try_range", FIRST), ("try_names", "here")])
def test_a_refusal_that_passes_costs_nothing(
    fit: Make, tmp_path: Path, refuse: Make, caplog: pytest.LogCaptureFixture, operation: str, name: str
) -> None:
    here = tmp_path / "here"
    fit(Checkpoint(here), epochs=1)
    pauses = refuse(operation, name, 1)
    result = fit(Checkpoint(here, resume="auto"))

    assert result.resume.path == here / FIRST
    assert checkpoint_names(here) == [SECOND]
    assert pauses == [PAUSES[0]]
    assert "0.1 s: [Errno 5]" in caplog.text


@pytest.mark.parametrize(("operation", "name"), [("try_open", FIRST), ("try_range", FIRST), ("try_names", "here")])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_refusal_that_stays_is_fatal_and_says_what_to_do(
    fit: Make, tmp_path: Path, refuse: Make, operation: str, name: str, number: int
) -> None:
    here = tmp_path / "here"
    fit(Checkpoint(here), epochs=1)
    before = contents(here)
    refuse(operation, name, float("inf"), number)
    with pytest.raises(OSError, match="cannot be read") as info:
        fit(Checkpoint(here, resume="auto"))

    assert info.value.errno == number
    if operation == "try_open":
        assert_facts(
            info.value, here / FIRST, "cannot be read", "4 tries", os.strerror(number), errno.errorcode[number]
        )
        assert "Nothing was started, skipped" in str(info.value)
    assert contents(here) == before


def test_a_path_that_cannot_be_read(fit: Make, tmp_path: Path, refuse: Make) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    refuse("try_open", FIRST, 2)
    assert fit(Checkpoint(tmp_path / "other", resume=tmp_path / FIRST)).resume.path == tmp_path / FIRST
    refuse("try_open", FIRST, float("inf"))
    with pytest.raises(OSError, match="read, in 4"):
        fit(Checkpoint(tmp_path / "other", resume=tmp_path / FIRST))


def test_a_fresh_run_leaves_alone_what_it_cannot_read(fit: Make, tmp_path: Path, refuse: Make) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    before = contents(tmp_path)
    refuse("try_range", FIRST, float("inf"))
    result = fit(Checkpoint(tmp_path), epochs=1)

    assert "(1 without a usable" in str(result.notes)
    assert f"{tmp_path / FIRST}" in result.notes[0]
    assert "writing are unknown" in result.notes[0]
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before


# What is damaged.


def test_a_link_into_storage_that_is_not_there_is_no_reason_to_begin_afresh(
    fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "here", tmp_path / "elsewhere.pth"
    fit(Checkpoint(folder), epochs=1)
    (folder / FIRST).rename(elsewhere)
    (folder / FIRST).symlink_to(elsewhere)
    unmounted = elsewhere.rename(tmp_path / "unmounted.pth")
    monkeypatch.setattr(SYSTEM, "pause", lambda seconds: None)
    with pytest.raises(OSError, match=f"broken link to {elsewhere}") as caught:
        fit(Checkpoint(folder, resume="auto"))
    assert "Nothing was started, skipped" in str(caught.value)

    unmounted.rename(elsewhere)
    result = fit(Checkpoint(folder, resume="auto"))
    assert result.resume is not None
    assert result.resume.step == 3
    assert elsewhere.exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_took_the_place_of_a_checkpoint_stays_there(fit: Make, tmp_path: Path, kind: str) -> None:
    first = fit(Checkpoint(tmp_path, keep_last=None))
    (place := tmp_path / SECOND).unlink()
    if kind == "folder":
        (place / "within").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / FIRST)
    before = os.lstat(place)
    result = fit(Checkpoint(tmp_path, keep_last=None, resume=tmp_path / FIRST))

    assert first.last_checkpoint == place
    assert result.last_checkpoint == tmp_path / "run_epoch_2_iter_6-2.pth"
    assert os.lstat(place).st_ino == before.st_ino
    assert reader.load(result.last_checkpoint)["progress"]["epoch"] == 2
    again = fit(Checkpoint(tmp_path, keep_last=None, resume="auto"), epochs=3)
    assert again.resume is not None
    assert again.resume.step == 6


def test_a_damaged_one_stays_until_a_newer_one_is_written(fit: Make, tmp_path: Path) -> None:
    class Look(Plugin):
        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            seen.append(checkpoint_names(tmp_path))

    seen: list[list[str]] = []
    fit(Checkpoint(tmp_path, keep_last=None), epochs=2)
    damage(tmp_path / SECOND)
    damaged = (tmp_path / SECOND).read_bytes()
    result = fit(Checkpoint(tmp_path, resume="auto"), CheckpointLabel(lambda run: "again"), Look(), epochs=3)

    assert result.resume.path == tmp_path / FIRST
    assert any("skipped: " in note and "is damaged: its SHA-256" in note for note in result.notes)
    assert_each(result.warnings, ("Newer checkpoints", FIRST, "lost", SECOND))
    assert seen[:3] == [[FIRST, SECOND]] * 3
    assert seen[3:] == [["run_epoch_2_iter_6_again.pth"]] * 3
    assert damaged not in contents(tmp_path).values()


def test_a_damaged_one_does_not_count_as_kept(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=3)
    damage(tmp_path / THIRD)
    fit(Checkpoint(tmp_path, resume="auto", keep_last=2), CheckpointLabel(lambda run: "again"), epochs=3)

    assert checkpoint_names(tmp_path) == [SECOND, "run_epoch_3_iter_9_again.pth"]


def test_where_all_are_damaged_another_training_begins_and_they_stay(
    fit: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    damage(tmp_path / FIRST)
    before = contents(tmp_path)
    with caplog.at_level(logging.WARNING, "heliograph"):
        result = fit(Checkpoint(tmp_path, resume="auto"), epochs=2)

    fresh = f"starts fresh: none of the checkpoints of 'run' in {tmp_path} is usable"
    assert fresh in result.notes
    why = f"The checkpoint {tmp_path / FIRST} is damaged: its SHA-256 does not match its manifest."
    assert result.warnings == (f"Nothing was resumed: the run {fresh}. {why}",)
    assert any("written as 'run-2'" in note for note in result.notes)
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before
    assert checkpoint_names(tmp_path) == ["run-2_epoch_2_iter_6.pth", FIRST]
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 3


def spoil(path: Path, content: bytes | None) -> None:
    """Give a checkpoint another manifest, or none."""
    unseal(path) if not content else seal(path, lambda size, sha256: content)


@pytest.mark.parametrize("content", [bytes(range(256)), None], ids=["garbage", "missing"])
def test_a_newest_one_with_a_damaged_manifest_is_a_warning_and_stays(
    fit: Make, tmp_path: Path, content: bytes | None
) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=2)
    spoil(tmp_path / SECOND, content)
    there = {tmp_path / SECOND: (tmp_path / SECOND).read_bytes()}
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=3)

    assert result.resume.path == tmp_path / FIRST
    assert_each(result.warnings, ("Newer checkpoints", FIRST, "lost", SECOND))
    assert checkpoint_names(tmp_path) == [SECOND, THIRD]
    assert {path: path.read_bytes() for path in there} == there
    again = fit(Checkpoint(tmp_path, resume="auto"), epochs=4)
    assert again.resume.path == tmp_path / THIRD
    assert again.warnings == ()


def test_one_without_its_data_of_another_training_loses_no_step(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path, keep_last=None), epochs=1)
    fit(Checkpoint(tmp_path), epochs=2)
    (other,) = set(checkpoint_names(tmp_path)) - {FIRST}
    (tmp_path / other).unlink()
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=3)

    assert result.resume.path == tmp_path / FIRST
    assert result.warnings == ()


def test_where_all_manifests_are_damaged_the_warning_says_so(fit: Make, tmp_path: Path) -> None:
    fit(Checkpoint(tmp_path), epochs=1)
    spoil(tmp_path / FIRST, bytes(range(256)))
    before = contents(tmp_path)
    result = fit(Checkpoint(tmp_path, resume="auto"), epochs=2)

    fresh = f"starts fresh: none of the checkpoints of 'run' in {tmp_path} is usable"
    why = f"{tmp_path / FIRST} is damaged, or not a checkpoint of heliograph: it does not end with a manifest."
    assert result.warnings == (f"Nothing was resumed: the run {fresh}. {why}",)
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before
    assert checkpoint_names(tmp_path) == ["run-2_epoch_2_iter_6.pth", FIRST]


def test_one_of_a_newer_version_is_not_passed_over(fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go with the next save."""
    fit(Checkpoint(tmp_path, keep_last=None), epochs=1)
    fit(Checkpoint(tmp_path, keep_last=None, resume="auto"), epochs=2)
    entry = storage.read_manifest(tmp_path / SECOND)
    with monkeypatch.context() as newer:
        newer.setattr("heliograph.core.checkpoint.storage.manifest.SCHEMA", 99)
        seal_as(entry.path, entry)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="schema 99, this version"):
        fit(Checkpoint(tmp_path, resume="auto"), epochs=3)

    assert contents(tmp_path) == before


# What is written is read back.


@pytest.mark.parametrize("hinges", ["in the background", "on what is damaged", "on what is replaced"])
def test_a_save_that_cannot_be_read_back_fails_and_removes_nothing(
    fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hinges: str
) -> None:
    """A disk that loses a bit on the way."""
    fit(Checkpoint(tmp_path, keep_last=None), epochs=2 if hinges == "on what is damaged" else 1)
    if hinges == "on what is damaged":
        damage(tmp_path / SECOND)
    before = contents(tmp_path)
    real = SYSTEM.write

    def write(file: Any, content: bytes | memoryview) -> None:
        spoiled = bytearray(content)
        if file.name.name == ".run.data.tmp" and len(spoiled) > 100:
            spoiled[50] ^= 1
        real(file, bytes(spoiled))

    monkeypatch.setattr(SYSTEM, "write", write)
    with pytest.raises(OSError, match="read back differs"):
        if hinges == "on what is replaced":
            fit(Checkpoint(tmp_path, resume=Resume(None, on_existing="replace")))
        else:
            fit(Checkpoint(tmp_path, resume="auto", background=hinges == "in the background"))

    assert contents(tmp_path) == before
    monkeypatch.undo()
    assert reader.verify(tmp_path / FIRST).progress["steps"] == 3
    assert torch.load(tmp_path / FIRST, weights_only=True)["progress"]["steps"] == 3
