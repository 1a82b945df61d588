"""A user's train_function and validation_function in the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from typing import Any, cast

from heliograph import LoaderParams, Run, Supervised, Task, TrainRun
from heliograph.core.data.loaders import evaluation_loader, params_of_one_process
from torch import Tensor
from torch.autograd import Variable

from .recipe import CreatedParts, Recipe


def check_numbers(returned: Any, function: str) -> dict[str, Tensor | float]:
    if not isinstance(returned, Mapping):
        raise TypeError(f"{function} returns a dict of numbers, such as {{'accuracy': 0.9}}; got {returned!r:.200}.")
    numbers: dict[str, Tensor | float] = {}
    for name, value in returned.items():
        if isinstance(value, Real):
            numbers[name] = float(value)
        elif isinstance(value, Tensor):
            numbers[name] = value
        else:
            raise TypeError(f"{function} returns a dict of numbers, to be averaged; got {name!r}: {value!r:.200}.")
    return numbers


class TrainingBatches:
    """The iterator of a train_function: the batches of a pass on this rank.

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
        if self._is_started:
            raise RuntimeError(
                "A train_function can iterate over its iterator only once: it has the batches of one pass. For two "
                "passes, call train(passes=2)."
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
        """Run backward on a loss and step an optimizer, with all plugins and precisions.

        Args:
            loss: a scalar tensor, averaged over the samples of the batch; or a sum with its count, `(loss_sum, count)`.
            optimizer: the index of the optimizer; if there are several, call `step` once for each.

        Raises:
            ValueError: the optimizer does not exist, or was already stepped for this batch.
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
    """The optimizer of a train_function: its `step` is a step of the loop.

    Handlers see the gradients, averaged over all ranks, and the step is counted. All other attributes are the
    optimizer's.
    """

    def __init__(self, run: TrainRun, name: str) -> None:
        self._run, self._name = run, name
        self._optimizer = run.optimizers[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: object = None) -> None:
        """Step with the current gradients, and clear them.

        Raises:
            RuntimeError: the precision or a plugin needs the loss for this step.
            TypeError: a closure was passed, as for LBFGS.
        """
        if closure is not None:
            raise TypeError("optimizer.step() of a train_function takes no closure: the loop steps once per batch.")
        self._run.step_with_gradients(self._name)


def train_pass(run: TrainRun, recipe: Recipe, parts: CreatedParts) -> None:
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
            "train_function read batches but never stepped an optimizer: for each batch, call loss.backward() and "
            "optimizer.step(), or iterator.step(loss)."
        )
    for name, value in check_numbers(returned, "train_function").items():
        run.track(name, value, batches.samples)


@contextmanager
def _scheduler_explained() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        if SteppedOptimizer.__name__ not in str(error):
            raise
        raise TypeError(
            "train_function passed its optimizer to a scheduler or another class that needs a torch optimizer, but its "
            "optimizer is a proxy of the loop. Create schedulers in scheduler_creator(optimizer, config), pass "
            "scheduler_step_freq=None, and call scheduler.step() in train_function; then they are also saved."
        ) from error


@contextmanager
def _averaged_backward(run: TrainRun, batches: TrainingBatches) -> Iterator[None]:
    """Average the gradients over all ranks at the end of each backward pass, as DDP does.

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
    parameters = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(wait_for_end) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ValidationShare:
    """A rank's share of a validation set, which the loop treats as a single batch.

    Attributes:
        batch_size: the number of samples read so far, which the loop uses as the batch size.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batch_size = 0

    def read(self, run: TrainRun) -> Iterator[Any]:
        self.batch_size = 0
        for batch in run.engine.feed(run.data.evaluate(self.loader, 0, run.progress.validations)):
            self.batch_size += run.size_of(batch)
            yield batch


class FunctionValidation:
    """The validation of a task by a validation_function."""

    recipe: Recipe
    parts: CreatedParts

    def validation_step(self, run: Run, share: ValidationShare) -> None:
        recipe, parts = self.recipe, self.parts
        assert recipe.validation_function is not None
        batches = share.read(cast("TrainRun", run))
        first = next(batches, None)
        if first is None:  # there are more ranks than batches
            return
        epochs = [scheduler.last_epoch for scheduler in parts.schedulers.values()]
        iterator = chain([first], batches)
        returned = recipe.validation_function(recipe.config, parts.model, iterator, parts.criterion, parts.scheduler)
        if epochs != [scheduler.last_epoch for scheduler in parts.schedulers.values()]:
            raise RuntimeError(
                "validation_function stepped a scheduler by the metric of a single rank: pass "
                "scheduler_step_freq='manual' and call trainer.update_scheduler(metric) after validate()."
            )
        for name, value in check_numbers(returned, "validation_function").items():
            run.track(name, value, share.batch_size)


class OneModel(FunctionValidation, Supervised):
    """A task with the default training, validated by a function."""

    def __init__(self, recipe: Recipe, parts: CreatedParts) -> None:
        super().__init__(parts.model, parts.criterion, metrics=recipe.metrics)
        self.recipe, self.parts = recipe, parts


class SeveralModels(FunctionValidation, Task):
    """A task that is trained and validated by functions."""

    def __init__(self, recipe: Recipe, parts: CreatedParts) -> None:
        for name, model in parts.models.items():
            setattr(self, name, model)
        self.loss_fn = parts.criterion
        self.recipe, self.parts = recipe, parts


def make_task(recipe: Recipe, parts: CreatedParts) -> Task:
    if isinstance(parts.model, list):
        return SeveralModels(recipe, parts)
    if recipe.validation_function is not None:
        return OneModel(recipe, parts)
    return Supervised(parts.model, parts.criterion, metrics=recipe.metrics)


def validation_data(recipe: Recipe, parts: CreatedParts, params: LoaderParams, world_size: int) -> Any:
    if parts.validation is None:
        raise ValueError(
            "There is no validation set: return two datasets from data_creator(config), for training and validation."
        )
    if recipe.validation_function is None:
        if isinstance(parts.model, list):
            raise ValueError("The default validation takes one model: for several, pass validation_function=.")
        return parts.validation
    process_params = params_of_one_process(params, world_size)
    return [ValidationShare(evaluation_loader(parts.validation, process_params, "validation"))] * world_size
