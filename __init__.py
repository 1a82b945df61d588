"""Heliograph: an event-bus callback framework for PyTorch training."""

import sys as _sys
from importlib import import_module as _import_module
from typing import Any as _Any

if __name__ != "heliograph":
    raise ImportError(
        f"The package was imported as {__name__!r}: its classes would exist twice. Import it as 'heliograph'."
    )

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
    if name in _event_names():
        globals()[name] = getattr(_import_module(".events", __name__), name)
        return globals()[name]
    from .plugins.providers import missing_name

    raise missing_name(name, __dir__(), _sys._getframe(1))


def __dir__() -> list[str]:
    return sorted(_event_names().union(_names()))


def _event_names() -> set[str]:
    return {"Event", *(kind.__name__ for kind in _import_module(".events", __name__).CATALOGUE)}
