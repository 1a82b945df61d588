"""A training or validation, as it runs on each rank or in the caller's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from heliograph import LoaderParams, RunResult, Task, Trainer
from heliograph.core.distributed.queue import child_queue
from torch.utils.data import IterableDataset

from .packed_state import unpack_state
from .parts import Parts, build, load_weights
from .recipe import Recipe
from .state_transfer import PassResult, StateTransfer
from .train_pass import train_pass
from .validation import make_task, validation_data


@dataclass(frozen=True)
class TrainJob:
    """What a rank has to do.

    Attributes:
        recipe: the arguments of the trainer.
        state: the state to resume, packed; None starts from the beginning.
        passes: the number of passes after which to stop, those before included.
    """

    recipe: Recipe
    state: bytes | None
    passes: int


def train_on_rank(job: TrainJob) -> RunResult:
    """Train on a launched rank; the main one sends results through its queue."""
    queue = child_queue()
    assert queue is not None
    return train(job, queue.put)


def train(job: TrainJob, send: Callable[[PassResult], object]) -> RunResult:
    """Train until the number of passes is reached; return the result.

    Raises:
        SystemExit: a plugin requested an exit status.
    """
    recipe = job.recipe
    by_function = recipe.train_function is not None
    steps_scheduler = recipe.scheduler_step_freq == "manual" or (by_function and recipe.scheduler_step_freq is None)
    transfer = StateTransfer(job.state, send, steps_scheduler=steps_scheduler)
    parts, trainer = _prepare(recipe, transfer)
    if parts.scheduler is not None and recipe.scheduler_step_freq in ("batch", "epoch"):
        trainer.plugins.load("learning_rate", per="step" if recipe.scheduler_step_freq == "batch" else "epoch")
    task, params = make_task(recipe, parts), _loader_params(recipe, trainer)
    options: dict[str, Any] = {
        "loader_params": params if _has_order(parts.train, params) else {**params, "shuffle": True},
        "optimizer": parts.optimizers if by_function else parts.optimizer,
        "scheduler": (parts.schedulers or None) if by_function else parts.scheduler,
        "epochs": job.passes,
        "name": recipe.name,
        "hyper_parameters": recipe.config,
    }
    if "validation" in trainer.plugins.declared("asks"):
        options["validation"] = validation_data(recipe, parts, params, trainer.engine.world_size)
    if by_function:
        return _train_by_function(trainer, recipe, parts, task, options)
    return trainer.fit(task, parts.train, **options)


def validate(job: TrainJob) -> RunResult:
    """Validate the weights of the state, or without one those that the creators make."""
    recipe = job.recipe
    parts, trainer = _prepare(recipe)
    params = _loader_params(recipe, trainer)
    data = validation_data(recipe, parts, params, trainer.engine.world_size)
    if job.state is not None:
        state = unpack_state(job.state)
        load_weights(parts.models, state)
        for name, scheduler in parts.schedulers.items():
            scheduler.load_state_dict(state["schedulers"][name])
    task = make_task(recipe, parts)
    return trainer.validate(task, data, loader_params=None if isinstance(data, list) else params, name=recipe.name)


def _prepare(recipe: Recipe, *plugins: Any) -> tuple[Parts, Trainer]:
    """Call the hook and the creators, and make the trainer.

    Raises:
        TypeError: a creator returned the wrong type.
    """
    if recipe.initialization_hook is not None:
        recipe.initialization_hook(recipe.config)
    parts = build(recipe)
    engine = recipe.engine if recipe.engine is None or isinstance(recipe.engine, str) else recipe.engine()
    trainer = Trainer(plugins, engine=engine, **recipe.options)
    trainer.plugins.load("rng_capture", seed=recipe.seed)
    made = [] if recipe.plugin_creator is None else recipe.plugin_creator(recipe.config)
    if not isinstance(made, Iterable):
        raise TypeError(f"plugin_creator(config) returns a list of plugins, got {made!r:.200}.")
    for plugin in made:
        trainer.plugins.register(plugin)
    return parts, trainer


def _loader_params(recipe: Recipe, trainer: Trainer) -> LoaderParams:
    """Return the loader parameters of the datasets.

    Raises:
        ValueError: the batch size is not a multiple of the number of ranks.
    """
    ranks, whole = trainer.engine.world_size, recipe.batch_size
    if whole % ranks:
        raise ValueError(
            f"batch_size={whole} is that of all ranks together, and {ranks} ranks cannot share it equally: give a "
            f"multiple of {ranks}, such as {max(1, round(whole / ranks)) * ranks}."
        )
    return cast("LoaderParams", {**recipe.dataloader_config, "global_batch_size": whole})


def _has_order(data: Any, params: LoaderParams) -> bool:
    return isinstance(data, IterableDataset) or bool(params.keys() & {"shuffle", "sampler"})


def _train_by_function(
    trainer: Trainer, recipe: Recipe, parts: Parts, task: Task, options: dict[str, Any]
) -> RunResult:
    """Train with a user's own function for each pass."""
    with trainer.run(task, parts.train, **options) as run:
        for _ in run.epochs():
            train_pass(run, recipe, parts)
    return run.result_or_raise()
