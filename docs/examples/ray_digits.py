"""Train the demo's network on a Ray cluster: on one of two workers on this machine, or on yours by its address.

    python docs/examples/ray_digits.py
    python docs/examples/ray_digits.py --lose-a-worker
    python docs/examples/ray_digits.py --address auto --workers 8 --storage s3://bucket/runs

Every machine needs `pip install ./packages/ray './packages/recorder[demo]'`; workers on several machines need a
storage that all reach.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from threading import Event
from time import perf_counter

import heliograph as h
import heliograph_ray
import torch
from heliograph_ray import RayLauncher
from heliograph_recorder.demo.training import Augmented, digits, task

GLOBAL_BATCH = 64
VALIDATED = 300  # samples at once


class LoseAWorker(h.Plugin):
    """Kill the last worker in the middle of an epoch, as a machine that goes down would; not when it is made up for.

    Args:
        epoch: in which one.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    @h.on(h.BatchEnd)
    def kill(self, run: h.Run, event: h.BatchEnd) -> None:
        """Kill it, if it is time to."""
        session, rank = heliograph_ray.current_session(), run.engine.rank
        is_first = session is not None and not session.is_restart
        if (
            is_first
            and rank + 1 == run.engine.world_size
            and run.progress.epoch == self.epoch
            and run.progress.batch > 6
        ):
            Event().wait(1.0)  # each worker reports its progress twice a second
            os.kill(os.getpid(), signal.SIGKILL)


def train(epochs: int, *plugins: h.Plugin) -> float:
    """Train on this worker's part of the digits; return the accuracy on the test set, the same on every worker."""
    training, validation, test = digits()
    supervised = task()
    optimizer = torch.optim.AdamW(supervised.model.parameters(), lr=3e-3)
    trainer = h.Trainer(
        [
            h.RNGCapture(),
            h.LearningRate("epoch"),
            h.ValidationSchedule(h.Every(epochs=1)),
            h.SaveSchedule(h.Every(epochs=1)),
            h.Checkpoint("checkpoints", keep_best=1, monitor="validation/loss"),
            h.LoadBest(),
            *plugins,
        ]
    )
    trainer.fit(
        supervised,
        Augmented(training),
        loader_params={"global_batch_size": GLOBAL_BATCH, "shuffle": True},
        validation=torch.utils.data.DataLoader(validation, batch_size=VALIDATED),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        epochs=epochs,
        name="digits",
    )
    return trainer.test(supervised, test, loader_params={"batch_size": VALIDATED}).metrics["test/accuracy"]


def main() -> None:
    """Train as the command line says, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a cluster: auto, or host:port; without it, one is started here")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--storage", help="where checkpoints go: a folder that all machines share, s3://...")
    parser.add_argument("--lose-a-worker", action="store_true", help="kill one halfway, and see what it costs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launcher = RayLauncher(
            options.workers,
            address=options.address,
            storage_path=options.storage or folder,
            max_failures=3,
            check_interval=0.2,
        )
        plugins = [LoseAWorker(options.epochs // 2)] if options.lose_a_worker else []
        began = perf_counter()
        values = launcher.run(train, options.epochs, *plugins)
        print(report(values, perf_counter() - began))


def report(values: heliograph_ray.RayValues, seconds: float) -> str:
    """Return what to print.

    Args:
        values: what the launcher returned.
        seconds: that it took.
    """
    result = values.result
    assert result is not None
    progress, trained = result.progress, sum(each.seconds for each in values.attempts)
    each_epoch = progress.seconds / progress.epoch
    lines = [
        f"test accuracy {values[0]:.2%} after {progress.epoch} epochs, {progress.steps} steps on {len(values)} workers",
        f"{seconds:.1f} s in all, of which the workers were there for {trained:.1f} s",
        f"A lost worker costs at most the epoch since the last checkpoint, {each_epoch:.1f} s here, and new workers, "
        f"about {(seconds - trained) / len(values.attempts):.0f} s.",
    ]
    for attempt in values.attempts[:-1]:
        lost = "nothing" if attempt.lost is None else f"at least {attempt.lost.steps} steps"
        lines.append(f"attempt {attempt.number} {attempt.kind}: {attempt.failure}; {lost} repeated")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
