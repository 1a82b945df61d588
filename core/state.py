"""The consistent cut: everything that a resumed run needs, as plain types and tensors."""

from __future__ import annotations

import platform
from collections import Counter, OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from importlib.metadata import version
from time import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .context import RunContext

SCHEMA = 2
REQUIRED = ("schema", "run_name", "progress", "modules", "optimizer", "plugins", "metrics", "data", "control", "world")
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
        "versions": versions(),
        "world": {"size": run.engine.world_size},
        "run_name": run.name,
        "progress": run.progress.state_dict(),
        "control": run.control.state_dict(),
        "data": run.data.state_dict(run.progress),
        "last_seen": run.last_seen,
        "modules": {name: dict(module.state_dict()) for name, module in run.modules.items()},
        "optimizer": run.optimizer.state_dict(),
        "optimizer_kind": type(run.optimizer).__name__,
        "engine": run.engine.state_dict(),
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "task": {name: each.state_dict() for name, each in stateful.items() if hasattr(each, "state_dict")},
        "metrics": dict(run.metrics),
        "means": run.means.state_dict(),
        "plugins": run.plugins.state_dict(),
        "filters": run.plugins.filter_states(run.origin),
    }
    check_plain(cut, "state")
    return cut


def apply(run: RunContext, saved: Mapping[str, Any]) -> None:
    """Continue a run from a cut.

    Raises:
        ValueError: the cut is of a newer schema, incomplete, of other modules or, amid an epoch, of other data.
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
    run.data.load_state_dict(saved["data"], saved["progress"])  # first: it refuses what cannot be gone on with
    if saved["world"]["size"] != run.engine.world_size:
        sizes = f"{saved['world']['size']} processes wrote the checkpoint, {run.engine.world_size} resumed it"
        run.data.doubt("not exact", sizes)
    for name, module in run.modules.items():
        module.load_state_dict(saved["modules"][name])
    run.engine.load_state_dict(saved.get("engine", {}))
    run.optimizer.load_state_dict(deepcopy(saved["optimizer"]))  # torch would go on with the very tensors
    if run.scheduler is not None and saved.get("scheduler") is not None:
        run.scheduler.load_state_dict(deepcopy(saved["scheduler"]))
    if "task" in saved.get("task", {}):
        run.task.load_state_dict(deepcopy(saved["task"]["task"]))
    run.progress.load_state_dict(saved["progress"])
    run.last_seen = saved.get("last_seen", False)
    run.control.load_state_dict(saved["control"])
    run.metrics.update(saved["metrics"])
    run.means.load_state_dict(saved.get("means", {}))
    run.fresh_plugins, run.unclaimed_states = map(tuple, run.plugins.load_state_dict(saved["plugins"]))
    place = run.progress
    run.note(
        f"resumed at epoch {place.epoch}, batch {place.batch}, step {place.steps} from {run.resumed_from or 'a state'}"
    )
    if run.fresh_plugins:
        run.note(f"plugins that start fresh, the checkpoint has no state of them: {', '.join(run.fresh_plugins)}")
    if run.unclaimed_states:
        run.note(f"states in the checkpoint that no plugin claims, left out: {', '.join(run.unclaimed_states)}")


def restore(run: RunContext) -> bool:
    """Apply the state that a run was told to resume, if any; return whether there was one."""
    if run.saved is None:
        return False
    saved, run.saved = run.saved, None
    apply(run, saved)
    run.origin = run.progress.copy()
    run.plugins.load_filter_states(run.origin, saved.get("filters", {}))
    run.resumed_at = run.origin
    return True


def versions() -> dict[str, str]:
    """Return the versions of the software that a cut is made with."""
    software = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": str(np.__version__)}
    return {"heliograph": version("heliograph"), **software}


def check_schema(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless a loaded object is a cut that this version reads."""
    schema = saved.get("schema") if isinstance(saved, Mapping) else None
    if isinstance(schema, int) and schema != SCHEMA:
        mend = "update heliograph" if schema > SCHEMA else "run `python -m heliograph checkpoint migrate` on the file"
        raise ValueError(f"The checkpoint has schema {schema}, this version reads {SCHEMA}: {mend}.")
    lacking = [key for key in REQUIRED if key not in saved] if isinstance(saved, Mapping) else list(REQUIRED)
    if lacking:
        raise ValueError(f"This is no checkpoint of heliograph: it lacks {', '.join(lacking)}.")


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
