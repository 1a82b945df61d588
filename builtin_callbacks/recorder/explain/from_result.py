"""The story of a run, told from what its result holds where nothing was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.system.extras import printable
from ..format.gc_pause import collector_paused
from ..format.reader import read
from ..format.records import Recording
from . import words
from .attempt_summary import legs, main_leg
from .attempts import metrics_line
from .control import control_section
from .costs import PluginCost, costs_section
from .requests import Ask
from .sections import Section, joined
from .story import notes_section, story
from .verdict import asked_where, verdict

if TYPE_CHECKING:
    from ....core.result import RunResult

MORE = (
    "a Recorder among the plugins would tell more: each attempt and where it went on from, what became of every "
    "request, every checkpoint and what was pruned, the time of each plugin on each event"
)


@collector_paused()
def story_of(result: RunResult) -> str:
    """Return how a run went: from its recording, else from the result."""
    if result.recording is None:
        return _told(result, MORE)
    recording = _read(result.recording)
    return story(recording) if isinstance(recording, Recording) else _told(result, recording)


def _read(path: Path) -> Recording | str:
    """Return a recording, or why it does not tell how the run ended."""
    try:
        recording = read(path)
        last = main_leg(legs(recording))
    except (OSError, ValueError) as error:
        return f"told without the recording, which cannot be read: {error}"
    if last.ending is None:  # the disk is full, or the recorder was switched off
        return f"told without the recording, which has no end; what it holds: python -m heliograph explain {path}"
    return recording


def _told(result: RunResult, remark: str) -> str:
    dropped = result.history.total - len(result.history)
    forgotten = (
        [f"the {words.counted(dropped, 'request')} before the latest {len(result.history):,}"] if dropped else []
    )
    plugins = [PluginCost(name, spent, False, ()) for name, spent in result.plugin_seconds.items()]
    errors = [(name, error) for name, each in result.plugin_errors.items() for error in each]
    rows = [("failed", f"{printable(name)} on {printable(error)}") for name, error in errors]
    return joined(
        [
            _end(result),
            control_section([Ask(1, 0.0, request) for request in result.history]),
            _checkpoints(result),
            Section("plugins that failed", words.table(rows)),
            costs_section(sorted(plugins, key=lambda each: -each.seconds), result.seconds),
            notes_section(result.notes),
            Section(
                "what is not told", [line for each in (*forgotten, printable(remark)) for line in words.lines(each)]
            ),
        ]
    )


def _end(result: RunResult) -> Section:
    at = result.progress
    where = f"epoch {at.epoch}, batch {at.batch}, step {at.steps}, {words.counted(at.samples, 'sample')}"
    said = [printable(result.reason)]
    stops = [request for request in result.history if request.verb == "stop"]
    if result.status == "stopped" and stops:
        first = stops[0]
        said.append(asked_where(first.event, first.epoch, first.batch, first.step))
    said += [f"{where} in {words.seconds(result.seconds)}", *metrics_line(result.metrics)]
    title = verdict(result.status, result.stopped_by, result.stopped_on_rank)
    return Section(f"the run: {title}", [line for each in said for line in words.lines(each)])


def _checkpoints(result: RunResult) -> Section:
    pairs: list[tuple[str, Any]] = [("best", result.best_checkpoint), ("last", result.last_checkpoint)]
    if result.resume is not None:
        pairs.append(("resumed from", result.resume.path))
        pairs.append(("repeated steps", result.resume.compared))
    return Section("checkpoints", words.table([(name, printable(path)) for name, path in pairs if path]))
