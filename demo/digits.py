"""Train a small CNN on handwritten digits, be killed half way, go on, and compare with a run that was left alone."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from time import perf_counter

import heliograph as h
from heliograph.builtin_callbacks.recorder.explain.story import brief
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.timeline.page import write_timeline
from heliograph.core.checkpoint import storage
from torch.utils.data import DataLoader

from .data import digits
from .legs import left_alone, train_until_killed
from .proof import compare
from .report import curves, summary
from .training import NAME, deciding, reporting, task, train

ALONE = "left_alone"
CHECKPOINTS = ("checkpoints", f"{ALONE}/checkpoints")
LEFT_BEHIND = (
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


def forget(folder: Path) -> None:
    """Remove what a former demo left, and nothing else.

    Raises:
        ValueError: another demo is running there.
    """
    for each in CHECKPOINTS:
        with closing(storage.Store(folder / each, NAME)) as store:
            store.open()  # also removes what a killed save left
    for pattern in LEFT_BEHIND:
        for path in folder.glob(pattern):
            path.unlink()


def run_demo(folder: Path, epochs: int) -> bool:
    """Train with a kill half way, test the best checkpoint, leave the curves, print a summary.

    Args:
        folder: where to leave checkpoints, logs, the recording and the pictures.
        epochs: at most so many; early stopping ends it sooner.

    Returns:
        Whether the run ended with the very bits of one that was left alone.
    """
    began = perf_counter()
    _, _, test = digits()
    forget(folder)
    trainer, supervised = h.Trainer([*deciding(folder), *reporting(folder)], device="cpu"), task()
    print("A process trains, until it is killed half way. Another one, without a bar, is left alone.\n", flush=True)
    with left_alone(folder / ALONE, epochs):
        train_until_killed(folder, epochs)
        print("This process goes on, with resume='auto':\n", flush=True)
        result = train(trainer, supervised, epochs)
        assert result.best_checkpoint is not None
        assert result.resume is not None
        best = h.load_weights(supervised, result.best_checkpoint)
        with trainer.plugins.disabled("progress"):
            tested = trainer.test(supervised, DataLoader(test, batch_size=300), name=NAME)
        curves(folder / "log.jsonl", folder / "curves.png", result.resume.step)
    assert result.recording is not None
    recording = read(result.recording)
    write_timeline(recording, folder / "timeline.html")
    undisturbed, _, _ = storage.newest(folder / CHECKPOINTS[1], NAME)
    assert result.last_checkpoint is not None
    assert undisturbed is not None
    parts = compare(result.last_checkpoint, undisturbed.path)
    print(summary(result, best, tested.metrics["test/accuracy"], parts, brief(recording), folder))
    print(f"\n{perf_counter() - began:.1f} s in all")
    return all(one == other for _, one, other in parts)
