"""After any sequence of runs, kills and faults, every training that had a good checkpoint still has one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
from heliograph.builtin_callbacks.checkpoint import folder
from heliograph.core.checkpoint.storage import Entry, Store, inventory, reader
from heliograph.packages.tests.torture.trainings import REFUSALS, Death, Fault, live, look, make_state, under

Make = Callable[..., Any]
ENOUGH = 240  # sequences; the script does 2,000


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("heliograph")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(4))
def test_no_sequence_costs_a_training_its_last_checkpoint(tmp_path: Path, part: int) -> None:
    first = part * ENOUGH // 4
    ended = sum((live(seed, tmp_path) for seed in range(first, first + ENOUGH // 4)), start=live(first, tmp_path))

    assert min(ended["done"], ended["killed"], ended["OSError"]) >= 5


# What the sequences must find: each of these is wrong in one respect.


def takes_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes under the wanted name, whoever has it, and prunes what it finds there."""

    def claim_name(store: Store, training_id: str, wanted: str, on_existing: str) -> tuple[list[str], list[Entry]]:
        store.write_as(training_id, wanted)
        return [], []

    monkeypatch.setattr("heliograph.builtin_callbacks.checkpoint.folder.claim_name", claim_name)

    def replaces_any(store: Store, path: Path, training: str, unknown: bool) -> tuple[Path, bool, None]:
        path = path.with_stem(f"{path.stem}-2") if store.is_pinned(path) else path
        return path, path.exists(), None

    monkeypatch.setattr(Store, "_free_path", replaces_any)


def owns_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prunes by the name of the run."""
    remove = Store.remove
    monkeypatch.setattr(Store, "own", lambda store, scope="run": store.entries(scope)[0])
    monkeypatch.setattr(
        Store, "remove", lambda store, path, training=None: remove(store, path, inventory.read_manifest(path).training)
    )


def passes_over_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a refusal for damage, and what has no identity for its own."""

    def newest(folder: Any, run_name: str) -> Any:
        entries, passed_over = inventory.entries(folder, run_name)
        for entry in entries:
            try:
                return entry, reader.load(entry.path, files=folder.files), passed_over
            except (OSError, ValueError) as error:
                passed_over.append(str(error))
        return None, None, passed_over

    monkeypatch.setattr(reader, "newest", newest)


def replaces_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what is to be replaced before anything is written."""
    real = folder.claim_name

    def claim_name(store: Store, training_id: str, wanted: str, on_existing: Any) -> tuple[list[str], list[Entry]]:
        notes, replaced = real(store, training_id, wanted, on_existing)
        for each in replaced:
            store.remove(each.path, each.training)
        return notes, []

    monkeypatch.setattr("heliograph.builtin_callbacks.checkpoint.folder.claim_name", claim_name)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "spoil",
    [
        takes_any_name,
        owns_the_folder,
        passes_over_what_is_refused,
        replaces_at_once,
    ],
)
def test_the_sequences_find_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    spoil(monkeypatch)
    with pytest.raises(AssertionError, match=r"lost|starts fresh|skipped"):
        for seed in range(300):
            live(seed, tmp_path)


# One action, and a kill or a refusal at each of its operations.

ONE, OTHER = "1" * 32, "2" * 32


def save_anew(store: Store) -> None:
    store.save("c.pth", make_state("run", ONE, 3))


def save_again(store: Store) -> None:
    store.save("b.pth", make_state("run", ONE, 3))


def remove(store: Store) -> None:
    store.remove(store.folder / "a.pth")


def point(store: Store) -> None:
    store.point("last", store.folder / "b.pth")


def find(store: Store) -> None:
    entry, state, _ = store.newest()
    assert entry is not None
    assert state is not None
    assert (entry.path.name, state["progress"]["steps"]) in [("b.pth", 2), ("b.pth", 3)]


def prepare(folder: Path, *, kill_at: int | None) -> None:
    """Write two checkpoints of a training and one of another, and be killed during a third."""
    store = Store(folder, "run")
    with closing(store):
        store.open()
        for name, training_id, steps in (("other.pth", OTHER, 9), ("a.pth", ONE, 1), ("b.pth", ONE, 2)):
            store.write_as(training_id, "run")
            store.save(name, make_state("run", training_id, steps))
        store.write_as(ONE, "run")
        if kill_at is not None:
            with under(Fault(kill_at, None, kinds=("rename", "unlink"))), suppress(Death):
                save_again(store)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kill_at", [None, 1, 4])
@pytest.mark.parametrize("act", [save_anew, save_again, remove, point, find])
def test_no_operation_that_fails_costs_a_checkpoint(
    tmp_path: Path, act: Callable[[Store], None], kill_at: int | None
) -> None:
    """Opening is under the fault, too, and has to bring in order what a killed save left."""
    prepare(tmp_path / "before", kill_at=kill_at)
    good = look(tmp_path / "before", ["run"])
    assert good.keys() == {ONE, OTHER}
    step = 2 if kill_at is None else 5
    for kind in ("kill", "refuse", "refuse once"):
        for at in range(0, 200, step):
            number = None if kind == "kill" else REFUSALS[at // step % len(REFUSALS)]
            folder, fault = tmp_path / "folder", Fault(at, number, 1 if kind == "refuse once" else 10**6)
            copytree(tmp_path / "before", folder)
            store = Store(folder, "run", ONE)
            with closing(store), suppress(OSError, Death), under(fault):
                store.open()
                act(store)
            now = look(folder, ["run"])
            rmtree(folder)
            assert now.keys() == good.keys(), (kind, number, at)
            if act in (find, point) or (act is remove and fault.count <= at):
                newest = max(now[ONE], key=lambda each: each.order)
                assert newest.path.name == "b.pth"
            if fault.count <= at:
                break
        assert at > 10


# The only one, replaced.


def replaces_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the former one before the new one has its name."""

    def put_in_place(self: Store, entry: Entry) -> None:
        self._files.unlink(entry.path)
        self._files.rename(self._hidden.data, entry.path)

    monkeypatch.setattr(Store, "_put_in_place", put_in_place)


@pytest.mark.parametrize("forgets", [False, True])
def test_the_only_one_is_there_after_a_kill_during_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    if forgets:
        replaces_in_place(monkeypatch)
    found = []
    for at in range(6):
        folder = tmp_path / str(at)
        with closing(Store(folder, "run", ONE)) as store:
            store.open()
            store.save("b.pth", make_state("run", ONE, 2))
            with under(Fault(at, None, kinds=("rename", "unlink"))), suppress(Death):
                save_again(store)
        found.append(ONE in look(folder, ["run"]))

    assert all(found) is not forgets
