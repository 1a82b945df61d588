"""`drill`: the batch in which two recorded runs begin to differ, done again operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from heliograph import BatchEnd, BatchStart, Run
from heliograph.spi import printable_lines

from ..divergence.compare import diverge
from ..divergence.report import Difference, Divergence, Kind
from ..step_check.operators import Call, CallDigests, difference_of
from .change import Change, change_of
from .errors import NotExact
from .paused_run import PausedRun
from .program import Program
from .recorded import RecordedRun

COMPUTED: tuple[Kind, ...] = (
    "draw", "order", "data", "loss", "gradients", "learning_rate", "options", "weights",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drill:
    """What doing a batch of two runs again has shown; `print` it.

    Attributes:
        divergence: of the recordings.
        operator: the first operator that differs between the two, in words; None where none does.
        repeats: whether each run, done again, is what its recording says, up to the end of that batch.
        operators: how many were compared.
        notes: what was not as it was in the recorded runs, when they were done again.
    """

    divergence: Divergence
    operator: str | None = None
    repeats: tuple[bool, bool] = (True, True)
    operators: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines, first = [str(self.divergence)], self.divergence.first
        if first is not None and first.kind not in COMPUTED:
            lines.append("No batch was done again: operators do not show where a difference of this kind comes from.")
        if not self.operators:
            return "\n".join(lines)
        if self.operator is not None:
            lines.append(f"Done again, the first difference: {self.operator}.")
        else:
            lines.append(f"Done again, none of the {self.operators:,} operators of that step differs.")
        lines += [f"Done again, {note}." for note in self.notes]
        for name, repeats in zip(self.divergence.names, self.repeats, strict=True):
            if not repeats:
                lines.append(
                    f"{name} is not what it is when it is done again: its program or its data have changed, it is not "
                    f"deterministic, or a machine computed wrongly."
                )
        return printable_lines("\n".join(lines))


def drill(
    one: str | Path,
    other: str | Path,
    program: Program,
    other_program: Program | None = None,
    *,
    change: Change | str | None = None,
    other_change: Change | str | None = None,
) -> Drill:
    """Find the first operator that differs between two recorded runs.

    Both are continued from their newest checkpoints before the first difference, as `goto` does, with what people had
    requested of them, and every operator of that batch is noted, forward and backward, with the bits that it was given
    and returned. Where gradients are accumulated, so are those of the batches before it in its step.

    Args:
        one: the folder of a run, or its recording.
        other: those of the other.
        program: the program of the first, as for `goto`; and of the other, if that is the same.
        other_program: the program of the other.
        change: as for `goto`, of the run that is a fork that was changed; of both, if both were, by the same function.
        other_change: the change of the other, if both are changed forks.

    Raises:
        FileNotFoundError: there is no such recording.
        ValueError: it cannot be read; a program has no `Checkpoint`; a change is given, and no run is a changed fork.
        NotExact: the change of a fork is on the way, and is not given, or another function is.
        UsageError: a program is not such a function, or there is no function of the name of a change.
        TypeError: a change is not a function.
    """
    changes = change_of("drill", change), change_of("drill", change if other_change is None else other_change)
    divergence = diverge(one, other)
    if divergence.first is None or divergence.first.kind not in COMPUTED:
        return Drill(divergence)
    programs = program, program if other_program is None else other_program
    runs = RecordedRun(one), RecordedRun(other)
    if changes != (None, None) and all(each.change is None for each in runs):
        raise ValueError("Neither run is a fork that was changed, so there is no change to make again.")
    first, second = (
        _trace(run, each, function if run.change is not None else None, divergence.first)
        for run, each, function in zip(runs, programs, changes, strict=True)
    )
    found, operators = difference_of(first.calls, second.calls), min(len(first.calls), len(second.calls))
    operator = None if found is None else found.text
    notes = tuple(dict.fromkeys([*first.notes, *second.notes]))
    return Drill(divergence, operator, (first.is_equal, second.is_equal), operators, notes)


class _Trace(NamedTuple):
    """A batch that was done again: its operators, whether the run is as it was, and what else is not."""

    calls: list[Call]
    is_equal: bool
    notes: list[str]


def _trace(recorded: RecordedRun, program: Program, change: Change | None, first: Difference) -> _Trace:
    """Do a run again up to the end of the batch that differs, and note the operators since the last step before it."""
    try:
        return _calls(recorded, program, change, first)
    except NotExact as error:  # of a change: a run without it would be another one
        raise NotExact(error.reasons, has_option=False) from None


def _calls(recorded: RecordedRun, program: Program, change: Change | None, first: Difference) -> _Trace:
    begin = recorded.window_of(first.epoch, first.batch)
    origin = recorded.origin_before(first.epoch, begin)
    changed = recorded.repeated_change(origin, change, exact=True)
    with PausedRun(recorded, program, origin, None, changed=changed, exact=False) as paused:
        place = first.epoch, begin - 1
        paused.go_to(lambda run, event: isinstance(event, BatchStart) and _place(run) == place)
        with paused.within(CallDigests()) as digests:
            for _ in range(begin, first.batch + 1):
                paused.go_to(lambda _, event: isinstance(event, BatchEnd))
        paused.go_to(lambda *_: True)
        return _Trace(digests.calls, paused.comparison.first is None, paused.notes)


def _place(run: Run) -> tuple[int, int]:
    return run.progress.epoch, run.progress.batch
