"""A validation by a user's own validation_function: each rank calls it once, for its share of the validation set."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from heliograph import LoaderParams, Run, Supervised, Task
from heliograph.core.data.loaders import evaluation_loader, params_of_one_process

from .returned_values import check_numbers

if TYPE_CHECKING:
    from heliograph import TrainRun

    from .parts import Parts
    from .recipe import Recipe


class ValidationShare:
    """A rank's share of a validation set, which the loop treats as a single batch.

    Attributes:
        batch_size: the number of its samples that were read, as which the loop counts it.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batch_size = 0

    def read(self, run: TrainRun) -> Iterator[Any]:
        """Yield the batches, on the device."""
        self.batch_size = 0
        for batch in run.engine.feed(run.data.evaluate(self.loader, 0, run.progress.validations)):
            self.batch_size += run.size_of(batch)
            yield batch


class FunctionValidation:
    """The validation of a task by a validation_function."""

    recipe: Recipe
    parts: Parts

    def validation_step(self, run: Run, share: ValidationShare) -> None:
        """Call the function for this rank's share; track what it returns, weighted by samples.

        Raises:
            RuntimeError: it stepped a scheduler.
            TypeError: it returned something else than a dict of numbers.
        """
        recipe, parts = self.recipe, self.parts
        assert recipe.validation_function is not None
        batches = share.read(cast("TrainRun", run))
        first = next(batches, None)
        if first is None:  # there are more ranks than batches
            return
        epochs = [each.last_epoch for each in parts.schedulers.values()]
        iterator = chain([first], batches)
        returned = recipe.validation_function(recipe.config, parts.model, iterator, parts.criterion, parts.scheduler)
        if epochs != [each.last_epoch for each in parts.schedulers.values()]:
            raise RuntimeError(
                "validation_function stepped a scheduler by the metric of a single rank: pass "
                "scheduler_step_freq='manual' and call trainer.update_scheduler(metric) after validate()."
            )
        for name, value in check_numbers(returned, "validation_function").items():
            run.track(name, value, share.batch_size)


class OneModel(FunctionValidation, Supervised):
    """A task with the default training, validated by a function."""

    def __init__(self, recipe: Recipe, parts: Parts) -> None:
        super().__init__(parts.model, parts.criterion, metrics=recipe.metrics)
        self.recipe, self.parts = recipe, parts


class SeveralModels(FunctionValidation, Task):
    """A task that is trained and validated by functions."""

    def __init__(self, recipe: Recipe, parts: Parts) -> None:
        for name, model in parts.models.items():
            setattr(self, name, model)
        self.loss_fn = parts.criterion
        self.recipe, self.parts = recipe, parts


def make_task(recipe: Recipe, parts: Parts) -> Task:
    """Return the task that holds the models, as `model` or as `model_0`, `model_1` and so on."""
    if isinstance(parts.model, list):
        return SeveralModels(recipe, parts)
    if recipe.validation_function is not None:
        return OneModel(recipe, parts)
    return Supervised(parts.model, parts.criterion, metrics=recipe.metrics)


def validation_data(recipe: Recipe, parts: Parts, params: LoaderParams, world_size: int) -> Any:
    """Return the validation data of a run: the set itself, or with a validation_function a share of it for each rank.

    Raises:
        ValueError: there is no validation set, or no function that validates several models.
    """
    if parts.validation is None:
        raise ValueError(
            "There is nothing to validate on: data_creator(config) returns two datasets, for training and validation."
        )
    if recipe.validation_function is None:
        if isinstance(parts.model, list):
            raise ValueError("The default validation takes one model: for several, pass validation_function=.")
        return parts.validation
    own = params_of_one_process(params, world_size)
    return [ValidationShare(evaluation_loader(parts.validation, own, "validation"))] * world_size
