"""The first-party package that provides a name or a command, so that an error can say what to install."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from opcode import opname
from types import FrameType

from ..events.checks import known_names


def missing_name(name: str, names: Iterable[str], caller: FrameType) -> AttributeError | ImportError:
    """Return the error for a name that `heliograph` does not have.

    Args:
        name: the missing name.
        names: those that there are.
        caller: the frame that needs the name. An import statement replaces an AttributeError by an error of its own,
            without our sentence, so it gets an ImportError.
    """
    hint = how_to_import(name) or known_names(name, names).partition(" Known:")[0].strip()
    is_import = opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
    return (ImportError if is_import else AttributeError)(f"heliograph has no {name!r}. {hint}".rstrip())


def how_to_import(name: str) -> str:
    """Return a sentence on a public name of a package: how to import it, or what to install first; empty for others."""
    package = NAMES.get(name)
    if package is None:
        return ""
    module = f"heliograph_{package}"
    if find_spec(module) is None:
        return how_to_install(package)
    statement = f"import {module}" if name == "ray" else f"from {module} import {name}"
    return f"It is in heliograph-{package}: {statement}"


def how_to_install(package: str) -> str:
    """Return the sentence that says how to install a first-party package."""
    return f"It is in heliograph-{package}: pip install ./packages/{package}"


COMMANDS = {
    "ask": "recorder",
    "chaos": "testing",
    "demo": "recorder",
    "diverge": "recorder",
    "explain": "recorder",
    "fit": "cli",
    "fork": "recorder",
    "goto": "recorder",
    "predict": "cli",
    "replay": "recorder",
    "rules": "rules",
    "test": "cli",
    "timeline": "recorder",
    "validate": "cli",
    "verify-resume": "testing",
    "watch": "recorder",
}
NAMES = {
    "CreatorTrainer": "ray",
    "Difference": "recorder",
    "Digests": "recorder",
    "Divergence": "recorder",
    "Drill": "recorder",
    "LocalLauncher": "ray",
    "MLflow": "trackers",
    "NotExact": "recorder",
    "OpenTelemetry": "trackers",
    "Optuna": "optuna",
    "PausedRun": "recorder",
    "RayLauncher": "ray",
    "RayReport": "ray",
    "Recorder": "recorder",
    "Remote": "recorder",
    "RemoteAnswer": "recorder",
    "RemoteRun": "recorder",
    "Replayed": "recorder",
    "RuleController": "rules",
    "RuleError": "rules",
    "RuleFired": "rules",
    "RuleFiring": "rules",
    "RuleMetric": "rules",
    "RuleOperation": "rules",
    "RulePart": "rules",
    "RulePatience": "rules",
    "RuleSet": "rules",
    "RuleSpec": "rules",
    "StepCheck": "recorder",
    "StepChecked": "recorder",
    "StepDiffers": "recorder",
    "Trackio": "trackers",
    "Verdicts": "recorder",
    "WandB": "trackers",
    "attach": "recorder",
    "diverge": "recorder",
    "drill": "recorder",
    "fork": "recorder",
    "goto": "recorder",
    "open_study": "optuna",
    "ray": "ray",
    "register_function": "rules",
    "register_metric": "rules",
    "register_operation": "rules",
    "replay": "recorder",
}
