"""The best state of a run, brought back at its end."""

from __future__ import annotations

from math import isnan
from typing import Literal

from ...events import Run
from .. import storage
from ..monitor import Monitor

Extent = Literal["weights", "everything"]


def load_best(run: Run, best: storage.Entry | None, monitor: Monitor, extent: Extent) -> str:
    """Give a run's task, optimizer and scheduler the state of its best checkpoint; return what was done.

    Args:
        run: the run, at its end.
        best: the checkpoint as it was ranked; None or one that was judged NaN is none to load.
        monitor: what it was ranked by.
        extent: only the weights, or the optimizer and the scheduler too.

    Raises:
        FileNotFoundError: it is gone.
        ValueError: it is damaged, or no longer the one that was ranked.
    """
    value = float("nan") if best is None or best.judged_by is None else best.judged_by[2]
    if best is None or value is None or isnan(value):
        return f"nothing loaded back at the end: no checkpoint was saved where {monitor.name!r} was measured"
    saved = storage.load(best.path)
    now = storage.read_manifest(best.path)
    if (now.sha256, now.judged_by) != (best.sha256, best.judged_by):
        raise ValueError(
            f"{best.path} is not the checkpoint that was ranked best by {best.judged_by}: another was put in its "
            f"place, judged by {now.judged_by}. Nothing was loaded."
        )
    for name, module in run.modules.items():
        module.load_state_dict(saved["modules"][name])
    if extent == "everything":
        run.optimizer.load_state_dict(saved["optimizer"])
        if run.scheduler is not None:
            run.scheduler.load_state_dict(saved["scheduler"])
    return f"loaded back at the end: {extent} of the best checkpoint {best.path}, {monitor.name} {value:.6g}"
