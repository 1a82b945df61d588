"""What was asked for and did not happen: the warnings of a result, and strict trainers."""

from __future__ import annotations

import io
import signal
from functools import partial
from pathlib import Path

import pytest
from heliograph import (
    Checkpoint,
    EarlyStopping,
    Every,
    FileLog,
    JsonlLog,
    LearningRate,
    LogSchedule,
    Preemption,
    ProgressBar,
    SaveSchedule,
    Trainer,
    ValidationSchedule,
)
from heliograph.tests.core.test_warnings import BATCHES
from heliograph.tests.kit import linear_classifier, sgd
from heliograph_recorder import Recorder
from heliograph_testing.chaos import Chaos, Fault
from torch.optim.lr_scheduler import StepLR


def test_a_strict_trainer_leaves_an_exit_status_as_it_is(tmp_path: Path) -> None:
    """What was preempted is continued: nothing of it is missing yet."""

    plugins = [
        Preemption(),
        Chaos([Fault("preempt", at="step_end", count=2)], journal=tmp_path / "journal.jsonl"),
        EarlyStopping(),
        LearningRate("epoch"),
        ValidationSchedule(Every(epochs=1)),
        SaveSchedule(Every(epochs=1)),
        Checkpoint(tmp_path, keep_best=1, monitor="validation/loss"),
    ]
    with pytest.raises(SystemExit) as caught:
        Trainer(plugins, device="cpu", strict=True).fit(
            linear_classifier(),
            BATCHES,
            validation=BATCHES,
            optimizer=sgd(),
            scheduler=partial(StepLR, step_size=1),
            epochs=2,
        )
    assert caught.value.code == 128 + signal.SIGTERM
    assert not any("never" in note or "No checkpoint" in note for note in caught.value.__notes__)


def test_those_who_show_warnings_have_those_of_other_loggers(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lost, file = JsonlLog(tmp_path / "file" / "log.jsonl"), io.StringIO()
    plugins = [ProgressBar(file=file, plain=True), Recorder(tmp_path), FileLog(tmp_path / "logs"), lost]
    result = Trainer([*plugins, LogSchedule(Every(steps=3))], device="cpu").fit(
        linear_classifier(), BATCHES, optimizer=sgd(), epochs=1
    )
    sentence = next(each for each in result.warnings if each.startswith("Lines are missing"))
    (log,) = (tmp_path / "logs").iterdir()
    assert sentence in log.read_text()
    assert sentence in " ".join(result.explain().split())
    assert sentence in " ".join(file.getvalue().split())
