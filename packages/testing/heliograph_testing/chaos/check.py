"""The check: a training without faults, twice, then one with faults, restarted until it ends, and compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from heliograph.spi import UsageError, check_whole_number, known_names

from ..resume.check import varying
from .attempts import Training
from .comparison import Story
from .faults.fault import HARMLESS, KINDS, Fault
from .faults.plan import draw_faults
from .processes import Start, function_starter, script_starter
from .reference import check_saves, read_reference
from .report import ChaosReport
from .rounds import Aside, Round, close_round, first_difference_of_ranks
from .summary import report_of
from .workspace import copy_folder

MORE_ATTEMPTS = 10  # than faults
PATIENCE = 900.0  # seconds without a sign of life, where nothing is known of the training
SHORTEST = 10.0  # seconds that the watchdog waits at least
Faults = int | Sequence[Fault]


def check_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    seed: int = 0,
    faults: Faults = 50,
    kinds: Sequence[str] = HARMLESS,
    ranks: int = 1,
    source: str | Path = ".",
    folder: str | Path | None = None,
    leave_out: Sequence[str] = (),
    on_attempt: Callable[[str], object] | None = None,
) -> ChaosReport:
    """Run a training script with faults, restart it after each death as a scheduler would, and compare its end.

    The script is run three times, each in a copy of the folder `source`: twice without faults, for what it should do,
    and to see whether it does the same twice; and once with faults. It must resume by itself (`resume="auto"`), and
    write to paths that are relative to the current folder. Where some of a number of faults did not act, it is run
    again, with others of the same kinds, until all have acted, or none does.

    Args:
        script: the file, within `source`.
        arguments: its arguments.
        seed: of all choices: the same faults at the same events.
        faults: how many, or which.
        kinds: of faults that are drawn; by default all that change no numbers.
        ranks: how many processes to start for each attempt, as `torchrun` does.
        source: the folder that the script is run in.
        folder: where to run; it must not exist and is kept. By default a temporary one, removed where all is equal.
        leave_out: names in `source` that are not copied, such as `data` or `runs`.
        on_attempt: called with a line after each attempt, such as `print`.

    Returns:
        The verdict, with what was lost.

    Raises:
        UsageError: it cannot be said: the script fails without faults, or differs from run to run; it writes outside of
            its copy; it trains nothing, or saves nothing though faults are to end it.
    """
    path, root = Path(script).resolve(), Path(source).resolve()
    if not path.is_file():
        raise UsageError(f"There is no file {script}.")
    if not path.is_relative_to(root):
        raise UsageError(f"{path} is not in {root}, which is copied: change to the folder of the script.")
    start = script_starter(path.relative_to(root), arguments)

    def copy(to: Path) -> None:
        copy_folder(root, to, leave_out)

    return _check(start, copy, folder, seed, faults, kinds, ranks, on_attempt)


def check_function(
    train: Callable[[], object],
    *,
    seed: int = 0,
    faults: Faults = 20,
    kinds: Sequence[str] = HARMLESS,
    ranks: int = 1,
    folder: str | Path | None = None,
) -> ChaosReport:
    """Do as `check_script` with a function, in copies of this process (Linux, macOS): quicker, as torch is there.

    Args:
        train: trains on the CPU, in a current folder that is empty, or where an attempt before it has left its files.
        seed: see `check_script`, as for the rest.
        faults: see there.
        kinds: see there.
        ranks: see there.
        folder: see there.
    """
    return _check(function_starter(train), lambda to: to.mkdir(parents=True), folder, seed, faults, kinds, ranks)


def _check(
    start: Start,
    copy: Callable[[Path], None],
    folder: str | Path | None,
    seed: int,
    faults: Faults,
    kinds: Sequence[str],
    ranks: int,
    on_attempt: Callable[[str], object] | None = None,
) -> ChaosReport:
    """Check in a folder that is given and kept, or in a temporary one, which is kept where something differs."""
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"There is no fault {kind!r}.{known_names(kind, KINDS)}")
    check_whole_number("ranks", ranks, at_least=1)
    if isinstance(faults, int):
        check_whole_number("faults", faults, at_least=1)
    if folder is not None and Path(folder).exists():
        raise UsageError(f"{folder} exists: give a folder that does not, in which nothing can be overwritten.")
    place = Path(mkdtemp(prefix="chaos-")) if folder is None else Path(folder).resolve()
    check = _Check(start, copy, place, seed, ranks, on_attempt)
    try:
        report = check.run(faults, kinds)
    except (UsageError, KeyboardInterrupt):
        if folder is None:
            shutil.rmtree(place)
        raise
    if folder is None and report.is_good:
        shutil.rmtree(place)
        return report
    return replace(report, folder=place)


class _Check:
    """The trainings of a check: two without faults, then some with them.

    Args:
        start: starts a process.
        copy: makes the folder of a training.
        place: where all folders are made.
        seed: of all choices.
        ranks: how many processes train together.
        on_attempt: called with a line after each attempt.
    """

    def __init__(
        self,
        start: Start,
        copy: Callable[[Path], None],
        place: Path,
        seed: int,
        ranks: int,
        on_attempt: Callable[[str], object] | None,
    ) -> None:
        self._start, self._copy, self._place, self._seed, self._ranks = start, copy, place, seed, ranks
        self._on_attempt = on_attempt

    def run(self, faults: Faults, kinds: Sequence[str]) -> ChaosReport:
        """Run all, and return what came of it.

        Raises:
            UsageError: nothing can be said.
        """
        pair = [self._train(name, (), PATIENCE, 1) for name in ("reference", "again")]
        expected, again = (read_reference(training) for training in pair)
        aside = [varying(one.in_order, other.in_order) for one, other in zip(expected, again, strict=True)]
        if difference := first_difference_of_ranks(expected, again, aside):
            raise UsageError(
                f"The training differs from run to run without any fault, so nothing can be said: {difference}. "
                f"`python -m heliograph verify-resume` may find out why."
            )
        counts = expected[0].counts
        plan = self._aim(self._seed, faults, kinds, counts) if isinstance(faults, int) else list(faults)
        check_saves(plan, counts)
        patience = max(SHORTEST, 4 * max(training.attempts[0].silence for training in pair))
        rounds = [self._meet(1, plan, patience, expected, aside)]
        while isinstance(faults, int) and (missed := rounds[-1].missed) and self._may_aim_again(rounds[-1]):
            number = len(rounds) + 1
            plan = self._aim(f"{self._seed} {number}", len(missed), [fault.kind for fault in missed], counts)
            rounds.append(self._meet(number, plan, patience, expected, aside))
        return report_of(rounds, expected[0], self._seed, min(training.attempts[0].seconds for training in pair))

    def _aim(self, seed: int | str, number: int, kinds: Sequence[str], counts: Mapping[str, int]) -> list[Fault]:
        return draw_faults(seed, number, counts, kinds, ranks=self._ranks)

    def _may_aim_again(self, last: Round) -> bool:
        """Return whether more can be found out: some fault has acted, and nothing is wrong that none explains."""
        is_explained = last.verdict == "equal" or (last.verdict == "differs" and last.changes_numbers)
        return is_explained and len(last.missed) < len(last.met)

    def _meet(
        self,
        number: int,
        plan: Sequence[Fault],
        patience: float,
        expected: Sequence[Story],
        aside: Sequence[Aside],
    ) -> Round:
        """Let a training meet faults, until it ends."""
        name = "chaos" if number == 1 else f"chaos-{number}"
        training = self._train(name, plan, patience, len(plan) + MORE_ATTEMPTS)
        return close_round(training, plan, expected, aside)

    def _train(self, name: str, plan: Sequence[Fault], patience: float, limit: int) -> Training:
        folder = self._place / name
        self._copy(folder)
        notes = self._place / f"{name}-notes"
        training = Training(
            self._start,
            folder,
            notes,
            ranks=self._ranks,
            faults=plan,
            seed=self._seed,
            on_attempt=self._on_attempt,
        )
        training.run(patience, limit)
        return training
