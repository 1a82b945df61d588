"""Run the tests that need a Ray cluster: after a failure or a hang, the rest run in a new process on a new cluster.

A hung test leaves its interpreter in a state in which others fail too. The script takes the options of pytest; its exit
status is 1 if a test failed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time

FOLDER = Path(__file__).parent
TEST_LIMIT = 300  # seconds for a test without a mark of its own; pytest-timeout then ends the process
QUIET_LIMIT = 600  # seconds without a finished test, for an interpreter in which that timeout cannot act


def main(options: Sequence[str], tests: Path = FOLDER) -> int:
    """Run every test once; return the exit status."""
    command = [sys.executable, "-m", "pytest", str(tests), "--exitfirst", f"--timeout={TEST_LIMIT}"]
    command += ["--timeout-method=thread", f"--sample-seed={random.randrange(10**6)}", *options]
    with TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        journal.touch()
        while True:
            begun = len(read(journal))
            status = run(command, journal)
            if status in (0, 5) or len(read(journal)) == begun:  # 5: no test is left
                break
        outcomes = read(journal)
    for name, outcome in outcomes.items():
        if outcome == "failed":
            print(f"FAILED on Ray: {name}")
    counts = {word: list(outcomes.values()).count(word) for word in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(counts["failed"] > 0 or status not in (0, 1, 5))


def run(command: Sequence[str], journal: Path) -> int:
    """Run one process; return its exit status, or that of a kill if no test finishes any more."""
    journal.touch()  # the time of the latest progress
    environment = {**os.environ, "HELIOGRAPH_JOURNAL": str(journal)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        if time() - journal.stat().st_mtime > QUIET_LIMIT:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def read(journal: Path) -> dict[str, str]:
    """Return the outcome of each test; one that began and did not end has failed."""
    lines = [line.partition(" ") for line in journal.read_text(encoding="utf-8").splitlines()]
    return {name: "failed" if word == "begun" else word for word, _, name in lines}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
