"""Checkpoints from another folder: moved completely or not at all, whatever fails and whenever."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.checkpoint.storage import Entry, Store, inventory, reader
from heliograph.core.checkpoint.storage.files import digest_of
from heliograph.tests.core.checkpoint.storage.faulty import Death, Faulty

Make = Callable[..., Any]


def save(store: Store, name: str, state: dict[str, Any], shards: int | None = None) -> Entry:
    """Save with a shard that holds the step, or without any."""
    if shards is None:
        return store.save(name, state)
    folder = store.begin_shards(100)
    (folder / "__0_0.distcp").write_bytes(b"shard of %d" % shards)
    return store.save(name, {**state, "shards": {}}, shards={"__0_0.distcp": digest_of(folder / "__0_0.distcp")})


@pytest.fixture
def elsewhere(tmp_path: Path, opened: Make, state: Make) -> Callable[..., Path]:
    """Return a maker of checkpoints in another folder."""

    def make(steps: int, shards: int | None = None, name: str = "a.pth") -> Path:
        store = opened(folder=tmp_path / "elsewhere")
        save(store, "former.pth", state(steps - 1))
        path = save(store, name, state(steps), shards).path
        store.close()
        return path

    return make


def test_it_keeps_its_sequence(tmp_path: Path, opened: Make, state: Make, elsewhere: Make) -> None:
    path = elsewhere(8, 8)
    store = opened(folder=tmp_path / "here")
    save(store, "b.pth", state(1))
    entry = store.take_in(path)
    assert (entry.path, entry.sequence) == (tmp_path / "here" / "a.pth", 2)
    assert reader.verify(entry.path) == entry
    assert save(store, "c.pth", state(9)).sequence == 3
    assert [each.path.stem for each in store.entries()[0]] == ["c", "a", "b"]
    assert not path.exists()


def test_another_run_s_is_refused(tmp_path: Path, opened: Make, elsewhere: Make) -> None:
    path = elsewhere(8)
    with pytest.raises(ValueError, match="state of run 'run'"):
        opened("other", folder=tmp_path / "here").take_in(path)
    assert path.exists()


def test_what_another_run_has_there_stays(tmp_path: Path, opened: Make, state: Make, elsewhere: Make) -> None:
    here = tmp_path / "here"
    other = save(opened("other", folder=here), "a.pth", state(3, name="other"))
    entry = opened(folder=here).take_in(elsewhere(8, 8))
    assert entry.path == here / "a-2.pth"
    assert reader.verify(entry.path).run_name == "run"
    assert reader.verify(other.path).run_name == "other"


@pytest.mark.parametrize("shards", [None, 8])
def test_beside_a_damaged_file_of_its_name_it_is_not_renamed(
    tmp_path: Path, opened: Make, state: Make, elsewhere: Make, shards: int | None
) -> None:
    here, path = tmp_path / "here", elsewhere(8, shards)
    here.mkdir()
    (here / "a.pth").write_bytes(b"damaged")
    store = opened(folder=here)
    entry = store.take_in(path)

    assert (entry.path, entry.name, entry.is_renamed) == (here / "a-2.pth", "a-2.pth", False)
    assert reader.verify(entry.path) == entry
    assert reader.load(entry.path)["progress"] == {"steps": 8}
    assert not path.exists()
    assert store.remove(entry.path)
    assert [each.name for each in here.iterdir() if not each.name.startswith(".")] == ["a.pth"]


def test_what_was_renamed_there_counts_as_renamed_here(tmp_path: Path, opened: Make, elsewhere: Make) -> None:
    path, here = elsewhere(8), tmp_path / "here"
    path = path.rename(path.with_name("mine.pth"))
    here.mkdir()
    (here / "mine.pth").write_bytes(b"damaged")
    entry = opened(folder=here).take_in(path)

    assert (entry.path.name, entry.name, entry.is_renamed) == ("mine-2.pth", "a.pth", True)
    assert reader.verify(entry.path) == entry


@pytest.mark.sample(3)
@pytest.mark.parametrize("shards", [(1, 2), (1, None), (None, 2)])
@pytest.mark.parametrize("name", ["a.pth", "b.pth"], ids=["replacing", "a new name"])
@pytest.mark.parametrize("dies", [False, True])
def test_it_is_moved_completely_or_not_at_all(
    tmp_path: Path, opened: Make, state: Make, elsewhere: Make, shards: tuple[Any, Any], name: str, dies: bool
) -> None:
    former_shards, later_shards = shards
    taken = set()
    for trial in range(100):
        path, here = elsewhere(2, later_shards, name), tmp_path / str(trial)
        first = opened(folder=here)
        previous = save(first, "a.pth", state(1), former_shards)
        first.close()
        error: BaseException = Death() if dies else OSError(errno.EIO, "Input/output error")
        files = Faulty(10**6, error, 10**6 if dies else 1)
        store = opened(folder=here, files=files)
        files.count, files.first = 0, trial
        with suppress(OSError, Death):
            store.take_in(path)
        store.close()
        opened(folder=here).close()  # brings in order what was left
        newest, *_ = inventory.entries(here, "run")[0]
        assert reader.verify(newest.path).progress["steps"] in (1, 2)
        taken.add(newest.progress["steps"])
        if name == "b.pth":
            assert reader.verify(previous.path) == previous
        assert not [each for each in here.iterdir() if each.name.startswith(".")]
        if files.count <= trial:
            break
    assert trial >= 3
    assert taken == {1, 2}
