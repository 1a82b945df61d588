"""What `Checkpoint` advises where nothing was saved, or what was saved is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from heliograph import Checkpoint, Every, Plugin, Run, StepEnd, on
from heliograph.tests.kit import class_batches, fit
from heliograph.tests.messages import has_facts


def test_a_folder_that_is_gone_is_said_and_nothing_in_it_is_named_as_what_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    class Deletes(Plugin):
        @on(StepEnd)
        def delete(self, run: Run, event: StepEnd) -> None:
            if run.progress.steps == 3:
                shutil.rmtree(folder)

    with pytest.raises(OSError, match=r"written \(its") as caught:
        fit(Checkpoint(folder, every=Every(steps=2), resume="auto"), Deletes(), train=class_batches(6), epochs=1)
    assert "unchanged" not in str(caught.value)
    newest = folder / "run_epoch_0_iter_2.pth"
    assert any(has_facts(note, newest, "step 2", "missing") for note in caught.value.__notes__)
