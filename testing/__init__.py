"""For tests: `check_plugin(lambda: MyPlugin(...))` of a plugin, `assert_resume_exact(make_trainer)` of a training."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from .conformance import check_plugin as check_plugin
    from .recorder import Recorder as Recorder
    from .resume import ResumeCheck as ResumeCheck
    from .resume import assert_resume_exact as assert_resume_exact
    from .resume import check_resume as check_resume

__all__ = ["Recorder", "ResumeCheck", "assert_resume_exact", "check_plugin", "check_resume"]
# What needs torch is imported when it is first asked for: the command line must not wait for it.
_HOMES = {"check_plugin": "conformance", "Recorder": "recorder"}


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_HOMES.get(name, 'resume')}", __name__), name)
