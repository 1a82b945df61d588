"""For authors of larger plugins: the names in `spi.pyi` and docs/developers/spi.md, imported when first used."""

import re as _re
import sys as _sys
from collections.abc import Callable as _Callable
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any


def lazy_names(module: str, file: str) -> tuple[_Callable[[str], _Any], _Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module that imports its public names when they are first used.

    The stub beside the module says where each name is, in lines such as `from .plugin import Recorder as Recorder`;
    type checkers read the same file. Write in the module: `__getattr__, __dir__ = lazy_names(__name__, __file__)`.

    Args:
        module: the name of the module.
        file: its file; the stub has the same path with the suffix `.pyi`.
    """
    stub = _Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    homes = {public: (home, name) for home, name, public in _re.findall(_LINE, stub, _re.MULTILINE)}

    def get(name: str) -> _Any:
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, original = homes[name]
        value = getattr(_import_module(home, _sys.modules[module].__package__), original)
        setattr(_sys.modules[module], name, value)
        return value

    return get, lambda: sorted(homes)


_LINE = r"^from (\.[\w.]*) import (\w+) as (\w+)"
__getattr__, __dir__ = lazy_names(__name__, __file__)
