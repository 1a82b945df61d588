"""What lies in the folder of a training's checkpoints at its end: which files, and what is in the last one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage.files import SYSTEM
from heliograph.spi import leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heliograph.spi import Leaf

CHECKPOINTS = "checkpoints"
LAST = "last_checkpoint."
NAMES = (
    f"{CHECKPOINTS}.",
    f"{LAST}name",
)  # others where saves were asked for or lost, or a training began again
PARTS = ("modules", "optimizers", "schedulers", "control", "epoch_begun", "at_save_point")
OF_A_PROCESS = (".lock", ".steps")  # files that stay when it was killed


def facts_of(last: Path) -> dict[str, Leaf]:
    """Return what must be equal of a folder of checkpoints, by its path.

    Args:
        last: the last checkpoint that was written there.
    """
    names = sorted(path.name for path in last.parent.iterdir())
    hidden = [name for name in names if name.startswith(".") and not name.endswith(OF_A_PROCESS)]
    found = leaves({"leftovers": hidden or "none"})
    checkpoints = {last.with_name(name).with_suffix(".pth") for name in names if name.endswith((".pth", ".json"))}
    for path in sorted(path for path in checkpoints if not path.name.startswith(".")):
        found |= leaves({CHECKPOINTS: {path.name: quality_of(path)}})
    try:
        state = storage.load(last)
    except (OSError, ValueError) as error:
        return found | leaves({"last_checkpoint": str(error).replace(str(last.parent), "")})  # alike in every copy
    progress = {name: value for name, value in state["progress"].items() if "seconds" not in name}
    compared = {part: state[part] for part in PARTS if part in state}
    return found | leaves({"last_checkpoint": {"name": last.name, "progress": progress, **compared}})


def is_of_end(facts: Mapping[str, Leaf]) -> bool:
    """Return whether the last checkpoint of a training, by what it ended with, is of its end."""
    counters = ("epoch", "batch", "earlier_batches")
    return all(facts.get(f"{LAST}progress.{name}") == facts.get(f"progress.{name}") for name in counters)


def quality_of(path: Path) -> str:
    """Return whether the bytes of a checkpoint are those that its manifest says: `intact`, or what is wrong."""
    try:
        entry = storage.read_manifest(path)
    except (OSError, ValueError):
        return "without a manifest"
    try:
        return "intact" if SYSTEM.digest(path) == (entry.size, entry.sha256) else "damaged"
    except OSError:
        return "without its data"
