"""A trainer that takes creator functions and keeps the state between calls."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

from heliograph import RankFailed, RunResult, launch
from heliograph.core.checkpoint.ranks import join_shards
from heliograph.core.distributed.launcher import KeptRanks
from heliograph.core.engines.options import EngineOptions
from heliograph.spi import LoopEngine, Store, check_number, check_whole_number, membership

from .recipe import Config, CreatedParts, Recipe, StepFrequency, by_name, load_weights, make_model, make_optimizer
from .train_job import PassResult, TrainJob, pack_state, train, train_on_rank, unpack_state, validate

logger = logging.getLogger("heliograph")


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Run functions in new processes on this machine, as `heliograph.launch` does.

    Attributes:
        nprocs: the number of processes; by default, one for each visible GPU.
        grace: seconds that the other ranks have to close and report after one has failed.
        idle: seconds without a call after which a `CreatorTrainer` gives up its processes.

    Raises:
        ValueError: an attribute is out of its range.
    """

    nprocs: int | None = None
    grace: float = 30.0
    idle: float = 60.0

    def __post_init__(self) -> None:
        if self.nprocs is not None:
            check_whole_number("nprocs", self.nprocs, at_least=1, or_else="None for one per visible GPU")
        check_number("grace", self.grace, of="seconds", more_than=0)
        check_number("idle", self.idle, of="seconds", more_than=0)

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_message: Callable[[int, Any], object] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on each rank; see `heliograph.launch`."""
        return launch(fn, *args, nprocs=self.nprocs, grace=self.grace, on_message=on_message, **kwargs)

    def keep_ranks(self) -> KeptRanks:
        """Return processes that stay alive between calls of their `run`."""
        return KeptRanks(self.nprocs, grace=self.grace, idle=self.idle)


def step_schedulers(recipe: Recipe, state: Mapping[str, Any], metric: float) -> dict[str, Any]:
    model = make_model(recipe)
    optimizer, scheduler = make_optimizer(recipe, model)
    parts = CreatedParts(None, None, model, optimizer, None, scheduler)
    for name, optimizer in parts.optimizers.items():
        optimizer.load_state_dict(deepcopy(state["optimizers"][name]))
    with warnings.catch_warnings():  # the optimizer was stepped in another process, which torch cannot know
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for name, scheduler in parts.schedulers.items():
            scheduler.load_state_dict(deepcopy(state["schedulers"][name]))
            scheduler.step(*([metric] if "metrics" in signature(scheduler.step).parameters else []))
    optimizers = {name: optimizer.state_dict() for name, optimizer in parts.optimizers.items()}
    schedulers = {name: scheduler.state_dict() for name, scheduler in parts.schedulers.items()}
    return {**state, "optimizers": optimizers, "schedulers": schedulers}


class Launcher(Protocol):
    """Interface of a launcher: `LocalLauncher`, `RayLauncher` or your own.

    If it also has the method `keep_ranks()`, its ranks stay alive between calls; see `KeepsRanks`.
    """

    def run(
        self, fn: Callable[..., Any], /, *args: Any, on_message: Callable[[int, Any], object] | None = None
    ) -> Sequence[Any]:
        """Call `fn(*args)` on each rank and return the values; pass objects from `child_queue()` to `on_message`."""


class KeptLauncher(Launcher, Protocol):
    """A launcher whose ranks stay alive between calls."""

    def close(self) -> object:
        """End the ranks; the next call starts new ones."""


@runtime_checkable
class KeepsRanks(Protocol):
    """A launcher that can keep its ranks alive between calls."""

    def keep_ranks(self) -> KeptLauncher:
        """Return a launcher whose ranks stay alive between calls."""


class CreatorTrainer:
    """Train what creator functions return, as RaySGD's `PyTorchTrainer` does.

    In each call the ranks call the creators, and the state that they return is kept: three calls of `train()` equal one
    of `train(passes=3)` and an uninterrupted `fit`, bit for bit. The state is sent as bytes, so no shared file system
    is needed. The functions are pickled: they must be importable, unless the launcher says otherwise.

    The processes of the launcher are started by the first call and stay alive for the next ones, until `shutdown()`, an
    error, or its `idle` seconds without a call. On Ray they are also given up when this process uses another
    `RayLauncher`.

    Args:
        model_creator: called with the config; returns a module, or a list of several.
        data_creator: called with the config; returns the training set, or that and the validation set. No loaders.
        optimizer_creator: called with the model, or the list of them, and the config; returns one or several.
        loss_creator: a loss class, called without arguments, or a function of the config that returns a loss.
        scheduler_creator: called with the optimizer, or the list of them, and the config; returns one or several.
        scheduler_step_freq: when the schedulers are stepped: after each `batch` (an optimizer step), after each
            `epoch`, `manual` (by `update_scheduler(metric)`), or None (by a function or plugin of yours).
        config: passed to the functions.
        batch_size: samples in the batches of all ranks together; a multiple of the number of ranks.
        dataloader_config: other loader parameters, as in `LoaderParams`. The training set is shuffled by default, in an
            order that does not depend on the number of ranks.
        metrics: what the default training and validation measure, as in `Supervised`.
        train_function: called for each pass with (config, model, iterator, criterion, optimizer, scheduler); returns a
            dict of numbers, which are averaged over all samples. The iterator yields batches on the device. For each,
            the function calls `loss.backward()` and `optimizer.step()` as usual, or `iterator.step(loss)`, which does
            both and also supports accumulation and fp16.
        validation_function: called once on every rank that has a share, with (config, model, iterator, criterion,
            scheduler), in eval mode and without gradients; returns a dict of numbers, as above.
        initialization_hook: called first, with the config, on each rank and in every call.
        plugin_creator: called with the config; returns plugins.
        launcher: starts the ranks; None trains in this process.
        engine: the name of an engine, or a function that makes one on each rank, such as `DDPEngine`.
        seed: of each creator's random draws, of the order of the samples and of the training.
        name: the run's name, which is part of file names.
        **options: of the trainer on each rank, such as `precision="bf16"` or `use_cpu=True`; see `Trainer`.

    Attributes:
        result: the result of the last call; None before the first.
        messages: (rank, object) for each object that the ranks of the last call have put into their queues.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, or nothing would step the scheduler.
    """

    def __init__(
        self,
        model_creator: Callable[[Any], Any],
        data_creator: Callable[[Any], Any],
        optimizer_creator: Callable[[Any, Any], Any],
        loss_creator: Callable[..., Any],
        *,
        scheduler_creator: Callable[[Any, Any], Any] | None = None,
        scheduler_step_freq: StepFrequency | None = "batch",
        config: Config | None = None,
        batch_size: int = 16,
        dataloader_config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        train_function: Callable[..., Mapping[str, Any]] | None = None,
        validation_function: Callable[..., Mapping[str, Any]] | None = None,
        initialization_hook: Callable[[Any], object] | None = None,
        plugin_creator: Callable[[Any], Iterable[Any]] | None = None,
        launcher: Launcher | None = None,
        engine: Callable[[], LoopEngine] | str | None = None,
        seed: int = 6691,
        name: str = "run",
        **options: Unpack[EngineOptions],
    ) -> None:
        if isinstance(launcher, type) or (launcher is not None and not callable(getattr(launcher, "run", None))):
            raise TypeError(f"launcher= takes an object with run(fn, ...), such as LocalLauncher(2); got {launcher!r}.")
        self._recipe = Recipe(
            model_creator=model_creator,
            data_creator=data_creator,
            optimizer_creator=optimizer_creator,
            loss_creator=loss_creator,
            scheduler_creator=scheduler_creator,
            scheduler_step_freq=scheduler_step_freq,
            config={} if config is None else config,
            batch_size=batch_size,
            dataloader_config={} if dataloader_config is None else dataloader_config,
            metrics={} if metrics is None else metrics,
            train_function=train_function,
            validation_function=validation_function,
            initialization_hook=initialization_hook,
            plugin_creator=plugin_creator,
            engine=engine,
            options=options,
            seed=seed,
            name=name,
        )
        self._kept = launcher.keep_ranks() if isinstance(launcher, KeepsRanks) else None
        self._launcher: Launcher | KeptLauncher | None = self._kept or launcher
        self._state: bytes | None = None
        self._done = 0
        self._metrics: dict[str, float] = {}
        self._is_shut_down = False
        self.result: RunResult | None = None
        self.messages: list[tuple[int, Any]] = []

    def train(self, max_retries: int = 0, *, passes: int = 1) -> dict[str, float]:
        """Train for some passes over the data; return the metrics of the last one.

        If a rank is lost (it died, or hung until the engine's timeout), the pass is repeated from its start in new
        processes. An exception in your code is raised at once with its own type. In both cases the state after the
        previous pass is kept. If a plugin interrupts a pass, the next call finishes it.

        Args:
            max_retries: how many times each pass may be repeated.
            passes: the number of passes.

        Returns:
            The means over all samples of the pass, such as `train/loss`, and the latest values of other metrics.

        Raises:
            ValueError: an argument is out of its range, or arguments contradict each other.
            RuntimeError: this process is itself one of several ranks.
            RankFailed: a rank was lost more than `max_retries` times.
            BaseException: an exception of your code.
        """
        for name, number, least in (("max_retries", max_retries, 0), ("passes", passes, 1)):
            check_whole_number(f"{name}=", number, at_least=least)
        goal, failures, reached = self._done + passes, 0, self._done
        while True:
            try:
                self.result = self._run(partial(train, send=self._keep), train_on_rank, goal)
                return dict(self._metrics)
            except Exception as error:
                failures, reached = failures + 1 if self._done == reached else 1, self._done
                if not is_lost_rank(error):
                    raise
                if failures > max_retries:
                    error.add_note(f"heliograph: pass {reached} failed {failures} times; max_retries={max_retries}.")
                    raise
                logger.warning("pass %d is repeated, retry %d of %d: %s", reached, failures, max_retries, error)

    def validate(self) -> dict[str, float]:
        """Validate on all ranks; return the means over all samples, such as `validation/loss`.

        Raises:
            ValueError: there is no validation set.
            RuntimeError: this process is itself one of several ranks.
            BaseException: an exception of your code.
        """
        self.result = self._run(validate, validate, self._done)
        return dict(self.result.metrics)

    def update_scheduler(self, metric: float) -> None:
        """Step the schedulers by a metric, for `scheduler_step_freq="manual"`.

        Args:
            metric: for example the validation loss that `validate()` returned.

        Raises:
            RuntimeError: there is no trained state.
            ValueError: there is no scheduler, or `scheduler_step_freq` is not `manual`.
        """
        if self._recipe.scheduler_creator is None or self._recipe.scheduler_step_freq != "manual":
            raise ValueError("update_scheduler(metric) needs scheduler_creator= and scheduler_step_freq='manual'.")
        self._state = pack_state(step_schedulers(self._recipe, unpack_state(self._trained()), metric))

    def save(self, path: str | Path) -> Path:
        """Write the state as a checkpoint, atomically; return its path.

        It includes the random generators of every rank. If another run's checkpoint has the same name, a number is
        added.

        Args:
            path: a file name that ends in `.pth`.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: there is no trained state.
            ValueError: the file name does not end in `.pth`.
        """
        path, state = Path(path), unpack_state(self._trained())
        if path.suffix != ".pth":
            raise ValueError(f"The name of a checkpoint ends in .pth, got {str(path)!r}.")
        store = Store(path.parent, state["run_name"], state["training_id"])
        store.open()
        try:
            return store.save(path.name, state).path
        finally:
            store.close()

    def restore(self, path: str | Path) -> None:
        """Load the state of a checkpoint that `save`, or a `fit` of the same models, wrote.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged, or not a checkpoint.
        """
        self._check_is_open()
        path = Path(path)
        state = join_shards(Store(path.parent, path.stem).load(path), path)
        self._state, self._done = pack_state(state), int(state["progress"]["epoch"])
        self._metrics = dict(state["metrics"])

    def get_model(self) -> Any:
        """Return a new model on the CPU, or a list of models, with the current weights."""
        self._check_is_open()
        model = make_model(self._recipe)
        if self._state is not None:
            load_weights(by_name("model", model), unpack_state(self._state))
        return model

    def shutdown(self) -> None:
        """Release the state, and end idle ranks. May be called more than once."""
        self._state, self._is_shut_down = None, True
        if self._kept is not None:
            self._kept.close()

    def _run(
        self, run_here: Callable[[TrainJob], RunResult], run_on_rank: Callable[[TrainJob], RunResult], passes: int
    ) -> RunResult:
        self._check_is_open()
        if (ranks := membership().world_size) > 1:
            raise RuntimeError(
                f"This process is one of {ranks} ranks. Use the trainer in a single process, and pass launcher= to "
                f"start the ranks."
            )
        self.messages = []
        job = TrainJob(self._recipe, self._state, passes)
        if self._launcher is None:
            return run_here(job)
        result: RunResult = self._launcher.run(run_on_rank, job, on_message=self._receive)[0]
        return result

    def _receive(self, rank: int, message: Any) -> None:
        if isinstance(message, PassResult):
            self._keep(message)
        else:
            self.messages.append((rank, message))

    def _keep(self, result: PassResult) -> None:
        self._state, self._done, self._metrics = result.state, result.epoch, result.metrics

    def _trained(self) -> bytes:
        self._check_is_open()
        if self._state is None:
            raise RuntimeError("There is no trained state: call train() or restore(path) first.")
        return self._state

    def _check_is_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("This trainer was shut down: create a new one, and call its restore(path).")


def is_lost_rank(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, RankFailed):
        error = error.__cause__
    return error is not None and not error.was_reported
