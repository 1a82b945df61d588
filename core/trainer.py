"""`Trainer`: starts runs with a bus, plugins and an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack

from ..events import Bus, Phase
from ..events.checks import check_flag
from ..plugins import Plugins
from ..plugins.hints import OF_RUN, explains_arguments, explains_attributes
from . import loop, settings
from .engines.engine_choice import make_engine
from .engines.options import EngineOptions
from .host import current_host
from .result import RunResult
from .run import TrainRun, isolated_from_outer_runs
from .task import check_step

if TYPE_CHECKING:
    from .engines.contract import LoopEngine


@explains_attributes(OF_RUN)
class Trainer:
    """Runs trainings and evaluations with one bus, one list of plugins and one engine.

    You can reuse a trainer: each call of `fit`, `validate`, `test` or `predict` is a run of its own.

    Args:
        plugins: plugin objects, in the order in which they run within a lane.
        engine: an engine object, or the name of an installed engine, for example `ddp`. By default the trainer chooses
            one for the way in which the process was started.
        strict: True to raise `StrictError` for everything that `result.warnings` would report: before the first epoch
            if it is known by then, else when the run closes.
        **options: options of the engine, listed below. They are errors if `engine` is an object.
        device: `cpu`, `cuda`, `cuda:1` or `mps`; by default a GPU if there is one.
        gpus: the numbers of the GPUs to use, one per process on this machine; instead of `device`.
        use_cpu: True for the CPU, False for a GPU or an error; instead of `device`.
        precision: `fp32` (the default), `tf32`, `bf16` or `fp16`.
        deterministic: True to use deterministic algorithms only. An operation without one raises.
        cudnn_benchmark: True to let cuDNN time its algorithms and use the fastest; not in a validation or test.

    Raises:
        LookupError: no engine of that name is installed.
        RuntimeError: you asked for a GPU and there is none.
        TypeError: the handler of a plugin does not fit its event; an option does not exist.
        ValueError: plugins or options contradict each other; the device does not exist.
    """

    def __init__(
        self,
        plugins: Iterable[Any] = (),
        *more: Never,
        engine: LoopEngine | str | None = None,
        strict: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.bus = Bus()
        self.plugins = Plugins(self.bus)
        self.engine = make_engine(engine, options)
        check_flag("strict", strict)
        self.strict = strict
        if more or not isinstance(plugins, Iterable):
            names = ", ".join(f"{type(plugin).__name__}(...)" for plugin in (plugins, *more))
            of_fit = " The task and its data are arguments of fit." * hasattr(plugins, "training_step")
            raise TypeError(f"Trainer(plugins) takes a list of plugin objects: Trainer([{names}]).{of_fit}")
        for plugin in [plugins] if isinstance(plugins, str) else plugins:  # a name is one error, not one per letter
            self.plugins.register(plugin)
        self.plugins.load_added()

    def __repr__(self) -> str:
        from ..events.signatures import show_list

        return show_list("Trainer", self.plugins, f"engine={self.engine!r}" + ", strict=True" * self.strict)

    @explains_arguments
    @settings.shows_options(settings.FitOptions)
    def fit(
        self,
        task: Any,
        train: Any,
        *,
        on_interrupt: Literal["raise", "return"] = "raise",
        **options: Unpack[settings.FitOptions],
    ) -> RunResult:
        """Train a task.

        Args:
            task: an object with `training_step(run, batch)`, for example `Supervised(model, loss_fn)`.
            train: an iterable of batches, read again in every epoch; or a dataset with `loader_params`; or a dict of
                several by name; or `Streams(...)` of several; or `Phases(...)` of these; or a `DataModule`.
            validation: an iterable of batches or a dataset, or several by name. `Periodic(data, every=5)` is read in
                every fifth validation only.
            limit_train: the number of batches that each process reads per epoch, for example 100; or a fraction of
                them, for example 0.1, rounded down to at least one batch. For several streams also a dict by name.
            limit_validation: the same for the batches of each validation set, counted over all ranks; or a dict by
                name.
            optimizer: an optimizer, or a function that makes one from the list of parameters. Or several by name, for a
                `training_step` that yields `(name, loss)` pairs; a function then gets the parameters of the module of
                that name.
            scheduler: a learning-rate scheduler, or a function that makes one from the optimizer, or from the optimizer
                and the planned number of optimizer steps, for example `warmup_cosine(0.03)`. The plugin `LearningRate`
                steps it. With several optimizers, a dict by name.
            epochs: the number of epochs, counted from the first start of the training: a resumed run does the rest.
                1.5 ends in the middle of the second epoch, rounded up to a whole step and without its end event; the
                loader needs a length then. With `steps`, the limit that comes first counts.
            steps: the number of optimizer steps.
            loader_params: how to batch a dataset, for example `{"batch_size": 32, "shuffle": True, "num_workers": 4}`;
                see `LoaderParams`. For several streams also by name: `{"batch_size": 32, "digit": {"batch_size": 8}}`.
            max_skipped_steps: how many steps and batches in a row plugins or fp16 may skip without an optimizer step;
                100 by default, None for no limit. More raise an error that names who skipped.
            name: the name of the run, used in file names; `run` by default.
            hyper_parameters: a description of this run for loggers.
            allow_unused_parameters: True if some parameters of the optimizer never get a gradient on purpose.
                Otherwise the result warns about them.
            on_interrupt: `raise` raises KeyboardInterrupt on Ctrl-C, and SystemExit if a plugin requests an exit
                status; `return` returns the result in both cases. The first Ctrl-C closes the run properly, a second
                one raises at once.

        Returns:
            The result of the run. A failure raises.

        Raises:
            SystemExit: a plugin such as `Preemption` requested an exit status.
            TypeError: the task lacks a step, or a step does not take `(run, batch)`; a loader cannot be iterated; the
                optimizer is not an optimizer.
            ValueError: a loader is empty; a length is not positive; a request has no plugin that would serve it.
        """
        if on_interrupt not in ("raise", "return"):
            raise ValueError(f"on_interrupt is 'raise' or 'return', got {on_interrupt!r}.")
        check_step(task, "training_step")
        run = self.run(task, train, **options)
        try:
            with run:
                loop.fit(run)
        except KeyboardInterrupt:
            if on_interrupt == "raise" or not hasattr(run, "result"):  # no result after a second Ctrl-C
                raise
        return run.result_or_raise(exits=on_interrupt == "raise")

    @explains_arguments
    @settings.shows_options(settings.FitOptions)
    def run(self, task: Any, train: Any, **options: Unpack[settings.FitOptions]) -> TrainRun:
        """Return a run for your own loop; it takes the arguments of `fit`.

        Inside `with trainer.run(...) as run:`, loop over `run.epochs()` and `run.batches()`, and call `run.step(loss)`
        for each batch.
        """
        engine = self.engine
        if (host := current_host()) is not None:
            host.prepare(self.plugins)
        with ExitStack() as life:
            life.enter_context(isolated_from_outer_runs())
            if _is_data_module(train):
                from .evaluation_run import open_training_data

                train = open_training_data(self.bus, self.plugins, engine, train, task, options, life)
            else:
                life.enter_context(engine.process())
            checked = settings.training(task, train, options, engine.world_size)
            settings.check_needs(checked, self.plugins)
            run = TrainRun(checked, self.bus, self.plugins, engine)
            run.report.is_strict = self.strict
            run.hooks.closing.push(life.pop_all())
        return run

    @explains_arguments
    @settings.shows_options(settings.EvaluationOptions)
    def validate(self, task: Any, validation: Any, **options: Unpack[settings.EvaluationOptions]) -> RunResult:
        """Run the task's `validation_step` on data; the means are in `result.metrics`.

        Args:
            task: an object with `validation_step(run, batch)`.
            validation: an iterable of batches, a dataset, several of them by name, or a `DataModule`.
            loader_params: how to batch a dataset.
            limit: the number or the fraction of batches to read from each set, or a dict by name; see `fit`.
            name: the name of the run.
            weights: weights to load into the task first: `best` or `last` of the trainer's `Checkpoint`, or the path
                of a file or folder. See `load_weights`.
        """
        return self._evaluate(task, validation, "validation", options)

    @explains_arguments
    @settings.shows_options(settings.EvaluationOptions)
    def test(self, task: Any, test: Any, **options: Unpack[settings.EvaluationOptions]) -> RunResult:
        """Run the task's `test_step` on data; the means are in `result.metrics`.

        Args:
            task: an object with `test_step(run, batch)`.
            test: an iterable of batches, a dataset, several of them by name, or a `DataModule`.
            loader_params: how to batch a dataset.
            limit: as for `validate`.
            name: the name of the run.
            weights: weights to load into the task first: `best` or `last` of the trainer's `Checkpoint`, or the path
                of a file or folder. See `load_weights`.
        """
        return self._evaluate(task, test, "test", options)

    @explains_arguments
    @settings.shows_options(settings.EvaluationOptions)
    def predict(
        self, task: Any, data: Any, *, gather: bool = True, **options: Unpack[settings.EvaluationOptions]
    ) -> RunResult:
        """Run the task's `predict_step` on data; the outputs are in `result.predictions`.

        The outputs are joined on the CPU in the order of the data: tensors and arrays along their first dimension,
        lists one after another, inside the dicts and tuples that the step returns. Several sets give a dict by name.
        On several ranks, each rank computes its share and every rank gets all outputs.

        Args:
            task: an object with `predict_step(run, batch)`, for example `Supervised(model, loss_fn)`.
            data: an iterable of batches, a dataset, several of them by name, or a `DataModule`.
            loader_params: how to batch a dataset.
            limit: as in `validate`.
            name: the name of the run.
            weights: as in `test`.
            gather: False to keep no outputs; plugins such as `PredictionWriter` then take them batch by batch, and
                `result.predictions` is None. True keeps all outputs in the memory of every process.

        Raises:
            TypeError: the task has no `predict_step`; an output has a type that cannot be joined.
            ValueError: the outputs of two batches do not fit together; a loader shuffles or drops samples; `gather` is
                False and no plugin takes the outputs.
        """
        from .evaluation_run import predict

        make_run = partial(self._evaluation, task, data, "predict", options)
        return predict(self.bus, self.plugins, make_run, gather=gather)

    @settings.shows_options(settings.EvaluationOptions)
    def predict_batches(self, task: Any, data: Any, **options: Unpack[settings.EvaluationOptions]) -> Iterator[Any]:
        """Yield the outputs of `predict_step` batch by batch, without keeping them.

        The outputs are on the device of the step. Several sets yield `(name, outputs)`. Of W ranks, rank r gets the
        batches r, r + W, r + 2W, ... of each set. The run starts with the first batch and ends with the last one, or
        is stopped when you leave the loop. Meanwhile the model is in eval mode; gradient mode is yours to set.

        Args:
            task: see `predict`.
            data: see `predict`.
            loader_params: how to batch a dataset.
            limit: as in `validate`.
            name: the name of the run.
            weights: as in `test`.
        """
        from .evaluation_run import predicted_batches

        return predicted_batches(partial(self._evaluation, task, data, "predict", options))

    def plan(self, task: Any = None, train: Any = None, **options: Unpack[settings.FitOptions]) -> str:
        """Return the handlers of each event in the order in which they run.

        Args:
            task: a task. With the other arguments of `fit`, the text starts with the model, the hardware, the length,
                and when plugins log, validate and save. Nothing is trained.
            train: see `fit`.
            **options: see `fit`.
        """
        from ..plugins.states import Lines, plan

        if task is None:
            return plan(self.bus)
        run = self.run(task, train, **options)
        try:
            return Lines(f"{run.report.plan()}\n\n{plan(self.bus)}")
        finally:
            run.hooks.closing.close()

    def _evaluate(self, task: Any, data: Any, phase: Phase, options: settings.EvaluationOptions) -> RunResult:
        with self._evaluation(task, data, phase, options) as run:
            loop.evaluate(run, phase)
        return run.result_or_raise()

    def _evaluation(self, task: Any, data: Any, phase: Phase, options: settings.EvaluationOptions) -> TrainRun:
        from .evaluation_run import evaluation_run

        run = evaluation_run(self.bus, self.plugins, self.engine, task, data, phase, **options)
        run.report.is_strict = self.strict
        return run


def _is_data_module(data: Any) -> bool:
    if type(data) in (list, tuple):  # of batches
        return False
    from .data.module import DataModule  # imported for other data

    return isinstance(data, DataModule)
