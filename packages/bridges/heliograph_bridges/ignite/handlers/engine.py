"""An `Engine` of Ignite that a Heliograph training drives: it holds handlers and fires their events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from heliograph import Run
from ignite.engine import Engine, Events, State
from ignite.engine.events import EventsList
from ignite.metrics import Metric
from torch import nn
from torch.optim import Optimizer

from ...own_states import OwnStates
from .refusals import check_event, check_handler

SAVED_BY_THE_RUN = (Engine, nn.Module, Optimizer)
DRIVEN = "This engine is driven by a Heliograph training"


class Moment:
    """Which event of which engine was fired last: the trainer and the evaluator share one."""

    text = "no event"


class RunEngine(Engine):
    """The trainer or the evaluator that handlers of Ignite are given.

    Args:
        role: `trainer` or `evaluator`.
        moment: what both share.

    Attributes:
        role: the same.
        run_in_hand: the run that drives it; None outside of one.
        handlers: the objects and functions that were added, each once, but for those whose state the run saves.
        started: when the run began, by the clock `perf_counter`.
        epoch_started: when the epoch began.
    """

    def __init__(self, role: str, moment: Moment) -> None:
        self.role, self.handlers, self._moment = role, list[Any](), moment
        self.run_in_hand: Run | None = None
        self._is_open = True
        super().__init__(_no_step)
        self.begin()

    def seal(self, own_states: OwnStates) -> None:
        """Take no handlers of other events from now on: nothing would listen to these.

        Args:
            own_states: where a stop that a handler asks for is noted.
        """
        self._is_open, self._own_states = False, own_states

    @property
    def has_handlers(self) -> bool:
        """Whether anything was added."""
        return any(self._event_handlers.values())

    def listens_to(self, *events: Any) -> bool:
        """Return whether any of these events has handlers."""
        return any(self._event_handlers.get(event) for event in events)

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a handler.

        Raises:
            ValueError: it, or its event, is one that a training here cannot serve.
            RuntimeError: the event had no handler when the plugin was made, so that nothing listens to it.
        """
        for event in event_name if isinstance(event_name, EventsList) else (event_name,):
            check_event(event)
            if not (self._is_open or self.listens_to(event)):
                raise RuntimeError(
                    f"A handler of {event} was added to the {self.role} when the training had its plugins already, and "
                    f"nothing listens to this event: add it in the function that from_ignite is given."
                )
        self.keep(_holder(handler))
        return super().add_event_handler(event_name, handler, *args, **kwargs)

    def keep(self, handler: Any) -> None:
        """Keep an object among the handlers, whose states are saved; ValueError where it cannot be served.

        The state of what is trained is saved by the run, and a metric of the evaluator begins anew each time.
        """
        check_handler(handler)
        kinds = (*SAVED_BY_THE_RUN, Metric) if self.role == "evaluator" else SAVED_BY_THE_RUN
        if not isinstance(handler, kinds) and not any(handler is each for each in self.handlers):
            self.handlers.append(handler)

    def begin(self) -> None:
        """Forget the former training, but for what handlers have put into the state."""
        self.should_terminate = self.should_terminate_single_epoch = False
        self.last_event_name = None
        self._moment.text = Moment.text
        self.started = self.epoch_started = 0.0
        vars(self.state).update(vars(State()))

    def terminate(self, skip_completed: bool = False) -> None:
        """End the training at the next boundary; of the evaluator, cut the validation short."""
        run, reason = self._running(), f"{self.role}.terminate() at {self._moment.text}"
        self.should_terminate = "skip_completed" if skip_completed else True
        if self.role == "evaluator":
            run.control.cut_validation(reason)
            return
        self._own_states.stop_reason = reason
        run.control.stop(reason)

    def terminate_epoch(self, skip_epoch_completed: bool = False) -> None:
        """End the epoch at the next boundary.

        Raises:
            RuntimeError: this is the evaluator, which has no epochs, or nothing runs.
        """
        run = self._running()
        if self.role == "evaluator":
            raise RuntimeError("A validation has no epochs to end: evaluator.terminate() cuts it short.")
        self.should_terminate_single_epoch = "skip_epoch_completed" if skip_epoch_completed else True
        run.control.end_epoch(f"trainer.terminate_epoch() at {self._moment.text}")

    def interrupt(self) -> NoReturn:
        """Raise RuntimeError: a training here is not interrupted."""
        raise RuntimeError(f"{DRIVEN}, which is not interrupted and run again: save and stop, and resume it.")

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError: the training runs."""
        raise RuntimeError(f"{DRIVEN}, and is not run by itself: call fit, or control.request_validation(reason).")

    def set_data(self, data: Any) -> NoReturn:
        """Raise RuntimeError: the data is that of the training."""
        raise RuntimeError(f"{DRIVEN}, whose data is what fit was given.")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise RuntimeError: the checkpoint of the training holds where it is."""
        raise RuntimeError(f"{DRIVEN}, and is where that is: resume the training.")

    def fire(self, event: Events, *args: Any, **kwargs: Any) -> None:
        """Call the handlers of an event.

        Args:
            event: the event.
            args: what its handlers are given besides the engine.
            kwargs: the same, by name.
        """
        if self._event_handlers.get(event):
            self._moment.text = f"{event} of the {self.role}"
            self._fire_event(event, *args, **kwargs)

    def _running(self) -> Run:
        if self.run_in_hand is None:
            raise RuntimeError(f"{DRIVEN}, and none runs now.")
        return self.run_in_hand


def _no_step(engine: Engine, batch: Any) -> None:
    """Do nothing: the training makes the step."""


def _holder(handler: Any) -> Any:
    """Return the object whose method a handler is, else the handler."""
    while True:
        if isinstance(handler, partial):
            handler = handler.func
        elif hasattr(handler, "__wrapped__"):
            handler = handler.__wrapped__
        else:
            return getattr(handler, "__self__", handler)
