"""What is known about a resume, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

Position = Literal["seeked", "replayed", "unknown"]
POSITIONS: tuple[Position, ...] = get_args(Position)


class ResumeFacts(NamedTuple):
    """What is known about a resume of a run.

    Attributes:
        untracked: path and type of state that no checkpoint holds, and that may influence the training.
        differences: what is not as it was when the state was saved, in sentences.
        position: how the data reach their position: `seeked` at once, `replayed` by reading the epoch again, or
            `unknown`.
    """

    untracked: Mapping[str, str]
    differences: tuple[str, ...]
    position: Position

    @property
    def sentences(self) -> tuple[str, ...]:
        """All of it in sentences, without the position."""
        return (*describe_untracked(self.untracked), *self.differences)


def describe_untracked(untracked: Mapping[str, str]) -> tuple[str, ...]:
    """Return the untracked state in words: `untracked: task.reader (_csv.reader)`."""
    return tuple(f"untracked: {path} ({kind})" for path, kind in untracked.items())


def worst(first: Position, second: Position) -> Position:
    """Return the less certain of two positions."""
    return max(first, second, key=POSITIONS.index)


def verified(steps: int) -> str:
    """Return how many repeated steps were found equal, in words."""
    return f"verified: {steps:,} repeated step{' is' if steps == 1 else 's are'} bitwise identical"
