"""A store: saving, replacing, removing, pinning, pointing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from io import FileIO
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import Files, Store, reader
from heliograph.core.checkpoint.storage.archive import compacted
from heliograph.core.checkpoint.storage.files import prepare_folder
from heliograph.core.checkpoint.storage.manifest import encode

Make = Callable[..., Any]


def test_save_and_load(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    entry = opened().save("a.pth", state(3, metrics={"loss": nan}), judged_by=("loss", "min", 0.5))
    loaded = reader.load(tmp_path / "a.pth")

    assert names() == ["a.pth"]
    assert loaded["progress"] == {"steps": 3}
    assert torch.equal(loaded["modules"]["model"]["weight"], torch.full((50,), 3.0))
    assert (entry.path, entry.run_name, entry.sequence, entry.saved_at) == (tmp_path / "a.pth", "run", 1, 1003.0)
    assert (entry.progress, entry.versions) == ({"steps": 3}, {"heliograph": "0"})
    assert entry.size + len(encode(entry)) == (tmp_path / "a.pth").stat().st_size
    assert entry.judged_by == ("loss", "min", 0.5)
    assert isnan(storage.read_manifest(tmp_path / "a.pth").metrics["loss"])


def test_tensors_that_share_memory_continue_sharing_it(opened: Make, state: Make) -> None:
    whole = torch.arange(100_000.0)
    entry = opened().save("a.pth", state(modules={"m": {"whole": whole, "part": whole[:10], "again": whole}}))
    loaded = reader.load(entry.path)["modules"]["m"]
    loaded["whole"][3] = -1

    assert entry.size < 450_000
    assert loaded["part"][3] == loaded["again"][3] == -1


def test_permissions_are_what_the_umask_says(opened: Make, state: Make) -> None:
    before = os.umask(0o027)
    try:
        entry = opened().save("a.pth", state())
    finally:
        os.umask(before)

    assert entry.path.stat().st_mode & 0o777 == 0o640


def test_the_same_name_again_replaces(opened: Make, state: Make, names: Make) -> None:
    store = opened()
    store.save("a.pth", state(1))
    store.save("b.pth", state(2))
    entry = store.save("a.pth", state(3))

    assert names() == ["a.pth", "b.pth"]
    assert [each.progress["steps"] for each in store.entries()[0]] == [3, 2]
    assert reader.load(entry.path)["progress"]["steps"] == 3


def test_what_belongs_to_something_else_is_never_replaced(opened: Make, state: Make, names: Make) -> None:
    store, other = opened(), opened("other")
    theirs = other.save("a.pth", state(1, name="other"))
    (theirs.path.parent / "a-2.pth").write_bytes(b"somebody's")
    (theirs.path.parent / "a-3.pth").mkdir()
    pinned = store.save("a.pth", state(2))
    store.pin(pinned.path)
    entry = store.save("a.pth", state(3))

    assert (pinned.path.name, entry.path.name) == ("a-4.pth", "a-5.pth")
    assert names() == ["a-2.pth", "a-3.pth", "a-4.pinned", "a-4.pth", "a-5.pth", "a.pth"]
    assert reader.load(theirs.path)["progress"]["steps"] == 1
    assert reader.load(pinned.path)["progress"]["steps"] == 2
    assert (theirs.path.parent / "a-2.pth").read_bytes() == b"somebody's"


def test_an_old_file_is_replaced_where_that_is_asked_for(
    tmp_path: Path, opened: Make, state: Make, names: Make
) -> None:
    (tmp_path / "a.pth").write_bytes(b"old")
    entry = opened().save("a.pth", state(3), replace_unknown=True)

    assert entry.path == tmp_path / "a.pth"
    assert names() == ["a.pth"]
    assert reader.verify(entry.path) == entry


def test_another_runs_is_not_unknown(opened: Make, state: Make) -> None:
    opened("other").save("a.pth", state(1, name="other"))

    assert opened().save("a.pth", state(2), replace_unknown=True).path.name == "a-2.pth"


def test_the_order_of_writing_is_not_the_order_of_names_times_or_steps(opened: Make, state: Make) -> None:
    store = opened()
    for name, steps in (("c.pth", 9), ("a.pth", 5), ("b.pth", 1)):
        store.save(name, state(steps, saved_at=float(steps)))

    assert [each.path.name for each in store.entries()[0]] == ["b.pth", "a.pth", "c.pth"]
    assert store.newest()[0].path.name == "b.pth"


def test_the_sequence_continues_after_the_highest(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    for name in ("a.pth", "b.pth", "c.pth", "d.pth"):
        store.save(name, state())
    store.remove(tmp_path / "d.pth")
    assert store.save("e.pth", state()).sequence == 5
    store.close()
    damaged = (tmp_path / "e.pth").read_bytes().replace(b"modules", b"MODULES")
    (tmp_path / "e.pth").write_bytes(damaged)

    assert opened().save("f.pth", state()).sequence == 6


def test_older_ones_can_be_brought_in(opened: Make, state: Make) -> None:
    store = opened()
    store.save("new.pth", state(9))
    old = store.save("old.pth", state(1), sequence=-3)

    assert old.sequence == -3
    assert [each.path.name for each in store.entries()[0]] == ["new.pth", "old.pth"]
    assert store.save("next.pth", state(10)).sequence == 2


def test_remove(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    store = opened()
    for name in ("a.pth", "b.pth"):
        store.save(name, state())
    (tmp_path / "old.pth").touch()

    assert store.remove(tmp_path / "a.pth") is True
    assert store.remove(tmp_path / "a.pth") is False
    assert store.remove(tmp_path / "old.pth") is False
    assert names() == ["b.pth", "old.pth"]


def test_renamed_checkpoints_and_those_of_helios_stay(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    store = opened()
    store.save("a.pth", state(1)).path.rename(tmp_path / "mine.pth")
    helios = store.save("b.pth", state(2, versions={"helios": "1.1.0"}))

    assert store.remove(tmp_path / "mine.pth") is False
    assert store.remove(tmp_path / "mine.pth", helios.training) is False
    assert store.remove(helios.path) is False
    assert names() == ["b.pth", "mine.pth"]


def test_what_is_pinned_stays(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    store = opened()
    path = store.save("a.pth", state()).path
    store.pin(path)
    store.pin(path)
    assert store.is_pinned(path)
    assert store.remove(path) is False
    assert names() == ["a.pinned", "a.pth"]

    (tmp_path / "a.pinned").unlink()
    (tmp_path / "a.pinned").touch()  # as a person does it
    assert store.remove(path) is False
    (tmp_path / "a.pinned").unlink()
    assert store.remove(path) is True
    assert names() == []


def test_pointers(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    store = opened("my run")
    path = store.save("a.pth", state(name="my run")).path
    store.point("last", path)
    store.point("best", path)
    store.point("last", path.with_name("b.pth"))

    assert (tmp_path / "my-run-d33e7609.last").read_text() == "b.pth\n"
    assert (tmp_path / "my-run-d33e7609.best").read_text() == "a.pth\n"
    store.point("last", None)
    store.point("last", None)
    assert names() == ["a.pth", "my-run-d33e7609.best"]


def test_a_pointer_that_another_process_wrote_meanwhile_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, "run", "t" * 32)
    store.open()
    store.write_as("t" * 32, "other")
    store.point("best", None)
    store.write_as("t" * 32, "run")
    (pointer := tmp_path / "other.best").write_text("other_epoch_0_iter_1.pth\n")
    store.write_as("t" * 32, "other")
    store.point("best", None)
    store.close()

    assert not pointer.exists()


def test_open_and_close(tmp_path: Path, state: Make, names: Make) -> None:
    store = Store(tmp_path / "a" / "b", "run")
    with pytest.raises(ValueError, match=r"open: call open\(\)"):
        store.save("a.pth", state())
    assert store.open() == []
    store.save("a.pth", state())
    store.close()
    store.close()

    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["a.pth"]
    with pytest.raises(ValueError, match="not open"):
        store.save("a.pth", state())
    assert store.open() == []
    assert store.save("a.pth", state()).sequence == 2
    store.close()


def test_a_state_of_another_run(opened: Make, state: Make, names: Make) -> None:
    with pytest.raises(ValueError, match="state of run 'other'"):
        opened().save("a.pth", state(name="other"))
    assert names() == []


def test_two_runs_in_one_folder(opened: Make, state: Make) -> None:
    first, second = opened("first"), opened("second")
    first.save("a.pth", state(1, name="first"))
    second.save("b.pth", state(2, name="second"))
    first.save("c.pth", state(3, name="first"))

    assert [each.path.name for each in first.entries()[0]] == ["c.pth", "a.pth"]
    assert [each.path.name for each in second.entries()[0]] == ["b.pth"]
    assert first.entries()[1] == second.entries()[1] == []


def test_prepare_folder_makes_it_and_leaves_nothing(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "a" / "b")
    prepare_folder(tmp_path / "a" / "b")

    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError) as info:
            Store(folder, "run").open()
        assert f"Nothing can be saved in {folder}: " in str(info.value)


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"saved in .*: Read-only"):
        Store(tmp_path, "run").open()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_takes_less_at_a_time(tmp_path: Path) -> None:
    class Narrow(FileIO):
        def write(self, content: Any) -> int:
            return super().write(content[:7]) or 0

    content = bytes(range(100))
    with Narrow(tmp_path / "file", "w") as file:
        Files().write(file, content)

    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize(("number", "minds"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_folders_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, minds: bool
) -> None:
    def fsync(handle: int) -> None:
        raise OSError(number, "not here")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="not here") if minds else nullcontext():
        Files().sync_folder(tmp_path)
    monkeypatch.delattr(os, "O_DIRECTORY")  # as on Windows
    Files().sync_folder(tmp_path)


@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("size", [0, 1, 1000, 30_000])
def test_the_estimate_is_enough_and_not_much_more(opened: Make, state: Make, count: int, size: int) -> None:
    whole = torch.zeros(size)
    modules = {f"layer.{index}": torch.zeros(size) for index in range(count)} | {"view": whole[: size // 2], "w": whole}
    full = state(modules=modules, plugins={"rng": [2**32 - 1] * 625, "text": "x" * 5_000, "raw": b"y" * 7_000})
    real = opened().save("a.pth", full).size

    assert real <= compacted(full)[1] <= 1.2 * real + 100_000


def test_the_estimate_of_a_sparse_tensor() -> None:
    assert compacted({"a": torch.eye(100).to_sparse()})[1] >= 100 * 4


# Several trainings of one name.


ONE, OTHER = "1" * 32, "2" * 32


def test_what_is_of_another_training_is_neither_replaced_nor_removed(
    tmp_path: Path, opened: Make, state: Make, names: Make
) -> None:
    store = opened()
    store.write_as(ONE, "run")
    first = store.save("a.pth", state(1, training_id=ONE))
    store.write_as(OTHER, "run-2")
    second = store.save("a.pth", state(2, training_id=OTHER))

    assert (second.path.name, second.sequence, second.run_name, second.family) == ("a-2.pth", 2, "run-2", "run")
    assert (store.own(), store.entries()[0]) == ([second], [second, first])
    assert store.remove(first.path) is False
    assert store.remove(first.path, OTHER) is False
    with pytest.raises(ValueError, match=f"state of training {ONE}"):
        store.save("b.pth", state(3, training_id=ONE))
    assert reader.verify(first.path) == first
    assert store.remove(first.path, ONE) is True
    store.point("last", second.path)
    store.close()
    assert names() == ["a-2.pth", "run-2.last"]


def test_what_helios_wrote_is_never_written_over(opened: Make, state: Make) -> None:
    store = opened()
    previous = store.save("a.pth", state(1, versions={"helios": "1.1.0"}))

    assert store.save("a.pth", state(2)).path.name == "a-2.pth"
    assert reader.verify(previous.path) == previous


def test_a_measurement_after_the_save_travels_with_the_file(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    entry = store.save("a.pth", state(1))
    (tmp_path / "backup").hardlink_to(entry.path)
    before = entry.path.read_bytes()
    judged = store.judge(entry, ("loss", "min", 0.5))

    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "b.pth"
    copy.write_bytes(entry.path.read_bytes())
    assert reader.verify(copy).judged_by == ("loss", "min", 0.5)
    assert reader.verify(entry.path) == judged
    assert (judged.sha256, judged.size) == (entry.sha256, entry.size)
    assert (tmp_path / "backup").read_bytes() == before


def test_a_measurement_of_a_damaged_file_changes_nothing(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    entry = store.save("a.pth", state(1))
    content = bytearray(entry.path.read_bytes())
    content[200] ^= 1
    entry.path.write_bytes(content)
    with pytest.raises(OSError, match=r"a\.pth is damaged"):
        store.judge(entry, ("loss", "min", 0.5))

    assert entry.path.read_bytes() == content
    store.save("b.pth", state(2))
    assert not [*tmp_path.glob(".*.tmp")]


def test_a_copy_is_a_checkpoint(tmp_path: Path, opened: Make, state: Make) -> None:
    entry = opened().save("a.pth", state(1))
    (tmp_path / "b.pth").write_bytes(entry.path.read_bytes())

    copy = reader.verify(tmp_path / "b.pth")
    assert (copy.is_renamed, entry.is_renamed) == (True, False)
    assert reader.load(tmp_path / "b.pth")["progress"] == {"steps": 1}
    assert torch.load(tmp_path / "b.pth", weights_only=True, mmap=True)["progress"] == {"steps": 1}


class Small(Files):
    """A file system with little room."""

    room = 10**9

    def free(self, folder: Path) -> int:
        return self.room


def test_a_late_judgement_needs_room_for_a_second_file(opened: Make, state: Make, names: Make) -> None:
    files = Small()
    store = opened(files=files)
    entry = store.save("a.pth", state(1))
    before, files.room = entry.path.read_bytes(), 1000
    with pytest.raises(OSError, match=r"needs 0\.1 MB") as info:
        store.judge(entry, ("validation/loss", "min", 0.5))

    assert info.value.errno == errno.ENOSPC
    assert (names(), entry.path.read_bytes()) == (["a.pth"], before)
