"""Reading a folder: what is read, and how often."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import time, time_ns
from typing import Any

import pytest
import torch
from heliograph import Checkpoint, Every, Supervised, Trainer
from heliograph.core.checkpoint.storage import reader
from heliograph.core.checkpoint.storage import store as storage_of_run
from heliograph.core.checkpoint.storage.files import SYSTEM, Files
from heliograph.core.checkpoint.storage.inventory import Manifests
from torch import nn

Make = Callable[..., Any]
LONG_AGO = 1_000_000_000


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the manifests that are read, as they are."""
    names: list[str] = []
    try_range = SYSTEM.try_range

    def tail(path: Path, begin: int, most: int) -> tuple[bytes, int]:
        names.append(path.name)
        return try_range(path, begin, most)

    monkeypatch.setattr(SYSTEM, "try_range", tail)
    return names


def test_each_manifest_is_read_once(
    tmp_path: Path, opened: Make, state: Make, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    for name in ("a.pth", "b.pth"):
        store.save(name, state())
    manifests = Manifests(tmp_path)
    first = manifests.look()
    store.save("c.pth", state())
    read.clear()
    second = manifests.look()

    assert read == ["c.pth"]
    assert [found.path.name for found in second] == ["a.pth", "b.pth", "c.pth"]
    assert second[:2] == first


def test_a_manifest_that_changed_is_read_again(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().save("a.pth", state(1))
    manifests = Manifests(tmp_path)
    [found] = manifests.look()
    content = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "a.pth").write_bytes(content.replace(b'"steps": 1', b'"steps": 2'))
    os.utime(tmp_path / "a.pth", ns=(LONG_AGO, LONG_AGO))
    [changed] = manifests.look()

    assert found.entry is not None
    assert changed.entry is None
    assert "digest" in str(changed.problem)
    assert changed.run_name == found.run_name == "run"


def test_data_that_comes_and_goes(tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    opened().save("a.pth", state(1))
    manifests = Manifests(tmp_path)
    [before] = manifests.look()
    (tmp_path / "a.pth").unlink()
    after = manifests.look()

    assert before.entry is not None
    assert after == []


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert Manifests(tmp_path / "nowhere").look() == []
    assert Manifests(tmp_path / "file").look() == []


def test_hidden_files_are_not_ours(tmp_path: Path, opened: Make, state: Make) -> None:
    opened().save("a.pth", state(1))
    for name in ("._a.pth", "._a.json"):
        (tmp_path / name).write_bytes(b"another system's")

    assert [found.path.name for found in Manifests(tmp_path).look()] == ["a.pth"]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folders that are listed, as they are."""
    listed: list[Path] = []
    names = Files.try_names

    def try_names(files: Files, folder: Path) -> list[os.DirEntry[str]]:
        listed.append(folder)
        return names(files, folder)

    monkeypatch.setattr(Files, "try_names", try_names)
    return listed


def test_a_folder_is_listed_once_in_a_steady_context(
    tmp_path: Path, opened: Make, state: Make, looks: list[Path]
) -> None:
    store = opened()
    looks.clear()
    with store.steady():
        assert store.entries() == store.entries()
    assert looks == [tmp_path]


def test_a_resume_lists_the_folder_twice(tmp_path: Path, looks: list[Path]) -> None:
    def fit(steps: int) -> None:
        task = Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
        checkpoint = Checkpoint(tmp_path, every=Every(steps=1), keep_last=None, resume="auto")
        batches = [(torch.ones(1, 1), torch.ones(1, 1))] * 9
        Trainer([checkpoint], device="cpu").fit(task, batches, optimizer=torch.optim.SGD, steps=steps)

    fit(2)
    looks.clear()
    fit(4)

    assert looks == [tmp_path] * 2
    assert len(Manifests(tmp_path).look()) == 4


def test_a_list_of_checkpoints_is_the_callers_own(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    store.save("a.pth", state(1))
    with store.steady():
        for each in store.entries():
            each.clear()

        assert [each.path.name for each in store.entries()[0]] == ["a.pth"]


def newest_of(folder: Path) -> tuple[str, list[str]]:
    """Return the name of the newest checkpoint of a run, and what was skipped."""
    entry, _, passed_over = reader.newest(Manifests(folder), "run")
    assert entry is not None
    return entry.path.name, passed_over


def save_many(store: Any, state: Make, number: int) -> None:
    for step in range(1, number + 1):
        store.point("last", store.save(f"run_epoch_0_iter_{step}.pth", state(step, saved_at=time())).path)


def test_a_start_reads_the_manifests_of_the_newest_only(
    tmp_path: Path, opened: Make, state: Make, read: list[str]
) -> None:
    store = opened()
    save_many(store, state, 5)
    store.close()
    read.clear()
    store = opened()
    with store.steady():
        entry, _, passed_over = store.newest()
        known, _, number = store.under("run")

    assert entry.path.name == "run_epoch_0_iter_5.pth"
    assert passed_over == []
    assert set(read) == {"run_epoch_0_iter_5.pth"}
    assert ([each.sequence for each in known], number) == ([5], 5)
    assert store.save("next.pth", state(6)).sequence == 6


@pytest.mark.parametrize("pointer", ["run_epoch_0_iter_2.pth\n", "gone.pth\n", "", "../run_epoch_0_iter_2.pth"])
def test_a_pointer_is_a_hint_only(tmp_path: Path, opened: Make, state: Make, pointer: str) -> None:
    save_many(opened(), state, 4)
    (tmp_path / "run.last").write_text(pointer)

    assert newest_of(tmp_path) == ("run_epoch_0_iter_4.pth", [])
    (tmp_path / "run.last").unlink()
    assert newest_of(tmp_path) == ("run_epoch_0_iter_4.pth", [])


def test_a_checkpoint_that_was_saved_after_the_clock_was_set_back_is_the_newest(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was killed before it wrote the pointer."""
    monkeypatch.setattr(storage_of_run, "time_ns", lambda: time_ns() + 3600 * 10**9)
    store = opened()
    save_many(store, state, 2)
    monkeypatch.undo()
    store.close()
    store = opened()
    later = store.save("run_epoch_0_iter_3.pth", state(3, saved_at=0.0))
    ahead = (tmp_path / "run_epoch_0_iter_2.pth").stat().st_mtime_ns

    assert later.path.stat().st_mtime_ns > ahead > time_ns()
    assert newest_of(tmp_path)[0] == "run_epoch_0_iter_3.pth"
    judged = store.judge(later, ("loss", "min", 1.0))
    assert judged.path.stat().st_mtime_ns > ahead


def test_an_older_one_is_found_if_the_newest_are_damaged(tmp_path: Path, opened: Make, state: Make) -> None:
    save_many(opened(), state, 4)
    for step in (3, 4):
        path = tmp_path / f"run_epoch_0_iter_{step}.pth"
        content = bytearray(path.read_bytes())
        content[300] ^= 1
        path.write_bytes(content)
    name, passed_over = newest_of(tmp_path)

    assert name == "run_epoch_0_iter_2.pth"
    assert [line.split(" is damaged")[0].rsplit("_", 1)[1] for line in passed_over] == ["4.pth", "3.pth"]


def test_a_start_beside_other_runs_reads_one_manifest_of_each(
    tmp_path: Path, opened: Make, state: Make, read: list[str]
) -> None:
    for name in ("a", "b"):
        store = opened(name)
        for step in range(3):
            store.save(f"{name}_epoch_0_iter_{step}.pth", state(step, name=name))
    read.clear()
    store = opened("other")
    with store.steady():
        _, _, [sentence] = store.newest()

    assert "only of 'a', 'b'." in sentence
    assert len(set(read)) == 2


def test_a_renamed_checkpoint_is_found(tmp_path: Path, opened: Make, state: Make) -> None:
    save_many(opened(), state, 2)
    (tmp_path / "run_epoch_0_iter_2.pth").rename(tmp_path / "keep.pth")

    assert newest_of(tmp_path)[0] == "keep.pth"
