"""What the loop asks of batches and loaders: how many, which is the last, where to go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

if TYPE_CHECKING:
    from .context import RunContext

T = TypeVar("T")


def batch_size(batch: Any) -> int:
    """Return the samples in a batch: the first dimension of the first tensor found in it, else its length, else 1."""
    kind = type(batch)
    if kind is tuple or kind is list:
        try:
            return batch[0].shape[0]  # type: ignore[no-any-return]  # a tensor, nearly always: spared the search
        except (AttributeError, IndexError, TypeError):
            pass
    while not isinstance(batch, Tensor):
        if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], str | int | float):
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            return len(batch) if isinstance(batch, Sequence) and not isinstance(batch, str) else 1
    return batch.shape[0] if batch.ndim else 1


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Return the number of batches of a loader, None where it does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]  # asked, not assumed
    except TypeError:
        return None


def check_loader(loader: Any, split: str) -> None:
    """Raise TypeError unless a loader can be iterated, ValueError where it says that it is empty."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"The {split} loader must be an iterable of batches, got {type(loader).__name__}.")
    samples = hasattr(loader, "__len__") and not hasattr(loader, "__iter__")  # as other libraries' datasets
    if samples or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)):
        raise TypeError(
            f"The {split} loader is a dataset of samples: say how to batch it, loader_params={{'batch_size': 32}}, or "
            f"give a DataLoader."
        )
    if isinstance(loader, Tensor):
        raise TypeError(
            f"The {split} loader is a tensor, which holds no batches: give TensorDataset(inputs, targets) with "
            f"loader_params={{'batch_size': 32}}."
        )
    if length_of(loader) == 0:
        raise ValueError(f"The {split} loader is empty: it has no batch. Check its dataset, batch_size and drop_last.")


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to a loader or sampler that shuffles by it."""
    for each in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(tell := getattr(each, "set_epoch", None)):
            tell(epoch)


def rest_of_epoch(run: RunContext, tell: Callable[[int, int], None]) -> Iterator[Any]:
    """Return the batches of the epoch that are not consumed yet, and do what waits for the loader to stand there."""
    is_over = run.shared and run.progress.batch > 0 and run.is_last_batch
    batches = run.data.open(run.progress, tell, is_over=is_over)
    run.arrive()
    if run.shared:
        return _together(run, batches)
    return batches if run.batches_per_epoch is not None else _telling_the_last(run, batches)


def check_exhausted(run: RunContext) -> None:
    """Note that the loader ended; raise or warn where that was before it had begun, or before it said it would."""
    batch, expected = run.progress.batch, run.batches_per_epoch
    if batch == 0:
        where = " on one of the ranks" if run.shared else ""
        raise ValueError(
            f"The train loader yielded no batch in epoch {run.progress.epoch}{where}. A generator can be read only "
            f"once: give a list, a DataLoader, or an object whose __iter__ begins anew."
        )
    if expected is not None and batch != expected:
        text = f"The train loader ended after {batch} batches, but its length says {expected}."
        if run.shared:
            raise ValueError(f"{text} On several ranks that is an error, since the others count on them.")
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    run.exhausted = True


def refuse_unread(run: RunContext) -> None:
    """Raise RuntimeError where a loop of one's own passes over the batches of an epoch, and so would never end."""
    if not run.control.stopped and not run.is_complete:
        raise RuntimeError("The epoch was not trained: loop over run.batches() within run.epochs().")


def checked(run: RunContext, batches: Iterator[T]) -> Iterator[T]:
    """Yield batches to a loop of one's own.

    Raises:
        RuntimeError: the loop passed over a batch without `run.step(loss)`.
    """
    for batch in batches:
        run.unstepped = True
        yield batch
        if run.unstepped:
            raise RuntimeError(
                "run.step(loss) was not called for this batch. To leave one out, call control.skip_batch(reason) in a "
                "handler of BatchStart."
            )


def abandon(run: RunContext) -> None:
    """Finish the batch that a loop of one's own broke out of; that ends the epoch."""
    if not run.in_hand:
        return
    reason, control = "the loop over the batches was left", run.control
    control.end_epoch(reason, by="the caller")
    if run.unstepped:
        run.unstepped, control.stage = False, "BatchStart"
        control.skip_batch(reason, by="the caller")
        control.stage = ""
    control.leaving = True
    for _ in run.open_batches:
        raise AssertionError("leaving was asked for")


def _together(run: RunContext, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches as far as every rank has one; what a rank has beyond the shortest one's end is not read."""
    length, source = run.batches_per_epoch, run.data.source
    run.data.together = None
    if length is not None:
        rest = islice(batches, max(0, length - run.progress.batch))
        even = source is not None and source.even and run.size_of is batch_size
        return rest if even else _voted(run, ((batch, False) for batch in rest))
    return iter(()) if run.last_seen else _voted(run, with_last(batches))


def _voted(run: RunContext, batches: Iterator[tuple[Any, bool]]) -> Iterator[Any]:
    """Yield batches until a rank has none, or had its last; each vote tells all how many samples they have in hand."""
    engine, sized = run.engine, run.batches_per_epoch is not None
    while True:
        found = next(batches, None)
        batch, is_last = (None, True) if found is None else found
        sizes = [0.0] * engine.world_size
        sizes[engine.rank] = 0.0 if found is None else float(run.size_of(batch))
        misses, ends, goes_on, *sizes = engine.vote([found is None, is_last, not is_last, *sizes])
        if misses:
            return
        run.data.together = int(sum(sizes))
        if not sized:
            run.last_seen = bool(ends)
        if ends and goes_on:
            run.data.tell("the ranks had unequally many batches: each epoch ended when the first of them had no more")
        yield batch
        if ends:
            return


def _telling_the_last(run: RunContext, batches: Iterable[Any]) -> Iterator[Any]:
    for batch, run.last_seen in with_last(batches):
        yield batch


def with_last(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield (batch, whether it is the last), reading one item ahead."""
    ahead = iter(batches)
    try:
        batch = next(ahead)
    except StopIteration:
        return
    for following in ahead:
        yield batch, False
        batch = following
    yield batch, True
