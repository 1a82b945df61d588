"""Log a line when a rule fires."""

from __future__ import annotations

import logging

from heliograph import Run
from heliograph.spi import known_names

from ..base import RuleFiring, RuleOperation
from ..errors import RuleError, RuleTypeError
from ..text import show
from .fields import values_of
from .format_strings import Format

logger = logging.getLogger("heliograph")


class LogControl(RuleOperation):
    """Log a line, made of metrics and of fields of the firing.

    Besides the metrics there are `event_name`, `control_name`, `args` (the hyper-parameters) and the event's fields,
    such as `path` where a checkpoint was saved. A key that is missing when it is logged is shown as missing.

    Args:
        name: what controllers call it.
        log_format: such as `Epoch {trainer_state[epoch]:.0f}: {training_loss[loss]:.3f}`.
        log_level: `debug`, `info`, `warning`, `error` or `critical`, in any case.

    Raises:
        RuleError: there is no such level, or the format cannot be read.
    """

    def __init__(self, name: str, log_format: str, log_level: str = "info") -> None:
        super().__init__(name)
        if not isinstance(log_format, str):
            raise RuleTypeError(
                f"log_format is a string such as '{{event_name}}: {{loss[loss]}}', got {show(log_format)}."
            )
        levels = {word.lower(): number for word, number in logging.getLevelNamesMapping().items() if number}
        if not isinstance(log_level, str) or log_level.lower() not in levels:
            got = show(log_level)
            raise RuleError(f"There is no log_level {got}.{known_names(got.lower(), levels)}")
        self._level, self._format = levels[log_level.lower()], Format(log_format)
        self.reads = self._format.names

    def should_log(self, run: Run, firing: RuleFiring) -> None:
        """Log the line."""
        if logger.isEnabledFor(self._level):
            logger.log(self._level, "%s", self._format.fill(values_of(run, firing, self.reads)))
