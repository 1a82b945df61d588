"""One random program: carried out, and judged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from heliograph.packages.tests.torture.silent_attempts import Account, Attempts
from heliograph.packages.tests.torture.silent_law import Violation, violations
from heliograph.packages.tests.torture.silent_program import Program

MEMORY = Path("/dev/shm")  # many small files: faster than a disk


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a program."""

    program: Program
    accounts: tuple[Account, ...]
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        """Return the program, how each attempt ended, what it said, and where the law was broken."""
        lines = [str(self.program)]
        for each in self.accounts:
            lines.append(f"  {each.kind}: {each.error or each.status or 'not begun'}")
            lines += [f"    said: {warning}" for warning in each.said]
        return "\n".join([*lines, *(f"  BROKEN: {violation}" for violation in self.violations)])


def tried(program: Program) -> Verdict:
    """Carry out a program in a folder of its own, and judge it."""
    folder = Path(mkdtemp(prefix="silent-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        with quiet():
            accounts = Attempts(program, folder).accounts()
    finally:
        rmtree(folder)
    return Verdict(program, accounts, violations(program, accounts))


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what is logged and warned of: the law asks what the result says."""
    logger = logging.getLogger("heliograph")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before
