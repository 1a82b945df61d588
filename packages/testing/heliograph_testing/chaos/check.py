"""`check_script` and `check_function`: compare a training with faults with one without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from heliograph.spi import UsageError, check_whole_number, known_names

from ..resume.check import varying
from .attempts import ChaosTraining
from .comparison import RankStory
from .faults.fault import HARMLESS, KINDS, Fault, draw_faults
from .processes import Start, function_starter, script_starter
from .report import ChaosReport
from .rounds import Aside, ChaosRound, check_saves, close_round, first_difference_of_ranks, read_reference, report_of
from .workspace import copy_folder

MORE_ATTEMPTS = 10  # in addition to one per fault
PATIENCE = 900.0  # seconds without progress, for a training of unknown speed
SHORTEST = 10.0  # minimum seconds of the watchdog
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
    """Run a training script with faults, restart it like a scheduler, and compare its result.

    The script runs three times, each time in a copy of the folder `source`: twice without faults, for the expected
    result and to test whether it is deterministic, and once with faults. The script must resume (`resume="auto"`) and
    write to paths relative to the current folder. If some drawn faults did not act, it runs again with other faults of
    the same kinds, until all have acted or none acts.

    Args:
        script: the file, in `source`.
        arguments: its arguments.
        seed: the seed of all choices: equal seeds give equal faults at equal events.
        faults: the number of faults, or a list of them.
        kinds: the kinds of drawn faults; by default all that do not change numbers.
        ranks: the number of processes per attempt, as with `torchrun`.
        source: the folder in which the script runs.
        folder: where to run; it must not exist and is kept. By default a temporary folder, removed if all is equal.
        leave_out: names in `source` that are not copied, for example `data` or `runs`.
        on_attempt: called with a line after each attempt, for example `print`.

    Returns:
        The report.

    Raises:
        UsageError: the check is impossible: the script fails without faults or is not deterministic, writes outside its
            copy, trains nothing, or saves nothing although faults end it.
    """
    path, root = Path(script).resolve(), Path(source).resolve()
    if not path.is_file():
        raise UsageError(f"{script} is not a file.")
    if not path.is_relative_to(root):
        raise UsageError(f"{path} is not in {root}, the folder that is copied: change to the folder of the script.")
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
    """Run `check_script` with a function, in forks of this process (Linux, macOS), which start faster.

    Args:
        train: trains on the CPU, in a current folder that is empty or has the files of the previous attempt.
        seed: see `check_script`.
        faults: see `check_script`.
        kinds: see `check_script`.
        ranks: see `check_script`.
        folder: see `check_script`.

    Returns:
        The report.
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
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"Unknown fault {kind!r}.{known_names(kind, KINDS)}")
    check_whole_number("ranks", ranks, at_least=1)
    if isinstance(faults, int):
        check_whole_number("faults", faults, at_least=1)
    if folder is not None and Path(folder).exists():
        raise UsageError(f"{folder} exists: choose a new folder, so that nothing is overwritten.")
    place = Path(mkdtemp(prefix="chaos-")) if folder is None else Path(folder).resolve()
    check = _ChaosCheck(start, copy, place, seed, ranks, on_attempt)
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


class _ChaosCheck:
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
        pair = [self._train(name, (), PATIENCE, 1) for name in ("reference", "again")]
        expected, again = (read_reference(training) for training in pair)
        aside = [varying(story.in_order, twin.in_order) for story, twin in zip(expected, again, strict=True)]
        if difference := first_difference_of_ranks(expected, again, aside):
            raise UsageError(
                f"The training is not deterministic even without faults: {difference}. "
                f"`python -m heliograph verify-resume` may show the cause."
            )
        counts = expected[0].counts
        plan = self._draw(self._seed, faults, kinds, counts) if isinstance(faults, int) else list(faults)
        check_saves(plan, counts)
        patience = max(SHORTEST, 4 * max(training.attempts[0].silence for training in pair))
        rounds = [self._run_with_faults(1, plan, patience, expected, aside)]
        while isinstance(faults, int) and (missed := rounds[-1].missed) and self._can_draw_again(rounds[-1]):
            number = len(rounds) + 1
            plan = self._draw(f"{self._seed} {number}", len(missed), [fault.kind for fault in missed], counts)
            rounds.append(self._run_with_faults(number, plan, patience, expected, aside))
        return report_of(rounds, expected[0], self._seed, min(training.attempts[0].seconds for training in pair))

    def _draw(self, seed: int | str, number: int, kinds: Sequence[str], counts: Mapping[str, int]) -> list[Fault]:
        return draw_faults(seed, number, counts, kinds, ranks=self._ranks)

    def _can_draw_again(self, last: ChaosRound) -> bool:
        # Some fault has acted, and faults explain any difference.
        is_explained = last.verdict == "equal" or (last.verdict == "differs" and last.changes_numbers)
        return is_explained and len(last.missed) < len(last.met)

    def _run_with_faults(
        self,
        number: int,
        plan: Sequence[Fault],
        patience: float,
        expected: Sequence[RankStory],
        aside: Sequence[Aside],
    ) -> ChaosRound:
        name = "chaos" if number == 1 else f"chaos-{number}"
        training = self._train(name, plan, patience, len(plan) + MORE_ATTEMPTS)
        return close_round(training, plan, expected, aside)

    def _train(self, name: str, plan: Sequence[Fault], patience: float, limit: int) -> ChaosTraining:
        folder = self._place / name
        self._copy(folder)
        notes = self._place / f"{name}-notes"
        training = ChaosTraining(
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
