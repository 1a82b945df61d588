"""Notice a loss that is not a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..core.metrics.window_losses import WindowLosses
from ..events import BatchStart, CheckpointLoaded, ForwardEnd, GradientsReady, Lane, Run
from ..events.checks import check_whole_number
from ..plugins import Plugin, on


class NaNGuard(Plugin):
    """Act when a loss is NaN or infinite.

    It looks at the loss before every optimizer step, so a step with such a loss is never taken: the weights stay those
    of the last good one. On a GPU the loss comes to the host while the backward pass runs: the host waits for the
    forward pass only, during which the device has the backward pass still to do. The losses of a window whose step was
    dropped are in no mean: neither in those that are logged, nor in those of an epoch or of the result. `RollBack` is
    another answer to the same question, so only one of the two may be registered. Of several optimizers each is judged
    by its own loss.

    Args:
        action: `raise` a FloatingPointError, `skip` the step (its gradients are dropped), or `stop` the run (the step
            is dropped too; a run that is resumed from there is stopped again, unless the action is another one then).
        max_skips: with `skip`, how many steps in a row of one optimizer may be dropped before it raises.

    Raises:
        ValueError: the action is unknown, or `max_skips` not positive.
    """

    exclusive = ("non-finite losses",)

    def __init__(self, action: Literal["raise", "skip", "stop"] = "raise", *, max_skips: int = 10) -> None:
        if action not in ("raise", "skip", "stop"):
            raise ValueError(f"NaNGuard(action) is 'raise', 'skip' or 'stop', got {action!r}.")
        self.action, self.max_skips = action, check_whole_number("max_skips", max_skips, at_least=1)
        self.asks = {"raise": (), "skip": ("skip_step",), "stop": ("skip_step", "stop")}[action]
        self._skips: dict[str, int] = {}
        self._stop_reason = ""
        self._losses = WindowLosses()

    def reset(self) -> None:
        """Forget the former run."""
        self._skips, self._stop_reason = {}, ""
        self._losses = WindowLosses()

    def describe(self, run: Run) -> str:
        """Say what is done about a loss that is not a number."""
        acts = {"raise": "fails the run", "skip": "skips the step", "stop": "skips the step, and stops the run"}
        return f"{acts[self.action]} when a loss is not a number"

    @on(BatchStart)
    def remember(self, run: Run, event: BatchStart) -> None:
        """Keep the losses of a window's earlier micro-batches."""
        self._losses.open_batch(run)

    @on(ForwardEnd, optional=True)
    def fetch(self, run: Run, event: ForwardEnd) -> None:
        """Begin to copy the loss to the host, before the device is given the backward pass."""
        self._losses.fetch(run)

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def judge(self, run: Run, event: GradientsReady) -> None:
        """Act on the window's losses."""
        bad, name = self._losses.take_bad(run), run.stepping.optimizer_name
        if not bad:
            self._skips.pop(name, None)
            return
        skips = self._skips[name] = self._skips.get(name, 0) + 1
        what = f"the {run.stepping.label('loss')} is {next(iter(bad.values()))}"
        if self.action == "raise" or skips > self.max_skips:
            times = f", {skips} windows in a row" if skips > 1 else ""
            raise FloatingPointError(
                f"{what} at step {run.progress.steps}{times}: lower the learning rate, clip gradients, check the data."
            )
        run.control.skip_step(what)
        if self.action == "stop":
            self._stop_reason = f"{what} at step {run.progress.steps}"
            run.control.stop(self._stop_reason)

    @on(CheckpointLoaded)
    def repeat_stop_after_resume(self, run: Run, event: CheckpointLoaded) -> None:
        """Stop a resumed run that had been stopped, unless the action was changed since."""
        if self._stop_reason and self.action == "stop":
            run.control.stop(self._stop_reason)

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps in a row were dropped, by optimizer, and why the run was stopped, if it was."""
        return {"skips": dict(self._skips), "stop_reason": self._stop_reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting."""
        self._skips, self._stop_reason = dict(state["skips"]), state["stop_reason"]
