"""The curves and the summary of the demo."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from heliograph import RunResult
from heliograph.spi import require

PANELS = {
    "loss": ("train/loss", "validation/loss"),
    "accuracy": ("train/accuracy", "validation/accuracy"),
    "learning rate": ("train/learning_rate",),
}


def draw_curves(log: Path, picture: Path, resumed: int | None) -> None:
    """Draw the curves of a run from its JSON lines, with marks for the resume and the best checkpoint.

    Args:
        log: the JSON lines.
        picture: the file to write.
        resumed: the step at which the run was resumed.
    """
    matplotlib = require("matplotlib", "The demo", extra="examples")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", "The demo", extra="examples")
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    best = [record["step"] for record in records if record["event"] == "checkpoint_saved" and record["is_best"]]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(12, 3.2), layout="constrained")
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for name in names:
            points = [(each["step"], each["metrics"][name]) for each in records if name in each.get("metrics", {})]
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
    """Return the summary that the demo prints at its end.

    Args:
        result: of the resumed run.
        best: the metrics of the best checkpoint.
        accuracy: of the best weights, on the test set.
        parts: name and both fingerprints of each part that was compared.
        story: of the recording, in a few lines.
        folder: of the demo's files.
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
    """Return where the run was resumed, and whether it ended equal to the uninterrupted one."""
    resume = result.resume
    assert resume is not None
    where = f"epoch {resume.epoch}, batch {resume.batch}, step {resume.step}, from {resume.path}"
    equal = all(one == other for _, one, other in parts)
    return [
        f"killed, then resumed at {where}" if resume.path else "killed before the first save, so started again",
        f"  result.resume: {resume}",
        *(f"  {name:<18} {one[:16]} {'==' if one == other else '!='} {other[:16]}" for name, one, other in parts),
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
        "  docs/writing_a_plugin.md, in the repository: your first plugin in ten minutes",
    ]
