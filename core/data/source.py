"""What the loop asks of a loader, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..batches import length_of
from .guarantee import Guarantee
from .reading import Reading

Worth = tuple[Guarantee, tuple[str, ...]]
EXACT: Worth = ("exact", ())


class Source(Protocol):
    """A loader, as the loop reads it.

    Attributes:
        loader: what the user gave.
        length: its batches, None where nobody knows.
        kind: plain facts that must be the same for a position amid an epoch to mean the same.
    """

    loader: Any
    length: int | None
    kind: dict[str, Any]

    def open(self, reading: Reading) -> Iterator[Any]:
        """Return the batches from a position on."""

    def worth(self) -> Worth:
        """Return what a resume is worth, with the reasons why it is not exact."""

    def state_dict(self, *, between_epochs: bool) -> dict[str, Any]:
        """Return what the position needs beside the number of consumed batches."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state; the next `open` goes on from it."""

    def close(self) -> None:
        """Let worker processes go."""


class Stateless:
    """What most sources have in common: their position is the number of batches, and nothing needs closing."""

    def __init__(self, loader: Any, kind: dict[str, Any]) -> None:
        self.loader, self.kind = loader, kind
        self.length = length_of(loader)

    def worth(self) -> Worth:
        """Say that it is exact."""
        return EXACT

    def state_dict(self, *, between_epochs: bool) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def close(self) -> None:
        """Do nothing."""
