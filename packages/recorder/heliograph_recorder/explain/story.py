"""The story of a recorded run, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from heliograph.events import CATALOGUE
from heliograph.spi import printable

from ..format.reader import damage_of, gc_paused
from ..format.records import Recording
from . import words
from .attempt_summary import AttemptSummary, all_notes, all_warnings, main_attempt, run_name, summarize_attempts
from .attempts import attempts_in_short, attempts_section, describe_ending, end_section, reasons, who_changed
from .costs import by_plugin, costs, costs_in_short, costs_section, timed_seconds, untimed_attempts
from .efficiency import efficiency, efficiency_section
from .judge import Measured
from .requests import decisions_section, requests_in_short, requests_of, requests_section
from .saves import checkpoints_in_short, checkpoints_section, saves_of
from .words import Section, join_sections


@gc_paused()
def story(recording: Recording, *, is_running: bool | None = None) -> str:
    """Return how a run went: its end, its attempts, requests and decisions, its checkpoints and its plugins.

    Args:
        recording: of the run.
        is_running: whether a process is writing it, None where that is not known.
    """
    attempts = summarize_attempts(recording, is_running=is_running)
    requests = {attempt.number: requests_of(attempt) for attempt in attempts}
    return join_sections(
        [
            end_section(run_name(attempts), main_attempt(attempts)),
            warnings_section(all_warnings(attempts)),
            attempts_section(attempts),
            requests_section([request for each in requests.values() for request in each]),
            decisions_section(attempts, requests),
            checkpoints_section(attempts, saves_of(attempts)),
            _plugins(attempts),
            efficiency_section(efficiency(recording, attempts)),
            _verdicts(attempts),
            _custom_events(attempts),
            costs_section(by_plugin(costs(attempts)), timed_seconds(attempts), untimed_attempts(attempts)),
            notes_section(all_notes(attempts)),
            Section("what could not be read", _sentences(damage_of(recording.attempts))),
        ]
    )


def brief(recording: Recording) -> list[str]:
    attempts = summarize_attempts(recording)
    main = main_attempt(attempts)
    why = "".join(f": {reason}" for reason in reasons(main)[:1])
    warned = len(all_warnings(attempts))
    why += f" ({words.count_things(warned, 'warning')})" if warned else ""
    return [
        f"{describe_ending(main)} at step {main.last.steps:,}{why}",
        attempts_in_short(attempts),
        requests_in_short([request for attempt in attempts for request in requests_of(attempt)]),
        checkpoints_in_short(attempts, saves_of(attempts)),
        costs_in_short(by_plugin(costs(attempts)), timed_seconds(attempts)),
    ]


def notes_section(notes: Sequence[str]) -> Section:
    return Section("notes", _sentences(notes))


def warnings_section(warnings: Sequence[str]) -> Section:
    return Section("warnings", _sentences(warnings))


def _sentences(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in words.lines(printable(text), "  ", "    ")]


def _plugins(attempts: Sequence[AttemptSummary]) -> Section:
    rows = []
    for attempt in attempts:
        for entry in attempt.events("plugin_changed", "plugin_failed"):
            data = {name: printable(value) for name, value in entry.data.items()}
            if entry.event == "plugin_changed":
                text = f"{data['plugin']} was {data['change']} {who_changed(data)}"
            else:
                text = f"{data['plugin']} failed on {data['event']}, and the run continued: {data['error']}"
            rows.append((f"step {entry.counters.steps}", text))
    return Section("plugins that changed or failed", words.table(rows, right=(0,)))


def _verdicts(attempts: Sequence[AttemptSummary]) -> Section:
    rows = []
    for entry in [entry for attempt in attempts for entry in attempt.events("verdict")]:
        data = entry.data
        text = printable(data["text"]) if data["holds"] else f"no longer: {printable(data['text'])}"
        rows.append((f"step {entry.counters.steps:,}", printable(data["kind"]), text))
    return Section("verdicts during the training", words.table(rows, right=(0,)))


def _custom_events(attempts: Sequence[AttemptSummary]) -> Section:
    known = {Measured.name, *(event.name for event in CATALOGUE)}
    steps: dict[str, list[int]] = {}
    counts: Counter[str] = Counter()
    for attempt in attempts:
        own: Counter[str] = Counter()
        for entry in attempt.events():
            if entry.event not in known:
                steps.setdefault(entry.event, []).append(entry.counters.steps)
                own[entry.event] = entry.data.get("emission", own[entry.event] + 1)  # of many, a sample is recorded
        counts += own
    rows = [(printable(name), words.times(counts[name]), _span(at)) for name, at in steps.items()]
    return Section("custom events", words.table(rows))


def _span(steps: Sequence[int]) -> str:
    return f"step {steps[0]:,}" + f" to {steps[-1]:,}" * (len(steps) > 1)
