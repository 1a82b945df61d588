"""Recovery: an interrupted save or removal is finished or undone, and no other file is changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.state.schema import SCHEMA
from heliograph.core.checkpoint.storage import Store, manifest
from heliograph.core.checkpoint.storage import store as stores
from heliograph.core.checkpoint.storage.files import digest_of
from heliograph.core.checkpoint.storage.manifest import SchemaError
from heliograph.tests.core.checkpoint.storage.faulty import Death, Faulty
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

Make = Callable[..., Any]
Contents = dict[str, bytes]
ONE = "1" * 32
RUNS = ["run", "other"]


def saved(store: Store, name: str, state: dict[str, Any], *, shards: bool = False) -> Path:
    """Save, with one shard where that is asked for."""
    if not shards:
        return store.save(name, state).path
    folder, steps = store.begin_shards(100), state["progress"]["steps"]
    (folder / "__0_0.distcp").write_bytes(b"a shard of %d" % steps)
    return store.save(name, {**state, "shards": {}}, shards={"__0_0.distcp": digest_of(folder / "__0_0.distcp")}).path


def put_aside(path: Path, kind: str = "") -> None:
    """Leave a checkpoint as a kill leaves one that was complete, or as one that was about to be replaced."""
    for suffix, name in ((".pth", "data"), (".json", "manifest"), (".shards", "shards")):
        if path.with_suffix(suffix).exists():
            path.with_suffix(suffix).rename(path.with_name(f".run.{kind}{name}.tmp"))


def contents(folder: Path, pattern: str = "*") -> Contents:
    """Return every file of such a name, and what is in folders of such a name."""
    found = [each for path in folder.glob(pattern) for each in (path, *path.glob("*"))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found if path.is_file()}


def steps(folder: Path) -> dict[str, float]:
    """Return the steps of all checkpoints, each of which must be whole, by the name of the file."""
    return {path.name: storage.verify(path).progress["steps"] for path in sorted(folder.glob("*.pth"))}


@pytest.mark.parametrize("former", [False, True])
def test_what_a_killed_save_left_does_not_displace_another_training(
    tmp_path: Path, opened: Make, state: Make, names: Make, former: bool
) -> None:
    """Its name was given away meanwhile, to a run of another name: it takes a number, and nothing is lost."""
    store = opened()
    path = store.save("a.pth", state(1)).path
    store.close()
    aside = "former-" if former else ""
    path.rename(tmp_path / f".run.{aside}data.tmp")
    path.with_suffix(".json").rename(tmp_path / f".run.{aside}manifest.tmp")
    theirs = opened("other").save("a.pth", state(2, name="other"))
    store = opened()

    assert storage.verify(theirs.path) == theirs
    assert [(each.path.name, each.progress["steps"]) for each in store.entries()[0]] == [("a-2.pth", 1)]
    assert storage.verify(tmp_path / "a-2.pth").progress["steps"] == 1
    assert not [name for name in names() if name.endswith(".tmp")]


@pytest.mark.parametrize("there", ["a-2.shards", "a-2.pth", "a-2.json"])
def test_it_takes_a_number_that_nothing_else_has(
    tmp_path: Path, opened: Make, state: Make, names: Make, there: str
) -> None:
    """Neither somebody's file or folder nor another checkpoint of its own training is written over."""
    store = opened()
    path = store.save("a.pth", state(1)).path
    if there == "a-2.json":
        store.save("a-2.pth", state(5))
    store.close()
    path.rename(tmp_path / ".run.data.tmp")
    path.with_suffix(".json").rename(tmp_path / ".run.manifest.tmp")
    opened("other").save("a.pth", state(2, name="other"))
    if there == "a-2.shards":
        (tmp_path / there).mkdir()
    elif there == "a-2.pth":
        (tmp_path / there).write_text("somebody's")
    before = {each.name: each.read_bytes() for each in tmp_path.glob("a-2.*") if each.is_file()}

    store = Store(tmp_path, "run")
    notes = store.open()
    store.close()

    assert notes == [f"The save of {tmp_path / 'a-3.pth'}, which was interrupted, is finished."]
    assert storage.verify(tmp_path / "a-3.pth").progress["steps"] == 1
    assert there in names()
    assert {each.name: each.read_bytes() for each in tmp_path.glob("a-2.*") if each.is_file()} == before


def test_a_second_kill_while_it_takes_a_number_loses_nothing(
    tmp_path: Path, opened: Make, state: Make, names: Make
) -> None:
    store = opened()
    path = store.save("a.pth", state(1)).path
    store.close()
    path.rename(tmp_path / "a-2.pth")  # where the first one had put it
    path.with_suffix(".json").rename(tmp_path / ".run.manifest.tmp")
    opened("other").save("a.pth", state(2, name="other"))
    store = opened()

    assert [each.path.name for each in store.entries()[0]] == ["a-2.pth"]
    assert storage.verify(tmp_path / "a-2.pth").progress["steps"] == 1
    assert not [name for name in names() if name.endswith(".tmp")]


def take_file(folder: Path) -> None:
    (folder / "a.pth").write_text("somebody's")


def take_manifest(folder: Path) -> None:
    (folder / "a.json").write_text('{"mine": 1}')


def take_manifest_folder(folder: Path) -> None:
    (folder / "a.json").mkdir()
    (folder / "a.json" / "mine").write_text("somebody's")


def take_link(folder: Path) -> None:
    (folder / "a.json").symlink_to(folder / "nowhere")


def take_shards(folder: Path) -> None:
    (folder / "a.shards").mkdir()
    (folder / "a.shards" / "mine").write_text("somebody's")


@pytest.mark.parametrize("take", [take_file, take_manifest, take_manifest_folder, take_link, take_shards])
def test_another_file_of_its_name_stays(
    tmp_path: Path, opened: Make, state: Make, take: Callable[[Path], None]
) -> None:
    store = opened()
    put_aside(saved(store, "a.pth", state(1), shards=True))
    store.close()
    take(tmp_path)
    before = contents(tmp_path, "a.*")
    opened()

    assert storage.verify(tmp_path / "a-2.pth").progress["steps"] == 1
    assert contents(tmp_path, "a.*") == before
    assert (tmp_path / "a.json").is_symlink() == (take is take_link)


def test_a_newer_version_s_checkpoint_that_took_its_name_stays(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    put_aside(saved(store, "a.pth", state(1)))
    store.close()
    with monkeypatch.context() as newer:
        newer.setattr(stores, "SCHEMA", SCHEMA + 1)
        opened("other").save("a.pth", state(2, name="other", schema=SCHEMA + 1))
    before = contents(tmp_path, "a.*")
    opened()

    assert storage.verify(tmp_path / "a-2.pth").progress["steps"] == 1
    assert contents(tmp_path, "a.*") == before


def test_two_that_were_killed_in_a_save_of_the_same_name_both_have_it(
    tmp_path: Path, opened: Make, state: Make
) -> None:
    store = opened()
    put_aside(saved(store, "a.pth", state(1)))
    store.close()
    other = opened("other")
    saved(other, "a.pth", state(2, name="other")).with_suffix(".json").rename(tmp_path / ".other.manifest.tmp")
    other.close()
    opened()
    opened("other")

    assert steps(tmp_path) == {"a.pth": 2, "a-2.pth": 1}


def test_it_waits_for_who_writes_under_the_name(tmp_path: Path, opened: Make, state: Make) -> None:
    """The name is that of another training, whose process might be giving it to a file at this instant."""
    store = opened()
    store.write_as(ONE, "run-2")
    put_aside(saved(store, "run-2.pth", state(1, training_id=ONE)))
    store.close()
    writer = opened("run-2")
    before = contents(tmp_path, ".run.*.tmp")
    with pytest.raises(ValueError, match=r"The checkpoints of run 'run-2' in .* are written by process \d+"):
        opened()

    assert contents(tmp_path, ".run.*.tmp") == before
    assert len(before) == 2
    writer.save("run-2.pth", state(2, name="run-2"))
    writer.close()
    opened()
    assert steps(tmp_path) == {"run-2.pth": 2, "run-2-2.pth": 1}


@pytest.mark.parametrize("is_replacing", [False, True])
def test_what_a_newer_version_was_writing_is_left_to_it(
    tmp_path: Path, opened: Make, state: Make, monkeypatch: pytest.MonkeyPatch, is_replacing: bool
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(stores, "SCHEMA", SCHEMA + 1)
        newer.setattr(manifest, "SCHEMA", SCHEMA + 1)
        store = opened()
        paths = [saved(store, name, state(1, schema=SCHEMA + 1)) for name in ("a.pth", "b.pth")]
        put_aside(paths[0], "former-")
        if is_replacing:
            put_aside(paths[1])
        store.close()
    before = contents(tmp_path, ".run.*.tmp")
    with pytest.raises(SchemaError, match=r"has schema \d+, this version reads \d+: update heliograph"):
        opened()

    assert contents(tmp_path, ".run.*.tmp") == before
    assert len(before) == (4 if is_replacing else 2)


@pytest.mark.parametrize("kind", ["", "former-"])
@pytest.mark.parametrize("is_freed", [True, False])
def test_a_kill_at_any_operation_while_it_takes_a_number_loses_nothing(
    tmp_path: Path, opened: Make, state: Make, kind: str, is_freed: bool
) -> None:
    """Nor where the other training's checkpoint has been removed when the next start sees what is left."""
    for trial in range(40):
        folder, files = tmp_path / str(trial), Faulty(error=Death(), times=float("inf"))
        store = opened(folder=folder)
        put_aside(saved(store, "a.pth", state(1), shards=True), kind)
        store.close()
        other = opened("other", folder=folder)
        path = saved(other, "a.pth", state(2, name="other"))
        files.first = trial
        store = Store(folder, "run", files=files)
        with suppress(Death):
            store.open()
            store.close()
        if is_freed:
            other.remove(path)
        other.close()
        opened(folder=folder).close()
        assert sorted(steps(folder).values()) == ([1] if is_freed else [1, 2])
        assert not [*folder.glob(".*.tmp")]
        if files.count <= trial:
            break
    assert trial > 3


def test_a_removal_leaves_the_shards_of_who_was_given_the_name(tmp_path: Path, opened: Make, state: Make) -> None:
    """A killed save of another run has put its shards in place, and not yet its data."""
    store = opened()
    path = saved(store, "a.pth", state(1), shards=True)
    store.close()
    path.with_suffix(".json").rename(tmp_path / ".run.doomed")
    path.unlink()
    theirs = path.with_suffix(".shards") / "__0_0.distcp"
    theirs.write_text("of another")
    opened()

    assert theirs.read_text() == "of another"
    assert not (tmp_path / ".run.doomed").exists()


def test_a_removal_that_was_killed_among_the_shards_is_finished(tmp_path: Path, opened: Make, state: Make) -> None:
    store = opened()
    path = saved(store, "a.pth", state(1), shards=True)
    store.close()
    path.with_suffix(".json").rename(tmp_path / ".run.doomed")
    path.unlink()
    (path.with_suffix(".shards") / "__0_0.distcp").unlink()
    opened()

    assert not path.with_suffix(".shards").exists()


STEPS = st.one_of(
    st.tuples(st.just("save"), st.sampled_from(RUNS), st.sampled_from(["a.pth", "a.pth", "a-2.pth"]), st.booleans()),
    st.tuples(st.just("remove"), st.sampled_from(RUNS)),
    st.tuples(st.just("put"), st.sampled_from(["a.pth", "a.json", "a-2.pth"])),
    st.tuples(st.just("take away")),
)


@pytest.mark.whole
@example(
    story=[  # shards that were not put aside yet follow the data to another name
        (("put", "a.pth"), None),
        (("save", "run", "a.pth", True), None),
        (("save", "run", "a.pth", False), 7),
        (("put", "a-2.pth"), None),
        (("remove", "run"), 2),
    ]
)
@given(story=st.lists(st.tuples(STEPS, st.one_of(st.integers(2, 12), st.none())), min_size=2, max_size=8))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    for run in RUNS:
        store = Store(copy, run)
        store.open()
        entries = [storage.verify(each.path) for each in store.own() if each.family == run]
        store.close()
        assert max((each.progress["steps"] for each in entries), default=0) >= saved_steps.get(run, 0)
    assert {name for name in mine if (copy / name).read_text() == "somebody's"} == mine
    assert not [*copy.glob(".*")]
    rmtree(copy)
