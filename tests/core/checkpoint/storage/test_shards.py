"""Shards beside a checkpoint: saved, removed and verified with it, whatever fails and whenever it is killed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Entry, Files, Store, inventory, manifest, reader
from heliograph.core.checkpoint.storage.files import digest_of
from heliograph.core.checkpoint.storage.reader import read_shards, shards_path
from heliograph.tests.core.checkpoint.storage.faulty import FULL, Death, Faulty
from heliograph.tests.messages import assert_each
from heliograph.tests.stores import seal_as

Make = Callable[..., Any]


def save(store: Store, name: str, state: dict[str, Any], shards: int | None = None) -> Entry:
    """Save with two shards that hold the step, or without any."""
    if shards is None:
        return store.save(name, state)
    folder = store.begin_shards(100)
    for number in range(2):
        (folder / f"__{number}_0.distcp").write_bytes(f"shard {number} of {shards}".encode() * 5)
    facts = {path.name: digest_of(path) for path in folder.iterdir()}
    return store.save(name, {**state, "shards": {}}, shards=facts)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file, but for the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".holder")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def check_whole(folder: Path) -> int:
    """Check that what there is is whole, and nothing else is there; return the step of the newest."""
    found, passed_over = inventory.entries(folder, "run")
    assert passed_over == []
    belonging = {"run.last", "run.best"}
    for entry in found:
        reader.verify(entry.path)
        belonging |= {entry.path.name, *([f"{entry.shards[0]}/digests.json"] if entry.shards else [])}
        for shard in read_shards(entry):
            belonging.add(f"{shard.parent.name}/{shard.name}")
            assert f"of {entry.progress['steps']}" in shard.read_text()
    assert set(contents(folder)) <= belonging
    assert {path.name for path in folder.glob("*.shards")} == {entry.shards[0] for entry in found if entry.shards}
    return int(found[0].progress["steps"]) if found else 0


BOTH = [(1, 2), (1, None), (None, 2)]
IDS = ["shards by shards", "shards by one file", "one file by shards"]


@pytest.mark.parametrize("name", ["b.pth", "a.pth"], ids=["a new name", "replacing"])
@pytest.mark.parametrize(("former", "later"), BOTH, ids=IDS)
def test_a_save_that_fails_at_any_operation_changes_nothing(
    tmp_path: Path, opened: Make, state: Make, name: str, former: int | None, later: int | None
) -> None:
    for trial in range(100):
        folder, files = tmp_path / str(trial), Faulty()
        store = opened(folder=folder, files=files)
        save(store, "a.pth", state(1), former)
        before = contents(folder)
        files.count, files.first = 0, trial
        try:
            save(store, name, state(2), later)
        except OSError as failure:
            is_replaced = "either may remain" in str(failure)
            assert is_replaced or contents(folder) == before
            if is_replaced:  # the shards of the previous one stay until the next start
                store.close()
                store = opened(folder=folder)
            assert check_whole(folder) == 1 + is_replaced
            assert name == "a.pth" or not is_replaced
        if files.count <= trial:
            break
        store.close()
    assert trial >= 4
    assert check_whole(folder) == 2


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["b.pth", "a.pth"], ids=["a new name", "replacing"])
@pytest.mark.parametrize(("former", "later"), BOTH, ids=IDS)
@pytest.mark.parametrize("error", [Death(), FULL])
def test_a_kill_at_any_operation_loses_nothing(
    tmp_path: Path, opened: Make, state: Make, name: str, former: int | None, later: int | None, error: BaseException
) -> None:
    """Nothing works from there on, not even undoing: what is left is put in order by the next start."""
    for trial in range(100):
        folder, files = tmp_path / str(trial), Faulty(error=error, times=float("inf"))
        store = opened(folder=folder, files=files)
        save(store, "a.pth", state(1), former)
        files.count, files.first = 0, trial
        returned = False
        with suppress(OSError, Death):
            save(store, name, state(2), later)
            returned = True
        ended = files.count <= trial
        store.close()
        opened(folder=folder).close()
        assert check_whole(folder) in ((2,) if returned else (1, 2))
        if ended:
            break
    assert trial >= 4


def test_a_removal_that_is_killed_is_finished(tmp_path: Path, opened: Make, state: Make) -> None:
    for trial in range(20):
        folder, files = tmp_path / str(trial), Faulty(error=Death(), times=float("inf"))
        store = opened(folder=folder, files=files)
        path = save(store, "a.pth", state(1), 1).path
        save(store, "b.pth", state(2), 2)
        files.count, files.first = 0, trial
        with suppress(Death):
            store.remove(path)
        ended = files.count <= trial
        store.close()
        opened(folder=folder).close()
        assert check_whole(folder) == 2
        if ended:
            break
    assert trial > 2
    assert not [*folder.glob("a.*.shards")]


def test_what_a_killed_writer_of_shards_left_is_removed(tmp_path: Path, opened: Make, names: Make) -> None:
    store = opened()
    (store.begin_shards(100) / "__0_0.distcp").write_bytes(b"half")
    store.close()
    again = Store(tmp_path, "run")
    notes = again.open()
    again.close()
    assert names() == []
    assert_each(notes, ("interrupted save", ".run.shards.tmp"))


def test_shards_that_were_never_saved_go_at_the_next_save(opened: Make, state: Make, names: Make) -> None:
    store = opened()
    store.save("a.pth", state(1))
    (store.begin_shards(100) / "__0_0.distcp").write_bytes(b"half")
    store.save("b.pth", state(2))
    assert names() == ["a.pth", "b.pth"]


def test_there_must_be_room_for_all_shards(tmp_path: Path, opened: Make, names: Make) -> None:
    store = opened()
    with pytest.raises(OSError, match=r"[\d.]+ MB .*[\d.]+ MB"):
        store.begin_shards(10**18)
    assert names() == []


@pytest.mark.parametrize("fault", ["flipped", "cut", "gone"])
def test_a_damaged_shard_is_noticed(tmp_path: Path, opened: Make, state: Make, fault: str) -> None:
    store = opened()
    path = save(store, "a.pth", state(1), 1).path
    shard = shards_path(save(store, "b.pth", state(2), 2)) / "__1_0.distcp"
    content = shard.read_bytes()
    if fault == "gone":
        shard.unlink()
    else:
        shard.write_bytes(content[:-1] if fault == "cut" else content[:-1] + b"?")
    said = {
        "flipped": "SHA-256 does not match",
        "cut": "its size or",
        "gone": "is missing",
    }
    with pytest.raises(ValueError, match=rf"shard .*b\.\w+\.shards/__1_0\.distcp.*{said[fault]}"):
        reader.verify(tmp_path / "b.pth")
    assert reader.load(tmp_path / "b.pth", with_shards=False)["progress"] == {"steps": 2}
    entry, _, passed_over = store.newest()
    assert entry is not None
    assert entry.path == path
    assert len(passed_over) == 1


def test_the_manifest_names_the_shards(tmp_path: Path, opened: Make, state: Make) -> None:
    entry = save(opened(), "a.pth", state(1), 1)
    read = storage.read_manifest(entry.path)
    assert read == entry
    assert {path.name: size for path, (size, _) in read_shards(read).items()} == {
        "__0_0.distcp": 60,
        "__1_0.distcp": 60,
    }
    for name in ("../a.00000000.shards", "a.shards", "a/00000000.shards"):
        seal_as(entry.path, replace(entry, shards=(name, "")))
        with pytest.raises(ValueError, match="folder of shards"):
            storage.read_manifest(entry.path)


def test_a_damaged_index_is_noticed(tmp_path: Path, opened: Make, state: Make) -> None:
    entry = save(opened(), "a.pth", state(1), 1)
    index = shards_path(entry) / "digests.json"
    index.write_bytes(index.read_bytes().replace(b"60", b"61", 1))
    with pytest.raises(ValueError, match=r"digests\.json of the checkpoint"):
        reader.verify(entry.path)


def test_a_copy_of_a_checkpoint_keeps_the_shards(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    entry = save(store, "a.pth", state(1), 1)
    (tmp_path / "b.pth").write_bytes(entry.path.read_bytes())
    assert store.remove(entry.path)
    reader.verify(tmp_path / "b.pth")
    assert store.remove(tmp_path / "b.pth") is False  # it has another name than it was saved under
    (tmp_path / "b.pth").rename(entry.path)
    assert store.remove(entry.path)
    assert not [*tmp_path.glob("*.shards")]


@pytest.mark.parametrize("fault", ["refused", "another schema"])
def test_shards_stay_if_a_checkpoint_cannot_be_read(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    files, real = Files(), Files.try_range
    store = opened(files=files)
    entry = save(store, "a.pth", state(1), 1)
    copy = tmp_path / "b.pth"
    copy.write_bytes(entry.path.read_bytes())
    with monkeypatch.context() as patched:
        if fault == "refused":

            def try_range(path: Path, begin: int, most: int) -> tuple[bytes, int]:
                if path == copy:
                    raise OSError(errno.EIO, "Input/output error")
                return real(files, path, begin, most)

            patched.setattr(files, "try_range", try_range)
            patched.setattr(files, "pause", lambda seconds: None)
        else:
            patched.setattr(manifest, "SCHEMA", SCHEMA + 1)
            seal_as(copy, entry)
            patched.undo()
        assert store.remove(entry.path)
        assert shards_path(entry).is_dir()
    if fault == "refused":
        reader.verify(copy)


def test_the_room_of_a_removed_checkpoint_is_free_again(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    store = opened()
    path = save(store, "a.pth", state(1), 1).path
    store.pin(path)
    assert not store.remove(path)
    path.with_suffix(".pinned").unlink()
    assert store.remove(path)
    assert names() == []
    assert partial(check_whole, tmp_path)() == 0
