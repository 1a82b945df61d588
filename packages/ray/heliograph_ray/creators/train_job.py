"""Training and validation on one rank or in the caller's process, and the transfer of the state between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import heliograph as h
import torch
from heliograph.core.distributed.launcher import child_queue
from torch.utils.data import IterableDataset

from .recipe import CreatedParts, Recipe, build, load_weights
from .user_functions import make_task, train_pass, validation_data


def pack_state(state: Mapping[str, Any]) -> bytes:
    buffer = BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpack_state(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    return state


@dataclass(frozen=True)
class PassResult:
    """The message that the main rank sends after a pass.

    Attributes:
        epoch: the number of completed passes.
        metrics: the means over this pass, and the latest values of other metrics.
        state: the packed snapshot of the run.
    """

    epoch: int
    metrics: dict[str, float]
    state: bytes


class StateTransfer(h.Plugin):
    """Resumes a packed state, and sends the new state after each pass and after an interruption.

    Args:
        state: the packed state to resume; None starts from the beginning.
        send: called with each result on the main rank.
        steps_scheduler: whether a user's function or the caller steps the scheduler.
    """

    name = "creators"

    def __init__(self, state: bytes | None, send: Callable[[PassResult], object], *, steps_scheduler: bool) -> None:
        self._state, self._send = state, send
        self.asks = ("log", "save", *(["scheduler"] if steps_scheduler else []))
        self._logs: list[tuple[int, dict[str, float]]] = []
        self._samples = 0
        self._is_due = self._has_sent = False

    @h.on(h.TrainStart)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        if self._state is not None:
            run.resume(unpack_state(self._state))

    @h.on(h.CheckpointLoaded, lane=h.Lane.REPORT)
    def reset_logs(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        self._logs, self._samples, self._is_due = [], run.progress.samples, False

    @h.on(h.EpochEnd)
    def end_pass(self, run: h.Run, event: h.EpochEnd) -> None:
        self._request(run, "a pass is done")

    @h.on(h.LastBoundary)
    def end(self, run: h.Run, event: h.LastBoundary) -> None:
        if run.progress.batch or not self._has_sent:
            self._request(run, "no pass was done at last")

    @h.on(h.Log, lane=h.Lane.REPORT)
    def collect(self, run: h.Run, event: h.Log) -> None:
        self._logs.append((run.progress.samples - self._samples, dict(event.metrics)))
        self._samples = run.progress.samples

    @h.on(h.SavePoint, lane=h.Lane.PERSIST)
    def send_state(self, run: h.Run, event: h.SavePoint) -> None:
        if not self._is_due:
            return
        self._is_due, self._has_sent = False, True
        state = run.state_dict()
        if run.engine.is_main:
            metrics = {**run.metrics, **average_metrics(self._logs)}
            self._send(PassResult(run.progress.epoch, metrics, pack_state(state)))
        self._logs = []

    def _request(self, run: h.Run, reason: str) -> None:
        self._is_due = True
        run.control.request_log(reason)
        run.control.request_save(reason, required=True)


def average_metrics(logs: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return sample-weighted means over all logs; the values of a single log stay exact."""
    means: dict[str, float] = {}
    for name in {name: None for _, metrics in logs for name in metrics}:
        values = [(samples, metrics[name]) for samples, metrics in logs if name in metrics]
        total = sum(samples for samples, _ in values)
        if len(values) == 1 or not total:
            means[name] = float(values[-1][1])
        else:
            means[name] = sum(samples * value for samples, value in values if samples) / total
    return means


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


def train_on_rank(job: TrainJob) -> h.RunResult:
    queue = child_queue()
    assert queue is not None
    return train(job, queue.put)


def train(job: TrainJob, send: Callable[[PassResult], object]) -> h.RunResult:
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


def validate(job: TrainJob) -> h.RunResult:
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


def _prepare(recipe: Recipe, *plugins: Any) -> tuple[CreatedParts, h.Trainer]:
    if recipe.initialization_hook is not None:
        recipe.initialization_hook(recipe.config)
    parts = build(recipe)
    engine = recipe.engine if recipe.engine is None or isinstance(recipe.engine, str) else recipe.engine()
    trainer = h.Trainer(plugins, engine=engine, **recipe.options)
    trainer.plugins.load("rng_capture", seed=recipe.seed)
    made = [] if recipe.plugin_creator is None else recipe.plugin_creator(recipe.config)
    if not isinstance(made, Iterable):
        raise TypeError(f"plugin_creator(config) returns a list of plugins, got {made!r:.200}.")
    for plugin in made:
        trainer.plugins.register(plugin)
    return parts, trainer


def _loader_params(recipe: Recipe, trainer: h.Trainer) -> h.LoaderParams:
    ranks, batch_size = trainer.engine.world_size, recipe.batch_size
    if batch_size % ranks:
        raise ValueError(
            f"batch_size={batch_size} is the global batch size, and {ranks} ranks cannot share it equally: pass a "
            f"multiple of {ranks}, such as {max(1, round(batch_size / ranks)) * ranks}."
        )
    return cast("h.LoaderParams", {**recipe.dataloader_config, "global_batch_size": batch_size})
