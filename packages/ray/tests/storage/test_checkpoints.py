"""The folders of reports, in a storage and before, and how a checkpoint is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Entry, Store, reader
from heliograph.core.checkpoint.storage.files import digest_of
from heliograph.packages.ray.tests.fakes import FakeSession
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_ray.report import fetch_newest, stage_report
from heliograph_ray.storage import StoredFolder, absolute_path, list_reports, repair_record, report_name
from pyarrow.fs import LocalFileSystem  # type: ignore[import-untyped]

Open = Callable[..., Store]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return a function that opens a store of the run `run`."""
    stores: list[Store] = []

    def make(folder: Path, name: str = "run") -> Store:
        stores.append(Store(folder, name))
        stores[-1].open()
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def save(store: Store, steps: int, *, name: str | None = None, shards: bool = False, training: str = "1" * 32) -> Entry:
    progress = {"steps": steps, "epoch": 1}
    state: dict[str, Any] = {
        "schema": SCHEMA,
        "run_name": store.run_name,
        "training_id": training,
        "progress": progress,
        "metrics": {"validation/loss": 1.0 / steps},
        "modules": {"model": {"weight": torch.full((3,), float(steps))}},
        "control": {},
        "data": {},
        "optimizers": {},
        "plugins": {},
        "world": {"size": 1},
        "ranks": [{}],
    }
    facts = {}
    if shards:
        state["shards"] = {}
        folder = store.begin_shards(100)
        for each in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
            (folder / each).write_text(f"{each} of {steps}")
        facts = {path.name: digest_of(path) for path in folder.iterdir()}
    return store.save(name or f"{store.run_name}_epoch_1_iter_{steps}.pth", state, shards=facts)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def report(session: FakeSession, store: Store, path: Path, best: Path | None = None) -> Path:
    folder, metrics = stage_report(store.run_name, path, best)
    session.report(metrics, folder)
    return max(session.storage.iterdir())


# What is reported.


def test_only_the_checkpoint_is_staged_by_hard_links(tmp_path: Path, opened: Open) -> None:
    store = opened(tmp_path)
    save(store, 1)
    entry = save(store, 2)
    staged, metrics = stage_report("run", entry.path, None)
    assert files(staged) == ["run_epoch_1_iter_2.pth"]
    assert (staged / entry.path.name).samefile(entry.path)
    assert metrics == {"validation/loss": 0.5, "epoch": 1, "step": 2}
    assert [each.path for each in store.entries()[0]] == [entry.path, tmp_path / "run_epoch_1_iter_1.pth"]


def test_shards_and_the_best_checkpoint_are_staged(tmp_path: Path, opened: Open) -> None:
    store = opened(tmp_path)
    best, entry = save(store, 1), save(store, 2, shards=True)
    staged, _ = stage_report("run", entry.path, best.path)
    assert entry.shards is not None
    assert files(staged) == sorted(
        [
            "run_epoch_1_iter_1.pth",
            "run_epoch_1_iter_2.pth",
            *(f"{entry.shards[0]}/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "digests.json")),
        ]
    )
    again, _ = stage_report("run", entry.path, entry.path)
    assert len(files(again)) == 5


def test_files_are_copied_without_hard_links(tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise PermissionError("no links here")

    entry = save(opened(tmp_path), 1)
    monkeypatch.setattr(os, "link", refuse)
    staged, _ = stage_report("run", entry.path, None)
    assert (staged / entry.path.name).read_bytes() == entry.path.read_bytes()
    assert not (staged / entry.path.name).samefile(entry.path)


def test_missing_shards_are_an_error(tmp_path: Path, opened: Open) -> None:
    entry = save(opened(tmp_path), 1, shards=True)
    next(tmp_path.glob("*.shards/__1_0.distcp")).unlink()
    with pytest.raises(ValueError, match=r"all ranks share.*FSDPEngine"):
        stage_report("run", entry.path, None)


# What is stored.


def test_reports_are_listed_by_number(tmp_path: Path) -> None:
    for name in (
        report_name(2, "a"),
        report_name(10, "b"),
        report_name(1_000_000, "c"),
        "checkpoint_2026-01-01_00-00-00",
        "x",
    ):
        (tmp_path / name).mkdir()
    found = list_reports(LocalFileSystem(), str(tmp_path))
    assert [(each.number, each.call) for each in found] == [(1_000_000, "c"), (10, "b"), (2, "a")]
    assert list_reports(LocalFileSystem(), str(tmp_path / "nothing")) == []


def test_manifests_are_read_without_a_copy(tmp_path: Path, opened: Open) -> None:
    entry = save(opened(tmp_path), 1, name="a.pth")
    (tmp_path / "b.pth").write_bytes(b"2")
    stored = StoredFolder(LocalFileSystem(), str(tmp_path), is_own=True)
    manifests = stored.manifests()
    assert isinstance(manifests["b.pth"], ValueError)
    assert (stored.name, manifests) == (tmp_path.name, {"a.pth": replace(entry, path=Path("a.pth")), **manifests})


@pytest.mark.parametrize(
    ("record", "is_damaged"),
    [
        (None, False),
        ('{"checkpoint_results": []}', False),
        ('{"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_000001_one"}]}', False),
        ('{"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_000002_one"}]}', True),
        ('{"checkpoint_results": [{"checkpo', True),
        ("", True),
        ("[]", True),
    ],
)
def test_a_damaged_record_of_ray_is_renamed(tmp_path: Path, record: str | None, is_damaged: bool) -> None:
    (tmp_path / "run" / "checkpoint_000001_one").mkdir(parents=True)
    path = tmp_path / "run" / "checkpoint_manager_snapshot.json"
    if record is not None:
        path.write_text(record)
    warning = repair_record(str(tmp_path), "run")
    assert (warning is not None) == is_damaged
    assert path.exists() == (record is not None and not is_damaged)
    assert path.with_name(f"{path.name}.damaged").exists() == is_damaged
    assert repair_record(str(tmp_path), "run") is None


# What is fetched.


def test_the_newest_and_the_best_are_fetched(tmp_path: Path, opened: Open) -> None:
    first, session = opened(tmp_path / "first"), FakeSession(tmp_path / "there")
    best, entry = save(first, 3, shards=True), save(first, 4, shards=True)
    report(session, first, entry.path, best.path)
    second = opened(tmp_path / "second")
    path, notes = fetch_newest(session, second, "auto")
    assert path == tmp_path / "second" / entry.path.name
    assert_each(
        notes, *[(str(tmp_path / "second" / each.path.name), "checkpoint_000001_one") for each in (best, entry)]
    )
    for each in (best, entry):
        assert reader.verify(tmp_path / "second" / each.path.name).sequence == each.sequence
    assert files(tmp_path / "second") == [
        ".run.holder",
        ".run.lock",
        *files(tmp_path / "there" / "checkpoint_000001_one"),
    ]
    assert save(second, 5).sequence == 3  # after what was fetched


def test_a_damaged_best_checkpoint_is_not_fetched(tmp_path: Path, opened: Open) -> None:
    first, session = opened(tmp_path / "first"), FakeSession(tmp_path / "there")
    best, entry = save(first, 3), save(first, 4)
    stored = report(session, first, entry.path, best.path)
    (stored / best.path.name).write_text("half")
    path, notes = fetch_newest(session, opened(tmp_path / "second"), "auto")
    assert path == tmp_path / "second" / entry.path.name
    assert_facts(notes[0], "skipped: checkpoint_000001_one")
    assert "is damaged" in notes[0]
    assert_each(notes[1:], (f"fetched {path}", "checkpoint_000001_one"))


@pytest.mark.parametrize(("steps", "expected"), [(4, 4), (2, 3), (None, 3)])
def test_the_best_checkpoint_replaces_a_damaged_newest_if_nothing_newer_is_intact(
    tmp_path: Path, opened: Open, steps: int | None, expected: int
) -> None:
    first, session = opened(tmp_path / "first"), FakeSession(tmp_path / "there")
    entries = {step: save(first, step) for step in (2, 3, 4, 5)}
    if steps is not None:
        report(session, first, entries[steps].path)
    stored = report(session, first, entries[5].path, entries[3].path)
    (stored / entries[5].path.name).write_text("half")
    path, _ = fetch_newest(session, opened(tmp_path / "second"), "auto")
    assert path == tmp_path / "second" / entries[expected].path.name


def test_a_checkpoint_with_a_damaged_shard_is_skipped(tmp_path: Path, opened: Open) -> None:
    first, session = opened(tmp_path / "first"), FakeSession(tmp_path / "there")
    entry = save(first, 4, shards=True)
    stored = report(session, first, entry.path)
    [shard] = stored.glob("*.shards/__1_0.distcp")
    shard.write_text(shard.read_text().upper())
    resume, notes = fetch_newest(session, opened(tmp_path / "second"), "auto")
    assert resume == "auto"
    assert "SHA-256 does" in notes[0]
    assert files(tmp_path / "second") == [".run.holder", ".run.lock"]


def test_another_file_with_its_name_is_kept(tmp_path: Path, opened: Open) -> None:
    """Another training of the same name has reached the same step."""
    first, session = opened(tmp_path / "first"), FakeSession(tmp_path / "there")
    entry = save(first, 4, shards=True)
    report(session, first, entry.path)
    second = opened(tmp_path / "second")
    save(second, 3, training="2" * 32)
    previous = save(second, 4, training="2" * 32)
    path, _ = fetch_newest(session, second, "auto")
    assert path == tmp_path / "second" / "run_epoch_1_iter_4-2.pth"
    assert reader.verify(path).sha256 == entry.sha256
    assert reader.verify(previous.path).sha256 == previous.sha256


def test_a_pinned_checkpoint_is_kept(tmp_path: Path, opened: Open) -> None:
    first, session = opened(tmp_path / "first"), FakeSession(tmp_path / "there")
    entry = save(first, 4, shards=True)
    report(session, first, entry.path)
    second = opened(tmp_path / "second")
    save(second, 3)
    previous = save(second, 4)
    second.pin(previous.path)
    path, _ = fetch_newest(session, second, "auto")
    assert path == tmp_path / "second" / "run_epoch_1_iter_4-2.pth"
    assert reader.verify(path).sha256 == entry.sha256
    assert reader.verify(previous.path).sha256 == previous.sha256


def test_a_path_is_resumed_only_while_this_call_has_stored_nothing(tmp_path: Path, opened: Open) -> None:
    first, wanted = opened(tmp_path / "first"), tmp_path / "pretrained.pth"
    entry = save(first, 4)
    session = FakeSession(tmp_path / "there", "one")
    report(session, first, entry.path)
    assert fetch_newest(session, opened(tmp_path / "second"), wanted) == (wanted, [])
    again = FakeSession(tmp_path / "there", "one", is_restart=True)
    path, _ = fetch_newest(again, opened(tmp_path / "third"), wanted)
    assert path == tmp_path / "third" / entry.path.name


def test_a_storage_that_cannot_be_read_is_an_error(tmp_path: Path, opened: Open) -> None:
    class Broken(FakeSession):
        def stored_reports(self) -> list[StoredFolder]:
            raise ConnectionError("no network")

    with pytest.raises(ConnectionError, match="no network"):
        fetch_newest(Broken(tmp_path / "there", is_restart=True), opened(tmp_path), "auto")


def test_files_of_a_killed_fetch_are_removed(tmp_path: Path, opened: Open) -> None:
    first, session = opened(tmp_path / "first"), FakeSession(tmp_path / "there")
    entry = save(first, 4)
    report(session, first, entry.path)
    left = tmp_path / "second" / ".run.fetched"
    left.mkdir(parents=True)
    (left / "half.pth").write_bytes(b"half")
    path, _ = fetch_newest(session, opened(tmp_path / "second"), "auto")
    assert path == tmp_path / "second" / entry.path.name
    assert not left.exists()


def test_a_storage_path_is_the_same_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, and Ray's file systems, do not know the current folder of the caller."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("runs", Path("runs"), "~/runs"):
        assert absolute_path(relative) == str(tmp_path / "runs")
    assert absolute_path("s3://bucket/runs/") == "s3://bucket/runs"
