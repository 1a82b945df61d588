"""The validated arguments of `CreatorTrainer`, which are sent to the ranks, and what its creators return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from heliograph.core.data.loaders import is_dataset
from heliograph.core.engines.options import EngineOptions
from heliograph.core.engines.weights import check_fits, load_module
from heliograph.core.settings import check_name
from heliograph.spi import LoopEngine, capture, check_whole_number, known_names, restore, seed_all, with_article
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

Config = Mapping[str, Any]
StepFrequency = Literal["batch", "epoch", "manual"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The arguments of `CreatorTrainer`, which documents them."""

    model_creator: Callable[[Any], Any]
    data_creator: Callable[[Any], Any]
    optimizer_creator: Callable[[Any, Any], Any]
    loss_creator: Callable[..., Any]
    scheduler_creator: Callable[[Any, Any], Any] | None = None
    scheduler_step_freq: StepFrequency | None = "batch"
    config: Config = field(default_factory=dict)
    batch_size: int = 16
    dataloader_config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    train_function: Callable[..., Mapping[str, Any]] | None = None
    validation_function: Callable[..., Mapping[str, Any]] | None = None
    initialization_hook: Callable[[Any], object] | None = None
    plugin_creator: Callable[[Any], Iterable[Any]] | None = None
    engine: Callable[[], LoopEngine] | str | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    seed: int = 6691
    name: str = "run"

    def __post_init__(self) -> None:
        self._check_names()
        self._check_functions()
        for name in ("config", "dataloader_config", "metrics"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise TypeError(f"{name}= takes a dict, got {value!r}.")
        check_whole_number("batch_size=", self.batch_size, of="samples of all ranks together", at_least=1)
        if duplicates := self.dataloader_config.keys() & {"batch_size", "global_batch_size"}:
            raise ValueError(f"dataloader_config[{duplicates.pop()!r}] is given by batch_size=: leave it out.")
        check_whole_number("seed=", self.seed)
        self._check_stepping()
        if self.metrics and self.train_function is not None:
            raise ValueError("metrics= is for the default training: a train_function returns its own. Leave it out.")

    def _check_names(self) -> None:
        if unknown := sorted(self.options.keys() - EngineOptions.__annotations__.keys()):
            names = {"launcher", *EngineOptions.__annotations__, *(field.name for field in fields(self))} - {"options"}
            raise TypeError(
                f"CreatorTrainer has no argument {unknown[0]!r}.{known_names(unknown[0], names)} "
                f"docs/howto/migrate_from_raysgd.md has a table of RaySGD's arguments."
            )
        check_name(self.name)

    def _check_functions(self) -> None:
        for option in fields(self):
            value, is_function = getattr(self, option.name), option.name.endswith(("_creator", "_function", "_hook"))
            if is_function and not callable(value) and (value is not None or option.default is MISSING):
                raise TypeError(f"{option.name}= takes a function, got {value!r}.")
        if self.engine is not None and not isinstance(self.engine, str) and not callable(self.engine):
            raise TypeError(
                f"engine= takes the name of an engine, or a function that makes one on each rank, as DDPEngine does; "
                f"got {self.engine!r}."
            )

    def _check_stepping(self) -> None:
        if self.scheduler_step_freq not in (None, *get_args(StepFrequency)):
            raise ValueError(
                f"scheduler_step_freq= is 'batch', 'epoch', 'manual' or None, got {self.scheduler_step_freq!r}."
            )
        if self.scheduler_creator is None:
            return
        if self.train_function is not None and self.scheduler_step_freq == "batch":
            raise ValueError(
                "With a train_function, scheduler_step_freq='batch' would step a scheduler that the function may step "
                "too: call scheduler.step() in it and pass scheduler_step_freq=None, or pass 'epoch'."
            )
        if self.train_function is None and self.plugin_creator is None and self.scheduler_step_freq is None:
            raise ValueError(
                "scheduler_step_freq=None leaves the scheduler to a train_function or to a plugin, and there is none: "
                "pass 'batch', 'epoch', or 'manual' for trainer.update_scheduler(metric)."
            )


@dataclass(frozen=True)
class CreatedParts:
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
        return by_name("model", self.model)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return by_name("optimizer", self.optimizer)

    @property
    def schedulers(self) -> dict[str, Any]:
        schedulers: dict[str, Any] = {}
        for scheduler in [] if self.scheduler is None else as_list(self.scheduler):
            owners = [name for name, optimizer in self.optimizers.items() if scheduler.optimizer is optimizer]
            if not owners or owners[0] in schedulers:
                raise ValueError(
                    f"scheduler_creator returned {with_article(type(scheduler).__name__)} for "
                    f"{'an optimizer that already has one' if owners else 'another optimizer'}: return one scheduler "
                    f"for each optimizer of optimizer_creator; torch's ChainedScheduler combines two."
                )
            schedulers[owners[0]] = scheduler
        return schedulers


def build(recipe: Recipe) -> CreatedParts:
    train, validation = make_data(recipe)
    model = make_model(recipe)
    optimizer, scheduler = make_optimizer(recipe, model)
    parts = CreatedParts(train, validation, model, optimizer, make_loss(recipe), scheduler)
    if recipe.train_function is None and any(isinstance(part, list) for part in (model, optimizer, scheduler)):
        raise ValueError(
            "The default training takes one model with one optimizer and one scheduler: for several, pass "
            "train_function= (and validation_function= to validate)."
        )
    plateaus = [scheduler for scheduler in parts.schedulers.values() if isinstance(scheduler, ReduceLROnPlateau)]
    if plateaus and recipe.scheduler_step_freq in ("batch", "epoch"):
        raise ValueError(
            f"A ReduceLROnPlateau is stepped by a metric, not after every {recipe.scheduler_step_freq}: pass "
            f"scheduler_step_freq='manual', and call trainer.update_scheduler(metric) after validate()."
        )
    return parts


def make_data(recipe: Recipe) -> tuple[Any, Any]:
    made = create_seeded(recipe.seed, recipe.data_creator, recipe.config)
    sets = list(made) if isinstance(made, list | tuple) else [made]
    if len(sets) not in (1, 2) or not all(map(is_dataset, sets)):
        raise ValueError(
            f"data_creator(config) must return a dataset, or two, for training and validation, not loaders: the "
            f"trainer makes batches, from batch_size= and dataloader_config=. It returned {made!r:.200}."
        )
    return sets[0], sets[1] if len(sets) == 2 else None


def make_model(recipe: Recipe) -> Any:
    made = create_seeded(recipe.seed, recipe.model_creator, recipe.config)
    return _check(made, nn.Module, "model_creator(config) returns a module or a list of modules")


def make_optimizer(recipe: Recipe, model: Any) -> tuple[Any, Any]:
    made = create_seeded(recipe.seed, recipe.optimizer_creator, model, recipe.config)
    wanted = "optimizer_creator(model, config) returns an optimizer of torch or a list of them"
    optimizer = _check(made, torch.optim.Optimizer, wanted)
    if recipe.scheduler_creator is None:
        return optimizer, None
    made = create_seeded(recipe.seed, recipe.scheduler_creator, optimizer, recipe.config)
    wanted = "scheduler_creator(optimizer, config) returns a scheduler of torch or a list of them"
    return optimizer, _check(made, torch.optim.lr_scheduler.LRScheduler, wanted)


def make_loss(recipe: Recipe) -> Callable[..., Any]:
    creator: Any = recipe.loss_creator
    is_class = isinstance(creator, type) and issubclass(creator, nn.Module)
    made: Callable[..., Any] | None = create_seeded(recipe.seed, creator, *([] if is_class else [recipe.config]))
    if not callable(made):
        raise TypeError(
            f"loss_creator= takes a loss class, or a function of the config that returns a loss; got {made!r}."
        )
    return made


def load_weights(models: Mapping[str, nn.Module], state: Mapping[str, Any]) -> None:
    saved = {name: weights for name, weights in state["modules"].items() if name in models}
    check_fits(models, saved)
    for name, model in models.items():
        load_module(name, model, saved[name])


def by_name(name: str, created: Any) -> dict[str, Any]:
    if not isinstance(created, list):
        return {name: created}
    return {f"{name}_{number}": item for number, item in enumerate(created)}


def as_list(created: Any) -> list[Any]:
    return created if isinstance(created, list) else [created]


def create_seeded(seed: int, creator: Callable[..., Any], *args: Any) -> Any:
    state = capture()
    seed_all(seed)
    try:
        return creator(*args)
    finally:
        restore(state)


def _check(made: Any, kind: type[Any], wanted: str) -> Any:
    items = list(made) if isinstance(made, list | tuple) else made
    if items == [] or not all(isinstance(item, kind) for item in as_list(items)):
        raise TypeError(f"{wanted}, got {made!r:.200}.")
    return items
