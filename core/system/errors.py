"""Errors of the framework's own."""

from __future__ import annotations

from pathlib import Path

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
            f"What is done again {self.difference} (batch {self.batch} of the run, as the killed one had left it in "
            f"{self.path}). Likely cause: {self.causes}. To continue all the same: Checkpoint(on_difference='note')."
        )
