"""The product's promises, end to end: what a user may rely on, one test each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import heliograph as h
import pytest
import torch
from heliograph_testing.chaos import Fault, check_function
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_with_much() -> None:
    """Train in the current folder, with dropout, accumulation, a scheduler, logs, validations and saves."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(50, 4, generator=generator), torch.randint(0, 2, (50,), generator=generator))
    schedules = [h.LogSchedule(steps=2), h.ValidationSchedule(epochs=1), h.SaveSchedule(steps=2)]
    decide = [h.RNGCapture(), h.GradientAccumulation(2), h.LearningRate("epoch"), h.EarlyStopping(patience=9)]
    keep = [h.Checkpoint("run", resume="auto"), h.JsonlLog("run/log.jsonl")]
    h.Trainer([*decide, *schedules, *keep], device="cpu").fit(
        h.Supervised(model, nn.functional.cross_entropy),
        DataLoader(data, batch_size=8, shuffle=True),
        validation=DataLoader(data, batch_size=50),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8),
        epochs=4,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_run_that_is_killed_again_and_again_ends_where_an_uninterrupted_one_ends(tmp_path: Path) -> None:
    kills = [Fault("kill", at="step_end", count=step) for step in (3, 5, 9, 14)]
    report = check_function(train_with_much, faults=kills, folder=tmp_path / "runs")
    assert (report.verdict, len(report.acted), report.attempts) == ("equal", 4, 5), str(report)
    logs = []
    for name in ("reference", "chaos"):
        lines = (tmp_path / "runs" / name / "run/log.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        logs.append([(each["event"], each["step"], each["metrics"]) for each in records if "metrics" in each])
    assert logs[0] == logs[1]
