"""The plugins that most runs want: which they are, what they do in a run, replaced, added to and left out."""

from __future__ import annotations

from pathlib import Path

from heliograph import Every, standard
from heliograph.tests.builtin_callbacks.test_standard import BATCHES, fit
from heliograph_recorder import Recorder, replay

# Which they are.


# Replaced, added, left out.


# In a run.


def test_a_replay_with_all_but_what_needs_the_weights(tmp_path: Path) -> None:
    fit(tmp_path / "x", Recorder(tmp_path), validation=BATCHES, every=Every(steps=2))
    quiet = ("checkpoint", "rng_capture", "tensorboard", "progress")
    seen = replay(tmp_path, standard(tmp_path / "y", every=Every(steps=3), log_every=5, without=quiet))
    assert seen.failed == {}
    asked = [each.request for each in seen.asked]
    assert [each.step for each in asked if each.verb == "validation"] == [3, 6, 9, 12]
    assert [each.step for each in asked if each.verb == "log"] == [5, 10, 12]
    assert not (tmp_path / "y").exists()
