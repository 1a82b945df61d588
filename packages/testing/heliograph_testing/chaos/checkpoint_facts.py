"""What lies in the folder of a training's checkpoints at its end: which files, and what is in the last one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heliograph.spi import Store, leaves, read_manifest

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
OF_A_PROCESS = (".lock", ".holder", ".steps")  # files that stay when it was killed


def facts_of(last: Path) -> dict[str, Leaf]:
    """Return what must be equal of a folder of checkpoints, by its path.

    Args:
        last: the last checkpoint that was written there.
    """
    names = sorted(path.name for path in last.parent.iterdir())
    hidden = [name for name in names if name.startswith(".") and not name.endswith(OF_A_PROCESS)]
    found = leaves({"leftovers": hidden or "none"})
    for name in names:
        if name.endswith(".pth") and not name.startswith("."):
            found |= leaves({CHECKPOINTS: {name: quality_of(last.with_name(name))}})
    try:
        state = Store(last.parent, last.stem).load(last)
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
        read_manifest(path)
    except (OSError, ValueError):
        return "without a manifest"
    try:
        Store(path.parent, path.stem).verify(path)
    except (OSError, ValueError):
        return "damaged"
    return "intact"
