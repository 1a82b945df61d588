"""The ancestor's example files, read in place, and rules of our own that say the same: both act as described."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.rules.tests.scripted import LOSS, STATE, controller, lines, rules, train
from heliograph.packages.tests.facts import assert_each, has_facts
from heliograph_rules.controller import RuleController

THEIRS = Path(__file__).resolve().parents[4] / "shared" / "data" / "rules"
TWO = {"name": "past", "class": "HistoryBasedMetric", "arguments": {"window_size": 2}}
ONE = TWO | {"arguments": {"window_size": 1}}
FIVE = TWO | {"arguments": {"window_size": 5}}
FULL = "len(past.training_loss.loss) == past.window_size"
BELOW = f"{FULL} and past.training_loss.loss[0] < 2.2 and past.training_loss.epoch[0] > 2"
SAY = {"log_format": "This is a test log format [{event_name}] => {trainer_state}", "log_level": "warning"}
STEP = "Epoch: {trainer_state[epoch]:.0f}, Step: {trainer_state[global_step]}, Rank: {me[rank]}, loss = {training_loss}"
SAVED = "Saving model in huggingface format at step: {trainer_state[global_step]}\nModel saved in {path}\n"
FINAL = "Saving final checkpoint in {path}\n"


@dataclass(frozen=True)
class Example:
    """What our own rules say, what is trained, and at which epoch and step that is stopped; None, not at all.

    Two batches are an epoch, each is logged, and each epoch is validated.
    """

    ours: dict[str, Any]
    stop: tuple[int, int] | None
    losses: Sequence[float] = (3.0,)
    validation: Sequence[float] = (3.0,)


EXAMPLES = {
    "epoch-level-eval-loss-below-threshold": Example(
        rules(controller("evalmetric.eval_loss < 2.25 and trainer_state.epoch > 2", triggers=["on_epoch_end"])),
        stop=(3, 6),
        validation=[3.0, 2.0, 2.0],
    ),
    "epoch-level-eval-loss-patience": Example(
        rules(
            controller(
                "len(past.metrics) > 0 and past.metrics.eval_loss[-1] > 2",
                triggers=["on_epoch_end"],
                patience={"patience_threshold": 2},
            ),
            metrics=[TWO],
        ),
        stop=(4, 8),
        validation=[1.0, 3.0],
    ),
    "epoch-level-eval-loss": Example(
        rules(
            controller(
                "len(past.metrics) > 0 and past.metrics.eval_loss[-1] > 2.2 and trainer_state.epoch > 3",
                triggers=["on_epoch_end"],
            ),
            metrics=[STATE, ONE],
        ),
        stop=(4, 8),
    ),
    "epoch-level-training-loss-below-threshold-log-config": Example(
        rules(
            controller(BELOW, triggers=["on_step_end"], config={"trigger_log_level": "warning"}),
            metrics=[ONE],
        ),
        stop=(3, 6),
        losses=[1.0],
    ),
    "epoch-level-training-loss-below-threshold": Example(
        rules(controller(BELOW), metrics=[ONE]), stop=(2, 5), losses=[1.0]
    ),
    "epoch-level-training-loss": Example(
        rules(
            controller("past.training_loss.loss[-1] > 2 and trainer_state.epoch > 3", triggers=["on_epoch_end"]),
            metrics=[STATE, ONE],
        ),
        stop=(4, 8),
    ),
    "log_controller": Example(
        rules(
            controller("True", triggers=["on_step_end"], operations=["say.should_log"]),
            metrics=[STATE],
            operations=[{"name": "say", "class": "LogControl", "arguments": SAY}],
        ),
        stop=None,
    ),
    "logging_controller_with_rank": Example(
        rules(
            controller("training_loss != None", name="a", operations=["step.should_log"]),
            controller(
                "trainer_state.is_final == False", name="b", triggers=["on_save"], operations=["saved.should_log"]
            ),
            controller(
                "trainer_state.is_final == True", name="c", triggers=["on_save"], operations=["final.should_log"]
            ),
            metrics=[STATE, LOSS, {"name": "me", "class": "PerProcessState"}],
            operations=[
                {"name": "step", "class": "LogControl", "arguments": {"log_format": STEP, "log_level": "info"}},
                {"name": "saved", "class": "LogControl", "arguments": {"log_format": SAVED, "log_level": "info"}},
                {"name": "final", "class": "LogControl", "arguments": {"log_format": FINAL, "log_level": "info"}},
            ],
        ),
        stop=None,
    ),
    "loss": Example(rules(controller("training_loss.loss < 1.0")), stop=(1, 3), losses=[3.0, 2.0, 0.9]),
    "non-decreasing-training-loss": Example(
        rules(controller(f"past.training_loss.loss[0] < past.training_loss.loss[-1] and {FULL}"), metrics=[FIVE]),
        stop=(3, 7),
        losses=[5.0, 4.0, 3.0, 3.0, 3.0, 3.0, 4.0],
    ),
    "thresholded-training-loss": Example(
        rules(controller("past.training_loss.loss[-1] > 2.2"), metrics=[ONE]), stop=(1, 3), losses=[1.0, 2.0, 3.0]
    ),
}


def source_of(whose: str, name: str) -> Any:
    if whose == "ours":
        return EXAMPLES[name].ours
    if not THEIRS.is_dir():
        pytest.skip(f"needs {THEIRS}")
    return THEIRS / f"{name}.yaml"


def run(whose: str, name: str, *plugins: Any) -> h.RunResult:
    example = EXAMPLES[name]
    source = source_of(whose, name)
    return train(source, *plugins, losses=example.losses, validation=example.validation, batches=2, epochs=5)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_it_stops_where_its_rule_says(whose: str, name: str) -> None:
    result, stop = run(whose, name, h.SaveSchedule(h.Every(epochs=9))), EXAMPLES[name].stop
    if stop is None:
        assert result.status == "completed"
    else:
        assert (result.status, result.stopped_by) == ("stopped", "rule_controller")
        assert (result.progress.epoch, result.progress.steps) == stop


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_taking_action_is_logged_as_a_warning(whose: str, caplog: pytest.LogCaptureFixture) -> None:
    run(whose, "epoch-level-training-loss-below-threshold-log-config")
    (record,) = [record for record in caplog.records if "taking action" in record.getMessage()]
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_every_step_is_logged(whose: str, caplog: pytest.LogCaptureFixture) -> None:
    run(whose, "log_controller")
    reported = [line for line in lines(caplog.records) if "This is a test" in line]
    assert len(reported) == 10
    assert all(has_facts(line, "[on_step_end] => {'epoch': ") for line in reported)
    assert ["'global_step': 3," in line for line in reported] == [number == 3 for number in range(1, 11)]


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_logs_saves_and_the_final_save_are_reported(
    whose: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="heliograph")
    source = source_of(whose, "logging_controller_with_rank")
    saving = [h.SaveSchedule(h.At(batches=2), at_end=True), h.Checkpoint(tmp_path, keep_last=None)]
    train(source, *saving, losses=[3.0, 2.0], batches=2, epochs=2, logs=2)
    reported = [line for line in lines(caplog.records) if line.startswith(("Epoch: ", "Saving "))]
    first, last = (tmp_path / f"run_epoch_{n}_iter_{step}.pth" for n, step in ((0, 2), (2, 4)))
    assert [line.split(", ")[:3] for line in reported if "Epoch" in line] == [
        ["Epoch: 1", "Step: 2", "Rank: 0"],
        ["Epoch: 2", "Step: 4", "Rank: 0"],
    ]  # fmt: skip
    assert_each(
        [line for line in reported if "Saving" in line],
        ("huggingface format", "step: 2\n", f"in {first}\n"),
        ("final checkpoint", f"in {last}\n"),
    )


def test_every_file_of_the_ancestor_is_an_example_here() -> None:
    if not THEIRS.is_dir():
        pytest.skip(f"needs {THEIRS}")
    assert {path.stem for path in THEIRS.glob("*.yaml")} == set(EXAMPLES)
    for path in THEIRS.glob("*.yaml"):
        RuleController(path)
