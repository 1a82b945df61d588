"""The validations, tests and predictions of a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from heliograph.events import Phase

from ..format.records import AttemptRecord, EventEntry
from ..verbs import EVALUATION_VERB
from .entries import KINDS
from .failure import RecordedFailure
from .findings import Findings
from .requests import RecordedRequests
from .run import ReplayRun


class Evaluations:
    """Replays validations, tests and predictions, batch by batch where their batches have handlers.

    Args:
        attempt: the replayed attempt.
        run: the run.
        requests: those of plugins that are not replayed.
        failure: how the run failed, if it did.
        findings: where to note which requests were served.
        emit: emits an entry's event.
        emit_metrics: the same for an event that has metrics.
    """

    def __init__(
        self,
        attempt: AttemptRecord,
        run: ReplayRun,
        requests: RecordedRequests,
        failure: RecordedFailure,
        findings: Findings,
        emit: Callable[[EventEntry], object],
        emit_metrics: Callable[[EventEntry], None],
    ) -> None:
        self._phase, self._run, self._requests = attempt.phase, run, requests
        self._failure, self._findings, self._emit, self._emit_metrics = failure, findings, emit, emit_metrics

    def start(self, entry: EventEntry) -> None:
        self._run.phase = _phase_of(entry.event)
        self._run.data.evaluation_batches = entry.data["batches"]
        self._run.control.is_evaluating = True
        self._emit(entry)

    def end(self, entry: EventEntry) -> None:
        self._evaluate(entry)
        self._run.control.cut_request = None
        self._findings.decide(EVALUATION_VERB, did=False)
        self._run.control.close_validation()
        self._emit_metrics(entry)
        self._run.progress.validations += self._run.trains  # only now, as in the loop
        self._run.phase = self._phase

    def cut(self, entry: EventEntry) -> None:
        run, control = self._run, self._run.control
        self._evaluate(entry)
        control.cut_request = cut = control.cut_request or self._requests.cut
        self._findings.decide(EVALUATION_VERB, did=True)
        control.close_validation()
        self._emit(entry)
        if cut is not None and (run.finished or not run.started):
            control.stop_once(cut)
        run.phase = self._phase

    def fail(self, failure: EventEntry) -> None:
        if self._run.phase != "train":
            self._evaluate(failure)

    def _evaluate(self, entry: EventEntry) -> None:
        if self._run.phase == "train":  # the line of its start is damaged, or could not be written
            self._run.phase = _phase_of(entry.event)
        run = self._run
        batch_start: Any = KINDS[f"{run.phase}_batch_start"]
        batch_end: Any = KINDS[f"{run.phase}_batch_end"]
        before, after = run.bus.signal(batch_start), run.bus.signal(batch_end)
        run.control.is_evaluating, cut = True, run.control.cut_request
        if before.chain or after.chain:
            datasets = [dataset for dataset, batches in entry.data["batches"].items() for _ in range(batches)]
            run.progress.evaluated = 0
            for number, dataset in enumerate(datasets, 1):
                before.emit(run, batch_start(dataset))
                run.progress.evaluated = number
                with self._failure.limit_handlers(batch_end) if number == len(datasets) else nullcontext():
                    after.emit(run, batch_end(dataset))
                if run.control.cut_request is not cut:  # the run would have ended it here
                    break
        run.control.is_evaluating = False


def _phase_of(event: str) -> Phase:
    evaluations: tuple[Phase, ...] = "validation", "test", "predict"
    return next((phase for phase in evaluations if event.startswith(phase)), "validation")
