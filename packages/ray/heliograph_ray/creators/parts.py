"""What the creators make, on each rank and in every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from heliograph.core.data.loaders import is_dataset
from heliograph.core.engines.weights import check_fits, load_module
from heliograph.spi import capture, restore, seed_all, with_article
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .recipe import Recipe


@dataclass(frozen=True)
class Parts:
    """The parts of a training.

    Attributes:
        train: the training set.
        validation: the validation set; None without one.
        model: the model, or a list of several, as the creator returned it.
        optimizer: the optimizer, or a list of several.
        criterion: the loss.
        scheduler: the scheduler, or a list of several; None without one.
    """

    train: Any
    validation: Any
    model: Any
    optimizer: Any
    criterion: Any
    scheduler: Any

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name: `model`, or `model_0`, `model_1` and so on."""
        return by_name("model", self.model)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name: `optimizer`, or `optimizer_0`, `optimizer_1` and so on."""
        return by_name("optimizer", self.optimizer)

    @property
    def schedulers(self) -> dict[str, Any]:
        """The schedulers by the names of their optimizers.

        Raises:
            ValueError: one has an optimizer that is not one of these, or two have the same.
        """
        found: dict[str, Any] = {}
        for scheduler in [] if self.scheduler is None else as_list(self.scheduler):
            owners = [name for name, each in self.optimizers.items() if scheduler.optimizer is each]
            if not owners or owners[0] in found:
                raise ValueError(
                    f"scheduler_creator returned {with_article(type(scheduler).__name__)} of "
                    f"{'an optimizer that has one already' if owners else 'another optimizer'}: return one scheduler "
                    f"for each optimizer of optimizer_creator; torch's ChainedScheduler makes one of two."
                )
            found[owners[0]] = scheduler
        return found


def build(recipe: Recipe) -> Parts:
    """Call the creators.

    Raises:
        TypeError: one returned the wrong type.
        ValueError: there are several models, optimizers or schedulers, and no function that trains them; a scheduler
            needs a metric that it would not get.
    """
    train, validation = make_data(recipe)
    model = make_model(recipe)
    optimizer, scheduler = make_optimizer(recipe, model)
    parts = Parts(train, validation, model, optimizer, make_loss(recipe), scheduler)
    if recipe.train_function is None and any(map(is_several, (model, optimizer, scheduler))):
        raise ValueError(
            "The default training takes one model with one optimizer and one scheduler: for several, pass "
            "train_function= (and validation_function= to validate)."
        )
    plateaus = [each for each in parts.schedulers.values() if isinstance(each, ReduceLROnPlateau)]
    if plateaus and recipe.scheduler_step_freq in ("batch", "epoch"):
        raise ValueError(
            f"A ReduceLROnPlateau is stepped by a metric, not after every {recipe.scheduler_step_freq}: pass "
            f"scheduler_step_freq='manual', and call trainer.update_scheduler(metric) after validate()."
        )
    return parts


def make_data(recipe: Recipe) -> tuple[Any, Any]:
    """Return the training set, and the validation set or None.

    Raises:
        ValueError: the creator returned something else than one dataset or two.
    """
    with seeded(recipe.seed):
        made = recipe.data_creator(recipe.config)
    sets = list(made) if isinstance(made, list | tuple) else [made]
    if len(sets) not in (1, 2) or not all(map(is_dataset, sets)):
        raise ValueError(
            f"data_creator(config) returns a dataset, or two, for training and validation, and no loaders: the trainer "
            f"makes batches, by batch_size= and dataloader_config=. It returned {made!r:.200}."
        )
    return sets[0], sets[1] if len(sets) == 2 else None


def make_model(recipe: Recipe) -> Any:
    """Return the model, or a list of several.

    Raises:
        TypeError: the creator returned something else.
    """
    with seeded(recipe.seed):
        made = recipe.model_creator(recipe.config)
    return _check(made, nn.Module, "model_creator(config) returns a module or a list of modules")


def make_optimizer(recipe: Recipe, model: Any) -> tuple[Any, Any]:
    """Return the optimizer and its scheduler or None, or lists of several.

    Raises:
        TypeError: a creator returned something else.
    """
    with seeded(recipe.seed):
        made = recipe.optimizer_creator(model, recipe.config)
    wanted = "optimizer_creator(model, config) returns an optimizer of torch or a list of them"
    optimizer = _check(made, torch.optim.Optimizer, wanted)
    if recipe.scheduler_creator is None:
        return optimizer, None
    with seeded(recipe.seed):
        made = recipe.scheduler_creator(optimizer, recipe.config)
    wanted = "scheduler_creator(optimizer, config) returns a scheduler of torch or a list of them"
    return optimizer, _check(made, torch.optim.lr_scheduler.LRScheduler, wanted)


def make_loss(recipe: Recipe) -> Callable[..., Any]:
    """Return the criterion; a loss class is called without the config.

    Raises:
        TypeError: the creator returned something that cannot be called.
    """
    creator: Any = recipe.loss_creator
    is_class = isinstance(creator, type) and issubclass(creator, nn.Module)
    with seeded(recipe.seed):
        made: Callable[..., Any] | None = creator() if is_class else creator(recipe.config)
    if not callable(made):
        raise TypeError(
            f"loss_creator= takes a loss class, or a function of the config that returns a loss; got {made!r}."
        )
    return made


def load_weights(models: Mapping[str, nn.Module], state: Mapping[str, Any]) -> None:
    """Load the weights of a state into models.

    Raises:
        ValueError: the state is of other models.
    """
    saved = {name: weights for name, weights in state["modules"].items() if name in models}
    check_fits(models, saved)
    for name, model in models.items():
        load_module(name, model, saved[name])


def by_name(name: str, given: Any) -> dict[str, Any]:
    """Return a single object by the name, or several as `name_0`, `name_1` and so on."""
    if not is_several(given):
        return {name: given}
    return {f"{name}_{number}": each for number, each in enumerate(given)}


def as_list(given: Any) -> list[Any]:
    """Return a single object as a list of one."""
    return given if is_several(given) else [given]


def is_several(given: Any) -> bool:
    """Return whether a creator returned several."""
    return isinstance(given, list)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generators in the context, so that a creator makes the same on every rank and in every call."""
    former = capture()
    seed_all(seed)
    try:
        yield
    finally:
        restore(former)


def _check(made: Any, kind: type[Any], wanted: str) -> Any:
    """Return an object, or a list of several, after a check of the types."""
    given = list(made) if isinstance(made, list | tuple) else made
    if given == [] or not all(isinstance(each, kind) for each in as_list(given)):
        raise TypeError(f"{wanted}, got {made!r:.200}.")
    return given
