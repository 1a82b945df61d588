"""What lies in the folder of a training's checkpoints at its end: which files, and what is in the last one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import Fact, Store, leaves, read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

AT_THE_END = "at the end of the run"
PARTS = ("modules", "optimizers", "schedulers", "control", "epoch_begun", "at_save_point")
OF_A_PROCESS = (".lock", ".holder", ".steps")  # files that stay when it was killed


def facts_of(last: Path) -> list[Fact]:
    """Return what must be equal of a folder of checkpoints.

    Args:
        last: the last checkpoint that was written there.
    """
    names = sorted(path.name for path in last.parent.iterdir())
    hidden = [name for name in names if name.startswith(".") and not name.endswith(OF_A_PROCESS)]
    whole = [name for name in names if name.endswith(".pth") and not name.startswith(".")]
    found: dict[str, Any] = {"leftovers": hidden or "none"}
    found["checkpoints"] = {name: quality_of(last.with_name(name)) for name in whole}
    try:
        state = Store(last.parent, last.stem).load(last)
    except (OSError, ValueError) as error:
        found["last_checkpoint"] = str(error).replace(str(last.parent), "")  # alike in every copy
    else:
        progress = {name: value for name, value in state["progress"].items() if "seconds" not in name}
        compared = {part: state[part] for part in PARTS if part in state}
        found["last_checkpoint"] = {"name": last.name, "progress": progress, **compared}
    return [Fact(what, AT_THE_END, (0, 0, 0), leaves(value)) for what, value in found.items()]


def is_of_end(facts: Mapping[str, Fact]) -> bool:
    """Return whether the last checkpoint of a training, by what it ended with, is of its end."""
    if "last_checkpoint" not in facts:
        return False
    ended, saved = facts["progress"].leaves, facts["last_checkpoint"].leaves
    return all(saved.get(f"progress.{name}") == ended[name] for name in ("epoch", "batch", "earlier_batches"))


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
