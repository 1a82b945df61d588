"""A callback with its run: set up when its first event comes, left when the run is closed."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from heliograph import Plugin, Run
from heliograph.plugins import snake_case

from .flavour import Flavour
from .hooks import NEVER, has, unused_events
from .refused import check_averaging
from .work import Work


class BridgedCallback(Plugin):
    """What calls the hooks of a callback, without the events that do it.

    Args:
        callback: the callback.
        flavour: the package that it is of.
    """

    asks = ("stop",)

    def __init__(self, callback: Any, flavour: Flavour) -> None:
        self._callback, self._flavour = callback, flavour
        self.name = f"lightning_{snake_case(type(callback).__name__)}"
        self.ignores = unused_events(callback, flavour)
        self._work: Work | None = None
        self._waiting: Mapping[str, Any] = {}  # a state for when it is set up
        self._is_used = self._is_closed = self._has_failed = False
        self._is_epoch_end_due = False  # an epoch has ended for which `on_train_epoch_end` was not called yet

    def reset(self) -> None:
        """Refuse a second training.

        Raises:
            RuntimeError: the callback has been in a training, of which it cannot be made to forget what it counted.
        """
        if self._is_used:
            kind = type(self._callback).__name__
            raise RuntimeError(
                f"{self.name} has been in a training, and callbacks of Lightning have no way to forget it: give this "
                f"training a new one, from_lightning({kind}(...)), and unregister {self.name!r}."
            )
        self._waiting = {}

    def open(self, run: Run) -> Work:
        """Set the callback up, and return the work of its run."""
        self._work = work = Work.of(run, self._flavour)
        self._has_failed = self._is_closed = False
        work.attach(self._callback)
        if work.trains:
            self._is_used = True
            check_averaging(self._callback, self._flavour, run)
            if never := [hook for hook in NEVER if has(self._callback, self._flavour, hook)]:
                run.warn(
                    f"{' and '.join(never)} of {type(self._callback).__name__} will not be called: there is no sanity "
                    f"check here. ValidationSchedule(..., at_start=True) validates before the first step."
                )
        self._callback.setup(work.trainer, work.module, work.function)
        return work

    def close(self) -> None:
        """Leave the run; if it continues, because this is disabled, keep the state for when this is enabled again."""
        if self._work is not None:
            self._waiting = {} if self._is_closed else deepcopy(self.state_dict())
            self._work.detach(self._callback)
            self._work = None
