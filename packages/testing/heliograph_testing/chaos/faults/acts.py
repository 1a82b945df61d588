"""Faults that have acted, what they do to the process, and who notices those in numbers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .fault import Fault

if TYPE_CHECKING:
    from heliograph import Run

SOON = 2  # batches within which a request can be the answer to a fault
ANSWERS = frozenset({"stop", "skip_step", "skip_batch", "roll_back"})  # requests by which a plugin answers bad numbers


@dataclass(frozen=True, slots=True)
class Act:
    """A fault that has acted.

    Attributes:
        fault: which.
        where: in the training, in words.
        text: what it did.
        batches: the finished batches of the training before it.
        noticed_by: of a fault that changes numbers: the plugin that has noticed, `the run` for an error of another
            origin; None while nobody has.
        answer: what that plugin did or said.
    """

    fault: Fault
    where: str
    text: str
    batches: int
    noticed_by: str | None = None
    answer: str = ""


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def strike(fault: Fault) -> None:
    """Do what a fault does to the process: nothing comes after it in a kill or a hang."""
    if fault.kind == "kill":
        kill()
    elif fault.kind == "hang":
        while True:
            time.sleep(3600)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "preempt":
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Since:
    """What a run had been asked and had said when a number was changed.

    Attributes:
        requests: how many requests there had been.
        warnings: how many warnings.
        batches: how many finished batches.
    """

    requests: int
    warnings: int
    batches: int

    @classmethod
    def now(cls, run: Run) -> Since:
        """Return it for this moment."""
        return cls(run.control.history.total, len(run.report.warnings), run.progress.batches)

    def answer(self, run: Run) -> tuple[str, str] | None:
        """Return who has answered since, and how: by a request soon after it, or by a warning; None for nobody."""
        history = run.control.history
        new = list(history)[len(history) - (history.total - self.requests) :]
        for request in new if run.progress.batches - self.batches <= SOON else ():
            if request.verb in ANSWERS:
                return request.by, f"{request.verb}: {request.reason}"
        return ("a warning", run.report.warnings[self.warnings]) if len(run.report.warnings) > self.warnings else None
