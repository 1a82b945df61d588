"""What cannot run here is refused when it is given, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.bridges.tests.huggingface.callbacks.training import INTEGRATIONS
from heliograph_bridges.huggingface import from_huggingface
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback


class WithTrainer(TrainerCallback):
    """Is made for a trainer, as some of TRL are."""

    def __init__(self, trainer: Any) -> None:
        self.owner = trainer


class OwnBar(ProgressCallback):
    """A bar of the user's own."""


class RichProgressCallback(TrainerCallback):
    """Has the name of TRL's, which imports half a minute of packages."""


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (DefaultFlowCallback, "LogSchedule, ValidationSchedule and SaveSchedule"),
        (ProgressCallback(), r"add ProgressBar\(\)"),
        (OwnBar(), r"OwnBar cannot .*ProgressBar\(\)"),
        (PrinterCallback(), r"add ProgressBar\(\) or FileLog\(\)"),
        (RichProgressCallback(), r"add ProgressBar\(\)"),
        (JITCheckpointCallback, r"add Preemption\(\) and"),
        (WithTrainer(None), "methods of a transformers.Trainer"),
    ],
    ids=lambda each: each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__),
)
def test_what_is_refused(callback: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        from_huggingface(callback)


def test_a_tracker_that_uploads_what_the_trainer_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    with pytest.raises(ValueError, match="WANDB_LOG_MODEL=end: it uploads"):
        from_huggingface(INTEGRATIONS.WandbCallback())


def test_pushing_to_a_hub(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, push_to_hub=True, report_to=[])
    with pytest.raises(ValueError, match="push_to_hub=True"):
        from_huggingface(EarlyStoppingCallback(), args)


@pytest.mark.parametrize("wrong", [print, object(), TrainingArguments])
def test_what_is_no_callback(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"from_huggingface takes a transformers.TrainerCallback,"):
        from_huggingface(wrong)


def test_what_are_no_arguments() -> None:
    with pytest.raises(TypeError, match=r"args is a transformers.TrainingArguments"):
        from_huggingface(EarlyStoppingCallback(), "accuracy")
