"""The state of a run at one step boundary: everything that a resumed run needs, as plain types and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from time import time
from typing import Any

from torch import nn

from ..events import Run
from ..plugins.filters import Filter
from .checkpoint.state.compatibility import (
    apply_batch_change,
    batch_factors,
    check_optimizers,
    class_names,
    describe_groups,
    find_differences,
    load_scheduler,
    saved_scheduler_classes,
)
from .checkpoint.state.ranks import fit_to_engine, gather_rank_parts, load_parts, select_rank_part
from .checkpoint.state.rates import base_rates
from .checkpoint.state.schema import SCHEMA, WEIGHTS_ONLY, as_plain, check_resumable, check_schema, versions
from .checkpoint.storage import read_manifest
from .context import RunContext
from .engines.sharded_states import ShardingEngine
from .engines.weights import check_fits


def capture(run: RunContext, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the snapshot. Tensors are the live ones: store them before the next step. On several ranks a collective.

    The main rank's is the whole, with what differs on the others. Another rank's is its own, good for itself to go back
    to; where weights are sharded it holds none.

    Args:
        run: the run.
        shards: describes the shards that are saved apart from the snapshot, which holds no weights then.

    Raises:
        TypeError: some state is neither a plain type nor a tensor, and so could not be read back safely.
    """
    weights, optimizers = run.engine.pack(run.modules, run.optimizers) if shards is None else ({}, {})
    if run.report.held is not None:
        fresh = {"modules": weights, "optimizers": optimizers} | ({} if shards is None else {"shards": dict(shards)})
        return {**fresh, **run.report.held, "metrics": dict(run.metrics)}
    stateful = {"task": run.task} if not isinstance(run.task, nn.Module) else {}
    own = run.checkpoints.objects
    objects = {} if own is None else own.state_dict(run)  # before the data, which save what it reports
    snapshot = {
        "schema": SCHEMA,
        "saved_at": time(),
        "versions": versions(),
        "world": batch_factors(run),
        "run_name": run.name,
        "training_id": run.checkpoints.training_id,
        "progress": run.progress.state_dict(),
        "control": run.control.state_dict(is_over=run.report.finished),
        "data": run.data.state_dict(run.progress),
        "planned_done": run.length.done,
        "last_seen": run.work.is_last_seen,
        "epoch_begun": run.work.has_begun,
        "at_save_point": run.report.at_save_point,
        "modules": weights,
        "optimizers": optimizers,
        "optimizer_kinds": class_names(run.optimizers),
        "groups": describe_groups(run),
        "engine": run.engine.state_dict(),
        "schedulers": {name: each.state_dict() for name, each in run.schedulers.items()},
        "scheduler_kinds": class_names(run.schedulers),
        "task": {name: each.state_dict() for name, each in stateful.items() if hasattr(each, "state_dict")},
        "objects": objects,
        "metrics": dict(run.metrics),
        "means": run.means.state_dict(),
        "plugins": run.plugins.state_dict(as_plain),
        "filters": run.plugins.filter_states(run.origin, as_plain),
        **({"plugin_versions": numbers} if (numbers := run.plugins.state_versions()) else {}),
        **({} if run.checkpoints.forked_from is None else {"forked_from": dict(run.checkpoints.forked_from)}),
        **({} if run.checkpoints.given_rates is None else {"given_rates": run.checkpoints.given_rates}),
        **({"count_units": dict(run.stepping.units)} if run.stepping.units else {}),
        **({} if shards is None else {"shards": dict(shards)}),
        **({} if run.modes is None else run.modes.state_dict()),
        **({} if run.report.rows is None else {"log_history": run.report.rows.state_dict() | _totals(run)}),
    }
    snapshot, types = as_plain(snapshot, "state")
    if types:
        snapshot["number_types"] = types
    parts = gather_rank_parts(run.engine, snapshot)
    return {**snapshot, "ranks": parts if run.engine.is_main else []}


def hold(run: RunContext) -> None:
    """Keep the state of the end of a training, for the save after its last log and validation. A collective.

    A longer run that resumes from that save has not logged and validated there, as if the training had not ended.
    """
    apart = ("modules", "optimizers", "shards") if isinstance(run.engine, ShardingEngine) else ()  # gathers nothing
    state = capture(run, {} if apart else None)
    due = [verb for verb in state["control"]["due"] if verb not in ("log", "validation", "save")]
    state["control"] = {**state["control"], "due": due}
    run.report.held = {name: part for name, part in state.items() if name not in apart}


def capture_weights(run: RunContext) -> dict[str, Any]:
    """Return what others need of a snapshot: the weights, their averages, the counters and the metrics. A collective.

    Raises:
        TypeError: some of it is neither a plain type nor a tensor.
    """
    states = run.plugins.state_dict(as_plain).items()
    snapshot = {
        "schema": SCHEMA,
        "saved_at": time(),
        "versions": versions(),
        "world": batch_factors(run),
        "run_name": run.name,
        "training_id": run.checkpoints.training_id,
        WEIGHTS_ONLY: True,
        "progress": run.progress.state_dict(),
        "modules": run.engine.pack(run.modules, {})[0],
        "metrics": dict(run.metrics),
        "plugins": {name: each for name, each in states if each and {"weights", "evaluates"} <= each.keys()},
        **{name: {} for name in ("control", "data", "optimizers", "schedulers")},
        "ranks": [],
    }
    plain: dict[str, Any] = as_plain(snapshot, "state")[0]
    return plain


def apply(run: RunContext, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Continue a run from a snapshot; return this rank's part of it.

    Raises:
        ValueError: the snapshot is of another schema, incomplete, of other modules or, within an epoch, of other data.
    """
    resumption = run.checkpoints
    check_schema(saved)
    check_resumable(saved, resumption.path)
    if resumption.is_resume:  # a run that goes back stays the training that it is
        run.checkpoints.training_id, run.checkpoints.forked_from = saved["training_id"], saved.get("forked_from")
    if "frozen" in saved:
        from .checkpoint.state.frozen import with_frozen

        saved = with_frozen(saved, run.modules)
    saved = fit_to_engine(select_rank_part(saved, run.engine.rank, run.engine.world_size), run.engine, resumption.path)
    if "shards" not in saved:
        check_fits(run.modules, saved["modules"])
    check_optimizers(run, saved)
    progress = run.data.load_state_dict(saved["data"], saved["progress"])  # it refuses what does not fit
    _plan_rest(run, saved, progress)
    load_training(run, saved)
    if "task" in saved.get("task", {}):
        run.task.load_state_dict(deepcopy(saved["task"]["task"]))
    run.progress.load_state_dict(progress)
    run.stepping.units = dict(saved.get("count_units", {}))
    run.work.is_last_seen = saved.get("last_seen")
    run.work.has_begun = saved.get("epoch_begun", run.progress.batch > 0)
    run.checkpoints.in_boundary = saved.get("at_save_point", False)
    switched = run.control.switches
    run.control.load_state_dict(saved["control"], at_save_point=run.checkpoints.in_boundary)
    run.metrics.update(saved["metrics"])
    run.means.load_state_dict(saved.get("means", {}))
    from .metrics.log_rows import LogRows

    state = saved.get("log_history")
    run.report.rows = None if state is None else LogRows.of_state(state, run.report.rows)
    run.means.totals = {name: (value, weight) for name, (value, weight) in (state or {}).get("totals", {}).items()}
    # A return may be to what the run was resumed from.
    resumption.batch_change = saved.get("batch_change", resumption.batch_change)
    run.checkpoints.batch_note = apply_batch_change(
        run, saved["world"], resumption.batch_change, may_refuse=resumption.is_resume
    )
    found = run.plugins.load_state_dict(
        saved["plugins"], saved.get("plugin_versions"), resumption.path, goes_back=not resumption.is_resume
    )
    resumption.fresh_plugins, resumption.unclaimed_states = map(tuple, found)
    if switched or run.control.switches:
        from .stepping.changes import restore_switches

        restore_switches(run, switched, goes_back=not resumption.is_resume)
    run.note(_where(run))
    if resumption.fresh_plugins:
        what = "start fresh" if resumption.is_resume else "keep what they have"
        run.note(f"plugins that {what}, the checkpoint has no state of them: {', '.join(resumption.fresh_plugins)}")
    if resumption.unclaimed_states:
        run.note(f"states in the checkpoint that no plugin claims, left out: {', '.join(resumption.unclaimed_states)}")
    for change in find_differences(run, saved, versions(), resumption.fresh_plugins):
        run.data.report_difference(change)
    resumption.before = saved["world"]["size"], saved["world"].get("workers")
    return saved


def _plan_rest(run: RunContext, saved: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    """Plan the steps that remain, and make schedulers again that are functions of the whole, if it is another."""
    before = run.length.planned_steps
    if "planned_done" in saved:
        run.length.resume(saved["planned_done"], progress["epoch"], progress["batch"])
    if run.length.planned_steps != before:
        run.settings = run.length.complete(run.settings)
        for name, window in run.stepping.by_name.items():
            window.scheduler = run.schedulers.get(name)
        if run.checkpoints.objects is not None:
            run.checkpoints.objects.update_schedulers(run)


def _totals(run: RunContext) -> dict[str, Any]:
    return {"totals": {name: list(each) for name, each in run.means.totals.items()}}


def load_training(run: RunContext, saved: Mapping[str, Any]) -> None:
    """Load the modules, the optimizers, whose learning rates are state, and the schedulers of the same kinds."""
    given, resumption = base_rates(run.optimizers), run.checkpoints
    if run.modes is not None and "trained" in saved:  # so that it is in eval mode until all of it is loaded
        run.modes.eval()
    load_parts(run, saved, run.optimizers, resumption.path, drops_added=not resumption.is_resume)
    run.engine.load_state_dict(saved.get("engine", {}))
    loaded = base_rates(run.optimizers)[: len(given)]  # groups that the run added have no rate of the program's
    first = saved.get("given_rates", loaded)  # by the program that began: what a plugin made of them is not a change
    if resumption.is_resume and given[: len(first)] != first[: len(given)]:
        run.warn(
            f"The program's learning rate {_say_rates(given)} has no effect: the resumed run continues with its own, "
            f"{_say_rates(loaded)}. To change it, set it in a handler of CheckpointLoaded: in optimizer.param_groups, "
            f"and in the base_lrs of a scheduler."
        )
    if resumption.is_resume:
        resumption.given_rates = first
    before, now = saved_scheduler_classes(run, saved), class_names(run.schedulers)
    for name, scheduler in run.schedulers.items():
        if before.get(name) == now[name]:
            load_scheduler(name, scheduler, saved)


def _say_rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)


@contextmanager
def restoring(run: RunContext) -> Iterator[Path | None]:
    """Apply the state that a run is to continue from, yield its file, then compare what every plugin made of it."""
    own = _restore(run)
    yield run.checkpoints.path
    resumption = run.checkpoints
    if own.get("objects") and resumption.objects is not None:
        with run.evaluating_weights():  # as at the save
            resumption.objects.compare(run, own["objects"], is_roll_back=resumption.resumed_at is not run.origin)
    if run.control.is_shared:
        from .objects.run_state import share_facts

        share_facts(run)
        if resumption.objects is not None:
            resumption.objects.must_share = True


def _restore(run: RunContext) -> dict[str, Any]:
    """Apply the state that a run is to continue from; return this rank's part of it."""
    resumption = run.checkpoints
    assert resumption.pending_state is not None
    (saved, resumption.path), resumption.pending_state = resumption.pending_state, None
    try:
        own = apply(run, saved)
    except Exception as error:
        error.add_note(f"heliograph: while continuing from {resumption.path or 'a state'}")
        raise
    run.origin = run.progress.copy()
    Filter.plan_all(run)
    run.plugins.load_filter_states(run.origin, own.get("filters", {}))
    if own.get("objects") and resumption.objects is not None:
        is_roll_back = not resumption.is_resume
        restored, resumption.edited = resumption.objects.resume(run, own["objects"], is_roll_back=is_roll_back)
        resumption.restored += restored
    if run.modes is not None:
        run.modes.load_state_dict(own)
    if resumption.is_resume:
        resumption.is_resume, resumption.resumed_from, resumption.resumed_at = False, resumption.path, run.origin
        _warn_if_past(run)
    return own


def _warn_if_past(run: RunContext) -> None:
    """Say that less was asked for than the training has done."""
    at, epochs, steps = run.progress, run.settings.epochs, run.settings.steps
    is_past = epochs is not None and ((at.epoch, at.batch) > (epochs, 0) or at.batch > run.last_batch)
    lengths = [f"epochs={epochs}"] if is_past else []
    lengths += [f"steps={steps}"] if steps is not None and at.steps > steps else []
    if lengths:
        run.warn(
            f"Nothing is left to train: fit was asked for {' and '.join(lengths)}, and the training that it resumes is "
            f"past that, at epoch {at.epoch}, batch {at.batch}, step {at.steps}. epochs= and steps= count from the "
            f"start of the training: ask for more, or begin another one with resume=None."
        )


def unwritten(run: Run) -> Iterator[str]:
    """Say why nobody writes the saves that are requested: no plugin does, or those that would are disabled."""
    off = run.plugins.disabled_writers()
    for name, step in off.items():
        if step is None:
            yield f"Saves are requested, and plugin {name!r}, which would write them, is disabled."
        elif saved := _describe_newest(run):
            yield f"Plugin {name!r} is disabled since step {step}, and no other plugin writes saves: {saved}."
    if not off:
        yield "Saves are requested, and no plugin writes any: add Checkpoint('runs/x') to the plugins."


def _describe_newest(run: Run) -> str:
    """Return which checkpoint is the newest, and what is not in it; empty where everything is."""
    if run.checkpoints.last is None:
        return "there is none"
    newest = f"the newest checkpoint is {run.checkpoints.last}"
    try:
        steps = int(read_manifest(run.checkpoints.last).progress["steps"])
    except (OSError, ValueError):  # another plugin writes files of another kind, or this process does not see them
        return newest
    missing = run.progress.steps - steps
    more = "1 step is" if missing == 1 else f"{missing} steps are"
    return f"{newest}, of step {steps}, and {more} not in it" if missing > 0 else ""


def _where(run: RunContext) -> str:
    what, progress = "resumed at" if run.checkpoints.is_resume else "went back to", run.progress
    path = run.checkpoints.path or "a state"
    return f"{what} epoch {progress.epoch}, batch {progress.batch}, step {progress.steps} from {path}"
