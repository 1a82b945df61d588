"""What our plugins take in the loops of others, in processor time, beside a callback of theirs that does nothing.

The trainings of a round alternate. The model is tiny: what is measured is the loop and what hangs on it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from heliograph import NaNGuard, Preemption
from heliograph.tests.kit import class_batches
from heliograph_recorder import Recorder

STEPS, ROUNDS = 300, 5
IDLE, NOTHING, PREEMPTION = "a callback that does nothing", "no plugins", "Preemption"
THREE = "Preemption, Recorder, NaNGuard('stop')"
Train = Callable[[Path, int, Sequence[Any] | None], list[float]]  # None: a callback that does nothing


class Repeated:
    """Batches of a data set, again and again."""

    def __init__(self, steps: int) -> None:
        self.steps, self.batches = steps, class_batches(16)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[step % 16] for step in range(self.steps))


def huggingface(folder: Path, steps: int, plugins: Sequence[Any] | None) -> list[float]:
    """Train with transformers; return the microseconds of each step."""
    from heliograph.packages.bridges.tests.huggingface.trainers.trainings import Linear, Rows, Script, arguments
    from heliograph_bridges.huggingface import HeliographCallback
    from transformers import TrainerCallback

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(process_time())

    callback = TrainerCallback() if plugins is None else HeliographCallback(plugins)
    trainer = Script(
        model=Linear(),
        args=arguments(folder, max_steps=steps),
        train_dataset=Rows(256),
        callbacks=[Clock(), callback],
    )
    with redirect_stdout(StringIO()):
        trainer.train()
    return differences(times)


def lightning(folder: Path, steps: int, plugins: Sequence[Any] | None) -> list[float]:
    """Train with Lightning; return the microseconds of each step."""
    import lightning.pytorch as pl
    from heliograph.packages.bridges.tests.lightning.conftest import Classifier
    from heliograph_bridges.lightning import HeliographCallback
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    times: list[float] = []

    class Clock(pl.Callback):
        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            times.append(process_time())

    class Idle(pl.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            pass

    callback = Idle() if plugins is None else HeliographCallback(plugins, save_to=folder)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = dict.fromkeys(quiet, False)
    trainer = pl.Trainer(callbacks=[Clock(), callback], accelerator="cpu", max_epochs=1, **options)
    batches: Any = class_batches(steps)
    trainer.fit(Classifier(), DataLoader(batches, batch_size=None))
    return differences(times)


def ignite(folder: Path, steps: int, plugins: Sequence[Any] | None) -> list[float]:
    """Train with Ignite; return the microseconds of each step."""
    from heliograph_bridges.ignite import attach
    from ignite.engine import Events, create_supervised_trainer
    from torch import nn

    times: list[float] = []
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = create_supervised_trainer(model, optimizer, loss)
    engine.add_event_handler(Events.ITERATION_STARTED, lambda _: times.append(process_time()))
    if plugins is None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: None)
    else:
        attach(engine, plugins, model=model, optimizer=optimizer, loss=loss, save=lambda engine: None)
    engine.run(Repeated(steps), max_epochs=1)
    return differences(times)


def differences(times: list[float]) -> list[float]:
    """Return the microseconds between moments, without the first ones."""
    return [(after - before) * 1e6 for before, after in pairwise(times[20:])]


def in_huggingface(seed: int) -> dict[str, list[float]]:
    """Measure in the Trainer of transformers."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return in_turns(huggingface)


def in_lightning(seed: int) -> dict[str, list[float]]:
    """Measure in Lightning's Trainer."""
    return in_turns(lightning)


def in_ignite(seed: int) -> dict[str, list[float]]:
    """Measure in Ignite's engine."""
    return in_turns(ignite)


def in_turns(train: Train) -> dict[str, list[float]]:
    """Return the microseconds of each step, by what hangs on the loop."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds: dict[str, Callable[[], list[Any] | None]] = {
            IDLE: lambda: None,
            NOTHING: list,
            PREEMPTION: lambda: [Preemption()],
            THREE: lambda: [Preemption(), Recorder(folder / "records"), NaNGuard("stop")],
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, make in kinds.items():
                found[kind] += train(folder, STEPS, make())
    return found
