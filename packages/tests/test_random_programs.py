"""Programs that hide state, killed and resumed: the short form of `make torture`, and what it would notice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.tests.torture.hidden import kinds
from heliograph.packages.tests.torture.life import Step
from heliograph.packages.tests.torture.program import CHAIN, REPEATED, Program, drawn
from heliograph.packages.tests.torture.programs import MISSING, false_alarms, table
from heliograph.packages.tests.torture.trial import SEEN, Verdict, repeated_in

SCRIPT = Path(__file__).parent / "torture/programs.py"
FIRST = 20141  # of 40 that have many kinds, and few of the slow ones with workers
GLOBAL, TASK = "A global counter that a task goes by", "A counter that a task goes by"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script; what its attempts cover nobody can count, since they are killed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(10))
def test_none_of_four_programs_is_unequal_without_a_reason(part: int) -> None:
    done = run("--count", "4", "--seed", str(FIRST + 4 * part))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n4 programs, " in done.stdout


@pytest.mark.whole
def test_it_is_skipped_where_processes_cannot_be_waited_for() -> None:
    code = f"import os, runpy; del os.pidfd_open; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "skipped: os.pidfd_open is missing: this needs Linux\n"), done.stderr


def test_a_seed_is_a_program() -> None:
    programs = [drawn(seed) for seed in range(200)]
    assert programs == [drawn(seed) for seed in range(200)]
    assert len(set(programs)) == 200
    assert all(len(program.kills) == CHAIN for program in programs)


def test_every_kind_of_hidden_state_is_drawn() -> None:
    found = {name for seed in range(2000) for name in drawn(seed).hidden}
    assert found == kinds().keys()


def test_what_is_out_of_sight_is_killed_some_batches_after_a_save() -> None:
    beyond = {name for name, kind in kinds().items() if kind.beyond}
    programs = [program for seed in range(2000) if beyond & {*(program := drawn(seed)).hidden}]
    assert all(len(program.hidden) == 1 for program in programs)
    assert {kill.repeats for program in programs for kill in program.kills} == {REPEATED}
    assert all(kind.row == "own" for kind in kinds().values() if kind.beyond)


VERDICTS: dict[str, tuple[dict[str, Any], bool]] = {
    "equal": ({}, False),
    "named, equal": ({"reasons": ("untracked",), "hidden": (TASK,)}, False),
    "named, unequal": ({"reasons": ("untracked",), "difference": "a loss", "hidden": (TASK,)}, False),
    "UNEQUAL": ({"difference": "a loss", "hidden": (TASK,), "repeated": 0}, True),
    "beyond": ({"difference": "a loss", "hidden": (GLOBAL,), "repeated": SEEN - 1}, False),
    "refused": ({"failure": "attempt 1 failed", "is_refused": True, "hidden": (TASK,)}, False),
    "failed": ({"failure": "attempt 1 failed"}, True),
}


def verdict(*, hidden: tuple[str, ...] = (), **facts: Any) -> Verdict:
    return Verdict(Program(7, hidden=hidden), **facts)


@pytest.mark.parametrize("kind", VERDICTS)
def test_a_verdict_has_its_column(kind: str) -> None:
    facts, is_violation = VERDICTS[kind]
    found = verdict(**facts)
    assert (found.kind, found.is_violation) == (kind, is_violation)
    heading, *_, total = table([found]).splitlines()
    end = heading.index(kind) + len(kind)
    assert total[:end].endswith(" 1")


def test_enough_repeated_steps_show_what_is_out_of_sight() -> None:
    found = verdict(difference="a loss", hidden=(GLOBAL,), repeated=SEEN)
    assert (found.kind, found.is_violation) == ("UNEQUAL", True)


def test_a_reason_without_a_cause_is_a_false_alarm() -> None:
    alarm = verdict(reasons=("untracked: x",))
    iterable = replace(alarm, program=Program(8, data="iterable"))
    assert [each.is_violation for each in (alarm, iterable)] == [True, False]
    assert [line.split() for line in false_alarms([alarm, iterable, alarm])] == [["2", "untracked:", "x"]]


def test_repeated_batches_are_counted_at_the_resume_that_has_fewest() -> None:
    first, second, third = ([Step(attempt, batch, 0.5) for batch in batches] for attempt, batches in ATTEMPTS)
    assert repeated_in(first) is None
    assert repeated_in([*first, *second]) == 4
    assert repeated_in([*first, *second, *third]) == 1


ATTEMPTS = ((0, range(1, 9)), (1, range(5, 12)), (3, range(11, 15)))
