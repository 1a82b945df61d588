"""Explain a run from its result, if it has no recording."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heliograph.spi import printable

from ..format.reader import gc_paused, read
from ..format.records import Recording
from . import words
from .attempt_summary import main_attempt, summarize_attempts
from .attempts import ending_text, metrics_line, stop_request
from .requests import RequestOutcome, requests_section
from .story import notes_section, story, warnings_section
from .words import StorySection, join_sections

if TYPE_CHECKING:
    from heliograph import RunResult

HINT = (
    "add a Recorder to the plugins to record every attempt and its resume, the outcome of every request, saved and "
    "pruned checkpoints, and the time of each plugin on each event"
)


@gc_paused()
def story_of(result: RunResult) -> str:
    if result.recording is None:
        return _explain(result, HINT)
    recording = _read(result.recording)
    return story(recording) if isinstance(recording, Recording) else _explain(result, recording)


def _read(path: Path) -> Recording | str:
    """Return a recording, or why it cannot explain the end of the run."""
    try:
        recording = read(path)
        last = main_attempt(summarize_attempts(recording))
    except (OSError, ValueError) as error:
        return f"the recording, which cannot be read: {error}"
    if last.ending is None:  # the disk is full, or the recorder was disabled
        return f"the recording, which has no end; to see its content: python -m heliograph explain {path}"
    return recording


def _explain(result: RunResult, remark: str) -> str:
    dropped, latest = result.history.total - len(result.history), len(result.history)
    missing = [f"the {words.count_things(dropped, 'request')} before the latest {latest:,}"] if dropped else []
    rows = [
        ("failed", f"{printable(name)} on {printable(error)}")
        for name, errors in result.plugin_errors.items()
        for error in errors
    ]
    omitted = [line for text in (*missing, printable(remark)) for line in words.lines(text)]
    return join_sections(
        [
            _end(result),
            warnings_section(result.warnings),
            requests_section([RequestOutcome(1, 0.0, request) for request in result.history]),
            StorySection("plugins that failed", words.table(rows)),
            notes_section(result.notes),
            StorySection("not included", omitted),
        ]
    )


def _end(result: RunResult) -> StorySection:
    at = result.progress
    position = f"epoch {at.epoch}, batch {at.batch}, step {at.steps}, {words.count_things(at.samples, 'sample')}"
    texts = [printable(result.reason), *(stop_request(result.history) if result.status == "stopped" else ())]
    texts += [f"{position} in {words.seconds(result.seconds)}", *metrics_line(result.metrics)]
    title = ending_text(result.status, result.stopped_by, result.stopped_on_rank)
    return StorySection(f"the run: {title}", [line for text in texts for line in words.lines(text)])
