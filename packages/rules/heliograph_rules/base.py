"""Base classes of rule metrics and operations, the context of a firing, and the event `RuleFired`."""

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
    """A rule that was true and whose patience was used up.

    Attributes:
        controller: the name of the controller.
        trigger: the trigger as written in the file.
        event: the event that triggered the rule.
        rule: the text of the rule.
        metrics: the values of the metrics by name; None if a metric has no value yet.
        is_final: whether the newest save was requested after the end of the training.
    """

    controller: str
    trigger: str
    event: Event
    rule: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_final: bool = False

    @property
    def reason(self) -> str:
        """The reason that the rule's requests record, at most 200 characters."""
        text = f"rule {self.controller!r} on {self.trigger}: {' '.join(self.rule.split())}"
        return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


class EndTracker:
    """Tracks whether the newest save was requested after the end of the training.

    The checkpoint file may appear much later than its request. Handle `SavePoint` in a lane before `PERSIST`: a save
    may be finished, and its event emitted, in that lane.
    """

    EVENTS: tuple[type[Event], ...] = (SavePoint, LastBoundary)

    def __init__(self) -> None:
        self.is_final = self._is_over = False

    def handle(self, event: Event) -> None:
        if isinstance(event, LastBoundary):
            self._is_over = True
        elif isinstance(event, SavePoint):
            self.is_final = self._is_over


class RuleMetric:
    """Base class of a value that rules read by name.

    Subclass it and register the subclass with `register_metric`. Each run creates its own metric, so a metric does not
    need to reset anything.

    Args:
        name: the name that rules use.
        **arguments: a subclass takes the entries under `arguments:` in the file as keywords.

    Attributes:
        events: the events at which the metric is computed; the value stays until the next one.
        when_read: whether the metric is also computed at every other event, directly before a rule or an operation
            reads it, so that it is never stale. It is computed at most once per event.
        parts: for an event that renews only a part of the value, the words that a rule contains if it reads that part.
            A rule at the end of an epoch waits for scheduled events that renew a part which it reads, for example a
            validation.
    """

    events: tuple[type[Event], ...] = ()
    when_read: bool = False
    parts: Mapping[type[Event], tuple[str, ...]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def validate(self) -> bool:
        """Return whether the metric can be used with its arguments."""
        return True

    def compute(self, run: Run, event: Event) -> Any:
        """Return the value as plain types, or None if there is none yet."""
        raise NotImplementedError(f"{type(self).__name__} has no compute(self, run, event).")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""


class NewestMetric(RuleMetric):
    """A metric whose value stays until `measure` returns a new one at one of its events."""

    when_read = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.newest: Any = None

    def measure(self, run: Run, event: Any) -> Any:
        raise NotImplementedError

    def compute(self, run: Run, event: Event) -> Any:
        if isinstance(event, self.events) and (new := self.measure(run, event)) is not None:
            self.newest = new
        return self.newest

    def state_dict(self) -> dict[str, Any]:
        return {"newest": self.newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.newest = state["newest"]


Action = Callable[[Run, RuleFiring], None]


class RuleOperation:
    """Base class of what rules can do: each method named `should_...` is an action.

    Subclass it and register the subclass with `register_operation`. Each run creates its own operation. An action takes
    `(run, firing)`.

    Args:
        name: the name that controllers use, as in `name.should_act`.
        **arguments: a subclass takes the entries under `arguments:` in the file as keywords.

    Attributes:
        shared: whether the actions change the training itself: the rule must then be true on all ranks.
        only_on: the events at which an action has an effect, by the name of the action; by default all events.
        asks: the request that an action makes, by the name of the action; see `Plugin.asks`.
        answers: the events that serve the request of an action, by the name of the action. The action does nothing at
            these events.
        reads: the metrics and fields that the actions read.
    """

    shared: bool = False
    only_on: Mapping[str, tuple[type[Event], ...]] = {}
    asks: Mapping[str, str] = {}
    answers: Mapping[str, tuple[type[Event], ...]] = {}
    reads: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.name = name

    def actions(self) -> dict[str, Action]:
        """Return the actions by name, for example `should_save`."""
        names = [name for name in dir(type(self)) if name.startswith("should_") and name != "should_"]
        return {
            name: getattr(self, name) for name in names if inspect.isfunction(inspect.getattr_static(type(self), name))
        }

    def bind(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Look up what the operation needs by name; called once, after its creation.

        Args:
            functions: the functions of the controller, by name.

        Raises:
            RuleError: a name is unknown.
        """

    def check(self, action: str, names: Iterable[str], trigger: str, kind: type[Event]) -> None:
        """Check that an action can be used at a trigger.

        Args:
            action: the name of the action.
            names: the available metrics and fields.
            trigger: the trigger as written in the file.
            kind: the event of the trigger.

        Raises:
            RuleNameError: the operation reads an unknown metric or field.
            RuleError: the action has no effect at this event.
        """
        for unknown in sorted(self.reads.difference(names)):
            raise RuleNameError(f"Operation {self.name!r} reads {unknown!r}.{known_names(unknown, names)}")
        kinds = self.only_on.get(action)
        if kinds is not None and not issubclass(kind, kinds):
            allowed = " or ".join(event.__name__ for event in kinds)
            raise RuleError(
                f"{self.name}.{action} has an effect only at {allowed}, but the trigger {trigger!r} is {kind.__name__}."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""


class RuleFired(Event):
    """Emitted after the rule of `controller` was true on `trigger` and acted.

    `operations` are the operations that succeeded: if one fails, it and the rest are missing. `metrics` are the values
    that the rule read.
    """

    controller: str
    trigger: str
    rule: str
    operations: tuple[str, ...]
    metrics: dict[str, Any]
