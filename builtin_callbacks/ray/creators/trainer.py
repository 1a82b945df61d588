"""The trainer that is given functions, and keeps the state between calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Unpack

from ....core.checkpoint import storage
from ....core.checkpoint.state.ranks import join_shards
from ....core.checkpoint.state.schema import training_of
from ....core.distributed.ranks.membership import membership
from ....core.engines.contract import LoopEngine
from ....core.engines.options import EngineOptions
from ....core.errors import SEEN, RankFailed
from ....core.result import RunResult
from ....events.checks import check_whole_number
from .handover import Handed
from .packed_state import packed, unpacked
from .parts import load_weights, make_model, named
from .recipe import Config, Recipe, StepFrequency
from .schedulers import step_schedulers
from .work import Order, train, train_on_rank, validate

logger = logging.getLogger("heliograph")


class Launcher(Protocol):
    """What starts ranks: `LocalLauncher`, `RayLauncher` or one of your own."""

    def run(
        self, fn: Callable[..., Any], /, *args: Any, on_message: Callable[[int, Any], object] | None = None
    ) -> Sequence[Any]:
        """Call `fn(*args)` on each rank, where `child_queue()` leads to `on_message`; return what each returned."""


class CreatorTrainer:
    """Trains what functions create, pass by pass, on any number of ranks: the way in of RaySGD's `PyTorchTrainer`.

    Each call launches the ranks, has each create everything anew, and brings back the state, which is kept here: three
    calls of `train()` equal one of `train(passes=3)` and an uninterrupted `fit`, bit for bit. The state travels as
    bytes, so no file system is shared. What is launched is pickled: the functions must be importable, unless the
    launcher says otherwise.

    Args:
        model_creator: called with the config; returns a module, or a list of several.
        data_creator: called with the config; returns the training set, or that and the validation set. No loaders.
        optimizer_creator: called with the model, or the list of them, and the config; returns one or several.
        loss_creator: a class of losses, made without arguments, or a function of the config that returns a loss.
        scheduler_creator: called with the optimizer, or the list of them, and the config; returns one or several.
        scheduler_step_freq: after what the schedulers are stepped: `batch` (an optimizer step), `epoch`, `manual` (your
            `update_scheduler(metric)`), or None, by a function or plugin of yours.
        config: what the functions get.
        batch_size: samples in the batches of all ranks together, which must be able to share it equally.
        dataloader_config: what else to batch by, as in `LoaderParams`. The training set is shuffled unless it says
            otherwise, in an order that does not depend on the number of ranks.
        metrics: what the default training and validation measure, as in `Supervised`.
        train_function: called for each pass with (config, model, iterator, criterion, optimizer, scheduler); returns a
            dict of numbers, of which the means over all samples are taken. The iterator yields batches on the device.
            For each, the function calls `loss.backward()` and `optimizer.step()` as usual, or `iterator.step(loss)`,
            which does both and serves accumulation and fp16, too.
        validation_function: called once on every rank that has a share, with (config, model, iterator, criterion,
            scheduler), in eval mode and without gradients; returns a dict of numbers, as above.
        initialization_hook: called with the config, first of all, on each rank and in every call.
        plugin_creator: called with the config; returns plugins.
        launcher: what starts the ranks; None trains in this process.
        engine: the name of an engine, or a function that makes one on each rank, such as `DDPEngine`.
        seed: of each creator's draws, of the order of the samples and of the training.
        name: the run's name, as in file names.
        **options: of the trainer on each rank, such as `precision="bf16"` or `use_cpu=True`; see `Trainer`.

    Attributes:
        result: how the last call ended, None before the first.
        messages: (rank, object) of what the ranks of the last call have put into their queues.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of its range, or nothing would step the scheduler.
    """

    def __init__(
        self,
        *,
        model_creator: Callable[[Any], Any],
        data_creator: Callable[[Any], Any],
        optimizer_creator: Callable[[Any, Any], Any],
        loss_creator: Callable[..., Any],
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
        self._launcher = launcher
        self._state: bytes | None = None
        self._done = 0
        self._metrics: dict[str, float] = {}
        self._is_shut_down = False
        self.result: RunResult | None = None
        self.messages: list[tuple[int, Any]] = []

    def train(self, max_retries: int = 0, *, passes: int = 1) -> dict[str, float]:
        """Train for some passes over the data; return the metrics of the last one.

        A pass in which a rank is lost (it died, or it hung until the engine's time-out) is begun again from where it
        began, in new processes. An exception of your code leaves at once, with its own type. Either way the state of
        the passes before is kept. A pass that a plugin has cut short is finished by the next call.

        Args:
            max_retries: how often each pass may be begun again.
            passes: how many.

        Returns:
            The means over all samples of the pass, such as `train/loss`, and the latest of other metrics.

        Raises:
            ValueError: an argument is out of its range, or something does not fit together.
            RuntimeError: this process is one of several ranks itself.
            RankFailed: a rank was lost once more than there are retries.
            BaseException: what your code raised.
        """
        for word, number, least in (("max_retries", max_retries, 0), ("passes", passes, 1)):
            check_whole_number(f"{word}=", number, at_least=least)
        goal, failures, reached = self._done + passes, 0, self._done
        while True:
            try:
                self.result = self._call(partial(train, tell=self._take), train_on_rank, goal)
                return dict(self._metrics)
            except Exception as error:
                failures, reached = failures + 1 if self._done == reached else 1, self._done
                if not is_lost(error):
                    raise
                if failures > max_retries:
                    error.add_note(f"heliograph: pass {reached} was begun {failures} times; max_retries={max_retries}.")
                    raise
                logger.warning("pass %d is begun again, retry %d of %d: %s", reached, failures, max_retries, error)

    def validate(self) -> dict[str, float]:
        """Validate, each rank its share of the set; return the means over all samples, such as `validation/loss`.

        Raises:
            ValueError: there is no validation set.
            RuntimeError: this process is one of several ranks itself.
            BaseException: what your code raised.
        """
        self.result = self._call(validate, validate, self._done)
        return dict(self.result.metrics)

    def update_scheduler(self, metric: float) -> None:
        """Step the schedulers by a metric, such as that of `validate()`; for `scheduler_step_freq="manual"`.

        Raises:
            RuntimeError: nothing was trained yet.
            ValueError: there is no scheduler, or it is stepped otherwise.
        """
        if self._recipe.scheduler_creator is None or self._recipe.scheduler_step_freq != "manual":
            raise ValueError("update_scheduler(metric) needs scheduler_creator= and scheduler_step_freq='manual'.")
        self._state = packed(step_schedulers(self._recipe, unpacked(self._trained()), metric))

    def save(self, path: str | Path) -> Path:
        """Write the state as a checkpoint, whole or not at all; return where it lies.

        It holds everything, the random generators of every rank included. Where the name belongs to another run's
        checkpoint, a number is added to it.

        Args:
            path: a file name that ends in `.pth`.

        Raises:
            OSError: it could not be written.
            RuntimeError: nothing was trained yet.
            ValueError: the name is none of a checkpoint.
        """
        path, state = Path(path), unpacked(self._trained())
        store = storage.Store(path.parent, state["run_name"], training_of(state))
        store.open()
        try:
            return store.save(path.name, state).path
        finally:
            store.close()

    def restore(self, path: str | Path) -> None:
        """Go on from a checkpoint: one of `save`, or of a `fit` of the same models.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, or no checkpoint.
        """
        self._check_is_open()
        state = join_shards(storage.load(Path(path)), Path(path))
        self._state, self._done = packed(state), int(state["progress"]["epoch"])
        self._metrics = dict(state["metrics"])

    def get_model(self) -> Any:
        """Return a new model with the weights as they are now, or a list of several; on the CPU."""
        self._check_is_open()
        model = make_model(self._recipe)
        if self._state is not None:
            load_weights(named("model", model), unpacked(self._state))
        return model

    def shutdown(self) -> None:
        """Let go of the state; no process is left running between calls anyway. Twice does no harm."""
        self._state, self._is_shut_down = None, True

    def _call(
        self, here: Callable[[Order], RunResult], on_rank: Callable[[Order], RunResult], passes: int
    ) -> RunResult:
        """Do some work here or on each rank; return how it ended, on the main one.

        Raises:
            RuntimeError: this process is one of several ranks itself.
        """
        self._check_is_open()
        if (ranks := membership().world_size) > 1:
            raise RuntimeError(
                f"This process is one of {ranks} ranks, each of which would keep a state of its own: train in a single "
                f"process, and have launcher= start the ranks."
            )
        self.messages = []
        order = Order(self._recipe, self._state, passes)
        if self._launcher is None:
            return here(order)
        result: RunResult = self._launcher.run(on_rank, order, on_message=self._hear)[0]
        return result

    def _hear(self, rank: int, message: Any) -> None:
        if isinstance(message, Handed):
            self._take(message)
        else:
            self.messages.append((rank, message))

    def _take(self, handed: Handed) -> None:
        self._state, self._done, self._metrics = handed.state, handed.epoch, handed.metrics

    def _trained(self) -> bytes:
        self._check_is_open()
        if self._state is None:
            raise RuntimeError("There is no state yet: call train() or restore(path) first.")
        return self._state

    def _check_is_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("This trainer was shut down: make another, and restore(path) what it saved.")


def is_lost(error: BaseException | None) -> bool:
    """Return whether an error is, or comes from, that a rank was lost without a word: not one of somebody's code."""
    while error is not None and not isinstance(error, RankFailed):
        error = error.__cause__
    return error is not None and error.kind in SEEN
