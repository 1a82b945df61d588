"""Train on the first batches over and over: a task that cannot learn these has a mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from ...events import Engine
from ...events.checks import check_whole_number, printable
from ...events.errors import count
from ..data.order.sizes import Share
from ..data.sources.contract import Reading, Source, Sourced, Stateless
from ..data.sources.streams import Streams
from .probe import Probe, refuse
from .rehearsal import Fit, Trainer


@dataclass(frozen=True, slots=True, repr=False)
class Overfitting:
    """How the loss of a few batches fell; `print` shows it.

    Attributes:
        losses: of every step, the mean over its samples, by name: `loss`, or `generator_loss` where several optimizers
            have names.
        metrics: of the validation on the same batches after the last step; empty where the task was not validated.
        batches: how many there were.
        seconds: of the training.
    """

    losses: Mapping[str, tuple[float, ...]]
    metrics: Mapping[str, float]
    batches: int
    seconds: float

    @property
    def first_loss(self) -> float:
        """The loss of the first step; of the first optimizer, where there are several."""
        return next(iter(self.losses.values()))[0]

    @property
    def last_loss(self) -> float:
        """The loss of the last step; of the first optimizer, where there are several."""
        return next(iter(self.losses.values()))[-1]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        what = count(self.batches, "batch", "batches")
        lines = [
            f"{name}: {values[0]:.6g} at first, {values[-1]:.6g} after {count(len(values), 'step', 'steps')} on {what}"
            for name, values in self.losses.items()
        ]
        lines += [f"{name} {value:.6g}" for name, value in sorted(self.metrics.items())]
        return "\n".join(map(printable, lines))


class _KeptBatches(Stateless):
    """Reads the first batches that this rank has kept."""

    def open(self, reading: Reading) -> Iterator[Any]:
        """Begin with the first: an evaluation always does."""
        return iter(self.loader)


class FirstBatches(Sourced):
    """The first batches of the training data, in place of all that follow; a loader of an evaluation, too.

    Each rank keeps those that it was dealt, so there is nothing left to deal out.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count, self._kept = count, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return (deepcopy(batch) for batch in self._kept)

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        """Return what reads all of them."""
        return _KeptBatches(self, {"source": "first batches"}, share)

    @property
    def found(self) -> int:
        """How many there are."""
        return len(self._kept)

    def in_place_of(self, run: Any) -> Callable[..., Iterator[Any]]:
        """Return what opens the epochs of a run: as many batches as its own have, but only the first of all."""
        opens = run.data.open

        def open_again(*arguments: Any, **options: Any) -> Iterator[Any]:
            if not self._kept:
                batches = opens(*arguments, **options)
                self._kept = list(islice(batches, self._count))
                del batches  # lets workers go
            return (deepcopy(batch) for batch in islice(cycle(self._kept), run.length.batches_per_epoch))

        return open_again


def overfit(
    trainer: Trainer,
    fit: Fit,
    given: tuple[Any, Any, Mapping[str, Any]],
    *,
    batches: int,
    steps: int,
    validates: bool,
) -> Overfitting:
    """Train on the first batches over and over; see `Trainer.overfit`.

    Args:
        trainer: with its plugins.
        fit: trains a run.
        given: the task, the data, and the other arguments of `fit`.
        batches: how many batches.
        steps: how many optimizer steps.
        validates: whether to validate on the batches at the end.
    """
    batches = check_whole_number("batches=", batches, at_least=1)
    task, train, options = given
    refuse(options, "overfit", "steps= of the first batches, on which it is validated, too")
    first = FirstBatches(batches)
    validation = first if validates else None
    short = {**options, "epochs": None, "steps": steps, "validation": validation}
    probe = Probe(trainer, fit, (task, train, short), "while the first batches were overfitted")
    with probe.begun([]) as run:
        if any(isinstance(getattr(each, "loader", each), Streams) for each in run.settings.train):
            run.settings = replace(run.settings, evaluations={})  # the validation step takes no dict of batches
        run.data.open = first.in_place_of(run)
        result, found = probe.train(run), first.found
    losses = {name: tuple(values) for name, values in probe.losses.items()}
    metrics = {name: value for name, value in result.metrics.items() if name.startswith("validation/")}
    return Overfitting(losses, metrics, found, result.seconds)
