"""Errors of the framework's own."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from inspect import Signature, signature
from pathlib import Path
from typing import Any

SEEN = {"died": "died", "hung": "hung", "left": "left the group"}  # what the others saw, where a rank reported nothing


class TrainingError(RuntimeError):
    """A run failed with an exception that is on no pass-through list; the original is its `__cause__`."""


class RankFailed(RuntimeError):  # noqa: N818  # an error of another rank
    """Another rank failed, so that this one cannot continue; the collective that failed here is its `__cause__`.

    Attributes:
        rank: the one that failed first.
        kind: the qualified name of its exception's type; `died`, `hung` or `left` where it did not report it.
        text: its exception's text, or what the others saw of it.
        place: where in the run it was.
    """

    def __init__(self, rank: int, kind: str, text: str, place: str) -> None:
        super().__init__(rank, kind, text, place)  # as given, so that it can be pickled
        self.rank, self.kind, self.text, self.place = rank, kind, text, place

    @property
    def was_reported(self) -> bool:
        """Whether the rank itself reported its exception."""
        return self.kind not in SEEN

    def __str__(self) -> str:
        happened = SEEN.get(self.kind, f"failed with {self.kind}")
        return (
            f"rank {self.rank} {happened}" + f": {self.text}" * bool(self.text) + f" ({self.place})" * bool(self.place)
        )


class NotRecorded(RuntimeError):  # noqa: N818  # says what is missing
    """A replayed plugin asks for what the recording of the run does not hold, such as the model.

    Args:
        what: what it asked for.
        mend: what would record it, if anything does.
    """

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(f"A recording does not hold {what}." + f" {mend}" * bool(mend))
        self.what, self.mend = what, mend


class ResumeDiffers(RuntimeError):  # noqa: N818  # says what happened
    """A step that a resumed run does again is not what the killed run had done.

    Attributes:
        difference: in words, with both values.
        step: after how many optimizer steps.
        batch: which one of the run, from 1.
        path: the file with what the killed run had done.
        causes: the likely causes.
    """

    def __init__(self, difference: str, step: int, batch: int, path: Path, causes: str) -> None:
        super().__init__(difference, step, batch, path, causes)  # as given, so that it can be pickled
        self.difference, self.step, self.batch = difference, step, batch
        self.path, self.causes = path, causes

    def __str__(self) -> str:
        return (
            f"The resumed run {self.difference} (batch {self.batch} of the run, as the killed one had left it in "
            f"{self.path}). Likely cause: {self.causes}. To continue all the same: VerifyResume('note')."
        )


def add_run_note(error: BaseException, text: str) -> None:
    """Add a note on the run as a whole: `launch` adds it to the error that it raises, whichever rank's that is."""
    error.add_note(f"heliograph: {text}")
    error.heliograph_run_notes = (*getattr(error, "heliograph_run_notes", ()), text)  # type: ignore[attr-defined]


def run_notes(error: BaseException | None) -> list[str]:
    """Return the notes on the run as a whole of an error and its causes."""
    found: list[str] = []
    while error is not None:
        found += getattr(error, "heliograph_run_notes", ())
        error = error.__cause__
    return found


def check_form(task: Any, step: str) -> None:
    """Raise TypeError unless a step of a task takes `(run, batch)`; not where its first argument is called `batch`."""
    try:
        form = signature(getattr(task, step), follow_wrapped=False)
    except ValueError:  # one in C may have none
        return
    try:
        form.bind(None, None)
    except TypeError:
        raise _wrong_form(type(task), step, form) from None
    if next(iter(form.parameters)) == "batch":
        raise _wrong_form(type(task), step, form)


def _wrong_form(kind: type, step: str, form: Signature) -> TypeError:
    mend = f"Write def {step}(self, run, batch); the number of the batch is run.progress.batch."
    if {"lightning", "pytorch_lightning"} & {each.__module__.partition(".")[0] for each in kind.__mro__}:
        mend = (
            f"A LightningModule trains in Lightning's Trainer, with our plugins in its callbacks: "
            f"HeliographCallback([...]) of heliograph_bridges.lightning (pip install ./packages/bridges). To train it "
            f"here, put it into a Task that has {step}(self, run, batch)."
        )
    return TypeError(f"{kind.__name__}.{step}{form} does not fit: it is called with (run, batch). {mend}")


def wrong_loss(loss: Any) -> TypeError | ValueError:
    """Return the error of a loss that is not a scalar tensor."""
    from torch import Tensor  # which this file does not need else

    if isinstance(loss, Generator):
        return TypeError(
            "training_step yields several losses: give their optimizers by the names that it yields them with, as in "
            'optimizer={"generator": ..., "discriminator": ...}.'
        )
    if isinstance(loss, Tensor):
        return ValueError(
            f"The loss must be a scalar tensor, got shape {list(loss.shape)}: average it, as in loss.mean()."
        )
    hint = "return the tensor, not .item()."
    if isinstance(loss, Mapping):
        hint = "take .loss of a model's outputs, or add several losses up; run.track(name, value) logs each."
    elif isinstance(loss, list):
        hint = "a sum with its count is a tuple, (loss_sum, count)."
    elif loss is None:
        hint = "is a return missing?"
    return TypeError(f"The loss must be a scalar tensor, got {type(loss).__name__}: {hint}")


OF_MACHINE = (MemoryError, OSError, SystemError, ImportError, RuntimeError)
LACK = re.compile("alloc|memory")  # in the RuntimeError of torch's allocator, or of a failed mmap


def is_of_machine(error: BaseException, *, is_verified: bool = False) -> bool:
    """Return whether an error of reading a file is a lack of memory or the like."""
    if not isinstance(error, OF_MACHINE) or isinstance(error, RecursionError):
        return False
    return is_verified or not isinstance(error, RuntimeError) or LACK.search(str(error)) is not None
