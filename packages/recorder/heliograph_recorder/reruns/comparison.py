"""What is done again, compared with what was recorded, as often as it waits."""

from __future__ import annotations

from functools import cached_property

from ..divergence.compare import compare
from ..divergence.course import Course, course_of
from ..divergence.report import Divergence
from ..format.reader import Follower, gc_paused
from ..plugin import Recorder
from .recorded import Origin, RecordedRun


class Comparison:
    """Compares a recorded run with what a recorder sees of it when it is done again.

    Both recordings are long, so what was recorded is walked once, and of the other one only what was added is parsed.

    Args:
        recorded: the run.
        origin: where it is continued from.
        recorder: records what is done again.
    """

    def __init__(self, recorded: RecordedRun, origin: Origin, recorder: Recorder) -> None:
        self._recorded, self._origin, self._recorder = recorded, origin, recorder

    @gc_paused()
    def compare(self) -> Divergence:
        """Compare what was done again until now."""
        self._recorder.flush()
        self._follower.update()
        again = course_of(self._follower.recording(), "the run that is done again", self._origin.begin)
        return compare(self._course, again, whole=False)

    @cached_property
    def _course(self) -> Course:
        return self._recorded.course_after(self._origin)

    @cached_property
    def _follower(self) -> Follower:
        assert self._recorder.path is not None  # it records
        return Follower(self._recorder.path)
