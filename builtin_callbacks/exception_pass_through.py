"""Say which exceptions leave a run as they are."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.system.errors import TrainingError
from ..events import Run, RunFailed
from ..events.errors import describe_error
from ..plugins import Plugin, on


class ExceptionPassThrough(Plugin):
    """Choose which exceptions `fit` raises unchanged.

    Any other leaves as `TrainingError`, raised from the original. Without this plugin all leave unchanged. Subclasses
    of a listed type match. What is not an `Exception`, such as KeyboardInterrupt, always leaves unchanged.

    Args:
        train: types that pass while training or validating.
        test: types that pass while testing or predicting.

    Raises:
        TypeError: something listed is not an exception type.
    """

    affects_training = False
    exclusive = ("errors",)

    def __init__(self, train: Iterable[type[BaseException]] = (), test: Iterable[type[BaseException]] = ()) -> None:
        self.train, self.test = tuple(train), tuple(test)
        for kind in (*self.train, *self.test):
            if not isinstance(kind, type) or not issubclass(kind, BaseException):
                raise TypeError(f"ExceptionPassThrough takes exception types, got {kind!r}.")

    @on(RunFailed)
    def choose(self, run: Run, event: RunFailed) -> None:
        """Wrap the error, unless it is on the list of its phase."""
        error = event.error
        listed = self.test if event.phase in ("test", "predict") else self.train
        if isinstance(error, Exception) and not isinstance(error, listed):
            place = f"epoch {run.progress.epoch}, step {run.progress.steps}"
            culprit = f", plugin {event.plugin!r} on {event.event}" if event.plugin else ""
            run.hooks.replace_error(TrainingError(f"{event.phase} failed at {place}{culprit}: {describe_error(error)}"))
