"""A study that is killed continues as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from heliograph.tests.sampling import chosen


def points(seed: int, count: int) -> list[str]:
    """Return where the processes of a story are killed, one after the other: anywhere within ten writes."""
    draw = Random(seed)
    return [f"{draw.choice(['before', 'after'])} {draw.randint(2, 10)}" for _ in range(count)]


KILLS = {
    "sqlite": ["batch 7", *points(0, 6), "batch 9", *points(1, 3)],
    "journal": ["batch 14", *points(2, 5), "batch 5"],
}


@pytest.fixture(scope="module")
def stories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    reported = [f"{kind}:{kind}:{','.join(KILLS[kind])}" for kind in chosen(request, "name")]
    line = [
        sys.executable,
        "-W",
        "error",
        str(Path(__file__).with_name("kills.py")),
        str(folder),
        *reported,
    ]
    done = subprocess.run(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def trials(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.whole
def test_the_uninterrupted_study_is_worth_comparing_with(stories: Path) -> None:
    states = [state for _, state, *_ in trials(stories, "plain")]

    assert len(states) == 9
    assert states.count("PRUNED") >= 2
    assert states.count("COMPLETE") >= 3


@pytest.mark.whole
@pytest.mark.parametrize("name", KILLS)
def test_all_trials_are_those_of_the_uninterrupted_study(stories: Path, name: str) -> None:
    for killed, plain in zip(trials(stories, name), trials(stories, "plain"), strict=True):
        assert killed == plain


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KILLS)
def test_a_trial_that_was_running_continues_from_its_own_checkpoint(stories: Path, name: str) -> None:
    lines = (stories / name / "witness").read_text().splitlines()
    resumed = {int(number): int(step) for number, step in map(str.split, lines)}

    assert resumed[0] >= {"sqlite": 6, "journal": 12}[name]  # saves are 3 steps apart
    assert sum(step > 0 for step in resumed.values()) >= 2
