"""What our plugins take in the Trainer of Hugging Face: seconds of a training, beside a callback that does nothing.

    python tests/benchmarks/hosted.py [steps] [rounds]

Seconds of the processor, and of all steps of a kind the one that is slower than a tenth of them, so that what else runs
on the machine counts little. The trainings of a round alternate. The model is tiny: what is measured is the Trainer and
what hangs on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from heliograph import EarlyStopping, NaNGuard, Preemption, Recorder
from heliograph.bridges.huggingface import HeliographCallback
from heliograph.tests.bridges.huggingface.trainers.trainings import Linear, Rows, Script, arguments
from transformers import TrainerCallback
from transformers.utils import logging

logging.set_verbosity_error()  # type: ignore[no-untyped-call]
torch.set_num_threads(1)


class Clock(TrainerCallback):
    """Notes when steps begin."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(process_time())


def train(folder: Path, steps: int, callbacks: list[Any]) -> list[float]:
    """Return the seconds of each step."""
    options: dict[str, Any] = {"max_steps": steps, "eval_strategy": "steps", "eval_steps": steps}
    clock = Clock()
    trainer = Script(
        model=Linear(),
        args=arguments(folder, **options),
        train_dataset=Rows(256),
        eval_dataset=Rows(4),
        callbacks=[clock, *callbacks],
    )
    with redirect_stdout(StringIO()):
        trainer.train()
    return [after - before for before, after in pairwise(clock.times)]


def main(steps: int = 300, rounds: int = 15) -> None:
    """Print a line for each kind."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        kinds: dict[str, Callable[[], list[Any]]] = {
            "a callback that does nothing": lambda: [TrainerCallback()],
            "HeliographCallback([])": lambda: [HeliographCallback([])],
            "with EarlyStopping, Preemption": lambda: [HeliographCallback([EarlyStopping(), Preemption()])],
            "and Recorder, NaNGuard('stop')": lambda: [
                HeliographCallback([EarlyStopping(), Preemption(), Recorder(folder / "records"), NaNGuard("stop")])
            ],
        }
        for make in kinds.values():
            train(folder, 50, make())
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, make in kinds.items():
                found[kind] += train(folder, steps, make())
    typical = {kind: quantiles(seconds, n=10)[0] for kind, seconds in found.items()}
    base = typical["a callback that does nothing"]
    for kind, seconds in typical.items():
        print(f"{kind:32} {seconds * 1e6:8.1f} us a step  {(seconds - base) * 1e6:+7.1f} us")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
