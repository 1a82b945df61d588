"""The saves that a `Checkpoint` asks for by itself: whenever a filter says so, and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ...events import Progress, Run
from ...plugins.filters import Filter
from ...plugins.recurrence import Recurrence


class SaveRequests:
    """Ask for saves, or for none.

    Args:
        every: the filter; None leaves it to other plugins.

    Raises:
        TypeError: it is not a filter.
    """

    def __init__(self, every: Filter | None) -> None:
        if not isinstance(every, Filter | None):
            raise TypeError(f"Checkpoint(every=...) takes a filter such as Every(epochs=1), got {every!r}.")
        self.every = deepcopy(every)
        self._recurrence = None if self.every is None else Recurrence(self.every)

    def begin(self, run: Run) -> None:
        """Forget the former run."""
        if self._recurrence is not None:
            self._recurrence.begin(run)

    def resume(self, run: Run) -> None:
        """Continue from what was saved."""
        if self._recurrence is not None:
            self._recurrence.resume(run, moment)

    def note(self, run: Run) -> None:
        """Remember that the state is saved, whoever asked for it."""
        if self._recurrence is not None:
            self._recurrence.last = moment(run.progress)

    def ask_when_due(self, run: Run) -> None:
        """Ask within an epoch, and at its end."""
        if self.every is not None and self.every(run):
            run.control.request_save(str(self.every))

    def finish(self, run: Run) -> None:
        """Ask at the end, unless that is saved anyway, or nothing was trained."""
        if self._recurrence is None or not run.progress.batches:
            return
        if moment(run.progress) != self._recurrence.last:
            run.control.request_save("at the end")

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last saved, and what is due next."""
        return {} if self._recurrence is None else {"every": self._recurrence.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the run has its new origin."""
        if self._recurrence is not None:
            self._recurrence.load_state_dict(state.get("every", {}))


def moment(progress: Progress) -> int:
    """Return a number that the end of an epoch changes, too: the state is another one after it."""
    return progress.batches + progress.epoch
