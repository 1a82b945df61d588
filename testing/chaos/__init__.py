"""Seeded faults at named events: the plugin `Chaos(faults)`, and `check_script`, which restarts a script after each."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from .check import check_function as check_function
    from .check import check_script as check_script
    from .faults.fault import Fault as Fault
    from .plugin import Chaos as Chaos
    from .report import ChaosReport as ChaosReport

__all__ = ["Chaos", "ChaosReport", "Fault", "check_function", "check_script"]
# Imported at the first use, so that the command line starts quickly: most of them need torch.
_MODULES = {"Chaos": "plugin", "ChaosReport": "report", "Fault": "faults.fault"}


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_MODULES.get(name, 'check')}", __name__), name)
