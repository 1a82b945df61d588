"""Runs a training attempt by attempt, like a scheduler; a watchdog ends hanging attempts."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

from .confined import JOURNAL, PLAN, VARIABLE
from .fault import Fault, FaultOutcome
from .story import read

PACKAGE = "heliograph-chaos"
PLUGINS = "HELIOGRAPH_PLUGINS"  # adds the plugin to every trainer
PATIENCE = 900.0  # seconds without progress, for a training of unknown speed
POLL_INTERVAL = 0.02  # seconds between two polls of the processes
END_TIMEOUT = 15.0  # seconds for a rank to end after another rank ended
MOST_FAILURES = 3  # consecutive failures without a fault
MORE_ATTEMPTS = 10  # in addition to one per fault


@dataclass(frozen=True, slots=True)
class ChaosAttempt:
    """One start of the training.

    Attributes:
        statuses: the exit status of each rank, negative for a signal.
        seconds: its duration.
        silence: the longest time without progress, in seconds.
        hung: whether the watchdog ended it.
        faults: the kinds of the faults that acted.
        failed: whether the training failed on some rank.
        output: the file with its output.
    """

    statuses: tuple[int, ...]
    seconds: float
    silence: float
    hung: bool
    faults: tuple[str, ...]
    failed: bool
    output: Path

    @property
    def completed(self) -> bool:
        return not any(self.statuses)

    def __str__(self) -> str:
        how = f"ended with status {', '.join(map(str, self.statuses))}"
        how = "ended by the watchdog" if self.hung else "completed" if self.completed else how
        return f"{how} after {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class ChaosProgram:
    """A training that is started in copies of a folder.

    Attributes:
        run: runs the training, in the copy.
        copy: writes a copy of the folder.
        place: the folder of the copies, journals and outputs.
        seed: the seed of faults in numbers.
        ranks: the number of processes.
        on_attempt: called with a line after each attempt.
    """

    run: Callable[[], object]
    copy: Callable[[Path], None]
    place: Path
    seed: int
    ranks: int
    on_attempt: Callable[[str], object] | None = None

    def train(self, name: str, faults: Sequence[Fault] = (), patience: float = PATIENCE) -> list[ChaosAttempt]:
        """Start the training until it completes; without faults, once."""
        self.copy(self.place / name)
        notes = self._notes(name)
        notes.mkdir(parents=True)
        plan = {"faults": faults, "seed": self.seed, "disk": self.place / name}
        (notes / PLAN).write_bytes(pickle.dumps(plan))
        attempts: list[ChaosAttempt] = []
        failures = 0
        while len(attempts) < (len(faults) + MORE_ATTEMPTS if faults else 1) and failures < MOST_FAILURES:
            attempts.append(attempt := self._attempt(name, len(attempts) + 1, patience))
            if attempt.completed:
                break
            failures = 0 if attempt.faults else failures + 1
        return attempts

    def journals(self, name: str) -> list[Path]:
        return _journals(self._notes(name))

    def _notes(self, name: str) -> Path:
        return self.place / f"{name}-notes"

    def _attempt(self, name: str, number: int, patience: float) -> ChaosAttempt:
        notes = self._notes(name)
        output = notes / f"attempt-{number}.log"
        before = {path: path.stat().st_size for path in _journals(notes)}
        began, port = monotonic(), _free_port()
        children: list[BaseProcess] = []
        try:
            for rank in range(self.ranks):
                variables = {**_variables(notes), **_rank_variables(rank, self.ranks, port)}
                children.append(_start(partial(_train_in, self.place / name, variables, self.run), output))
            hung, silence = _watch(children, notes, patience)
        finally:
            for child in children:
                _end(child)
        seconds = monotonic() - began
        new = [entry for path in _journals(notes) for entry in read(path, before.get(path, 0))]
        outcomes: dict[int, FaultOutcome] = {
            entry["number"]: entry["outcome"] for entry in new if entry["what"] == "fault"
        }
        attempt = ChaosAttempt(
            statuses=tuple(child.exitcode or 0 for child in children),
            seconds=seconds,
            silence=silence,
            hung=hung,
            faults=tuple(outcome.fault.kind for outcome in outcomes.values()),
            failed=any(entry["what"] == "end" and entry["status"] == "failed" for entry in new),
            output=output,
        )
        if self.on_attempt is not None:
            resumed = next((f"batch {entry['batch']}" for entry in new if entry["what"] == "resumed"), "the start")
            acts = [f"; {outcome.fault.kind} at {outcome.where}" for outcome in outcomes.values()]
            self.on_attempt(f"{name}, attempt {number}: from {resumed}{''.join(acts)}; {attempt}")
        return attempt


def _variables(notes: Path) -> dict[str, str]:
    # A package with an entry point on PYTHONPATH adds the plugin to every trainer.
    package = notes / "package"
    info = package / "heliograph_chaos-1.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
        target = "heliograph_testing.chaos.confined:make_chaos"
        (info / "entry_points.txt").write_text(f"[heliograph.plugins]\nchaos = {target}\n")
    added = ",".join(word for word in (os.environ.get(PLUGINS, ""), f"+{PACKAGE}:chaos") if word)
    path = os.pathsep.join(part for part in (str(package), os.environ.get("PYTHONPATH", "")) if part)
    return {VARIABLE: str(notes), PLUGINS: added, "PYTHONPATH": path}


def _watch(children: Sequence[BaseProcess], notes: Path, patience: float) -> tuple[bool, float]:
    # Wait for the end; return whether the journals stopped growing, and the longest time without growth.
    size, last, longest = 0, monotonic(), 0.0
    first_end: float | None = None
    while running := [child for child in children if child.exitcode is None]:
        now, new_size = monotonic(), sum(path.stat().st_size for path in _journals(notes))
        longest = max(longest, now - last)
        if now - last > patience:
            return True, longest
        if new_size != size:
            size, last = new_size, now
        if len(running) < len(children):
            first_end = first_end or now
            if now - first_end > END_TIMEOUT:  # after a failure, the scheduler ends the other ranks
                return any(child.exitcode == 0 for child in children), longest
        sleep(POLL_INTERVAL)
    return False, longest


def _journals(notes: Path) -> list[Path]:
    stem, _, suffix = JOURNAL.partition(".")
    return [*notes.glob(JOURNAL), *sorted(notes.glob(f"{stem}.rank-*.{suffix}"))]


def _start(action: Callable[[], object], output: Path) -> BaseProcess:
    child = get_context("fork").Process(target=become, args=(action, output))
    child.start()
    with suppress(OSError):  # the child has set it already
        os.setpgid(child.pid or 0, child.pid or 0)
    return child


def _end(child: BaseProcess) -> None:
    # with its group, for example the workers of its loader
    with suppress(ProcessLookupError, PermissionError):  # no process is left; macOS raises PermissionError
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()


def become(action: Callable[[], object], output: Path) -> NoReturn:
    """In a fork: lead a process group, call a function and exit, with status 1 after an error.

    Args:
        action: the function; its own exit status is kept.
        output: the file for the output.
    """
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)  # the parent may have replaced them
        action()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # printed, and in the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_script(script: Path, arguments: Sequence[str]) -> NoReturn:
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.execv(sys.executable, [sys.executable, str(script), *arguments])  # noqa: S606  # the user's own script


def _train_in(folder: Path, variables: Mapping[str, str], train: Callable[[], object]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)  # Python reads the variable only at its start
    train()


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    # The variables that torch.distributed reads.
    if ranks == 1:
        return {}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
