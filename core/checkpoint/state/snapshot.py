"""The consistent cut: everything that a resumed run needs, as plain types and tensors."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from copy import deepcopy
from importlib.metadata import version
from time import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...task import check_fits
from .by_rank import gathered, own_part
from .differences import changes, check_optimizers, kinds, scheduler_kinds
from .global_batch import layout, settle_change
from .parameter_groups import groups_of, load_scheduler
from .plain import check_plain
from .shards import fitted, load_parts

if TYPE_CHECKING:
    from ...context import RunContext

SCHEMA = 3
REQUIRED = (
    "schema", "run_name", "progress", "modules", "optimizers", "plugins", "metrics", "data", "control", "world",
    "ranks",
)  # fmt: skip


def capture(run: RunContext, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the cut. Tensors are the live ones: store them before the next step. On several ranks a collective.

    The main rank's is the whole, with what differs on the others. Another rank's is its own, good for itself to go back
    to; where weights are sharded it holds none.

    Args:
        run: the run.
        shards: what there is to tell of shards that are saved apart from the cut; it holds no weights then.

    Raises:
        TypeError: some state is neither a plain type nor a tensor, and so could not be read back safely.
    """
    stateful = {"task": run.task} if not isinstance(run.task, nn.Module) else {}
    weights, optimizers = run.engine.pack(run.modules, run.optimizers) if shards is None else ({}, {})
    unseen = {} if run.unseen is None else run.unseen.state_dict(run)  # before the data, which keep its doubts
    cut = {
        "schema": SCHEMA,
        "saved_at": time(),
        "versions": versions(),
        "world": layout(run),
        "run_name": run.name,
        "training_id": run.training_id,
        "progress": run.progress.state_dict(),
        "control": run.control.state_dict(),
        "data": run.data.state_dict(run.progress),
        "last_seen": run.last_seen,
        "epoch_begun": run.epoch_begun,
        "at_save_point": run.at_save_point,
        "modules": weights,
        "optimizers": optimizers,
        "optimizer_kinds": kinds(run.optimizers),
        "groups": groups_of(run),
        "engine": run.engine.state_dict(),
        "schedulers": {name: each.state_dict() for name, each in run.schedulers.items()},
        "scheduler_kinds": kinds(run.schedulers),
        "task": {name: each.state_dict() for name, each in stateful.items() if hasattr(each, "state_dict")},
        "unseen": unseen,
        "metrics": dict(run.metrics),
        "means": run.means.state_dict(),
        "plugins": run.plugins.state_dict(check_plain),
        "filters": run.plugins.filter_states(run.origin, check_plain),
        **({"plugin_versions": numbers} if (numbers := run.plugins.state_versions()) else {}),
        **({} if shards is None else {"shards": dict(shards)}),
    }
    check_plain(cut, "state")
    parts = gathered(run.engine, cut)
    return {**cut, "ranks": parts if run.engine.is_main else []}


def apply(run: RunContext, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Continue a run from a cut; return this rank's part of it.

    Raises:
        ValueError: the cut is of a newer schema, incomplete, of other modules or, amid an epoch, of other data.
    """
    check_schema(saved)
    if run.resumes:  # a run that goes back stays the training that it is
        run.training_id = training_of(saved)
    saved = fitted(run, own_part(saved, run.engine.rank, run.engine.world_size))
    if "shards" not in saved:
        check_fits(run.modules, saved["modules"])
    check_optimizers(run, saved)
    progress = run.data.load_state_dict(saved["data"], saved["progress"])  # it refuses what does not fit
    load_training(run, saved)
    if "task" in saved.get("task", {}):
        run.task.load_state_dict(deepcopy(saved["task"]["task"]))
    run.progress.load_state_dict(progress)
    run.last_seen = saved.get("last_seen", False)
    run.epoch_begun = saved.get("epoch_begun", run.progress.batch > 0)
    run.in_boundary = saved.get("at_save_point", False)
    run.control.load_state_dict(saved["control"], at_save_point=run.in_boundary)
    run.metrics.update(saved["metrics"])
    run.means.load_state_dict(saved.get("means", {}))
    run.batch_change = saved.get("batch_change", run.batch_change)  # a return may be to what the run was resumed from
    run.restores_attributes = saved.get("restore_attributes", run.restores_attributes)
    settle_change(run, saved["world"], run.batch_change)
    found = run.plugins.load_state_dict(
        saved["plugins"], saved.get("plugin_versions"), run.saved_path, goes_back=not run.resumes
    )
    run.fresh_plugins, run.unclaimed_states = map(tuple, found)
    run.note(_where(run))
    if run.fresh_plugins:
        what = "start fresh" if run.resumes else "keep what they have"
        run.note(f"plugins that {what}, the checkpoint has no state of them: {', '.join(run.fresh_plugins)}")
    if run.unclaimed_states:
        run.note(f"states in the checkpoint that no plugin claims, left out: {', '.join(run.unclaimed_states)}")
    for change in saved.get("migrated", ()):
        run.note(f"the checkpoint was migrated in memory, {change}")
    for level, change in changes(run, saved, versions()):
        run.data.doubt(level, change)
    return saved


def load_training(run: RunContext, saved: Mapping[str, Any]) -> None:
    """Load the modules, the optimizers, whose learning rates are state, and the schedulers of the same kinds."""
    given = _base_rates(run)
    load_parts(run, saved, run.optimizers, run.saved_path)
    run.engine.load_state_dict(saved.get("engine", {}))
    loaded = _base_rates(run)[: len(given)]  # groups that the run added have no rate of the program's
    if given[: len(loaded)] != loaded:
        run.note(f"the learning rate that the run began with goes on, {loaded}, not the program's {given}")
    before, now = scheduler_kinds(run, saved), kinds(run.schedulers)
    for name, scheduler in run.schedulers.items():
        if before.get(name) == now[name]:
            load_scheduler(name, scheduler, saved)


def _base_rates(run: RunContext) -> list[Any]:
    groups = [group for optimizer in run.optimizers.values() for group in optimizer.param_groups]
    return [group.get("initial_lr", group.get("lr")) for group in groups]


def restore(run: RunContext) -> dict[str, Any] | None:
    """Apply the state that a run is to go on from, if any; return this rank's part of it."""
    if run.saved is None:
        return None
    saved, run.saved = run.saved, None
    try:
        own = apply(run, saved)
    except Exception as error:
        error.add_note(f"heliograph: while going on from {run.saved_path or 'a state'}")
        raise
    run.origin = run.progress.copy()
    run.plugins.load_filter_states(run.origin, own.get("filters", {}))
    if own.get("unseen") and run.unseen is not None:
        run.unseen.resume(run, own["unseen"], restores=run.restores_attributes, is_roll_back=not run.resumes)
    if run.resumes:
        run.resumes, run.resumed_from, run.resumed_at = False, run.saved_path, run.origin
    return own


def settle_unseen(run: RunContext, cut: Mapping[str, Any]) -> None:
    """Compare plugins and settings with those that a cut tells, now that every plugin has its state."""
    if cut.get("unseen") and run.unseen is not None:
        run.unseen.settle(run, cut["unseen"], is_roll_back=run.resumed_at is not run.origin)


def _where(run: RunContext) -> str:
    what, place = "resumed at" if run.resumes else "went back to", run.progress
    return f"{what} epoch {place.epoch}, batch {place.batch}, step {place.steps} from {run.saved_path or 'a state'}"


def versions() -> dict[str, str]:
    """Return the versions of the software that a cut is made with."""
    software = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": str(np.__version__)}
    return {"heliograph": version("heliograph"), **software}


def training_of(saved: Mapping[str, Any]) -> str:
    """Return of which training a cut is."""
    return saved.get("training_id") or training_named(saved["run_name"])


def training_named(run_name: str) -> str:
    """Return the training that all cuts of a name are taken for that were made when trainings had no identity yet."""
    return hashlib.sha256(f"heliograph training {run_name}".encode()).hexdigest()[:32]


def check_schema(saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless a loaded object is a cut that this version reads."""
    schema = saved.get("schema") if isinstance(saved, Mapping) else None
    if isinstance(schema, int) and schema != SCHEMA:
        mend = "update heliograph" if schema > SCHEMA else "run `python -m heliograph checkpoint migrate` on the file"
        raise ValueError(f"The checkpoint has schema {schema}, this version reads {SCHEMA}: {mend}.")
    lacking = [key for key in REQUIRED if key not in saved] if isinstance(saved, Mapping) else list(REQUIRED)
    if lacking:
        raise ValueError(f"This is no checkpoint of heliograph: it lacks {', '.join(lacking)}.")
