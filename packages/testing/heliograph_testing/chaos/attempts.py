"""Runs a training attempt by attempt, like a scheduler; a watchdog ends hanging attempts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from .environment import JOURNAL, VARIABLE
from .faults.fault import Fault
from .journal import Entry, read
from .processes import Child, Start, end_group, free_port, rank_variables

PACKAGE = "heliograph-chaos"
PLUGINS = "HELIOGRAPH_PLUGINS"  # adds the plugin to every trainer
POLL_INTERVAL = 0.02  # seconds between two polls of the processes
END_TIMEOUT = 15.0  # seconds for a rank to end after another rank ended
MOST_FAILURES = 3  # consecutive failures without a fault


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


class ChaosTraining:
    """A training in a folder, with faults, and with journals and outputs in the folder `notes`.

    Args:
        start: starts a process.
        folder: the folder of the training.
        notes: a new folder for the journals and outputs.
        ranks: the number of processes.
        faults: the faults to inject.
        seed: the seed of faults in numbers.
        on_attempt: called with a line after each attempt.
    """

    def __init__(
        self,
        start: Start,
        folder: Path,
        notes: Path,
        *,
        ranks: int = 1,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        on_attempt: Callable[[str], object] | None = None,
    ) -> None:
        self._start, self._folder, self._notes, self._ranks = start, folder, notes, ranks
        self._on_attempt = on_attempt
        notes.mkdir(parents=True)
        plan = {"faults": [fault.as_dict() for fault in faults], "seed": seed, "disk": str(folder)}
        (notes / "plan.json").write_text(json.dumps(plan))
        self.attempts: list[ChaosAttempt] = []

    @property
    def journals(self) -> list[Path]:
        return journals(self._notes)

    def run(self, patience: float, limit: int) -> bool:
        failures = 0
        while len(self.attempts) < limit:
            self.attempts.append(attempt := self._attempt(patience))
            if attempt.completed:
                return True
            failures = 0 if attempt.faults else failures + 1
            if failures == MOST_FAILURES:
                return False
        return False

    def _entries(self) -> dict[Path, list[Entry]]:
        return {path: [*read(path)] for path in self.journals}

    def _attempt(self, patience: float) -> ChaosAttempt:
        output = self._notes / f"attempt-{len(self.attempts) + 1}.log"
        before, began, port = self._entries(), monotonic(), free_port() if self._ranks > 1 else 0
        children: list[Child] = []
        watchdog = _Watchdog(self._notes)
        try:
            for rank in range(self._ranks):
                variables = {**self._variables(), **rank_variables(rank, self._ranks, port)}
                children.append(self._start(self._folder, variables, output))
            hung = watchdog.until_end(children, patience)
        finally:
            for child in children:
                end_group(child)
            statuses = tuple(_status(child) for child in children)
        new = [entry for path, entries in self._entries().items() for entry in entries[len(before.get(path, ())) :]]
        kinds = tuple(entry["kind"] for entry in new if entry["what"] == "fault")
        failed = any(entry["what"] == "end" and entry["status"] == "failed" for entry in new)
        seconds = monotonic() - began
        if self._on_attempt is not None:
            line = _describe(new, statuses, hung=hung, seconds=seconds)
            self._on_attempt(f"{self._folder.name}, attempt {len(self.attempts) + 1}: {line}")
        return ChaosAttempt(statuses, seconds, watchdog.silence, hung, kinds, failed, output)

    def _variables(self) -> dict[str, str]:
        # A package with an entry point on PYTHONPATH adds the plugin to every trainer.
        package = self._notes / "package"
        info = package / "heliograph_chaos-1.dist-info"
        if not info.exists():
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
            target = "heliograph_testing.chaos.environment:make_chaos"
            (info / "entry_points.txt").write_text(f"[heliograph.plugins]\nchaos = {target}\n")
        added = ",".join(word for word in (os.environ.get(PLUGINS, ""), f"+{PACKAGE}:chaos") if word)
        path = os.pathsep.join(part for part in (str(package), os.environ.get("PYTHONPATH", "")) if part)
        return {VARIABLE: str(self._notes), PLUGINS: added, "PYTHONPATH": path}


class _Watchdog:
    """Detects a hanging training: its journals stop growing."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self._size, self._last = self._measure(), monotonic()
        self.silence = 0.0

    def until_end(self, children: Sequence[Child], patience: float) -> bool:
        first_end: float | None = None
        while True:
            running = [child for child in children if child.poll() is None]
            if not running:
                return False
            now, size = monotonic(), self._measure()
            silence = now - self._last
            self.silence = max(self.silence, silence)
            if size != self._size:
                self._size, self._last = size, now
            if len(running) < len(children):
                first_end = first_end or now
                if now - first_end > END_TIMEOUT:
                    return any(child.poll() == 0 for child in children)  # a failed rank: the scheduler ends the others
            if silence > patience:
                return True
            sleep(POLL_INTERVAL)

    def _measure(self) -> int:
        return sum(path.stat().st_size for path in journals(self._notes))


def journals(notes: Path) -> list[Path]:
    stem, _, suffix = JOURNAL.partition(".")
    return [*notes.glob(JOURNAL), *sorted(notes.glob(f"{stem}.rank-*.{suffix}"))]


def _status(child: Child) -> int:
    while (status := child.poll()) is None:
        sleep(POLL_INTERVAL)
    return status


def _describe(entries: Sequence[Entry], statuses: Sequence[int], *, hung: bool, seconds: float) -> str:
    resumed = next((entry["batch"] for entry in entries if entry["what"] == "resumed"), None)
    faults = [f"{entry['kind']} at {entry['where']}" for entry in entries if entry["what"] == "fault"]
    how = f"ended with status {', '.join(map(str, statuses))}" if any(statuses) else "completed"
    end = f"{'ended by the watchdog' if hung else how} after {seconds:.1f} s"
    return "; ".join(["from the start" if resumed is None else f"from batch {resumed}", *faults, end])
