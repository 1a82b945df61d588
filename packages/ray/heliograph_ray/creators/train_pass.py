"""A pass of a user's own train_function, with the events of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Variable

from .returned_values import check_numbers

if TYPE_CHECKING:
    from heliograph import TrainRun

    from .parts import Parts
    from .recipe import Recipe


class TrainingBatches:
    """The batches of a pass on this rank, as a train_function gets them.

    Attributes:
        run: the run.
        samples: the number of samples that this rank has read in this pass.
        in_step: whether `step` is running, which averages the gradients itself.
    """

    def __init__(self, run: TrainRun) -> None:
        self.run = run
        self.samples = 0
        self.in_step = False
        self._has_loss = False  # whether `step` was called for the current batch
        self._is_started = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches on the device. A batch may leave its gradients for a later step.

        Raises:
            RuntimeError: the function iterates a second time.
        """
        if self._is_started:
            raise RuntimeError(
                "A train_function can iterate over its iterator only once, because it has the batches of one pass: for "
                "two passes, call train(passes=2)."
            )
        self._is_started, run = True, self.run
        for batch in run.batches(must_step=False):
            self._has_loss, size = False, run.size_of(batch)
            try:
                yield batch
            finally:  # a function may break out of the loop
                self.samples += size
                if not self._has_loss:
                    run.progress.samples += run.data.sum_of_all_ranks(size)

    def __len__(self) -> int:
        if self.run.length.batches_per_epoch is None:
            raise TypeError("The number of batches of an iterable dataset is unknown, so its iterator has no length.")
        return self.run.length.batches_per_epoch

    def step(self, loss: Tensor | tuple[Tensor, int | Tensor], optimizer: int = 0) -> None:
        """Call backward on a loss and step an optimizer as the default training does: with all plugins and precisions.

        Args:
            loss: a scalar tensor, averaged over the samples of the batch; or a sum with its count, `(loss_sum, count)`.
            optimizer: the index of the loss's optimizer; with several optimizers, each gets a loss of its own.

        Raises:
            ValueError: there is no such optimizer, or it has got its loss of this batch.
        """
        names = list(self.run.optimizers)
        if not 0 <= optimizer < len(names):
            raise ValueError(f"optimizer= is an index below {len(names)}, the number of optimizers; got {optimizer}.")
        self._has_loss = self.in_step = True
        try:
            self.run.step(loss, names[optimizer])
        finally:
            self.in_step = False


class SteppedOptimizer:
    """An optimizer as a train_function gets it: its step is a step of the loop, all else is the optimizer's own.

    Handlers see the gradients, which are averages over all ranks, and the step is counted.
    """

    def __init__(self, run: TrainRun, name: str) -> None:
        self._run, self._name = run, name
        self._optimizer = run.optimizers[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: object = None) -> None:
        """Step with the gradients that the function has computed, and clear them.

        Raises:
            RuntimeError: the precision or a plugin needs the loss for this step.
            TypeError: there is a closure, as for LBFGS.
        """
        if closure is not None:
            raise TypeError("optimizer.step() of a train_function takes no closure: the loop steps once for a batch.")
        self._run.step_with_gradients(self._name)


def train_pass(run: TrainRun, recipe: Recipe, parts: Parts) -> None:
    """Call the train_function for the rest of the epoch; track what it returns, weighted by this rank's samples.

    Raises:
        RuntimeError: it has read batches and never stepped an optimizer.
        TypeError: it returned something else than a dict of numbers, or made a scheduler.
    """
    assert recipe.train_function is not None
    optimizers = [SteppedOptimizer(run, name) for name in run.optimizers]
    batches, before = TrainingBatches(run), run.progress.steps + run.progress.skipped_steps
    with _averaged_backward(run, batches), _scheduler_explained():
        returned = recipe.train_function(
            recipe.config,
            parts.model,
            batches,
            parts.criterion,
            optimizers if isinstance(parts.optimizer, list) else optimizers[0],
            parts.scheduler,
        )
    if batches.samples and run.progress.steps + run.progress.skipped_steps == before:
        raise RuntimeError(
            "train_function trained nothing: for each batch of its iterator, call loss.backward() and optimizer.step() "
            "of the optimizer that it is given, or iterator.step(loss)."
        )
    for name, value in check_numbers(returned, "train_function").items():
        run.track(name, value, batches.samples)


@contextmanager
def _scheduler_explained() -> Iterator[None]:
    """Say where schedulers are made, in what torch raises where a function makes one."""
    try:
        yield
    except TypeError as error:
        if SteppedOptimizer.__name__ not in str(error):
            raise
        raise TypeError(
            "train_function made a scheduler (or what else takes an optimizer of torch) of the optimizer that it was "
            "given, whose steps are those of the loop. Make schedulers in scheduler_creator(optimizer, config), with "
            "scheduler_step_freq=None, and call scheduler.step() in the function: so they are kept from pass to pass "
            "and saved."
        ) from error


@contextmanager
def _averaged_backward(run: TrainRun, batches: TrainingBatches) -> Iterator[None]:
    """Average the gradients over all ranks at the end of each backward pass of the function, as torch's DDP does.

    The function may clip or log them before `optimizer.step()`.
    """
    if run.engine.world_size == 1:
        yield
        return
    is_due = False

    def finish() -> None:
        nonlocal is_due
        is_due = False
        run.average_gradients()

    def wait_for_end(_: Tensor) -> None:
        nonlocal is_due
        if not is_due and not batches.in_step:
            is_due = True
            Variable._execution_engine.queue_callback(finish)  # called when the whole backward pass is done

    groups = [group for optimizer in run.optimizers.values() for group in optimizer.param_groups]
    parameters = [each for group in groups for each in group["params"] if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(wait_for_end) for each in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
