"""The state of a run as bytes, for ranks without a shared file system."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Return a state as bytes."""
    buffer = BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpack_state(data: bytes) -> dict[str, Any]:
    """Return the state, with its tensors on the CPU."""
    state: dict[str, Any] = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    return state
