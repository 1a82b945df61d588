"""A call of Ray's `fit`, which runs the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Fit:
    """Runs Ray's trainer in a thread: in the main thread, Ray would install its own handler of Ctrl-C, and keep it.

    Args:
        run: the `fit` of Ray's trainer.

    Attributes:
        is_reused: whether its workers have served a call before this one.
        error: what Ray raised; None while it runs, and if it raised nothing.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self.is_reused = False
        self.error: BaseException | None = None
        self._function = run
        self._thread = threading.Thread(target=self._run, name="heliograph-ray", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether Ray still runs the workers, or waits for room for them."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for its end, at most so many seconds."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001  # read by the driver loop
            self.error = error
