"""One validation, test or prediction within a run: its batches, its metrics and its early end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ..events import Phase, Request
from ..events import catalogue as ev
from .context import RunContext
from .data.evaluation_data import left_out
from .epoch_end import READ_ONCE
from .metrics.log_rows import add_row
from .metrics.means import Means, own_name
from .outputs import Collection
from .stepping.counts import add_value, check_unweighed, weight_of

EVENTS: dict[Phase, tuple[Any, Any, Any, Any]] = {
    "validation": (ev.ValidationStart, ev.ValidationBatchStart, ev.ValidationBatchEnd, ev.ValidationEnd),
    "test": (ev.TestStart, ev.TestBatchStart, ev.TestBatchEnd, ev.TestEnd),
    "predict": (ev.PredictStart, ev.PredictBatchStart, ev.PredictBatchEnd, ev.PredictEnd),
}
BY_NAME = (dict, Mapping)  # dict first: isinstance with an abstract class takes a microsecond


class Evaluation:
    """The sets of a phase, their step and their means, weighted by samples.

    Attributes:
        events: the event classes of the start, the start and the end of a batch, and the end.
        is_complete: True unless it was cut short.
        collection: the collected values, and the current set.

    Raises:
        ValueError: there is no set to evaluate.
    """

    def __init__(self, run: RunContext, phase: Phase, loaders: Mapping[str, Iterable[Any]]) -> None:
        if not loaders:
            raise ValueError(f"A {phase} was requested, but there is no {phase} data: pass {phase}= to fit.")
        every, self._limits = run.settings.every, run.settings.limits
        self._numbers = {dataset: number for number, dataset in enumerate(loaders)}
        self.loaders = loaders = {
            dataset: loader
            for dataset, loader in loaders.items()
            if dataset not in every or (run.progress.validations + 1) % every[dataset] == 0
        }
        self.events, self.is_complete = EVENTS[phase], False
        self._run, self._phase = run, phase
        self._started_at, self._samples, self._returned_none = perf_counter(), 0, False
        self._forward = run.engine.bind_evaluation(getattr(run.task, f"{phase}_step"))
        self._work, self._size_of, self._trains = run.work, run.size_of, bool(run.settings.train)
        self._means: dict[str, Means] = {dataset: run.means.for_evaluation() for dataset in loaders}
        self._counts = dict.fromkeys(loaders, 0)
        run.control.is_evaluating = True
        if run.control.is_shared:
            run.data.agree_on_seed()
        self._lengths = {
            dataset: run.data.evaluations.length(loader, self._limits.get(dataset))
            for dataset, loader in loaders.items()
        }
        for dataset, loader in loaders.items():
            if dataset not in self._limits and (samples := left_out(loader)):
                run.data.note_once(f"the {self._label(dataset)} leaves out {samples}: give it drop_last=False")
        lengths = self._lengths.values()
        run.data.evaluation_batches = None if None in lengths else sum(length or 0 for length in lengths)
        run.progress.evaluated = 0
        kind = run.engine.device.type
        with run.engine.autocast():
            is_low = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            low = torch.get_autocast_dtype(kind) if is_low else None
        self.collection = run.work.collection = Collection(run.engine.rank, run.engine.world_size, low)

    def batches(self) -> Iterator[tuple[str, Any]]:
        """Yield (name of the set, batch on the device) until the sets end or the evaluation is cut short."""
        run, collection, is_cut = self._run, self.collection, self._run.control.is_cut
        for dataset, loader in self.loaders.items():
            if is_cut():
                return
            run.means = means = self._means[dataset]
            collection.dataset, collection.is_dealt = dataset, run.data.evaluations.deals_out(loader)
            place = self._numbers[dataset], run.progress.validations, self._limits.get(dataset)
            collection.batch = means.batch = count = 0
            for batch in run.engine.feed(run.data.evaluate(loader, *place)):
                yield dataset, batch
                count += 1
                collection.batch = means.batch = count
                if is_cut():
                    return
            self._counts[dataset] = count
            if not run.control.is_shared:
                self._check_not_empty(dataset, count)
            if (length := self._lengths[dataset]) is not None and count != length:
                run.warn(f"The {self._label(dataset)} ended after {count} batches, but its length says {length}.")

    def close(self) -> Request | None:
        """End the evaluation; return the request that cut it short, if any. A collective."""
        control, self.collection.batch = self._run.control, None
        control.agree_on_validation()
        cut = control.close_validation()
        self.is_complete = cut is None
        if cut is None and not self._run.settings.train and (stop := control.stop_request) is not None:
            by = f"{stop.by} requested a stop ({stop.reason}), but the {self._phase} read all its data"
            self._run.warn(f"{by}: only control.cut_validation(reason) ends it early.")
        return cut

    def stop_after(self, cut: Request) -> None:
        report = self._run.report
        if report.finished or not report.started:  # the evaluation was the last part of the run
            self._run.control.stop_once(cut)

    def step(self, batch: Any) -> Any:
        """Run the task's step on a batch and add the returned values to the means."""
        run, work = self._run, self._work
        values = self._forward(run, batch)
        weight = self._size_of(batch)
        if values is not None:
            named = {"loss": values} if isinstance(values, Tensor) or not isinstance(values, BY_NAME) else values
            for name, value in named.items():
                name = name if isinstance(name, str) and "/" not in name else own_name(name, self._phase)
                run.claim(name, "returned")
                if value.__class__ is tuple or work.weight is not None:
                    add_value(run, name, value, weight)
                else:
                    run.means.add(name, value, weight)
            if work.weight is not None:
                check_unweighed(weight_of(run))
                work.weight = None
        else:
            self._returned_none = True
        self._count(weight)

    def metrics(self) -> dict[str, float]:
        """Return the means as `<phase>/<name>`, or `<phase>/<dataset>/<name>` for a named set. A collective.

        All ranks return the same, and `progress` then counts the batches and samples of all ranks. Collected values are
        joined.

        Raises:
            TypeError: the step returned None and nothing else was measured.
        """
        if self._run.control.is_shared:
            self._exchange()
        else:
            self.collection.join()
        metrics: dict[str, float] = {}
        for dataset, means in self._means.items():
            measured = means.read(f"{self._phase}/{dataset}" if dataset else self._phase)
            if not measured and means.totals:
                counts = " and of ".join(map(repr, means.totals))
                self._run.warn(f"The {self._label(dataset)} has no metric: every count of {counts} is 0.")
            metrics |= measured
            self.collection.hold(dataset, means.others)
        if self._returned_none and not metrics and not self.collection.whole:
            self._check_measured()
        add_row(self._run, self._pace(), by_the_clock=True)
        return metrics

    def _count(self, samples: int) -> None:
        progress = self._run.progress
        progress.evaluated += 1
        self._samples += samples
        if not self._trains:
            progress.samples += samples

    def _pace(self) -> dict[str, float]:
        # Depends on the clock, so it is not among the metrics of the run.
        seconds = perf_counter() - self._started_at
        return {f"{self._phase}/seconds": seconds, f"{self._phase}/samples_per_second": self._samples / seconds}

    def _exchange(self) -> None:
        """Replace the means of each set by those over all ranks."""
        from .distributed.means import Terms, compute_together, merge_means

        run, progress = self._run, self._run.progress
        shared = {dataset: means for dataset, means in self._means.items() if isinstance(means, Terms)}
        local_terms = {dataset: (means.take(), list(means.objects)) for dataset, means in shared.items()}
        totals = progress.evaluated, progress.samples, self._samples  # the user's step may count samples, too
        of_ranks = run.engine.gather_objects((local_terms, self._counts, totals, self.collection.keys))
        for dataset, means in shared.items():
            self._check_not_empty(dataset, sum(counts[dataset] for _, counts, *_ in of_ranks))
            terms, names = zip(*(terms_by_set[dataset] for terms_by_set, *_ in of_ranks), strict=True)
            self._means[dataset] = merged = merge_means(terms, run.engine, means.note)
            merged.together = compute_together(means.objects, names, run.engine)
        progress.evaluated, samples, self._samples = (
            sum(column) for column in zip(*(totals for _, _, totals, _ in of_ranks), strict=True)
        )
        if not run.settings.train:
            progress.samples = samples
        self.collection.gather({key for *_, keys in of_ranks for key in keys}, run.engine)

    def _check_not_empty(self, dataset: str, batches: int) -> None:
        if not batches:
            raise ValueError(f"The {self._label(dataset)} yielded no batch. {READ_ONCE}")

    def _check_measured(self) -> None:
        # No error if a count is the reason, or if the user's own handlers may measure instead of the step.
        from .metrics.monitor import others_take_part

        if any(means.totals for means in self._means.values()) or others_take_part(self._run, self.events):
            return
        raise TypeError(
            f"{type(self._run.task).__name__}.{self._phase}_step returned None, and nothing was tracked or collected: "
            f"return the loss, a dict of values by name, or {{}} to measure nothing."
        )

    def _label(self, dataset: str) -> str:
        return f"{self._phase} set {dataset!r}" if dataset else f"{self._phase} loader"


@contextmanager
def eval_mode(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Switch modules to eval mode, and restore the mode of each submodule afterwards."""
    modes = [(module, module.training) for root in modules.values() for module in root.modules()]
    for root in modules.values():
        root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(run: RunContext, phase: Phase, kind: Callable[..., Evaluation] = Evaluation) -> Iterator[Evaluation]:
    """Switch the run to another phase within this context: eval mode, no gradients, separate means."""
    previous, means, claims = run.phase, run.means, run.work.claims
    run.phase, run.work.claims = phase, {}
    try:
        with run.evaluating_weights(), eval_mode(run.modules), torch.no_grad(), run.engine.evaluating():
            yield kind(run, phase, run.settings.evaluations.get(phase, {}))
    finally:
        run.control.is_evaluating = False
    # Not reached after an error: `run.phase` and the collection then show where it failed.
    run.phase, run.means, run.work.claims = previous, means, claims
    run.work.batch = run.outputs = run.work.collection = None
