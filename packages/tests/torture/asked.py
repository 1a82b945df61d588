"""Random commands at random instants to trainings on 1, 2 and 4 ranks, which are killed and resumed in between.

Run `python packages/tests/torture/asked.py --commands 10000 --ranks 1 2 4 --seed 0`. Every rank writes down what it
serves and after which step: all write the same. Every command that was accepted is in the recording once, with its
asker and its reason, but for those of the last moment before a kill. Exit status 1 where that does not hold, or where a
run hangs.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

from heliograph.packages.tests.torture.asked_job import SWITCHED
from heliograph_recorder import attach
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import RequestEntry
from heliograph_recorder.remote.client import ENDS, RemoteRun
from heliograph_recorder.remote.sockets import host_name

NAMES = threading.local()
OWN = f"{getpass.getuser()}@{host_name()}"
JOB = Path(__file__).with_name("asked_job.py")
PATIENCE = 180.0  # seconds: a run that does not answer for so long hangs
ASKERS = 6  # at once
COMMON = ("save", "validate", "log", "log", "end-epoch", "set-lr", "set-lr", "set-lr", "enable", "disable", "status")


@dataclass
class Sent:
    """A command and what became of it."""

    number: int
    word: str
    by: str
    state: str


@dataclass
class Trial:
    """Commands to one training, and its attempts.

    Attributes:
        folder: of the run.
        ranks: how many there are.
        commands: how many to send.
        random: draws all.
        next: the number of the next command.
        port: of the attempt, over TCP.
        lost: accepted commands that are not recorded.
        recorded: commands that are.
        askers: whose names are recorded.
    """

    folder: Path
    ranks: int
    commands: int
    random: Random
    sent: list[Sent] = field(default_factory=list)
    attempts: int = 0
    kills: int = 0
    process: subprocess.Popen[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    next: int = 0
    port: int = 0
    lost: int = 0
    recorded: int = 0
    askers: set[str] = field(default_factory=set)
    error: str = ""

    def run(self, *, kills: int, stops: int) -> None:
        """Send all commands; kill and stop the run at random ones of them."""
        last = self.random.sample(range(1, self.commands), kills + stops)
        ends = sorted((number, index < kills) for index, number in enumerate(last))
        for number, is_kill in [*ends, (self.commands, False)]:
            self.start()
            askers = self.begin_to_ask(number)
            if is_kill:
                while self.next < number and not self.error:
                    sleep(0.001)
                self.kill()
            for each in askers:
                each.join()
            if not is_kill:
                self.stop()
            if self.error:
                return

    def begin_to_ask(self, until: int) -> list[threading.Thread]:
        """Start the threads that ask until so many commands are sent."""
        askers = [threading.Thread(target=self.ask, args=(until, self.random.random())) for _ in range(ASKERS)]
        for each in askers:
            each.start()
        return askers

    def start(self) -> None:
        """Start an attempt, and wait until it can be asked."""
        self.attempts += 1
        command = [sys.executable, str(JOB), str(self.folder), str(self.ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.wait()

    def wait(self) -> None:
        """Wait until the run can be asked."""
        due = monotonic() + PATIENCE
        while monotonic() < due and (self.process is None or self.process.poll() is None):
            try:
                self.port = attach(self.folder).status()["tcp"][1]
            except (LookupError, OSError):
                sleep(0.05)
            else:
                return
        self.error = f"attempt {self.attempts} cannot be asked"

    def kill(self) -> None:
        """Kill every process of the run."""
        assert self.process is not None
        self.kills += 1
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Stop the run, and see it end."""
        try:
            answer = attach(self.folder).stop("the attempt is over", wait=True, timeout=PATIENCE)
            status = 0 if self.process is None else self.process.wait(PATIENCE)
        except (LookupError, OSError, subprocess.TimeoutExpired) as error:
            self.error = f"attempt {self.attempts} does not stop: {error}"
            if self.process is not None:
                self.kill()
            return
        if answer.state != "served" or status:
            self.error = f"attempt {self.attempts} did not stop as asked: {answer}, status {status}"

    def ask(self, until: int, seed: float) -> None:
        """Send commands until so many are sent; over the socket or TCP, and wait for some of the answers."""
        draws = Random(seed + threading.get_ident())
        while not self.error:
            with self.lock:
                number = self.next
                if number >= until:
                    return
                self.next += 1
            word, over_tcp = draws.choice(COMMON), draws.random() < 0.3
            NAMES.of_thread = f"user {number % 7}"
            by = f"{NAMES.of_thread}@{host_name()} (by their own account, from 127.0.0.1)" if over_tcp else OWN
            try:
                state = self.send(self.client(over_tcp=over_tcp), word, number, draws)
            except (LookupError, OSError, ValueError):  # it was killed
                state = "lost"
            with self.lock:
                self.sent.append(Sent(number, word, by, state))
            sleep(draws.choice([0, 0, 0, draws.random() / 50]))

    def client(self, *, over_tcp: bool) -> RemoteRun:
        """Return the run, by one of its two ways; over TCP in the name of somebody."""
        path = next(self.folder.glob("remote-*.sock"), self.folder / "none")
        if not over_tcp:
            return RemoteRun(path)
        token = path.with_suffix(".token").read_text(encoding="ascii")
        return RemoteRun(("127.0.0.1", self.port), token)

    def send(self, run: RemoteRun, word: str, number: int, draws: Random) -> str:
        """Send one command."""
        wait, why = draws.random() < 0.3, f"command {number}"
        if word == "status":
            return "served" if run.status()["step"] >= 0 else "refused"
        if word == "set-lr":
            answer = run.set_learning_rate(draws.choice([0.001, 0.002, 0.003, draws.random() / 100]), why, wait=wait)
        elif word in ("enable", "disable"):
            answer = getattr(run, word)(draws.choice(SWITCHED), why, wait=wait)
        else:
            answer = getattr(run, word.replace("-", "_"))(why, wait=wait)
        if wait and answer.state not in ENDS:
            self.error = f"{word} {number} was never decided: {answer}"
        return answer.state

    # What must hold.

    def problems(self) -> list[str]:
        """Return what does not hold."""
        found = [self.error] if self.error else []
        return [*found, *self.differences(), *self.missing()]

    def served(self) -> list[list[list[Any]]]:
        """Return what each rank served, attempt by attempt."""
        of_ranks = []
        for rank in range(self.ranks):
            attempts: list[list[Any]] = []
            for line in (self.folder / f"rank {rank}.jsonl").read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry[0] == "train_start":
                    attempts.append([])
                attempts[-1].append(entry)
            of_ranks.append(attempts)
        return of_ranks

    def differences(self) -> list[str]:
        """Return where ranks served different things: after a kill, some may have been a boundary further."""
        first, *others = self.served()
        found = []
        for rank, other in enumerate(others, 1):
            pairs: list[tuple[list[Any], list[Any]]] = [*zip_longest(first, other, fillvalue=[])]
            for number, (own, of_other) in enumerate(pairs, 1):
                common = min(len(own), len(of_other))
                if own[:common] != of_other[:common]:
                    at = next(index for index in range(common) if own[index] != of_other[index])
                    found.append(f"attempt {number}: rank 0 served {own[at]}, rank {rank} {of_other[at]}")
                longer = max(own, of_other, key=len)[common:]
                if len({step for _, step, _ in longer}) > 1:
                    found.append(f"attempt {number}: rank 0 served {len(own)}, rank {rank} {len(of_other)}: {longer}")
        return found

    def missing(self) -> list[str]:
        """Return the commands that were accepted and are not in the recording with their asker."""
        recorded: Counter[str] = Counter()
        askers: dict[str, str] = {}
        recordings = [read(path) for path in self.folder.glob("*.recording")]  # more than one, if killed before a save
        for recording in recordings:
            for entry in (entry for attempt in recording.attempts for entry in attempt.entries):
                if isinstance(entry, RequestEntry) and entry.request.reason.startswith("command "):
                    recorded[entry.request.reason] += 1
                    askers[entry.request.reason] = entry.request.by
        found = [f"{reason} is recorded {times} times" for reason, times in recorded.items() if times > 1]
        found += [
            f"{each} is recorded as that of {by}"
            for each in self.sent
            if (by := askers.get(f"command {each.number}", each.by)) != each.by
        ]
        self.askers = set(askers.values())
        lost = [each for each in self.sent if each.word != "status" and each.state in ("accepted", "served")]
        lost = [each for each in lost if f"command {each.number}" not in recorded]
        found += [f"{each} was {each.state} and is not recorded" for each in lost if each.state == "served"]
        if len(lost) > ASKERS * self.kills:
            found.append(f"{len(lost)} accepted commands are not recorded, after {self.kills} kills")
        self.lost, self.recorded = len(lost), len(recorded)
        return found


@contextmanager
def other_names() -> Iterator[None]:
    """Let each thread be another user, by its own account."""
    with patch.object(getpass, "getuser", lambda: getattr(NAMES, "of_thread", "nobody")):
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = False
    for ranks in options.ranks:
        with TemporaryDirectory(prefix="asked-") as folder:
            trial = Trial(Path(folder), ranks, options.commands, Random(f"{options.seed} {ranks}"))
            began = monotonic()
            with other_names():
                trial.run(kills=options.kills, stops=options.stops)
            problems = trial.problems()
            states = Counter(each.state for each in trial.sent)
            said = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
            steps = [entry[1] for entry in trial.served()[0][-1]][-1]
            print(
                f"{ranks} ranks, seed {options.seed}: {len(trial.sent):,} commands ({said}) to {trial.attempts} "
                f"attempts, {trial.kills} killed, {steps:,} steps; {trial.recorded:,} recorded, of "
                f"{len(trial.askers)} askers; {trial.lost} accepted in the last moment before a kill; "
                f"{monotonic() - began:.0f} s. {len(problems)} problems.",
                flush=True,
            )
            for each in problems[:20]:
                print(f"  {each}")
            failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
