"""Checkpoint files: names, safe reading, finding."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import Supervised
from heliograph.core import storage
from torch import nn


def state(steps: int = 0, batches: int = 0, name: str = "run", **more: Any) -> dict[str, Any]:
    """Return the least that counts as a checkpoint."""
    progress = {"steps": steps, "earlier_batches": batches, "batch": 0}
    return {
        "schema": 1,
        "run_name": name,
        "progress": progress,
        "modules": {"model": {}},
        "optimizer": {},
        "plugins": {},
        "metrics": {"validation/loss": 0.5},
        **more,
    }


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("run", 0, 0), "run_epoch_0_iter_0.pth"),
        (("run", 12, 345, "acc_0.98"), "run_epoch_12_iter_345_acc_0.98.pth"),
        (("a/b c", 1, 2, "x\\y"), "a-b-c_epoch_1_iter_2_x-y.pth"),
        (("epoch_5_iter_6", 1, 2), "epoch_5_iter_6_epoch_1_iter_2.pth"),
        (("...", 1, 2, "--"), "unnamed_epoch_1_iter_2_unnamed.pth"),
    ],
)
def test_checkpoint_name(arguments: Any, name: str) -> None:
    assert storage.checkpoint_name(*arguments) == name


@pytest.mark.parametrize("letter", ["r", "ü", "字", "🙂", "a "])
def test_long_names_fit_a_file_system_with_their_place(tmp_path: Path, letter: str) -> None:
    name = storage.checkpoint_name(letter * 400, 10**6, 10**9, letter * 400)
    storage.save(tmp_path / name, state())

    assert "_epoch_1000000_iter_1000000000_" in name
    assert name.endswith(".pth")
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(
    ("part", "clean"),
    [("a b", "a-b"), ("../x", "x"), ("-rf", "rf"), (".hidden", "hidden"), ("a\0b\n", "a-b"), ("", "unnamed")],
)
def test_clean(part: str, clean: str) -> None:
    assert storage.clean(part) == clean


def test_prepare_folder_makes_it_and_leaves_nothing(tmp_path: Path) -> None:
    storage.prepare_folder(tmp_path / "a" / "b")
    storage.prepare_folder(tmp_path / "a" / "b")

    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_prepare_folder_refuses_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"Nothing can be saved in .*: .*Choose a folder that this user may write"):
            storage.prepare_folder(folder)

    def touch(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", touch)
    with pytest.raises(ValueError, match="Read-only file system"):
        storage.prepare_folder(tmp_path)


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    storage.save(path, state(3, tensor=torch.arange(4)))
    loaded = storage.load(path)

    assert loaded["progress"] == {"steps": 3, "earlier_batches": 0, "batch": 0}
    assert torch.equal(loaded["tensor"], torch.arange(4))
    assert names(tmp_path) == ["a.pth"]


def test_save_over_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    (tmp_path / "a.pth.tmp").write_text("left over by a kill")
    storage.save(path, state(1))
    storage.save(path, state(2))

    assert storage.load(path)["progress"]["steps"] == 2
    assert names(tmp_path) == ["a.pth"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("write failed")])
def test_a_failing_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    path = tmp_path / "a.pth"
    storage.save(path, state(1))

    def save(saved: Any, file: Any) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"a.pth could not be written \(.* MB are free there\): .*untouched") as info:
        storage.save(path, state(2))
    monkeypatch.undo()

    assert info.value.__cause__ is error
    assert storage.load(path)["progress"]["steps"] == 1
    assert names(tmp_path) == ["a.pth"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AttributeError("cannot pickle")])
def test_any_other_end_leaves_unchanged_and_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def save(saved: Any, file: Any) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(type(error)) as info:
        storage.save(tmp_path / "a.pth", state(2))

    assert info.value is error
    assert names(tmp_path) == []


def test_a_save_into_nowhere(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"0\.0 MB are free there"):
        storage.save(tmp_path / "gone" / "a.pth", state())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.pth"
    storage.save(path, state(tensor=torch.rand(1000)))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"a\.pth cannot be read"):
        storage.load(path)


def test_a_file_that_is_no_tensor_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"a\.pth cannot be read"):
        storage.load(path)


class Evil:
    """What a safe load refuses."""


def test_what_is_not_plain_is_never_executed(tmp_path: Path) -> None:
    torch.save(state(evil=Evil()), tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"cannot be read: UnpicklingError"):
        storage.load(tmp_path / "a.pth")


@pytest.mark.parametrize("foreign", [{"state_dict": {}}, [1, 2], torch.ones(1), 7])
def test_a_foreign_file_is_named(tmp_path: Path, foreign: Any) -> None:
    torch.save(foreign, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match=r"foreign\.pth.*no checkpoint of heliograph: it lacks"):
        storage.load(tmp_path / "foreign.pth")


def test_a_newer_schema(tmp_path: Path) -> None:
    storage.save(tmp_path / "new.pth", state(schema=99))
    with pytest.raises(ValueError, match=r"has schema 99, this version reads up to \d+: update heliograph"):
        storage.load(tmp_path / "new.pth")


def test_a_missing_file_lists_its_siblings(tmp_path: Path) -> None:
    storage.save(tmp_path / "run_epoch_1_iter_2.pth", state())
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'run_epoch_1_iter_2.pth'\? Known: run_epoch_1"):
        storage.load(tmp_path / "run_epoch_1_iter_3.pth")
    with pytest.raises(FileNotFoundError, match=r"Known: none"):
        storage.load(tmp_path / "nowhere" / "run.pth")


def test_find_sorts_by_content(tmp_path: Path) -> None:
    storage.save(tmp_path / "z.pth", state(9) | {"saved_at": 1.0})
    storage.save(tmp_path / "a.pth", state(5) | {"saved_at": 3.0})
    storage.save(tmp_path / "b.pth", state(6) | {"saved_at": 3.0})
    storage.save(tmp_path / "c.pth", state(1) | {"saved_at": 4.0})
    (tmp_path / "broken.pth").touch()
    storage.save(tmp_path / "other.pth", state(50, name="other"))
    (tmp_path / "d.pth.tmp").touch()
    found, passed_over = storage.find(tmp_path, "run")

    assert [each.path.name for each in found] == ["c.pth", "b.pth", "a.pth", "z.pth"]
    assert (found[0].saved_at, found[0].steps) == (4.0, 1)
    assert len(passed_over) == 2
    assert "broken.pth cannot be read" in passed_over[0]
    assert "other.pth" in passed_over[1]


def test_find_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert storage.find(tmp_path, "run") == ([], [])
    assert storage.find(tmp_path / "nowhere", "run") == ([], [])


def test_find_survives_a_folder_with_the_suffix(tmp_path: Path) -> None:
    """Somebody's folder is called like a checkpoint; a FileNotFoundError must not end the search."""
    (tmp_path / "folder.pth").mkdir()
    storage.save(tmp_path / "a.pth", state(1))
    found, _ = storage.find(tmp_path, "run")

    assert [each.path.name for each in found] == ["a.pth"]


def test_find_survives_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link.pth").symlink_to(tmp_path / "gone.pth")
    storage.save(tmp_path / "a.pth", state(1))
    found, _ = storage.find(tmp_path, "run")

    assert [each.path.name for each in found] == ["a.pth"]


def test_load_weights(tmp_path: Path) -> None:
    source, target = (Supervised(nn.Linear(4, 2), nn.functional.mse_loss) for _ in range(2))
    storage.save(tmp_path / "a.pth", state(modules={"model": source.model.state_dict()}))
    metrics = storage.load_weights(target, str(tmp_path / "a.pth"))

    assert metrics == {"validation/loss": 0.5}
    assert torch.equal(source.model.weight, target.model.weight)  # type: ignore[arg-type]


def test_load_weights_of_other_modules(tmp_path: Path) -> None:
    storage.save(tmp_path / "a.pth", state(modules={"net": {}}))
    with pytest.raises(ValueError, match=r"holds the modules \['net'\], the task has \['model'\]"):
        storage.load_weights(Supervised(nn.Linear(4, 2), nn.functional.mse_loss), tmp_path / "a.pth")
    with pytest.raises(FileNotFoundError):
        storage.load_weights(Supervised(nn.Linear(4, 2), nn.functional.mse_loss), tmp_path / "b.pth")
