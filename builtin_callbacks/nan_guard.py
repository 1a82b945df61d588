"""Detection of losses that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..core.metrics.window_losses import WindowLosses
from ..events import BatchStart, CheckpointLoaded, ForwardEnd, GradientsReady, Lane, Run
from ..events.checks import check_whole_number
from ..plugins import Plugin, on


class NaNGuard(Plugin):
    """Act when a loss is NaN or infinite.

    The loss is checked before every optimizer step, so no step is made with such a loss. On a GPU, the loss is copied
    to the host during the backward pass, so the host waits for the forward pass only. Losses of a window whose step was
    dropped are excluded from all means. With several optimizers, each loss is checked before the step of its optimizer.
    `RollBack` handles such losses in another way, so only one of the two can be registered.

    Args:
        action: `raise` a FloatingPointError, `skip` the step (its gradients are dropped), or `stop` the run (the step
            is dropped too; a run resumed from there stops again, unless the action was changed).
        max_skips: with `skip`, the number of consecutive steps of an optimizer that may be dropped before it raises.

    Raises:
        ValueError: the action is unknown, or `max_skips` is not positive.
    """

    exclusive = ("non-finite losses",)

    def __init__(self, action: Literal["raise", "skip", "stop"] = "raise", *, max_skips: int = 10) -> None:
        if action not in ("raise", "skip", "stop"):
            raise ValueError(f"NaNGuard(action) takes 'raise', 'skip' or 'stop', got {action!r}.")
        self.action, self.max_skips = action, check_whole_number("max_skips", max_skips, at_least=1)
        self.asks = {"raise": (), "skip": ("skip_step",), "stop": ("skip_step", "stop")}[action]
        self._skips: dict[str, int] = {}
        self._stop_reason = ""
        self._losses = WindowLosses()

    def reset(self) -> None:
        self._skips, self._stop_reason = {}, ""
        self._losses = WindowLosses()

    def describe(self, run: Run) -> str:
        acts = {"raise": "fails the run", "skip": "skips the step", "stop": "skips the step, and stops the run"}
        return f"{acts[self.action]} when a loss is not a number"

    @on(BatchStart)
    def remember(self, run: Run, event: BatchStart) -> None:
        """Record the losses of a window's earlier micro-batches."""
        self._losses.open_batch(run)

    @on(ForwardEnd, optional=True)
    def fetch(self, run: Run, event: ForwardEnd) -> None:
        """Start copying the loss to the host, before the backward pass is queued."""
        self._losses.fetch(run)

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def judge(self, run: Run, event: GradientsReady) -> None:
        """Check the losses of the window and act on them."""
        bad, name = self._losses.take_bad(run), run.stepping.optimizer_name
        if not bad:
            self._skips.pop(name, None)
            return
        skips = self._skips[name] = self._skips.get(name, 0) + 1
        loss = f"the {run.stepping.label('loss')} is {next(iter(bad.values()))}"
        if self.action == "raise" or skips > self.max_skips:
            times = f", {skips} windows in a row" if skips > 1 else ""
            raise FloatingPointError(
                f"{loss} at step {run.progress.steps}{times}: lower the learning rate, clip gradients, check the data."
            )
        run.control.skip_step(loss)
        if self.action == "stop":
            self._stop_reason = f"{loss} at step {run.progress.steps}"
            run.control.stop(self._stop_reason)

    @on(CheckpointLoaded)
    def repeat_stop_after_resume(self, run: Run, event: CheckpointLoaded) -> None:
        """Stop a resumed run that had been stopped, unless the action was changed."""
        if self._stop_reason and self.action == "stop":
            run.control.stop(self._stop_reason)

    def state_dict(self) -> dict[str, Any]:
        return {"skips": dict(self._skips), "stop_reason": self._stop_reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._skips, self._stop_reason = dict(state["skips"]), state["stop_reason"]
