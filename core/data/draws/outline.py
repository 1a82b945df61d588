"""The plain attributes of a dataset, in short: whether somebody changed it since its copies were made."""

from __future__ import annotations

import dis
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

from .users_code import is_users, module_of

_LONG: Final = 1000  # of a longer container only the length counts
_MANY: Final = 20_000  # parts that are looked at, the outermost first: some tens of milliseconds
_VALUES: Final = (type(None), bool, int, float, complex, str, bytes)
_WITHIN: Final = ("torch.utils.data",)


def outline(dataset: Any) -> bytes:
    """Return a digest of the plain values that a dataset has in its attributes, and in those of what it is made of.

    What `set_epoch` sets does not count: the copies are told the epoch, too. Nor does what lies deep among much data.
    """
    found = blake2b(digest_size=16)
    seen: set[int] = set()
    level = [("", dataset)]
    while level and len(seen) < _MANY:
        below = []
        for name, each in level:
            if isinstance(each, _VALUES):
                found.update(f"{name}={each!r};".encode())
            elif id(each) not in seen:
                seen.add(id(each))
                below += _parts(name, each)
        level = below[:_MANY]
    return found.digest()


def _parts(name: str, holder: Any) -> list[tuple[str, Any]]:
    kind = type(holder)
    if kind in (list, tuple, dict):
        if len(holder) > _LONG:
            return [(name, len(holder))]
        items = holder.items() if kind is dict else enumerate(holder)
        return [(f"{name}.{key}", value) for key, value in items]
    module = module_of(kind)
    if not is_users(module) and not module.startswith(_WITHIN):
        return [(name, kind.__qualname__)]
    told = set_by_epoch(kind)
    return [(f"{name}.{key}", each) for key, each in getattr(holder, "__dict__", {}).items() if key not in told]


def set_by_epoch(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the `set_epoch` of a class sets."""
    return _set_by(getattr(kind, "set_epoch", None))


@lru_cache(maxsize=256)
def _set_by(method: Any) -> frozenset[str]:
    code = getattr(method, "__code__", None)
    if code is None:
        return frozenset()
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
