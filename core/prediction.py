"""One prediction: the outputs of all samples, joined in the order of the data or yielded batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from ..events import Bus, Lane, PredictBatchEnd
from ..events.bus import PluginName
from ..events.catalogue import Phase
from ..events.checks import check_flag
from ..plugins import Plugins
from . import loop
from .context import RunContext
from .evaluation import Evaluation, evaluating
from .outputs.parts import Parts
from .result import RunResult
from .run import TrainRun


class Prediction(Evaluation):
    """The sets, their step, and their outputs.

    Args:
        run: the run.
        phase: of the sets.
        loaders: by the names of the sets.
        outputs: what becomes of them: kept for the result, taken by plugins, or yielded to the caller.
    """

    def __init__(
        self,
        run: RunContext,
        phase: Phase,
        loaders: Mapping[str, Iterable[Any]],
        outputs: Literal["kept", "taken", "yielded"],
    ) -> None:
        super().__init__(run, phase, loaders)
        self._outputs = outputs
        self._is_ordered = outputs != "yielded" or _plugin_takes_outputs(run.bus, run.plugins)
        self._parts = {dataset: Parts(self._called(dataset)) for dataset in loaders}

    def step(self, batch: Any) -> Any:
        """Run the task's step on a batch, and return the outputs.

        Raises:
            TypeError: there are none, or they are of a type that cannot be joined.
            ValueError: they are not like those of the batches before; their place in the order of the data is unknown.
        """
        run, collection = self._run, self.collection
        if self._is_ordered:
            collection.check_order("predicted")
        run.outputs = outputs = collection.widen(self._forward(run, batch))
        if outputs is None:
            raise TypeError(f"{type(run.task).__name__}.predict_step returned None: return the outputs of the batch.")
        size = run.size_of(batch)
        if self._outputs == "kept":
            self._parts[collection.dataset].add(collection.number, outputs, size)
        self._count(size)
        return outputs

    def metrics(self) -> dict[str, float]:
        """Return what was tracked, and join the outputs. A collective."""
        metrics = super().metrics()
        if self._outputs == "kept":
            run = self._run
            joined = {
                dataset: parts.gather(run.engine) if run.control.is_shared else parts.join()
                for dataset, parts in self._parts.items()
            }
            run.outcome.predictions = joined[""] if [*joined] == [""] else joined
        return metrics


def predict(bus: Bus, plugins: Plugins, make_run: Callable[[], TrainRun], *, gather: bool) -> RunResult:
    """Predict every set; see `Trainer.predict`.

    Args:
        bus: the trainer's.
        plugins: the trainer's.
        make_run: returns a run for the sets.
        gather: whether the outputs are kept.
    """
    check_flag("gather", gather)
    functions = (each.owner for each in bus.signal(PredictBatchEnd).subscriptions.values())
    is_taken = _plugin_takes_outputs(bus, plugins) or not all(isinstance(owner, PluginName) for owner in functions)
    if not gather and not is_taken:
        raise ValueError(
            "predict(gather=False) keeps no outputs, and no plugin takes them: add PredictionWriter('out/'), or a "
            "handler of PredictBatchEnd in lane PERSIST that reads run.outputs; or loop over predict_batches."
        )
    kind = partial(Prediction, outputs="kept" if gather else "taken")
    with make_run() as run, evaluating(run, "predict", kind) as prediction:
        for batch in loop.evaluated(run, prediction):
            prediction.step(batch)
    return run.result_or_raise()


@torch.no_grad()  # as a generator's: what the caller does between two batches has the mode that it had
def each_batch(make_run: Callable[[], TrainRun]) -> Iterator[Any]:
    """Yield the outputs of each batch of this process; see `Trainer.predict_batches`.

    Args:
        make_run: returns a run for the sets.
    """
    with make_run() as run, evaluating(run, "predict", partial(Prediction, outputs="yielded")) as prediction:
        has_names = [*prediction.loaders] != [""]
        for batch in loop.evaluated(run, prediction):
            outputs = prediction.step(batch)
            try:
                yield (prediction.collection.dataset, outputs) if has_names else outputs
            except GeneratorExit:
                run.control.cut_validation("the loop over predict_batches was left", by="the caller")
            del outputs  # while the next batch is computed
    run.result_or_raise()


def _plugin_takes_outputs(bus: Bus, plugins: Plugins) -> bool:
    """Return whether a plugin takes outputs, to judge by who handles their event in lane `PERSIST`."""
    return any(
        isinstance(each.owner, PluginName) and each.position[0] == Lane.PERSIST and plugins.is_enabled(each.owner)
        for each in bus.signal(PredictBatchEnd).subscriptions.values()
    )
