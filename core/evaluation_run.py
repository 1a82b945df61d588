"""A validation, test or prediction outside of a training, and a run that fails before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..events import Bus, Lane, Phase, PluginName, PredictBatchEnd
from ..events.checks import check_flag
from ..plugins import Plugins
from . import loop
from .checkpoint.weights import load_for_run
from .context import RunContext
from .data.evaluation_data import check_in_order
from .data.loaders import check_params, evaluation_sets, named_sets, params_of_one_process, plain_sets, shared_params
from .data.module import DataModule, complete_options, data_of_phase, open_module
from .evaluation import Evaluation, evaluating
from .outputs import OutputParts
from .result import RunResult
from .run import TrainRun, is_in_run, isolated_from_outer_runs
from .run_end import close_run
from .settings import FitOptions, Settings, check_name
from .task import check_step

if TYPE_CHECKING:
    from .data.loaders import LoaderParams
    from .engines.contract import LoopEngine


class PredictionPass(Evaluation):
    """The sets, their step, and their outputs.

    Args:
        run: the run.
        phase: of the sets.
        loaders: by the names of the sets.
        outputs: `kept` for the result, `taken` by plugins, or `yielded` to the caller.
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
        self._parts = {dataset: OutputParts(self._label(dataset)) for dataset in loaders}

    def step(self, batch: Any) -> Any:
        """Run the task's step on a batch and return the outputs.

        Raises:
            TypeError: there are no outputs, or their type cannot be joined.
            ValueError: they are unlike those of earlier batches, or their place in the order of the data is unknown.
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
        """Return the tracked values and join the outputs. A collective."""
        metrics = super().metrics()
        if self._outputs == "kept":
            run = self._run
            joined = {
                dataset: parts.gather(run.engine) if run.control.is_shared else parts.join()
                for dataset, parts in self._parts.items()
            }
            run.report.predictions = joined[""] if [*joined] == [""] else joined
        return metrics


def predict(bus: Bus, plugins: Plugins, make_run: Callable[[], TrainRun], *, gather: bool) -> RunResult:
    """Predict every set; see `Trainer.predict`."""
    check_flag("gather", gather)
    functions = (subscription.owner for subscription in bus.signal(PredictBatchEnd).subscriptions.values())
    is_taken = _plugin_takes_outputs(bus, plugins) or not all(isinstance(owner, PluginName) for owner in functions)
    if not gather and not is_taken:
        raise ValueError(
            "predict(gather=False) keeps no outputs, and no plugin takes them: add PredictionWriter('out/'), or a "
            "handler of PredictBatchEnd in lane PERSIST that reads run.outputs; or loop over predict_batches."
        )
    kind = partial(PredictionPass, outputs="kept" if gather else "taken")
    with make_run() as run, evaluating(run, "predict", kind) as prediction:
        for batch in loop.evaluated(run, prediction):
            prediction.step(batch)
    return run.result_or_raise()


@torch.no_grad()  # on a generator: the caller's code between two batches keeps its own mode
def predicted_batches(make_run: Callable[[], TrainRun]) -> Iterator[Any]:
    """Yield the outputs of each batch of this process; see `Trainer.predict_batches`."""
    with make_run() as run, evaluating(run, "predict", partial(PredictionPass, outputs="yielded")) as prediction:
        has_names = [*prediction.loaders] != [""]
        for batch in loop.evaluated(run, prediction):
            outputs = prediction.step(batch)
            try:
                yield (prediction.collection.dataset, outputs) if has_names else outputs
            except GeneratorExit:
                run.control.cut_validation("the loop over predict_batches was left", by="the caller")
            del outputs  # frees memory while the next batch is computed
    run.result_or_raise()


def _plugin_takes_outputs(bus: Bus, plugins: Plugins) -> bool:
    """Return True if an enabled plugin handles PredictBatchEnd in lane `PERSIST`, where outputs are stored."""
    return any(
        isinstance(owner := subscription.owner, PluginName)
        and subscription.position[0] == Lane.PERSIST
        and plugins.is_enabled(owner)
        for subscription in bus.signal(PredictBatchEnd).subscriptions.values()
    )


def evaluation_run(
    bus: Bus,
    plugins: Plugins,
    engine: LoopEngine,
    task: Any,
    data: Any,
    phase: Phase,
    *,
    loader_params: LoaderParams | None = None,
    limit: Any = None,
    name: str = "run",
    weights: str | Path | None = None,
) -> TrainRun:
    """Return a run for the sets of one phase; see `Trainer.validate`, `Trainer.test` and `Trainer.predict`."""
    with ExitStack() as life:
        life.enter_context(isolated_from_outer_runs())
        opening = life.enter_context(failing_with_data(bus, plugins, engine, task, phase, name))
        life.enter_context(engine.process())
        with opening():
            loaders = data_of_phase(data, phase, life, engine)
        if loader_params is None and isinstance(data, DataModule):
            loader_params = shared_params(data.loader_params)
        loaders = plain_sets(named_sets(loaders))  # periodic sets, too: this run reads them all
        check_params(loader_params, loaders.values())
        params = params_of_one_process(loader_params, engine.world_size)
        check_step(task, f"{phase}_step")
        sets, limits, _ = evaluation_sets(loaders, phase, params, limit, "limit")
        checked = Settings(name=check_name(name), task=task, evaluations={phase: sets}, limits=limits)
        if phase == "predict":
            for loader in checked.evaluations[phase].values():
                check_in_order(loader)
        note = None if weights is None else load_for_run(plugins, engine, task, weights, name)
        run = TrainRun(checked, bus, plugins, engine, phase)
        if note is not None:
            run.note(note)
        run.hooks.closing.push(life.pop_all())
    return run


@contextmanager
def failing_with_data(
    bus: Bus, plugins: Plugins, engine: LoopEngine, task: Any, phase: Phase, name: str
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Fail the run that was about to begin if its data module fails: emit RunFailed and RunClosed afterwards.

    Yields a context manager in which the module is prepared, set up and read.
    """
    failures: list[BaseException] = []

    @contextmanager
    def opening() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            failures.append(error)
            raise

    try:
        yield opening
    except BaseException as error:
        if not any(error is failure for failure in failures) or is_in_run(engine):
            raise
        run = TrainRun(Settings(name=check_name(name), task=task), bus, plugins, engine, phase)
        run.report.has_left_group = True
        run.plugins.open(run)
        close_run(run, error)
        raise


def open_training_data(
    bus: Bus, plugins: Plugins, engine: LoopEngine, module: DataModule, task: Any, options: FitOptions, life: ExitStack
) -> Any:
    """Return the training data of a module, and complete the options with its other data."""
    opening = life.enter_context(failing_with_data(bus, plugins, engine, task, "train", options.get("name", "run")))
    life.enter_context(engine.process())
    with opening():
        open_module(module, life, engine)
        train = module.train()
        complete_options(module, options)
    return train
