"""What became of a training that met faults, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heliograph.spi import count

from .faults.fault import KINDS, Fault

Verdict = Literal["equal", "differs", "lost work", "did not end"]


@dataclass(frozen=True, slots=True)
class Met:
    """A fault of the plan, and what became of it.

    Attributes:
        fault: which.
        where: in the training it acted, in words; empty where it did not.
        text: what it did.
        noticed_by: of one that changes numbers: the plugin that noticed it; empty where none did.
        answer: what that did or said.
        why_not: of one that did not act: why.
    """

    fault: Fault
    where: str = ""
    text: str = ""
    noticed_by: str = ""
    answer: str = ""
    why_not: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether it changed a number, and nobody noticed."""
        return bool(self.where) and KINDS[self.fault.kind].changes_numbers and not self.noticed_by

    def __str__(self) -> str:
        if not self.where:
            return f"{self.fault}: did not act: {self.why_not}"
        text = f"{self.fault}: {self.where}: {self.text}"
        if not KINDS[self.fault.kind].changes_numbers:
            return text
        return f"{text}; " + (f"noticed by {self.noticed_by}: {self.answer}" if self.noticed_by else "nobody noticed")


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """The result of `check_script`.

    Attributes:
        verdict: `equal`: the losses of every batch, each time that it was done, and what the training ended with equal
            those without faults, bit for bit, and every restart has continued from the newest checkpoint, if there was
            one; `lost work`: only that is not so; `differs`; or `did not end`.
        difference: the first difference, or how it failed; empty where there is none.
        seed: of the faults.
        met: the faults of the plan, in its order; where others were drawn for those that did not act, these instead.
        trainings: how many times the training was done, from its start to its end, until all faults had acted.
        attempts: how many times it was started for that.
        hung: how many of these were ended by the watchdog.
        resumed: how many of these continued from a checkpoint.
        restarted: how many of these began from the start once more.
        batches: how many batches the training has.
        batches_done: how many were done, with those that were repeated.
        seconds: without faults.
        seconds_spent: with them.
        folder: where the files are, None where they were removed.
    """

    verdict: Verdict
    difference: str
    seed: int
    met: tuple[Met, ...]
    trainings: int
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
    def acted(self) -> tuple[Met, ...]:
        """The faults that have acted."""
        return tuple(each for each in self.met if each.where)

    @property
    def silent(self) -> tuple[Met, ...]:
        """The faults that changed numbers, which nobody noticed, where the end differs."""
        return () if self.verdict == "equal" else tuple(each for each in self.met if each.is_silent)

    @property
    def is_good(self) -> bool:
        """Whether nothing differs but for what was noticed."""
        noticed = any(each.noticed_by for each in self.met)
        return self.verdict == "equal" or (self.verdict == "differs" and noticed and not self.silent)

    @property
    def goodput(self) -> float:
        """Which part of the batches that were done counts, from 0 to 1."""
        return self._needed[0] / max(1, self.batches_done)

    @property
    def goodput_of_time(self) -> float:
        """Which part of the time would have been needed without faults, from 0 to 1."""
        return min(1.0, self._needed[1] / max(self.seconds_spent, 1e-9))

    @property
    def _needed(self) -> tuple[int, float]:
        """The batches and the seconds that the trainings would have needed without faults."""
        return self.batches * self.trainings, self.seconds * self.trainings

    def __str__(self) -> str:
        texts = {
            "equal": "equal, bit for bit: every loss, each time that its batch was done, and the end",
            "differs": f"differs: {self.difference}",
            "lost work": f"equal, but work was lost: {self.difference}",
            "did not end": f"did not end: {self.difference}",
        }
        unmet, batches, seconds = len(self.met) - len(self.acted), *self._needed
        lines = [
            f"{count(len(self.acted), 'fault', 'faults')} acted (seed {self.seed})"
            + (f", in {self.trainings} trainings" if self.trainings > 1 else "")
            + (f"; {unmet} did not" if unmet else ""),
            *(f"  {each}" for each in sorted(self.met, key=lambda each: not each.where)),
            f"{count(self.attempts, 'attempt', 'attempts')}: {self.resumed} continued from a checkpoint, "
            f"{self.restarted} began from the start again; {self.hung} were ended by the watchdog",
            f"goodput: {self.goodput:.0%} of the batches ({batches} of {self.batches_done}: "
            f"{self.batches_done - batches} were repeated), {self.goodput_of_time:.0%} of the time "
            f"({seconds:.1f} s of {self.seconds_spent:.1f} s)",
        ]
        if self.silent:
            lines.append(f"silent: {count(len(self.silent), 'fault', 'faults')} in numbers, which nobody noticed")
        if self.folder is not None:
            lines.append(f"the files are in {self.folder}")
        return "\n".join([*lines, texts[self.verdict]])
