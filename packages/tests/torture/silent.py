"""Random small programs on which one law holds: what was asked for happened, or the result says what did not.

Run `python packages/tests/torture/silent.py --count 20000 --seed 0 --jobs 2`. Each number is a program: `--only 17`
carries that one out again, and reports what it consists of. Exit status 1, with each such program in words, where the
law was broken: something did not happen, no warning says so, and no error was raised.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import monotonic

import torch
from heliograph.packages.tests.torture.silent_law import KEYWORDS, missing
from heliograph.packages.tests.torture.silent_program import drawn
from heliograph.packages.tests.torture.silent_trial import Verdict, tried

EACH = 1000  # so many programs, a line says how far it is
SHOWN = 5  # programs in words


def one(seed: int) -> Verdict:
    """Try the program of a seed."""
    return tried(drawn(seed))


def verdicts(seeds: Sequence[int], jobs: int) -> Iterator[Verdict]:
    """Yield what comes of each program, in the order of the seeds."""
    torch.set_num_threads(1)
    if jobs == 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(one, seeds, chunksize=20)


class Counts:
    """Counts over verdicts, so that these need not be kept."""

    def __init__(self) -> None:
        self.programs = 0
        self.broken: dict[str, list[int]] = {}
        self.ends, self.unasked, self.errors = Counter[str](), Counter[str](), Counter[str]()

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        self.programs += 1
        for kind in {violation.kind for violation in verdict.violations}:
            self.broken.setdefault(kind, []).append(verdict.program.seed)
        for account in verdict.accounts:
            self.ends[account.error.partition(":")[0] or account.status or "not begun"] += 1
            if account.error and not account.happened("raised"):
                self.errors[account.error[:110]] += 1
            elif account.said and not any(missing(verdict.program, account)):
                self.unasked.update(account.said)

    def __str__(self) -> str:
        lines = [f"{'what did not happen, and nothing said so':<42} programs  the first"]
        for kind in KEYWORDS:
            seeds = self.broken.get(kind, [])
            lines.append(f"{kind:<42} {len(seeds) or '-':>8}  {' '.join(map(str, seeds[:4]))}".rstrip())
        any_kind = len({seed for seeds in self.broken.values() for seed in seeds})
        ends = ", ".join(f"{end} {times}" for end, times in self.ends.most_common())
        return "\n".join([*lines, f"{'any of it':<42} {any_kind or '-':>8}", f"\nhow attempts ended: {ends}"])


def main() -> int:
    """Try the programs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (%(default)s)")
    parser.add_argument("--only", type=int, help="the seed of a single one")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (%(default)s)")
    parser.add_argument("--all", action="store_true", help="list errors, and warnings where the judge misses nothing")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count) if options.only is None else [options.only]
    began, counts, shown = monotonic(), Counts(), 0
    for verdict in verdicts(seeds, options.jobs):
        counts.add(verdict)
        if options.only is not None or (verdict.violations and shown < SHOWN):
            shown += 1
            print(verdict, flush=True)
        if counts.programs % EACH == 0:
            print(f"{counts.programs} of {len(seeds)} programs, {monotonic() - began:.0f} s", flush=True)
    seconds = monotonic() - began
    print(f"\n{counts}\n{counts.programs} programs, {seconds:.0f} s ({1000 * seconds / counts.programs:.0f} ms each)")
    if options.all:
        for title, found in (("errors", counts.errors), ("warnings where nothing was missed", counts.unasked)):
            print(f"\n{title}:", *(f"{times:>5} {text}" for text, times in found.most_common(40)), sep="\n")
    return 1 if counts.broken else 0


if __name__ == "__main__":
    sys.exit(main())
