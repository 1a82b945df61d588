"""The state of a run in a checkpoint of the Trainer.

The main rank writes `trainer_state.json`, with the result of `state()`. Then `on_save` writes tensors and the states of
other ranks to a file in the same folder. JSON does not support tuples, bytes or keys other than strings, so these are
encoded as dicts whose only key begins with `!`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from ...hosted.run import HostedRun
from ...hosted.saved import capture, with_ranks

TAG = "!"
MAPPINGS: Mapping[str, Any] = {"!dict": dict, "!ordered": OrderedDict, "!counter": Counter}

FILE = "heliograph.pt"


def to_json(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"!tensor": len(tensors) - 1}
    if isinstance(value, bytes):
        return {"!bytes": b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {"!tuple": [to_json(item, tensors) for item in value]}
    if isinstance(value, list):
        return [to_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if type(value) is dict and all(isinstance(key, str) and not key.startswith(TAG) for key in value):
        return {key: to_json(item, tensors) for key, item in value.items()}
    tag = next(tag for tag, kind in MAPPINGS.items() if type(value) is kind)
    return {tag: [[to_json(key, tensors), to_json(item, tensors)] for key, item in value.items()]}


def from_json(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith(TAG):
        return {key: from_json(item, tensors) for key, item in value.items()}
    content = value[tag]
    if tag == "!tensor":
        return tensors[content]
    if tag == "!bytes":
        return b64decode(content)
    if tag == "!tuple":
        return tuple(from_json(item, tensors) for item in content)
    pairs = [(from_json(key, tensors), from_json(item, tensors)) for key, item in content]
    return MAPPINGS[tag](dict(pairs)) if tag == "!counter" else MAPPINGS[tag](pairs)


class CheckpointState:
    """The state between the writes of the JSON and of the tensor file."""

    def __init__(self) -> None:
        self._step, self._id = -1, ""
        self._state: dict[str, Any] = {}
        self._tensors: list[Tensor] = []

    def to_json(self, run: HostedRun) -> dict[str, Any]:
        self._step, self._id, self._tensors = run.progress.steps, uuid4().hex, []
        self._state = capture(run)
        plain = to_json(self._state, self._tensors)
        has_file = bool(self._tensors) or run.engine.world_size > 1
        return {"state": plain, "file": self._id if has_file else None}

    def write(self, run: HostedRun, folder: Path) -> None:
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
    """Return the saved state; raise ValueError if the tensor file is missing or belongs to another save."""
    if saved["file"] is None:
        return dict(from_json(saved["state"], []))
    path = None if folder is None else folder / FILE
    content = None
    if path is not None and path.exists():
        content = torch.load(path, map_location="cpu", weights_only=True)
    if content is None or content["id"] != saved["file"]:
        raise ValueError(
            f"The checkpoint {folder or ''} has no {FILE} that matches its trainer_state.json, so tensors of plugins "
            f"are missing: it was not completely written or copied. Resume from another checkpoint."
        )
    return {**from_json(saved["state"], content["tensors"]), "ranks": content["ranks"]}
