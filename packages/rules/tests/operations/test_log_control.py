"""Lines that rules log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from heliograph import (
    At,
    Checkpoint,
    CheckpointLoaded,
    CheckpointSaved,
    EpochEnd,
    Event,
    Log,
    RunFailed,
    SaveSchedule,
    StepEnd,
    TestEnd,
    Trainer,
    ValidationBatchEnd,
    ValidationEnd,
)
from heliograph.events import Progress
from heliograph_rules.base import RuleFiring
from heliograph_rules.errors import RuleError, RuleTypeError
from heliograph_rules.metrics.ancestors import TrainingState
from heliograph_rules.operations.log_control import LogControl, fields_of, names_at

Make = Callable[..., Any]
EXAMPLES = Path(__file__).parents[5] / "shared" / "data" / "rules"
STATE = {"epoch": 1.6, "global_step": 8, "is_final": False}


def place(**more: Any) -> Any:
    reported = {
        "hyper_parameters": {"lr": 0.1, "sizes": [4, (2, Path("x"))]},
        "checkpoints": SimpleNamespace(best=None),
        "length": SimpleNamespace(batches_per_epoch=None),
        "progress": Progress(steps=8),
    }
    return SimpleNamespace(**reported, **more)


def line(text: str, event: Event, caplog: pytest.LogCaptureFixture, **metrics: Any) -> str:
    caplog.clear()
    LogControl("log", text, "warning").should_log(place(), RuleFiring("mine", "on_event", event, "True", metrics))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    return caplog.messages[0]


@pytest.mark.parametrize(
    ("text", "event", "message"),
    [
        ("[{event_name}] {control_name} {args[lr]} {args.lr:.2f}", StepEnd(), "[on_event] mine 0.1 0.10"),
        ("{path} {hf_path} {is_best} {is_final}", CheckpointSaved(Path("a/b"), True), "a/b a/b True False"),
        ("{path}", CheckpointLoaded(Path("a/b")), "a/b"),
        ("{metrics[eval_loss]} {metrics[validation/loss]}", ValidationEnd({"validation/loss": 2.0}), "2.0 2.0"),
        ("{metrics[test_loss]}", TestEnd({"test/loss": 2.0}), "2.0"),
        ("{logs}", Log({"train/loss": 2.0}), "{'loss': 2.0, 'epoch': 0.0, 'step': 8}"),
        ("{args[sizes][0]}", StepEnd(), "4"),
        ("{dataset}", ValidationBatchEnd("hard"), "hard"),
        ("{epoch}", EpochEnd(3), "3"),
        ("{error} {phase} {plugin}", RunFailed(KeyError("x"), "train", None, None), "'x' train None"),
    ],
)
def test_fields_of_the_event(text: str, event: Event, message: str, caplog: pytest.LogCaptureFixture) -> None:
    assert line(text, event, caplog) == message


def test_a_metric_may_be_called_like_a_field(caplog: pytest.LogCaptureFixture) -> None:
    clashing = {"args": 1, "metrics": 2, "control_name": 3, "epoch": 4}
    assert line("{args} {metrics} {control_name} {epoch}", EpochEnd(0), caplog, **clashing) == "1 2 3 4"


def test_a_missing_key_is_reported_and_kills_nothing(caplog: pytest.LogCaptureFixture) -> None:
    text = "{trainer_state[foo]} {loss[loss]:.2f}"
    message = line(text, StepEnd(), caplog, trainer_state=STATE, loss=None)
    assert message == "<missing: trainer_state[foo]> <missing: loss[loss]>"


def test_only_the_metrics_of_the_format_are_read(caplog: pytest.LogCaptureFixture) -> None:
    class Asked(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            assert name == "loss"
            return super().__getitem__(name)

    operation = LogControl("log", "{loss}", "warning")
    operation.should_log(place(), RuleFiring("mine", "on_event", StepEnd(), "True", Asked(loss=1.0, costly=2.0)))
    assert caplog.messages == ["1.0"]
    assert operation.reads == {"loss"}


@pytest.mark.parametrize(
    "event",
    [
        StepEnd(),
        EpochEnd(1),
        Log({"train/loss": 1.0}),
        ValidationEnd({}),
        CheckpointSaved(Path("a"), False),
        CheckpointLoaded(None),
        RunFailed(ValueError(), "train", "a", "b"),
    ],
)
def test_the_fields_that_are_there_are_those_that_are_promised(event: Event) -> None:
    fields = fields_of(place(), RuleFiring("mine", "on_event", event, "True"))
    assert fields.keys() == names_at(type(event))


@pytest.mark.parametrize(("level", "number"), [("debug", 10), ("INFO", 20), ("Warning", 30), ("critical", 50)])
def test_the_level(level: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "heliograph"):
        LogControl("log", "line", level).should_log(place(), RuleFiring("mine", "on_event", StepEnd(), "True"))
    assert [(record.name, record.levelno, record.message) for record in caplog.records] == [
        ("heliograph", number, "line")
    ]


def test_nothing_is_made_for_a_level_that_nobody_receives(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "heliograph"):
        LogControl("log", "{loss}").should_log(None, None)  # type: ignore[arg-type]
    assert not caplog.records


@pytest.mark.parametrize("level", ["loud", "", "notset", 10, None])
def test_a_level_that_is_none_is_refused(level: Any) -> None:
    with pytest.raises(ValueError, match=r"log_level .* Known: critical,") as caught:
        LogControl("log", "line", level)
    assert isinstance(caught.value, RuleError)


def test_a_format_that_is_no_text_is_refused() -> None:
    with pytest.raises(RuleTypeError, match="log_format must"):
        LogControl("log", 3)  # type: ignore[arg-type]


def test_the_formats_of_the_examples(caplog: pytest.LogCaptureFixture) -> None:
    if not EXAMPLES.is_dir():
        pytest.skip("needs the ancestors' examples")
    messages = {}
    for name in ("log_controller.yaml", "logging_controller_with_rank.yaml"):
        for operation in yaml.safe_load((EXAMPLES / name).read_text())["operations"]:
            log_format = operation["arguments"]["log_format"]
            metrics = {"trainer_state": STATE, "per_process_state": {"rank": 0}, "training_loss": {"loss": 0.5}}
            messages[operation["name"]] = line(log_format, CheckpointSaved(Path("runs/a"), False), caplog, **metrics)
    assert messages == {
        "logcontrolstep": f"This is a test log format [on_event] => {STATE}",
        "logger_on_log": "Epoch: 2, Step: 8, Rank: 0, loss = {'loss': 0.5}",
        "logger_on_save": "Saving model in huggingface format at step: 8\nModel saved in runs/a\n",
        "logger_on_save_final": "Saving final checkpoint in runs/a\n",
    }


def test_a_line_of_a_real_save(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer([SaveSchedule(At(steps=2), at_end=False), Checkpoint(tmp_path, background=False)], device="cpu")
    operation, metric = LogControl("log", "{state[global_step]} {state[epoch]:.1f} {path}"), TrainingState("state")

    def fire(run: Any, event: CheckpointSaved) -> None:
        operation.should_log(run, RuleFiring("mine", "on_save", event, "True", {"state": metric.compute(run, event)}))

    trainer.bus.on(CheckpointSaved, fire)
    with caplog.at_level(logging.INFO, "heliograph"):
        result = trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)
    assert f"2 0.5 {result.last_checkpoint}" in caplog.messages
