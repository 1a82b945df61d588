"""What the demo leaves and prints."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from heliograph.core.extras import require
from heliograph.core.result import RunResult

PANELS = {
    "loss": ("train/loss", "validation/loss"),
    "accuracy": ("train/accuracy", "validation/accuracy"),
    "learning rate": ("train/learning_rate",),
}


def curves(log: Path, picture: Path) -> None:
    """Draw the curves of a run from its JSON lines, checkpoints marked."""
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
        if best:
            axis.axvline(best[-1], color="grey", linestyle=":", label="best checkpoint")
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize="small")
    axes[0].set_yscale("log")
    axes[2].set_yscale("log")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def summary(result: RunResult, best: dict[str, float], accuracy: float, folder: Path, seconds: float) -> str:
    """Return the demo's last words."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    asker = f" by {result.stopped_by}" if result.stopped_by else ""
    times = sorted(result.plugin_seconds.items(), key=lambda item: -item[1])
    lines = [
        "",
        f"{result.status}{asker}: {result.reason}",
        f"  {result.progress.epoch} epochs, {result.progress.steps} optimizer steps, "
        f"{result.progress.samples} samples in {seconds:.1f} s",
        f"  test accuracy {accuracy:.2%} with the weights of {result.best_checkpoint}",
        f"  best validation: loss {best['validation/loss']:.4f}, accuracy {best['validation/accuracy']:.2%}",
        "",
        "files",
        *(f"  {path}" for path in sorted(folder.rglob("*")) if path.is_file()),
        "",
        "time in plugins",
        *(f"  {name:<24} {1e3 * spent:8.1f} ms" for name, spent in times if spent > 1e-4),
        "",
        "next",
        f"  {python} -m tensorboard.main --logdir {folder / 'tensorboard'}   (or open {folder / 'curves.png'})",
        f"  {python} -m heliograph events     what happens in which order",
        f"  {python} -m heliograph plugins    what is installed",
        "  docs/writing_a_plugin.md, in the repository: your first plugin in ten minutes",
    ]
    return "\n".join(lines)
