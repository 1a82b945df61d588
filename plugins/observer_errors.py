"""What becomes of the errors of observers: logged and listed, and too many of them disable the plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..events import Event, PluginFailed, Run
from ..events.errors import describe_error
from .entry import PluginEntry

logger = logging.getLogger("heliograph")


class ObserverErrors:
    """The errors of a trainer's observers.

    Args:
        disable: disables a plugin that had too many.
    """

    def __init__(self, disable: Callable[[PluginEntry], None]) -> None:
        self._disable = disable

    def forgive_handler(self, entry: PluginEntry, run: Run, event: Event, error: BaseException) -> bool:
        """Log and list the error of an observer's handler, and disable the plugin after `max_errors`.

        Returns:
            Whether the run continues: False for an error of a critical plugin, and for a Ctrl-C.
        """
        if not entry.forgives(error):
            return False
        _add(entry, event.name, f"{event.name} at step {run.progress.steps}: {describe_error(error)}", error)
        if event.name != PluginFailed.name:  # it would never end
            run.emit(PluginFailed(entry.name, event.name, error))
        if len(entry.errors) >= getattr(entry.plugin, "max_errors", 3) and entry.enabled:
            run.warn(f"Plugin {entry.name!r} was switched off after {len(entry.errors)} errors: {entry.errors[-1]}.")
            logger.error("plugin %r is switched off after %d errors", entry.name, len(entry.errors))
            self._disable(entry)
        return True

    def forgive_state(
        self, entry: PluginEntry, run: Run | None, what: str, consequence: str, error: BaseException
    ) -> bool:
        """Log, list and note the error of an observer's state, once.

        Args:
            entry: the plugin.
            run: the present one, if there is one.
            what: the method that failed.
            consequence: what follows from it, for the note.
            error: what it raised.

        Returns:
            Whether the run continues: False for an error of a critical plugin, and for a Ctrl-C.
        """
        if not entry.forgives(error):
            return False
        line = f"{what}: {describe_error(error)}"
        if line not in entry.errors:
            _add(entry, what, line, error)
            if run is not None:
                run.note(f"plugin {entry.name!r}: {consequence}; {line}")
        return True

    def close(self, entry: PluginEntry) -> None:
        """Close a plugin; an observer's error is logged and listed like all of its errors."""
        try:
            if entry.has_lifecycle:
                entry.plugin.close()
        except BaseException as error:
            if not entry.forgives(error):
                raise
            _add(entry, "close", f"close: {describe_error(error)}", error)


def _add(entry: PluginEntry, what: str, line: str, error: BaseException) -> None:
    entry.errors.append(line)
    # the reason says all where the system refuses, as a full disk does
    traceback = None if isinstance(error, OSError) else error
    logger.error("plugin %r failed in %s: %s", entry.name, what, describe_error(error), exc_info=traceback)
