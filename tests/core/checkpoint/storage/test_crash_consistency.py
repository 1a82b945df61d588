"""Power cuts: after each of them, the newest checkpoint that had been saved is found, or a newer whole one.

The operations of real saves are recorded. For every prefix of them, every state that a disk may then hold is made: of
what was written to a file since its last sync, any part is lost, cut short or reads as zeros; of the names given since
the folder's last sync, a later part is lost (as a journal does it), or any (as nothing forbids). A real store is opened
on each such state. The check is checked itself: protocols that are wrong in one respect each must be found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from heliograph.core.checkpoint.storage import Files, Store

Make = Callable[..., Any]
Model = Literal["prefix", "subset"]
Names = dict[str, int | None]  # which file a name gets; None: none any more
Disk = dict[str, bytes]
Known = dict[frozenset[tuple[str, bytes]], tuple[int, list[str]]]
Write = bytes | None  # appended to a file; None empties it
PIECES = 3  # as many writes does the model see per file and sync: its states are exponential in them


@dataclass
class Disc:
    """A disk as it may be after a power cut: what is durable, and what has been asked for since."""

    durable: dict[int, bytes] = field(default_factory=dict)
    written: dict[int, list[Write]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    renamed: list[Names] = field(default_factory=list)

    def states(self, model: Model) -> Iterator[Disk]:
        """Yield every state, the worst first."""
        changed = [number for number in self.written if self.written[number]]
        for names in self.namings(model):
            alive = sorted(set(names.values()))
            for contents in product(
                *(self._contents(each) if each in changed else [self.durable[each]] for each in alive)
            ):
                content = dict(zip(alive, contents, strict=True))
                yield {name: content[number] for name, number in names.items()}

    def namings(self, model: Model) -> Iterator[dict[str, int]]:
        for kept in parts(self.renamed, model):
            names: Names = dict(self.names)
            for change in kept:
                names |= change
            yield {name: number for name, number in names.items() if number is not None}

    def _contents(self, number: int) -> Iterator[bytes]:
        """Yield what a file may hold: the writes that are missing before others read as zeros."""
        old, writes = self.durable[number], self.written[number]
        for kept in parts(range(len(writes)), "subset"):
            yield applied(old, writes, kept)
            if kept and writes[kept[-1]] is not None:
                yield applied(old, writes, kept, cut=True)
        yield bytes(len(applied(old, writes, range(len(writes)))))


def applied(old: bytes, writes: Sequence[Write], kept: Sequence[int], *, cut: bool = False) -> bytes:
    """Return a file after some of the writes to it, the last one of them by half only if it is cut."""
    content, place = old, len(old)
    for index, piece in enumerate(writes):
        size = 0 if piece is None else len(piece)
        part = b"" if piece is None else piece[: size // 2] if cut and index == kept[-1] else piece
        if piece is None:
            content, place = (b"" if index in kept else content), 0
        elif index in kept:
            content = content[:place].ljust(place, b"\0") + part + content[place + len(part) :]
        place += size
    return content


def parts(whole: Sequence[Any], model: Model) -> Iterator[Sequence[Any]]:
    """Yield the beginnings of a sequence, or all its subsequences; the shortest first."""
    for size in range(len(whole) + 1):
        yield from combinations(whole, size) if model == "subset" else [whole[:size]]


class Recorder(Files):
    """Does everything, and writes down what a disk would have to do for it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, Any]] = []
        self._numbers: dict[str, int] = {}  # of the files that have a name now
        self._open: dict[int, int] = {}
        self._count = 0

    def returned(self, steps: int) -> None:
        """Note that a save has returned, and so may be relied upon."""
        self.log.append(("returned", steps, None))

    def create(self, path: Path) -> FileIO:
        file = super().create(path)
        if path.name in self._numbers:
            self.log.append(("write", self._numbers[path.name], None))
        else:
            self._count += 1
            self._numbers[path.name] = self._count
            self.log.append(("name", self._count, {path.name: self._count}))
        self._open[id(file)] = self._numbers[path.name]
        return file

    def write(self, file: FileIO, content: bytes | memoryview) -> None:
        super().write(file, content)
        self.log.append(("write", self._open[id(file)], bytes(content)))

    def sync(self, file: FileIO) -> None:
        self.log.append(("sync", self._open[id(file)], None))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        number = self._numbers[new.name] = self._numbers.pop(old.name)
        self.log.append(("name", number, {old.name: None, new.name: number}))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self._numbers.pop(path.name, None) is not None:
            self.log.append(("name", 0, {path.name: None}))

    def sync_folder(self, folder: Path) -> None:
        self.log.append(("sync_folder", None, None))


def fewer_writes(log: list[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield a log in which each run of writes to one file is written in a few pieces."""
    index = 0
    while index < len(log):
        kind, number, piece = log[index]
        end = index + 1
        while kind == "write" and piece is not None and end < len(log) and log[end][:2] == ("write", number):
            end += 1
        if end > index + 1:
            content = b"".join(each[2] for each in log[index:end])
            size = -(-len(content) // PIECES)
            yield from (("write", number, content[begin : begin + size]) for begin in range(0, len(content), size))
        else:
            yield log[index]
        index = end


def cuts(log: list[tuple[str, Any, Any]], model: Model) -> Iterator[tuple[int, Disk]]:
    """Yield, for a power cut after each operation, what must be found at least, and each state of the disk."""
    disc, promised = Disc(), 0
    for kind, subject, detail in fewer_writes(log):
        if kind == "name":
            disc.renamed.append(detail)
            disc.durable.setdefault(subject, b"")
            disc.written.setdefault(subject, [])
        elif kind == "write":
            disc.written[subject].append(detail)
        elif kind == "sync":
            writes = disc.written[subject]
            disc.durable[subject] = applied(disc.durable[subject], writes, range(len(writes)))
            disc.written[subject] = []
        elif kind == "sync_folder":
            *_, disc.names = disc.namings("prefix")
            disc.renamed = []
        else:
            promised = subject
        for state in disc.states(model):
            yield promised, state


class Quick(Files):
    """Recovers without waiting for the real disk."""

    def sync(self, file: FileIO) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...


def recovered(folder: Path, disk: Disk) -> tuple[int, list[str]]:
    """Put a state on a real disk and open a store there: return the steps that it finds, and what lies there then.

    The steps are 0 where nothing is found, and -1 where what is found is wrong.
    """
    for path in folder.iterdir():
        path.unlink()
    for name, content in disk.items():
        (folder / name).write_bytes(content)
    store = Store(folder, "run", files=Quick())
    store.open()
    entry, state, *_ = store.newest()
    store.close()
    left = [path.name for path in folder.iterdir()]
    if entry is None or state is None:
        return 0, left
    steps: int = state["progress"]["steps"]
    whole = torch.equal(state["modules"]["model"]["weight"], torch.full((50,), float(steps)))
    return steps if whole and entry.progress["steps"] == steps else -1, left


def faults(log: list[tuple[str, Any, Any]], folder: Path, model: Model, known: Known | None = None) -> Iterator[str]:
    """Yield a line for each power cut that costs a checkpoint, or leaves something lying about.

    Args:
        log: what was recorded.
        folder: where to recover.
        model: which names may be lost.
        known: gets the outcome for each state, which is found once.
    """
    folder.mkdir(exist_ok=True)
    known = {} if known is None else known
    for promised, disk in cuts(log, model):
        key = frozenset(disk.items())
        if key not in known:
            known[key] = recovered(folder, disk)
        steps, left = known[key]
        if steps < promised:
            yield f"{promised} had been saved, {steps} was found in {sorted(disk)}"
        if orphans(left, model):
            yield f"{orphans(left, model)} is left of {sorted(disk)}"


def orphans(left: list[str], model: Model) -> list[str]:
    """Return what no checkpoint needs."""
    return [name for name in left if name.startswith(".")]


def life(folder: Path, state: Make, files: Recorder, *, saves: int = 5) -> list[tuple[str, Any, Any]]:
    """Return the log of a store's life: saves, pointers, removals, the same name again."""
    store = Store(folder, "run", files=files)
    store.open()

    def save(name: str, steps: int) -> Path:
        path = store.save(name, state(steps)).path
        files.returned(steps)
        store.point("last", path)
        return path

    first = save("a.pth", 1)
    if saves > 1:
        second = save("b.pth", 2)
        store.remove(first)
    if saves > 2:
        save("b.pth", 3)
    if saves > 3:
        store.point("best", second)
        save("a.pth", 4)
        store.remove(second)
        save("a.pth", 5)
    store.close()
    return files.log


@pytest.mark.parametrize("model", ["prefix", pytest.param("subset", marks=pytest.mark.whole)])
def test_no_power_cut_costs_a_checkpoint(tmp_path: Path, state: Make, model: Model) -> None:
    log = life(tmp_path / "written", state, Recorder())
    states = {repr(sorted(disk.items())) for _, disk in cuts(log, model)}

    assert list(faults(log, tmp_path / "recovered", model)) == []

    assert len(states) > (100 if model == "prefix" else 400)
    assert [subject for kind, subject, _ in log if kind == "returned"] == [1, 2, 3, 4, 5]


class NoSync(Recorder):
    def sync(self, file: FileIO) -> None: ...


class NoFolderSync(Recorder):
    def sync_folder(self, folder: Path) -> None: ...


class PruningFirst(Recorder):
    """Makes room before it writes."""

    def create(self, path: Path) -> FileIO:
        self.prune(path.parent)
        return super().create(path)

    def prune(self, folder: Path) -> None:
        self.unlink(folder / "a.pth")


class EarlyPruning(PruningFirst):
    """Removes the former checkpoint when the new one has its names, which are not yet durable."""

    def create(self, path: Path) -> FileIO:
        return Recorder.create(self, path)

    def sync_folder(self, folder: Path) -> None:
        if (folder / "b.pth").exists():
            self.prune(folder)
        super().sync_folder(folder)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("mutant", "model"),
    [
        *product([NoSync, NoFolderSync, PruningFirst], ["prefix", "subset"]),
        (EarlyPruning, "subset"),  # where names become durable in their order, it is not too early
    ],
)
def test_the_check_finds_what_is_left_out(tmp_path: Path, state: Make, model: Model, mutant: type[Recorder]) -> None:
    log = life(tmp_path / "written", state, mutant(), saves=2)

    assert any("saved, 0" in line for line in faults(log, tmp_path / "recovered", model))


def write(files: Recorder, path: Path, content: bytes) -> None:
    with files.create(path) as file:
        files.write(file, content)
        files.sync(file)


def in_place(files: Recorder, path: Path, content: bytes) -> None:
    """Write over the former one."""
    write(files, path, content)
    files.sync_folder(path.parent)


def unsynced(files: Recorder, path: Path, content: bytes) -> None:
    """Give the file its name before its content is durable."""
    aside = path.with_name(".run.data.tmp")
    with files.create(aside) as file:
        files.write(file, content)
        files.rename(aside, path)
        files.sync_folder(path.parent)
        files.sync(file)


@pytest.mark.sample(1)
@pytest.mark.parametrize("protocol", [in_place, unsynced])
@pytest.mark.parametrize("model", ["prefix", "subset"])
def test_the_check_finds_a_wrong_order(
    tmp_path: Path, state: Make, model: Model, protocol: Callable[[Recorder, Path, bytes], None]
) -> None:
    files, source = Recorder(), Store(tmp_path / "source", "run")
    source.open()
    (tmp_path / "written").mkdir()
    for steps in (1, 2):
        protocol(files, tmp_path / "written" / "a.pth", source.save("a.pth", state(steps)).path.read_bytes())
        files.returned(steps)
    source.close()

    assert any("1 had been saved," in line for line in faults(files.log, tmp_path / "recovered", model))
