"""Where the time of a recorded training went."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_recorder.explain.attempt_summary import summarize_attempts
from heliograph_recorder.explain.efficiency import Efficiency, efficiency, efficiency_section
from heliograph_recorder.timeline.page import facts

MEASURED: dict[str, Any] = {
    "seconds": 10.0, "batches": 20, "sampled": 20, "validation": 0.0, "validations": 0, "save": 0.0, "saves": 0,
    "batch": [0.5], "load": [0.2], "forward": [0.1], "memory": [1], "device_memory": [0],
}  # fmt: skip


def spent(*scripts: Script) -> Efficiency:
    recorded = recording(*scripts)
    return efficiency(recorded, summarize_attempts(recorded))


def test_the_parts_add_up_to_all_the_time() -> None:
    recorded = killed_and_resumed()
    attempts = summarize_attempts(recorded)
    found = efficiency(recorded, attempts)
    assert {name: round(seconds, 6) for name, seconds in found.parts.items()} == {
        "useful training": 7.2,
        "repeated later": 4.6,
        "validations": 1.2,
        "saves": 0.4,
        "starting": 0.2,
        "between attempts": 7203.7,
    }
    gap = attempts[1].gap(attempts[0])
    assert gap is not None
    assert found.total == pytest.approx(sum(attempt.seconds for attempt in attempts) + gap)
    assert found.goodput == pytest.approx(7.2 / found.total)


def test_waits_for_data_are_taken_from_what_was_measured() -> None:
    script = Script()
    script.start()
    script.batches(20)
    script.emit("measured", **MEASURED)
    found = spent(script)
    assert found.parts["waiting for data"] == pytest.approx(0.4 * 10.0)
    assert found.parts["useful training"] == pytest.approx(0.6 * 10.0)
    assert [(each.kind, round(each.value, 6)) for each in found.findings] == [("input_bound", 0.4)]
    assert_each(
        efficiency_section(found).lines,
        ("6.00 s", "59.4 %", "useful training"),
        ("4.00 s", "39.6 %", "waiting for data"),
        ("0.10 s", "1.0 %", "starting"),
        ("input_bound", "0.20 s of", "0.50 s", "40.0 %"),
    )


def test_before_anything_is_measured_there_is_no_goodput() -> None:
    script = Script(plan={"train_start": ("recorder", "verdicts")})
    script.start()
    script.batches(20)
    section = efficiency_section(spent(script))
    assert section.title == "where the time went"
    assert "nothing is measured yet" in "\n".join(section.lines)
    assert facts(recording(script))["goodput"] is None
    script.emit("measured", **MEASURED)
    assert_facts(efficiency_section(spent(script)).title, "goodput 59.4 %")


def test_an_event_of_another_form_is_left_out() -> None:
    script = Script()
    script.start()
    script.batches(1)
    script.emit("measured", what="somebody else's")
    assert spent(script).ranks is None


def test_a_test_is_no_part_of_it() -> None:
    script = Script(phase="test")
    script.emit("test_end", 3.0, metrics={}, batches={})
    found = spent(script)
    assert (found.parts, found.goodput, efficiency_section(found).lines) == ({}, 0.0, [])
