"""The demo: train a small CNN, kill it halfway, resume, and compare with an uninterrupted run."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import heliograph as h
from heliograph import RunResult
from heliograph.spi import Store, leaves
from torch.utils.data import DataLoader

from ..format.reader import read
from ..timeline.page import write_timeline
from .training import EVERY, NAME, digits, reporting_plugins, task, train, training_plugins

MODULE = "heliograph_recorder.demo.digits"
LATEST_KILL = 16  # epoch; early stopping ends the training after about twice as many

UNINTERRUPTED = "uninterrupted"  # a folder
CHECKPOINTS = ("checkpoints", f"{UNINTERRUPTED}/checkpoints")
OUTPUTS = (
    *(f"{folder}/{NAME}_epoch_*.{end}" for folder in CHECKPOINTS for end in ("pth", "json", "pinned")),
    *(f"{folder}/{NAME}.{pointer}" for folder in CHECKPOINTS for pointer in ("last", "best")),
    "checkpoints/.verified.jsonl",
    "tensorboard/**/events.out.tfevents.*",
    f"{NAME}_*.log",
    f"{NAME}_*.recording*",
    "log.jsonl",
    "log.jsonl.tmp",
    "curves.png",
    "timeline.html",
)


def remove_outputs(folder: Path) -> None:
    """Remove the files of an earlier demo; ValueError if a demo is running in the folder."""
    for name in CHECKPOINTS:
        with closing(Store(folder / name, NAME)) as store:
            store.open()  # also removes the files of a killed save
    for pattern in OUTPUTS:
        for path in folder.glob(pattern):
            path.unlink()


def run_demo(folder: Path, epochs: int) -> bool:
    """Run the demo; return whether the resumed run is bitwise identical to an uninterrupted one."""
    began = perf_counter()
    _, _, test = digits()
    remove_outputs(folder)
    plugins = [*training_plugins(folder), *reporting_plugins(folder)]
    trainer, supervised = h.Trainer(plugins, device="cpu"), task()
    print(
        "One process trains until it is killed halfway. A second process trains uninterrupted, silently.\n", flush=True
    )
    other = _process("uninterrupted", folder / UNINTERRUPTED, epochs)
    try:
        killed = _process("killed", folder, epochs)
        if killed.wait() != -signal.SIGKILL:
            raise ValueError(f"The process that should have been killed ended with exit status {killed.returncode}.")
        print("This process resumes, with resume='auto':\n", flush=True)
        result = train(trainer, supervised, epochs)
        assert result.best_checkpoint is not None
        best = h.load_weights(supervised, result.best_checkpoint).metrics
        with trainer.plugins.disabled("progress"):
            tested = trainer.test(supervised, DataLoader(test, batch_size=300), name=NAME)
        result.plot(folder / "curves.png")
        if other.wait():
            raise ValueError(f"The uninterrupted process failed with exit status {other.returncode}.")
    finally:
        other.kill()
        other.wait()
    assert result.recording is not None
    write_timeline(read(result.recording), folder / "timeline.html")
    uninterrupted, _, _ = Store(folder / CHECKPOINTS[1], NAME).newest()
    assert result.last_checkpoint is not None
    assert uninterrupted is not None
    parts = compare_checkpoints(result.last_checkpoint, uninterrupted.path)
    print(summary(result, best, tested.metrics["test/accuracy"], parts, folder))
    print(f"\n{perf_counter() - began:.1f} s in all")
    return all(resumed == expected for _, resumed, expected in parts)


class KillHalfWay(h.Plugin):
    """Kills its process halfway between two saves, in the given epoch or later."""

    affects_training = False

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def kill(self, run: h.Run, event: h.BatchEnd) -> None:
        epoch, step = run.progress.epoch, run.progress.steps
        is_half_way = step > EVERY and step % EVERY == EVERY // 2 and not run.stepping.window
        if epoch >= self.epoch and is_half_way and not run.data.is_last_batch:
            print(f"\n\nKilled by SIGKILL in epoch {epoch}, after step {step}.", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def _process(kind: str, folder: Path, epochs: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", MODULE, kind, str(folder), str(epochs)])  # noqa: S603  # this module


def compare_checkpoints(first: Path, second: Path) -> list[tuple[str, str, str]]:
    """Return the name and both fingerprints of each part of two checkpoints."""
    others = _parts(second)
    return [(name, fingerprint(value), fingerprint(others[name])) for name, value in _parts(first).items()]


def fingerprint(value: Any) -> str:
    facts = [(path, leaf.kind, leaf.digest) for path, leaf in leaves(value).items()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _parts(checkpoint: Path) -> dict[str, Any]:
    state = Store(checkpoint.parent, checkpoint.stem).load(checkpoint)
    return {
        "weights": state["modules"],
        "optimizer": state["optimizers"],
        "scheduler": state["schedulers"],
        "random generators": state["plugins"]["rng_capture"],
    }


def summary(
    result: RunResult, best: Mapping[str, float], accuracy: float, parts: Sequence[tuple[str, str, str]], folder: Path
) -> str:
    """Return the summary.

    Args:
        result: of the resumed run.
        best: the metrics of the best checkpoint.
        accuracy: of the best weights, on the test set.
        parts: name and both fingerprints of each compared part.
        folder: of the files.
    """
    resume, at = result.resume, result.progress
    assert resume is not None
    requester = f" by {result.stopped_by}" if result.stopped_by else ""
    lines = [
        "",
        f"{result.status}{requester}: {result.reason}",
        f"  {at.epoch} epochs, {at.steps} optimizer steps, {at.samples} samples in {at.seconds:.1f} s",
        f"  test accuracy {accuracy:.2%} with the weights of {result.best_checkpoint}",
        f"  best validation: loss {best['validation/loss']:.4f}, accuracy {best['validation/accuracy']:.2%}",
        "",
        f"killed, then resumed at epoch {resume.epoch}, batch {resume.batch}, step {resume.step}, from {resume.path}"
        if resume.path
        else "killed before the first save, so started again",
        f"  result.resume: {resume}",
        *(f"  {name:<18} {a[:16]} {'==' if a == b else '!='} {b[:16]}" for name, a, b in parts),
        "  everything equals the uninterrupted run, bit for bit"
        if all(resumed == expected for _, resumed, expected in parts)
        else "  NOT EQUAL to the uninterrupted run: this is a bug in heliograph, please report it",
        "",
        f"next: python -m heliograph explain {folder}, or open {folder / 'timeline.html'}",
    ]
    return "\n".join(lines)


def _main(kind: str, folder: Path, epochs: int) -> None:
    plugins = training_plugins(folder)
    if kind == "killed":
        plugins += [*reporting_plugins(folder), KillHalfWay(min(epochs // 2, LATEST_KILL))]
    else:
        logging.getLogger("heliograph").addHandler(logging.NullHandler())
    train(h.Trainer(plugins, device="cpu"), task(), epochs)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
