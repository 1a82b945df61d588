"""Every built-in plugin keeps every rule for plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import optuna
import pytest
import torch
from heliograph.plugins import discover
from heliograph.spi import Tracker
from heliograph_export import Export
from heliograph_optuna import Optuna
from heliograph_ray import RayReport
from heliograph_recorder import LateResults, Recorder, Remote, StepCheck, Verdicts
from heliograph_rules import RuleController
from heliograph_testing import check_plugin
from heliograph_trackers import CSVLog, MLflow, OpenTelemetry, Profile, Trackio, WandB
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

RULES = {
    "controller_metrics": [{"name": "loss", "class": "HistoryBasedMetric", "arguments": {"window_size": 2}}],
    "controllers": [
        {
            "name": "save",
            "triggers": ["on_log", "step_end"],
            "rule": "len(loss.training_loss.loss) >= 0",
            "operations": ["hfcontrols.should_save"],
            "patience": {"patience_threshold": 1},
        }
    ],
}


@functools.cache
def trial() -> optuna.Trial:
    """Return the same trial at every call: the checkpoint of another is refused."""
    return optuna.create_study(pruner=optuna.pruners.NopPruner()).ask()


def written_at_once(tracker: Tracker) -> Tracker:
    """Return a tracker with nothing waiting in its states, which the rules compare."""
    tracker.is_local = True
    return tracker


BUILT_INS: dict[str, Callable[[Path], h.Plugin]] = {
    "batch_transform": lambda folder: h.BatchTransform(lambda batch: (2 * batch[0], batch[1])),
    "checkpoint": lambda folder: h.Checkpoint(folder, keep_best=1, monitor="validation/loss"),
    "compile": lambda folder: h.Compile(backend="eager"),
    "csv_log": lambda folder: CSVLog(folder / "log.csv"),
    "epoch_means": lambda folder: h.EpochMeans(),
    "mixup": lambda folder: h.Mixup(2),
    "mlflow": lambda folder: written_at_once(MLflow("conformance", f"sqlite:///{folder / 'runs.db'}")),
    "phase_times": lambda folder: h.PhaseTimes(),
    "early_stopping": lambda folder: h.EarlyStopping(patience=1, min_delta=0.5),
    "ema": lambda folder: h.EMA(0.9),
    "exception_pass_through": lambda folder: h.ExceptionPassThrough(),
    "export": lambda folder: Export(folder / "model.pt2", overwrite=True),
    "file_log": lambda folder: h.FileLog(folder),
    "gradient_accumulation": lambda folder: h.GradientAccumulation(2),
    "gradient_clipping": lambda folder: h.GradientClipping(1.0, value=0.5),
    "gradient_norm": lambda folder: h.GradientNorm(per_module=True),
    "handler_times": lambda folder: h.HandlerTimes(),
    "jsonl_log": lambda folder: h.JsonlLog(folder / "log.jsonl"),
    "late_results": lambda folder: LateResults(folder),
    "learning_rate": lambda folder: h.LearningRate("plateau", monitor="validation/loss"),
    "log_schedule": lambda folder: h.LogSchedule(h.Every(steps=2), at_start=True, at_end=True),
    "nan_guard": lambda folder: h.NaNGuard("skip"),
    "optuna": lambda folder: Optuna(trial()),
    "prediction_writer": lambda folder: h.PredictionWriter(folder, overwrite=True),
    "preemption": lambda folder: h.Preemption(deadline=600),
    "profile": lambda folder: Profile(folder, wait=1, warmup=1, active=1),
    "progress": lambda folder: h.ProgressBar(plain=False, interval=0),
    "ray_report": lambda folder: RayReport(),
    "open_telemetry": lambda folder: OpenTelemetry(
        tracer_provider=TracerProvider(shutdown_on_exit=False), meter_provider=MeterProvider(shutdown_on_exit=False)
    ),
    "recorder": lambda folder: Recorder(folder, digests=True),
    "remote": lambda folder: Remote(folder),
    "verdicts": lambda folder: Verdicts(every=0.001),
    "rng_capture": lambda folder: h.RNGCapture(),
    "roll_back": lambda folder: h.RollBack(),
    "rule_controller": lambda folder: RuleController(RULES),
    "save_schedule": lambda folder: h.SaveSchedule(h.Every(batches=1), at_start=True, at_end=True),
    "step_check": lambda folder: StepCheck(1),
    "tensorboard": lambda folder: h.TensorBoard(folder / "tensorboard"),
    "trackio": lambda folder: Trackio("conformance"),
    "validation_schedule": lambda folder: h.ValidationSchedule(h.Every(samples=3), at_start=True, at_end=True),
    "verify_resume": lambda folder: h.VerifyResume(),
    "checkpoint_label": lambda folder: h.CheckpointLabel("loss_{validation/loss:.3f}"),
    "trained_only": lambda folder: h.TrainedOnly(),
    "weights_checkpoint": lambda folder: h.WeightsCheckpoint(folder, keep_best=1, monitor="validation/loss"),
    "wandb": lambda folder: WandB(mode="offline", folder=folder),
}


def test_every_built_in_is_in_the_list() -> None:
    found = {each.name for each in discover() if each.package.startswith("heliograph")}
    assert found - {"cut_mix", "load_best"} == BUILT_INS.keys()  # one takes images, the other needs a Checkpoint


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")  # of MLflow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", BUILT_INS)
def test_a_built_in_conforms(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "learning_rate": {"make_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
        "mixup": {"draws": True},
        "rng_capture": {"draws": True},  # it seeds the generators
    }
    check_plugin(lambda: BUILT_INS[name](tmp_path), **options.get(name, {}))
    assert BUILT_INS[name](tmp_path).name == name


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_the_other_learning_rates_conform(per: Any) -> None:
    check_plugin(lambda: h.LearningRate(per))
