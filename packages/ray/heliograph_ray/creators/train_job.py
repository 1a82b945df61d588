"""Training and validation on one rank or in the caller's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from heliograph import LoaderParams, RunResult, Trainer
from heliograph.core.distributed.queue import child_queue
from torch.utils.data import IterableDataset

from .parts import CreatedParts, build, load_weights
from .recipe import Recipe
from .state_transfer import PassResult, StateTransfer, unpack_state
from .user_functions import make_task, train_pass, validation_data


@dataclass(frozen=True)
class TrainJob:
    """The job of a rank.

    Attributes:
        recipe: the arguments of the trainer.
        state: the packed state to resume; None starts from the beginning.
        passes: the total number of passes at which to stop.
    """

    recipe: Recipe
    state: bytes | None
    passes: int


def train_on_rank(job: TrainJob) -> RunResult:
    queue = child_queue()
    assert queue is not None
    return train(job, queue.put)


def train(job: TrainJob, send: Callable[[PassResult], object]) -> RunResult:
    recipe = job.recipe
    by_function = recipe.train_function is not None
    steps_scheduler = recipe.scheduler_step_freq == "manual" or (by_function and recipe.scheduler_step_freq is None)
    transfer = StateTransfer(job.state, send, steps_scheduler=steps_scheduler)
    parts, trainer = _prepare(recipe, transfer)
    if parts.scheduler is not None and recipe.scheduler_step_freq in ("batch", "epoch"):
        trainer.plugins.load("learning_rate", per="step" if recipe.scheduler_step_freq == "batch" else "epoch")
    task, params = make_task(recipe, parts), _loader_params(recipe, trainer)
    has_order = isinstance(parts.train, IterableDataset) or bool(params.keys() & {"shuffle", "sampler"})
    options: dict[str, Any] = {
        "loader_params": params if has_order else {**params, "shuffle": True},
        "optimizer": parts.optimizers if by_function else parts.optimizer,
        "scheduler": (parts.schedulers or None) if by_function else parts.scheduler,
        "epochs": job.passes,
        "name": recipe.name,
        "hyper_parameters": recipe.config,
    }
    if "validation" in trainer.plugins.declared("asks"):
        options["validation"] = validation_data(recipe, parts, params, trainer.engine.world_size)
    if not by_function:
        return trainer.fit(task, parts.train, **options)
    with trainer.run(task, parts.train, **options) as run:
        for _ in run.epochs():
            train_pass(run, recipe, parts)
    return run.result_or_raise()


def validate(job: TrainJob) -> RunResult:
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


def _prepare(recipe: Recipe, *plugins: Any) -> tuple[CreatedParts, Trainer]:
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
    ranks, batch_size = trainer.engine.world_size, recipe.batch_size
    if batch_size % ranks:
        raise ValueError(
            f"batch_size={batch_size} is the global batch size, and {ranks} ranks cannot share it equally: pass a "
            f"multiple of {ranks}, such as {max(1, round(batch_size / ranks)) * ranks}."
        )
    return cast("LoaderParams", {**recipe.dataloader_config, "global_batch_size": batch_size})
