"""Validations and tests of a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from ....core.evaluation import EVENTS
from ..format.records import Attempt, EventEntry
from .failure import Failing
from .ledger import Ledger
from .requests import Requests
from .run import ReplayRun


class Evaluations:
    """Replays them, batch by batch where somebody hears of these.

    Args:
        attempt: what is replayed.
        run: the run.
        requests: those of plugins that are not replayed.
        failing: how the run failed, if it did.
        ledger: where to write down what becomes of requests.
        tell: emits an entry's event.
        tell_metrics: the same, of one that has metrics.
    """

    def __init__(
        self,
        attempt: Attempt,
        run: ReplayRun,
        requests: Requests,
        failing: Failing,
        ledger: Ledger,
        tell: Callable[[EventEntry], object],
        tell_metrics: Callable[[EventEntry], None],
    ) -> None:
        self._phase, self._run, self._requests = attempt.phase, run, requests
        self._failing, self._ledger, self._tell, self._tell_metrics = failing, ledger, tell, tell_metrics

    def start(self, entry: EventEntry) -> None:
        """Begin one."""
        self._run.phase = "test" if entry.event == "test_start" else "validation"
        self._run.evaluation_batches = entry.data["batches"]
        self._run.control.is_evaluating = True
        self._tell(entry)

    def end(self, entry: EventEntry) -> None:
        """End one that was whole, whatever a replayed plugin asked."""
        self._evaluate(entry)
        self._run.control.cut_request = None
        self._ledger.settle("cut_validation", did=False)
        self._run.control.close_validation()
        self._tell_metrics(entry)
        self._run.progress.validations += self._run.trains  # only now, as in the loop
        self._run.phase = self._phase

    def cut(self, entry: EventEntry) -> None:
        """End one that was cut short."""
        run, control = self._run, self._run.control
        self._evaluate(entry)
        control.cut_request = cut = control.cut_request or self._requests.cut
        self._ledger.settle("cut_validation", did=True)
        control.close_validation()
        self._tell(entry)
        if cut is not None and (run.finished or not run.started):
            if not control.should_stop:
                control.stop(cut.reason, by=cut.by)
            control.decide()
        run.phase = self._phase

    def fail(self, failure: EventEntry) -> None:
        """Come as far as one came in which the run failed."""
        if self._run.phase != "train":
            self._evaluate(failure)

    def _evaluate(self, entry: EventEntry) -> None:
        if self._run.phase == "train":  # the line of its beginning is damaged, or could not be written
            self._run.phase = "test" if entry.event == "test_end" else "validation"
        run, (_, batch_start, batch_end, _) = self._run, EVENTS[self._run.phase]
        before, after = run.bus.signal(batch_start), run.bus.signal(batch_end)
        run.control.is_evaluating, cut = True, run.control.cut_request
        if before.chain or after.chain:
            datasets = [dataset for dataset, batches in entry.data["batches"].items() for _ in range(batches)]
            run.progress.evaluated = 0
            for number, dataset in enumerate(datasets, 1):
                before.emit(run, batch_start(dataset))
                run.progress.evaluated = number
                with self._failing.heard(batch_end) if number == len(datasets) else nullcontext():
                    after.emit(run, batch_end(dataset))
                if run.control.cut_request is not cut:  # the run would have left it
                    break
        run.control.is_evaluating = False
