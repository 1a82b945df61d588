"""A folder with a module and a configuration of the user's, and the command in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from heliograph.__main__ import main
from heliograph.plugins.discovery import VARIABLE
from heliograph_cli import command
from heliograph_cli.parser import make_parser

MODULE = '''
import os
import signal

import heliograph as h
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Net(nn.Sequential):
    def __init__(self, hidden: int = 4, dropout: float = 0.5) -> None:
        super().__init__(nn.Linear(4, hidden), nn.Dropout(dropout), nn.Linear(hidden, 2))


class Own(h.Task):
    def __init__(self, scale=1.0):
        self.net = Net()
        self.scale = scale

    def training_step(self, run, batch):
        return self.scale * nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Data(h.DataModule):
    def __init__(self, count: int) -> None:
        self.count = count

    def train(self) -> Dataset:
        return data(self.count)

    def validation(self) -> Dataset:
        return data(4)

    def test(self) -> Dataset:
        return data(6)


def data(count: int = 12):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 2)


def usual(every: int, patience: int = 9) -> list:
    """Several plugins at once."""
    return [h.ValidationSchedule(epochs=every), [h.EarlyStopping(patience=patience)]]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def unsaid(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def make_own(scale: float):
    return Own(scale)


def broken():
    raise KeyError("in the data")


class Kill(h.Plugin):
    """Kills the process after so many steps, where the environment says so."""

    @h.on(h.BatchEnd)
    def act(self, run, event):
        if run.progress.steps == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)


class Failing(h.Plugin):
    @h.on(h.BatchEnd)
    def act(self, run, event):
        raise {"fail": ValueError("in mid-run"), "exit": SystemExit(75), "interrupt": KeyboardInterrupt()}[
            os.environ["FAILS_BY"]
        ]
'''
CONFIG = """
seed: 3
task:
  heliograph.Supervised:
    model: {lesson.Net: {hidden: 3}}
    loss_fn: torch.nn.functional.cross_entropy
    metrics: {accuracy: heliograph.accuracy}
train: lesson.data
loader_params: {batch_size: 4, shuffle: true}
optimizer: {torch.optim.AdamW: {lr: 0.01}}
scheduler: {heliograph.warmup_cosine: {warmup: 0.1}}
epochs: 2
trainer:
  device: cpu
  plugins:
    rng_capture:
    learning_rate: {per: step}
    checkpoint: {folder: runs, every: {steps: 2}, resume: auto}
    lesson.Kill:
"""
Command = Callable[..., int]
cached_parser = cache(make_parser)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, in which `lesson.py` and `lesson.yaml` lie."""
    (tmp_path / "lesson.py").write_text(MODULE)
    (tmp_path / "lesson.yaml").write_text(CONFIG)
    (tmp_path / "lesson.yaml").chmod(0o644)  # whatever the umask is
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # modules of one name are written within a second
    monkeypatch.setattr(command, "make_parser", cached_parser)
    monkeypatch.delitem(sys.modules, "lesson", raising=False)
    return tmp_path


@pytest.fixture
def fit(folder: Path) -> Command:
    """Return a function that trains as the configuration says, with other options, and returns the exit status."""
    return lambda *options, verb="fit": main([verb, "lesson.yaml", *options])
