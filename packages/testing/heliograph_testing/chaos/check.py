"""`check_script` and `check_function`: compare a training with faults with one without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from heliograph.spi import UsageError, check_whole_number, count, known_names

from ..resume.check import Aside, varying
from .attempts import ChaosAttempt, ChaosProgram, run_script
from .fault import HARMLESS, KINDS, Fault, FaultOutcome, draw_faults
from .story import RankStory, first_difference, read

SHORTEST = 10.0  # minimum seconds of the watchdog
MOST = 500 * 2**20  # bytes per copy
NEVER = frozenset({"__pycache__", "node_modules"})  # names that are not copied
MILD = frozenset({"preempt", "slow", "slow-disk", "clock-jump"})  # no attempt may fail after these
Faults = int | Sequence[Fault]
Verdict = Literal["equal", "differs", "lost work", "did not end"]


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """The result of `check_script` and `check_function`.

    Attributes:
        verdict: `equal`: all losses, including those of repeated batches, and the final state are bitwise identical to
            the training without faults, and each restart continued from the newest checkpoint, if there was one; `lost
            work`: equal, but a restart did not; `differs`; or `did not end`.
        difference: the first difference, or the failure; empty if there is none.
        seed: the seed of the faults.
        met: the faults of the plan with their outcomes.
        attempts: the number of starts.
        hung: the attempts that the watchdog ended.
        resumed: the attempts that continued from a checkpoint.
        restarted: the attempts that repeated the training from its start.
        batches: the batches of the training.
        batches_done: the batches that were trained, including repeated ones.
        seconds: the duration without faults.
        seconds_spent: the duration with faults.
        folder: the folder of the files; None if it was removed.
    """

    verdict: Verdict
    difference: str
    seed: int
    met: tuple[FaultOutcome, ...]
    attempts: int
    hung: int
    resumed: int
    restarted: int
    batches: int
    batches_done: int
    seconds: float
    seconds_spent: float
    folder: Path | None = None

    @property
    def acted(self) -> tuple[FaultOutcome, ...]:
        """The faults that acted."""
        return tuple(outcome for outcome in self.met if outcome.where)

    @property
    def silent(self) -> tuple[FaultOutcome, ...]:
        """Unnoticed faults in numbers, if the training differs."""
        return () if self.verdict == "equal" else tuple(outcome for outcome in self.met if outcome.is_silent)

    @property
    def is_good(self) -> bool:
        """Whether nothing differs, or all causes of a difference were noticed."""
        noticed = any(outcome.noticed_by for outcome in self.met)
        return self.verdict == "equal" or (self.verdict == "differs" and noticed and not self.silent)

    @property
    def goodput(self) -> float:
        """The fraction of the trained batches that was needed, from 0 to 1."""
        return self.batches / max(1, self.batches_done)

    @property
    def goodput_of_time(self) -> float:
        """The fraction of the time that was needed, from 0 to 1."""
        return min(1.0, self.seconds / max(self.seconds_spent, 1e-9))

    def __str__(self) -> str:
        texts = {
            "equal": "equal, bit for bit: every loss, including repeated batches, and the final state",
            "differs": f"differs: {self.difference}",
            "lost work": f"equal, but work was lost: {self.difference}",
            "did not end": f"did not end: {self.difference}",
        }
        unmet = len(self.met) - len(self.acted)
        lines = [
            f"{count(len(self.acted), 'fault', 'faults')} acted (seed {self.seed})"
            + (f"; {unmet} did not" if unmet else ""),
            *(f"  {outcome}" for outcome in sorted(self.met, key=lambda outcome: not outcome.where)),
            f"{count(self.attempts, 'attempt', 'attempts')}: {self.resumed} continued from a checkpoint, "
            f"{self.restarted} restarted from scratch; the watchdog ended {self.hung}",
            f"goodput: {self.goodput:.0%} of the batches ({self.batches} of {self.batches_done}: "
            f"{self.batches_done - self.batches} were repeated), {self.goodput_of_time:.0%} of the time "
            f"({self.seconds:.1f} s of {self.seconds_spent:.1f} s)",
        ]
        if self.silent:
            lines.append(f"silent: {count(len(self.silent), 'fault', 'faults')} in numbers not noticed")
        if self.folder is not None:
            lines.append(f"the files are in {self.folder}")
        return "\n".join([*lines, texts[self.verdict]])


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
    write to paths relative to the current folder.

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

    run, copy = partial(run_script, path.relative_to(root), arguments), partial(_copy_folder, root, leave_out=leave_out)
    program = ChaosProgram(run, copy, _new_folder(folder), seed, ranks, on_attempt)
    return _check(program, faults, kinds, is_kept=folder is not None)


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
    program = ChaosProgram(train, partial(Path.mkdir, parents=True), _new_folder(folder), seed, ranks)
    return _check(program, faults, kinds, is_kept=folder is not None)


def _new_folder(folder: str | Path | None) -> Path:
    if folder is None:
        return Path(mkdtemp(prefix="chaos-"))
    if Path(folder).exists():
        raise UsageError(f"{folder} exists: choose a new folder, so that nothing is overwritten.")
    return Path(folder).resolve()


def _check(program: ChaosProgram, faults: Faults, kinds: Sequence[str], *, is_kept: bool) -> ChaosReport:
    try:
        report = _compare(program, faults, kinds)
    except (ValueError, KeyboardInterrupt):  # also UsageError
        if not is_kept:
            shutil.rmtree(program.place)
        raise
    if report.is_good and not is_kept:
        shutil.rmtree(program.place)
        return report
    return replace(report, folder=program.place)


def _compare(program: ChaosProgram, faults: Faults, kinds: Sequence[str]) -> ChaosReport:
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"Unknown fault {kind!r}.{known_names(kind, KINDS)}")
    check_whole_number("ranks", program.ranks, at_least=1)
    if isinstance(faults, int):
        check_whole_number("faults", faults, at_least=1)
    pair = {name: program.train(name)[0] for name in ("reference", "again")}
    expected, again = (_read_reference(program, name, attempt) for name, attempt in pair.items())
    aside = [varying(story.in_order, twin.in_order) for story, twin in zip(expected, again, strict=True)]
    if difference := _first_difference_of_ranks(expected, again, aside):
        raise UsageError(
            f"The training is not deterministic even without faults: {difference}. "
            f"`python -m heliograph verify-resume` may show the cause."
        )
    counts = expected[0].counts
    plan = draw_faults(program.seed, faults, counts, kinds, ranks=program.ranks) if isinstance(faults, int) else faults
    ending = sorted({fault.kind for fault in plan if KINDS[fault.kind].ends})
    if ending and not counts.get("save_point"):
        raise UsageError(
            f"The training has no save point, so it cannot resume after a fault that ends it ({', '.join(ending)}): "
            f"add Checkpoint('runs/x', every=Every(epochs=1), resume='auto'), or choose other kinds."
        )
    patience = max(SHORTEST, 4 * max(attempt.silence for attempt in pair.values()))
    attempts = program.train("chaos", plan, patience)
    stories = [RankStory.read(path) for path in program.journals("chaos")]
    acted = {number: outcome for story in stories for number, outcome in story.faults.items()}
    outcomes = tuple(acted.get(number) or FaultOutcome(fault) for number, fault in enumerate(plan))
    verdict, difference = _judge(attempts, stories, outcomes, expected, aside)
    main = stories[0] if stories else RankStory()  # no story if no training started
    return ChaosReport(
        verdict=verdict,
        difference=difference,
        seed=program.seed,
        met=outcomes,
        attempts=len(attempts),
        hung=sum(attempt.hung for attempt in attempts),
        resumed=main.resumed,
        restarted=main.restarted,
        batches=len(expected[0].done),
        batches_done=main.done.total(),
        seconds=min(attempt.seconds for attempt in pair.values()),
        seconds_spent=sum(attempt.seconds for attempt in attempts),
    )


def _read_reference(program: ChaosProgram, name: str, attempt: ChaosAttempt) -> list[RankStory]:
    journals = program.journals(name)
    for path in journals:
        for entry in read(path):
            if entry["what"] == "refused":
                raise UsageError(entry["text"])
    if not attempt.completed:
        raise UsageError(f"The training fails without faults: {_describe_failure(1, attempt)}")
    stories = [RankStory.read(path) for path in journals]
    if any(story.resumed for story in stories):
        raise UsageError(
            "The training resumed from a checkpoint that existed before: exclude its folder, for example --leave-out "
            "runs."
        )
    if not any(story.done for story in stories):
        raise UsageError("The script trained no batch with a `heliograph.Trainer`.")
    for story in stories:
        if story.lost:
            raise UsageError(f"The training loses work without faults: {story.lost}.")
    return stories


def _describe_failure(number: int, attempt: ChaosAttempt) -> str:
    status = ", ".join(map(str, attempt.statuses))
    lines = attempt.output.read_text(encoding="utf-8", errors="backslashreplace").strip().splitlines()
    how = "was ended by the watchdog" if attempt.hung else f"ended with status {status}"
    faults = ", ".join(attempt.faults) or "none"
    return f"attempt {number} {how}; faults: {faults}; its output ends with: {' | '.join(lines[-3:]) or 'nothing'}"


def _first_difference_of_ranks(
    expected: Sequence[RankStory], stories: Sequence[RankStory], aside: Sequence[Aside], *, only_last: bool = False
) -> str:
    for rank, (reference, story, names) in enumerate(zip(expected, stories, aside, strict=True)):
        if difference := first_difference(reference, story, names, only_last=only_last):
            return f"on rank {rank} {difference}" if rank else difference
    return ""


def _judge(
    attempts: Sequence[ChaosAttempt],
    stories: Sequence[RankStory],
    outcomes: Sequence[FaultOutcome],
    expected: Sequence[RankStory],
    aside: Sequence[Aside],
) -> tuple[Verdict, str]:
    if not attempts[-1].completed:
        return "did not end", _describe_failure(len(attempts), attempts[-1])
    acted = [outcome.fault for outcome in outcomes if outcome.where]
    if any(fault.kind == "preempt" for fault in acted) or not any(story.resumed for story in stories):
        aside = [names | {("checkpoints", "")} for names in aside]  # they are saved at other moments
    changed = any(fault.changes_numbers for fault in acted)
    if difference := _first_difference_of_ranks(expected, stories, aside, only_last=changed):
        return "differs", difference
    for story in stories:
        if story.lost:
            return "lost work", story.lost
    for number, attempt in enumerate(attempts, 1):
        if (attempt.failed or attempt.hung) and MILD.issuperset(attempt.faults):  # no fault explains it
            return "lost work", _describe_failure(number, attempt)
    return "equal", ""


def _copy_folder(source: Path, to: Path, *, leave_out: Collection[str]) -> None:
    for name in leave_out:
        if not (source / name).exists():
            raise UsageError(f"--leave-out {name}: {source} has no such entry.")
    excluded = {(source / name).resolve() for name in leave_out}
    size = 0

    def ignored(folder: str, names: list[str]) -> set[str]:
        nonlocal size
        here = Path(folder)
        skipped = {
            name
            for name in names
            if name.startswith(".")
            or name in NEVER
            or (here / name).resolve() in excluded
            or (here / name / "pyvenv.cfg").exists()
        }
        size += sum((here / name).lstat().st_size for name in names if name not in skipped)
        if size > MOST:
            raise UsageError(
                f"{source} has more than {MOST // 2**20} MB and is copied three times: exclude what the script does "
                f"not read, for example --leave-out data, or run this in a smaller folder."
            )
        return skipped

    shutil.copytree(source, to, symlinks=True, ignore=ignored)
