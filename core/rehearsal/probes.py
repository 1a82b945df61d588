"""Short runs that restore everything: overfit the first batches, and the learning-rate range test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from ...events import BatchEnd, BatchStart, Engine, Lane, LastBoundary, Log, Run
from ...events.checks import check_flag, check_number, check_path, check_whole_number, count, printable
from ...plugins.plugin import Plugin, on
from ..data.sizes import Share
from ..data.source import Reading, Source, Sourced
from ..data.streams import Streams
from ..result_views import new_figure
from ..task import can_validate, check_step
from ..trainer import Trainer
from .rehearsal import complete, placed, refuse_iterators, restored_trainer

BY = "the search for a learning rate"
ROUNDING = 1e-6
SURE = 2.5  # standard deviations: 1 of 20 curves of 100 losses of pure noise falls by more
FEWEST = 5  # steps before a loss counts as diverging
LEFT_OUT: Set[str] = {"stop", "validation", "validation data", "save", "log"}


class Requests(Plugin):
    name = "probe"
    asks = ("log", "validation")

    @on(BatchEnd)
    def log(self, run: Run, event: BatchEnd) -> None:
        if not run.stepping.window:
            run.control.request_log("the loss of each step is read")

    @on(LastBoundary)
    def validate(self, run: Run, event: LastBoundary) -> None:
        if run.data.validation_sets:
            run.control.request_validation("at the end")


def refuse(options: Mapping[str, Any], method: str, instead: str) -> None:
    if names := [name for name in ("epochs", "validation", "limit_validation") if options.get(name) is not None]:
        raise TypeError(f"{method} trains for {instead}: leave {', '.join(f'{name}=' for name in names)} out.")


@contextmanager
def probing(
    trainer: Trainer, task: Any, train: Any, options: Mapping[str, Any], purpose: str
) -> Iterator[tuple[Any, dict[str, list[float]]]]:
    """Yield a run, not entered yet, and a dict for the loss of each step by name; restore everything afterwards.

    Plugins that request or need a log, a validation, a save or a stop, that write files, or that only observe are
    disabled.

    Args:
        trainer: the trainer with its plugins.
        task: see `Trainer.fit`.
        train: see `Trainer.fit`.
        options: the other arguments of `fit`.
        purpose: the words for a note on errors.
    """
    refuse_iterators([train])
    words = LEFT_OUT if options.get("scheduler") is not None else LEFT_OUT | {"scheduler"}
    plugins, losses = trainer.plugins, dict[str, list[float]]()
    out = [name for name in plugins.names() if plugins.is_enabled(name) and not _shapes_training(plugins[name], words)]

    def read(run: Any, event: Log) -> None:
        for name in run.optimizers:
            label = run.stepping.label("loss", name)
            if f"train/{label}" in event.metrics:
                losses.setdefault(label, []).append(event.metrics[f"train/{label}"])

    with restored_trainer(trainer, task, [train], options, [plugins[name] for name in out]), placed(purpose):
        plugins.register(Requests())  # removed afterwards, as are the handlers
        trainer.bus.on(Log, read, lane=Lane.REPORT)
        yield trainer.run(task, train, **options), losses


def _shapes_training(plugin: Any, left_out: Set[str]) -> bool:
    words = {*getattr(plugin, "asks", ()), *getattr(plugin, "needs", ())}
    writes = isinstance(plugin, Plugin) and type(plugin).rehearse is not Plugin.rehearse
    changes = getattr(plugin, "policy", "") != "observer" and getattr(plugin, "affects_training", True)
    return changes and not writes and not words & left_out and getattr(plugin, "rehearses", True)


@dataclass(frozen=True, slots=True, repr=False)
class Overfitting:
    """The losses while a few batches were overfitted; print it.

    Attributes:
        losses: the mean loss of every step, by name: `loss`, or for example `generator_loss` if optimizers have names.
        metrics: the validation metrics on the same batches after the last step; empty without a validation.
        batches: how many batches there were.
        seconds: the duration of the training.
    """

    losses: Mapping[str, tuple[float, ...]]
    metrics: Mapping[str, float]
    batches: int
    seconds: float

    @property
    def first_loss(self) -> float:
        """The first optimizer's loss of the first step."""
        return next(iter(self.losses.values()))[0]

    @property
    def last_loss(self) -> float:
        """The first optimizer's loss of the last step."""
        return next(iter(self.losses.values()))[-1]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        batches = count(self.batches, "batch", "batches")
        lines = [
            f"{name}: {loss[0]:.6g} at first, {loss[-1]:.6g} after {count(len(loss), 'step', 'steps')} on {batches}"
            for name, loss in self.losses.items()
        ]
        lines += [f"{name} {value:.6g}" for name, value in sorted(self.metrics.items())]
        return "\n".join(map(printable, lines))


class _BatchList(Source):
    def open(self, reading: Reading) -> Iterator[Any]:
        return iter(self.loader)


class FirstBatches(Sourced):
    """A loader of the first batches of the training data; each rank keeps its share of them."""

    def __init__(self, count: int) -> None:
        self._count, self._batches = count, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return (deepcopy(batch) for batch in self._batches)

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        return _BatchList(self, {"source": "first batches"}, share)

    @property
    def size(self) -> int:  # no __len__: the loader is still empty when the run checks it
        return len(self._batches)

    def in_place_of(self, run: Any) -> Callable[..., Iterator[Any]]:
        """Return a function that opens an epoch of as many batches, all of them from the first ones."""
        opens = run.data.open

        def open_again(*arguments: Any, **options: Any) -> Iterator[Any]:
            if not self._batches:
                batches = opens(*arguments, **options)
                self._batches = list(islice(batches, self._count))
                del batches  # ends the workers
            return (deepcopy(batch) for batch in islice(cycle(self._batches), run.length.batches_per_epoch))

        return open_again


def overfit(
    trainer: Trainer,
    task: Any,
    train: Any,
    *,
    batches: int = 1,
    steps: int = 100,
    validate: bool = True,
    **options: Any,
) -> Overfitting:
    """Train on the first batches again and again; a loss that stays high shows a mistake.

    Plugins that log, validate, save, stop or only observe do not take part. At the end a task with a validation step
    is validated on the same batches, unless these come from several streams by name. Everything is restored
    afterwards.

    Args:
        trainer: the trainer with its plugins.
        task: see `Trainer.fit`.
        train: see `Trainer.fit`.
        batches: how many batches.
        steps: how many optimizer steps.
        validate: False if the task's validation step takes other batches than its training step.
        **options: the other arguments of `Trainer.fit`, without `epochs`, `validation` and `limit_validation`.

    Returns:
        The loss of every step, and the metrics at the end.
    """
    check_step(task, "training_step")
    check_flag("validate=", validate)
    batches = check_whole_number("batches=", batches, at_least=1)
    refuse(options, "overfit", "steps= of the first batches, on which it is validated, too")
    first = FirstBatches(batches)
    validation = first if validate and can_validate(task) else None
    short = {**options, "epochs": None, "steps": steps, "validation": validation}
    with probing(trainer, task, train, short, "while the first batches were overfitted") as (run, losses):
        if any(isinstance(getattr(loader, "loader", loader), Streams) for loader in run.settings.train):
            run.settings = replace(run.settings, evaluations={})  # the validation step takes no dict of batches
        run.data.open = first.in_place_of(run)
        result, size = complete(run), first.size  # read before the batches are restored
    metrics = {name: value for name, value in result.metrics.items() if name.startswith("validation/")}
    return Overfitting({name: tuple(values) for name, values in losses.items()}, metrics, size, result.seconds)


@dataclass(frozen=True, slots=True, repr=False)
class LearningRateSearch:
    """The result of a range test: print it, or `plot` the curve.

    Attributes:
        rates: the learning rate of each step; that of the parameter group with the largest one.
        losses: the mean loss of each step.
        smoothed: the exponential mean of the losses, corrected for its bias at the start.
        suggestion: the rate at which the smoothed loss fell fastest over the logarithm of the rate, after it had
            fallen by more than the noise of the batches; None if it never did.
        diverged: True if the test ended early because the loss became too large or not finite.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    diverged: bool

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __str__(self) -> str:
        rate = self.suggestion
        suggestion = "the loss never fell by more than its noise" if rate is None else f"learning rate {rate:.3g}"
        steps = count(len(self.rates), "step", "steps")
        end = "ended early: the loss diverged" if self.diverged else "the end"
        return f"{suggestion}, after {steps} from {self.rates[0]:.3g} to {self.rates[-1]:.3g}, {end}"

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the losses and the smoothed losses over the rates; return the matplotlib figure.

        Args:
            path: a file to save the figure to, for example `rates.png`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if path is not None:
            check_path("plot(path)", path)
        figure = new_figure("plot")
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, alpha=0.3)
        axes.plot(self.rates, self.smoothed)
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--")
        # The loss grows a hundredfold at the end: on a linear axis its fall would be invisible.
        axes.set(
            xscale="log", xlabel="learning rate", ylabel="loss", yscale="log" if min(self.losses) > 0 else "linear"
        )
        if path is not None:
            figure.savefig(path)
        return figure


class Ramp:
    """The handlers of the test: they set the rates and stop the run when the loss diverges."""

    def __init__(self, rates: Sequence[float], beta: float, diverging: float) -> None:
        self._rates, self._beta, self._diverging = rates, beta, diverging
        self.used, self.losses, self.smoothed = list[float](), list[float](), list[float]()
        self.diverged = False
        self._mean = 0.0
        self._shares: list[float] | None = None

    def set(self, run: Any, event: BatchStart) -> None:
        groups = run.optimizer.param_groups
        if self._shares is None:
            before = [float(group["lr"]) for group in groups]
            self._shares = [rate / max(before) if max(before) > 0 else 1.0 for rate in before]
        rate = self._rates[min(len(self.losses), len(self._rates) - 1)]
        for group, share in zip(groups, self._shares, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share

    def read(self, run: Any, event: Log) -> None:
        loss = event.metrics["train/loss"]
        self._mean = self._beta * self._mean + (1 - self._beta) * loss
        count = len(self.losses) + 1
        smoothed = self._mean / (1 - self._beta**count)
        is_too_large = count > FEWEST and smoothed > self._diverging * min(self.smoothed)
        if isfinite(loss):
            self.used.append(self._rates[len(self.losses)])
            self.losses.append(loss)
            self.smoothed.append(smoothed)
        if not isfinite(loss) or (is_too_large and min(self.smoothed) > 0):
            self.diverged = True
            run.control.stop("the loss diverges", by=BY)
        elif len(self.losses) == len(self._rates):
            run.control.stop("every rate was tried", by=BY)

    def suggestion(self) -> float | None:
        first = len(self._rates) // 10  # earlier means are of too few losses
        last = first + int(np.argmin(self.smoothed[first:])) + 1 if self.smoothed[first:] else 0
        if last - first < 2:
            return None
        start = self._end_of_flat(self._end_of_flat(first, first, last), first, last)
        if last - start < 2:
            return None
        slopes = np.gradient(self.smoothed[first:last], np.log(self.used[first:last]))
        return self.used[start + int(np.argmin(slopes[start - first :]))]

    def _end_of_flat(self, flat: int, first: int, last: int) -> int:
        """Return the last step at which noise alone explains the smoothed loss, if `flat` steps had no effect.

        The noise is estimated from the successive differences of the first third of the losses, which a slow fall
        hardly changes (J. von Neumann, R. H. Kent, H. R. Bellinson and B. I. Hart, "The Mean Square Successive
        Difference", Annals of Mathematical Statistics 12, 1941); the noise of an exponential mean follows from it (S.
        W. Roberts, "Control Chart Tests Based on Geometric Moving Averages", Technometrics 1, 1959).
        """
        level, count = np.mean(self.losses[: max(flat, 1)]), max(flat, 1)
        differences = np.diff(self.losses[: max(len(self._rates) // 3, 2)])
        decayed = self._beta ** np.arange(first + 1, last + 1)
        share = (1 - self._beta) / (1 + self._beta) * (1 + decayed) / (1 - decayed)
        noise = np.sqrt(np.mean(differences**2) / 2 * (share + 1 / count))
        fall = np.maximum(SURE * noise, ROUNDING * abs(level))
        flat_steps = np.flatnonzero(self.smoothed[first:last] >= level - fall)
        return first + int(flat_steps[-1]) if flat_steps.size else first


def find_learning_rate(
    trainer: Trainer,
    task: Any,
    train: Any,
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    ramp: Literal["log", "linear"] = "log",
    smoothing: float = 0.9,
    diverging: float = 4.0,
    **options: Any,
) -> LearningRateSearch:
    """Train with a rising learning rate and suggest the one at which the loss falls fastest.

    This is the range test of L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (WACV 2017), section
    3.3. Plugins that log, validate, save, stop or only observe do not take part. Everything is restored afterwards.

    Args:
        trainer: the trainer with its plugins.
        task: see `Trainer.fit`.
        train: see `Trainer.fit`; read again if it has fewer batches than `steps`.
        lowest: the first learning rate, that of the parameter group with the largest one. The groups keep their
            proportions.
        highest: the last learning rate.
        steps: how many optimizer steps.
        ramp: `log` multiplies the rate by a factor at each step, `linear` adds a difference.
        smoothing: the weight of the previous mean in the exponential mean of the losses.
        diverging: the test ends when the smoothed loss is this many times the smallest one, or not a number.
        **options: the other arguments of `Trainer.fit`, without `epochs`, `validation`, `limit_validation` and
            `scheduler`.

    Returns:
        The rates, the losses, and a suggestion.

    Raises:
        ValueError: an argument is out of its range; there is a scheduler, or there are several optimizers.
    """
    check_step(task, "training_step")
    steps = check_whole_number("steps=", steps, at_least=2)
    lowest = check_number("lowest=", lowest, more_than=0)
    highest = check_number("highest=", highest, more_than=lowest)
    diverging = check_number("diverging=", diverging, more_than=1)
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing= is the weight of the previous mean: 0 <= smoothing < 1, got {smoothing!r}.")
    if ramp not in ("log", "linear"):
        raise ValueError(f"ramp= is 'log' or 'linear', got {ramp!r}.")
    refuse(options, "find_learning_rate", "steps=, and nothing is validated")
    if options.get("scheduler") is not None:
        raise ValueError("The search sets the learning rates itself: leave scheduler= out.")
    if isinstance(options.get("optimizer"), Mapping):
        raise ValueError("The search is for one optimizer, and there are several: search for each with the others off.")
    spaced = np.geomspace if ramp == "log" else np.linspace
    climb = Ramp(spaced(lowest, highest, steps).tolist(), smoothing, diverging)
    short = {**options, "epochs": None, "steps": steps, "validation": None}
    with probing(trainer, task, train, short, "while a learning rate was searched for") as (run, _):
        run.bus.on(BatchStart, climb.set, lane=Lane.REPORT)
        run.bus.on(Log, climb.read, lane=Lane.REPORT)
        complete(run)
    if not climb.used:
        raise ValueError(f"The first loss is not a finite number, at the rate {lowest:g}: see NaNGuard().")
    return LearningRateSearch(
        tuple(climb.used), tuple(climb.losses), tuple(climb.smoothed), climb.suggestion(), climb.diverged
    )
