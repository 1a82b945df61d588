"""Kill trainings with SIGKILL while workers of their loaders start: none of these may outlive its main process.

Run `python packages/tests/torture/workers.py --kills 300 --seed 0`. Exit status 1 where a worker is left over. A
fresh interpreter, or a fork server, is given more time: it imports torch before it can notice anything. Skipped where
there is no `/proc`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import IO, Any

import heliograph as h
import torch
from heliograph.packages.tests.torture.torture import living
from heliograph.tests.kit import sgd
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

MISSING = None if Path("/proc/self/stat").exists() else "/proc/self/stat is missing: this needs Linux"
CONTEXTS = ("fork",) * 8 + ("forkserver", "spawn")
LOADERS = ("train", "train, persistent", "validation", "validation, persistent", "a DataLoader", "iterable")
SECONDS_TO_IMPORT = 4.0  # about what a worker takes that is a fresh interpreter
START = 60.0  # seconds in which one has begun, and noticed that nobody needs it, on a busy machine


class Points(Dataset[Any]):
    """Some samples."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2,), float(index)), torch.zeros(1)


class Stream(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return map(Points().__getitem__, range(64))


@dataclass(frozen=True)
class Plan:
    """One training, and when it is killed.

    Attributes:
        context: how its workers are started.
        loader: which loader has workers.
        workers: how many.
        pause: seconds that each takes to start, in its `worker_init_fn`.
        delay: seconds from the beginning to the kill.
        in_thread: whether it trains in another thread than the main one.
        has_child: whether the training process also forks one that outlives it.
    """

    context: str
    loader: str
    workers: int
    pause: float
    delay: float
    in_thread: bool
    has_child: bool


@dataclass(frozen=True)
class Outcome:
    """What became of a training's processes.

    Attributes:
        plan: the training.
        processes: how many others it had when it was killed.
        left: the workers among them that had not ended in time.
        seconds: from the kill until the last of all had ended.
    """

    plan: Plan
    processes: int
    left: list[int]
    seconds: float


def plans(seed: int) -> Iterator[Plan]:
    """Yield trainings without an end."""
    random = Random(seed)
    while True:
        context, pause = random.choice(CONTEXTS), random.choice((0.0, 0.2, 1.0, 3.0))
        start = 0.0 if context == "fork" else SECONDS_TO_IMPORT
        delay = random.uniform(0.0, start + min(pause, 1.0) + 0.2)
        chances = random.random() < 0.25, random.random() < 0.25
        yield Plan(context, random.choice(LOADERS), random.randint(1, 3), pause, delay, *chances)


def pause(worker_id: int, seconds: float) -> None:
    """Take one's time to start: a `worker_init_fn`."""
    sleep(seconds)


def train(plan: Plan) -> None:
    """Train for ever."""
    params: Any = {"batch_size": 4, "num_workers": plan.workers, "worker_init_fn": partial(pause, seconds=plan.pause)}
    if plan.context != "fork":
        params["multiprocessing_context"] = multiprocessing.get_context(plan.context)
    params["persistent_workers"] = plan.loader.endswith("persistent")
    data: Any = Stream() if plan.loader == "iterable" else Points()
    given: dict[str, Any] = {"loader_params": params}
    if plan.loader == "a DataLoader":
        data, given = DataLoader(data, **params), {}
    elif plan.loader.startswith("validation"):
        data, given = [Points()[0]], {"validation": DataLoader(data, **params)}
    h.Trainer([h.ValidationSchedule(h.Every(steps=1))] if "validation" in given else [], device="cpu").fit(
        h.Supervised(nn.Linear(2, 1), nn.functional.mse_loss),
        data,
        optimizer=sgd(0.01),
        epochs=1_000_000,
        **given,
    )


def kill_one(plan: Plan, limit: float) -> Outcome:
    """Train in a process, kill it, and wait for the end of what it had started; workers have `limit` seconds for it."""
    ready, begun = os.pipe()
    with TemporaryFile() as output:
        if not (pid := os.fork()):
            os.dup2(output.fileno(), sys.stderr.fileno())
            _become(plan, begun)
        os.setpgid(pid, pid)
        os.close(begun)
        child = int(os.read(ready, 20))
        os.close(ready)
        try:
            return _killed(plan, pid, limit, output)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def _killed(plan: Plan, pid: int, limit: float, output: IO[bytes]) -> Outcome:
    """Kill a training that has begun, and wait."""
    sleep(plan.delay)
    processes = len(living([pid])) - 1
    os.kill(pid, signal.SIGKILL)
    killed_at = monotonic()
    if os.WTERMSIG(os.waitpid(pid, 0)[1]) != signal.SIGKILL:
        output.seek(0)
        raise AssertionError(f"{plan} ended by itself:\n{output.read().decode()}")
    _wait(pid, killed_at + limit)
    left = list(filter(_is_worker, living([pid])))
    _wait(pid, killed_at + limit + START)
    outcome = Outcome(plan, processes, left or living([pid]), monotonic() - killed_at)
    if living([pid]):
        os.killpg(pid, signal.SIGKILL)
    return outcome


def _wait(group: int, until: float) -> None:
    while living([group]) and monotonic() < until:
        sleep(0.02)


def _is_worker(pid: int) -> bool:
    """Return whether a process has begun to be a worker: torch gives it a name then."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "pt_data_worker\n"
    except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
        return False


def _become(plan: Plan, begun: int) -> None:
    """In the child: train; never return."""
    try:
        os.setpgid(0, 0)
        thread = threading.Thread(target=train, args=(plan,)) if plan.in_thread else None
        if thread is not None:
            thread.start()
        os.write(begun, str(_child() if plan.has_child else 0).encode())
        if thread is None:
            train(plan)
        else:
            thread.join()
    except BaseException:  # noqa: BLE001  # the status says it
        traceback.print_exc()
    finally:
        os._exit(1)


def _child() -> int:
    """Fork a process that leads a group of its own and does nothing; return its number."""
    if pid := os.fork():
        return pid
    os.setsid()
    while True:
        signal.pause()


def table(outcomes: list[Outcome]) -> str:
    """Return a line for each kind of training."""
    lines = [f"{'started by':<12}{'loader':<24}{'kills':>6}{'during':>6}{'left over':>10}{'longest':>9}"]
    for context in sorted(set(CONTEXTS)):
        for loader in LOADERS:
            own = [each for each in outcomes if (each.plan.context, each.plan.loader) == (context, loader)]
            during, left = sum(each.processes > 0 for each in own), sum(bool(each.left) for each in own)
            longest = max((each.seconds for each in own), default=0.0)
            lines += [f"{context:<12}{loader:<24}{len(own):>6}{during:>6}{left:>10}{longest:>8.2f}s"] if own else []
    return "\n".join(lines)


def main() -> int:
    """Kill trainings; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="of processes that have workers (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (%(default)s)")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds that workers have to end (%(default)s)")
    options = parser.parse_args()
    if MISSING:
        print(f"skipped: {MISSING}")
        return 0
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(2, 1).parameters())  # imports more than all the rest, for all children
    outcomes = list[Outcome]()
    for plan in plans(options.seed):
        outcomes.append(kill_one(plan, options.limit))
        if outcomes[-1].left:
            print(f"left over: {outcomes[-1]}", flush=True)
        if sum(each.processes > 0 for each in outcomes) >= options.kills:
            break
    left = sum(bool(each.left) for each in outcomes)
    print(table(outcomes))
    summary = f"{len(outcomes)} kills, {options.kills} of them with workers"
    print(f"{summary}; after {options.limit:g} s, {left} had left some over")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
