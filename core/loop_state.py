"""The part of a run's state that any loop has, the framework's or another one that plugins take part in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plugins.filters import Filter
from .checkpoint.schema import is_small_and_plain


def as_plain(value: Any, path: str) -> tuple[Any, Any]:
    """Return a state as plain types and tensors, and the types of its NumPy and complex numbers and empty bytes.

    Raises:
        TypeError: it holds something else that `torch.load(weights_only=True)` refuses.
        ValueError: it is not a tree.
    """
    if is_small_and_plain(value):
        return value, None
    from .checkpoint.checks import replace_numbers  # imported when a state needs more than the quick check

    return replace_numbers(value, path)


def capture_loop(run: Any) -> dict[str, Any]:
    """Return requests, means, states of plugins and the position in the epoch, as plain types."""
    versions = run.plugins.state_versions()
    return {
        "control": run.control.state_dict(is_over=run.report.finished),
        "last_seen": run.work.is_last_seen,
        "epoch_begun": run.work.has_begun,
        "means": run.means.state_dict(),
        "plugins": run.plugins.state_dict(as_plain),
        "filters": run.plugins.filter_states(run.origin, as_plain),
        **({"plugin_versions": versions} if versions else {}),
    }


def load_loop(run: Any, saved: Mapping[str, Any], note: str, *, goes_back: bool = False) -> None:
    """Load what `capture_loop` returned, after the counters and `checkpoints.in_boundary`; add notes, `note` first."""
    checkpoints, switched = run.checkpoints, run.control.switches
    run.work.is_last_seen = saved.get("last_seen")
    run.work.has_begun = saved.get("epoch_begun", run.progress.batch > 0)
    run.control.load_state_dict(saved["control"], at_save_point=checkpoints.in_boundary)
    run.metrics.update(saved["metrics"])
    run.means.load_state_dict(saved.get("means", {}))
    run.note(note)
    versions = saved.get("plugin_versions")
    unmatched = run.plugins.load_state_dict(saved["plugins"], versions, checkpoints.path, goes_back=goes_back)
    checkpoints.fresh_plugins, checkpoints.unclaimed_states = map(tuple, unmatched)
    if switched or run.control.switches:
        from .stepping.changes import restore_switches

        restore_switches(run, switched, goes_back=goes_back)
    if checkpoints.fresh_plugins:
        outcome = "keep their state" if goes_back else "start fresh"
        run.note(f"plugins without state in the checkpoint {outcome}: {', '.join(checkpoints.fresh_plugins)}")
    if checkpoints.unclaimed_states:
        run.note(f"states in the checkpoint without a plugin, ignored: {', '.join(checkpoints.unclaimed_states)}")
    run.origin = run.progress.copy()
    Filter.plan_all(run)
    run.plugins.load_filter_states(run.origin, saved.get("filters", {}))
