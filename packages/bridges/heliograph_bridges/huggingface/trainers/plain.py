"""States in JSON, and the tensors of them in a file beside it: JSON keeps no tuples, bytes or keys but strings."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

TAG = "!"
MAPPINGS: Mapping[str, Any] = {"!dict": dict, "!ordered": OrderedDict, "!counter": Counter}


def to_json(value: Any, tensors: list[Tensor]) -> Any:
    """Return plain types as JSON holds them; what it does not hold becomes a dict with one key that begins with `!`.

    Args:
        value: nested plain types and tensors.
        tensors: where to append the tensors.
    """
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"!tensor": len(tensors) - 1}
    if isinstance(value, bytes):
        return {"!bytes": b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {"!tuple": [to_json(each, tensors) for each in value]}
    if isinstance(value, list):
        return [to_json(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if type(value) is dict and all(isinstance(key, str) and not key.startswith(TAG) for key in value):
        return {key: to_json(each, tensors) for key, each in value.items()}
    tag = next(tag for tag, kind in MAPPINGS.items() if type(value) is kind)
    return {tag: [[to_json(key, tensors), to_json(each, tensors)] for key, each in value.items()]}


def from_json(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith(TAG):
        return {key: from_json(each, tensors) for key, each in value.items()}
    content = value[tag]
    if tag == "!tensor":
        return tensors[content]
    if tag == "!bytes":
        return b64decode(content)
    if tag == "!tuple":
        return tuple(from_json(each, tensors) for each in content)
    pairs = [(from_json(key, tensors), from_json(each, tensors)) for key, each in content]
    return MAPPINGS[tag](dict(pairs)) if tag == "!counter" else MAPPINGS[tag](pairs)
