"""The check: a training without faults, twice, then one with faults, restarted until it ends, and compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp

from heliograph.events.checks import check_whole_number, known_names
from heliograph.testing.chaos.attempts import Attempt, Training
from heliograph.testing.chaos.comparison import Story, first_difference, story_of, varying
from heliograph.testing.chaos.faults.fault import HARMLESS, KINDS, Fault
from heliograph.testing.chaos.faults.plan import draw_faults
from heliograph.testing.chaos.processes import Start, function_starter, script_starter
from heliograph.testing.chaos.report import ChaosReport, Met, Verdict
from heliograph.testing.chaos.workspace import copy_folder
from heliograph.testing.resume.errors import UsageError

MORE_ATTEMPTS = 10  # than faults
PATIENCE = 900.0  # seconds without a sign of life, where nothing is known of the training
SHORTEST = 5.0  # seconds that the watchdog waits at least
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
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"There is no fault {kind!r}.{known_names(kind, KINDS)}")
    check_whole_number("ranks", ranks, at_least=1)
    place = Path(mkdtemp(prefix="chaos-")) if folder is None else Path(folder).resolve()
    if folder is not None and place.exists():
        raise UsageError(f"{place} exists: give a folder that does not, in which nothing can be overwritten.")

    def run(name: str, plan: Sequence[Fault], patience: float, limit: int) -> Training:
        copy(place / name)
        notes = place / f"{name}-notes"
        training = Training(start, place / name, notes, ranks=ranks, faults=plan, seed=seed)
        training.run(patience, limit)
        return training

    reference = run("reference", (), PATIENCE, 1)
    expected = _undisturbed(reference)
    twin = run("again", (), PATIENCE, 1)
    again = _undisturbed(twin)
    aside = [varying(one, other) for one, other in zip(expected, again, strict=True)]
    for one, other, names in zip(expected, again, aside, strict=True):
        if difference := first_difference(one, other, names):
            raise UsageError(
                f"The training differs from run to run without any fault, so nothing can be said: {difference}. "
                f"`python -m heliograph verify-resume` may find out why; the files are in {place}."
            )
    counts = expected[0].counts
    if isinstance(faults, int):
        check_whole_number("faults", faults, at_least=1)
        plan = draw_faults(seed, faults, counts, kinds, ranks=len(expected))
    else:
        plan = list(faults)
    chaotic = run("chaos", plan, _patience(reference, twin), len(plan) + MORE_ATTEMPTS)
    met = [story_of(path) for path in chaotic.journals]
    has_wrong_numbers = any(KINDS[plan[entry["number"]].kind].changes_numbers for each in met for entry in each.faults)
    differences = [
        found
        for one, other, names in zip(expected, met, aside, strict=True)
        if (found := first_difference(one, other, names, only_last=has_wrong_numbers))
    ]
    last = chaotic.attempts[-1]
    verdict: Verdict = "equal"
    difference = ""
    if not last.completed:
        verdict, difference = "did not end", _failure(last, chaotic.attempts)
    elif differences:
        verdict, difference = "differs", differences[0]
    report = ChaosReport(
        verdict,
        difference,
        seed,
        _met(plan, met),
        len(chaotic.attempts),
        sum(attempt.hung for attempt in chaotic.attempts),
        met[0].resumed,
        len(expected[0].losses),
        met[0].batches_done,
        min(reference.attempts[0].seconds, twin.attempts[0].seconds),
        sum(attempt.seconds for attempt in chaotic.attempts),
        counts["save_point"],
    )
    if folder is None and verdict == "equal":
        shutil.rmtree(place)
    return report


def _undisturbed(training: Training) -> list[Story]:
    """Return what each rank of a training without faults did.

    Raises:
        UsageError: it is of no use as a reference.
    """
    (attempt,) = training.attempts
    if not attempt.completed:
        raise UsageError(f"The training fails without any fault: {_failure(attempt, [attempt])}")
    stories = [story_of(path) for path in training.journals]
    if not any(story.losses for story in stories):
        raise UsageError("The training has no batch: no `heliograph.Trainer` has trained in it.")
    for story in stories:
        if story.resumed:
            raise UsageError(
                "The training continued from a checkpoint that was there before: leave its folder out, as in "
                "--leave-out runs."
            )
        if story.outside:
            raise UsageError(
                f"The training writes outside of its folder, where the runs would meet: {story.outside[0]}. Let it "
                f"write to a path that is relative to the current folder."
            )
    return stories


def _patience(*trainings: Training) -> float:
    """Return how long the watchdog waits, by how long trainings without faults were silent."""
    return max(SHORTEST, 4 * max(training.attempts[0].silence for training in trainings))


def _met(plan: Sequence[Fault], stories: Sequence[Story]) -> tuple[Met, ...]:
    acted = {entry["number"]: entry for story in stories for entry in story.faults}
    return tuple(
        Met(fault, each["where"], each["text"], each.get("by", ""), each.get("answer", ""))
        if (each := acted.get(number))
        else Met(fault)
        for number, fault in enumerate(plan)
    )


def _failure(attempt: Attempt, attempts: Sequence[Attempt]) -> str:
    """Return how the last attempt ended, with the end of its output."""
    status = ", ".join(map(str, attempt.statuses))
    lines = attempt.output.read_text(encoding="utf-8", errors="backslashreplace").strip().splitlines()
    how = "was ended by the watchdog" if attempt.hung else f"ended with status {status}"
    met = "" if attempt.faults else ", though no fault had acted in it"
    return f"attempt {len(attempts)} {how}{met}; its output ends with: {' | '.join(lines[-3:]) or 'nothing'}"
