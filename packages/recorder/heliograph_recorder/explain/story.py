"""Explain a recorded run as a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from heliograph.events import CATALOGUE
from heliograph.spi import printable

from ..format.reader import damage_of, gc_paused
from ..format.records import Recording
from . import words
from .attempt_summary import AttemptSummary, all_notes, all_warnings, main_attempt, run_name, summarize_attempts
from .attempts import attempts_section, end_section, who_changed
from .efficiency import costs, costs_section, efficiency, efficiency_section, timed_seconds, untimed_attempts
from .judge import Measured
from .requests import decisions_section, requests_of, requests_section
from .saves import checkpoints_section, saves_of
from .words import StorySection, join_sections


@gc_paused()
def story(recording: Recording, *, is_running: bool | None = None) -> str:
    """Explain a run: its end, attempts, requests, decisions, checkpoints and plugins.

    Args:
        recording: the recording of the run.
        is_running: whether a process is writing it, None if unknown.
    """
    attempts = summarize_attempts(recording, is_running=is_running)
    outcomes = {attempt.number: requests_of(attempt) for attempt in attempts}
    return join_sections(
        [
            end_section(run_name(attempts), main_attempt(attempts)),
            warnings_section(all_warnings(attempts)),
            attempts_section(attempts),
            requests_section([outcome for of_attempt in outcomes.values() for outcome in of_attempt]),
            decisions_section(attempts, outcomes),
            checkpoints_section(attempts, saves_of(attempts)),
            _plugins(attempts),
            efficiency_section(efficiency(recording, attempts)),
            _verdicts(attempts),
            _custom_events(attempts),
            costs_section(costs(attempts), timed_seconds(attempts), untimed_attempts(attempts)),
            notes_section(all_notes(attempts)),
            StorySection("what could not be read", _sentences(damage_of(recording.attempts))),
        ]
    )


def notes_section(notes: Sequence[str]) -> StorySection:
    return StorySection("notes", _sentences(notes))


def warnings_section(warnings: Sequence[str]) -> StorySection:
    return StorySection("warnings", _sentences(warnings))


def _sentences(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in words.lines(printable(text), "  ", "    ")]


def _plugins(attempts: Sequence[AttemptSummary]) -> StorySection:
    rows = []
    for attempt in attempts:
        for entry in attempt.events("plugin_changed", "plugin_failed"):
            data = {name: printable(value) for name, value in entry.data.items()}
            if entry.event == "plugin_changed":
                text = f"{data['plugin']} was {data['change']} {who_changed(data)}"
            else:
                text = f"{data['plugin']} failed on {data['event']}, and the run continued: {data['error']}"
            rows.append((f"step {entry.counters.steps}", text))
    return StorySection("plugins that changed or failed", words.table(rows, right=(0,)))


def _verdicts(attempts: Sequence[AttemptSummary]) -> StorySection:
    rows = []
    for attempt in attempts:
        for entry in attempt.events("verdict"):
            text = ("" if entry.data["holds"] else "no longer: ") + printable(entry.data["text"])
            rows.append((f"step {entry.counters.steps:,}", printable(entry.data["kind"]), text))
    return StorySection("verdicts during the training", words.table(rows, right=(0,)))


def _custom_events(attempts: Sequence[AttemptSummary]) -> StorySection:
    catalogue = {Measured.name, *(event.name for event in CATALOGUE)}
    steps: dict[str, list[int]] = {}
    counts: Counter[str] = Counter()
    for attempt in attempts:
        emissions: Counter[str] = Counter()
        for entry in attempt.events():
            if (name := entry.event) not in catalogue:
                steps.setdefault(name, []).append(entry.counters.steps)
                emissions[name] = entry.data.get("emission", emissions[name] + 1)  # frequent events are sampled
        counts += emissions
    spans = {name: f"step {at[0]:,}" + f" to {at[-1]:,}" * (len(at) > 1) for name, at in steps.items()}
    return StorySection(
        "custom events", words.table([(printable(name), words.times(counts[name]), spans[name]) for name in steps])
    )
