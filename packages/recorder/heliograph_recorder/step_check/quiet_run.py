"""A run as the repetition of a step sees it: nothing is tracked, shown or requested a second time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heliograph import Run

DROPPED = frozenset(
    "collect emit log_curve log_figure log_file log_histogram log_image log_text note track warn".split()  # noqa: SIM905
)


class QuietRun:
    """Reads what a run has, and drops what is written.

    Args:
        run: the run.
    """

    _run: Run

    def __init__(self, run: Run) -> None:
        vars(self)["_run"] = run

    def __getattr__(self, name: str) -> Any:
        if name in DROPPED:
            return _do_nothing
        value = getattr(self._run, name)
        return PARTS[name](value) if name in PARTS else value

    def __setattr__(self, name: str, value: object) -> None:
        """Drop it: the outputs are those of the step itself."""


class QuietControl:
    """Reads what a control has, and drops requests.

    Args:
        control: that of the run.
    """

    def __init__(self, control: Any) -> None:
        self._control = control

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._control, name)
        return _do_nothing if callable(value) else value


class QuietStepping:
    """Reads what `run.stepping` has, and drops the weight of a batch.

    Args:
        stepping: that of the run.
    """

    def __init__(self, stepping: Any) -> None:
        self._stepping = stepping

    def __getattr__(self, name: str) -> Any:
        return _do_nothing if name == "weigh" else getattr(self._stepping, name)


PARTS: dict[str, type[Any]] = {"control": QuietControl, "stepping": QuietStepping}


def _do_nothing(*args: object, **options: object) -> None:
    """Drop what is given."""
