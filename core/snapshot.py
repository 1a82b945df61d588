"""The state of a run at a step boundary: everything that a resumed run needs, as plain types and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from time import time
from typing import Any

from torch import nn

from ..events import Run
from .checkpoint.compatibility import (
    apply_batch_change,
    base_rates,
    batch_factors,
    check_optimizers,
    class_names,
    describe_groups,
    find_differences,
    load_scheduler,
    saved_scheduler_classes,
)
from .checkpoint.ranks import fit_to_engine, gather_rank_parts, load_parts, select_rank_part
from .checkpoint.schema import SCHEMA, WEIGHTS_ONLY, as_plain, check_resumable, check_schema, versions
from .checkpoint.storage import read_manifest
from .context import RunContext
from .engines.options import is_sharding
from .engines.weights import check_fits
from .loop_state import capture_loop, load_loop


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


def apply(run: RunContext, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Continue a run from a snapshot; return this rank's part of it.

    Raises:
        ValueError: the snapshot has another schema, is incomplete, or has other modules or, within an epoch, other
            data.
    """
    resumption = run.checkpoints
    check_schema(saved)
    check_resumable(saved, resumption.path)
    if resumption.is_resume:  # a rollback stays in its training
        run.checkpoints.training_id, run.checkpoints.forked_from = saved["training_id"], saved.get("forked_from")
    if "frozen" in saved:
        from .checkpoint.frozen import with_frozen

        saved = with_frozen(saved, run.modules)
    saved = fit_to_engine(select_rank_part(saved, run.engine.rank, run.engine.world_size), run.engine, resumption.path)
    if "shards" not in saved:
        check_fits(run.modules, saved["modules"])
    check_optimizers(run, saved)
    progress = run.data.load_state_dict(saved["data"], saved["progress"])  # it refuses other data
    _plan_remaining_steps(run, saved, progress)
    load_training(run, saved)
    if "task" in saved.get("task", {}):
        run.task.load_state_dict(deepcopy(saved["task"]["task"]))
    run.progress.load_state_dict(progress)
    run.stepping.units = dict(saved.get("count_units", {}))
    run.checkpoints.in_boundary = saved.get("at_save_point", False)
    from .metrics.log_rows import LogRows

    state = saved.get("log_history")
    run.report.rows = None if state is None else LogRows.of_state(state, run.report.rows)
    run.means.totals = {name: (value, weight) for name, (value, weight) in (state or {}).get("totals", {}).items()}
    # A rollback may return to the state that the run was resumed from.
    resumption.batch_change = saved.get("batch_change", resumption.batch_change)
    run.checkpoints.batch_note = apply_batch_change(
        run, saved["world"], resumption.batch_change, may_refuse=resumption.is_resume
    )
    load_loop(run, saved, _position_note(run), goes_back=not resumption.is_resume)
    for change in find_differences(run, saved, versions(), resumption.fresh_plugins):
        run.data.report_difference(change)
    resumption.before = saved["world"]["size"], saved["world"].get("workers")
    return saved


# Also recreates schedulers that depend on the total number of steps, if that has changed.
def _plan_remaining_steps(run: RunContext, saved: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    before = run.length.planned_steps
    if "planned_done" in saved:
        run.length.resume(saved["planned_done"], progress["epoch"], progress["batch"])
    if run.length.planned_steps != before:
        run.settings = run.length.complete(run.settings)
        for name, window in run.stepping.by_name.items():
            window.scheduler = run.schedulers.get(name)
        if run.checkpoints.objects is not None:
            run.checkpoints.objects.update_schedulers(run)


def load_training(run: RunContext, saved: Mapping[str, Any]) -> None:
    program_rates, resumption = base_rates(run.optimizers), run.checkpoints
    if run.modes is not None and "trained" in saved:  # eval mode until everything is loaded
        run.modes.eval()
    load_parts(run, saved, run.optimizers, resumption.path, drops_added=not resumption.is_resume)
    run.engine.load_state_dict(saved.get("engine", {}))
    loaded = base_rates(run.optimizers)[: len(program_rates)]  # the program sets no rate for groups that the run added
    initial_rates = saved.get("given_rates", loaded)  # of the first program: changes by plugins do not count
    if resumption.is_resume and program_rates[: len(initial_rates)] != initial_rates[: len(program_rates)]:
        run.warn(
            f"The program's learning rate {_format_rates(program_rates)} has no effect: the resumed run continues with "
            f"{_format_rates(loaded)}. To change it, set it in a handler of CheckpointLoaded: in "
            f"optimizer.param_groups, and in the base_lrs of a scheduler."
        )
    if resumption.is_resume:
        resumption.given_rates = initial_rates
    before, now = saved_scheduler_classes(run, saved), class_names(run.schedulers)
    for name, scheduler in run.schedulers.items():
        if before.get(name) == now[name]:
            load_scheduler(name, scheduler, saved)


def _format_rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)


@contextmanager
def restoring(run: RunContext) -> Iterator[Path | None]:
    """Apply the state to continue from, yield its file, then compare the restored plugins with it."""
    rank_state = _restore(run)
    yield run.checkpoints.path
    resumption = run.checkpoints
    if rank_state.get("objects") and resumption.objects is not None:
        with run.evaluating_weights():  # as during the save
            resumption.objects.compare(run, rank_state["objects"], is_roll_back=resumption.resumed_at is not run.origin)
    if run.control.is_shared:
        from .objects.run_state import share_facts

        share_facts(run)
        if resumption.objects is not None:
            resumption.objects.must_share = True


def _restore(run: RunContext) -> dict[str, Any]:
    resumption = run.checkpoints
    assert resumption.pending_state is not None
    (saved, resumption.path), resumption.pending_state = resumption.pending_state, None
    try:
        rank_state = apply(run, saved)
    except Exception as error:
        error.add_note(f"heliograph: while continuing from {resumption.path or 'a state'}")
        raise
    if rank_state.get("objects") and resumption.objects is not None:
        is_roll_back = not resumption.is_resume
        restored, resumption.edited = resumption.objects.resume(run, rank_state["objects"], is_roll_back=is_roll_back)
        resumption.restored += restored
    if run.modes is not None:
        run.modes.load_state_dict(rank_state)
    if resumption.is_resume:
        resumption.is_resume, resumption.resumed_from, resumption.resumed_at = False, resumption.path, run.origin
        _warn_if_past(run)
    return rank_state


def _warn_if_past(run: RunContext) -> None:
    at, epochs, steps = run.progress, run.settings.epochs, run.settings.steps
    is_past = epochs is not None and ((at.epoch, at.batch) > (epochs, 0) or at.batch > run.last_batch)
    lengths = [f"epochs={epochs}"] if is_past else []
    lengths += [f"steps={steps}"] if steps is not None and at.steps > steps else []
    if lengths:
        run.warn(
            f"Nothing to train: fit got {' and '.join(lengths)}, but the resumed training is already at epoch "
            f"{at.epoch}, batch {at.batch}, step {at.steps}. epochs= and steps= count from the start of the training: "
            f"increase them, or start another training with resume=None."
        )


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


def _position_note(run: RunContext) -> str:
    action, progress = "resumed at" if run.checkpoints.is_resume else "went back to", run.progress
    path = run.checkpoints.path or "a state"
    return f"{action} epoch {progress.epoch}, batch {progress.batch}, step {progress.steps} from {path}"
