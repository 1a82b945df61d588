"""One random program: uninterrupted, killed and resumed, compared, and what its report lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import isnan
from pathlib import Path
from struct import pack

from heliograph.packages.tests.torture.children import forked
from heliograph.packages.tests.torture.hidden import kinds
from heliograph.packages.tests.torture.life import KILLED, End, Step, end_of, live, steps_of
from heliograph.packages.tests.torture.program import Kill, Program

SECONDS = 120.0  # for an attempt
OF_AN_ATTEMPT = (
    "plugins.draws.counts.train_end",
    "plugins.draws.drawn",
)  # each process that ends has TrainEnd once more
SEEN = 2  # repeated batches at each resume, so that a difference which shows in every batch can be seen
KILLS = (-9, KILLED)
REFUSAL = re.compile(r": (ValueError|TypeError|FloatingPointError): ")  # what a user can cause
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")  # the last line of a traceback


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a program.

    Attributes:
        program: which one.
        kills: how many attempts were killed.
        repeated: the fewest batches that a resumed attempt had to do again; None where none was resumed.
        reasons: what the report of the last attempt lists as untracked or different.
        difference: the first one, in words; empty where all was equal.
        failure: how an attempt failed; empty where none did.
        is_refused: whether that was a resumed attempt of a program that hides something, with an error for its user, or
            the training cannot be done at all, since its loss becomes NaN.
    """

    program: Program
    kills: int = 0
    repeated: int | None = None
    reasons: tuple[str, ...] = ()
    difference: str = ""
    failure: str = ""
    is_refused: bool = False

    @property
    def kind(self) -> str:
        """Which column of the table it belongs to."""
        if self.failure:
            return "refused" if self.is_refused else "failed"
        if self.reasons:
            return "named, unequal" if self.difference else "named, equal"
        if not self.difference:
            return "equal"
        return "beyond" if self.is_beyond else "UNEQUAL"

    @property
    def is_beyond(self) -> bool:
        """Whether it hides what only repeated steps can show, and a resume had too few of them."""
        hidden = [kinds()[name] for name in self.program.hidden]
        return any(each.beyond for each in hidden) and (self.repeated is None or self.repeated < SEEN)

    @property
    def is_false_alarm(self) -> bool:
        """Whether the report lists something although nothing is hidden."""
        return not self.program.hidden and self.program.is_exact and bool(self.reasons)

    @property
    def is_violation(self) -> bool:
        """Whether that must never be."""
        return self.kind in ("UNEQUAL", "failed") or self.is_false_alarm

    def __str__(self) -> str:
        lines = ["; ".join([f"  {self.kind}", *self.reasons])]
        lines += [f"  first difference: {self.difference}"] if self.difference else []
        lines += [f"  {self.failure}"] if self.failure else []
        lines += [f"  {self.kills} kills, at least {self.repeated} batches repeated at each resume"]
        return "\n".join([str(self.program), *lines])


def tried(program: Program, folder: Path) -> Verdict:
    """Run a program in a folder of its own; return what came of it."""
    alone, chain = folder / "alone", folder / "chain"
    for each in (alone, chain):
        each.mkdir(parents=True)
    try:
        _attempt(program, alone, 0)
        kills = _chain(program, chain)
    except (ChildProcessError, TimeoutError) as error:
        is_hidden = bool(program.hidden) and any(chain.iterdir())
        diverges = not any(chain.iterdir()) and "FloatingPointError" in str(error)
        is_refused = diverges or (is_hidden and REFUSAL.search(str(error)) is not None)
        return Verdict(program, failure=str(error), is_refused=is_refused)
    end, expected = end_of(chain), end_of(alone)
    assert end is not None
    assert expected is not None
    steps = steps_of(chain)
    aside: tuple[str, ...] = OF_AN_ATTEMPT if "TrainEnd" in program.draws else ()
    if kills and steps[-1].attempt < kills:  # killed when the training was over: an attempt that follows asks once more
        aside = ("plugins.",)
    found = next(_differences(steps, steps_of(alone), end, expected, aside), "")
    return Verdict(program, kills, repeated_in(steps), end.reasons, found)


def _chain(program: Program, folder: Path) -> int:
    """Kill attempt after attempt, and let the last one live; return how many were killed."""
    for attempt, kill in enumerate((*program.kills, None)):
        if not _attempt(program, folder, attempt, kill):
            return attempt
    raise AssertionError("an attempt that nobody kills was killed")


def _attempt(program: Program, folder: Path, attempt: int, kill: Kill | None = None) -> bool:
    """Run an attempt; return whether it was killed.

    Raises:
        ChildProcessError: it failed.
    """
    output = folder / "output.txt"
    status = forked(partial(live, program, folder, attempt, kill), output, SECONDS)
    if status == 0 or (kill is not None and status in KILLS):
        return status != 0
    which = "uninterrupted" if folder.name == "alone" else f"attempt {attempt}"
    lines = [line for line in output.read_text().splitlines() if ERROR.match(line)] or ["it said nothing"]
    raise ChildProcessError(f"the {which} failed with status {status}: {lines[-1]}")


def _differences(
    steps: Sequence[Step], expected: Sequence[Step], end: End, other: End, aside: tuple[str, ...]
) -> Iterator[str]:
    """Yield in words where two runs differ: in the losses of the batches that count, then in the end."""
    mine, its = ({step.batch: step.loss for step in each} for each in (steps, expected))  # of each batch the last time
    for batch in sorted(its):
        if batch not in mine or pack("<d", mine[batch]) != pack("<d", its[batch]):
            loss = mine.get(batch, "none")
            if not (isinstance(loss, float) and isnan(loss) and isnan(its[batch])):
                yield f"the loss of batch {batch} is {loss}, not {its[batch]}"
    for path in {**other.facts, **end.facts}:
        if not path.startswith(aside) and end.facts.get(path) != other.facts.get(path):
            here, there = (each.facts[path].sample if path in each.facts else "missing" for each in (end, other))
            yield f"{path} is {here}, not {there}"


def repeated_in(steps: Sequence[Step]) -> int | None:
    """Return the fewest batches that a resumed attempt did again."""
    furthest, fewest = 0, None
    for number, (_, group) in enumerate(groupby(steps, key=lambda step: step.attempt)):
        batches = [step.batch for step in group]
        if number:
            again = sum(batch <= furthest for batch in batches)
            fewest = again if fewest is None else min(fewest, again)
        furthest = max(furthest, *batches)
    return fewest
