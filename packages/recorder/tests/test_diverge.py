"""Where two runs part: programs with one thing changed, and programs that are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.packages.recorder.tests.mutated_programs import KINDS, Program, train
from heliograph_recorder import diverge

PROGRAMS = 200
MUTATIONS = [mutation for mutation in KINDS if mutation != "order"]


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_change_is_found_at_its_step_with_its_kind(seed: int, tmp_path: Path) -> None:
    program, mutation = Program(seed), MUTATIONS[seed % len(MUTATIONS)]
    (one, _), (other, truth) = train(program, tmp_path / "a"), train(program.mutated(mutation), tmp_path / "b")
    found = diverge(one, other).first
    assert found is not None
    assert truth.is_found(found)
    assert found.kind in KINDS[mutation]


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_equal_runs_raise_no_alarm(seed: int, tmp_path: Path) -> None:
    recordings = [train(Program(seed), tmp_path / name)[0] for name in "ab"]
    divergence = diverge(*recordings)
    assert divergence.first is None
    assert divergence.digested == divergence.batches > 0
