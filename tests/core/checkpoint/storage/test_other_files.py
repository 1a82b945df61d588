"""A folder with files of other programs: they are neither read as checkpoints, nor changed, nor waited for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heliograph.builtin_callbacks.checkpoint.command import main
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import Store
from heliograph.core.checkpoint.storage.manifest import MOST

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


def reseal(manifest: Path, **changes: Any) -> None:
    """Change facts in a manifest, and give it the right digest."""
    facts = {**json.loads(manifest.read_bytes()), **changes}
    del facts["sha256"]
    text = json.dumps(facts, sort_keys=True, indent=2) + "\n"
    facts["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps(facts, sort_keys=True, indent=2) + "\n")


@pytest.mark.parametrize("put", ODD)
def test_another_programs_json_is_ignored(tmp_path: Path, opened: Make, state: Make, put: Put) -> None:
    put(tmp_path / "config.json")
    opened().save(NAME, state(4))
    entries, passed_over = opened("other").entries()

    assert entries == []
    assert passed_over == [f"{tmp_path} has no checkpoint of run 'other'; those in it are of 'run'."]
    assert main(["inspect", str(tmp_path)]) == main(["verify", str(tmp_path)]) == 0


def test_what_this_user_may_not_read(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().save(NAME, state(4))
    (tmp_path / "config.json").touch()
    really = os.open

    def refuse(path: Any, *more: Any) -> int:
        if Path(path).name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *more)

    monkeypatch.setattr(os, "open", refuse)
    with_store = Store(tmp_path, "other")
    with_store.open()
    with_store.close()

    assert [each.path.name for each in storage.entries(tmp_path, "run")[0]] == [NAME]
    assert main(["verify", str(tmp_path)]) == 0


@pytest.mark.parametrize("put", ODD)
def test_what_has_the_name_of_our_manifest_is_passed_over_with_a_word(
    tmp_path: Path, opened: Make, state: Make, put: Put
) -> None:
    store = opened()
    first = store.save("run_epoch_0_iter_2.pth", state(2))
    store.save(NAME, state(4))
    (tmp_path / NAME).with_suffix(".json").unlink()
    put((tmp_path / NAME).with_suffix(".json"))
    entry, _, passed_over = store.newest()

    assert entry == first
    assert len(passed_over) == 1
    assert "run_epoch_1_iter_4.json" in passed_over[0]
    assert store.save(NAME, state(5)).path.name == "run_epoch_1_iter_4-2.pth"


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": "9"},
        {"sequence": True},
        {"run_name": []},
        {"saved_at": "now"},
        {"saved_at": 1e300},
        {"progress": {"steps": []}},
        {"progress": []},
        {"metrics": {"loss": {}}},
        {"versions": {"torch": 2}},
        {"world": []},
        {"world": {"size": "1"}},
        {"judged_by": 7},
        {"judged_by": ["loss", "min", [1]]},
        {"judged_by": ["loss", "average", 1]},
        {"shards": {"a": {"bytes": "9", "sha256": "0"}}},
        {"shards": {"a": 7}},
        {"files": {NAME: {"bytes": "x", "sha256": []}}},
        {"files": {"a\0.pth": {"bytes": 1, "sha256": ""}}},
        {"files": []},
        {"schema": "3"},
    ],
)
def test_a_forged_manifest_is_no_manifest(tmp_path: Path, opened: Make, state: Make, changes: dict[str, Any]) -> None:
    store = opened()
    first = store.save("run_epoch_0_iter_2.pth", state(2))
    store.save(NAME, state(4))
    reseal((tmp_path / NAME).with_suffix(".json"), **changes)
    entry, _, [passed_over] = store.newest()

    assert entry == first
    assert "cannot be used" in passed_over
    assert main(["inspect", str(tmp_path)]) == 1
    assert main(["verify", str(tmp_path)]) == 1
    store.close()
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("put", ODD)
def test_pointers_are_for_people_only(tmp_path: Path, opened: Make, state: Make, put: Put) -> None:
    put(tmp_path / "run.best")
    store = opened()
    store.save(NAME, state(4))
    store.close()

    assert main(["inspect", str(tmp_path)]) == main(["prune", str(tmp_path), "--keep-last", "1"]) == 0


@pytest.mark.parametrize("name", [".run.lock", ".run.data.tmp", ".run.manifest.tmp", ".run.pointer.tmp", "run.last"])
@pytest.mark.parametrize("there", [True, False])
def test_no_link_is_followed_in_writing(tmp_path: Path, state: Make, name: str, there: bool) -> None:
    folder, victim = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    if there:
        victim.write_bytes(b"precious")
    (folder / name).symlink_to(victim)
    store = Store(folder, "run")
    if name == ".run.lock":
        with pytest.raises(ValueError, match=r"\.run\.lock is not a lock file, but a link"):
            store.open()
    else:
        store.open()
        store.point("last", store.save(NAME, state(4)).path)
        store.close()
        assert (folder / "run.last").read_text() == f"{NAME}\n"

    assert victim.exists() == there
    assert not there or victim.read_bytes() == b"precious"


@pytest.mark.parametrize("put", [as_pipe, as_folder, as_loop])
def test_what_is_no_lock(tmp_path: Path, put: Put) -> None:
    put(tmp_path / ".run.lock")
    with pytest.raises(ValueError, match=r"\.run\.lock is not a lock file, .*: remove it"):
        Store(tmp_path, "run").open()


def test_a_lock_file_with_a_second_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    os.link(tmp_path / "precious", tmp_path / ".run.lock")
    with pytest.raises(ValueError, match="not a lock file"):
        Store(tmp_path, "run").open()

    assert (tmp_path / "precious").read_bytes() == b"precious"


@pytest.mark.parametrize("shards", [False, True])
def test_a_forged_tombstone_removes_nothing(tmp_path: Path, opened: Make, state: Make, shards: bool) -> None:
    store = opened()
    store.save(NAME, state(4))
    store.close()
    shutil.copy((tmp_path / NAME).with_suffix(".json"), tmp_path / ".run.doomed")
    (tmp_path / "precious.pth").write_bytes(b"precious")
    (tmp_path / "precious.shards").mkdir()
    more = {"shards": {"a": {"bytes": 1, "sha256": ""}}} if shards else {}
    reseal(tmp_path / ".run.doomed", files={"precious.pth": {"bytes": 8, "sha256": "00" * 32}}, **more)
    notes = store.open()

    assert notes == [
        f"A removal of {tmp_path / 'precious.pth'} was interrupted; what has that name now is another file, and stays."
    ]
    assert (tmp_path / "precious.pth").read_bytes() == b"precious"
    assert (tmp_path / "precious.shards").is_dir()
    assert not (tmp_path / ".run.doomed").exists()
    store.close()


def test_links_that_the_user_made_to_a_large_disk(tmp_path: Path, opened: Make, state: Make, names: Make) -> None:
    large, folder = tmp_path / "large", tmp_path / "folder"
    large.mkdir()
    folder.symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    store = opened(folder=folder)
    for step in (2, 4):
        path = store.save(f"run_epoch_0_iter_{step}.pth", state(step)).path
        for each in (path, path.with_suffix(".json")):
            shutil.move(each, large)
            each.symlink_to(large / each.name)
    entry, loaded, passed_over = store.newest()

    assert (entry.path, loaded["progress"]["steps"], passed_over) == (path, 4, [])
    assert storage.verify(path) == entry
    assert store.remove(path)
    assert sorted(each.name for each in folder.glob("run*")) == ["run_epoch_0_iter_2.json", "run_epoch_0_iter_2.pth"]
    assert (large / path.name).exists()


def test_shards_behind_a_link_are_not_removed(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    path = store.save(NAME, state(4)).path
    (tmp_path / "large").mkdir()
    path.with_suffix(".shards").symlink_to(tmp_path / "large")

    assert store.remove(path)
    assert not path.with_suffix(".shards").is_symlink()
    assert (tmp_path / "large").is_dir()


@pytest.mark.parametrize("name", [".run.doomed", ".run.data.tmp", ".run.pointer.tmp"])
def test_a_folder_with_the_name_of_a_file_of_ours_is_named(tmp_path: Path, state: Make, name: str) -> None:
    (tmp_path / name).mkdir()
    store = Store(tmp_path, "run")
    with pytest.raises(IsADirectoryError, match=rf"A folder has the name of a file of ours, move it away: .*{name}"):
        store.open()
        store.point("last", store.save(NAME, state(4)).path)
    store.close()

    assert (tmp_path / name).is_dir()
