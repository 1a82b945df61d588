"""Random programs with hidden state, killed for real: each ends equal, or its report lists a reason.

Run `python packages/tests/torture/programs.py --count 2000 --seed 0 --jobs 2`. Each number is a
program: `--only 17` runs that one again, and reports what it consists of. A table counts by kind of hidden
state. Exit status 1, with each such program in words, if one ended unequal and listed nothing, if one failed, or if
one in which nothing is hidden listed a reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from time import monotonic

import torch
from heliograph.packages.tests.torture.assembly import parts_of
from heliograph.packages.tests.torture.hidden import kinds
from heliograph.packages.tests.torture.program import OPTIMIZERS, Program, drawn
from heliograph.packages.tests.torture.trial import Verdict, tried

MISSING = None if hasattr(os, "pidfd_open") else "os.pidfd_open is missing: this needs Linux"
NOTHING = "nothing"
COLUMNS = ("equal", "named, equal", "named, unequal", "UNEQUAL", "beyond", "refused", "failed")
ROWS = ("", "E3", "E4", "E5", "own", "beyond")
EACH = 100  # so many programs, a line says how far it is


def one(seed: int, folder: Path) -> Verdict:
    """Try the program of a seed; keep its files only where something is not as it must be."""
    place = folder / str(seed)
    verdict = tried(drawn(seed), place)
    if not verdict.is_violation:
        rmtree(place)
    return verdict


def verdicts(seeds: Sequence[int], jobs: int, folder: Path) -> Iterator[Verdict]:
    """Yield what comes of each program, in the order of the seeds."""
    if jobs == 1:
        yield from map(partial(one, folder=folder), seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(partial(one, folder=folder), seeds)


def table(done: Iterable[Verdict]) -> str:
    """Return the counts by kind of hidden state; a program that hides two things counts for both."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    total = Counter[str]()
    for verdict in done:
        total[verdict.kind] += 1
        for name in verdict.program.hidden or (NOTHING,):
            counts[name][verdict.kind] += 1
    row_of = {NOTHING: "", **{name: "beyond" if each.beyond else each.row for name, each in kinds().items()}}
    names = sorted(counts, key=lambda name: (ROWS.index(row_of[name]), name))
    width = max(len(name) for name in (*names, "all programs"))
    lines = [_line(row_of[name], name, width, _numbers(counts[name])) for name in names]
    heading = _line("row", "hidden", width, ("programs", *COLUMNS))
    return "\n".join([heading, *lines, _line("", "all programs", width, _numbers(total))])


def _numbers(counts: Counter[str]) -> list[str]:
    return [str(counts.total()), *(str(counts[column] or "-") for column in COLUMNS)]


def _line(row: str, name: str, width: int, cells: Sequence[str]) -> str:
    headings = ("programs", *COLUMNS)
    aligned = (cell.rjust(len(heading)) for cell, heading in zip(cells, headings, strict=True))
    return f"{row:<6} {name:<{width}}  " + "  ".join(aligned)


def refusals(done: Sequence[Verdict]) -> list[str]:
    """Return in words why programs that hide something were not resumed."""
    return [f"{each.program.seed}: {each.failure}" for each in done if each.is_refused]


def false_alarms(done: Sequence[Verdict]) -> list[str]:
    """Return in words why programs in which nothing is hidden listed a reason."""
    reasons = Counter(reason for each in done if each.is_false_alarm for reason in each.reasons)
    return [f"{times:>4} {reason}" for reason, times in reasons.most_common()]


def warm_up(folder: Path) -> None:
    """Import here all that an attempt needs, so that its copy of this process need not."""
    import torchdata.stateful_dataloader  # noqa: F401

    torch.set_num_threads(1)
    kinds()
    everything = Program(
        0, data="torchdata", scheduler="SequentialLR", ema=1, patience=2, validate=("steps", 2), rules=("save",),
        recorded=True, clipping=1.0, poison="skip", accumulation=2,
    )  # fmt: skip
    parts = parts_of(everything, folder, 0)
    for name in OPTIMIZERS:
        getattr(torch.optim, name)(parts.net.parameters(), lr=0.1)


def report(done: Sequence[Verdict], seconds: float) -> None:
    """Print the table and what is wrong."""
    print(f"\n{table(done)}\n")
    kills = sum(each.kills for each in done)
    print(f"{len(done)} programs, {kills} kills, {seconds:.0f} s ({seconds / len(done):.2f} s a program)")
    if alarms := false_alarms(done):
        print("\nnothing was hidden, and the report lists:", *alarms, sep="\n")
    if refused := refusals(done):
        print("\nsomething was hidden, and the resume refused:", *refused, sep="\n")


def main() -> int:
    """Try the programs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="how many programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (%(default)s)")
    parser.add_argument("--only", type=int, help="the seed of a single one")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (%(default)s)")
    options = parser.parse_args()
    if MISSING:
        print(f"skipped: {MISSING}")
        return 0
    began, folder = monotonic(), Path(mkdtemp(prefix="programs-"))
    warm_up(folder / "warm")
    seeds = range(options.seed, options.seed + options.count) if options.only is None else [options.only]
    done = []
    for verdict in verdicts(seeds, options.jobs, folder):
        done.append(verdict)
        if verdict.is_violation or options.only is not None:
            print(verdict, flush=True)
        if len(done) % EACH == 0:
            print(f"{len(done)} of {len(seeds)} programs, {monotonic() - began:.0f} s", flush=True)
    wrong = [each for each in done if each.is_violation]
    report(done, monotonic() - began)
    if not wrong:
        rmtree(folder, ignore_errors=True)
        return 0
    seeds_of_them = " ".join(str(each.program.seed) for each in wrong)
    print(f"{len(wrong)} programs were not as they must be, seeds {seeds_of_them}. Their files are kept in {folder}.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
