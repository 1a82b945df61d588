"""What a save does to the disk, step by step: no more than it must, and what is synced together."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.checkpoint.storage import Files
from heliograph.core.checkpoint.storage.files import digest_of

Make = Callable[..., Any]
SAVE = ["create .run.data.tmp", "write .run.data.tmp", "sync .run.data.tmp"]


class Steps(Files):
    """Writes down what changes the disk."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def create(self, path: Path) -> FileIO:
        self.done.append(f"create {path.name}")
        return super().create(path)

    def write(self, file: FileIO, content: bytes | memoryview) -> None:
        self.done.append(f"write {Path(str(file.name)).name}")
        super().write(file, content)

    def sync(self, file: FileIO) -> None:
        self.done.append(f"sync {Path(str(file.name)).name}")

    def rename(self, old: Path, new: Path) -> None:
        self.done.append(f"rename {new.name}")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self.done.append(f"unlink {path.name}")
        super().unlink(path)

    def sync_folder(self, folder: Path) -> None:
        self.done.append("sync the shards" if folder.name == ".run.shards.tmp" else "sync the folder")


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_a_save_under_a_new_name_syncs_the_file_and_the_folder(opened: Make, state: Make, steps: Steps) -> None:
    store = opened(files=steps)
    store.save("a.pth", state(1))
    steps.done.clear()
    store.save("b.pth", state(2), read_back=False)

    assert steps.done == [*SAVE, "rename b.pth", "sync the folder"]


def test_a_save_with_shards_under_a_new_name_replaces_nothing_either(
    tmp_path: Path, opened: Make, state: Make, steps: Steps
) -> None:
    store = opened(files=steps)
    store.save("a.pth", state(1))
    shard = store.begin_shards(100) / "__0_0.distcp"
    shard.write_bytes(b"shard")
    steps.done.clear()
    store.save("b.pth", {**state(2), "shards": {}}, shards={shard.name: digest_of(shard)})

    [shards] = tmp_path.glob("*.shards")
    assert steps.done == [
        *["create digests.json", "write digests.json", "sync digests.json", *SAVE],
        *["sync the shards", "sync the folder", f"rename {shards.name}", "rename b.pth", "sync the folder"],
    ]


def test_a_save_that_replaces_renames_once(opened: Make, state: Make, steps: Steps) -> None:
    store = opened(files=steps)
    store.save("a.pth", state(1))
    steps.done.clear()
    store.save("a.pth", state(2))

    assert steps.done == [
        *SAVE,
        "rename a.pth",
        "sync the folder",
    ]


def test_only_the_pointer_to_the_best_is_synced(opened: Make, state: Make, steps: Steps) -> None:
    store = opened(files=steps)
    path = store.save("a.pth", state(1)).path
    steps.done.clear()
    store.point("last", path)
    store.point("best", path)
    written = ["create .run.small.tmp", "write .run.small.tmp"]

    assert steps.done == [*written, "rename run.last", *written, "sync .run.small.tmp", "rename run.best"]


def test_a_removal_syncs_nothing(opened: Make, state: Make, steps: Steps) -> None:
    store = opened(files=steps)
    path = store.save("a.pth", state(1)).path
    store.save("b.pth", state(2))
    steps.done.clear()
    store.remove(path)

    assert steps.done == ["unlink a.pth"]


def test_what_a_failed_change_may_have_left_is_removed_by_the_next_save(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(files=Files())
    path = store.save("a.pth", state(1)).path
    with monkeypatch.context() as broken:
        broken.setattr(Files, "rename", lambda self, old, new: (_ for _ in ()).throw(OSError("refused")))
        with pytest.raises(OSError, match="refused"):
            store.point("last", path)
    left = (tmp_path / ".run.small.tmp").exists()
    store.save("b.pth", state(2))

    assert left
    assert not (tmp_path / ".run.small.tmp").exists()
