"""A folder with files of other programs: they are neither read as checkpoints, nor changed, nor waited for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.checkpoint.storage import Files, Store, inventory, reader
from heliograph.core.checkpoint.storage.files import SYSTEM
from heliograph.core.checkpoint.storage.manifest import MOST
from heliograph.core.checkpoint.storage.reader import shards_path
from heliograph.core.checkpoint.storage.untrusted_files import find_tail
from heliograph.tests.messages import assert_each
from heliograph.tests.stores import seal

Make = Callable[..., Any]
Put = Callable[[Path], None]
NAME = "run_epoch_1_iter_4.pth"


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.mkdir()


def as_loop(path: Path) -> None:
    path.symlink_to(path)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST + 1)


def as_garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\0/../x\x1b[31m")


ODD = [as_pipe, as_folder, as_loop, as_device, as_large, as_garbage]


def reseal(path: Path, **changes: Any) -> None:
    """Change facts in a manifest, and give it the right digest."""
    facts = {**json.loads(find_tail(lambda most: SYSTEM.read_range(path, -most, most), path)[0]), **changes}
    del facts["sha256"]
    lines = [f'  "{name}": {json.dumps(facts[name], sort_keys=True)}' for name in sorted(facts)]
    digest = hashlib.sha256(("{\n" + ",\n".join(lines) + "\n}\n").encode()).hexdigest()
    lines.append(f'  "sha256": "{digest}"')
    seal(path, lambda size, sha256: ("{\n" + ",\n".join(sorted(lines)) + "\n}\n").encode())


@pytest.mark.parametrize("put", ODD)
def test_another_programs_json_is_ignored(tmp_path: Path, opened: Make, state: Make, put: Put) -> None:
    put(tmp_path / "config.json")
    opened().save(NAME, state(4))
    entries, passed_over = opened("other").entries()

    assert entries == []
    assert_each(passed_over, (tmp_path, "'other'", "'run'"))


def test_what_this_user_may_not_read(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().save(NAME, state(4))
    (tmp_path / "config.pth").touch()
    really = os.open

    def refuse(path: Any, *more: Any) -> int:
        if Path(path).name == "config.pth":
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Files, "pause", lambda files, seconds: None)
    with_store = Store(tmp_path, "other")
    with_store.open()
    with_store.close()

    assert [each.path.name for each in inventory.entries(tmp_path, "run")[0]] == [NAME]
    reader.load(tmp_path / NAME)


@pytest.mark.parametrize("put", [as_pipe, as_loop, as_device, as_large, as_garbage])
def test_what_has_the_name_of_a_checkpoint_is_passed_over_with_a_word(
    tmp_path: Path, opened: Make, state: Make, put: Put
) -> None:
    store = opened()
    first = store.save("run_epoch_0_iter_2.pth", state(2))
    put(tmp_path / NAME)
    entry, _, passed_over = store.newest()

    assert entry == first
    assert len(passed_over) == 1
    assert NAME in passed_over[0]
    assert store.save(NAME, state(5)).path.name == "run_epoch_1_iter_4-2.pth"


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": "9"},
        {"sequence": True},
        {"run_name": []},
        {"saved_at": "now"},
        {"progress": {"steps": []}},
        {"progress": []},
        {"metrics": {"loss": {}}},
        {"versions": {"torch": 2}},
        {"judged_by": 7},
        {"judged_by": ["loss", "min", [1]]},
        {"judged_by": ["loss", "average", 1]},
        {"shards": {"a": {"bytes": "9", "sha256": "0"}}},
        {"shards": ["a", ""]},
        {"shards": ["../a.00000000.shards", ""]},
        {"shards": ["a.00000000.shards", 7]},
        {"former_shards": ".."},
        {"data": {"bytes": "x", "sha256": []}},
        {"data": []},
        {"schema": "3"},
    ],
)
def test_a_forged_manifest_is_no_manifest(tmp_path: Path, opened: Make, state: Make, changes: dict[str, Any]) -> None:
    store = opened()
    first = store.save("run_epoch_0_iter_2.pth", state(2))
    store.save(NAME, state(4))
    reseal(tmp_path / NAME, **changes)
    entry, _, [passed_over] = store.newest()

    assert entry == first
    assert "cannot be used" in passed_over
    with pytest.raises(ValueError, match="cannot be used"):
        reader.load(tmp_path / NAME)
    assert store.remove(tmp_path / NAME) is False
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("put", ODD)
def test_pointers_are_for_people_only(tmp_path: Path, opened: Make, state: Make, put: Put) -> None:
    put(tmp_path / "run.best")
    store = opened()
    assert store.marks(store.save(NAME, state(4))) == []


@pytest.mark.parametrize("name", [".run.lock", ".run.data.tmp", ".run.small.tmp", "run.last"])
@pytest.mark.parametrize("there", [True, False])
def test_no_link_is_followed_in_writing(tmp_path: Path, state: Make, name: str, there: bool) -> None:
    folder, victim = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    if there:
        victim.write_bytes(b"precious")
    (folder / name).symlink_to(victim)
    store = Store(folder, "run")
    if name == ".run.lock":
        with pytest.raises(ValueError, match=r"\.run\.lock is a link"):
            store.open()
    else:
        store.open()
        entry = store.save(NAME, state(4))
        store.point("last", entry.path)
        store.judge(entry, ("loss", "min", 0.5))
        store.close()
        assert (folder / "run.last").read_text() == f"{NAME}\n"

    assert victim.exists() == there
    assert not there or victim.read_bytes() == b"precious"


@pytest.mark.parametrize("put", [as_pipe, as_folder, as_loop])
def test_what_is_no_lock(tmp_path: Path, put: Put) -> None:
    put(tmp_path / ".run.lock")
    with pytest.raises(ValueError, match="lock file:"):
        Store(tmp_path, "run").open()


def test_a_lock_file_with_a_second_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    os.link(tmp_path / "precious", tmp_path / ".run.lock")
    with pytest.raises(ValueError, match="not a lock file"):
        Store(tmp_path, "run").open()

    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_links_that_the_user_made_to_a_large_disk(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    large, folder = tmp_path / "large", tmp_path / "folder"
    large.mkdir()
    folder.symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    store = opened(folder=folder)
    for step in (2, 4):
        path = store.save(f"run_epoch_0_iter_{step}.pth", state(step)).path
        shutil.move(path, large)
        path.symlink_to(large / path.name)
    entry, loaded, passed_over = store.newest()

    assert (entry.path, loaded["progress"]["steps"], passed_over) == (path, 4, [])
    assert reader.verify(path) == entry
    assert store.remove(path)
    assert sorted(each.name for each in folder.glob("run*")) == ["run_epoch_0_iter_2.pth"]
    assert (large / path.name).exists()


def test_shards_behind_a_link_are_not_removed(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    (store.begin_shards(1) / "__0_0.distcp").write_bytes(b"1")
    entry = store.save(NAME, state(4), shards={"__0_0.distcp": (1, "")})
    shards = shards_path(entry)
    shards.rename(tmp_path / "large")
    shards.symlink_to(tmp_path / "large")

    assert store.remove(entry.path)
    assert not shards.is_symlink()
    assert (tmp_path / "large").is_dir()


@pytest.mark.parametrize("name", [".run.data.tmp", ".run.small.tmp"])
def test_a_folder_with_the_name_of_a_file_of_ours_is_named(tmp_path: Path, state: Make, name: str) -> None:
    (tmp_path / name).mkdir()
    store = Store(tmp_path, "run")
    with pytest.raises(IsADirectoryError, match=re.escape(name)):
        store.open()
        store.point("last", store.save(NAME, state(4)).path)
    store.close()

    assert (tmp_path / name).is_dir()
