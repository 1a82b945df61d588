"""Reading: what is wrong with a file is said, and no code in it runs."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from io import BufferedReader, FileIO
from math import inf
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Entry, Files, inventory, manifest, reader
from heliograph.core.checkpoint.storage.files import PAUSES, TRIES
from heliograph.core.checkpoint.storage.inventory import Manifests
from heliograph.core.checkpoint.storage.manifest import SchemaError
from heliograph.core.checkpoint.storage.untrusted_files import UnreadableError
from heliograph.core.checkpoint.weights import find_weights
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.stores import seal_as, training_named

Make = Callable[..., Any]
ADVICE = r"has no manifest, so it is not a checkpoint of heliograph.*python -m heliograph checkpoint migrate .*a\.pth`"


class Evil:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def forge(path: Path, content: Any, **more: Any) -> Entry:
    """Write anything, with a manifest in which everything is right."""
    torch.save(content, path)
    more = {"training": training_named("run"), "name": path.name, **more}
    return seal_as(path, Entry(path, "run", 99, 0.0, 0, "", **more))


def test_a_file_without_a_manifest(tmp_path: Path, opened: Make, state: Make) -> None:
    torch.save(state(3), tmp_path / "a.pth")
    for read in (reader.load, reader.verify, storage.read_manifest):
        with pytest.raises(ValueError, match=ADVICE):
            read(tmp_path / "a.pth")

    assert reader.read(tmp_path / "a.pth")["progress"]["steps"] == 3


def test_a_missing_file_lists_its_siblings(tmp_path: Path, opened: Make, state: Make) -> None:
    opened().save("run_epoch_1_iter_2.pth", state())
    with pytest.raises(FileNotFoundError, match=r"mean 'run_epoch_1_iter_2.pth'\? Known: run_epoch_1"):
        reader.load(tmp_path / "run_epoch_1_iter_3.pth")
    with pytest.raises(FileNotFoundError, match=r"Known: none"):
        reader.load(tmp_path / "nowhere" / "run.pth")
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint"):
        storage.read_manifest(tmp_path / "b.pth")


@pytest.mark.parametrize("name", ["run.last"])
def test_a_path_to_something_else(tmp_path: Path, opened: Make, state: Make, name: str) -> None:
    store = opened()
    store.point("last", store.save("a.pth", state()).path)
    with pytest.raises(ValueError, match=r"folder|torch\.save"):
        reader.load(tmp_path / name)


def test_a_file_may_be_renamed(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    store.save("a.pth", state(4))
    (tmp_path / "a.pth").rename(tmp_path / "best.pth")

    assert reader.load(tmp_path / "best.pth")["progress"]["steps"] == 4
    assert store.newest()[0].path == tmp_path / "best.pth"
    assert store.newest()[2] == []


def test_another_size_or_content_is_refused_before_anything_is_unpickled(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().save("a.pth", state())
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was unpickled"))
    content = (tmp_path / "a.pth").read_bytes()
    size = storage.read_manifest(tmp_path / "a.pth").size
    (tmp_path / "a.pth").write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="archive is missing"):
        reader.load(tmp_path / "a.pth")
    (tmp_path / "a.pth").write_bytes(content[:9] + b"more" + content[9:])
    with pytest.raises(ValueError, match=f"damaged: it has {size + 4}"):
        reader.load(tmp_path / "a.pth")
    (tmp_path / "a.pth").write_bytes(content[:90] + bytes([content[90] ^ 1]) + content[91:])
    with pytest.raises(ValueError, match="damaged: its SHA-256"):
        reader.load(tmp_path / "a.pth")


def test_a_malicious_pickle_with_a_forged_manifest_is_refused(tmp_path: Path, opened: Make, state: Make) -> None:
    """Its bytes have the digest of its manifest, so it is not damage, which a search skips."""
    store = opened()
    store.save("good.pth", state(1))
    forge(tmp_path / "evil.pth", state(99, evil=Evil(tmp_path / "it ran")))
    reader.verify(tmp_path / "evil.pth")
    for read in (reader.load, reader.read):
        with pytest.raises(ValueError, match="read: UnpicklingError: Unsupported"):
            read(tmp_path / "evil.pth")
    with pytest.raises(UnreadableError, match=r"evil\.pth .* it is intact.*cannot be read"):
        store.newest()
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("error", [UnpicklingError, RecursionError, AttributeError])
def test_an_intact_newest_one_that_cannot_be_read_is_not_passed_over(
    error: type[Exception], opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    for steps in (1, 2):
        store.save(f"{steps}.pth", state(steps))

    def load(*args: Any, **how: Any) -> Any:
        raise error("no such class")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(UnreadableError, match=r"2\.pth.*is intact.*no such class"):
        store.newest()


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], torch.ones(1), 7])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: Any) -> None:
    forge(tmp_path / "other.pth", content)
    with pytest.raises(ValueError, match="checkpoint of heliograph:"):
        reader.load(tmp_path / "other.pth")
    read = reader.read(tmp_path / "other.pth")
    assert type(read) is type(content)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_no_damage(
    tmp_path: Path, opened: Make, state: Make, schema: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be pruned, if an older one were taken in its place."""
    store = opened()
    store.save("good.pth", state(1))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "SCHEMA", schema)
        forge(tmp_path / "newer.pth", state(2, schema=schema))
    for read in (reader.load, lambda path: store.newest()):
        with pytest.raises(SchemaError, match=f"version reads {SCHEMA}:"):
            read(tmp_path / "newer.pth")
    other = replace(storage.read_manifest(tmp_path / "good.pth"), run_name="other", asked_name="")
    seal_as(tmp_path / "newer.pth", other)
    assert store.newest()[1]["progress"]["steps"] == 1


class Refusing(Files):
    """Refuses some reading so many times, and waits for nothing."""

    def __init__(self, what: str, times: float, number: int = errno.EIO) -> None:
        self.what, self.times, self.number = what, times, number
        self.paused: list[float] = []
        self.refused = 0

    def _step(self, what: str, path: Path) -> None:
        if what == self.what and self.refused < self.times:
            self.refused += 1
            raise OSError(self.number, os.strerror(self.number), str(path))

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)

    def try_names(self, folder: Path) -> list[os.DirEntry[str]]:
        self._step("names", folder)
        return super().try_names(folder)

    def try_range(self, path: Path, begin: int, most: int) -> tuple[bytes, int]:
        self._step("manifest", path)
        return super().try_range(path, begin, most)

    def try_open(self, path: Path) -> BufferedReader:
        self._step("open", path)
        refusing = self

        class Broken(FileIO):
            def readinto(self, buffer: Any, /) -> int | None:
                refusing._step("data", path)
                return super().readinto(buffer)

        return BufferedReader(Broken(path))


@pytest.mark.parametrize("what", ["names", "manifest", "open", "data"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT])
def test_what_is_refused_is_tried_again_and_never_passed_over(
    tmp_path: Path, opened: Make, state: Make, what: str, number: int
) -> None:
    store = opened()
    for steps, name in enumerate(("a.pth", "b.pth")):
        store.save(name, state(steps))
    for times in range(1, len(PAUSES) + 1):
        files = Refusing(what, times, number)
        newest: Any = reader.newest(Manifests(tmp_path, files), "run")
        entry, loaded, passed_over = newest
        assert (entry.path.name, loaded["progress"]["steps"], passed_over) == ("b.pth", 1, [])
        assert tuple(files.paused) == PAUSES[:times]
    for enough in (TRIES, inf):  # what can be read again a moment later was not skipped, either
        files = Refusing(what, enough, number)
        with pytest.raises(OSError, match=re.escape(os.strerror(number))) as info:
            reader.newest(Manifests(tmp_path, files), "run")
        assert info.value.errno == number
        assert Path(info.value.filename).is_relative_to(tmp_path)
        assert tuple(files.paused[: len(PAUSES)]) == PAUSES


def test_torch_does_not_hide_that_reading_was_refused(tmp_path: Path, opened: Make, state: Make) -> None:
    """Data that is whole by its digest, and cannot be read a second time, is not damaged."""
    path = opened().save("a.pth", state(modules={"model": {"weight": torch.ones(100_000)}})).path
    files = Refusing("data", 1)
    assert torch.equal(reader.read(path, files=files)["modules"]["model"]["weight"], torch.ones(100_000))
    assert files.paused == [PAUSES[0]]
    with pytest.raises(OSError, match="Input/output error"):
        reader.read(path, files=Refusing("data", inf))


def test_what_is_removed_during_the_search_is_looked_for_again(tmp_path: Path, opened: Make, state: Make) -> None:
    """By whom ever: it is neither damaged nor an error."""
    store = opened()
    for steps, name in enumerate(("a.pth", "b.pth", "c.pth")):
        store.save(name, state(steps))

    class Racing(Files):
        def try_range(self, path: Path, begin: int, most: int) -> tuple[bytes, int]:
            if path.name == "c.pth":
                path.unlink(missing_ok=True)
            return super().try_range(path, begin, most)

        def try_open(self, path: Path) -> BufferedReader:
            if path.name == "b.pth":
                path.unlink(missing_ok=True)
            return super().try_open(path)

    newest: Any = reader.newest(Manifests(tmp_path, Racing()), "run")
    entry, loaded, passed_over = newest
    assert (entry.path.name, loaded["progress"]["steps"], passed_over) == ("a.pth", 0, [])


def test_what_cannot_be_read_may_be_of_any_run(tmp_path: Path, opened: Make, state: Make) -> None:
    opened().save("a.pth", state(1))

    class Closed(Files):
        def try_range(self, path: Path, begin: int, most: int) -> tuple[bytes, int]:
            if path.name == "config.pth":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return super().try_range(path, begin, most)

        def pause(self, seconds: float) -> None: ...

    assert reader.newest(Manifests(tmp_path, Closed()), "run")[2] == []
    (tmp_path / "config.pth").touch()
    with pytest.raises(PermissionError):
        reader.newest(Manifests(tmp_path, Closed()), "run")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("of an unknown kind"),
        torch.OutOfMemoryError("CUDA out of memory."),
        SystemError("returned NULL"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("No module named 'that'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_intact_file_that_cannot_be_read_is_no_damage(
    opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An older checkpoint must not be taken because the newest did not fit."""
    store = opened()
    store.save("a.pth", state())
    path = store.save("b.pth", state(1)).path
    monkeypatch.setattr(Files, "pause", lambda self, seconds: None)

    def load(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "load", load)
    for read in (store.newest, lambda: reader.load(path), lambda: find_weights(path.parent)):
        with pytest.raises(type(error)) as info:
            read()
        assert info.value is error
    assert any("b.pth" in note for note in error.__notes__)


def test_newest_passes_over_what_is_damaged_and_says_so(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    for steps, name in enumerate(("a.pth", "b.pth", "c.pth", "d.pth", "e.pth")):
        store.save(name, state(steps))
    (tmp_path / "e.pth").write_bytes(b"")
    (tmp_path / "d.pth").write_bytes((tmp_path / "d.pth").read_bytes()[:-9])
    torch.save(state(2), tmp_path / "c.pth")
    (tmp_path / "b.pth").write_bytes((tmp_path / "b.pth").read_bytes().replace(b"PK", b"KP", 1))
    entry, loaded, passed_over = store.newest()

    assert entry.path.name == "a.pth"
    assert loaded["progress"]["steps"] == 0
    assert [path for path in "abcde" for line in passed_over if f"{path}.pth" in line] == ["b", "d", "e"]
    assert len(passed_over) == 3


def test_other_runs_are_none_of_its_business_unless_there_is_nothing_else(
    tmp_path: Path, opened: Make, state: Make
) -> None:
    for name in ("b", "a"):
        opened(name).save(f"{name}.pth", state(name=name))
    (tmp_path / "settings.json").write_text('{"format": "mine"}')
    store = opened()

    *newest, notes = store.newest()
    assert newest == [None, None]
    assert_each(notes, (tmp_path, "'run'", "'a', 'b'"))
    store.save("c.pth", state())
    assert store.newest()[2] == []


def test_an_empty_or_missing_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert inventory.entries(folder, "run") == ([], [])
        assert reader.newest(folder, "run") == (None, None, [])


def test_a_folder_and_a_link_to_nowhere_with_the_suffix(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    store.save("a.pth", state())
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "link.pth").symlink_to(tmp_path / "gone.pth")
    entry, _, passed_over = store.newest()

    assert entry.path.name == "a.pth"
    assert len(passed_over) == 1
    assert "link.pth" in passed_over[0]
    store.close()
    assert opened().save("b.pth", state()).sequence == 2


def test_entries_are_of_the_folder_not_of_what_was_written(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    first = store.save("a.pth", state(1))
    copy = replace(first, path=tmp_path / "z.pth", sequence=50)
    (tmp_path / "z.pth").write_bytes(first.path.read_bytes())
    copy = seal_as(tmp_path / "z.pth", copy)

    assert store.entries() == ([copy, first], [])


def test_of_many_other_runs_a_few_are_named(opened: Make, state: Make) -> None:
    for name in "abcdefg":
        opened(name).save(f"{name}.pth", state(name=name))

    (sentence,) = opened().newest()[2]
    assert_facts(sentence, "'a', 'b', 'c',", "'d', 'e'", "2 more")
