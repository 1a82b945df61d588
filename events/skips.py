"""Who skipped batches and steps, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .progress import Progress, Skips

Requests = Iterable[Any]  # naming the control's type here would close a circle of imports


def count_skip(control: Any, progress: Progress, counter: str | None, *, by_engine: bool) -> None:
    """Count what was skipped; see `Control.count_skip`."""
    if counter is not None:
        setattr(progress, counter, getattr(progress, counter) + 1)
    if control.skips.step != progress.steps:
        control.skips = Skips(progress.steps)
    control.skips.count += 1
    control.skips.by_engine += by_engine
    if control.max_skips is not None and control.skips.count > control.max_skips:
        raise too_many_skips(control.skips, control.history)


def too_many_skips(skips: Skips, history: Requests) -> RuntimeError:
    """Return what to raise where batches and steps were skipped again and again."""
    return RuntimeError(
        f"{skips.count} batches or steps in a row were skipped, without an optimizer step since step {skips.step}. Who "
        f"skipped: {who_skipped(skips, history)}. If that is meant, allow more: max_skipped_steps= of fit takes a "
        f"number, None for any."
    )


def who_skipped(skips: Skips, history: Requests) -> str:
    """Return who skipped batches and steps since the last optimizer step, how often, and the last reason."""
    asked: dict[str, list[str]] = {}
    for each in history:
        if each.step == skips.step and each.verb in ("skip_batch", "skip_step", "end_epoch"):
            asked.setdefault(each.by, []).append(each.reason)
    who = [f"{by}, {_times(len(reasons))} ({reasons[-1]})" for by, reasons in asked.items()]
    if skips.by_engine:
        who.append(f"the engine, {_times(skips.by_engine)} (gradients in fp16 were infinite or not numbers)")
    return "; ".join(who) or "a plugin on another rank"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
