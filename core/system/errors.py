"""The framework's exceptions, and errors about the user's steps."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from inspect import Signature, signature
from pathlib import Path
from typing import Any

UNNAMED_LOSSES = (
    "training_step yields losses: pass an optimizer for each name that it yields, as in "
    'optimizer={"generator": ..., "discriminator": ...}.'
)
SEEN = {"died": "died", "hung": "hung", "left": "left the group"}  # kinds of failures that other ranks report


class TrainingError(RuntimeError):
    """A run failed with an exception that is on no pass-through list; the original is its `__cause__`."""


class RankFailed(RuntimeError):  # noqa: N818  # an error of another rank
    """Another rank failed, so this one cannot continue; the collective that failed here is its `__cause__`.

    Attributes:
        rank: the one that failed first.
        kind: the qualified name of its exception's type; `died`, `hung` or `left` if it did not report one.
        text: its exception's text, or the observation of other ranks.
        place: where in the run it was.
    """

    def __init__(self, rank: int, kind: str, text: str, place: str) -> None:
        super().__init__(rank, kind, text, place)  # all arguments, so that it can be pickled
        self.rank, self.kind, self.text, self.place = rank, kind, text, place

    @property
    def was_reported(self) -> bool:
        """True if the rank itself reported its exception."""
        return self.kind not in SEEN

    def __str__(self) -> str:
        happened = SEEN.get(self.kind, f"failed with {self.kind}")
        return (
            f"rank {self.rank} {happened}" + f": {self.text}" * bool(self.text) + f" ({self.place})" * bool(self.place)
        )


class NotRecorded(RuntimeError):  # noqa: N818  # says what is missing
    """A replayed plugin reads something that the recording of the run does not have, such as the model.

    Args:
        what: the missing thing.
        mend: how to record it, if possible.
    """

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(f"A recording does not hold {what}." + f" {mend}" * bool(mend))
        self.what, self.mend = what, mend


class ResumeDiffers(RuntimeError):  # noqa: N818  # says what happened
    """A step that a resumed run repeats differs from that of the killed run.

    Attributes:
        difference: in words, with both values.
        step: after how many optimizer steps.
        batch: of the run, from 1.
        path: the file with the trace of the killed run.
        causes: the likely causes.
    """

    def __init__(self, difference: str, step: int, batch: int, path: Path, causes: str) -> None:
        super().__init__(difference, step, batch, path, causes)  # all arguments, so that it can be pickled
        self.difference, self.step, self.batch = difference, step, batch
        self.path, self.causes = path, causes

    def __str__(self) -> str:
        return (
            f"The resumed run {self.difference} (batch {self.batch} of the run, compared with the killed run in "
            f"{self.path}). Likely cause: {self.causes}. To continue anyway: VerifyResume('note')."
        )


def add_run_note(error: BaseException, text: str) -> None:
    """Add a note about the run as a whole: `launch` adds it to the error that it raises, from any rank."""
    error.add_note(f"heliograph: {text}")
    error.heliograph_run_notes = (*getattr(error, "heliograph_run_notes", ()), text)  # type: ignore[attr-defined]


def run_notes(error: BaseException | None) -> list[str]:
    """Return the notes about the run as a whole of an error and its causes."""
    notes: list[str] = []
    while error is not None:
        notes += getattr(error, "heliograph_run_notes", ())
        error = error.__cause__
    return notes


def check_form(task: Any, step: str) -> None:
    """Raise TypeError unless a step of a task takes `(run, batch)`; its first argument must not be called `batch`."""
    try:
        form = signature(getattr(task, step), follow_wrapped=False)
    except ValueError:  # a function in C may have no signature
        return
    try:
        form.bind(None, None)
    except TypeError:
        raise _wrong_form(type(task), step, form) from None
    if next(iter(form.parameters)) == "batch":
        raise _wrong_form(type(task), step, form)


def _wrong_form(kind: type, step: str, form: Signature) -> TypeError:
    remedy = f"Write def {step}(self, run, batch); the number of the batch is run.progress.batch."
    if {"lightning", "pytorch_lightning"} & {base.__module__.partition(".")[0] for base in kind.__mro__}:
        remedy = (
            f"A LightningModule trains in Lightning's Trainer, with our plugins in its callbacks: "
            f"HeliographCallback([...]) of heliograph_bridges.lightning (pip install ./packages/bridges). To train it "
            f"here, put it into a Task that has {step}(self, run, batch)."
        )
    return TypeError(f"{kind.__name__}.{step}{form} does not fit: it is called with (run, batch). {remedy}")


def wrong_loss(loss: Any) -> TypeError | ValueError:
    """Return the error for a loss that is not a scalar tensor."""
    from torch import Tensor  # not needed otherwise

    if isinstance(loss, Generator):
        return TypeError(UNNAMED_LOSSES)
    if isinstance(loss, Tensor):
        return ValueError(f"The loss must be a scalar tensor, got shape {list(loss.shape)}: use loss.mean().")
    hint = "return the tensor, not .item()."
    if isinstance(loss, Mapping):
        hint = "use .loss of a model's outputs, or add several losses; run.track(name, value) logs each of them."
    elif isinstance(loss, list):
        hint = "a sum with its count is a tuple, (loss_sum, count)."
    elif loss is None:
        hint = "is a return missing?"
    return TypeError(f"The loss must be a scalar tensor, got {type(loss).__name__}: {hint}")


MACHINE_ERRORS = (MemoryError, OSError, SystemError, ImportError, RuntimeError)
OUT_OF_MEMORY = re.compile("alloc|memory")  # in the RuntimeError of torch's allocator, or of a failed mmap


def is_of_machine(error: BaseException, *, is_verified: bool = False) -> bool:
    """Return True if an error of reading a file comes from the machine, such as lack of memory, not from the file."""
    if not isinstance(error, MACHINE_ERRORS) or isinstance(error, RecursionError):
        return False
    return is_verified or not isinstance(error, RuntimeError) or OUT_OF_MEMORY.search(str(error)) is not None
