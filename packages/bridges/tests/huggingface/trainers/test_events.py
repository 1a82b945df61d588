"""Our events beside the calls of the Trainer, as literal traces: ours in capitals, theirs in small letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph import EarlyStopping, LogSchedule, SaveSchedule, ValidationSchedule
from heliograph.packages.bridges.tests.huggingface.trainers.trainings import Both, Rows, make

# What never differs, in short.
BATCH = "BatchStart ForwardEnd BackwardEnd"
STEP = "GradientsReady pre_optimizer_step optimizer_step StepEnd BatchEnd"
VALIDATION_BATCH = "ValidationBatchStart ValidationBatchEnd prediction_step log evaluate"
END = "Log log TrainEnd RunClosed train_end"

ACCUMULATION = """
    TrainStart train_begin EpochStart epoch_begin
    step_begin BATCH BatchEnd substep_end BATCH STEP ShouldStop step_end
    step_begin BATCH STEP step_end Log ShouldStop log
    EpochEnd ShouldStop LastBoundary epoch_end
    END
"""
VALIDATIONS = """
    TrainStart train_begin EpochStart epoch_begin
    step_begin BATCH STEP ShouldStop step_end
    step_begin BATCH STEP step_end ValidationStart VALIDATION_BATCH VALIDATION_BATCH ValidationEnd ShouldStop
    EpochEnd ShouldStop LastBoundary epoch_end
    END
"""
CUT_EPOCH = """
    TrainStart train_begin EpochStart epoch_begin
    step_begin BATCH STEP ShouldStop step_end
    step_begin BATCH STEP ShouldStop step_end
    EpochEnd epoch_end Log ShouldStop log
    EpochStart epoch_begin
    step_begin BATCH STEP ShouldStop step_end
    LastBoundary epoch_end Log log
    END
"""
RESUMED = """
    TrainStart CheckpointLoaded ShouldStop train_begin EpochStart epoch_begin
    step_begin BATCH STEP step_end SavePoint CheckpointSaved ShouldStop save
    EpochEnd ShouldStop LastBoundary epoch_end
    END
"""
RESUMED_AT_EPOCH_END = """
    TrainStart CheckpointLoaded ShouldStop EpochStart EpochEnd ShouldStop train_begin EpochStart epoch_begin
    step_begin BATCH STEP step_end SavePoint CheckpointSaved ShouldStop save
    LastBoundary epoch_end
    END
"""
STOPPED = """
    TrainStart train_begin EpochStart epoch_begin
    step_begin BATCH STEP step_end ValidationStart VALIDATION_BATCH ValidationEnd ShouldStop
    step_begin BATCH STEP step_end ValidationStart VALIDATION_BATCH ValidationEnd ShouldStop
    LastBoundary epoch_end
    END
"""
SAVED_BY_EPOCH = """
    TrainStart train_begin EpochStart epoch_begin
    step_begin BATCH STEP ShouldStop step_end
    EpochEnd epoch_end SavePoint CheckpointSaved ShouldStop LastBoundary save
    END
"""
SAVED_AS_BEST = """
    TrainStart train_begin EpochStart epoch_begin
    step_begin BATCH STEP step_end ValidationStart VALIDATION_BATCH ValidationEnd ShouldStop
    SavePoint CheckpointSaved ShouldStop save
    step_begin BATCH STEP step_end ValidationStart VALIDATION_BATCH ValidationEnd ShouldStop
    EpochEnd ShouldStop LastBoundary epoch_end
    END
"""
ASKED = """
    TrainStart train_begin EpochStart epoch_begin
    step_begin BATCH STEP step_end SavePoint CheckpointSaved ShouldStop save
    step_begin BATCH STEP step_end Log log SavePoint CheckpointSaved ShouldStop save
    EpochEnd epoch_end ValidationStart VALIDATION_BATCH ValidationEnd ShouldStop LastBoundary
    END
"""


def trace(folder: Path, *plugins: Any, resume: Any = None, **options: Any) -> list[str]:
    both = Both()
    trainer, _ = make(folder, *plugins, both.of_ours(), callbacks=[both.of_theirs()], **options)
    trainer.train(resume_from_checkpoint=resume)
    return both.names


def spelt(text: str) -> list[str]:
    words = {"BATCH": BATCH, "STEP": STEP, "VALIDATION_BATCH": VALIDATION_BATCH, "END": END}
    return " ".join(words.get(each, each) for each in text.split()).split()


EACH_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    ("plugins", "options", "expected"),
    [
        (
            [],
            {"rows": 6, "gradient_accumulation_steps": 2, "num_train_epochs": 1} | {"logging_strategy": "steps"}
            | {"logging_steps": 2},
            ACCUMULATION,
        ),
        (
            [],
            {"rows": 4, "max_steps": 2, "evaluation": {"a": Rows(4), "b": Rows(4)}} | EACH_STEP | {"eval_steps": 2},
            VALIDATIONS,
        ),
        ([], {"rows": 4, "max_steps": 3, "logging_strategy": "epoch"}, CUT_EPOCH),
        ([EarlyStopping(patience=1)], {"max_steps": 9, "losses": [1.0, 2.0]} | EACH_STEP, STOPPED),
        ([], {"rows": 2, "num_train_epochs": 1, "save_strategy": "epoch"}, SAVED_BY_EPOCH),
        (
            [],
            {"rows": 4, "num_train_epochs": 1, "losses": [1.0, 2.0], "save_strategy": "best"} | EACH_STEP
            | {"metric_for_best_model": "loss"},
            SAVED_AS_BEST,
        ),
        (
            [SaveSchedule(steps=1, at_end=False), ValidationSchedule(epochs=1), LogSchedule(steps=2)],
            {"rows": 4, "num_train_epochs": 1},
            ASKED,
        ),
    ],
    ids=["accumulation", "validations", "cut", "stopped", "by-epoch", "best", "asked"],
)  # fmt: skip
def test_the_order(plugins: list[Any], options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert trace(tmp_path, *plugins, **options) == spelt(expected)


def test_the_order_of_a_resumed_training(tmp_path: Path) -> None:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trace(tmp_path, rows=6, max_steps=2, **saves)
    assert trace(tmp_path, resume=True, rows=6, max_steps=3, **saves) == spelt(RESUMED)


def test_the_order_of_one_that_was_saved_after_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """The Trainer continues with the next epoch at once; ours ends the one that was saved before it does."""
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trace(tmp_path, rows=4, max_steps=2, **saves)
    assert trace(tmp_path, resume=str(tmp_path / "checkpoint-2"), rows=4, max_steps=3, **saves) == spelt(
        RESUMED_AT_EPOCH_END
    )
