"""What our plugins take in the loops of others: seconds of a step, beside a callback of theirs that does nothing.

    python tests/benchmarks/hosted.py [huggingface|lightning|ignite] [steps] [rounds]

Seconds of the processor, and of all steps of a kind the one that is slower than a tenth of them, so that what else runs
on the machine counts little. The trainings of a round alternate. The model is tiny: what is measured is the loop and
what hangs on it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from heliograph import NaNGuard, Preemption, Recorder
from heliograph.tests.kit import class_batches

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
    """Train with transformers; return the seconds of each step."""
    from heliograph.bridges.huggingface import HeliographCallback
    from heliograph.tests.bridges.huggingface.trainers.trainings import Linear, Rows, Script, arguments
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
    """Train with Lightning; return the seconds of each step."""
    import lightning.pytorch as pl
    from heliograph.bridges.lightning import HeliographCallback
    from heliograph.tests.bridges.lightning.conftest import Classifier
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
    """Train with Ignite; return the seconds of each step."""
    from heliograph.bridges.ignite import attach
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
    """Return the seconds between moments, without the first ones."""
    return [after - before for before, after in pairwise(times[20:])]


def measure(name: str, train: Train, steps: int, rounds: int) -> None:
    """Print a line for each kind."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds: dict[str, Callable[[], list[Any] | None]] = {
            "a callback that does nothing": lambda: None,
            "no plugins": list,
            "Preemption": lambda: [Preemption()],
            "and Recorder, NaNGuard('stop')": lambda: [Preemption(), Recorder(folder / "records"), NaNGuard("stop")],
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, make in kinds.items():
                found[kind] += train(folder, steps, make())
    typical = {kind: quantiles(seconds, n=10)[0] for kind, seconds in found.items()}
    base = typical["a callback that does nothing"]
    for kind, seconds in typical.items():
        print(f"{name:12} {kind:32} {seconds * 1e6:8.1f} us a step  {(seconds - base) * 1e6:+7.1f} us")


def main(which: str = "", steps: int = 300, rounds: int = 8) -> None:
    """Measure the loops that are named, all by default."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for train in (huggingface, lightning, ignite):
        if which in ("", train.__name__):
            measure(train.__name__, train, steps, rounds)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "", *map(int, sys.argv[2:]))
