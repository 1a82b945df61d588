"""Random commands to ranks, a few; `python packages/tests/torture/asked.py` sends 10,000 and kills runs in between."""

from __future__ import annotations

from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from heliograph.packages.tests.torture.asked import Trial, main, other_names
from heliograph.packages.tests.torture.asked_job import train

COMMANDS = 40


@pytest.mark.parametrize("count", [2, *(pytest.param(each, marks=pytest.mark.whole) for each in (1, 4))])
def test_ranks_serve_the_same_at_the_same_step(ranks: Any, count: int, tmp_path: Path) -> None:
    trial = Trial(tmp_path, count, COMMANDS, Random(count))

    def ask() -> None:
        trial.wait()
        with other_names():
            for each in trial.begin_to_ask(COMMANDS):
                each.join()
        trial.stop()

    asker = Thread(target=ask)
    asker.start()
    outcomes = ranks(count).run(train, tmp_path)
    asker.join()
    assert trial.problems() == []
    assert [each.state for each in trial.sent if each.state not in ("accepted", "served", "refused")] == []
    assert len({(status, steps) for status, steps, _ in outcomes}) == 1
    assert outcomes[0][0] == "stopped"
    asked = [each for each in trial.sent if each.word != "status" and each.state != "refused"]
    history = "\n".join(outcomes[0][2])
    assert [each for each in asked if f"{each.by}: " not in history or f"- command {each.number}" not in history] == []


@pytest.mark.whole
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_a_run_is_killed_and_resumed_in_between(count: int) -> None:
    options = {"commands": COMMANDS, "ranks": count, "kills": 1, "stops": 0}
    assert main([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0
