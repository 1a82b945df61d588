"""Conversion of checkpoints on disk."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Files, Store, inventory, reader
from heliograph.packages.cli.tests.checkpoints.helios_files import migrate
from heliograph.tests.messages import assert_each, assert_facts

BORDER, MIDDLE = "golden_epoch_1_iter_4.pth", "golden_epoch_1_iter_6.pth"

Make = Callable[..., Any]
Names = Callable[[], list[str]]


def test_a_file_is_migrated_and_its_former_self_kept(old: Path) -> None:
    before = (old / BORDER).read_bytes()
    lines = migrate(old / BORDER)
    assert_facts(lines[0], old / BORDER, "migrated", f"schema {SCHEMA}", f"{BORDER}.backup")
    assert_facts(lines[1], "Helios 1.1.0", "'golden'")
    assert (old / f"{BORDER}.backup").read_bytes() == before
    state = reader.load(old / BORDER)
    assert (state["schema"], state["progress"]["steps"]) == (SCHEMA, 4)
    assert torch.equal(state["modules"]["model"]["0.weight"], torch.full((3, 2), 4.0))
    entry = reader.verify(old / BORDER)
    assert (entry.run_name, entry.judged_by) == ("golden", None)
    assert entry.training == state["training_id"]


def test_a_folder_is_migrated_and_the_order_of_writing_kept(old: Path) -> None:
    migrate(old)
    entries, passed_over = inventory.entries(old, "golden")
    assert [each.path.name for each in entries] == [MIDDLE, BORDER]
    assert passed_over == []


def test_what_is_up_to_date_is_left_alone(old: Path, names: Names) -> None:
    migrate(old / MIDDLE)
    before = {name: (old / name).stat().st_mtime_ns for name in names()}
    assert_each(migrate(old / MIDDLE), (old / MIDDLE, "up to date", f"schema {SCHEMA}"))
    assert {name: (old / name).stat().st_mtime_ns for name in names()} == before


def test_a_dry_run_changes_nothing(old: Path, names: Names) -> None:
    before = {path: path.read_bytes() for path in old.iterdir()}
    lines = migrate(old / MIDDLE, dry_run=True)
    assert_facts(lines[0], old / MIDDLE, "would be migrated", f"schema {SCHEMA}")
    assert {path: path.read_bytes() for path in old.iterdir()} == before


def test_without_a_backup_there_is_none_in_the_end(old: Path, names: Names) -> None:
    said = migrate(old / BORDER, keep_backup=False)[0]
    assert_facts(said, old / BORDER, "migrated", f"schema {SCHEMA}")
    assert ".backup" not in said
    assert not [name for name in names() if name.endswith(".backup")]


def test_a_file_that_is_migrated_late_keeps_its_sequence(old: Path, state: Make) -> None:
    migrate(old / BORDER)
    store = Store(old, "golden")
    store.open()
    store.save("later.pth", state(5, name="golden", saved_at=0.0))
    store.close()
    migrate(old / MIDDLE)
    assert [each.path.name for each in inventory.entries(old, "golden")[0]] == ["later.pth", MIDDLE, BORDER]


def test_a_flipped_bit_in_an_old_file_is_noticed(old: Path, names: Names) -> None:
    before = names()
    content = bytearray((old / BORDER).read_bytes())
    content[content.index(torch.full((3, 2), 4.0).numpy().tobytes())] ^= 4
    (old / BORDER).write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        migrate(old / BORDER)
    assert names() == before


def test_a_damaged_new_file_is_an_error_and_stays(old: Path) -> None:
    migrate(old / BORDER)
    with (old / BORDER).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="is damaged, or"):
        migrate(old / BORDER)


@pytest.mark.parametrize("content", [[1, 2], {"weight": torch.ones(1)}, {"schema": SCHEMA}])
def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, names: Names, content: Any) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"migrated: .*not written"):
        migrate(tmp_path / "a.pth")
    assert names() == ["a.pth"]


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*a\.pth"):
        migrate(tmp_path / "a.pth")


def test_a_run_that_is_training_there_is_not_disturbed(old: Path, opened: Make) -> None:
    before = (old / BORDER).read_bytes()
    opened("golden", folder=old)
    with pytest.raises(ValueError, match="process"):
        migrate(old / BORDER)
    assert (old / BORDER).read_bytes() == before


def test_a_pinned_file_is_not_replaced(old: Path) -> None:
    before = (old / BORDER).read_bytes()
    (old / "golden_epoch_1_iter_4.pinned").touch()
    with pytest.raises(ValueError, match="is pinned"):
        migrate(old / BORDER)
    assert (old / BORDER).read_bytes() == before


def test_a_backup_of_something_else_is_never_overwritten(old: Path) -> None:
    before = (old / BORDER).read_bytes()
    (old / f"{BORDER}.backup").write_text("precious")
    with pytest.raises(ValueError, match="exists with other content"):
        migrate(old / BORDER)
    assert (old / f"{BORDER}.backup").read_text() == "precious"
    assert (old / BORDER).read_bytes() == before


def test_a_save_that_fails_leaves_the_former_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (old / BORDER).read_bytes()
    monkeypatch.setattr(Files, "free", lambda self, folder: 10)
    with pytest.raises(OSError, match="could not be written"):
        migrate(old / BORDER)
    assert (old / BORDER).read_bytes() == before


def test_the_data_of_other_classes_is_read_if_they_are_allowed(old: Path) -> None:
    class Mine:
        def __init__(self) -> None:
            self.value = 3

    saved = torch.load(old / BORDER, weights_only=True)
    saved["mine"] = Mine()
    Mine.__module__, Mine.__qualname__ = "nowhere", "Mine"
    with pytest.MonkeyPatch.context() as patch:
        module = ModuleType("nowhere")
        module.Mine = Mine  # type: ignore[attr-defined]  # as a module of its own would
        patch.setitem(sys.modules, "nowhere", module)
        torch.save(saved, old / BORDER)
    with pytest.raises(ValueError, match=r"objects of nowhere\.Mine: .*--as-data"):
        migrate(old / BORDER)
    migrate(old / BORDER, as_data=["nowhere.Mine"])
    assert reader.load(old / BORDER)["plugins"]["mine"] == {"value": 3}


def killed_at(operation: int, path: Path) -> int:
    """Migrate in a child that dies at an operation on files; return its exit status, 0 if it had fewer."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(act: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any) -> Any:
                nonlocal count
                count += 1
                if count == operation:
                    os._exit(9)
                return act(*arguments)

            return step

        for name in ("create", "sync", "rename", "unlink", "sync_folder"):  # writes go where nobody looks yet
            setattr(Files, name, dying(getattr(Files, name)))
        Path.replace = dying(Path.replace)  # type: ignore[method-assign]
        migrate(path)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_instant_loses_nothing(old: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    operation, former = 0, (old / BORDER).read_bytes()
    while True:
        operation += 1
        folder = tmp_path_factory.mktemp("killed") / "golden"
        shutil.copytree(old, folder)
        status = killed_at(operation, folder / BORDER)
        migrate(folder)
        entries, passed_over = inventory.entries(folder, "golden")
        assert [each.path.name for each in entries] == [MIDDLE, BORDER]
        assert passed_over == []
        assert all(reader.load(each.path)["schema"] == SCHEMA for each in entries)
        assert (folder / f"{BORDER}.backup").read_bytes() == former
        assert not [each.name for each in folder.iterdir() if each.name.startswith(".")]
        if status == 0:
            break
    assert operation > 6


def test_helios_checkpoints_are_ordered_by_their_batches_not_by_the_time_of_a_copy(tmp_path: Path) -> None:
    counters = {
        "current_iteration": 0,
        "global_iteration": 0,
        "global_epoch": 0,
        "validation_cycles": 0,
        "dataset_iter": 0,
    }
    for epoch in (10, 2, 1):
        now = counters | {"global_epoch": epoch, "global_iteration": 4 * epoch, "current_iteration": 4 * epoch}
        torch.save(
            {"training_state": now, "model": {}, "rng": {}}, tmp_path / f"net_epoch_{epoch}_iter_{4 * epoch}.pth"
        )
    migrate(tmp_path)
    entries, _ = inventory.entries(tmp_path, "net")
    assert [each.progress["epoch"] for each in entries] == [10, 2, 1]
    assert entries[0].sequence < 0
