"""The plugin that handlers of PyTorch-Ignite become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heliograph import (
    BatchEnd,
    BatchStart,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Lane,
    Log,
    Plugin,
    Run,
    RunFailed,
    TrainEnd,
    TrainStart,
    ValidationBatchEnd,
    ValidationBatchStart,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
    on,
)
from heliograph.events import Event
from heliograph.plugins import snake_case
from ignite.engine import Events
from ignite.handlers import Timer
from ignite.handlers.base_logger import BaseHandler, BaseLogger

from ...own_states import OwnStates
from . import place
from .engine import RunEngine

LOOKS_ONLY = (BaseHandler, BaseLogger, Timer)
BATCH = (Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED)
# Events of ours that only some of theirs need: those of the trainer, those of the evaluator.
OF_TRAINER: Mapping[type[Event], tuple[Events, ...]] = {
    EpochStart: (Events.EPOCH_STARTED, Events.EPOCH_COMPLETED),  # the latter for its time
    BatchStart: BATCH,
    BatchEnd: (Events.ITERATION_COMPLETED,),
    EpochEnd: (Events.EPOCH_COMPLETED, Events.TERMINATE_SINGLE_EPOCH),
    TrainEnd: (Events.COMPLETED, Events.TERMINATE),
    RunFailed: (Events.EXCEPTION_RAISED,),
}
ENDS = (Events.EPOCH_COMPLETED, Events.COMPLETED, Events.TERMINATE)
OF_EVALUATOR: Mapping[type[Event], tuple[Events, ...]] = {
    ValidationStart: (Events.STARTED, Events.EPOCH_STARTED, *BATCH, Events.ITERATION_COMPLETED, *ENDS),
    ValidationBatchStart: BATCH,
    ValidationBatchEnd: (Events.ITERATION_COMPLETED,),
    ValidationEnd: (Events.EPOCH_COMPLETED, Events.COMPLETED),
    ValidationCut: (Events.TERMINATE,),
}


class IgnitePlugin(Plugin):
    """Handlers of PyTorch-Ignite; made by `from_ignite`.

    Args:
        name: of the handler; the plugin has it in snake case.
        trainer: the engine that the training drives, with its handlers.
        evaluator: that of validations.
        phase: whose output `output` makes.
        output: makes `state.output` from the run; None for the default.
    """

    rehearses = False
    asks = ("stop",)

    def __init__(
        self,
        name: str,
        trainer: RunEngine,
        evaluator: RunEngine,
        phase: str,
        output: Callable[[Run], Any] | None,
    ) -> None:
        self.name = snake_case(name)
        self._trainer, self._evaluator = trainer, evaluator
        self._outputs = {phase: output} if output is not None else {}
        handlers = [*trainer.handlers, *evaluator.handlers]
        self._own_states = OwnStates(handlers, "give it state_dict and load_state_dict")
        vars(self).update(self._own_states.options)  # at a resume, options of a plugin are compared by their names
        self.affects_training = not all(isinstance(each, LOOKS_ONLY) for each in handlers)
        self.ignores = tuple(
            event
            for engine, table in ((trainer, OF_TRAINER), (evaluator, OF_EVALUATOR))
            for event, theirs in table.items()
            if not engine.listens_to(*theirs)
        )
        trainer.seal(self._own_states)
        evaluator.seal(self._own_states)

    def reset(self) -> None:
        """Put the handlers back to what they were, where they have a state."""
        self._own_states.reset()
        self._trainer.begin()
        self._evaluator.begin()

    def describe(self, run: Run) -> str:
        """Say whose handlers these are."""
        return f"calls handlers of Ignite: {', '.join(self._own_states.names)}"

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Fire `STARTED`."""
        place.begin_training(self._trainer, run)
        self._trainer.fire(Events.STARTED)

    @on(CheckpointLoaded)
    def resume(self, run: Run, event: CheckpointLoaded) -> None:
        """Continue where the checkpoint is; repeat a stop that was asked for before it."""
        place.go_to(self._trainer, run)
        self._own_states.resume(run, affects_training=self.affects_training)

    @on(EpochStart)
    def begin_epoch(self, run: Run, event: EpochStart) -> None:
        """Fire `EPOCH_STARTED`; not again for an epoch that had begun before the checkpoint."""
        place.begin_epoch(self._trainer, run)
        place.begin_epoch_timing(self._trainer)
        if not event.resumed:
            self._trainer.fire(Events.EPOCH_STARTED)

    @on(BatchStart, lane=Lane.TRANSFORM)
    def begin_batch(self, run: Run, event: BatchStart) -> None:
        """Fire `GET_BATCH_COMPLETED` and `ITERATION_STARTED`; take a batch that they have replaced."""
        place.begin_epoch(self._trainer, run)
        _begin_batch(self._trainer, run)

    @on(BatchEnd)
    def end_batch(self, run: Run, event: BatchEnd) -> None:
        """Fire `ITERATION_COMPLETED`."""
        place.go_to(self._trainer, run)
        _end_batch(self._trainer, run, self._outputs.get("train", _loss))
        if "train" in self._outputs:  # which may hold what is large
            self._trainer.state.output = None

    @on(EpochEnd)
    def end_epoch(self, run: Run, event: EpochEnd) -> None:
        """Fire `EPOCH_COMPLETED`, after `TERMINATE_SINGLE_EPOCH` where a handler has ended the epoch."""
        engine = self._trainer
        place.go_to(engine, run)
        ended, engine.should_terminate_single_epoch = engine.should_terminate_single_epoch, False
        if ended:
            engine.fire(Events.TERMINATE_SINGLE_EPOCH, iter_counter=engine.state.iteration)
        place.take_time(engine, Events.EPOCH_COMPLETED)
        if ended != "skip_epoch_completed":
            engine.fire(Events.EPOCH_COMPLETED)
        engine.state.output = None

    @on(Log, optional=True)
    def log(self, run: Run, event: Log) -> None:
        """Put what is logged into the trainer's metrics."""
        place.take_metrics(self._trainer, event.metrics)

    @on(TrainEnd)
    def end_training(self, run: Run, event: TrainEnd) -> None:
        """Fire `COMPLETED`, after `TERMINATE` where the training was stopped."""
        engine = self._trainer
        place.go_to(engine, run)
        if run.control.should_stop:
            engine.fire(Events.TERMINATE)
        place.take_time(engine, Events.COMPLETED)
        if engine.should_terminate != "skip_completed":
            engine.fire(Events.COMPLETED)

    @on(ValidationStart)
    def begin_validation(self, run: Run, event: ValidationStart) -> None:
        """Fire the evaluator's `STARTED` and `EPOCH_STARTED`; its handlers may ask where the trainer is."""
        place.go_to(self._trainer, run)
        place.begin_evaluation(self._evaluator, run)
        self._evaluator.fire(Events.STARTED)
        self._evaluator.state.epoch = 1
        self._evaluator.fire(Events.EPOCH_STARTED)

    @on(ValidationBatchStart, lane=Lane.TRANSFORM)
    def begin_validation_batch(self, run: Run, event: ValidationBatchStart) -> None:
        """Fire the evaluator's `GET_BATCH_COMPLETED` and `ITERATION_STARTED`."""
        _begin_batch(self._evaluator, run)

    @on(ValidationBatchEnd)
    def end_validation_batch(self, run: Run, event: ValidationBatchEnd) -> None:
        """Fire the evaluator's `ITERATION_COMPLETED`."""
        if ValidationBatchStart in self.ignores:
            self._evaluator.state.iteration += 1
        _end_batch(self._evaluator, run, self._outputs.get("validation", _outputs))
        self._evaluator.state.output = None

    @on(ValidationEnd, lane=Lane.MEASURE)
    def measure(self, run: Run, event: ValidationEnd) -> None:
        """Fire the evaluator's `EPOCH_COMPLETED`, and take the metrics of Ignite that it computes."""
        place.take_metrics(self._evaluator, event.metrics)
        place.take_time(self._evaluator, Events.EPOCH_COMPLETED)
        self._evaluator.fire(Events.EPOCH_COMPLETED)
        place.give_metrics(self._evaluator, event.metrics)

    @on(ValidationEnd)
    def end_validation(self, run: Run, event: ValidationEnd) -> None:
        """Fire the evaluator's `COMPLETED`."""
        place.take_metrics(self._evaluator, event.metrics)  # what other plugins have added
        place.take_time(self._evaluator, Events.COMPLETED)
        self._evaluator.fire(Events.COMPLETED)

    @on(ValidationCut)
    def leave_validation(self, run: Run, event: ValidationCut) -> None:
        """Fire the evaluator's `TERMINATE`."""
        self._evaluator.fire(Events.TERMINATE)

    @on(RunFailed)
    def fail(self, run: Run, event: RunFailed) -> None:
        """Fire `EXCEPTION_RAISED`; the error fails the run whatever they do, so to raise it again changes nothing."""
        if self._trainer.state.iteration < run.progress.batches:  # else it may be in a batch
            place.go_to(self._trainer, run)
        try:
            self._trainer.fire(Events.EXCEPTION_RAISED, event.error)
        except BaseException as error:
            if error is not event.error:
                raise

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the handlers, and of `engine.state` what the engines are to keep."""
        return {
            "handlers": self._own_states.state_dict(self._trainer.run_in_hand),
            "engines": [_user_values(engine) for engine in (self._trainer, self._evaluator)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it."""
        if not state:
            self._own_states.reset()
            return
        self._own_states.load_state_dict(state["handlers"])
        for engine, values in zip((self._trainer, self._evaluator), state["engines"], strict=True):
            vars(engine.state).update(values)

    def close(self) -> None:
        """Let the run go."""
        for engine in (self._trainer, self._evaluator):
            place.leave(engine)


def _begin_batch(engine: RunEngine, run: Run) -> None:
    state = engine.state
    state.output, state.batch = None, place.batch_of(run)
    engine.fire(Events.GET_BATCH_COMPLETED)
    state.iteration += 1
    engine.fire(Events.ITERATION_STARTED)
    if not run.report.is_replay:
        run.batch = state.batch
    state.batch = None


def _end_batch(engine: RunEngine, run: Run, output: Callable[[Run], Any]) -> None:
    state = engine.state
    state.batch, state.output = place.batch_of(run), output(run)
    engine.fire(Events.ITERATION_COMPLETED)
    state.batch = None


def _loss(run: Run) -> Any:
    return None if run.loss is None else run.loss.detach()


def _outputs(run: Run) -> Any:
    return run.outputs


def _user_values(engine: RunEngine) -> dict[str, Any]:
    return {name: getattr(engine.state, name) for name in engine.state_dict_user_keys if hasattr(engine.state, name)}
