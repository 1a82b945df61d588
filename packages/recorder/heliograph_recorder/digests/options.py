"""Which digests a recorder keeps, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph.spi import check_whole_number


@dataclass(frozen=True, slots=True)
class Digests:
    """Which digests `Recorder(digests=...)` keeps, so that `diverge` finds where two runs begin to differ.

    Of every batch: its content, the states of the random generators after it, the options of the optimizers at their
    step, the loss. Gradients and weights take time in proportion to their size, so how often is yours to say. Nothing
    waits for a device: what lies there is read some batches later.

    Args:
        gradients: of the steps of an optimizer, the norms of the gradients are kept at one in so many; 0 for none.
        weights: of the optimizer steps, the weights are kept after one in so many; 0 for none.

    Raises:
        ValueError: an argument is not a whole number of at least 0.
    """

    gradients: int = 100
    weights: int = 100

    def __post_init__(self) -> None:
        for name in ("gradients", "weights"):
            check_whole_number(name, getattr(self, name), of="optimizer steps", at_least=0)


def digests_of(given: bool | Digests) -> Digests | None:
    """Return the digests that a recorder was asked for, None for none.

    Raises:
        TypeError: it is neither True, False nor `Digests`.
    """
    if isinstance(given, Digests):
        return given
    if isinstance(given, bool):
        return Digests() if given else None
    raise TypeError(f"Recorder(digests=) takes True, False or Digests(gradients=..., weights=...), got {given!r}.")
