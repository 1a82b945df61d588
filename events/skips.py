"""Who skipped batches and steps, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .progress import Skips

Requests = Iterable[Any]  # naming the control's type here would close a circle of imports


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
