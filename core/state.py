"""The consistent cut: everything that a resumed run needs, as plain types and tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from time import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .context import RunContext

SCHEMA = 1
REQUIRED = ("schema", "run_name", "progress", "modules", "optimizer", "plugins", "metrics")
PLAIN = (bool, int, float, str, bytes, type(None))


def capture(run: RunContext) -> dict[str, Any]:
    """Return the cut. Tensors are the live ones: store them before the next step.

    Raises:
        TypeError: some state is neither a plain type nor a tensor, and so could not be read back safely.
    """
    stateful = {"task": run.task} if not isinstance(run.task, nn.Module) else {}
    cut = {
        "schema": SCHEMA,
        "saved_at": time(),
        "library": {"torch": str(torch.__version__)},
        "run_name": run.name,
        "progress": run.progress.state_dict(),
        "modules": {name: dict(module.state_dict()) for name, module in run.modules.items()},
        "optimizer": run.optimizer.state_dict(),
        "optimizer_kind": type(run.optimizer).__name__,
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "task": {name: each.state_dict() for name, each in stateful.items() if hasattr(each, "state_dict")},
        "metrics": dict(run.metrics),
        "means": run.means.state_dict(),
        "plugins": run.plugins.state_dict(),
    }
    check_plain(cut, "state")
    return cut


def apply(run: RunContext, saved: Mapping[str, Any]) -> None:
    """Continue a run from a cut.

    Raises:
        ValueError: the cut is of a newer schema, incomplete, or of other modules.
    """
    check_schema(saved)
    if saved["modules"].keys() != run.modules.keys():
        raise ValueError(
            f"The checkpoint holds the modules {sorted(saved['modules'])}, the task has {sorted(run.modules)}: "
            f"resume with the task that wrote it."
        )
    kind = type(run.optimizer).__name__
    if saved.get("optimizer_kind", kind) != kind:
        raise ValueError(f"The checkpoint was written with {saved['optimizer_kind']}, the optimizer now is {kind}.")
    for name, module in run.modules.items():
        module.load_state_dict(saved["modules"][name])
    run.optimizer.load_state_dict(deepcopy(saved["optimizer"]))  # torch would go on with the very tensors
    if run.scheduler is not None and saved.get("scheduler") is not None:
        run.scheduler.load_state_dict(deepcopy(saved["scheduler"]))
    if "task" in saved.get("task", {}):
        run.task.load_state_dict(deepcopy(saved["task"]["task"]))
    run.progress.load_state_dict(saved["progress"])
    run.metrics.update(saved["metrics"])
    run.means.load_state_dict(saved.get("means", {}))
    missing, unknown = run.plugins.load_state_dict(saved["plugins"])
    place = run.progress
    run.note(
        f"resumed at epoch {place.epoch}, batch {place.batch}, step {place.steps} from {run.resumed_from or 'a state'}"
    )
    if missing:
        run.note(f"plugins that start fresh, the checkpoint has no state of them: {', '.join(missing)}")
    if unknown:
        run.note(f"states in the checkpoint that no plugin claims, left out: {', '.join(unknown)}")


def restore(run: RunContext) -> bool:
    """Apply the state that a run was told to resume, if any; return whether there was one."""
    if run.saved is None:
        return False
    apply(run, run.saved)
    run.saved, run.origin = None, run.progress.copy()
    return True


def check_schema(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless a loaded object is a cut that this version reads."""
    lacking = [key for key in REQUIRED if key not in saved] if isinstance(saved, Mapping) else list(REQUIRED)
    if lacking:
        raise ValueError(f"This is no checkpoint of heliograph: it lacks {', '.join(lacking)}.")
    if saved["schema"] > SCHEMA:
        raise ValueError(
            f"The checkpoint has schema {saved['schema']}, this version reads up to {SCHEMA}: update heliograph."
        )


def check_plain(value: Any, place: str) -> None:
    """Raise TypeError where a state holds what a safe load would refuse."""
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            check_plain(key, f"a key of {place}")
            check_plain(item, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{place}[{index}]")
    elif type(value) not in PLAIN and not isinstance(value, Tensor):
        raise TypeError(
            f"{place} is a {type(value).__module__}.{type(value).__name__}: a checkpoint holds plain types and tensors "
            f"only, so that it loads safely. Convert it in state_dict()."
        )
