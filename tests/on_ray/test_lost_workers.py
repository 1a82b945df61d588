"""Workers that are killed at any moment: nothing is lost, and no sample is read in another order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.tests.on_ray.surviving import Blow, Story, at_random, fallen, order, repeated, train, whole_order

BLOWS = (
    Blow(1, 0, "train_start"),  # before it has found out where to go on
    *at_random(seed=22, number=5, last=64),  # one of them in a report, where Ray has the ranks wait for each other
    Blow(0, 70, "save_point", how="tear"),
)
SAVE_EVERY = 8
STORY = Story(Path(), epochs=8, save_every=SAVE_EVERY, blows=BLOWS, dropout=True)


@pytest.mark.whole
@pytest.mark.timeout(240)
def test_seven_kills_change_nothing(local_ray: None, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    expected = h.launch(train, replace(STORY, folder=undisturbed, blows=()), nprocs=2)

    launcher = h.RayLauncher(2, max_failures=len(BLOWS), backoff=0.01, storage_path=tmp_path / "storage", name="killed")
    values = launcher.run(train, replace(STORY, folder=disturbed))

    assert list(values) == list(expected)
    assert order(disturbed) == order(undisturbed)
    assert len(order(disturbed)) == whole_order(STORY.epochs)

    *lost, last = values.attempts
    assert fallen(disturbed) == len(lost) == len(BLOWS)
    assert {each.kind for each in lost} == {"lost"}
    assert last.kind == "completed"
    assert {each.world_size for each in values.attempts} == {2}
    again = repeated(disturbed)
    assert all(0 <= steps <= SAVE_EVERY for steps in again.values()), again
    for number, attempt in enumerate(lost):
        assert attempt.lost is None or attempt.lost.steps <= again.get(number, 0)
    assert last.resumed_at is not None
    assert last.resumed_at.steps % SAVE_EVERY == 0
    assert values.result is not None
    assert any("passed over" in note for note in values.result.notes)  # what was torn
    assert values.result.progress.steps == expected[0].steps
