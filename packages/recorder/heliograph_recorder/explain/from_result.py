"""The story of a run without a recording, from its result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import printable

from ..format.reader import gc_paused, read
from ..format.records import Recording
from . import words
from .attempt_summary import main_attempt, summarize_attempts
from .attempts import ending_text, first_stop, metrics_line, stop_requested
from .costs import PluginCost, costs_section
from .requests import RequestOutcome, requests_section
from .story import notes_section, story, warnings_section
from .words import Section, join_sections

if TYPE_CHECKING:
    from heliograph import RunResult

HINT = (
    "add a Recorder to the plugins to record each attempt and where it continued, what became of every request, every "
    "checkpoint and which were pruned, the time of each plugin on each event"
)


@gc_paused()
def story_of(result: RunResult) -> str:
    if result.recording is None:
        return _explain(result, HINT)
    recording = _read(result.recording)
    return story(recording) if isinstance(recording, Recording) else _explain(result, recording)


def _read(path: Path) -> Recording | str:
    try:
        recording = read(path)
        last = main_attempt(summarize_attempts(recording))
    except (OSError, ValueError) as error:
        return f"the recording, which cannot be read: {error}"
    if last.ending is None:  # the disk is full, or the recorder was disabled
        return f"the recording, which has no end; to see what it holds: python -m heliograph explain {path}"
    return recording


def _explain(result: RunResult, remark: str) -> str:
    dropped = result.history.total - len(result.history)
    missing = (
        [f"the {words.count_things(dropped, 'request')} before the latest {len(result.history):,}"] if dropped else []
    )
    plugins = [PluginCost(name, seconds, False, ()) for name, seconds in result.plugin_seconds.items()]
    errors = [(name, error) for name, each in result.plugin_errors.items() for error in each]
    rows = [("failed", f"{printable(name)} on {printable(error)}") for name, error in errors]
    return join_sections(
        [
            _end(result),
            warnings_section(result.warnings),
            requests_section([RequestOutcome(1, 0.0, request) for request in result.history]),
            _checkpoints(result),
            Section("plugins that failed", words.table(rows)),
            costs_section(sorted(plugins, key=lambda each: -each.seconds), result.seconds),
            notes_section(result.notes),
            Section("not included", [line for each in (*missing, printable(remark)) for line in words.lines(each)]),
        ]
    )


def _end(result: RunResult) -> Section:
    at = result.progress
    where = f"epoch {at.epoch}, batch {at.batch}, step {at.steps}, {words.count_things(at.samples, 'sample')}"
    texts = [printable(result.reason)]
    if result.status == "stopped" and (first := first_stop(result.history)) is not None:
        texts.append(stop_requested(first))
    texts += [f"{where} in {words.seconds(result.seconds)}", *metrics_line(result.metrics)]
    title = ending_text(result.status, result.stopped_by, result.stopped_on_rank)
    return Section(f"the run: {title}", [line for text in texts for line in words.lines(text)])


def _checkpoints(result: RunResult) -> Section:
    pairs: list[tuple[str, Any]] = [("best", result.best_checkpoint), ("last", result.last_checkpoint)]
    if result.resume is not None:
        pairs.append(("resumed from", result.resume.path))
        pairs.append(
            (
                "repeated steps",
                result.resume.measured if result.resume.verified_steps or result.resume.divergence else "",
            )
        )
    return Section("checkpoints", words.table([(name, printable(path)) for name, path in pairs if path]))
