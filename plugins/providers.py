"""The package that provides a name or an entry point, so that an error can say what to install."""

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
        caller: the frame that needs the name. An import statement replaces an AttributeError by another error,
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
    paths = [f"./packages/{name}" for name in (*NEEDS.get(package, ()), package)]
    return f"It is in heliograph-{package}: pip install {' '.join(paths)}"


def _by_name(**names: str) -> dict[str, str]:
    """Return the package of each name, given the names of each package."""
    return {name: package for package, text in names.items() for name in text.split()}


_OF_RECORDER = """
    Difference Digests Divergence Drill NotExact PausedRun Recorder Remote RemoteAnswer RemoteRun Replayed StepCheck
    StepChecked StepDiffers Verdicts attach diverge drill fork goto replay
"""
_OF_RULES = """
    RuleController RuleError RuleFired RuleFiring RuleMetric RuleOperation RulePart RulePatience RuleSet RuleSpec
    register_function register_metric register_operation
"""
NAMES = _by_name(
    bridges="AccelerateEngine",
    optuna="Optuna open_study",
    ray="CreatorTrainer LocalLauncher RayLauncher RayReport ray",
    recorder=_OF_RECORDER,
    rules=_OF_RULES,
    trackers="MLflow OpenTelemetry Profile Trackio WandB",
)
COMMANDS = _by_name(
    cli="fit predict test validate",
    recorder="ask demo diverge explain fork goto replay timeline watch",
    rules="rules",
    testing="chaos new-plugin verify-resume",
)
PLUGINS = _by_name(
    optuna="optuna",
    ray="ray_report",
    recorder="recorder remote step_check verdicts",
    rules="rule_controller",
    trackers="mlflow open_telemetry profile trackio wandb",
)
NEEDS = {"rules": ("recorder",), "testing": ("recorder",)}
ENTRY_POINTS = {
    "heliograph.commands": COMMANDS,
    "heliograph.engines": {"accelerate": "bridges"},
    "heliograph.plugins": PLUGINS,
}
