"""An Ignite `Engine` that a Heliograph training drives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, NoReturn

from heliograph import Run
from ignite.engine import Engine, Events, State
from ignite.engine.events import EventsList
from ignite.metrics import Metric
from torch import nn
from torch.optim import Optimizer

from ...own_states import OwnStates, refuse_replay

EVENTS = {
    "GET_BATCH_STARTED": "no event precedes the loading of a batch: use GET_BATCH_COMPLETED or ITERATION_STARTED",
    "DATALOADER_STOP_ITERATION": "an epoch ends with its loader: use EPOCH_COMPLETED",
    "INTERRUPT": "a training cannot be interrupted: it saves, stops and is resumed",
}
HANDLERS = {
    "Checkpoint": "saves the state of an Ignite engine: add Checkpoint('runs/x', every=Every(epochs=1)) to the plugins",
    "FastaiLRFinder": "runs the trainer itself: call heliograph.tuning.find_learning_rate(trainer, task, data)",
}

SAVED_BY_THE_RUN = (Engine, nn.Module, Optimizer)
DRIVEN = "This engine is driven by a Heliograph training"
PHASES = {"trainer": "train/", "evaluator": "validation/"}


def check_event(event: Any) -> None:
    if (reason := EVENTS.get(getattr(event, "name", ""))) is not None:
        raise ValueError(f"Events.{event.name} is not fired in a Heliograph training: {reason}.")


def check_handler(handler: Any) -> None:
    for kind in type(handler).__mro__:
        if kind.__name__ in HANDLERS and kind.__module__.startswith("ignite."):
            raise ValueError(
                f"{type(handler).__name__} cannot run in a Heliograph training: it {HANDLERS[kind.__name__]}."
            )


class LastEvent:
    """The last fired event, shared by the trainer and the evaluator; used in reasons of requests."""

    text = "no event"


class RunEngine(Engine):
    """The trainer or the evaluator that handlers of Ignite receive.

    Args:
        role: `trainer` or `evaluator`.
        moment: the last event of both.

    Attributes:
        role: `trainer` or `evaluator`.
        run_in_hand: the current run, if any.
        handlers: the distinct handlers whose states the plugin saves.
    """

    def __init__(self, role: str, moment: LastEvent) -> None:
        self.role, self.handlers, self._moment = role, list[Any](), moment
        self.run_in_hand: Run | None = None
        self._is_open = True
        super().__init__(_no_step)
        self.begin()

    def seal(self, own_states: OwnStates) -> None:
        """Allow no handlers of further events: the plugin would not listen to them."""
        self._is_open, self._own_states = False, own_states

    @property
    def has_handlers(self) -> bool:
        return any(self._event_handlers.values())

    def listens_to(self, *events: Any) -> bool:
        return any(self._event_handlers.get(event) for event in events)

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for event in event_name if isinstance(event_name, EventsList) else (event_name,):
            check_event(event)
            if not (self._is_open or self.listens_to(event)):
                raise RuntimeError(
                    f"A handler of {event} was added to the {self.role} after from_ignite had returned, but the plugin "
                    f"does not listen to this event: add it in the function that you pass to from_ignite."
                )
        self.keep(_holder(handler))
        return super().add_event_handler(event_name, handler, *args, **kwargs)

    def keep(self, handler: Any) -> None:
        """Add an object to the saved handlers.

        The run saves modules and optimizers, and a metric of the evaluator is reset each time.
        """
        check_handler(handler)
        kinds = (*SAVED_BY_THE_RUN, Metric) if self.role == "evaluator" else SAVED_BY_THE_RUN
        if not isinstance(handler, kinds) and not any(handler is known_handler for known_handler in self.handlers):
            self.handlers.append(handler)

    def begin(self) -> None:
        self.should_terminate = self.should_terminate_single_epoch = False
        self.last_event_name = None
        self._moment.text = LastEvent.text
        vars(self.state).update(vars(State()))

    def terminate(self, skip_completed: bool = False) -> None:
        run, reason = self._running(), f"{self.role}.terminate() at {self._moment.text}"
        self.should_terminate = "skip_completed" if skip_completed else True
        if self.role == "evaluator":
            run.control.cut_validation(reason)
            return
        self._own_states.stop_reason = reason
        run.control.stop(reason)

    def terminate_epoch(self, skip_epoch_completed: bool = False) -> None:
        run = self._running()
        if self.role == "evaluator":
            raise RuntimeError("A validation has no epochs to end: evaluator.terminate() cuts it short.")
        self.should_terminate_single_epoch = "skip_epoch_completed" if skip_epoch_completed else True
        run.control.end_epoch(f"trainer.terminate_epoch() at {self._moment.text}")

    def interrupt(self) -> NoReturn:
        raise RuntimeError(f"{DRIVEN}, which cannot be interrupted and run again: save, stop and resume it.")

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{DRIVEN} and cannot run alone: call fit, or control.request_validation(reason).")

    def set_data(self, data: Any) -> NoReturn:
        raise RuntimeError(f"{DRIVEN}: pass the data to fit.")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        raise RuntimeError(f"{DRIVEN}: resume the training instead.")

    def fire(self, event: Events, *args: Any, **kwargs: Any) -> None:
        if self._event_handlers.get(event):
            self._moment.text = f"{event} of the {self.role}"
            self._fire_event(event, *args, **kwargs)

    def begin_training(self, run: Run) -> None:
        refuse_replay(run)
        self.run_in_hand, state = run, self.state
        state.max_epochs = None if run.length.max_epochs is None else ceil(run.length.max_epochs)
        state.max_iters = None
        state.epoch_length, state.metrics = run.length.batches_per_epoch, {}
        state.dataloader, state.seed = run.data.train_loader, run.data.seed
        self.go_to(run)

    def begin_evaluation(self, run: Run) -> None:
        self.run_in_hand, state = run, self.state
        state.epoch, state.iteration, state.max_epochs, state.max_iters = 0, 0, 1, None
        state.epoch_length, state.metrics, state.output = run.data.evaluation_batches, {}, None
        self.should_terminate = False

    def go_to(self, run: Run) -> None:
        progress = run.progress
        self.state.iteration = progress.batches
        self.state.epoch = progress.epoch + (progress.batch > 0)

    def begin_epoch(self, run: Run) -> None:
        self.state.iteration, self.state.epoch = run.progress.batches, run.progress.epoch + 1

    def leave(self) -> None:
        self.run_in_hand, state = None, self.state
        state.dataloader = state.batch = state.output = None

    def take_metrics(self, metrics: dict[str, float]) -> None:
        prefix = PHASES[self.role]
        for name, value in metrics.items():
            if name.startswith(prefix):
                self.state.metrics[name.removeprefix(prefix)] = value

    def give_metrics(self, metrics: dict[str, float]) -> None:
        prefix = PHASES[self.role]
        for name, value in self.state.metrics.items():
            if isinstance(value, int | float):
                metrics.setdefault(prefix + name, float(value))

    def _running(self) -> Run:
        if self.run_in_hand is None:
            raise RuntimeError(f"{DRIVEN}, but none is running.")
        return self.run_in_hand


def _no_step(engine: Engine, batch: Any) -> None: ...


def _holder(handler: Any) -> Any:
    while True:
        if isinstance(handler, partial):
            handler = handler.func
        elif hasattr(handler, "__wrapped__"):
            handler = handler.__wrapped__
        else:
            return getattr(handler, "__self__", handler)
