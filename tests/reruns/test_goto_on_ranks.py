"""On two ranks every rank goes to the step, and each has the state that it had."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.tests.mutated_programs import Program, make
from heliograph.tests.ranks_pool import Pool
from heliograph.tests.reruns.test_goto import Witness, state_of


def programmed(folder: Path, seed: int) -> tuple[h.Trainer, dict[str, Any]]:
    """Return a program with the engine that the group needs."""
    return make(Program(seed), folder)


def go_to_steps(folder: Path, seed: int) -> list[bool]:
    """Train, then go to some steps; return where each was as it had been."""
    trainer, options = programmed(folder, seed)
    witness = Witness()
    trainer.plugins.register(witness)
    trainer.fit(**options)
    found = []
    for step in random.Random(seed).choices(sorted(witness.states), k=4):
        with h.goto(folder, lambda place: programmed(place, seed), step=step) as paused:
            found.append(state_of(paused.run) == witness.states[step] and paused.comparison.first is None)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(20))
def test_any_step_on_two_ranks(seed: int, ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(go_to_steps, tmp_path, seed) == [[True] * 4] * 2
