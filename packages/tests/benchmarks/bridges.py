"""What an idle callback of another framework costs here, beside its own loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any

import heliograph as h
import torch
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from torch import nn
from torch.utils.data import DataLoader

CALLS, REPEATS = 200, 300
STEPS, ROUNDS = 1_000, 5
HERE, THERE = "here", "there"
OURS, THEIRS = "our loop", "Lightning's loop"
OF_OURS = ("Lightning, no hooks: here", "Lightning, two idle hooks of a batch: here", "Lightning, Timer: here")
OF_THEIRS = ("Lightning, two idle hooks of a batch: in its loop", "Lightning, Timer: in its loop")
Spent = dict[str, list[float]]


class Repeats(h.Plugin):
    """At the end of the third batch, calls a handler over and over."""

    def __init__(self, call: Callable[[h.Run], None]) -> None:
        self.call, self.spent = call, list[float]()

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def measure(self, run: h.Run, event: h.BatchEnd) -> None:
        """Time the calls."""
        if run.progress.batch == 3:
            self.spent = repeated(partial(self.call, run))


def repeated(call: Callable[[], object]) -> list[float]:
    """Return the microseconds of a call, of many short turns."""
    spent = []
    for _ in range(REPEATS):
        begin = perf_counter()
        for _ in range(CALLS):
            call()
        spent.append((perf_counter() - begin) / CALLS * 1e6)
    return spent


def here(plugin: Any, call: Callable[[h.Run], None]) -> list[float]:
    """Return what a call costs within a training that has the plugin."""
    repeats = Repeats(call)
    h.Trainer([plugin, repeats], device="cpu").fit(linear_classifier(), class_batches(4), optimizer=sgd(), epochs=1)
    return repeats.spent


def huggingface(seed: int) -> Spent:
    """Measure the end of a step."""
    from heliograph_bridges.huggingface import from_huggingface
    from transformers import TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    class Idle(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            pass

    bridged, event = from_huggingface(Idle()), h.BatchEnd()

    def end(run: h.Run) -> None:
        bridged._steps = -1
        bridged.end_batch(run, event)

    make: Any = CallbackHandler
    handler = make([Idle()], None, None, None, None)
    state, control = TrainerState(), TrainerControl()
    return {HERE: here(bridged, end), THERE: repeated(lambda: handler.on_step_end(None, state, control))}


def ignite(seed: int) -> Spent:
    """Measure the end of an iteration."""
    from heliograph_bridges.ignite import from_ignite
    from ignite.engine import Engine, Events

    logging.disable(logging.CRITICAL)
    bridged, event = from_ignite(lambda engine: None, Events.ITERATION_COMPLETED), h.BatchEnd()
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: None)
    return {
        HERE: here(bridged, lambda run: bridged.end_batch(run, event)),
        THERE: repeated(lambda: engine.fire_event(Events.ITERATION_COMPLETED)),
    }


def lightning(seed: int) -> Spent:
    """Measure whole trainings: the microseconds of processor time of a step."""
    import lightning.pytorch as pl
    from heliograph_bridges.lightning import from_lightning
    from lightning.pytorch.callbacks import Timer

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batches: Any = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(50)]

    class Idle(pl.Callback):
        def on_train_batch_start(self, *given: Any) -> None:
            pass

        def on_train_batch_end(self, *given: Any) -> None:
            pass

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(8, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def ours(*callbacks: Any) -> None:
        trainer = h.Trainer([h.RNGCapture(), h.LogSchedule(steps=200), *map(from_lightning, callbacks)], device="cpu")
        task = h.Supervised(nn.Linear(8, 1), nn.functional.mse_loss)
        trainer.fit(task, batches, optimizer=partial(torch.optim.SGD, lr=0.01), steps=STEPS)

    def theirs(*callbacks: Any) -> None:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options: dict[str, Any] = dict.fromkeys(quiet, False)
        trainer = pl.Trainer(max_steps=STEPS, accelerator="cpu", callbacks=list(callbacks), **options)
        trainer.fit(Module(), DataLoader(batches, batch_size=None))

    makers: list[Callable[[], pl.Callback]] = [pl.Callback, Idle, partial(Timer, "01:00:00:00")]
    trainings: dict[str, Callable[[], None]] = {OURS: ours, THEIRS: theirs}
    for loop, names, made in ((ours, OF_OURS, makers), (theirs, OF_THEIRS, makers[1:])):
        for name, make in zip(names, made, strict=True):
            trainings[name] = lambda loop=loop, make=make: loop(make())  # type: ignore[misc]
    return in_turns(trainings)


def in_turns(trainings: dict[str, Callable[[], None]]) -> Spent:
    """Return the microseconds of processor time of a step, of each round but the first: that one imports."""
    spent: Spent = {name: [] for name in trainings}
    for index in range(ROUNDS + 1):
        for name, train in trainings.items():
            begin = process_time()
            train()
            if index:
                spent[name].append((process_time() - begin) / STEPS * 1e6)
    return spent
