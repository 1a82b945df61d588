"""The report of a chaos check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heliograph.spi import count

from .fault import FaultOutcome

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
