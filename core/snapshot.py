"""The state of a run at a step boundary: everything that a resumed run needs, as plain types and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import time
from typing import TYPE_CHECKING, Any

from torch import nn

from .checkpoint.schema import SCHEMA, WEIGHTS_ONLY, batch_factors, class_names, describe_groups, versions
from .checkpoint.storage import read_manifest
from .context import RunContext
from .engines.options import is_sharding
from .loop_state import as_plain, capture_loop

if TYPE_CHECKING:
    from ..events import Run


def capture(run: RunContext, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the snapshot. Tensors are live: store them before the next step. A collective.

    The main rank's is complete, with the differences of the other ranks. Another rank's is only for its own rollback;
    with sharded weights it holds no weights.

    Args:
        run: the run.
        shards: describes shards that are saved separately; the snapshot then holds no weights.

    Raises:
        TypeError: a value is neither a plain type nor a tensor, so it could not be read back safely.
    """
    weights, optimizers = run.engine.pack(run.modules, run.optimizers) if shards is None else ({}, {})
    if run.report.held is not None:
        fresh = {"modules": weights, "optimizers": optimizers} | ({} if shards is None else {"shards": dict(shards)})
        return {**fresh, **run.report.held, "metrics": dict(run.metrics)}
    has_task_state = not isinstance(run.task, nn.Module) and hasattr(run.task, "state_dict")
    object_state = run.checkpoints.objects
    totals = {"totals": {name: list(total) for name, total in run.means.totals.items()}}
    objects = {} if object_state is None else object_state.state_dict(run)  # before the data, which save its reports
    snapshot = {
        **_describe(run),
        **capture_loop(run),
        "data": run.data.state_dict(run.progress),
        "planned_done": run.length.done,
        "at_save_point": run.report.at_save_point,
        "modules": weights,
        "optimizers": optimizers,
        "optimizer_kinds": class_names(run.optimizers),
        "groups": describe_groups(run),
        "engine": run.engine.state_dict(),
        "schedulers": {name: scheduler.state_dict() for name, scheduler in run.schedulers.items()},
        "scheduler_kinds": class_names(run.schedulers),
        "task": {"task": run.task.state_dict()} if has_task_state else {},
        "objects": objects,
        **({} if run.checkpoints.forked_from is None else {"forked_from": dict(run.checkpoints.forked_from)}),
        **({} if run.checkpoints.given_rates is None else {"given_rates": run.checkpoints.given_rates}),
        **({"count_units": dict(run.stepping.units)} if run.stepping.units else {}),
        **({} if shards is None else {"shards": dict(shards)}),
        **({} if run.modes is None else run.modes.state_dict()),
        **({} if run.report.rows is None else {"log_history": run.report.rows.state_dict() | totals}),
    }
    snapshot, types = as_plain(snapshot, "state")
    if types:
        snapshot["number_types"] = types
    if run.engine.world_size == 1:
        return {**snapshot, "ranks": [{}]}
    from .checkpoint.ranks import gather_rank_parts  # imported when several ranks save

    parts = gather_rank_parts(run.engine, snapshot)
    return {**snapshot, "ranks": parts if run.engine.is_main else []}


def _describe(run: RunContext) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "saved_at": time(),
        "versions": versions(),
        "world": batch_factors(run),
        "run_name": run.name,
        "training_id": run.checkpoints.training_id,
        "progress": run.progress.state_dict(),
        "metrics": dict(run.metrics),
    }


def hold(run: RunContext) -> None:
    """Store the state at the end of a training, for the save after its last log and validation. A collective.

    A longer run that resumes from that save continues before that log and validation, as if the training had not ended.
    """
    excluded = ("modules", "optimizers", "shards") if is_sharding(run.engine) else ()  # not gathered
    state = capture(run, {} if excluded else None)
    due = [verb for verb in state["control"]["due"] if verb not in ("log", "validation", "save")]
    state["control"] = {**state["control"], "due": due}
    run.report.held = {name: part for name, part in state.items() if name not in excluded}


def capture_weights(run: RunContext) -> dict[str, Any]:
    """Return the weights, their averages, the counters and the metrics of a snapshot. A collective.

    Raises:
        TypeError: a value is neither a plain type nor a tensor.
    """
    states = run.plugins.state_dict(as_plain).items()
    snapshot = {
        **_describe(run),
        WEIGHTS_ONLY: True,
        "modules": run.engine.pack(run.modules, {})[0],
        "plugins": {name: state for name, state in states if state and {"weights", "evaluates"} <= state.keys()},
        **{name: {} for name in ("control", "data", "optimizers", "schedulers")},
        "ranks": [],
    }
    plain: dict[str, Any] = as_plain(snapshot, "state")[0]
    return plain


def unwritten(run: Run) -> Iterator[str]:
    off = run.plugins.disabled_writers()
    for name, step in off.items():
        if step is None:
            yield f"Saves are requested, but plugin {name!r}, which writes them, is disabled."
        elif saved := _describe_newest(run):
            yield f"Plugin {name!r} is disabled since step {step}, and no other plugin writes checkpoints: {saved}."
    if not off:
        yield "Saves are requested, but no plugin writes them: add Checkpoint('runs/x') to the plugins."


def _describe_newest(run: Run) -> str:
    if run.checkpoints.last is None:
        return "there is no checkpoint"
    newest = f"the newest checkpoint is {run.checkpoints.last}"
    try:
        steps = int(read_manifest(run.checkpoints.last).progress["steps"])
    except (OSError, ValueError):  # another plugin writes other files, or this process does not see them
        return newest
    missing = run.progress.steps - steps
    more = "1 step is" if missing == 1 else f"{missing} steps are"
    return f"{newest}, of step {steps}, and {more} not in it" if missing > 0 else ""
