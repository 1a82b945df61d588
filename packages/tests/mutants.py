"""Twenty faults, each put into a copy of the sources: do the tests of a commit find it?

Run `python packages/tests/mutants.py [--only NAME] [--whole] [--sample-seed N]`. For each fault the tests of its
room run, and where they find nothing all others but those on Ray: less than an hour in all. A fault is found by its
text, wherever the file lies. All tests run once without a fault first: what fails then would seem to find every fault.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
ROOMS = ("builtin_callbacks", "core", "events", "plugins")
CAUGHT = (1, 2)  # pytest's status when a test failed, without and with pytest-xdist
MISSED = 0
ALL = (
    "tests",
    "packages",
    "--ignore=packages/ray/tests/on_ray",
    "--ignore=packages/tests/test_mutants.py",
)  # that looks for the texts of all faults
FIRST = {
    "loop": ("tests/core", "--ignore=tests/core/checkpoint", "--ignore=tests/core/data", "--ignore=tests/core/engines"),
    "storage": ("tests/core/checkpoint",),
    "ranks": ("tests/core/distributed", "tests/core/engines"),
    "data": ("tests/core/data",),
}


@dataclass(frozen=True)
class Fault:
    """What is replaced by what, in the only source file that has it; the name begins with the room."""

    name: str
    text: str
    by: str

    @property
    def room(self) -> str:
        """Return the key of the tests that run first."""
        return self.name.partition(":")[0]


FAULTS = (
    # The loop.
    Fault(
        "loop: a batch is counted twice",
        "progress.batch += 1\n        work.in_hand = False\n",
        "progress.batch += 2\n        work.in_hand = False\n",
    ),
    Fault(
        "loop: an epoch is left late",
        "progress.steps >= last_step:\n            break",
        "False:\n            break",
    ),
    Fault("loop: a skipped batch is not counted", 'run.control.count_skip("skipped_batches")', "pass"),
    Fault("loop: a window is not emptied", "    window.size = 0\n    window.zero_grad()\n", "    window.size = 0\n"),
    Fault(
        "loop: the last window is not stepped",
        "not control.holds_step or run.data.is_last_batch:\n        close_window(run, window)",
        "not control.holds_step:\n        close_window(run, window)",
    ),
    Fault("loop: ShouldStop comes at no boundary", "        should_stop.emit(run, SHOULD_STOP)\n", "        pass\n"),
    # The storage.
    Fault(
        "storage: data is not synced",
        "        files.sync(file)\n    return entry\n",
        "    return entry\n",
    ),
    Fault(
        "storage: the folder is not synced",
        "        files.rename(hidden.data, path)\n        files.sync_folder(self.folder)\n",
        "        files.rename(hidden.data, path)\n",
    ),
    Fault(
        "storage: shards do not get their name",
        "            files.rename(hidden.shards, self.folder / entry.shards[0])\n",
        "            pass\n",
    ),
    Fault(
        "storage: nothing is read back",
        "(read_back or writer.leaves_out) and not",
        "False and not",
    ),
    Fault(
        "storage: an undone save leaves its data",
        "            self._sweep()\n        except OSError as second:\n",
        "            pass\n        except OSError as second:\n",
    ),
    Fault(
        "storage: shards of another checkpoint are removed",
        'if not is_unsure and not any(file.entry and (file.entry.shards or ("",))[0] == name for file in files):',
        "if True:",
    ),
    # The ranks.
    Fault("ranks: an interrupt is not voted on", "self._due or self._interrupted or", "self._due or"),
    Fault(
        "ranks: different places are not seen",
        "if len(set(steps)) > 1 or len(set(batches)) > 1:",
        "if False:",
    ),
    Fault(
        "ranks: a veto of one rank is lost",
        "vetoed=any(ballot.vetoes for ballot in ballots)",
        "vetoed=ballots[0].vetoes",
    ),
    Fault(
        "ranks: a skip stays with its rank",
        "        if skips:\n            self.skips_batch = self.touched = True",
        "        if skips:\n            pass",
    ),
    # The data.
    Fault(
        "data: the ranks take the same positions",
        "yield filled[self.rank :: ranks], number * size + self.rank, ranks",
        "yield filled[self.rank :: ranks], number * size, ranks",
    ),
    Fault(
        "data: a resumed epoch begins a round early",
        "            if batch >= self.batch:\n",
        "            if batch >= self.batch - 1:\n",
    ),
    Fault(
        "data: batches of one rank are counted from one",
        "position + sum(map(len, batches[:rank]))",
        "position + rank",
    ),
    Fault("data: draws do not depend on the whole key", 'b"%d," * len(key) % key', 'b"%d," * len(key[:1]) % key[:1]'),
)


def main() -> None:
    """Print for each fault the test that finds it; the status is 1 where one is missed."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the faults whose names contain this")
    parser.add_argument("--whole", action="store_true", help="with every case")
    parser.add_argument("--sample-seed", default="0", help="(%(default)s)")
    options = parser.parse_args()
    sample = ["--sample-seed", options.sample_seed, *(["--whole"] if options.whole else [])]
    faults = [fault for fault in FAULTS if options.only in fault.name]
    missed = 0
    if failed := failing_test(None, [*sample, *ALL]):
        sys.exit(f"{failed} fails without a fault, so nothing can be learned from the tests.")
    for fault in faults:
        failed = failing_test(fault, [*sample, *FIRST[fault.room]]) or failing_test(fault, [*sample, *ALL])
        missed += failed is None
        print(f"MISSED  {fault.name}" if failed is None else f"caught  {fault.name}  by {failed}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught")
    sys.exit(bool(missed))


def failing_test(fault: Fault | None, arguments: Sequence[str]) -> str | None:
    """Return the first test that fails in a copy of the repository that has the fault, or none; None where all pass.

    Raises:
        ValueError: the text is not there once.
        RuntimeError: the tests did not run.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "worksteal", *arguments]
    with copy_with(fault) as copy:
        done = run_in(copy, command)
    if done.returncode not in (MISSED, *CAUGHT) or "no tests ran" in done.stdout:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    if done.returncode == MISSED:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else "a process of the tests that ended"


@contextmanager
def copy_with(fault: Fault | None) -> Iterator[Path]:
    """Make a temporary copy of the repository that has a fault, or none.

    Raises:
        ValueError: the text is not there once.
    """
    with TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "heliograph"  # the repository is the package
        for name in _tracked():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        if fault is not None:
            source = find(fault, copy)
            source.write_text(source.read_text(encoding="utf-8").replace(fault.text, fault.by), encoding="utf-8")
        yield copy


def run_in(copy: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a copy, whose package it imports, with temporary files beside it."""
    beside = str(copy.parent)
    path = os.pathsep.join([beside, *(str(folder.parent) for folder in copy.glob("packages/*/heliograph_*"))])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": beside, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def find(fault: Fault, root: Path) -> Path:
    """Return the only source file that has the text of a fault.

    Raises:
        ValueError: it is not there once.
    """
    kernel = (path for room in ROOMS for path in sorted((root / room).rglob("*.py")))
    packages = sorted(root.glob("packages/*/heliograph_*/**/*.py"))
    found = _with_text(kernel, fault.text) or _with_text(packages, fault.text)
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(root)) for path in found) or "nowhere"
        raise ValueError(
            f"The text of {fault.name!r} is to be in one place, and is in {places}: adapt it in {__file__}."
        )
    return found[0]


def _with_text(sources: Iterable[Path], text: str) -> list[Path]:
    """Return each file as often as it has the text."""
    return [path for path in sources for _ in range(path.read_text(encoding="utf-8").count(text))]


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


if __name__ == "__main__":
    main()
