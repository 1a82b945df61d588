"""Heliograph: an event-bus callback framework for PyTorch training."""

import importlib as _importlib
import os as _os
import re as _re
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

if __name__ != "heliograph":
    raise ImportError(
        f"The package was imported as {__name__!r}: its classes would exist twice. Import it as 'heliograph'."
    )

if [_os.path.realpath(_Path(__file__).parents[1])] == [_os.path.realpath(each) for each in _sys.path[:1]]:
    from .core.system.extras import warn_if_shadowing as _warn_if_shadowing

    _warn_if_shadowing()

# The stub is what type checkers read, too. What needs torch is imported when it is first asked for.
_STUB = _Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: home for home, name in _re.findall(r"^from \.([\w.]*) import (\w+) as ", _STUB, _re.MULTILINE)}


def __getattr__(name: str) -> _Any:
    if name == "__all__":
        return __dir__()
    if name == "__version__":
        from .core.system.extras import version

        return version()
    home = _HOMES.get(name, "events")
    value = getattr(_importlib.import_module(f".{home}", __name__), name, None)
    if value is None and name in _HOMES:  # a package of its own
        value = _importlib.import_module(f".{home}.{name}", __name__)
    if value is None or name.startswith("_"):
        from .events.checks import known_names

        known = known_names(name, __dir__())
        raise AttributeError(f"heliograph has no {name!r}.{known.partition(' Known:')[0] or known}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from . import events

    return sorted({*_HOMES, *events.__all__})
