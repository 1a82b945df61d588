"""The line of a recording with the digests of consecutive batches."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import columns
from .forms import is_count, is_number, is_text

COLUMNS = ("batch", "samples", "draws", "options", "loss", "gradients", "weights")
MAX_ROWS = 4096
HEX = 16  # digits of a chain


@dataclass(frozen=True, slots=True)
class DigestBlock:
    """The digests of consecutive batches of an epoch, of 32 bits; a digest that was not taken is 0.

    Attributes:
        epoch: the epoch of the batches.
        first: the number of the first batch within the epoch, from 1.
        columns: the digests by batch: its content as loaded (`batch`), and regardless of the order of its samples
            (`samples`); the random generators after it (`draws`); the options of the optimizers at their step
            (`options`); the `loss`; the norms of the `gradients`; the `weights` after it.
        rates: the learning rate of the first optimizer by batch, NaN if it is a tensor.
        chain: one hexadecimal number for all batches up to the last of this block.
        length: the number of batches in the chain.
    """

    epoch: int
    first: int
    columns: Mapping[str, Sequence[int]]
    rates: Sequence[float]
    chain: str
    length: int

    def __len__(self) -> int:
        return len(self.rates)


def digest_items(block: DigestBlock) -> tuple[Any, ...]:
    packed = {name: columns.pack_words(block.columns[name]) for name in COLUMNS}
    taken = {name: column for name, column in packed.items() if column != 0}
    first = block.rates[0]
    rates = first if block.rates.count(first) == len(block) else columns.pack_floats(block.rates)
    return "digests", block.epoch, block.first, len(block), taken, rates, block.chain, block.length


def decode_digests(
    epoch: Any, first: Any, rows: Any, packed: Any, rates: Any, chain: Any, length: Any
) -> DigestBlock | None:
    counts = all(map(is_count, (epoch, first, rows, length))) and 0 < rows <= MAX_ROWS
    if not counts or type(packed) is not dict or not is_text(chain) or len(chain) != HEX:
        return None
    int(chain, 16)
    words = {name: columns.unpack_words(packed.get(name, 0), rows) for name in COLUMNS}
    all_rates = array("d", [rates]) * rows if is_number(rates) else columns.unpack_floats(rates, rows)
    return DigestBlock(epoch, first, words, all_rates, chain, length)
