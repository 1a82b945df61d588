"""The largest batch that fits into memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from ...events.checks import check_whole_number
from ...events.errors import error_text
from ..system.errors import RankFailed, TrainingError

T = TypeVar("T")
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
logger = logging.getLogger("heliograph")


def find_batch_size(attempt: Callable[[int], T], largest: int, *, smallest: int = 1) -> tuple[int, T]:
    """Call `attempt(batch_size)` with half the batch after every out-of-memory error, until it fits.

    Each attempt should begin with a new task and optimizer, as in
    `find_batch_size(lambda size: trainer.fit(make_task(), data, loader_params={"batch_size": size}, ...), 512)`; with
    `GradientAccumulation(512 // size)` the batch of an optimizer step stays the same. On several ranks all of them try
    the smaller batch as soon as one of them runs out of memory.

    Args:
        attempt: what to try, given the samples in a batch.
        largest: the batch size to begin with.
        smallest: the smallest batch size to try.

    Returns:
        The batch size that fits, and what `attempt` returned.

    Raises:
        ValueError: the sizes are not positive, or the wrong way round.
        RuntimeError: the smallest batch does not fit, or `attempt` failed otherwise.
    """
    for name, size in (("largest", largest), ("smallest", smallest)):
        check_whole_number(name, size, of="samples", at_least=1)
    if smallest > largest:
        raise ValueError(f"smallest={smallest} is more than largest={largest}: give them the other way round.")
    size = largest
    while True:
        try:
            return size, attempt(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or size // 2 < smallest:
                raise
            logger.warning("a batch of %d does not fit into memory, trying %d", size, size // 2)
        size //= 2
        gc.collect()  # what the failed attempt held, tracebacks included
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on this rank or on one that reported it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RankFailed):
        return error.kind.endswith(("OutOfMemoryError", "MemoryError")) or _says_so(error_text(error))
    if isinstance(error, TrainingError) and error.__cause__ is not None:
        return is_out_of_memory(error.__cause__)
    return isinstance(error, RuntimeError) and _says_so(error_text(error))


def _says_so(text: str) -> bool:
    return any(words in text for words in OUT_OF_MEMORY)
