"""A study that kills itself: `python kills.py FOLDER STORY...`, whose outcomes lie in `<name>.json`, beside `plain`.

A story is `<name>:<storage>:<where> <number>,...`. A process for each point is killed there, at the so-many-th `batch`,
or `before` or `after` the so-many-th write of the storage; the last one is not.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import optuna
import torch
from heliograph.tests import kills
from heliograph.tests.kit import sgd
from heliograph_optuna.plugin import Optuna
from heliograph_optuna.study import open_study
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn

TRIALS = 9
WRITES = (
    "create_new_trial", "_create_new_trial", "set_trial_param", "set_trial_state_values",
    "set_trial_intermediate_value", "set_trial_user_attr", "set_trial_system_attr",
)  # fmt: skip


class Killer(kills.Killer):
    """Counts batches, and the writes of a storage."""

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def act_during_training(self, run: h.Run, event: h.BatchEnd) -> None:
        self.act("batch")

    def watch(self, storage: type[BaseStorage]) -> None:
        """Count the writes of a storage."""
        depth = 0

        def watched(write: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                if not depth:
                    self.act("before")
                depth += 1
                try:
                    done = write(*args, **kwargs)
                finally:
                    depth -= 1
                if not depth:
                    self.act("after")
                return done

            return call

        for name in WRITES:
            if hasattr(storage, name):
                setattr(storage, name, watched(getattr(storage, name)))


def storage_of(kind: str, folder: Path) -> str | BaseStorage:
    if kind == "sqlite":
        return f"sqlite:///{folder}/study.db"
    return JournalStorage(JournalFileBackend(str(folder / "study.log")))


def optimize(folder: Path, kind: str, killer: Killer | None) -> None:
    """Optimize, or continue with it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 4, generator=generator)
    data = [(each, each.sum(1, keepdim=True)) for each in inputs.reshape(4, 4, 4)]

    def objective(trial: optuna.Trial) -> float:
        plugin = Optuna(trial, "validation/loss")
        rate = plugin.suggest("float", "rate", low=1e-4, high=0.3, log=True)
        width = plugin.suggest("int", "width", low=2, high=8)
        activation = plugin.suggest("categorical", "activation", choices=["relu", "tanh"])
        torch.manual_seed(0)
        layers = {"relu": nn.ReLU, "tanh": nn.Tanh}
        model = nn.Sequential(nn.Linear(4, width), layers[activation](), nn.Linear(width, 1))
        plugins = [h.ValidationSchedule(h.Every(steps=4)), h.SaveSchedule(h.Every(steps=3)), plugin]
        plugins += [h.Checkpoint(folder, resume="auto"), *([killer] if killer else [])]
        result = h.Trainer(plugins, device="cpu").fit(
            h.Supervised(model, nn.functional.mse_loss),
            data,
            validation=data,
            optimizer=sgd(rate, momentum=0.9),
            epochs=4,
            name="story",
        )
        assert result.resume is not None
        with (folder / "witness").open("a") as file:
            file.write(f"{trial.number} {result.resume.step or 0}\n")
        return result.metrics["validation/loss"]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    storage = storage_of(kind, folder)
    if killer is not None:
        killer.watch(RDBStorage if kind == "sqlite" else JournalStorage)
    sampler = TPESampler(seed=5, n_startup_trials=3)
    study = open_study("story", storage=storage, sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=TRIALS)
    reported = [
        [each.number, each.state.name, each.values, each.params, each.intermediate_values, each.user_attrs]
        for each in study.trials
    ]
    folder.with_suffix(".json").write_text(json.dumps(reported))


def main(folder: Path, stories: list[str]) -> None:
    """Optimize without a kill, which imports for all children; fork one for each kill, and one for the rest."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (folder / "plain").mkdir()
    optimize(folder / "plain", "sqlite", None)
    gc.collect()
    gc.freeze()
    for story in stories:
        name, kind, points = story.split(":")
        (folder / name).mkdir()
        for point in [*filter(None, points.split(",")), "never 0"]:
            where, number = point.split()
            act = partial(optimize, folder / name, kind, Killer(where, int(number)))
            kills.in_a_child(act, killed=where != "never", about=f"{name} at {point}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
