"""A random program is put together: again in every attempt, and the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import heliograph as h
import numpy as np
import torch
from heliograph.packages.tests.torture.hidden import kinds
from heliograph.packages.tests.torture.parts import Net, Parts, built_in, scheduler_of
from heliograph.packages.tests.torture.plugins import user_plugins
from heliograph.packages.tests.torture.program import Program
from heliograph.packages.tests.torture.samples import Samples, loading, sampler_of
from torch.utils.data import DataLoader

RATES = {"SGD": 0.1, "Adadelta": 1.0}


def parts_of(program: Program, folder: Path, attempt: int) -> Parts:
    """Make the parts, in a process that has drawn other numbers before than those of the other attempts."""
    torch.manual_seed(program.seed)
    random.seed(attempt)
    np.random.seed(attempt)
    parts = Parts(
        program,
        folder,
        resumes=any(folder.glob("checkpoints/*.pth")),
        net=Net(program.dropout, norm=program.norm),
        samples=Samples(program.samples, program.samples // 2 if program.poison else None),
        sampler=sampler_of(program),
        validation=DataLoader(Samples(5), 2) if program.validate else None,
        optimizer=lambda each: getattr(torch.optim, program.optimizer)(each, lr=RATES.get(program.optimizer, 0.02)),
        scheduler=scheduler_of(program),
        engine={"precision": program.precision},
    )
    parts.plugins = {plugin.name: plugin for plugin in [*built_in(program, folder), *user_plugins(program)]}
    for name in program.hidden:
        kinds()[name].hide(parts)
    return parts


def train(parts: Parts, watched: Callable[[h.Trainer], None]) -> h.RunResult:
    """Put the parts together and train."""
    program = parts.program
    trainer = h.Trainer(parts.plugins.values(), device="cpu", **parts.engine)
    watched(trainer)
    return trainer.fit(
        parts.task(parts.model, parts.loss, metrics=parts.metrics),
        **loading(program, parts.samples, parts.sampler, parts.collate),
        validation=parts.validation,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        epochs=program.epochs,
        steps=program.steps,
    )
