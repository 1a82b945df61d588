"""What a training ends with, down to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heliograph.spi import leaves, read_manifest

if TYPE_CHECKING:
    from heliograph import Run
    from heliograph.spi import Leaf

WITHOUT_STRINGS = "plugins."  # their strings are files and dates


def end_of(run: Run) -> dict[str, Leaf]:
    """Return every value that must be equal at the end of a run, by its path; no collective is called.

    The states of plugins that only look on are left out: they name attempts and files.
    """
    progress = {name: value for name, value in run.progress.state_dict().items() if "seconds" not in name}
    plugins = {name: state for name, state in run.plugins.state_dict().items() if _decides(run.plugins[name])}
    found = leaves(
        {
            "progress": progress,
            "modules": {name: module.state_dict() for name, module in run.modules.items()},
            "buffers": {name: dict(module.named_buffers()) for name, module in run.modules.items()},
            "optimizers": {name: each.state_dict() for name, each in run.optimizers.items()},
            "schedulers": {name: each.state_dict() for name, each in run.schedulers.items() if each is not None},
            "metrics": dict(run.metrics),
            "plugins": plugins,
        }
    )
    return {path: leaf for path, leaf in found.items() if not (path.startswith(WITHOUT_STRINGS) and leaf.kind == "str")}


def batches_of(checkpoint: Path) -> int:
    """Return after how many batches of the training a checkpoint was made."""
    progress = read_manifest(checkpoint).progress
    return int(progress["earlier_batches"] + progress["batch"])


def _decides(plugin: object) -> bool:
    """Return whether a bit of the training may depend on a plugin."""
    return getattr(plugin, "affects_training", True) and getattr(plugin, "policy", "critical") != "observer"
