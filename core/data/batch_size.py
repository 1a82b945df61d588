"""The largest batch that fits into memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import torch

from ...events.checks import check_whole_number, error_text
from ..system.errors import RankFailed, TrainingError
from . import rng

T = TypeVar("T")
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
logger = logging.getLogger("heliograph")


def find_executable_batch_size(attempt: Callable[[int], T], largest: int, *, smallest: int = 1) -> tuple[int, T]:
    """Call `attempt(batch_size)` with half the batch size after each out-of-memory error.

    Each attempt should make a new task and optimizer, for example `find_executable_batch_size(lambda size:
    trainer.fit(make_task(), data, loader_params={"batch_size": size}, ...), 512)`. With `GradientAccumulation(512 //
    size)` the batch of an optimizer step keeps its size. On several ranks all ranks try the smaller batch as soon as
    one of them runs out of memory. Every attempt starts with the random state of the first one.

    If an attempt resumes a run that had another batch size, the attempt ends before its first batch, and the batch
    size of that run is tried first.

    Args:
        attempt: a function of the batch size.
        largest: the batch size to start with, in samples.
        smallest: the smallest batch size to try.

    Returns:
        The batch size that fits, and what `attempt` returned.

    Raises:
        ValueError: the sizes are not positive, or `smallest` is more than `largest`.
        RuntimeError: the smallest batch does not fit, or `attempt` failed for another reason.
    """
    largest = check_whole_number("largest", largest, of="samples", at_least=1)
    smallest = check_whole_number("smallest", smallest, of="samples", at_least=1)
    if smallest > largest:
        raise ValueError(f"smallest={smallest} is more than largest={largest}: give them the other way round.")
    size, sizes, draws = largest, range(smallest, largest + 1), rng.capture()
    while True:
        token = _FIRST_TRY.set((size, sizes if size == largest else range(0)))
        try:
            return size, attempt(size)
        except (RuntimeError, MemoryError) as error:
            if saved := _saved_size(error):
                logger.info("the run that is resumed had batches of %d: trying these first, not %d", saved, size)
            elif not is_out_of_memory(error) or size // 2 < smallest:
                raise
            else:
                logger.warning("a batch of %d does not fit into memory, trying %d", size, size // 2)
        finally:
            _FIRST_TRY.reset(token)
        size = saved or size // 2
        rng.restore(draws)
        gc.collect()  # the objects of the failed attempt, tracebacks included
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


_FIRST_TRY: ContextVar[tuple[int, range]] = ContextVar("first try", default=(0, range(0)))
# The size that a search is trying, and the sizes that it may try instead: none after the first attempt.


class SavedSizeFirst(RuntimeError):  # noqa: N818  # says what to do
    """An attempt resumes a run of another batch size: try `size` first."""

    def __init__(self, size: int) -> None:
        super().__init__(size)  # the only argument, so that it can be pickled
        self.size = size

    def __str__(self) -> str:
        return str(self.size)


def prefer_saved(before: int | None, now: int | None) -> None:
    """Raise SavedSizeFirst in the first attempt of a search that resumes a run of another batch size.

    Args:
        before: the batch size of the resumed run.
        now: the batch size of the attempt: a part or a multiple of the size that the search tries.
    """
    size, sizes = _FIRST_TRY.get()
    if before and now and before != now and not size * before % now and size * before // now in sizes:
        raise SavedSizeFirst(size * before // now)


def _saved_size(error: BaseException) -> int | None:
    if isinstance(error, SavedSizeFirst):
        return error.size
    if isinstance(error, RankFailed):
        return int(error.text) if error.kind.endswith(SavedSizeFirst.__name__) else None
    return _saved_size(error.__cause__) if isinstance(error, TrainingError) and error.__cause__ else None


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RankFailed):
        return error.kind.endswith(("OutOfMemoryError", "MemoryError")) or _says_so(error_text(error))
    if isinstance(error, TrainingError) and error.__cause__ is not None:
        return is_out_of_memory(error.__cause__)
    return isinstance(error, RuntimeError) and _says_so(error_text(error))


def _says_so(text: str) -> bool:
    return any(words in text for words in OUT_OF_MEMORY)
