"""Choice of the exceptions that leave a run unchanged."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.system.errors import TrainingError
from ..events import Run, RunFailed
from ..events.checks import describe_error
from ..plugins import Plugin, on


class ExceptionPassThrough(Plugin):
    """Choose which exceptions `fit` raises unchanged.

    Other exceptions are raised as `TrainingError`, chained to the original. Without this plugin, all are raised
    unchanged. Subclasses of a listed type match. KeyboardInterrupt and others that are not an `Exception` are always
    raised unchanged.

    Args:
        train: exception types to raise unchanged while training or validating.
        test: exception types to raise unchanged while testing or predicting.

    Raises:
        TypeError: a listed object is not an exception type.
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
        """Wrap the error unless its type is listed for the phase."""
        error = event.error
        listed = self.test if event.phase in ("test", "predict") else self.train
        if isinstance(error, Exception) and not isinstance(error, listed):
            place = f"epoch {run.progress.epoch}, step {run.progress.steps}"
            culprit = f", plugin {event.plugin!r} on {event.event}" if event.plugin else ""
            run.hooks.replace_error(TrainingError(f"{event.phase} failed at {place}{culprit}: {describe_error(error)}"))
