"""Train a small CNN on handwritten digits, kill it half way, resume, and compare with an uninterrupted run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from time import perf_counter

import heliograph as h
from heliograph.spi import Store
from torch.utils.data import DataLoader

from ..explain.story import brief
from ..format.reader import read
from ..timeline.page import write_timeline
from .data import digits
from .processes import train_until_killed, uninterrupted_training
from .proof import compare
from .report import draw_curves, summary
from .training import NAME, reporting_plugins, task, train, training_plugins

UNINTERRUPTED = "uninterrupted"  # a folder
CHECKPOINTS = ("checkpoints", f"{UNINTERRUPTED}/checkpoints")
OUTPUTS = (
    *(f"{each}/{NAME}_epoch_*.{end}" for each in CHECKPOINTS for end in ("pth", "json", "pinned")),
    *(f"{each}/{NAME}.{pointer}" for each in CHECKPOINTS for pointer in ("last", "best")),
    "tensorboard/**/events.out.tfevents.*",
    f"{NAME}_*.log",
    f"{NAME}_*.recording*",
    "log.jsonl",
    "log.jsonl.tmp",
    "curves.png",
    "timeline.html",
)


def remove_outputs(folder: Path) -> None:
    """Remove the files of a former demo, and no others.

    Raises:
        ValueError: another demo is running there.
    """
    for each in CHECKPOINTS:
        with closing(Store(folder / each, NAME)) as store:
            store.open()  # also removes the files of a killed save
    for pattern in OUTPUTS:
        for path in folder.glob(pattern):
            path.unlink()


def run_demo(folder: Path, epochs: int) -> bool:
    """Train with a kill halfway, test the best checkpoint, draw the curves, print a summary.

    Args:
        folder: for checkpoints, logs, the recording and the pictures.
        epochs: the maximum; early stopping ends it sooner.

    Returns:
        Whether the resumed run ended equal to an uninterrupted one, bit for bit.
    """
    began = perf_counter()
    _, _, test = digits()
    remove_outputs(folder)
    plugins = [*training_plugins(folder), *reporting_plugins(folder)]
    trainer, supervised = h.Trainer(plugins, device="cpu"), task()
    print("One process trains until it is killed halfway. Another one trains uninterrupted, silently.\n", flush=True)
    with uninterrupted_training(folder / UNINTERRUPTED, epochs):
        train_until_killed(folder, epochs)
        print("This process resumes, with resume='auto':\n", flush=True)
        result = train(trainer, supervised, epochs)
        assert result.best_checkpoint is not None
        assert result.resume is not None
        best = h.load_weights(supervised, result.best_checkpoint).metrics
        with trainer.plugins.disabled("progress"):
            tested = trainer.test(supervised, DataLoader(test, batch_size=300), name=NAME)
        draw_curves(folder / "log.jsonl", folder / "curves.png", result.resume.step)
    assert result.recording is not None
    recording = read(result.recording)
    write_timeline(recording, folder / "timeline.html")
    uninterrupted, _, _ = Store(folder / CHECKPOINTS[1], NAME).newest()
    assert result.last_checkpoint is not None
    assert uninterrupted is not None
    parts = compare(result.last_checkpoint, uninterrupted.path)
    print(summary(result, best, tested.metrics["test/accuracy"], parts, brief(recording), folder))
    print(f"\n{perf_counter() - began:.1f} s in all")
    return all(one == other for _, one, other in parts)
