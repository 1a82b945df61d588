"""The event of a rule that acted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heliograph import LastBoundary, Run, SavePoint
from heliograph.events import Event
from heliograph.spi import known_names

from .errors import RuleError, RuleNameError

LONGEST_REASON = 200


@dataclass(frozen=True)
class RuleFiring:
    """A rule that was true, its patience being over.

    Attributes:
        controller: the name of its controller.
        trigger: the trigger, as it is written in the file.
        event: what happened.
        rule: the rule's text.
        metrics: the values of the metrics by their names, None while unavailable.
        is_final: whether the newest save was requested after the training's end; see `Ending`.
    """

    controller: str
    trigger: str
    event: Event
    rule: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_final: bool = False

    @property
    def reason(self) -> str:
        """Why the rule's operations ask, in at most 200 characters."""
        text = f"rule {self.controller!r} on {self.trigger}: {' '.join(self.rule.split())}"
        return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


class Ending:
    """Knows whether the newest save is a final one, from the events in `EVENTS`: its file may be there much later.

    `SavePoint` must be handled in a lane before `PERSIST`, in which the save may be done and its event emitted.

    Attributes:
        is_final: whether it was requested after the training's end.
    """

    EVENTS: tuple[type[Event], ...] = (SavePoint, LastBoundary)

    def __init__(self) -> None:
        self.is_final = self._is_over = False

    def handle(self, event: Event) -> None:
        """Note an event; only those in `EVENTS` matter."""
        if isinstance(event, LastBoundary):
            self._is_over = True
        elif isinstance(event, SavePoint):
            self.is_final = self._is_over


class RuleMetric:
    """A value that rules can read by a name. Subclass it, and say so with `register_metric`.

    One is made for every run, so it need not forget anything.

    Args:
        name: what rules call it.
        **arguments: a subclass takes what is under `arguments:` in the file as keywords.

    Attributes:
        events: the events at which it is computed; what comes of it stays the value until the next of them.
        when_read: whether it is also computed at any other event, just before a rule or an operation that reads it, so
            that it is never stale. At one event it is computed once.
        parts: for an event that renews a part of the value only, what rules that read this part have in their text; a
            rule at an epoch's end waits for what is due there, such as a validation, and renews what it reads.
    """

    events: tuple[type[Event], ...] = ()
    when_read: bool = False
    parts: Mapping[type[Event], tuple[str, ...]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def validate(self) -> bool:
        """Return whether the metric can be used as it is configured."""
        return True

    def compute(self, run: Run, event: Event) -> Any:
        """Return the value, of plain types; None while there is none."""
        raise NotImplementedError(f"{type(self).__name__} has no compute(self, run, event).")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


Action = Callable[[Run, RuleFiring], None]


class RuleOperation:
    """What rules can do: every method named `should_` and something is an action. See `register_operation`.

    One is made for every run. An action takes `(run, firing)`.

    Args:
        name: what controllers call it, as in `name.should_act`.
        **arguments: a subclass takes what is under `arguments:` in the file as keywords.

    Attributes:
        shared: whether its actions change the training itself: of several ranks all must then find the rule true.
        only_on: for an action that makes sense at certain events only, these, by the action's name.
        asks: what an action asks the loop for, by the action's name; see `Plugin.asks`.
        answers: the events of what an action asks for, by the action's name: at these it does nothing, as it is done.
        reads: the metrics and fields that its actions read.
    """

    shared: bool = False
    only_on: Mapping[str, tuple[type[Event], ...]] = {}
    asks: Mapping[str, str] = {}
    answers: Mapping[str, tuple[type[Event], ...]] = {}
    reads: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.name = name

    def actions(self) -> dict[str, Action]:
        """Return the actions by their names, such as `should_save`."""
        names = [each for each in dir(type(self)) if each.startswith("should_") and each != "should_"]
        static = {each: inspect.getattr_static(type(self), each) for each in names}
        return {name: getattr(self, name) for name, kind in static.items() if inspect.isfunction(kind)}

    def bind(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Find what it needs by name, among the functions that its controller was given; called once, when it is made.

        Raises:
            RuleError: it is not there.
        """

    def check(self, action: str, names: Iterable[str], trigger: str, kind: type[Event]) -> None:
        """Check that an action makes sense where a controller wants it.

        Args:
            action: its name.
            names: the metrics and fields that there are; see `fields.names_at`.
            trigger: when it is to act, as written in the file.
            kind: the event that this is.

        Raises:
            RuleNameError: the operation reads something that there is not.
            RuleError: the action has no effect at this event.
        """
        for unknown in sorted(self.reads.difference(names)):
            raise RuleNameError(f"Operation {self.name!r} reads {unknown!r}.{known_names(unknown, names)}")
        kinds = self.only_on.get(action)
        if kinds is not None and not issubclass(kind, kinds):
            fitting = " or ".join(each.__name__ for each in kinds)
            raise RuleError(
                f"{self.name}.{action} has an effect at {fitting} only, and the trigger {trigger!r} is {kind.__name__}."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


class RuleFired(Event):
    """The rule of `controller` was true on `trigger`, and it acted.

    `operations` are those that ran, without one that failed and those after it; `metrics` are those that it reads.
    """

    controller: str
    trigger: str
    rule: str
    operations: tuple[str, ...]
    metrics: dict[str, Any]
