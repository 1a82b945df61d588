"""The trainer: holds the bus, the plugins and the engine; `fit`, `validate`, `test` and `predict` are runs of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack

from ..events import Bus
from ..events.catalogue import Phase
from ..events.checks import check_flag
from ..plugins import Plugins
from ..plugins.hints import OF_RUN, explains_arguments, explains_attributes
from . import loop, settings
from .data.module import DataModule
from .engines.engine_choice import make_engine
from .engines.options import EngineOptions
from .host import current_host, hosted_by
from .result import RunResult
from .run import TrainRun, isolated_from_outer_runs
from .task import can_validate, check_step

if TYPE_CHECKING:
    from .data.loaders import LoaderParams
    from .engines.contract import LoopEngine
    from .rehearsal.first_batches import Overfitting
    from .rehearsal.range_test import LearningRateSearch
    from .rehearsal.report import Rehearsal


@explains_attributes(OF_RUN)
class Trainer:
    """Reusable: calls of `fit`, `validate`, `test` and `predict` follow one another and never disturb each other.

    Args:
        plugins: plugin objects, in the order in which they run within a lane.
        engine: an engine of your own, or the name of an installed one, such as `ddp`; by default one is chosen by how
            the process was started.
        strict: whether to raise `StrictError` where something that was asked for did not happen, as `result.warnings`
            says: before the first epoch where it is known by then, else when the run is closed, with the result.
        **options: the rest of this list, each an error if `engine` is an object: that has its own.
        device: `cpu`, `cuda`, `cuda:1`, `mps`; by default a GPU where there is one.
        gpus: instead of `device`, the numbers of the GPUs to use, one for each process on this machine.
        use_cpu: instead of `device`, True for the CPU, False for a GPU or an error.
        precision: `fp32` (the default), `tf32`, `bf16` or `fp16`.
        deterministic: use deterministic algorithms only; an operation that has none raises.
        cudnn_benchmark: let cuDNN time its algorithms and take the fastest; not in a validation or test.

    Raises:
        LookupError: no engine of that name is installed.
        RuntimeError: a GPU is wanted, and there is none.
        TypeError: a plugin has a handler that does not fit its event; there is no such option.
        ValueError: plugins contradict each other, or options; the device is not there.
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
            names = ", ".join(f"{type(each).__name__}(...)" for each in (plugins, *more))
            of_fit = " The task and its data are arguments of fit." * hasattr(plugins, "training_step")
            raise TypeError(f"Trainer(plugins) takes a list of plugin objects: Trainer([{names}]).{of_fit}")
        for plugin in [plugins] if isinstance(plugins, str) else plugins:  # a name is one error, not one for a letter
            self.plugins.register(plugin)
        self.plugins.load_added()

    def __repr__(self) -> str:
        from ..events.signatures import show_list

        rest = f"engine={self.engine!r}" + ", strict=True" * self.strict
        return show_list("Trainer", self.plugins, rest)

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
        """Train.

        Args:
            task: an object with `training_step(run, batch)`, such as `Supervised(model, loss_fn)`.
            train: an iterable of batches, sized or not, read again in every epoch; a dataset, with `loader_params`;
                several of these by name, or `Streams(...)` of them; `Phases(...)` of such; or a `DataModule`.
            validation: an iterable of batches or a dataset, or several by name; in place of one, `Periodic(data,
                every=5)` is read by every fifth validation only.
            limit_train: how many batches of an epoch each process reads, such as 100, or which fraction of them, such
                as 0.1, rounded down, at least one. For several streams also by their names: the batches of each pass.
            limit_validation: the same for the batches of each validation set, those of all ranks together, or by the
                names of the sets.
            optimizer: an optimizer, or a function that makes one from the list of the task's parameters. Or several by
                name, for a `training_step` that yields `(name, loss)` for each; a function gets the parameters of the
                task's module of that name.
            scheduler: a learning-rate scheduler, or a function that makes one from the optimizer, or from the optimizer
                and the number of optimizer steps that are planned, such as `warmup_cosine(0.03)`; stepped by the plugin
                `LearningRate`. By the names of their optimizers, where these have names.
            epochs: how many epochs; with `steps`, whichever comes first. Counted from the run's first beginning: a
                resumed run does the rest. 1.5 ends within the second epoch, without its end event, after that part
                of its steps, rounded up; the loader has a length then.
            steps: how many optimizer steps.
            loader_params: how to batch a dataset, such as `{"batch_size": 32, "shuffle": True, "num_workers": 4}`;
                see `LoaderParams`. For several streams also by their names, `{"batch_size": 32, "digit":
                {"batch_size": 8}}`.
            max_skipped_steps: how many steps and batches in a row may be skipped, by plugins or by fp16, without an
                optimizer step in between; 100 by default, None for any number. More are an error, which names who
                skipped: they would never end a run by `steps`.
            name: the run's name, as in file names; `run` by default.
            hyper_parameters: a description of this run, for loggers.
            allow_unused_parameters: whether all is well where parameters of the optimizer never have a gradient; else
                the result warns.
            on_interrupt: whether Ctrl-C raises KeyboardInterrupt, or returns a result with status `interrupted`; also
                whether an exit status that a plugin asked for raises SystemExit, or is only in the result. The first
                Ctrl-C closes the run properly, a second one leaves at once and raises in any case.

        Returns:
            How the run ended. A failure raises.

        Raises:
            SystemExit: a plugin such as `Preemption` asked for an exit status.
            TypeError: the task lacks a step, or one does not take `(run, batch)`; a loader cannot be iterated, the
                optimizer is none.
            ValueError: a loader is empty, a length is not positive, or nothing would ever do what was asked for.
        """
        if on_interrupt not in ("raise", "return"):
            raise ValueError(f"on_interrupt is 'raise' or 'return', got {on_interrupt!r}.")
        check_step(task, "training_step")
        run = self.run(task, train, **options)
        try:
            with run:
                loop.fit(run)
        except KeyboardInterrupt:
            if on_interrupt == "raise" or not hasattr(run, "result"):  # without one, it was a second Ctrl-C
                raise
        return run.result_or_raise(exits=on_interrupt == "raise")

    @explains_arguments
    @settings.shows_options(settings.FitOptions)
    def run(self, task: Any, train: Any, **options: Unpack[settings.FitOptions]) -> TrainRun:
        """Return a run for a loop of your own, with the arguments of `fit`.

        Within `with trainer.run(...) as run:`, loop over `run.epochs()`, in it over `run.batches()`, and call
        `run.step(loss)` for each batch.
        """
        engine = self.engine
        if (host := current_host()) is not None:
            host.prepare(self.plugins)
        with ExitStack() as life:
            life.enter_context(isolated_from_outer_runs())
            if isinstance(train, DataModule):
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

    def planned_steps(
        self,
        train: Any,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        limit_train: float | Mapping[str, float] | None = None,
        loader_params: LoaderParams | Mapping[str, Any] | None = None,
    ) -> int:
        """Return how many optimizer steps a `fit` with these arguments plans, from its first beginning to its end.

        Gradient accumulation, the ranks, a last window that is shorter and a batch that is left out are counted. Steps
        that are skipped, and epochs that end early, are not foreseen. Of several optimizers by name, their rounds are
        counted, in each of which every one may step once. On several ranks a collective.

        Args:
            train: see `fit`; a `DataModule` is prepared, set up and torn down.
            epochs: see `fit`.
            steps: see `fit`.
            limit_train: see `fit`.
            loader_params: see `fit`.

        Raises:
            ValueError: the number is not known before the run: a loader has no length, or phases are not equally long.
        """
        from .length import count_steps

        options = {"loader_params": loader_params, "limit_train": limit_train}
        return count_steps(self.engine, self.plugins, train, epochs, steps, options)

    @explains_arguments
    @settings.shows_options(settings.EvaluationOptions)
    def validate(self, task: Any, validation: Any, **options: Unpack[settings.EvaluationOptions]) -> RunResult:
        """Run the task's `validation_step` over one or several sets; the means are in `result.metrics`.

        Args:
            task: an object with `validation_step(run, batch)`.
            validation: an iterable of batches, a dataset, several of them by name, or a `DataModule`.
            loader_params: how to batch a dataset.
            limit: how many batches of each set are read, or which fraction of them, or some limits by name; see `fit`.
            name: the run's name.
            weights: load these first, as `load_weights` does, and leave them in the task: `best` or `last`, of the
                trainer's `Checkpoint`; or the path of a file or a folder.
        """
        return self._evaluate(task, validation, "validation", options)

    @explains_arguments
    @settings.shows_options(settings.EvaluationOptions)
    def test(self, task: Any, test: Any, **options: Unpack[settings.EvaluationOptions]) -> RunResult:
        """Run the task's `test_step` over one or several sets; the means are in `result.metrics`.

        Args:
            task: an object with `test_step(run, batch)`.
            test: an iterable of batches, a dataset, several of them by name, or a `DataModule`.
            loader_params: how to batch a dataset.
            limit: as for `validate`.
            name: the run's name.
            weights: load these first, as `load_weights` does, and leave them in the task: `best` or `last`, of the
                trainer's `Checkpoint`; or the path of a file or a folder.
        """
        return self._evaluate(task, test, "test", options)

    @explains_arguments
    @settings.shows_options(settings.EvaluationOptions)
    def predict(
        self, task: Any, data: Any, *, gather: bool = True, **options: Unpack[settings.EvaluationOptions]
    ) -> RunResult:
        """Run the task's `predict_step` over one or several sets; the outputs are in `result.predictions`.

        They are joined, on the CPU, in the order of the data: tensors and arrays along their first dimension, lists one
        after the other, within the dicts and tuples that the step returns. Of several sets there is a dict by their
        names. On several ranks, each of which computes every so many batches, every rank gets all of them.

        Args:
            task: an object with `predict_step(run, batch)`, such as `Supervised(model, loss_fn)`.
            data: an iterable of batches, a dataset, several of them by name, or a `DataModule`.
            loader_params: how to batch a dataset.
            limit: as in `validate`.
            name: the run's name.
            weights: as in `test`.
            gather: whether the outputs are kept, which takes memory for all of them in every process; without it,
                plugins such as `PredictionWriter` take them batch by batch, and `result.predictions` is None.

        Raises:
            TypeError: the task has no `predict_step`; an output is of a type that cannot be joined.
            ValueError: the outputs of some batches are not like those of others; a loader shuffles or drops samples;
                without `gather`, nobody would take the outputs.
        """
        from .evaluation_run import predict

        make_run = partial(self._evaluation, task, data, "predict", options)
        return predict(self.bus, self.plugins, make_run, gather=gather)

    @settings.shows_options(settings.EvaluationOptions)
    def predict_batches(self, task: Any, data: Any, **options: Unpack[settings.EvaluationOptions]) -> Iterator[Any]:
        """Yield what the task's `predict_step` returns for each batch of this process; nothing is kept.

        The outputs are as the step returns them, on its device. Of several sets by name, `(name, outputs)` is yielded.
        Of W ranks, rank r has the batches r, r + W, r + 2W, ... of each set. The run begins with the first batch, and
        ends with the last or when the loop is left: it is then stopped. While it is under way, the model is in eval
        mode; gradients are as you set them.

        Args:
            task: see `predict`.
            data: see `predict`.
            loader_params: how to batch a dataset.
            limit: as in `validate`.
            name: the run's name.
            weights: as in `test`.
        """
        from .evaluation_run import predicted_batches

        return predicted_batches(partial(self._evaluation, task, data, "predict", options))

    def rehearse(
        self, task: Any, train: Any, *, folder: str | Path | None = None, **options: Unpack[settings.FitOptions]
    ) -> Rehearsal:
        """Try everything that a long training would do in a short one, and put everything back as it was.

        Two steps of each phase of the data, two batches of each validation set, a log, a save, the events of the end,
        with all plugins; then a run that resumes from the save, which is compared bit by bit. Filters such as
        `Every(epochs=10)` are due at the first occasion. Files go to a temporary folder, which is removed. Weights,
        gradients, modes, optimizers, plugins, datasets and random generators are afterwards what they were, after an
        error and after Ctrl-C too. On several ranks each must call it.

        Args:
            task: see `fit`.
            train: see `fit`.
            folder: where to make the temporary folder, by default where Python makes them; on the disk of the
                checkpoints, the seconds of a save are those of that disk. Several machines need one that all see.
            **options: the other arguments of `fit`.

        Returns:
            What would happen, how long it would last, how large it would be, and what would go wrong. An error of the
            training or of a plugin leaves as it would leave `fit`, with a note on where it came up.

        Raises:
            ValueError: the data can be read only once; and as `fit`.
        """
        from .rehearsal.rehearsal import rehearse

        check_step(task, "training_step")
        with hosted_by(None):
            return rehearse(self, loop.fit, task, train, options, folder)

    def overfit(
        self, task: Any, train: Any, *, batches: int = 1, steps: int = 100, validate: bool = True, **options: Any
    ) -> Overfitting:
        """Train on the first batches over and over, and put everything back: a loss that stays up shows a mistake.

        Plugins that log, validate, save, stop or only look on take no part; the others do. A task that validates does
        so at the end, on the same batches, unless these are of several streams by name.

        Args:
            task: see `fit`.
            train: see `fit`.
            batches: how many batches.
            steps: how many optimizer steps.
            validate: False where the task's validation step takes other batches than its training step.
            **options: the other arguments of `fit`, without `epochs`, `validation` and `limit_validation`.

        Returns:
            The loss of every step, and the metrics at the end.
        """
        from .rehearsal.first_batches import overfit

        check_step(task, "training_step")
        check_flag("validate=", validate)
        validates = validate and can_validate(task)
        return overfit(self, loop.fit, (task, train, options), batches=batches, steps=steps, validates=validates)

    def find_learning_rate(
        self,
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
        """Train with learning rates that rise step by step, look at the loss, and put everything back as it was.

        The range test of L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (WACV 2017), section 3.3.
        Plugins that log, validate, save, stop or only look on take no part; the others do.

        Args:
            task: see `fit`.
            train: see `fit`; read again where it has fewer batches.
            lowest: the first learning rate. Parameter groups keep their proportions; this is that of the largest.
            highest: the last one.
            steps: how many optimizer steps.
            ramp: whether rates rise by a factor (`log`) or by a difference (`linear`).
            smoothing: the share of the former mean in the exponential mean of the losses.
            diverging: the test ends when the smoothed loss is so many times the smallest one, or is not a number.
            **options: the other arguments of `fit`, without `epochs`, `validation`, `limit_validation` and `scheduler`.

        Returns:
            The rates, the losses, and a suggestion.

        Raises:
            ValueError: an argument is out of its range; there is a scheduler, or several optimizers.
        """
        from .rehearsal.range_test import find_learning_rate

        check_step(task, "training_step")
        given = (task, train, options)
        return find_learning_rate(self, loop.fit, given, lowest, highest, steps, ramp, smoothing, diverging)

    def find_batch_size(self, task: Any, train: Any, *, largest: int, smallest: int = 1, **options: Any) -> int:
        """Find the largest batch of which two steps fit into memory, and put everything back as it was.

        The batch is halved until a rehearsal fits: two steps, two batches of a validation, a save. With the function
        `heliograph.find_batch_size` it is the training itself that begins again with half the batch. On several ranks
        each must call it.

        Args:
            task: see `fit`.
            train: a dataset, or several in `Phases`.
            largest: the samples in a batch to begin with; of a dataset that has fewer, all of them.
            smallest: the fewest to try.
            **options: the other arguments of `fit`; `loader_params` without the batch size. `epochs` and `steps` may be
                left out.

        Raises:
            RuntimeError: the smallest batch does not fit.
            TypeError: the training data are batches already.
            ValueError: the sizes are not positive, or the wrong way round.
        """
        from .data.batch_size import find_by_rehearsing

        return find_by_rehearsing(partial(self.rehearse, task, train), train, largest, smallest, options)

    def plan(self, task: Any = None, train: Any = None, **options: Unpack[settings.FitOptions]) -> str:
        """Return the handlers of each event, in the order in which they run.

        Args:
            task: with `train` and the other arguments of `fit`, what such a training would do comes first: the model,
                the hardware, the length, and what plugins log, validate and save when. Nothing is trained.
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
