"""The demo: train a small CNN, kill it halfway, resume, and compare with an uninterrupted run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import heliograph as h
from heliograph import RunResult
from heliograph.spi import Store, leaves, require
from torch.utils.data import DataLoader

from ..explain.story import brief
from ..format.reader import read
from ..timeline.page import write_timeline
from .data import digits
from .processes import train_until_killed, uninterrupted_training
from .training import NAME, reporting_plugins, task, train, training_plugins

UNINTERRUPTED = "uninterrupted"  # a folder
CHECKPOINTS = ("checkpoints", f"{UNINTERRUPTED}/checkpoints")
PANELS = {
    "loss": ("train/loss", "validation/loss"),
    "accuracy": ("train/accuracy", "validation/accuracy"),
    "learning rate": ("train/learning_rate",),
}
OUTPUTS = (
    *(f"{folder}/{NAME}_epoch_*.{end}" for folder in CHECKPOINTS for end in ("pth", "json", "pinned")),
    *(f"{folder}/{NAME}.{pointer}" for folder in CHECKPOINTS for pointer in ("last", "best")),
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
    parts = compare_checkpoints(result.last_checkpoint, uninterrupted.path)
    print(summary(result, best, tested.metrics["test/accuracy"], parts, brief(recording), folder))
    print(f"\n{perf_counter() - began:.1f} s in all")
    return all(resumed == expected for _, resumed, expected in parts)


def compare_checkpoints(first: Path, second: Path) -> list[tuple[str, str, str]]:
    """Return the name and both fingerprints of each part of two checkpoints."""
    pairs = zip(_parts(first).items(), _parts(second).values(), strict=True)
    return [(name, fingerprint(value), fingerprint(expected)) for (name, value), expected in pairs]


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


def draw_curves(log: Path, picture: Path, resumed: int | None) -> None:
    """Draw the curves of a JSON-lines log, with marks for the resumed step and the best checkpoint."""
    matplotlib = require("matplotlib", "The demo", extra="examples")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", "The demo", extra="examples")
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    best = [record["step"] for record in records if record["event"] == "checkpoint_saved" and record["is_best"]]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(12, 3.2), layout="constrained")
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for name in names:
            logs = [record for record in records if name in record.get("metrics", {})]
            points = [(record["step"], record["metrics"][name]) for record in logs]
            axis.plot(*zip(*points, strict=True), label=name)
        if resumed is not None:
            axis.axvline(resumed, color="grey", linewidth=0.8, label="killed, and resumed here")
        if best:
            axis.axvline(best[-1], color="grey", linestyle=":", label="best checkpoint")
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize="small")
    axes[0].set_yscale("log")
    axes[2].set_yscale("log")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def summary(
    result: RunResult,
    best: Mapping[str, float],
    accuracy: float,
    parts: Sequence[tuple[str, str, str]],
    story: Sequence[str],
    folder: Path,
) -> str:
    """Return the summary.

    Args:
        result: of the resumed run.
        best: the metrics of the best checkpoint.
        accuracy: of the best weights, on the test set.
        parts: name and both fingerprints of each compared part.
        story: a few lines about the recording.
        folder: of the files.
    """
    return "\n".join(
        [
            "",
            *_ending(result, best, accuracy),
            "",
            *_proof(result, parts),
            "",
            "files",
            *(f"  {path}" for path in sorted(folder.rglob("*")) if path.is_file()),
            "",
            "from the recording",
            *(f"  {line}" for line in story),
            "",
            "next",
            *_next(folder),
        ]
    )


def _ending(result: RunResult, best: Mapping[str, float], accuracy: float) -> list[str]:
    requester = f" by {result.stopped_by}" if result.stopped_by else ""
    at = result.progress
    return [
        f"{result.status}{requester}: {result.reason}",
        f"  {at.epoch} epochs, {at.steps} optimizer steps, {at.samples} samples in {at.seconds:.1f} s",
        f"  test accuracy {accuracy:.2%} with the weights of {result.best_checkpoint}",
        f"  best validation: loss {best['validation/loss']:.4f}, accuracy {best['validation/accuracy']:.2%}",
    ]


def _proof(result: RunResult, parts: Sequence[tuple[str, str, str]]) -> list[str]:
    resume = result.resume
    assert resume is not None
    position = f"epoch {resume.epoch}, batch {resume.batch}, step {resume.step}, from {resume.path}"
    equal = all(resumed == expected for _, resumed, expected in parts)
    return [
        f"killed, then resumed at {position}" if resume.path else "killed before the first save, so started again",
        f"  result.resume: {resume}",
        *(f"  {name:<18} {a[:16]} {'==' if a == b else '!='} {b[:16]}" for name, a, b in parts),
        "  everything equals the uninterrupted run, bit for bit"
        if equal
        else "  NOT EQUAL to the uninterrupted run: this is a bug in heliograph, please report it",
    ]


def _next(folder: Path) -> list[str]:
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    return [
        f"  {python} -m heliograph explain {folder}     the whole story (see also {folder / 'timeline.html'})",
        f"  {python} -m heliograph replay {folder} --plugin early_stopping:patience=3     with less patience",
        f"  {python} -m tensorboard.main --logdir {folder / 'tensorboard'}   (or open {folder / 'curves.png'})",
        f"  {python} -m heliograph events     the events in the order of the loop",
        f"  {python} -m heliograph plugins    the installed plugins",
        "  docs/learn/first_plugin.md, in the repository: your first plugin in ten minutes",
    ]
