"""Hostile clients: a training that they attack equals one without `Remote`, bit for bit, and grows by little.

Run `python packages/tests/torture/hostile.py --messages 100000 --seed 0`. Random and malformed messages, wrong
tokens, floods, clients that stop reading, that send byte by byte, that leave in the middle: from other processes, over
the socket and over TCP. Exit status 1 where a bit differs, where the memory grows, or where the run cannot be asked
any more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import heliograph as h
import torch
from heliograph.tests import kit
from heliograph_recorder import Remote, attach
from heliograph_recorder.remote.messages import LONGEST
from heliograph_recorder.remote.sockets import short

WORDS = ("stop", "save", "validate", "log", "end-epoch", "set-lr", "enable", "disable", "status", "eval", "__class__")
VALUES: tuple[Any, ...] = (0, -1, 1e400, None, [], {}, [[]], {"a": {}})
GROWTH = 64 * 1024  # KiB
FAILURES = 10_000  # to connect, in a row: the run has ended
Address = str | tuple[str, int]
PROCESSES = multiprocessing.get_context("spawn").Pool
MakePool = Callable[[int], Any]  # of so many processes, or threads


def message(draws: Random, *, malformed: bool) -> bytes:
    """Return a message: mostly one that is none.

    Args:
        draws: draws it.
        malformed: whether it must not be one that a run obeys.
    """
    kinds = [_noise, _deep, _long, _wrong, _cut, _digits, _not_utf8]
    return (draws.choice(kinds) if malformed else draws.choice([*kinds, _command]))(draws)


def _noise(draws: Random) -> bytes:
    return draws.randbytes(draws.randrange(200)) + b"\n"


def _deep(draws: Random) -> bytes:
    return draws.choice([b"[", b'{"a":', b"[[{"]) * draws.randrange(1, 1300) + b"\n"


def _long(draws: Random) -> bytes:
    return b'{"ask":"stop","reason":"' + b"a" * draws.choice([LONGEST - 40, LONGEST, 10 * LONGEST]) + b'"}\n'


def _command(draws: Random) -> bytes:
    fields: dict[str, Any] = {"ask": draws.choice(WORDS), "reason": "hostile", "token": "a token that is wrong"}
    fields |= {"value": 0.5} if fields["ask"] == "set-lr" else {}
    return json.dumps(fields).encode() + b"\n"


def _wrong(draws: Random) -> bytes:
    """A command with a field that is not as it has to be."""
    fields: dict[str, Any] = {"ask": draws.choice(WORDS), "reason": "hostile"}
    name = draws.choice(["ask", "reason", "target", "wait", "user", "other"])
    fields[name] = draws.choice(VALUES)
    return json.dumps(fields).encode() + b"\n"


def _cut(draws: Random) -> bytes:
    line = _command(draws)
    return line[: draws.randrange(len(line) - 1)] + b"\n"


def _digits(draws: Random) -> bytes:
    return b'{"ask":"set-lr","reason":"hostile","value":' + draws.choice([b"-", b"", b"1e"]) + b"9" * 3000 + b"}\n"


def _not_utf8(draws: Random) -> bytes:
    return b'{"ask":"stop","reason":"' + draws.choice([b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\x00"]) + b'"}\n'


def attack(address: Address, messages: int, seed: str) -> tuple[int, int]:
    """Send so many messages; return how many were sent, and how many connections it took."""
    draws, sent, connections = Random(seed), 0, 0
    idle: list[socket.socket] = []
    is_local = isinstance(address, str)
    failures = 0
    while sent < messages and failures < FAILURES:
        try:
            connection = _connect(address)
        except OSError:  # the queue of those who wait is full
            failures += 1
            continue
        failures = 0
        connections += 1
        burst = [message(draws, malformed=is_local) for _ in range(draws.choice([1, 1, 2, 5, 50]))][: messages - sent]
        sent += len(burst)
        with suppress(OSError):  # it was disconnected, as it deserves
            _behave(connection, b"".join(burst), draws)
        if draws.random() < 0.05:
            idle.append(connection)  # neither reads nor leaves
            if len(idle) > 20:
                idle.pop(0).close()
        else:
            connection.close()
    for each in idle:
        each.close()
    return sent, connections


def _behave(connection: socket.socket, data: bytes, draws: Random) -> None:
    match draws.randrange(6):
        case 0:
            for start in range(min(len(data), 40)):
                connection.sendall(data[start : start + 1])
        case 1:
            connection.sendall(data[: len(data) // 2])
        case 2:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(4096)
        case 3:
            connection.sendall(b"\n" * 5000 + data)
        case 4:
            for _ in range(200):
                connection.sendall(b'{"ask":"status"}\n')  # and reads nothing
            connection.sendall(data)
        case _:
            connection.sendall(data)
            connection.recv(4096)


def _connect(address: Address) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(0.2)
    try:
        if isinstance(address, str):
            with short(Path(address)) as name:
                connection.connect(name)
        else:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass
class Attacked:
    """What became of an attacked training.

    Attributes:
        steps: that it made.
        weights: its weights.
        sent, connections: of the attack.
        growth: by how much its memory grew, in KiB.
        seconds: of the attack.
        milliseconds: of a batch, in the median, before it and during it.
        answered: whether it could be asked afterwards.
        asked: what it was asked for, but for its end.
    """

    steps: int = 0
    weights: Any = None
    sent: int = 0
    connections: int = 0
    growth: int = 0
    seconds: float = 0.0
    milliseconds: tuple[float, float] = (0.0, 0.0)
    answered: bool = False
    asked: int = 0


class UnderAttack(h.Plugin):
    """Lets attackers begin after some batches, and ends the training when they are done."""

    affects_training = False
    asks = ("stop",)

    def __init__(
        self, remote: Remote, messages: int, seed: str, make_pool: MakePool, *, processes: int, calm: int
    ) -> None:
        self.remote, self.messages, self.seed, self.make_pool = remote, messages, seed, make_pool
        self.processes, self.calm, self.found = processes, calm, Attacked()
        self.times: tuple[list[float], list[float]] = [], []
        self.pool: Any = None
        self.began = self.last = self.memory = 0.0

    @h.on(h.BatchEnd)
    def look(self, run: h.Run, event: h.BatchEnd) -> None:
        now = monotonic()
        self.times[self.pool is not None].append(now - self.last)
        if self.pool is None and run.progress.batches >= self.calm:
            self.begin()
        elif self.pool is not None and all(each.ready() for each in self.results):
            self.finish(run)
        self.last = monotonic()

    def begin(self) -> None:
        assert self.remote.path is not None
        assert self.remote.address is not None
        addresses = [str(self.remote.path), self.remote.address]
        self.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.pool = self.make_pool(self.processes)
        count = -(-self.messages // self.processes)
        jobs = [(addresses[number % 2], count, f"{self.seed} {number}") for number in range(self.processes)]
        self.results = [self.pool.apply_async(attack, each) for each in jobs]
        self.began = monotonic()

    def finish(self, run: h.Run) -> None:
        found = self.found
        found.seconds = monotonic() - self.began
        for each in self.results:
            sent, connections = each.get()
            found.sent, found.connections = found.sent + sent, found.connections + connections
        self.pool.close()
        self.pool.join()
        self.pool, self.results = None, []
        found.growth = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.memory)
        found.milliseconds = median(self.times[0][5:]), median(self.times[1][5:])
        found.answered = attach(self.remote.folder).status()["step"] > 0
        run.control.stop("the attack is over")
        self.calm = sys.maxsize


def median(values: list[float]) -> float:
    """Return the median in milliseconds."""
    return 1000 * sorted(values)[len(values) // 2] if values else 0.0


def attacked(
    folder: Path,
    messages: int,
    seed: str,
    *,
    processes: int = 4,
    calm: int = 200,
    make_pool: MakePool = PROCESSES,
) -> Attacked:
    """Train under attack."""
    remote = Remote(folder, tcp=0)
    attackers = UnderAttack(remote, messages, seed, make_pool, processes=processes, calm=calm)
    plugins = [h.RNGCapture(seed=1), remote, attackers]
    result, weights = train(plugins, 10**9)
    found = attackers.found
    found.steps, found.weights = result.progress.steps, weights
    found.asked = sum(each.by != "under_attack" for each in result.history)
    return found


def train(plugins: Sequence[h.Plugin], steps: int) -> tuple[h.RunResult, torch.Tensor]:
    """Train a small model with draws; return the result and its weights."""
    torch.set_num_threads(1)
    task = kit.dropout_task()
    data = kit.random_batches(100, 64, inputs=16, outputs=1)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.001)
    result = h.Trainer(plugins, device="cpu").fit(task, data, optimizer=optimizer, steps=steps)
    return result, torch.cat([each.detach().flatten() for each in task.model.state_dict().values()])


def problems(found: Attacked) -> list[str]:
    """Return what does not hold of a training that was attacked."""
    _, weights = train([h.RNGCapture(seed=1)], found.steps)
    bad = [] if torch.equal(weights, found.weights) else ["the weights are not those of a training without Remote"]
    bad += [] if found.growth < GROWTH else [f"the memory grew by {found.growth} KiB"]
    bad += [] if found.answered else ["the run cannot be asked any more"]
    return bad + ([f"{found.asked} requests were made"] if found.asked else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", default="0")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="hostile-") as folder:
        found = attacked(Path(folder), options.messages, options.seed, processes=options.processes)
    bad = problems(found)
    before, during = found.milliseconds
    print(
        f"{found.sent:,} messages on {found.connections:,} connections in {found.seconds:.0f} s, in {found.steps:,} "
        f"steps; a batch took {during:.3f} ms in the median, {before:.3f} ms before; memory {found.growth:+} KiB. "
        f"{len(bad)} problems."
    )
    for each in bad:
        print(f"  {each}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
