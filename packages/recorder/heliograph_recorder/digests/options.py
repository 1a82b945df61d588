"""`Digests`: the options of `Recorder(digests=...)`."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph.spi import check_whole_number


@dataclass(frozen=True, slots=True)
class Digests:
    """Options for the digests of `Recorder(digests=...)`, with which `diverge` finds the first difference of two runs.

    Every batch has digests of its contents, of the random generators after it, of the optimizer options, and of the
    loss. Digests of gradients and weights take time in proportion to their size, so you choose how often they are
    taken. Nothing waits for a device: its values are read some batches later.

    Args:
        gradients: take digests of the gradient norms every so many optimizer steps; 0 for none.
        weights: take digests of the weights every so many optimizer steps; 0 for none.

    Raises:
        ValueError: an argument is not a whole number of at least 0.
    """

    gradients: int = 100
    weights: int = 100

    def __post_init__(self) -> None:
        for name in ("gradients", "weights"):
            check_whole_number(name, getattr(self, name), of="optimizer steps", at_least=0)


def digests_of(option: bool | Digests) -> Digests | None:
    if isinstance(option, Digests):
        return option
    if isinstance(option, bool):
        return Digests() if option else None
    raise TypeError(f"Recorder(digests=) takes True, False or Digests(gradients=..., weights=...), got {option!r}.")
