"""What an interrupted save or removal left is removed at the next start, and no other file is changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from heliograph.core.checkpoint.storage import Store, reader
from heliograph.core.checkpoint.storage.files import digest_of
from heliograph.tests.core.checkpoint.storage.faulty import Death, Faulty
from heliograph.tests.messages import assert_each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Make = Callable[..., Any]
RUNS = ["run", "other"]


def saved(store: Store, name: str, state: dict[str, Any], *, shards: bool = False) -> Path:
    """Save, with one shard where that is asked for."""
    if not shards:
        return store.save(name, state).path
    folder, steps = store.begin_shards(100), state["progress"]["steps"]
    (folder / "__0_0.distcp").write_bytes(b"a shard of %d" % steps)
    return store.save(name, {**state, "shards": {}}, shards={"__0_0.distcp": digest_of(folder / "__0_0.distcp")}).path


@pytest.mark.parametrize("kind", ["data", "small"])
def test_what_has_a_hidden_name_goes_and_nothing_else(
    tmp_path: Path, opened: Make, state: Make, names: Make, kind: str
) -> None:
    store = opened()
    path = saved(store, "a.pth", state(1))
    store.close()
    (tmp_path / f".run.{kind}.tmp").write_bytes(path.read_bytes())
    (tmp_path / ".run-2.data.tmp").write_text("of another run")
    (tmp_path / "a.00000000.shards").mkdir()
    again = Store(tmp_path, "run")

    assert_each(again.open(), ("interrupted save", f".run.{kind}.tmp"))
    again.close()
    assert names() == [".run-2.data.tmp", "a.00000000.shards", "a.pth"]


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_forged_leftover_removes_no_shards_that_a_checkpoint_names(
    tmp_path: Path, opened: Make, state: Make, is_copy: bool
) -> None:
    store = opened()
    path = saved(store, "a.pth", state(1), shards=True)
    store.close()
    if is_copy:
        (tmp_path / ".run.data.tmp").write_bytes(path.read_bytes())
    else:
        path.rename(tmp_path / ".run.data.tmp")
    opened()

    assert (tmp_path / "a.pth").exists() == is_copy
    assert len([*tmp_path.glob("*.shards")]) == is_copy
    if is_copy:
        reader.verify(path)


STEPS = st.one_of(
    st.tuples(st.just("save"), st.sampled_from(RUNS), st.sampled_from(["a.pth", "a.pth", "a-2.pth"]), st.booleans()),
    st.tuples(st.just("remove"), st.sampled_from(RUNS)),
    st.tuples(st.just("put"), st.sampled_from(["a.pth", "a-2.pth"])),
    st.tuples(st.just("take away")),
)


@given(story=st.lists(st.tuples(STEPS, st.one_of(st.integers(2, 12), st.none())), min_size=2, max_size=8))
@settings(
    deadline=None,
    max_examples=2 * settings().max_examples,  # 50 without --whole, 200 with it
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_runs_that_want_the_same_names_lose_nothing_of_each_other(
    state: Make, story: list[tuple[tuple[Any, ...], int | None]]
) -> None:
    """Each step is killed at an operation, or not; then every run starts in a copy of the folder."""
    with TemporaryDirectory() as made:
        folder, saved_steps, mine = Path(made) / "folder", dict[str, int](), set[Path]()
        folder.mkdir()
        for number, ((kind, *facts), killed_at) in enumerate(story):
            if kind == "put" and not (path := folder / facts[0]).exists():
                path.write_text("somebody's")
                mine.add(path)
            elif kind == "take away":
                while mine:
                    mine.pop().unlink()
            elif kind in ("save", "remove"):
                store = Store(folder, facts[0], files=Faulty(killed_at, Death(), times=float("inf")))
                with suppress(Death):
                    store.open()
                    if kind == "save":
                        saved(store, facts[1], state(number + 1, name=facts[0]), shards=facts[2])
                        saved_steps[facts[0]] = number + 1
                    elif others := store.own()[1:]:
                        store.remove(others[-1].path)
                store.close()
            check(folder, Path(made) / "copy", saved_steps, {path.name for path in mine})


def check(folder: Path, copy: Path, saved_steps: dict[str, int], mine: set[str]) -> None:
    """Check in a copy that a start finds the newest of each run whole, and changes no file of somebody else's."""
    copytree(folder, copy)
    named = set()
    for run in RUNS:
        store = Store(copy, run)
        store.open()
        entries = [reader.verify(each.path) for each in store.own() if each.family == run]
        store.close()
        assert max((each.progress["steps"] for each in entries), default=0) >= saved_steps.get(run, 0)
        named |= {each.shards[0] for each in entries if each.shards}
    assert {name for name in mine if (copy / name).read_text() == "somebody's"} == mine
    assert not [*copy.glob(".*")]
    assert {path.name for path in copy.glob("*.shards")} == named
    rmtree(copy)
