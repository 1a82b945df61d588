"""Kill the demo's training with SIGKILL again and again, during saves too, and compare its end with an undisturbed one.

Run `python packages/tests/torture/torture.py --kills 100 --seed 0 --seconds 900`. A story is one training, killed
and resumed until it ends; stories are run until there were enough kills. The seed decides the plan of each attempt;
where a kill falls depends on the machine, too. Exit status 1, with the first difference, where anything differs.
Skipped where there is no `os.pidfd_open`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import count
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from time import monotonic, sleep

import torch
from heliograph.packages.tests.torture.plans import Planner
from heliograph.packages.tests.torture.story import Story
from heliograph_recorder.demo import training
from heliograph_recorder.demo.training import digits

MISSING = None if hasattr(os, "pidfd_open") else "os.pidfd_open is missing: this needs Linux"
WORKERS_LEAVE = 30.0  # seconds; a loader's workers look every 5 whether their process lives


def torture(kills: int, seed: int, seconds: float, folder: Path) -> list[str]:
    """Run stories until there were enough kills; return where they fell, in words.

    Args:
        kills: how many at least, a third of them during saves.
        seed: of all choices.
        seconds: after so many, nothing more is killed, and that is an error.
        folder: an empty one.

    Raises:
        AssertionError: something is not as it must be; names it.
    """
    until = monotonic() + seconds
    places, groups = list[str](), list[int]()
    planner = Planner(folder / "undisturbed", Random(seed))
    print(f"undisturbed: {planner.seconds:.1f} s", flush=True)

    def is_enough() -> bool:
        return len(places) >= kills and 3 * during_saves(places) >= kills

    def wants_more() -> bool:
        return not is_enough() and monotonic() < until

    for number in count(1):
        story = Story(folder / f"story-{number}", planner, places)
        story.run(wants_more)
        groups += story.groups
        print(f"{number} stories, {len(places)} kills: all ended equal, bit for bit", flush=True)
        if not wants_more():
            break
    wait_for_workers(groups)
    assert is_enough(), (
        f"after {seconds:g} s there were {len(places)} of {kills} kills, {during_saves(places)} during saves"
    )
    return places


def during_saves(places: Iterable[str]) -> int:
    """Return how many kills fell into saves."""
    return sum(place.startswith("saving") for place in places)


def wait_for_workers(groups: Collection[int]) -> None:
    """Wait until every process of some groups is gone.

    Raises:
        AssertionError: some stay.
    """
    until = monotonic() + WORKERS_LEAVE
    while left := living(groups):
        assert monotonic() < until, f"processes were left over: {left}"
        sleep(0.1)


def living(groups: Collection[int]) -> list[int]:
    """Return the processes of some groups."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = place.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
            continue
        if state != "Z" and int(group) in groups:
            found.append(int(place.parent.name))
    return found


def warm_up(folder: Path) -> None:
    """Import here all that an attempt needs, so that its copy of this process need not."""
    torch.set_num_threads(1)
    torch.optim.AdamW(training.network().parameters())  # imports more than all the rest
    digits()
    training.training_plugins(folder)
    training.reporting_plugins(folder)


def main() -> int:
    """Run the torture; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="at least so many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (%(default)s)")
    parser.add_argument("--seconds", type=float, default=900, help="at most so many (%(default)s)")
    options = parser.parse_args()
    if MISSING:
        print(f"skipped: {MISSING}")
        return 0
    began, folder = monotonic(), Path(mkdtemp(prefix="torture-"))
    warm_up(folder)
    try:
        places = torture(options.kills, options.seed, options.seconds, folder)
    except AssertionError as error:
        print(f"FAILED with seed {options.seed}: {error}\nThe files are kept in {folder}.", file=sys.stderr)
        return 1
    rmtree(folder)
    for place, times in Counter(places).most_common():
        print(f"{times:>4} {place}")
    seconds = monotonic() - began
    print(
        f"{len(places)} kills, {during_saves(places)} of them during saves, {seconds:.0f} s, every end equal to the bit"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
