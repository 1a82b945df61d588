"""One validation or test within a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..events.catalogue import Phase
from .batches import length_of
from .metrics import Means
from .task import eval_mode

if TYPE_CHECKING:
    from .context import RunContext


class Evaluation:
    """The sets of a phase, their step and their means, weighted by samples.

    Raises:
        ValueError: there is no set to evaluate.
    """

    def __init__(self, run: RunContext, phase: Phase, loaders: Mapping[str, Iterable[Any]]) -> None:
        if not loaders:
            raise ValueError(f"A {phase} was asked for, but there is no {phase} data: pass {phase}= to fit.")
        self.loaders = loaders
        self._run = run
        self._phase = phase
        self._forward = run.engine.bind(getattr(run.task, f"{phase}_step"))
        self._means = {dataset: Means() for dataset in loaders}
        lengths = [length_of(loader) for loader in loaders.values()]
        run.evaluation_batches = None if None in lengths else sum(length or 0 for length in lengths)
        run.progress.evaluated = 0

    def feed(self) -> Iterator[tuple[str, Any]]:
        """Yield (name of the set, batch on the device), until the last one or until the evaluation is cut short."""
        run = self._run
        for number, (dataset, loader) in enumerate(self.loaders.items()):
            if run.control.cut_request:
                return
            before, run.means = run.progress.evaluated, self._means[dataset]
            for batch in run.engine.feed(run.data.evaluate(loader, number, run.progress.validations)):
                yield dataset, batch
                if run.control.cut_request:
                    return
            if run.progress.evaluated == before:
                name = f"{self._phase} set {dataset!r}" if dataset else f"{self._phase} loader"
                raise ValueError(
                    f"The {name} yielded no batch. A generator can be read only once: give a list or a loader."
                )

    def step(self, batch: Any) -> None:
        """Run the task's step on a batch and add what it returns to the means."""
        run = self._run
        values = self._forward(run, batch)
        weight = run.size_of(batch)
        if values is not None:
            named = values if isinstance(values, Mapping) else {"loss": values}
            for name, value in named.items():
                run.means.add(name, value, weight)
        run.progress.samples += weight * (not run.settings.train)
        run.progress.evaluated += 1

    def metrics(self) -> dict[str, float]:
        """Return the means as `<phase>/<name>`, or `<phase>/<dataset>/<name>` for a named set."""
        metrics: dict[str, float] = {}
        for dataset, means in self._means.items():
            metrics |= means.read(f"{self._phase}/{dataset}" if dataset else self._phase)
        return metrics


@contextmanager
def evaluating(run: RunContext, phase: Phase) -> Iterator[Evaluation]:
    """Let a run be in another phase for a while: eval mode, no gradients, means of its own."""
    former, means = run.phase, run.means
    run.phase = phase
    with eval_mode(run.modules), torch.no_grad():
        yield Evaluation(run, phase, run.settings.evaluations.get(phase, {}))
    # Not reached after an error, which so tells the phase that it came from.
    run.phase, run.means, run.batch, run.outputs = former, means, None, None
