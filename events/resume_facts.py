"""Facts about a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

Position = Literal["seeked", "replayed", "unknown"]
POSITIONS: tuple[Position, ...] = get_args(Position)


class ResumeFacts(NamedTuple):
    """How exactly a run was resumed.

    Attributes:
        untracked: path and type of state that no checkpoint contains and that may influence the training.
        differences: sentences, one for each difference from the state at the time of the save.
        position: how the data loader reached its position: `seeked`, `replayed` (it read the epoch again) or `unknown`.
    """

    untracked: Mapping[str, str]
    differences: tuple[str, ...]
    position: Position

    @property
    def sentences(self) -> tuple[str, ...]:
        """The untracked state and the differences, as sentences."""
        return (*describe_untracked(self.untracked), *self.differences)


def describe_untracked(untracked: Mapping[str, str]) -> tuple[str, ...]:
    """Return lines such as `untracked: task.reader (_csv.reader)`."""
    return tuple(f"untracked: {path} ({kind})" for path, kind in untracked.items())


def worst(first: Position, second: Position) -> Position:
    """Return the less certain of two positions."""
    return max(first, second, key=POSITIONS.index)


def verified(steps: int) -> str:
    return f"verified: {steps:,} repeated step{' is' if steps == 1 else 's are'} bitwise identical"
