"""The functions that workers call in the tests of the launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Event

import heliograph as h
import torch
from heliograph.core.distributed.launcher import child_queue
from heliograph.tests.kit import sgd
from heliograph_ray.session import current_session
from torch import nn
from torch.utils.data import TensorDataset


class OwnError(Exception):
    """Its constructor cannot be called with its `args`, as pickle does."""

    def __init__(self, *, code: int) -> None:
        super().__init__("own")
        self.code = code


class Announce(h.Plugin):
    """On rank 0, send a message when the training runs; on all ranks, write how it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @h.on(h.StepEnd, when=h.At(steps=3))
    def announce(self, run: h.Run, event: h.StepEnd) -> None:
        queue = child_queue()
        assert queue is not None
        if run.engine.is_main:
            queue.put("running")

    @h.on(h.RunClosed)
    def write(self, run: h.Run, event: h.RunClosed) -> None:
        (self.folder / f"ended-{run.engine.rank}").write_text(f"{event.status}: {run.control.stop_request}")


def rank() -> int:
    """Return this worker's rank."""
    return int(os.environ["RANK"])


def put_messages(factor: int, *, size: int) -> tuple[int, int, bytes]:
    """Put messages into the queue; return a large value."""
    queue = child_queue()
    assert queue is not None
    for number in range(100):
        queue.put((rank(), number))
    return rank() * factor, int(os.environ["WORLD_SIZE"]), bytes(size)


def fail(folder: Path) -> str:
    """Raise on rank 1, return on rank 0."""
    with (folder / f"entered-{rank()}").open("a") as file:
        file.write("x")
    if rank() == 1:
        raise OwnError(code=7)
    return "done"


def die(folder: Path) -> None:
    """Die on rank 1 as soon as both ranks have entered, in every attempt; wait on rank 0."""
    with (folder / f"entered-{rank()}").open("a") as file:
        file.write("x")
    torch.distributed.barrier()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def wait_for_notice() -> None:
    """Wait until Ray has announced that a machine is to be taken away."""
    session = current_session()
    assert session is not None
    while session.notice() is None:
        Event().wait(0.05)


def train_forever(folder: Path) -> None:
    """Train until the run is stopped, and save then."""
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(32.0).reshape(8, 4), torch.ones(8, 1))
    trainer = h.Trainer(
        [Announce(folder), h.SaveSchedule(h.Every(steps=1_000_000)), h.Checkpoint(folder)], use_cpu=True
    )
    trainer.fit(
        h.Supervised(nn.Linear(4, 1), nn.functional.mse_loss),
        data,
        loader_params={"batch_size": 2},
        optimizer=sgd(1e-6),
        epochs=1_000_000,
    )
