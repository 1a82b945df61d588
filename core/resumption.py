"""Continue a run from a snapshot: check it, load it, report differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..events import Run
from .checkpoint import compatibility, ranks
from .checkpoint.checks import check_resumable, check_schema
from .checkpoint.schema import base_rates, class_names, versions
from .context import RunContext
from .engines.options import is_sharding
from .engines.weights import check_fits
from .loop_state import load_loop
from .metrics.log_rows import LogRows
from .objects.restore import ResumedObjects, share_facts

if TYPE_CHECKING:
    from .engines.contract import LoopEngine


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
    saved = compatibility.with_frozen(saved, run.modules)
    saved = ranks.fit_to_engine(
        ranks.select_rank_part(saved, run.engine.rank, run.engine.world_size), run.engine, resumption.path
    )
    if "shards" not in saved:
        check_fits(run.modules, saved["modules"])
    compatibility.check_optimizers(run, saved)
    progress = run.data.load_state_dict(saved["data"], saved["progress"])  # it refuses other data
    _plan_remaining_steps(run, saved, progress)
    load_training(run, saved)
    if "task" in saved.get("task", {}):
        run.task.load_state_dict(deepcopy(saved["task"]["task"]))
    run.progress.load_state_dict(progress)
    run.stepping.units = dict(saved.get("count_units", {}))
    run.checkpoints.in_boundary = saved.get("at_save_point", False)
    state = saved.get("log_history")
    run.report.rows = None if state is None else LogRows.of_state(state, run.report.rows)
    run.means.totals = {name: (value, weight) for name, (value, weight) in (state or {}).get("totals", {}).items()}
    # A rollback may return to the state that the run was resumed from.
    resumption.batch_change = saved.get("batch_change", resumption.batch_change)
    run.checkpoints.batch_note = compatibility.apply_batch_change(
        run, saved["world"], resumption.batch_change, may_refuse=resumption.is_resume
    )
    load_loop(run, saved, _position_note(run), goes_back=not resumption.is_resume)
    for change in compatibility.find_differences(run, saved, versions(), resumption.fresh_plugins):
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
    before, now = compatibility.saved_scheduler_classes(run, saved), class_names(run.schedulers)
    for name, scheduler in run.schedulers.items():
        if before.get(name) == now[name]:
            compatibility.load_scheduler(name, scheduler, saved)


def _format_rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)


@contextmanager
def restoring(run: RunContext) -> Iterator[Path | None]:
    """Apply the state to continue from, yield its file, then compare the restored plugins with it."""
    rank_state = _restore(run)
    yield run.checkpoints.path
    resumption = run.checkpoints
    resumed_objects = resumption.resumed_objects
    if rank_state.get("objects") and resumed_objects is not None:
        with run.evaluating_weights():  # as during the save
            resumed_objects.compare(run, rank_state["objects"], is_roll_back=resumption.resumed_at is not run.origin)
    if run.control.is_shared:
        share_facts(run)
        if resumed_objects is not None:
            resumed_objects.must_share = True


def _restore(run: RunContext) -> dict[str, Any]:
    resumption = run.checkpoints
    assert resumption.pending_state is not None
    (saved, resumption.path), resumption.pending_state = resumption.pending_state, None
    try:
        rank_state = apply(run, saved)
    except Exception as error:
        error.add_note(f"heliograph: while continuing from {resumption.path or 'a state'}")
        raise
    if resumption.objects is not None:
        resumption.resumed_objects = resumed = resumption.resumed_objects or ResumedObjects(resumption.objects)
        if rank_state.get("objects"):
            is_roll_back = not resumption.is_resume
            restored, resumption.edited = resumed.restore(run, rank_state["objects"], is_roll_back=is_roll_back)
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


def _position_note(run: RunContext) -> str:
    action, progress = "resumed at" if run.checkpoints.is_resume else "went back to", run.progress
    path = run.checkpoints.path or "a state"
    return f"{action} epoch {progress.epoch}, batch {progress.batch}, step {progress.steps} from {path}"


def load_parts(
    run: Run, saved: Mapping[str, Any], optimizers: Mapping[str, Any], path: Path | None, *, drops_added: bool = False
) -> None:
    """Load the modules and some optimizers of a run from a snapshot. A collective.

    Args:
        run: the run.
        saved: the snapshot.
        optimizers: by name.
        path: the file of the snapshot.
        drops_added: whether parameter groups that the run has added since may be removed.

    Raises:
        ValueError: the optimizers cannot get their saved parameter groups.
    """
    engine = run.engine
    compatibility.restore_groups(run, saved, optimizers, drops_added=drops_added)
    if "shards" in saved and is_sharding(engine):
        shards = saved["shards"] if optimizers else ranks.shards_of_weights(saved["shards"])
        read = partial(
            ranks.read_tensors, folder=ranks.shards_folder(saved["shards"], path), process_group=engine.saving_group()
        )
        engine.load_shard_state(run.modules, optimizers, shards, read)
    else:
        saved = ranks.join_shards(saved, path)
        cast("LoopEngine", engine).unpack(run.modules, optimizers, (saved["modules"], saved["optimizers"]))
