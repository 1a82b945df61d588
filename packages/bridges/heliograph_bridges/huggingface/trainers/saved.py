"""The state of our run in a checkpoint of the Trainer: in its `trainer_state.json`, tensors and ranks beside it.

The Trainer writes the JSON on the main rank, and calls `state()` for it there; `on_save` comes after, on every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from ...hosted.run import HostedRun
from ...hosted.saved import capture, with_ranks
from .plain import from_json, to_json

FILE = "heliograph.pt"


class SavedState:
    """What is on its way into a checkpoint: between the JSON and the file beside it."""

    def __init__(self) -> None:
        self._step, self._id = -1, ""
        self._state: dict[str, Any] = {}
        self._tensors: list[Tensor] = []

    def to_json(self, run: HostedRun) -> dict[str, Any]:
        """Return the state of this rank as JSON holds it, and which file belongs to it, if one does."""
        self._step, self._id, self._tensors = run.progress.steps, uuid4().hex, []
        self._state = capture(run)
        plain = to_json(self._state, self._tensors)
        has_file = bool(self._tensors) or run.engine.world_size > 1
        return {"state": plain, "file": self._id if has_file else None}

    def write(self, run: HostedRun, folder: Path) -> None:
        """Write the file beside the JSON, if one belongs to it. On several ranks a collective."""
        is_shared = run.engine.world_size > 1
        if is_shared and not run.engine.is_main:
            self._state = capture(run)
        ranks = with_ranks(run, self._state)["ranks"] if is_shared else []
        if run.engine.is_main and (self._tensors or ranks):
            partial = folder / f"{FILE}.partial"
            torch.save({"id": self._id, "tensors": self._tensors, "ranks": ranks}, partial)
            partial.replace(folder / FILE)
        self._state, self._tensors = {}, []


def read(saved: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the state that a checkpoint holds.

    Args:
        saved: what `SavedState.to_json` returned.
        folder: the checkpoint; None where it is not known.

    Raises:
        ValueError: the file beside the JSON is missing, or of another save.
    """
    if saved["file"] is None:
        return dict(from_json(saved["state"], []))
    path = None if folder is None else folder / FILE
    content = None
    if path is not None and path.exists():
        content = torch.load(path, map_location="cpu", weights_only=True)
    if content is None or content["id"] != saved["file"]:
        raise ValueError(
            f"The checkpoint {folder or ''} holds no {FILE} that belongs to its trainer_state.json, so the tensors in "
            f"the states of plugins are missing: it was not written to its end, or was not copied whole. Resume from "
            f"another one."
        )
    return {**from_json(saved["state"], content["tensors"]), "ranks": content["ranks"]}
