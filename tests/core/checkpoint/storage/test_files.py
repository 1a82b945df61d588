"""Names of checkpoint files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import Store
from heliograph.core.checkpoint.storage.files import Hidden, check_name, run_part


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("run", 0, 0), "run_epoch_0_iter_0.pth"),
        (("run", 12, 345, "acc_0.98"), "run_epoch_12_iter_345_acc_0.98.pth"),
        (("a/b c", 1, 2, "x\\y"), "a-b-c-0af99a60_epoch_1_iter_2_x-y.pth"),
        (("epoch_5_iter_6", 1, 2), "epoch_5_iter_6_epoch_1_iter_2.pth"),
        (("...", 1, 2, "--"), "unnamed-ab5df625_epoch_1_iter_2_unnamed.pth"),
    ],
)
def test_checkpoint_name(arguments: Any, name: str) -> None:
    assert storage.checkpoint_name(*arguments) == name


@pytest.mark.parametrize("letter", ["r", "ü", "字", "🙂", "a "])
def test_long_names_fit_a_file_system_with_their_place(
    tmp_path: Path, opened: Callable[..., Store], state: Callable[..., Any], letter: str
) -> None:
    run = letter * 400
    name = storage.checkpoint_name(run, 10**6, 10**9, letter * 400)
    store = opened(run)
    entry = store.save(name, state(name=run))
    store.pin(entry.path)
    store.point("last", entry.path)

    assert "_epoch_1000000_iter_1000000000_" in name
    assert entry.path == tmp_path / name
    assert store.newest()[0] == entry


@pytest.mark.parametrize(
    ("part", "clean"),
    [("a b", "a-b"), ("../x", "x"), ("-rf", "rf"), (".hidden", "hidden"), ("a\0b\n", "a-b"), ("", "unnamed")],
)
def test_clean(part: str, clean: str) -> None:
    assert storage.clean(part) == clean


@pytest.mark.parametrize("name", ["a b", "r" * 91, "a/b", " ", "über 1", "🙂" * 30])
def test_a_name_that_cleaning_changes_gets_a_digest(name: str) -> None:
    part = run_part(name)

    assert re.fullmatch(r".+-[0-9a-f]{8}", part)
    assert len(part.encode()) <= 90
    assert run_part(part) == part
    assert part.startswith(storage.clean(name)[:10])
    assert len({run_part(each) for each in (name, storage.clean(name), f"{name}x", f"{name} ")}) == 4


@pytest.mark.parametrize("name", ["run", "run-2", "r" * 90, "über", "a.b+c=d"])
def test_a_name_that_cleaning_leaves_is_kept(name: str) -> None:
    assert run_part(name) == name


@pytest.mark.parametrize("name", ["a.pt", "a", "", ".a.pth", "../a.pth", "b/a.pth", "/a.pth", ".."])
def test_names_that_a_checkpoint_cannot_have(name: str) -> None:
    with pytest.raises(ValueError, match=r"bare, visible file name that ends in \.pth, got '"):
        check_name(name)
    assert check_name("a.pth") == "a.pth"


def test_files_of_different_runs_never_meet(tmp_path: Path) -> None:
    hidden = [Hidden.of(tmp_path, name) for name in ("a", "a.data", "a.data.tmp", "b")]
    paths = [getattr(each, slot) for each in hidden for slot in Hidden.__slots__]

    assert len(set(paths)) == 4 * 9
    assert {path.name[0] for path in paths} == {"."}
