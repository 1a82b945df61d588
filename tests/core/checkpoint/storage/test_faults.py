"""Saves that fail or are killed: at every single operation."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
from collections.abc import Callable, Collection, Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.storage import Files, Store, reader
from heliograph.tests.core.checkpoint.storage.faulty import FULL, Death
from heliograph.tests.messages import assert_each

Make = Callable[..., Any]
Contents = dict[str, bytes]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small state be written in many pieces, as a large one is."""
    monkeypatch.setattr("heliograph.core.checkpoint.storage.files.PIECE", 24)


class Faulty(Files):
    """Fails from the operation `first` on.

    Args:
        first: its number among those of the given kinds, from 0; None never fails.
        error: what it raises.
        times: how many operations in a row fail.
        kinds: which count; all by default.
    """

    def __init__(
        self, first: int | None, error: BaseException, *, times: float = 1, kinds: Collection[str] | None = None
    ) -> None:
        self.first, self.error, self.times, self.kinds = first, error, times, kinds
        self.count, self.failed = 0, 0

    def _step(self, kind: str) -> None:
        if self.kinds is not None and kind not in self.kinds:
            return
        self.count += 1
        if self.first is not None and self.first < self.count and self.failed < self.times:
            self.failed += 1
            raise self.error

    def create(self, path: Path) -> FileIO:
        self._step("create")
        return super().create(path)

    def write(self, file: FileIO, content: bytes | memoryview) -> None:
        try:
            self._step("write")
        except BaseException:
            if self.failed == 1:
                super().write(file, content[: len(content) // 2])
            raise
        super().write(file, content)

    def sync(self, file: FileIO) -> None:
        self._step("sync")  # and leave it at that: nothing here is about power, and there are thousands

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        super().unlink(path)

    def sync_folder(self, folder: Path) -> None:
        self._step("sync_folder")


def contents(folder: Path) -> Contents:
    """Return every file, but for the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix not in (".lock", ".holder")}


def steps(store: Store) -> int:
    """Return which state is the newest one; both of its halves must agree on it."""
    entry, loaded, *_ = store.newest()
    assert entry is not None
    assert loaded is not None
    count: int = loaded["progress"]["steps"]
    assert entry.progress == {"steps": count}
    assert torch.equal(loaded["modules"]["model"]["weight"], torch.full((50,), float(count)))
    return count


def failure(action: Callable[[], object]) -> BaseException | None:
    """Return what an action raises; a failed write must be an OSError."""
    try:
        action()
    except (OSError, KeyboardInterrupt, Death) as error:
        return error
    return None


def trials() -> Iterator[int]:
    """Yield the numbers of the operation that is to fail; the caller ends it."""
    yield from range(1000)


class Watched(Files):
    """Looks at the folder after each operation that changes a name, as another process may."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.look = look

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.look()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.look()


@pytest.mark.parametrize("name", ["b.pth", "a.pth"], ids=["a new name", "replacing"])
def test_what_another_process_sees_is_whole_at_any_moment(tmp_path: Path, opened: Make, state: Make, name: str) -> None:
    """An evaluation in another process takes the newest checkpoint at any moment."""
    seen: list[list[str]] = []

    def look() -> None:
        paths = [path for path in tmp_path.glob("*.pth") if not path.name.startswith(".")]
        for each in paths:
            reader.verify(each)
        seen.append([each.name for each in paths])

    store = opened(files=Watched(look))
    store.save("a.pth", state(1))
    seen.clear()
    store.save(name, state(2))
    assert len(seen) >= 1
    assert all("a.pth" in each for each in seen)  # the former is there until the new one is in its place
    assert sorted(seen[-1]) == sorted({"a.pth", name})


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["b.pth", "a.pth"], ids=["a new name", "replacing"])
@pytest.mark.parametrize("error", [FULL, OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), Death()])
def test_a_save_that_fails_at_any_operation_changes_nothing(
    tmp_path: Path, opened: Make, state: Make, name: str, error: BaseException
) -> None:
    """Here the process lives on, whatever was raised, and cleans up."""
    messages = list[str]()
    for trial in trials():
        folder, files = tmp_path / str(trial), Faulty(None, error)
        store = opened(folder=folder, files=files)
        store.point("last", store.save("a.pth", state(1)).path)
        before = contents(folder)
        files.count, files.first = 0, trial
        raised = failure(partial(store.save, name, state(2)))
        if raised is None:
            break
        messages.append(str(raised))
        assert raised is error or raised.__cause__ is error
        if contents(folder) != before:  # the file was replaced, or the save was interrupted at its end
            assert name == "a.pth" or not isinstance(error, OSError)
            assert not isinstance(error, OSError) or "either may remain" in messages.pop()
            assert steps(store) == 2
            assert store.save("c.pth", state(3)).sequence == 3
            continue
        assert steps(store) == 1
        assert store.save(name, state(3)).sequence == 2
    assert steps(store) == 2
    assert trial > 40
    if isinstance(error, OSError):
        place = re.escape(str(tmp_path))
        said = rf"{place}/\d+/{name} could not.*[\d.]+ MB.*{re.escape(str(error))}.*unchanged"
        assert len(messages) > 40
        assert all(re.search(said, message) for message in messages)


@pytest.mark.parametrize("name", ["b.pth", "a.pth"], ids=["a new name", "replacing"])
def test_when_nothing_works_any_more_not_even_undoing(tmp_path: Path, opened: Make, state: Make, name: str) -> None:
    """What is left then is put in order by the next save or start."""
    for trial in trials():
        folder, files = tmp_path / str(trial), Faulty(None, FULL, times=float("inf"))
        store = opened(folder=folder, files=files)
        store.save("a.pth", state(1))
        files.count, files.first = 0, trial
        try:
            store.save(name, state(2))
        except OSError:
            files.first = None
        else:
            break
        if trial % 2:
            store.close()
            store = opened(folder=folder)
            assert steps(store) in (1, 2)
        store.save("c.pth", state(3))
        assert steps(store) == 3
        assert {"a.pth", "c.pth"} <= contents(folder).keys() <= {"a.pth", "b.pth", "c.pth"}
        found, passed_over = store.entries()
        assert passed_over == []
        for entry in found:
            reader.verify(entry.path)
    assert trial > 40


def test_a_rename_that_fails_and_the_one_that_would_undo_it(tmp_path: Path, opened: Make, state: Make) -> None:
    """The rename that is the commit."""
    for kinds, times in (({"rename"}, 1), ({"rename"}, float("inf"))):
        folder = tmp_path / f"{kinds} {times}"
        files = Faulty(None, OSError(errno.EPERM, "Operation not permitted"), times=times, kinds=kinds)
        store = opened(folder=folder, files=files)
        store.save("a.pth", state(1))
        before = contents(folder)
        files.count, files.failed, files.first = 0, 0, 0
        with pytest.raises(OSError, match="Operation not permitted") as info:
            store.save("a.pth", state(2))
        files.first = None
        assert contents(folder) == before
        assert not getattr(info.value.__cause__, "__notes__", [])
        store.close()
        assert steps(opened(folder=folder)) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", ["save", "replace", "remove", "point"])
def test_a_kill_between_any_two_operations(tmp_path: Path, opened: Make, state: Make, what: str) -> None:
    """The next start finds the newest that had been saved, or a newer whole one, and leaves nothing lying about."""
    actions: dict[str, Callable[[Store], object]] = {
        "save": lambda store: store.save("b.pth", state(3)),
        "replace": lambda store: store.save("a.pth", state(3)),
        "remove": lambda store: store.remove(store.folder / "old.pth"),
        "point": lambda store: store.point("last", store.folder / "old.pth"),
    }
    found = []
    for trial in trials():
        folder, files = tmp_path / str(trial), Faulty(None, Death(), times=float("inf"))
        store = Store(folder, "run", files=files)
        store.open()
        store.save("old.pth", state(1))
        store.save("a.pth", state(2))
        files.count, files.first = 0, trial
        try:
            actions[what](store)
        except Death:
            store._lock.release()  # as the system does for the dead
        else:
            store.close()
            break
        after = opened(folder=folder)
        found.append(steps(after))
        left = contents(folder).keys()
        assert not [name for name in left if name.startswith(".")]
        assert after.entries()[1] == []
        assert after.save("z.pth", state(9)).sequence in (3, 4)
    assert sorted(found) == found
    assert set(found) == ({2, 3} if what in ("save", "replace") else {2})


def test_a_kill_during_the_clearing_up_after_a_kill(tmp_path: Path, state: Make) -> None:
    """Death again, at every operation of the start after every death."""
    for first in range(40, 52):
        for second in range(12):
            folder = tmp_path / f"{first} {second}"
            files = Faulty(None, Death(), times=float("inf"))
            store = Store(folder, "run", files=files)
            store.open()
            store.save("a.pth", state(1))
            files.count, files.first = 0, first
            with pytest.raises(Death):
                store.save("a.pth", state(2))
                store.save("b.pth", state(2))
            store._lock.release()
            again = Store(folder, "run", files=Faulty(second, Death(), times=float("inf")))
            try:
                again.open()
            except Death:
                again._lock.release()
            again.close()
            last = Store(folder, "run")
            last.open()
            assert steps(last) in (1, 2)
            assert not [name for name in contents(folder) if name.startswith(".")]
            last.close()


def test_a_state_that_cannot_be_written(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    store = opened()
    store.save("a.pth", state(1))
    with pytest.raises(AttributeError, match="lambda"):
        store.save("b.pth", state(2, it=lambda: None))
    with (tmp_path / "a.pth").open("rb") as file, pytest.raises(TypeError, match="cannot pickle"):
        store.save("b.pth", state(2, it=file))

    assert names() == ["a.pth"]
    assert steps(store) == 1


def test_torchs_own_word_for_a_failed_write(
    opened: Make, state: Make, names: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    error = RuntimeError("PytorchStreamWriter failed writing file")

    def save(saved: Any, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"written .*PytorchStreamWriter") as info:
        store.save("a.pth", state())

    assert info.value.__cause__ is error
    assert names() == []


def test_space_is_looked_at_first(opened: Make, state: Make, names: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Faulty(None, FULL)
    monkeypatch.setattr(files, "free", lambda folder: 3_000_000)
    store = opened(files=files)
    big = torch.zeros(1_000_000)
    with pytest.raises(OSError, match=r"written \(3\.0 MB") as info:
        store.save("a.pth", state(big=big, again=big, part=big[5:]))

    assert info.value.errno == errno.ENOSPC
    assert files.count == 0
    assert names() == []
    store.save("a.pth", state(small=torch.zeros(700_000)))


def test_a_lack_of_a_few_bytes_shows(opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Faulty(None, FULL)
    monkeypatch.setattr(files, "free", lambda folder: 4_000_000)
    with pytest.raises(OSError, match=r"\(4\.0 MB are free"):
        opened(files=files).save("a.pth", state(big=torch.zeros(1_000_000)))


def test_not_knowing_the_free_space_does_not_hide_the_fault(
    opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Faulty(0, FULL, kinds=["sync"])
    store = opened(files=files)
    asked = iter([10**9])

    def free(folder: Path) -> int:
        for size in asked:
            return size
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(files, "free", free)
    with pytest.raises(OSError, match=r"written \(.* is unknown:") as info:
        store.save("a.pth", state())

    assert info.value.__cause__ is FULL
    assert info.value.errno == errno.ENOSPC


def test_a_folder_that_is_gone(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened(folder=tmp_path / "gone")
    for path in (tmp_path / "gone").iterdir():
        path.unlink()
    (tmp_path / "gone").rmdir()
    with pytest.raises(OSError, match="its folder is missing"):
        store.save("a.pth", state())


def test_a_file_that_may_grow_no_further(opened: Make, state: Make, names: Make) -> None:
    """A real refusal by the system, in the midst of the data."""
    store = opened()
    store.save("a.pth", state(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"b\.pth could not be") as info:
            store.save("b.pth", state(2, big=torch.zeros(100_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert info.value.errno == errno.EFBIG
    assert names() == ["a.pth"]
    assert steps(store) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        made = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("looks", [True, False], ids=["looking first", "finding out"])
def test_a_disk_that_is_really_full(
    small_disk: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    files = Files()
    if not looks:
        monkeypatch.setattr(files, "free", lambda folder: 10**9)
    store = opened(folder=small_disk, files=files)
    store.save("a.pth", state(1, big=torch.zeros(100_000)))
    before = contents(small_disk)
    with pytest.raises(OSError, match=r"b\.pth could not be") as info:
        store.save("b.pth", state(2, big=torch.zeros(200_000)))

    assert info.value.errno == errno.ENOSPC
    assert contents(small_disk) == before
    assert steps(store) == 1
    store.save("b.pth", state(2, big=torch.zeros(80_000)))
    assert steps(store) == 2
    store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    store.save("a.pth", state(1))
    before = contents(tmp_path)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OSError, match="Permission denied"):
            store.save("b.pth", state(2))
        with pytest.raises(ValueError, match="Nothing can be saved"):
            Store(tmp_path, "other").open()
        assert contents(tmp_path) == before
        assert reader.newest(tmp_path, "run")[0] is not None
    finally:
        tmp_path.chmod(0o755)


def test_a_file_system_that_becomes_read_only(opened: Make, state: Make, tmp_path: Path) -> None:
    files = Faulty(None, OSError(errno.EROFS, "Read-only file system"), times=float("inf"))
    store = opened(files=files)
    path = store.save("a.pth", state(1)).path
    before = contents(tmp_path)
    files.first = files.count
    actions: list[Callable[[], object]] = [
        lambda: store.save("b.pth", state(2)),
        lambda: store.point("last", path),
        lambda: store.remove(path),
    ]
    for fails in actions:
        with pytest.raises(OSError, match="Read-only file system"):
            fails()

    assert contents(tmp_path) == before
    assert steps(store) == 1


def test_what_the_start_says(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    store = opened()
    store.save("a.pth", state(1))
    store.close()
    (tmp_path / ".run.data.tmp").write_bytes(b"half")
    again = Store(tmp_path, "run")
    notes = again.open()
    again.close()
    assert_each(notes, ("interrupted save", ".run.data.tmp"))
    assert names() == ["a.pth"]
