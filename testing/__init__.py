"""Checks for your tests: `check_plugin(lambda: MyPlugin(...))` and `assert_resume_exact(make_trainer)`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from .conformance import check_plugin as check_plugin
    from .conformance.trackers import check_tracker as check_tracker
    from .resume import ResumeCheck as ResumeCheck
    from .resume import assert_resume_exact as assert_resume_exact
    from .resume import check_resume as check_resume

__all__ = ["ResumeCheck", "assert_resume_exact", "check_plugin", "check_resume", "check_tracker"]
# Modules that need torch are imported at the first use, so that the command line starts quickly.
_MODULES = {"check_plugin": "conformance", "check_tracker": "conformance.trackers"}


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_MODULES.get(name, 'resume')}", __name__), name)
