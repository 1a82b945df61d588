"""Our plugins in the Trainer of Hugging Face: what they see, what they ask for, what is recorded."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    BatchStart,
    EarlyStopping,
    EpochMeans,
    EpochStart,
    Event,
    ForwardEnd,
    GradientsReady,
    Log,
    LogSchedule,
    NaNGuard,
    Plugin,
    Preemption,
    Run,
    SaveSchedule,
    StepEnd,
    TensorBoard,
    ValidationEnd,
    ValidationSchedule,
    ValidationStart,
    on,
)
from heliograph.__main__ import main
from heliograph.packages.bridges.tests.huggingface.trainers.trainings import Rows, make
from heliograph.packages.tests.facts import assert_facts
from heliograph_bridges.huggingface.trainers.methods import of_log
from heliograph_recorder import Recorder, replay
from heliograph_rules import RuleController
from transformers import EarlyStoppingCallback

VALIDATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
RISING = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
CURVES = [RISING, [3.0, 2.0, 2.5, 2.0, 1.0, 1.5], [2.0, 2.0, 1.0, 1.0, 1.0, 1.0], [5.0, 6.0, 4.0, 5.0, 6.0, 3.0]]


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("losses", CURVES)
def test_early_stopping_stops_where_theirs_does(losses: list[float], patience: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 6, "losses": losses, "metric_for_best_model": "loss"} | VALIDATES
    options["greater_is_better"] = False
    theirs, _ = make(tmp_path, callbacks=[EarlyStoppingCallback(patience)], **options)
    theirs.train()
    ours, callback = make(tmp_path, EarlyStopping(patience=patience), **options)
    ours.train()
    assert ours.state.global_step == theirs.state.global_step
    assert callback.result is not None
    assert callback.result.progress.steps == theirs.state.global_step
    early = callback.plugins[EarlyStopping]
    assert (callback.result.status == "stopped") == (early.failed_readings == patience)


def test_what_plugins_see(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Look(Plugin):
        @on(BatchStart, ForwardEnd, BatchEnd)
        def look(self, run: Run, event: Event) -> None:
            place = seen.setdefault(event.name, [])
            place.append((run.progress.batches, run.progress.steps, run.progress.samples, run.stepping.window))
            if not isinstance(event, BatchStart):
                seen.setdefault("losses", []).append(run.loss.item())

        @on(ForwardEnd)
        def see_graph(self, run: Run, event: ForwardEnd) -> None:
            assert run.batch["x"].shape == (2, 3)
            assert run.loss.requires_grad

        @on(EpochStart)
        def see_facts(self, run: Run, event: EpochStart) -> None:
            seen["facts"] = (
                run.length.max_epochs,
                run.length.max_steps,
                run.length.planned_steps,
                run.length.batches_per_epoch,
            )
            seen["names"] = (list(run.modules), list(run.optimizers), run.name, run.data.validation_sets)
            seen.setdefault("rate", run.optimizer.param_groups[0]["lr"])
            seen["hyper_parameters"] = run.hyper_parameters
            assert str(run.engine.device) == "cpu"

    trainer, callback = make(
        tmp_path / "my-run", Look(), num_train_epochs=2, gradient_accumulation_steps=2, rows=6, **VALIDATES
    )
    trainer.train()
    assert seen["facts"] == (2, 4, 4, 3)
    assert seen["names"] == (["model"], ["optimizer"], "my-run", ("",))
    assert seen["rate"] == 0.05
    assert seen["hyper_parameters"]["gradient_accumulation_steps"] == 2
    assert "seed" not in seen["hyper_parameters"]
    assert seen["batch_start"] == [(0, 0, 0, 0), (1, 0, 2, 1), (2, 1, 4, 0), (3, 2, 6, 0), (4, 2, 8, 1), (5, 3, 10, 0)]
    assert seen["batch_end"] == [(1, 0, 2, 1), (2, 1, 4, 0), (3, 2, 6, 0), (4, 2, 8, 1), (5, 3, 10, 0), (6, 4, 12, 0)]
    assert seen["losses"][0::2] == pytest.approx(seen["losses"][1::2])  # a mean over the batch, in a window too
    assert callback.result is not None
    assert callback.result.progress.epoch == 2


def test_metrics_have_our_names(tmp_path: Path) -> None:
    sets = {"a": Rows(4), "a_b": Rows(2)}
    options: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 2, "evaluation": sets, **VALIDATES}
    trainer, callback = make(tmp_path, EpochMeans(), num_train_epochs=1, **options)
    trainer.train()
    assert callback.result is not None
    metrics, history = callback.result.metrics, trainer.state.log_history
    losses = [row["loss"] for row in history if "loss" in row]
    assert metrics["train/loss"] == losses[-1]
    assert metrics["train/epoch/loss"] == pytest.approx(sum(losses) / len(losses))
    assert callback.result.means == pytest.approx({"train/loss": sum(losses) / len(losses)})
    for name in sets:
        assert metrics[f"validation/{name}/loss"] == next(
            row[f"eval_{name}_loss"] for row in reversed(history) if f"eval_{name}_loss" in row
        )
    for name in ("loss", "samples_per_second", "steps_per_second"):
        assert metrics[f"train/mean_{name}"] == history[-1][f"train_{name}"]
        assert (f"train/{name}" in metrics) is (name == "loss")  # those since the last log are a tracker's
    assert metrics["train/runtime"] == history[-1]["train_runtime"]
    assert of_log({"train_tokens_per_second": 3.0}) == {"train/mean_tokens_per_second": 3.0}
    assert not [name for name in metrics if "epoch" in name.split("/")[-1]]


def test_tracked_values_are_logged_with_theirs(tmp_path: Path) -> None:
    class Track(Plugin):
        @on(StepEnd)
        def track(self, run: Run, event: StepEnd) -> None:
            run.track("step", float(run.progress.steps))

        @on(ValidationEnd)
        def add(self, run: Run, event: ValidationEnd) -> None:
            event.metrics["validation/double"] = 2 * event.metrics["validation/loss"]

    logged: list[dict[str, float]] = []
    trainer, callback = make(
        tmp_path, Track(), max_steps=4, logging_strategy="steps", logging_steps=2, losses=[7.0] * 9, **VALIDATES
    )
    callback._training.bus.on(Log, lambda run, event: logged.append(dict(event.metrics)))
    trainer.train()
    assert [each["train/step"] for each in logged if "train/step" in each] == [1.5, 3.5]
    assert callback.result is not None
    assert callback.result.metrics["validation/double"] == 14.0


def test_requests_become_flags(tmp_path: Path) -> None:
    """An epoch ends early, a log, a validation and a save come when they are asked for."""

    class Ask(Plugin):
        asks = ("log", "validation", "save")

        @on(BatchEnd)
        def ask(self, run: Run, event: BatchEnd) -> None:
            if run.progress.steps == 2:
                run.control.end_epoch("enough")
            if run.progress.steps == 3:
                run.control.request_log("a look")
                run.control.request_validation("a look")

        @on(ValidationEnd)
        def save(self, run: Run, event: ValidationEnd) -> None:
            run.control.request_save("after a validation")

    trainer, callback = make(tmp_path, Ask(), num_train_epochs=2)
    trainer.train()
    assert callback.result is not None
    progress = callback.result.progress
    assert (progress.epoch, progress.steps, progress.validations) == (2, 6, 1)
    assert trainer.state.global_step == 6
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [3]
    assert callback.result.last_checkpoint == tmp_path / "checkpoint-3"
    assert [each.verb for each in callback.result.history] == ["end_epoch", "log", "validation", "save"]
    assert callback.result.warnings == ()


def test_a_loss_that_is_not_a_number_drops_its_gradients_and_stops(tmp_path: Path) -> None:
    trainer, callback = make(tmp_path, NaNGuard("stop"), train=Rows(8, poison=0), max_steps=9)
    trainer.train()
    assert callback.result is not None
    assert callback.result.stopped_by == "nan_guard"
    assert callback.result.progress.skipped_steps == 1
    assert trainer.state.global_step == callback.result.progress.steps + 1
    model: Any = trainer.model
    assert all(torch.isfinite(each).all() for each in model.parameters())


def test_validations_are_measured_on_averaged_weights(tmp_path: Path) -> None:
    class Weights(Plugin):
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        @on(StepEnd, ValidationStart)
        def keep(self, run: Run, event: Event) -> None:
            self.seen.append(run.modules["model"].layer.weight.detach().clone())

    weights = Weights()
    trainer, _ = make(tmp_path, EMA(0.5), weights, max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer.train()
    first, second, averaged = weights.seen
    assert torch.allclose(averaged, (first + second) / 2)
    assert torch.equal(trainer.model.layer.weight, second)  # type: ignore[union-attr,arg-type]  # a Linear


RULES = """
controller_metrics:
  - name: loss
    class: EvalMetrics
controllers:
  - name: far
    triggers: [on_evaluate]
    rule: loss["eval_loss"] > 2.5
    operations: [hfcontrols.should_training_stop]
"""


def test_rules_steer_it(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES, encoding="utf-8")
    trainer, callback = make(tmp_path, RuleController(tmp_path / "rules.yaml"), max_steps=6, losses=RISING, **VALIDATES)
    trainer.train()
    assert callback.result is not None
    assert (callback.result.stopped_by, trainer.state.global_step) == ("rule_controller", 3)


def test_a_recording_is_explained_shown_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugins = [Recorder(tmp_path / "records"), EarlyStopping(patience=2), SaveSchedule(steps=2, at_end=False)]
    plugins += [NaNGuard("stop"), Preemption(), TensorBoard(tmp_path / "board"), LogSchedule(steps=2)]
    trainer, callback = make(tmp_path / "run", *plugins, max_steps=9, losses=RISING, **VALIDATES)
    trainer.train()
    assert callback.result is not None
    assert callback.result.recording is not None
    assert callback.result.warnings == ()
    records = str(tmp_path / "records")
    assert main(["explain", records]) == 0
    story = capsys.readouterr().out
    assert_facts(story, "stopped by early_stopping\n", "validation/loss", "2 checks")
    assert_facts(story, "step 2", "epoch 0", "checkpoint-2")
    assert main(["timeline", records]) == 0
    assert main(["replay", records, "--plugin", "early_stopping:patience=1"]) == 0
    assert "epoch 0 batch 2" in capsys.readouterr().out
    (asked,) = replay(records, [EarlyStopping(patience=1)]).ends
    assert (asked.step, asked.by) == (2, "early_stopping")


def test_gradients_are_seen_clipped(tmp_path: Path) -> None:
    norms: list[float] = []

    class Norm(Plugin):
        @on(GradientsReady)
        def measure(self, run: Run, event: GradientsReady) -> None:
            norms.append(float(run.engine.clip_gradients(run.modules["model"].parameters(), None)))

    trainer, _ = make(tmp_path, Norm(), max_steps=2, max_grad_norm=0.01)
    trainer.train()
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)


def test_a_validation_that_was_asked_for_at_the_last_epoch_end_is_done(tmp_path: Path) -> None:
    trainer, callback = make(tmp_path, ValidationSchedule(epochs=1), num_train_epochs=2, losses=[3.0, 2.0])
    trainer.train()
    assert callback.result is not None
    assert callback.result.progress.validations == 2
    assert callback.result.metrics["validation/loss"] == 2.0


@pytest.mark.parametrize(
    ("options", "saves", "in_epoch"),
    [
        ({"num_train_epochs": 2}, [3, 6, 8], False),  # after the last epoch
        ({"num_train_epochs": 2, "save_strategy": "epoch"}, [3, 4, 6, 8], False),  # by the Trainer itself
        ({"max_steps": 2}, [2], True),
        ({"max_steps": 9, "losses": [1.0, 2.0], **VALIDATES}, [2], True),  # where a plugin stops
    ],
)
def test_a_save_that_is_asked_for_at_the_end_is_done(
    options: dict[str, Any], saves: list[int], in_epoch: bool, tmp_path: Path
) -> None:
    stops = [EarlyStopping(patience=1)] if "losses" in options else []
    trainer, callback = make(tmp_path, SaveSchedule(steps=3), *stops, **options)
    trainer.train()
    assert callback.result is not None
    assert callback.result.warnings == ()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in saves}
    assert callback.result.last_checkpoint == tmp_path / f"checkpoint-{saves[-1]}"
    saved = torch.load(callback.result.last_checkpoint / "heliograph.pt", weights_only=True)["state"]
    assert (saved["progress"]["batch"] > 0) is in_epoch
    assert saved["progress"]["steps"] == saves[-1]


def test_what_is_asked_for_at_the_end_is_done_in_the_order_of_the_trainer(tmp_path: Path) -> None:
    trainer, callback = make(
        tmp_path, ValidationSchedule(steps=9), LogSchedule(steps=9, at_end=True), num_train_epochs=1, losses=[3.0]
    )
    trainer.train()
    assert callback.result is not None
    assert callback.result.warnings == ()
    assert callback.result.metrics["validation/loss"] == 3.0
    assert callback.result.metrics["train/loss"] > 0
    saving, other = make(tmp_path, ValidationSchedule(steps=9), SaveSchedule(steps=9), num_train_epochs=1, losses=[2.0])
    saving.train()
    assert other.result is not None
    assert other.result.warnings == ()
    assert other.result.metrics["validation/loss"] == 2.0


@pytest.mark.parametrize("where", [BatchEnd, ValidationStart])
def test_preemption_saves_and_stops(where: type[Event], tmp_path: Path) -> None:
    """A validation that runs is not cut short: the Trainer cannot do that."""

    class Send(Plugin):
        sent = False

        @on(BatchEnd, ValidationStart)
        def send(self, run: Run, event: Event) -> None:
            if isinstance(event, where) and run.progress.steps == 2 and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)

    trainer, callback = make(tmp_path, Send(), Preemption([signal.SIGTERM]), max_steps=6, **VALIDATES)
    trainer.train()
    step = 2 if where is BatchEnd else 3
    assert callback.result is not None
    assert (callback.result.status, callback.result.stopped_by) == ("stopped", "preemption")
    assert callback.result.exit_status == 128 + signal.SIGTERM
    assert callback.result.progress.validations == step
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
