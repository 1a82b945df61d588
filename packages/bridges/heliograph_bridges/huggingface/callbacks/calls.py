"""Calls of a callback's methods, with what the Trainer gives them, and what the calls change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from heliograph import Run
from heliograph.spi import require

from ...own_states import OwnStates
from .arguments import last_flags
from .flags import FLAGS, LATE, changes, show

METHODS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_prediction_step",
)


class Caller:
    """Calls the methods that a callback has, and makes requests of the flags that it sets.

    Args:
        callback: the callback.
        base: `transformers.TrainerCallback`, whose methods do nothing.
        own_states: where a stop that the callback asks for is noted.

    Attributes:
        kind: the name of its class.
        methods: those that it has, by name.
        called: the names of those that were called in this training.
        run: the run that it is called in.
        args: what it is given as such.
        keywords: what it is given by name.
        late: the flags that are set and are no requests, with the number of micro-batches at that time.
        logged_at: the step of the last log.
    """

    def __init__(self, callback: Any, base: type, own_states: OwnStates) -> None:
        kind, self._own_states = type(callback), own_states
        self.kind = kind.__name__
        self.methods = {
            name: getattr(callback, name)
            for name in METHODS
            if getattr(kind, name) is not getattr(base, name) or name in vars(callback)
        }
        self._control = require("transformers", "from_huggingface", extra="transformers").TrainerControl()
        self.args: Any = None
        self.keywords: dict[str, Any] = {}
        self.begin()
        self.leave()

    def begin(self) -> None:
        """Forget the former training."""
        self.called: set[str] = set()
        self.late: dict[str, int] = {}
        self.logged_at = 0
        self._last: set[str] | None = None  # what the schedules do at the end and have not done yet

    def meet(self, run: Run, args: Any, keywords: Mapping[str, Any]) -> None:
        """Take what the callback is given in a run."""
        self.run: Run | None = run
        self.args, self.keywords = args, dict(keywords)

    def leave(self) -> None:
        """Let the run go."""
        self.run, self.args, self.keywords = None, None, {}

    def has(self, *names: str) -> bool:
        """Return whether the callback has any of these methods."""
        return any(name in self.methods for name in names)

    def uncalled(self, names: Iterable[str]) -> list[str]:
        """Return those of these methods that the callback has and this training has not called."""
        return [name for name in names if name in self.methods and name not in self.called]

    def __call__(self, run: Run, name: str, state: Any, clears: tuple[str, ...] = (), **more: Any) -> None:
        """Call a method, if the callback has it.

        Args:
            run: the run.
            name: of the method.
            state: the `TrainerState`.
            clears: the flags that the Trainer clears before this method.
            more: further keywords.

        Raises:
            TypeError: the method returned something that is not a control.
        """
        is_over = 0 < state.max_steps <= state.global_step
        if is_over and self._last is None:
            self._last = last_flags(run)
        for cleared in clears if self.late or self._last else ():
            self.late.pop(cleared, None)
            (self._last or set()).discard(cleared)
        method = self.methods.get(name)
        if method is None:
            return
        self.called.add(name)
        control = self._control
        shown = show(control, run.control, self._set_here(run, name, is_over=is_over), clears)
        if shown["should_epoch_stop"]:  # which the Trainer shows until the next epoch
            self.late["should_epoch_stop"] = run.progress.batches
        returned = method(self.args, state, control, **self.keywords, **more)
        if returned is not None and returned is not control:
            if not isinstance(returned, type(control)):
                raise TypeError(
                    f"{self.kind}.{name} returned {returned!r}: a callback returns its control, or nothing."
                )
            self._control = control = returned
        late = LATE.get(name, ())
        if name == "on_epoch_end" and self.logged_at == run.progress.steps:
            late = ("should_log",)  # the Trainer logs a step once
        for flag, value in changes(control, shown):
            if flag.name not in late:
                self._apply(run, flag, name, value=value)
            self.late.pop(flag.name, None)
            if value and (flag.name in late or flag.verb == "end_epoch"):
                self.late[flag.name] = run.progress.batches

    def end_epoch(self, run: Run) -> None:
        """Request what was set too late at the last step of the epoch: the Trainer reads it at the end of the epoch."""
        done = {"log"} if self.logged_at == run.progress.steps else set()
        for flag in FLAGS[2:] if self.late else ():
            if self.late.get(flag.name) == run.progress.batches and flag.verb not in done:
                flag.ask(run.control, f"{flag.name} = True in {self.kind}")

    def _set_here(self, run: Run, name: str, *, is_over: bool) -> list[str]:
        names = [flag for flag, batches in self.late.items() if batches == run.progress.batches]
        if is_over:
            names += ["should_training_stop", *(self._last or ())]
        if name in LATE and run.phase == "validation" and run.optimizer is not None:
            names.append("should_evaluate")
        return names

    def _apply(self, run: Run, flag: Any, name: str, *, value: bool) -> None:
        reason = f"{flag.name} = {value} in {self.kind}.{name}"
        if value:
            flag.ask(run.control, reason)
        else:
            run.control.withdraw(flag.verb, reason)
        if flag.verb == "stop":
            self._own_states.stop_reason = reason if value else ""
