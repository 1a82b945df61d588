"""`drill`: repeats the first batch that differs between two recorded runs, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from heliograph import BatchEnd, BatchStart, Run
from heliograph.spi import printable_lines

from ..divergence.compare import Divergence, FirstDifference, Kind, diverge
from ..step_check.operators import CallDigests, OperatorCall, difference_of
from .goto import PausedRun
from .program import Change, NotExact, Program, change_of
from .recorded import RecordedRun

COMPUTED: tuple[Kind, ...] = (
    "draw", "data", "loss", "gradients", "learning_rate", "options", "weights",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drill:
    """The repeated batch of two runs; `print` it.

    Attributes:
        divergence: of the recordings.
        operator: the first operator that differs; None if there is none.
        repeats: for each run, True if the rerun equals its recording up to the end of that batch.
        operators: the number of compared operators.
        notes: what was not repeated exactly.
    """

    divergence: Divergence
    operator: str | None = None
    repeats: tuple[bool, bool] = (True, True)
    operators: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines, first = [str(self.divergence)], self.divergence.first
        if first is not None and first.kind not in COMPUTED:
            lines.append("No batch was repeated: operators cannot explain a difference of this kind.")
        if not self.operators:
            return "\n".join(lines)
        if self.operator is not None:
            lines.append(f"In the rerun, the first difference: {self.operator}.")
        else:
            lines.append(f"In the rerun, none of the {self.operators:,} operators of that step differs.")
        lines += [f"In the rerun, {note}." for note in self.notes]
        for name, repeats in zip(self.divergence.names, self.repeats, strict=True):
            if not repeats:
                lines.append(
                    f"{name} differs from its rerun: its program or its data have changed, it is not deterministic, or "
                    f"a machine computed wrongly."
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

    Both runs are repeated from their newest checkpoints before the first difference, as in `goto`, including the
    requests of people. Then every operator of that batch is compared, forward and backward, with all bits of its inputs
    and outputs. With gradient accumulation, this includes the earlier batches of the same step.

    Args:
        one: the folder of a run, or its recording.
        other: the second run.
        program: of the first run, as for `goto`; also of the second by default.
        other_program: of the second run.
        change: as for `goto`, if a run is a changed fork; of both if both are.
        other_change: of the second run, if both are changed forks.

    Raises:
        FileNotFoundError: there is no such recording.
        ValueError: a recording cannot be read; a program has no `Checkpoint`; a change is given, but neither run is a
            changed fork.
        NotExact: the change of a fork must be repeated, and is missing or another function.
        UsageError: a program or a change is not such a function.
        TypeError: a change is not a function.
    """
    changes = change_of("drill", change), change_of("drill", change if other_change is None else other_change)
    divergence = diverge(one, other)
    if divergence.first is None or divergence.first.kind not in COMPUTED:
        return Drill(divergence)
    programs = program, program if other_program is None else other_program
    runs = RecordedRun(one), RecordedRun(other)
    if changes != (None, None) and not any(run.change for run in runs):
        raise ValueError("Neither run is a changed fork: leave change= out.")
    first, second = (
        _trace(run, run_program, function if run.change else None, divergence.first)
        for run, run_program, function in zip(runs, programs, changes, strict=True)
    )
    return Drill(
        divergence,
        difference_of(first.calls, second.calls),
        (first.is_equal, second.is_equal),
        min(len(first.calls), len(second.calls)),
        tuple(dict.fromkeys([*first.notes, *second.notes])),
    )


class _BatchTrace(NamedTuple):
    calls: list[OperatorCall]
    is_equal: bool
    notes: list[str]


def _trace(recorded: RecordedRun, program: Program, change: Change | None, first: FirstDifference) -> _BatchTrace:
    """Repeat a run up to the end of the batch that differs, and record the operators since the last step."""
    begin = recorded.window_of(first.epoch, first.batch)
    origin = recorded.origin_before(first.epoch, begin)
    place = first.epoch, begin - 1
    try:
        change_step = recorded.check_change(origin, change, exact=True)
    except NotExact as error:  # without the change the rerun would be meaningless
        raise NotExact(error.reasons, has_option=False) from None
    with PausedRun(recorded, program, origin, None, change=change, change_step=change_step, exact=False) as paused:
        paused.go_to(lambda run, event: isinstance(event, BatchStart) and _place(run) == place)
        with paused.within(CallDigests()) as digests:
            for _ in range(begin, first.batch + 1):
                paused.go_to(lambda _, event: isinstance(event, BatchEnd))
        paused.go_to(lambda *_: True)
        return _BatchTrace(digests.calls, paused.comparison.first is None, paused.notes)


def _place(run: Run) -> tuple[int, int]:
    return run.progress.epoch, run.progress.batch
