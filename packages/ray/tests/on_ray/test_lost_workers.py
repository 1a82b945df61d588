"""Workers that are killed at random moments: the result and the order of the samples do not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.packages.ray.tests.on_ray.fault_runs import (
    Fault,
    Scenario,
    count_batches,
    count_faults,
    count_repeated_steps,
    random_faults,
    read_samples,
    train,
)
from heliograph_ray import RayLauncher

FAULTS = (
    Fault(1, 0, "train_start"),  # before it has found the checkpoint to resume
    *random_faults(seed=22, number=5, last=64),  # one of them in a report, in which the ranks wait for each other
    Fault(0, 70, "save_point", how="tear"),
)
SAVE_EVERY = 8
SCENARIO = Scenario(Path(), epochs=8, save_every=SAVE_EVERY, faults=FAULTS, dropout=True)


@pytest.mark.whole
@pytest.mark.timeout(240)
def test_seven_kills_change_nothing(local_ray: None, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    expected = h.launch(train, replace(SCENARIO, folder=undisturbed, faults=()), nprocs=2)

    launcher = RayLauncher(2, max_failures=len(FAULTS), backoff=0.01, storage_path=tmp_path / "storage", name="killed")
    values = launcher.run(train, replace(SCENARIO, folder=disturbed))

    assert list(values) == list(expected)
    assert read_samples(disturbed) == read_samples(undisturbed)
    assert len(read_samples(disturbed)) == count_batches(SCENARIO.epochs)

    *lost, last = values.attempts
    assert count_faults(disturbed) == len(lost) == len(FAULTS)
    assert {each.kind for each in lost} == {"lost"}
    assert last.kind == "completed"
    assert {each.world_size for each in values.attempts} == {2}
    again = count_repeated_steps(disturbed)
    assert all(0 <= steps <= SAVE_EVERY for steps in again.values()), again
    for number, attempt in enumerate(lost):
        assert attempt.lost is None or attempt.lost.steps <= again.get(number, 0)
    assert last.resumed_at is not None
    assert last.resumed_at.steps % SAVE_EVERY == 0
    assert values.result is not None
    assert any("skipped" in note for note in values.result.notes)  # the torn checkpoint
    assert values.result.progress.steps == expected[0].steps
