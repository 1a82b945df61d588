"""The consistent cut: everything that a resumed run needs, as plain types and tensors."""

from __future__ import annotations

import platform
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version
from time import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .task import check_fits

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
        "scheduler_kind": None if run.scheduler is None else type(run.scheduler).__name__,
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
    check_fits(run.modules, saved["modules"])
    kind = type(run.optimizer).__name__
    if saved.get("optimizer_kind", kind) != kind:
        raise ValueError(
            f"The checkpoint was written with {saved['optimizer_kind']}, the optimizer now is {kind}: resume with the "
            f"former, or load only the weights, with load_weights."
        )
    run.data.load_state_dict(saved["data"], saved["progress"])  # first: it refuses what cannot be gone on with
    for name, module in run.modules.items():
        module.load_state_dict(saved["modules"][name])
    run.engine.load_state_dict(saved.get("engine", {}))
    _load_optimizer(run, saved)
    if "task" in saved.get("task", {}):
        run.task.load_state_dict(deepcopy(saved["task"]["task"]))
    run.progress.load_state_dict(saved["progress"])
    run.last_seen = saved.get("last_seen", False)
    run.control.load_state_dict(saved["control"])
    run.metrics.update(saved["metrics"])
    run.means.load_state_dict(saved.get("means", {}))
    run.fresh_plugins, run.unclaimed_states = map(tuple, run.plugins.load_state_dict(saved["plugins"]))
    run.note(_where(run))
    if run.fresh_plugins:
        run.note(f"plugins that start fresh, the checkpoint has no state of them: {', '.join(run.fresh_plugins)}")
    if run.unclaimed_states:
        run.note(f"states in the checkpoint that no plugin claims, left out: {', '.join(run.unclaimed_states)}")
    for change in _changes(run, saved):
        run.data.doubt("not exact", change)


def _load_optimizer(run: RunContext, saved: Mapping[str, Any]) -> None:
    """Load the optimizer, whose learning rate is state, and the scheduler, if it is one of the same kind."""
    given = [_base_rate(group) for group in run.optimizer.param_groups]
    run.optimizer.load_state_dict(deepcopy(saved["optimizer"]))  # torch would go on with the very tensors
    loaded = [_base_rate(group) for group in run.optimizer.param_groups]
    if given != loaded:
        run.note(f"the learning rate that the run began with goes on, {loaded}, not the program's {given}")
    if run.scheduler is not None and _scheduler_kind(run, saved) == type(run.scheduler).__name__:
        run.scheduler.load_state_dict(deepcopy(saved["scheduler"]))


def _base_rate(group: Mapping[str, Any]) -> Any:
    return group.get("initial_lr", group.get("lr"))


def _scheduler_kind(run: RunContext, saved: Mapping[str, Any]) -> str | None:
    """Return the kind of a saved scheduler; schema 1 did not tell, so it is taken for what it is given to."""
    if saved["scheduler"] is None:
        return None
    return saved.get("scheduler_kind") or type(run.scheduler).__name__


def _changes(run: RunContext, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of the program is other than it was, so that the run will not equal the uninterrupted one."""
    for name in run.fresh_plugins:
        if getattr(run.plugins[name], "policy", "critical") != "observer":
            yield f"plugin {name!r} found no state in the checkpoint"
    before, now = _scheduler_kind(run, saved), None if run.scheduler is None else type(run.scheduler).__name__
    if before != now:
        yield f"the scheduler was {before or 'none'} and is {now or 'none'}"
    if saved["world"]["size"] != run.engine.world_size:
        yield f"{saved['world']['size']} processes wrote the checkpoint, {run.engine.world_size} resumed it"
    for software, version_now in versions().items():
        if (version_then := saved["versions"].get(software, version_now)) != version_now:
            yield f"the checkpoint was written with {software} {version_then}, this is {version_now}"


def restore(run: RunContext) -> bool:
    """Apply the state that a run was told to resume, if any; return whether there was one."""
    if run.saved is None:
        return False
    saved, run.saved = run.saved, None
    try:
        apply(run, saved)
    except Exception as error:
        error.add_note(f"heliograph: while going on from {run.saved_path or 'a state'}")
        raise
    run.origin = run.progress.copy()
    run.plugins.load_filter_states(run.origin, saved.get("filters", {}))
    if run.resumes:
        run.resumes, run.resumed_from, run.resumed_at = False, run.saved_path, run.origin
    return True


def _where(run: RunContext) -> str:
    what, place = "resumed at" if run.resumes else "went back to", run.progress
    return f"{what} epoch {place.epoch}, batch {place.batch}, step {place.steps} from {run.saved_path or 'a state'}"


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
