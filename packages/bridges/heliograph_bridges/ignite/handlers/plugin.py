"""The plugin for handlers of PyTorch-Ignite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heliograph import Lane, Plugin, Run, on
from heliograph import events as ev
from heliograph.plugins import snake_case
from ignite.engine import Events
from ignite.handlers import Timer
from ignite.handlers.base_logger import BaseHandler, BaseLogger

from ...own_states import OwnStates
from .engine import RunEngine

LOOKS_ONLY = (BaseHandler, BaseLogger, Timer)
BATCH = (Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED)
# Heliograph events that only some Ignite events need.
OF_TRAINER: Mapping[type[ev.Event], tuple[Events, ...]] = {
    ev.EpochStart: (Events.EPOCH_STARTED,),
    ev.BatchStart: BATCH,
    ev.BatchEnd: (Events.ITERATION_COMPLETED,),
    ev.EpochEnd: (Events.EPOCH_COMPLETED, Events.TERMINATE_SINGLE_EPOCH),
    ev.TrainEnd: (Events.COMPLETED, Events.TERMINATE),
    ev.RunFailed: (Events.EXCEPTION_RAISED,),
}
OF_EVALUATOR: Mapping[type[ev.Event], tuple[Events, ...]] = {
    ev.ValidationStart: tuple(Events),
    ev.ValidationBatchStart: BATCH,
    ev.ValidationBatchEnd: (Events.ITERATION_COMPLETED,),
    ev.ValidationEnd: (Events.EPOCH_COMPLETED, Events.COMPLETED),
    ev.ValidationCut: (Events.TERMINATE,),
}


class IgnitePlugin(Plugin):
    """Handlers of PyTorch-Ignite; created by `from_ignite`.

    Args:
        name: the name of the handler; the plugin's name is its snake case.
        trainer: the training engine, with its handlers.
        evaluator: the validation engine.
        phase: the phase of `output`.
        output: makes `state.output` from the run; None for the default.
    """

    rehearses = False
    asks = ("stop",)

    def __init__(
        self, name: str, trainer: RunEngine, evaluator: RunEngine, phase: str, output: Callable[[Run], Any] | None
    ) -> None:
        self.name = snake_case(name)
        self._trainer, self._evaluator = trainer, evaluator
        self._outputs = {phase: output} if output is not None else {}
        handlers = [*trainer.handlers, *evaluator.handlers]
        self._own_states = OwnStates(handlers, "add state_dict and load_state_dict")
        vars(self).update(self._own_states.options)  # a resume compares the plugin's attributes
        self.affects_training = not all(isinstance(handler, LOOKS_ONLY) for handler in handlers)
        self.ignores = tuple(
            event
            for engine, table in ((trainer, OF_TRAINER), (evaluator, OF_EVALUATOR))
            for event, theirs in table.items()
            if not engine.listens_to(*theirs)
        )
        trainer.seal(self._own_states)
        evaluator.seal(self._own_states)

    def reset(self) -> None:
        self._own_states.reset()
        self._trainer.begin()
        self._evaluator.begin()

    def describe(self, run: Run) -> str:
        return f"calls handlers of Ignite: {', '.join(self._own_states.names)}"

    @on(ev.TrainStart)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        self._trainer.begin_training(run)
        self._trainer.fire(Events.STARTED)

    @on(ev.CheckpointLoaded)
    def resume(self, run: Run, event: ev.CheckpointLoaded) -> None:
        self._trainer.go_to(run)
        self._own_states.resume(run, affects_training=self.affects_training)

    @on(ev.EpochStart)
    def begin_epoch(self, run: Run, event: ev.EpochStart) -> None:
        self._trainer.begin_epoch(run)
        if not event.resumed:
            self._trainer.fire(Events.EPOCH_STARTED)

    @on(ev.BatchStart, lane=Lane.TRANSFORM)
    def begin_batch(self, run: Run, event: ev.BatchStart) -> None:
        self._trainer.begin_epoch(run)
        _begin_batch(self._trainer, run)

    @on(ev.BatchEnd)
    def end_batch(self, run: Run, event: ev.BatchEnd) -> None:
        self._trainer.go_to(run)
        _end_batch(self._trainer, run, self._outputs.get("train", _loss))
        if "train" in self._outputs:  # the output may be large
            self._trainer.state.output = None

    @on(ev.EpochEnd)
    def end_epoch(self, run: Run, event: ev.EpochEnd) -> None:
        engine = self._trainer
        engine.go_to(run)
        ended, engine.should_terminate_single_epoch = engine.should_terminate_single_epoch, False
        if ended:
            engine.fire(Events.TERMINATE_SINGLE_EPOCH, iter_counter=engine.state.iteration)
        if ended != "skip_epoch_completed":
            engine.fire(Events.EPOCH_COMPLETED)
        engine.state.output = None

    @on(ev.Log, optional=True)
    def log(self, run: Run, event: ev.Log) -> None:
        self._trainer.take_metrics(event.metrics)

    @on(ev.TrainEnd)
    def end_training(self, run: Run, event: ev.TrainEnd) -> None:
        engine = self._trainer
        engine.go_to(run)
        if run.control.should_stop:
            engine.fire(Events.TERMINATE)
        if engine.should_terminate != "skip_completed":
            engine.fire(Events.COMPLETED)

    @on(ev.ValidationStart)
    def begin_validation(self, run: Run, event: ev.ValidationStart) -> None:
        self._trainer.go_to(run)
        self._evaluator.begin_evaluation(run)
        self._evaluator.fire(Events.STARTED)
        self._evaluator.state.epoch = 1
        self._evaluator.fire(Events.EPOCH_STARTED)

    @on(ev.ValidationBatchStart, lane=Lane.TRANSFORM)
    def begin_validation_batch(self, run: Run, event: ev.ValidationBatchStart) -> None:
        _begin_batch(self._evaluator, run)

    @on(ev.ValidationBatchEnd)
    def end_validation_batch(self, run: Run, event: ev.ValidationBatchEnd) -> None:
        if ev.ValidationBatchStart in self.ignores:
            self._evaluator.state.iteration += 1
        _end_batch(self._evaluator, run, self._outputs.get("validation", _outputs))
        self._evaluator.state.output = None

    @on(ev.ValidationEnd, lane=Lane.MEASURE)
    def measure(self, run: Run, event: ev.ValidationEnd) -> None:
        self._evaluator.take_metrics(event.metrics)
        self._evaluator.fire(Events.EPOCH_COMPLETED)
        self._evaluator.give_metrics(event.metrics)

    @on(ev.ValidationEnd)
    def end_validation(self, run: Run, event: ev.ValidationEnd) -> None:
        self._evaluator.take_metrics(event.metrics)  # other plugins may have added some
        self._evaluator.fire(Events.COMPLETED)

    @on(ev.ValidationCut)
    def leave_validation(self, run: Run, event: ev.ValidationCut) -> None:
        self._evaluator.fire(Events.TERMINATE)

    @on(ev.RunFailed)
    def fail(self, run: Run, event: ev.RunFailed) -> None:
        if self._trainer.state.iteration < run.progress.batches:  # otherwise the error may be within a batch
            self._trainer.go_to(run)
        try:
            self._trainer.fire(Events.EXCEPTION_RAISED, event.error)
        except BaseException as error:
            if error is not event.error:
                raise

    def state_dict(self) -> dict[str, Any]:
        return {
            "handlers": self._own_states.state_dict(self._trainer.run_in_hand),
            "engines": [_user_values(engine) for engine in (self._trainer, self._evaluator)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            self._own_states.reset()
            return
        self._own_states.load_state_dict(state["handlers"])
        for engine, values in zip((self._trainer, self._evaluator), state["engines"], strict=True):
            vars(engine.state).update(values)

    def close(self) -> None:
        for engine in (self._trainer, self._evaluator):
            engine.leave()


def _begin_batch(engine: RunEngine, run: Run) -> None:
    state = engine.state
    state.output, state.batch = None, run.batch
    engine.fire(Events.GET_BATCH_COMPLETED)
    state.iteration += 1
    engine.fire(Events.ITERATION_STARTED)
    run.batch = state.batch
    state.batch = None


def _end_batch(engine: RunEngine, run: Run, output: Callable[[Run], Any]) -> None:
    state = engine.state
    state.batch, state.output = run.batch, output(run)
    engine.fire(Events.ITERATION_COMPLETED)
    state.batch = None


def _loss(run: Run) -> Any:
    return None if run.loss is None else run.loss.detach()


def _outputs(run: Run) -> Any:
    return run.outputs


def _user_values(engine: RunEngine) -> dict[str, Any]:
    return {name: getattr(engine.state, name) for name in engine.state_dict_user_keys if hasattr(engine.state, name)}
