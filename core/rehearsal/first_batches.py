"""Overfit the first batches: a task that cannot learn them has a mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from ...events import Engine
from ...events.checks import check_flag, check_whole_number, count, printable
from ..data.sizes import Share
from ..data.source import Reading, Source, Sourced
from ..data.streams import Streams
from ..task import can_validate, check_step
from ..trainer import Trainer
from .probe import Probe, refuse


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
        """The loss of the first step; with several optimizers, that of the first one."""
        return next(iter(self.losses.values()))[0]

    @property
    def last_loss(self) -> float:
        """The loss of the last step; with several optimizers, that of the first one."""
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
    probe = Probe(trainer, (task, train, short), "while the first batches were overfitted")
    with probe.begun([]) as run:
        if any(isinstance(getattr(loader, "loader", loader), Streams) for loader in run.settings.train):
            run.settings = replace(run.settings, evaluations={})  # the validation step takes no dict of batches
        run.data.open = first.in_place_of(run)
        result, size = probe.train(run), first.size  # read before the batches are restored
    losses = {name: tuple(values) for name, values in probe.losses.items()}
    metrics = {name: value for name, value in result.metrics.items() if name.startswith("validation/")}
    return Overfitting(losses, metrics, size, result.seconds)
