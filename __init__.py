"""Heliograph: an event-bus callback framework for PyTorch training."""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from opcode import opname as _opname
from pathlib import Path as _Path
from typing import Any as _Any

if __name__ != "heliograph":
    raise ImportError(
        f"The package was imported as {__name__!r}: its classes would exist twice. Import it as 'heliograph'."
    )

if [_os.path.realpath(_Path(__file__).parents[1])] == [_os.path.realpath(each) for each in _sys.path[:1]]:
    from .core.system.extras import warn_if_shadowing as _warn_if_shadowing

    _warn_if_shadowing()

from .spi import lazy_names as _lazy_names  # after the check of the name

_public, _names = _lazy_names(__name__, __file__)


def __getattr__(name: str) -> _Any:
    if name == "__all__":
        return __dir__()
    if name == "__version__":
        from .core.system.extras import version

        return version()
    if name in _names():
        return _public(name)
    events = _import_module(".events", __name__)
    if name in events.__all__:
        globals()[name] = getattr(events, name)
        return globals()[name]
    from .events.checks import known_names
    from .plugins.providers import how_to_import

    hint = how_to_import(name) or known_names(name, __dir__()).partition(" Known:")[0].strip()
    # An import statement replaces an AttributeError by one of its own, so that its reader would not see this sentence.
    caller = _sys._getframe(1)
    is_import = _opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
    raise (ImportError if is_import else AttributeError)(f"heliograph has no {name!r}. {hint}".rstrip())


def __dir__() -> list[str]:
    return sorted({*_names(), *_import_module(".events", __name__).__all__})
