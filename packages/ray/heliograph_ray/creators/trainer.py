"""A trainer that is given creator functions, and keeps the state between calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, Unpack, runtime_checkable

from heliograph import RankFailed, RunResult
from heliograph.core.checkpoint.state.ranks import join_shards
from heliograph.core.engines.options import EngineOptions
from heliograph.spi import LoopEngine, Store, check_whole_number, known_names, membership

from .packed_state import pack_state, unpack_state
from .parts import by_name, load_weights, make_model
from .raysgd import NoArguments, check_file, explain_method, refuse_arguments
from .recipe import Config, Recipe, StepFrequency
from .schedulers import step_schedulers
from .state_transfer import PassResult
from .train_job import TrainJob, train, train_on_rank, validate

logger = logging.getLogger("heliograph")


class Launcher(Protocol):
    """Starts ranks: `LocalLauncher`, `RayLauncher` or one of your own.

    Those of one with a method `keep_ranks()` stay alive between calls: see `KeepsRanks`.
    """

    def run(
        self, fn: Callable[..., Any], /, *args: Any, on_message: Callable[[int, Any], object] | None = None
    ) -> Sequence[Any]:
        """Call `fn(*args)` on each rank, and `on_message` with what is put into `child_queue()`; return the values."""


class KeptLauncher(Protocol):
    """A launcher whose ranks stay alive between calls."""

    def run(self, fn: Callable[..., Any], /, *args: Any, on_message: Callable[[int, Any], object]) -> Sequence[Any]:
        """Call `fn(*args)` on each rank, as `Launcher.run` does."""

    def close(self) -> object:
        """End them; the next call starts others."""


@runtime_checkable
class KeepsRanks(Protocol):
    """A launcher that can keep its ranks alive between calls."""

    def keep_ranks(self) -> KeptLauncher:
        """Return a launcher that does so."""


class CreatorTrainer:
    """Trains what creator functions make, pass by pass, on any number of ranks, as RaySGD's `PyTorchTrainer` does.

    In each call the ranks call the creators, and the state that they return is kept: three calls of `train()` equal one
    of `train(passes=3)` and an uninterrupted `fit`, bit for bit. The state is sent as bytes, so no shared file system
    is needed. The functions are pickled: they must be importable, unless the launcher says otherwise.

    The processes of the launcher are started by the first call and stay alive for the next ones, until `shutdown()`, an
    error, or its `idle` seconds without a call. On Ray they are also given up if the cluster has room for more of them,
    and when this process uses another `RayLauncher`.

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

    def __getattr__(self, name: str) -> NoReturn:
        def known(name: str) -> str:
            return known_names(name, [each for each in dir(type(self)) if not each.startswith("_")])

        raise AttributeError(explain_method(name, known), name=name, obj=self)

    def train(self, max_retries: int = 0, *, passes: int = 1, **others: Unpack[NoArguments]) -> dict[str, float]:
        """Train for some passes over the data; return the metrics of the last one.

        A pass in which a rank is lost (it died, or it hung until the engine's timeout) is repeated from its start, in
        new processes. An exception of your code is raised at once, with its own type. In both cases the state of the
        passes before is kept. A pass that a plugin has interrupted is finished by the next call.

        Args:
            max_retries: how many times each pass may be repeated.
            passes: the number of passes.
            **others: none; those of RaySGD are an error that says what to write instead.

        Returns:
            The means over all samples of the pass, such as `train/loss`, and the latest values of other metrics.

        Raises:
            TypeError: there is no such argument.
            ValueError: an argument is out of its range, or arguments contradict each other.
            RuntimeError: this process is one of several ranks itself.
            RankFailed: a rank was lost, once more than `max_retries`.
            BaseException: what your code raised.
        """
        refuse_arguments("train", others)
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

    def validate(self, **others: Unpack[NoArguments]) -> dict[str, float]:
        """Validate, each rank its share of the data; return the means over all samples, such as `validation/loss`.

        Args:
            **others: none; those of RaySGD are an error that says what to write instead.

        Raises:
            TypeError: there is no such argument.
            ValueError: there is no validation set.
            RuntimeError: this process is one of several ranks itself.
            BaseException: what your code raised.
        """
        refuse_arguments("validate", others)
        self.result = self._run(validate, validate, self._done)
        return dict(self.result.metrics)

    def update_scheduler(self, metric: float) -> None:
        """Step the schedulers by a metric, such as that of `validate()`; for `scheduler_step_freq="manual"`.

        Raises:
            RuntimeError: nothing was trained yet.
            ValueError: there is no scheduler, or `scheduler_step_freq` is not `manual`.
        """
        if self._recipe.scheduler_creator is None or self._recipe.scheduler_step_freq != "manual":
            raise ValueError("update_scheduler(metric) needs scheduler_creator= and scheduler_step_freq='manual'.")
        self._state = pack_state(step_schedulers(self._recipe, unpack_state(self._trained()), metric))

    def save(self, path: str | Path) -> Path:
        """Write the state as a checkpoint, atomically; return its path.

        It holds the whole state, with the random generators of every rank. If another run's checkpoint has the name, a
        number is added to it.

        Args:
            path: a file name that ends in `.pth`.

        Raises:
            OSError: it cannot be written.
            RuntimeError: nothing was trained yet.
            ValueError: the name is not that of a checkpoint.
        """
        path, state = check_file(path), unpack_state(self._trained())
        store = Store(path.parent, state["run_name"], state["training_id"])
        store.open()
        try:
            return store.save(path.name, state).path
        finally:
            store.close()

    def restore(self, path: str | Path) -> None:
        """Load the state of a checkpoint: one of `save`, or of a `fit` of the same models.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, or not a checkpoint.
        """
        self._check_is_open()
        path = Path(path)
        state = join_shards(Store(path.parent, path.stem).load(path), path)
        self._state, self._done = pack_state(state), int(state["progress"]["epoch"])
        self._metrics = dict(state["metrics"])

    def get_model(self) -> Any:
        """Return a new model with the current weights, or a list of several, on the CPU."""
        self._check_is_open()
        model = make_model(self._recipe)
        if self._state is not None:
            load_weights(by_name("model", model), unpack_state(self._state))
        return model

    def shutdown(self, **others: Unpack[NoArguments]) -> None:
        """Release the state, and end the ranks that wait for the next call. May be called more than once.

        Args:
            **others: none; those of RaySGD are an error that says what to write instead.

        Raises:
            TypeError: there is no such argument.
        """
        refuse_arguments("shutdown", others)
        self._state, self._is_shut_down = None, True
        if self._kept is not None:
            self._kept.close()

    def _run(
        self, run_here: Callable[[TrainJob], RunResult], run_on_rank: Callable[[TrainJob], RunResult], passes: int
    ) -> RunResult:
        """Run a job in this process or on each rank; return the result of the main rank.

        Raises:
            RuntimeError: this process is one of several ranks itself.
        """
        self._check_is_open()
        if (ranks := membership().world_size) > 1:
            raise RuntimeError(
                f"This process is one of {ranks} ranks, each of which would keep a state of its own: use the trainer "
                f"in a single process, and let launcher= start the ranks."
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
            raise RuntimeError("There is no state yet: call train() or restore(path) first.")
        return self._state

    def _check_is_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("This trainer was shut down: make another one, and restore(path) what this one saved.")


def is_lost_rank(error: BaseException | None) -> bool:
    """Return whether an error was caused by a rank that died or hung, and not by an error of somebody's code."""
    while error is not None and not isinstance(error, RankFailed):
        error = error.__cause__
    return error is not None and not error.was_reported
