"""Random sequences of runs, kills and faults over one folder: every training that had a good checkpoint still has one.

Run `python packages/tests/torture/trainings.py --count 2000 --seed 0`. Real `Checkpoint` plugins write tiny states;
a kill or a refusal (EIO, ENOSPC, EACCES, ESTALE) comes at any operation on files, reads included. Between the runs
people and disks do what they do: files go, are damaged, copied, pinned, pruned. After each step a copy of the folder is
opened as the next run would, and looked into. Exit status 1, with the seed and the steps, where the law does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from itertools import count
from pathlib import Path
from random import Random
from shutil import copytree, rmtree
from tempfile import mkdtemp
from time import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from heliograph import Checkpoint, Resume
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Files, Store
from heliograph.core.checkpoint.storage.files import SYSTEM
from heliograph.core.checkpoint.storage.inventory import Manifests
from heliograph.core.checkpoint.storage.manifest import Entry
from heliograph.core.checkpoint.storage.reader import load
from heliograph.events import CheckpointLoaded, RunClosed, SavePoint, TrainStart
from heliograph_cli.checkpoint_command import checkpoint

NAMES = ("run", "run", "run", "run-2", "a b", "a-b")
REFUSALS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE)
WRITES = ("create", "write", "sync", "rename", "unlink", "sync_folder")
MOVES = ("rename", "unlink")
LOADS = ("try_open", "data")
READS = ("try_status", "try_open", "try_range", "try_names")


class Death(BaseException):
    """The process is gone: nothing that it would still do happens."""


@dataclass
class Fault:
    """What comes at an operation on files.

    Attributes:
        at: its number, from 0; negative never.
        number: the error's; None is a kill.
        times: how many operations in a row are refused.
        kinds: which are counted; all by default.
    """

    at: int = -1
    number: int | None = None
    times: int = 1
    kinds: tuple[str, ...] = ()
    count: int = 0
    is_dead: bool = False

    def step(self, kind: str, path: object) -> None:
        """Count an operation, and refuse it where its time has come."""
        if self.is_dead:
            raise Death
        if self.kinds and kind not in self.kinds:
            return
        self.count += 1
        if 0 <= self.at < self.count <= self.at + self.times:
            if self.number is None:
                self.is_dead = True
                raise Death
            raise OSError(self.number, os.strerror(self.number), str(path))


class Faulty(FileIO):
    """A file that cannot be read when its time has come."""

    fault: Fault

    def readinto(self, buffer: Any, /) -> int | None:
        self.fault.step("data", self.name)
        return super().readinto(buffer)


@contextmanager
def under(fault: Fault) -> Iterator[None]:
    """Let every operation on files meet a fault; no disk is waited for."""

    writes = count()

    def guarded(name: str) -> Callable[..., Any]:
        def operate(*arguments: Any) -> Any:
            try:
                if name != "write" or next(writes) % 10 == 0:  # torch writes dozens of pieces
                    fault.step(name, arguments[0])
            except BaseException:
                if name == "write":  # half of it is there
                    Files.write(SYSTEM, arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise
            return None if name.startswith("sync") else getattr(Files, name)(SYSTEM, *arguments)

        return operate

    def opened(path: Path) -> BufferedReader:
        fault.step("try_open", path)
        with Files.try_open(SYSTEM, path) as file:
            raw = Faulty(os.dup(file.fileno()))
        raw.fault = fault
        return BufferedReader(raw)

    doubles = {name: guarded(name) for name in (*WRITES, *READS)}
    doubles |= {"try_open": opened, "pause": lambda seconds: None}
    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(patch.object(SYSTEM, name, double))
        try:
            yield
        except SystemError:  # what torch's reader makes of a Death
            if fault.is_dead:
                raise Death from None
            raise


class Writer:
    """Writes a tiny state at once."""

    is_idle = True

    def begin(self, run: Any) -> None: ...

    def hold(self, run: Any) -> dict[str, Any]:
        return make_state(run.name, run.checkpoints.training_id, run.progress.steps)

    def do(self, run: Any, work: Callable[[], Any], then: Callable[[Any], object], *, is_save: bool = True) -> None:
        then(work())

    def drain(self) -> None: ...

    def end(self, run: Any) -> None: ...

    def close(self) -> None: ...


def make_state(name: str, training_id: str, steps: int) -> dict[str, Any]:
    """Return the least that counts as a state."""
    parts = ("control", "data", "optimizers", "schedulers", "plugins", "metrics")
    state: dict[str, Any] = {"schema": SCHEMA, "run_name": name, "ranks": [{}], "world": {"size": 1}}
    state |= {part: {} for part in parts} | {"progress": {"steps": steps}, "saved_at": time()}
    return state | {"modules": {"model": {"weight": torch.full((3,), float(steps))}}, "training_id": training_id}


@dataclass
class Engine:
    """One rank on no hardware."""

    world_size: int = 1
    rank: int = 0
    is_main: bool = True
    watch: None = None

    def refusing(self, what: str, where: str) -> AbstractContextManager[None]:
        return nullcontext()


class FakeRun(SimpleNamespace):
    """As much of a run as `Checkpoint` needs."""

    def resume(self, state: dict[str, Any], path: Path) -> None:
        self.saved, self.checkpoints.resumed_from, self.checkpoints.is_resuming = state, path, True

    def note(self, text: str) -> None:
        self.report.notes.append(text)

    def warn(self, text: str) -> None:
        self.report.notes.append(text)

    def emit(self, event: object) -> None: ...


class FakePlugins(list[Any]):
    """As many plugins as a `Checkpoint` alone looks at: none."""

    def names(self) -> list[str]:
        return []


def make_run(name: str, random: Random) -> FakeRun:
    progress = SimpleNamespace(epoch=0, steps=0, skipped_steps=0, batches=0)
    training = f"{random.getrandbits(128):032x}"
    unset = dict.fromkeys(("source", "resumed_from", "resumed_at", "last", "best", "batch_note"))
    run = FakeRun(
        name=name,
        engine=Engine(),
        saved=None,
        report=SimpleNamespace(is_replay=False, notes=[], has_left_group=False),
        checkpoints=SimpleNamespace(training_id=training, is_resuming=False, **unset),
        data=SimpleNamespace(validation_sets=("",)),
        metrics={"validation/loss": 1.0},
    )
    run.progress, run.task, run.origin = progress, None, progress
    run.bus = SimpleNamespace(
        on=lambda *arguments, **options: SimpleNamespace(remove=lambda: None),
        signal=lambda event: SimpleNamespace(listeners=lambda: iter(())),
    )
    run.plugins = FakePlugins()
    run.control = SimpleNamespace(history=[])
    return run


def leave(checkpoint: Checkpoint) -> None:
    """End the process: it holds no lock any more, and the files of locks stay, as where it was killed."""
    if (store := checkpoint._files._store) is not None:
        store._lock.release()


Good = dict[str, list[Entry]]  # the whole checkpoints of each training


def look(folder: Path, names: Collection[str] = NAMES) -> Good:
    """Return what later runs of these names find: in a copy of the folder, which is opened as each of them would."""
    copy = folder.with_name(f"{folder.name}-seen")
    rmtree(copy, ignore_errors=True)
    copytree(folder, copy)
    found: Good = {}
    for name in sorted(set(names)):
        store = Store(copy, name)
        with contextlib.closing(store):
            store.open()
    for each in Manifests(copy).look():
        if each.entry is not None:
            with suppress(ValueError):
                state = load(each.entry.path)
                assert state["training_id"] == each.entry.training, "a manifest is of another training than its data"
                found.setdefault(each.entry.training, []).append(each.entry)
    return found


@dataclass
class Folder:
    """A folder, what was done to it, and what is good in it."""

    path: Path
    random: Random
    good: Good = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def live(self) -> None:
        """Do a few random things; AssertionError where the law does not hold."""
        for _ in range(self.random.randint(3, 8)):
            others = (self.damage, self.remove, self.pin, self.copy, self.prune)
            act = self.random.choice(others) if self.random.random() < 0.25 else self.train
            act()

    def check(self, may_go: Callable[[str], bool] = lambda training: False) -> None:
        """Compare with what was good before."""
        now = look(self.path)
        lost = [training for training in self.good if training not in now and not may_go(training)]
        assert not lost, f"lost {[(each, self.good[each]) for each in lost]}"
        self.good = now

    def train(self) -> None:
        """Run once, with or without a fault."""
        random = self.random
        name = random.choice(NAMES)
        paths = sorted(self.path.glob("*.pth"))
        resume = random.choice([None, None, "auto", "auto", "auto", *random.sample(paths, min(1, len(paths)))])
        how: dict[str, Any] = {"keep_last": random.choice([1, 1, 2, None])}
        on_existing: Any = random.choice(["new_name", "new_name", "new_name", "refuse", "replace"])
        how["resume"] = Resume(resume, on_existing=on_existing)
        if random.random() < 0.3:
            how |= {"keep_best": random.choice([1, 2]), "monitor": "validation/loss"}
        fault = Fault()
        if random.random() < 0.7:
            times = random.choice([1, 2, 4, 10**6])
            at, kinds = int(random.triangular(0, 160, 30)), random.choice([(), (), MOVES, LOADS])
            number = random.choice([None, None, *REFUSALS])
            fault = Fault(at // 10 if kinds else at, number, times, kinds)
        self.steps.append(f"train {name!r} {how} {fault}")
        checkpoint, run = Checkpoint(self.path, **how), make_run(name, random)
        checkpoint._writer = Writer()  # type: ignore[assignment]
        outcome, begun, error, newest_training = "done", False, None, self._newest_training(name)
        try:
            with under(fault):
                checkpoint.begin(run, TrainStart())  # type: ignore[arg-type]
                self._check_begun(run, resume, newest_training)
                begun = True
                self._save(checkpoint, run)
        except Death:
            outcome = "killed"
        except (OSError, ValueError) as raised:
            outcome, error = type(raised).__name__, raised
        finally:
            leave(checkpoint)
        is_refused = isinstance(error, ValueError) and (on_existing == "refuse" or isinstance(resume, Path))
        is_gone = isinstance(error, FileNotFoundError) and isinstance(resume, Path)  # a killed removal was finished
        is_of_another = isinstance(error, ValueError) and resume == "auto" and self._is_only_of_another(name)
        assert fault.at >= 0 or error is None or is_refused or is_gone or is_of_another, error
        self.steps[-1] += f": {outcome}{'' if begun else ' before it began'}, {run.report.notes}"
        self.counts[outcome] += 1

        def was_replaced(training: str) -> bool:
            its_names = {each.run_name for each in self.good[training]}
            return (
                on_existing == "replace"
                and run.checkpoints.training_id in look(self.path)
                and its_names == {checkpoint.file_name}
            )

        self.check(was_replaced)

    def _is_only_of_another(self, name: str) -> bool:
        """Return whether files of this name are there, and all of them of trainings asked for by another name."""
        entries = [each.entry for each in Manifests(self.path).look() if each.entry is not None]
        families = {each.family for each in entries if name in (each.family, each.run_name)}
        return bool(families) and name not in families

    def _newest_training(self, name: str) -> str | None:
        """Return the training that a run of this name continues: of what the last look found, whole or not."""
        found = Manifests(self.path.with_name(f"{self.path.name}-seen")).look()
        entries = [each.entry for each in found if each.entry is not None]
        newest = max((each for each in entries if each.family == name), key=lambda each: each.order, default=None)
        cut = [each.head for each in found if each.head is not None and each.head.run_name == name]
        last = max(cut, key=lambda head: head.saved_at, default=None)  # it has lost its number: its time decides
        if last is not None and (newest is None or last.saved_at > newest.saved_at):
            return last.training
        return None if newest is None else newest.training

    def _check_begun(self, run: FakeRun, resume: object, newest_training: str | None) -> None:
        """A run that was to continue the newest training of its name does so, where that has a good one."""
        known = [each for good in self.good.values() for each in good if each.training == newest_training]
        if resume == "auto" and known:
            newest = max(known, key=lambda each: each.order).path.name
            assert run.saved is not None, f"it starts fresh beside {newest}"
            assert run.checkpoints.resumed_from.name == newest, (
                f"it skipped {newest}, and continued from {run.checkpoints.resumed_from}"
            )

    def _save(self, checkpoint: Checkpoint, run: FakeRun) -> None:
        if run.saved is not None:
            run.checkpoints.training_id, run.progress.steps = run.saved["training_id"], run.saved["progress"]["steps"]
            checkpoint.find_existing(run, CheckpointLoaded(run.checkpoints.resumed_from))  # type: ignore[arg-type]
        for _ in range(self.random.randint(0, 3)):
            run.progress.steps += self.random.choice([0, 1, 1])
            run.progress.batches += 1
            checkpoint._saved.value, checkpoint._saved.measured_at = self.random.random(), run.progress.steps
            checkpoint.save(run, SavePoint())  # type: ignore[arg-type]
        checkpoint.end(run, RunClosed("completed"))  # type: ignore[arg-type]

    def _any(self) -> Path | None:
        paths = sorted(self.path.glob("*.pth"))
        return self.random.choice(paths) if paths else None

    def damage(self) -> None:
        """Flip a bit, or cut a file short: what is no longer good is not counted."""
        if (path := self._any()) is not None:
            self.steps.append(f"damage {path.name}")
            if path.exists():
                content = bytearray(path.read_bytes())
                place = self.random.randrange(max(1, len(content)))
                if content:
                    content[place] ^= 1
                path.write_bytes(content if self.random.random() < 0.5 else content[:place])
            self.good = look(self.path)

    def remove(self) -> None:
        """Remove files of a checkpoint, as people do."""
        if (path := self._any()) is not None:
            self.steps.append(f"remove {path.name}")
            path.unlink()
            self.good = look(self.path)

    def pin(self) -> None:
        """Pin, or let go."""
        if (path := self._any()) is not None:
            self.steps.append(f"pin {path.name}")
            pinned = path.with_suffix(".pinned")
            pinned.unlink() if pinned.exists() else pinned.touch()

    def copy(self) -> None:
        """Bring a checkpoint of another training here, from another folder, with its place in the order."""
        name = self.random.choice(NAMES)
        self.steps.append(f"copy one of {name!r} here")
        with contextlib.closing(Store(self.path.with_name("elsewhere"), name)) as store:
            store.open()
            state = make_state(name, f"{self.random.getrandbits(128):032x}", 9)
            made = store.save("copied.pth", state, sequence=self.random.randint(1, 9))
        number = sum(1 for _ in self.path.glob("*.pth"))
        path = self.path / f"copied-{number}-{self.random.getrandbits(30)}.pth"
        made.path.rename(path)
        self.check()

    def prune(self) -> None:
        """Make room from the command line."""
        self.steps.append("prune")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            checkpoint(["prune", str(self.path), "--keep-last", "1"])
        self.check()


def live(seed: int, root: Path) -> Counter[str]:
    """Do one sequence; return how its runs ended. AssertionError, with what was done, where the law does not hold."""
    folder = root / str(seed)
    folder.mkdir()
    sequence = Folder(folder, Random(seed))
    try:
        sequence.live()
    except Exception as error:
        error.add_note("\n".join([f"seed {seed}", *sequence.steps]))
        raise
    finally:
        for each in (folder, folder.with_name(f"{folder.name}-seen"), root / "elsewhere"):
            rmtree(each, ignore_errors=True)
    return sequence.counts


def main() -> int:
    """Do many sequences; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("heliograph").setLevel(logging.CRITICAL)
    counts, root = Counter[str](), Path(mkdtemp())
    try:
        for seed in range(options.seed, options.seed + options.count):
            counts += live(seed, root)
    finally:
        rmtree(root)
    reported = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
    print(
        f"{options.count} sequences, {counts.total()} runs ({reported}): every training that had a checkpoint has one"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
