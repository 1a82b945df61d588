"""The learning-rate range test: train with a rising rate and watch the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from ...events import BatchStart, Log
from ...events.checks import check_number, check_path, check_whole_number, count
from ..metrics.log_rows import new_figure
from ..task import check_step
from ..trainer import Trainer
from .probe import Probe, refuse

BY = "the search for a learning rate"
ROUNDING = 1e-6
SURE = 2.5  # standard deviations: 1 of 20 curves of 100 losses of pure noise falls by more
FEWEST = 5  # steps before a loss counts as diverging


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
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
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
    probe = Probe(trainer, (task, train, short), "while a learning rate was searched for")
    with probe.begun([(BatchStart, climb.set), (Log, climb.read)]) as run:
        probe.train(run)
    if not climb.used:
        raise ValueError(f"The first loss is not a finite number, at the rate {lowest:g}: see NaNGuard().")
    return LearningRateSearch(
        tuple(climb.used), tuple(climb.losses), tuple(climb.smoothed), climb.suggestion(), climb.diverged
    )
