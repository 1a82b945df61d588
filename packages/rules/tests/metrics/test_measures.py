"""Throughput, gradient norm, learning rate and memory, for rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph import EpochEnd, Every, GradientNorm, LearningRate, Log, LogSchedule, StepEnd, Trainer
from heliograph.core.checkpoint.checks import check_plain
from heliograph.core.system.errors import NotRecorded
from heliograph.events import Lane, Progress
from heliograph_rules.metrics import measures
from torch.optim.lr_scheduler import StepLR

Make = Callable[..., Any]


def at(samples: int, steps: int, seconds: float, origin: Progress) -> Any:
    progress = Progress(samples=samples, steps=steps)
    progress.set_seconds(seconds)
    return SimpleNamespace(progress=progress, origin=origin)


def test_throughput_is_measured_from_log_to_log() -> None:
    metric, origin = measures.Throughput("speed"), Progress()
    assert metric.compute(at(32, 4, 2.0, origin), StepEnd()) is None
    rates = metric.compute(at(64, 8, 4.0, origin), Log({}))
    assert rates == {"samples_per_second": 16.0, "steps_per_second": 2.0}
    assert metric.compute(at(96, 12, 5.0, origin), StepEnd()) == rates  # read, not measured
    assert metric.compute(at(104, 13, 4.5, origin), EpochEnd(0)) == {"samples_per_second": 80.0, "steps_per_second": 10.0}  # fmt: skip  # noqa: E501


def test_throughput_has_tokens_where_losses_are_sums_over_them() -> None:
    metric, run = measures.Throughput("speed"), at(32, 4, 2.0, Progress())
    run.progress.tokens = 500
    rates = metric.compute(run, Log({}))
    assert rates == {"samples_per_second": 16.0, "steps_per_second": 2.0, "tokens_per_second": 250.0}


def test_throughput_stands_where_nothing_was_trained_since() -> None:
    metric, origin = measures.Throughput("speed"), Progress()
    rates = metric.compute(at(64, 8, 4.0, origin), Log({}))
    assert metric.compute(at(64, 8, 6.0, origin), EpochEnd(0)) == rates
    assert metric.compute(at(128, 16, 12.0, origin), Log({})) == {"samples_per_second": 8.0, "steps_per_second": 1.0}


def test_throughput_of_a_resumed_run_counts_from_where_it_began() -> None:
    metric, origin = measures.Throughput("speed"), Progress(samples=1000, steps=100, earlier_seconds=50.0)
    metric.load_state_dict({"newest": {"samples_per_second": 1.0, "steps_per_second": 2.0}})
    assert metric.compute(at(1000, 100, 51.0, origin), StepEnd()) == {
        "samples_per_second": 1.0,
        "steps_per_second": 2.0,
    }
    rates = metric.compute(at(1040, 104, 54.0, origin), Log({}))
    assert rates == metric.state_dict()["newest"] == {"samples_per_second": 10.0, "steps_per_second": 1.0}


def test_the_norm_is_the_newest_that_was_logged(task: Make, batches: Make, sgd: Any) -> None:
    metric, values, logged = measures.GradientNorm("norm"), [], []
    trainer = Trainer([GradientNorm(every=2), LogSchedule(Every(steps=1))], device="cpu")
    trainer.bus.on(Log, lambda run, event: logged.append(event.metrics.get("train/gradient_norm")))
    trainer.bus.on(Log, lambda run, event: values.append(metric.compute(run, event)), lane=Lane.PERSIST)
    trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)
    assert logged[0] is logged[2] is None
    assert values == [None, logged[1], logged[1], logged[3]]


def test_the_norms_of_several_optimizers() -> None:
    metric, resumed = measures.GradientNorm("norm"), measures.GradientNorm("norm")
    norms = {"train/generator_gradient_norm": 0.0, "train/critic_gradient_norm": 2.0, "train/critic_loss": 3.0}
    assert metric.compute(None, Log(norms)) == {"generator": 0.0, "critic": 2.0}  # type: ignore[arg-type]
    resumed.load_state_dict(metric.state_dict())
    assert resumed.compute(None, StepEnd()) == {"generator": 0.0, "critic": 2.0}  # type: ignore[arg-type]
    assert resumed.compute(None, Log({"train/gradient_norm": 0.0})) == 0.0  # type: ignore[arg-type]


def test_the_rate_is_that_of_the_next_step(task: Make, batches: Make, sgd: Any) -> None:
    mine, metric, values = task(), measures.LearningRate("rate"), []
    optimizer = sgd(list(mine.model.parameters()))
    trainer = Trainer([LearningRate("step")], device="cpu")
    trainer.bus.on(StepEnd, lambda run, event: values.append(metric.compute(run, event)), lane=Lane.PERSIST)
    trainer.fit(mine, batches(4), optimizer=optimizer, scheduler=StepLR(optimizer, 2, 0.5), epochs=1)
    assert values == [0.1, 0.05, 0.05, 0.025]


@pytest.mark.parametrize(
    ("rates", "value"),
    [({}, None), ({"generator": 0.5}, 0.5), ({"generator": 0.5, "critic": 0.25}, {"generator": 0.5, "critic": 0.25})],
)
def test_the_rates_of_several_optimizers(rates: dict[str, float], value: Any) -> None:
    several = {name: SimpleNamespace(param_groups=[{"lr": torch.tensor(rate)}]) for name, rate in rates.items()}
    run: Any = SimpleNamespace(optimizers=several)
    assert measures.LearningRate("rate").compute(run, StepEnd()) == value


def test_a_recording_without_a_model_is_reported() -> None:
    class Replayed:
        @property
        def optimizers(self) -> Any:
            raise NotRecorded("the optimizers")

    with pytest.raises(NotRecorded, match="the optimizers"):
        measures.LearningRate("rate").compute(Replayed(), StepEnd())  # type: ignore[arg-type]


def test_memory_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric, run = measures.Memory("memory"), SimpleNamespace(engine=SimpleNamespace(device=torch.device("cpu")))
    statm = tmp_path / "statm"
    monkeypatch.setattr(measures, "STATM", statm)
    assert metric.validate() == torch.cuda.is_available()
    assert metric.compute(run, StepEnd()) == {}
    statm.write_text("4000 2560 300 1 0 500 0\n")
    assert metric.validate()
    memory = metric.compute(run, StepEnd())
    assert memory == {"resident": 2560 * os.sysconf("SC_PAGE_SIZE") / 2**20}
    check_plain(memory, "value")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_the_device() -> None:
    run: Any = SimpleNamespace(engine=SimpleNamespace(device=torch.device("cuda", 0)))
    metric = measures.Memory("memory")
    before = metric.compute(run, StepEnd())
    held = torch.zeros(2**20, device="cuda")  # 4 MiB
    after = metric.compute(run, StepEnd())
    assert after["device_allocated"] - before["device_allocated"] == held.nbytes / 2**20 == 4.0
    assert after["device_peak"] >= after["device_allocated"]
    assert after["device_reserved"] >= after["device_allocated"]
