"""The check: a training without faults, twice, then one with faults, restarted until it ends, and compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from heliograph.builtin_callbacks.recorder.diverge.compare import diverge
from heliograph.events.checks import check_whole_number, known_names
from heliograph.testing.chaos.attempts import Training
from heliograph.testing.chaos.checkpoint_facts import NAMES
from heliograph.testing.chaos.comparison import Story, first_difference, story_of, varying
from heliograph.testing.chaos.faults.fault import HARMLESS, KINDS, Fault
from heliograph.testing.chaos.faults.plan import draw_faults
from heliograph.testing.chaos.processes import Start, function_starter, script_starter
from heliograph.testing.chaos.reference import describe_failure, read_reference
from heliograph.testing.chaos.report import ChaosReport, Met, Verdict
from heliograph.testing.chaos.workspace import copy_folder
from heliograph.testing.resume.errors import UsageError

MORE_ATTEMPTS = 10  # than faults
PATIENCE = 900.0  # seconds without a sign of life, where nothing is known of the training
OTHER_SAVES = frozenset({"preempt", "lost-notice", "lost-request"})  # faults by which other checkpoints are written
MILD = frozenset({"preempt", "lost-request", "slow", "slow-disk", "clock-jump"})  # by which nothing need fail
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
) -> ChaosReport:
    """Run a training script with faults, restart it after each death as a scheduler would, and compare its end.

    The script is run three times, each in a copy of the folder `source`: twice without faults, for what it should do,
    and to see whether it does the same twice; and once with faults. It must resume by itself (`resume="auto"`), and
    write to paths that are relative to the current folder.

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

    Returns:
        The verdict, with what was lost.

    Raises:
        UsageError: it cannot be said: the script fails without faults, or differs from run to run; it writes outside of
            its copy; it trains nothing.
    """
    path, root = Path(script).resolve(), Path(source).resolve()
    if not path.is_file():
        raise UsageError(f"There is no file {script}.")
    if not path.is_relative_to(root):
        raise UsageError(f"{path} is not in {root}, which is copied: change to the folder of the script.")
    start = script_starter(path.relative_to(root), arguments)

    def copy(to: Path) -> None:
        copy_folder(root, to, leave_out)

    return _check(start, copy, folder, seed, faults, kinds, ranks)


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
    check = _Check(start, copy, place, seed, ranks)
    try:
        report = check.run(faults, kinds)
    except UsageError:
        if folder is None:
            shutil.rmtree(place)
        raise
    if folder is None and report.is_good:
        shutil.rmtree(place)
        return report
    return replace(report, folder=place)


class _Check:
    """The three trainings of a check.

    Args:
        start: starts a process.
        copy: makes the folder of a training.
        place: where all folders are made.
        seed: of all choices.
        ranks: how many processes train together.
    """

    def __init__(self, start: Start, copy: Callable[[Path], None], place: Path, seed: int, ranks: int) -> None:
        self._start, self._copy, self._place, self._seed, self._ranks = start, copy, place, seed, ranks

    def run(self, faults: Faults, kinds: Sequence[str]) -> ChaosReport:
        """Run all, and return what came of it."""
        reference, twin = (self._train(name, (), PATIENCE, 1) for name in ("reference", "again"))
        expected, again = read_reference(reference), read_reference(twin)
        aside = [varying(one, other) for one, other in zip(expected, again, strict=True)]
        if difference := _difference(expected, again, aside):
            raise UsageError(
                f"The training differs from run to run without any fault, so nothing can be said: {difference}. "
                f"`python -m heliograph verify-resume` may find out why."
            )
        counts, ranks = expected[0].counts, len(expected)
        plan = draw_faults(self._seed, faults, counts, kinds, ranks=ranks) if isinstance(faults, int) else list(faults)
        seconds = [training.attempts[0].seconds for training in (reference, twin)]
        patience = max(SHORTEST, 4 * max(training.attempts[0].silence for training in (reference, twin)))
        chaotic = self._train("chaos", plan, patience, len(plan) + MORE_ATTEMPTS)
        attempts, met = chaotic.attempts, [story_of(path) for path in chaotic.journals]
        verdict, difference = self._judge(chaotic, expected, met, aside, plan)
        return ChaosReport(
            verdict=verdict,
            difference=difference or "",
            seed=self._seed,
            met=_met(plan, met),
            attempts=len(attempts),
            hung=sum(attempt.hung for attempt in attempts),
            resumed=met[0].resumed if met else 0,
            batches=len(expected[0].losses),
            batches_done=met[0].batches_done if met else 0,
            seconds=min(seconds),
            seconds_spent=sum(attempt.seconds for attempt in attempts),
            saves=counts["save_point"],
        )

    def _train(self, name: str, plan: Sequence[Fault], patience: float, limit: int) -> Training:
        folder = self._place / name
        self._copy(folder)
        notes = self._place / f"{name}-notes"
        training = Training(self._start, folder, notes, ranks=self._ranks, faults=plan, seed=self._seed)
        training.run(patience, limit)
        return training

    def _judge(
        self,
        chaotic: Training,
        expected: Sequence[Story],
        met: Sequence[Story],
        aside: Sequence[set[str]],
        plan: Sequence[Fault],
    ) -> tuple[Verdict, str | None]:
        if not chaotic.attempts[-1].completed:
            return "did not end", describe_failure(chaotic.attempts[-1], chaotic.attempts)
        kinds = {plan[entry["number"]].kind for story in met for entry in story.faults}
        if kinds & OTHER_SAVES or not any(story.resumed for story in met):
            names = {path for story in (*expected, *met) for facts in story.facts.values() for path in facts}
            aside = [one | {path for path in names if path.startswith(NAMES)} for one in aside]
        changed = any(KINDS[kind].changes_numbers for kind in kinds)
        difference = _difference(expected, met, aside, only_last=changed)
        if difference:
            return "differs", difference + _meaning(expected[0], met[0])
        lost = next((story.lost for story in met if story.lost), None) or _needless_failure(chaotic)
        return "lost work" if lost else "equal", lost


def _difference(
    expected: Sequence[Story], others: Sequence[Story], aside: Sequence[set[str]], *, only_last: bool = False
) -> str | None:
    """Return the first difference of any rank."""
    for rank, (one, other, names) in enumerate(zip(expected, others, aside, strict=True)):
        if found := first_difference(one, other, names, only_last=only_last):
            return f"on rank {rank} {found}" if rank else found
    return None


def _needless_failure(training: Training) -> str | None:
    """Return which attempt has failed or hung, though nothing had happened by which it must."""
    for number, attempt in enumerate(training.attempts):
        if (attempt.failed or attempt.hung) and MILD.issuperset(attempt.faults):
            return describe_failure(attempt, training.attempts[: number + 1])
    return None


def _meaning(expected: Story, other: Story) -> str:
    """Return what the recordings of two trainings say of their first difference, if there are any."""
    if expected.recording is None or other.recording is None:
        return ""
    try:
        first = diverge(expected.recording, other.recording).first
    except ValueError as error:
        return f"; their recordings cannot be compared: {error}"
    return "" if first is None else f"; by their recordings: {first}"


def _met(plan: Sequence[Fault], stories: Sequence[Story]) -> tuple[Met, ...]:
    acted = {entry["number"]: entry for story in stories for entry in story.faults}
    return tuple(
        Met(fault, each["where"], each["text"], each.get("by", ""), each.get("answer", ""))
        if (each := acted.get(number))
        else Met(fault)
        for number, fault in enumerate(plan)
    )
