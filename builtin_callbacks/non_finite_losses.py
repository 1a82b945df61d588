"""Detection of losses that are NaN or infinite, and the return to the last good checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..core.metrics.fetched import Fetched
from ..events import BatchStart, CheckpointLoaded, CheckpointSaved, ForwardEnd, GradientsReady, Lane, Run
from ..events.checks import check_whole_number
from ..plugins import Plugin, on

ADVICE = "lower the learning rate, clip gradients, check the data"


class WindowLosses:
    """The losses of the micro-batches of a window by optimizer, until the window is complete.

    The copy of a loss begins before its backward pass, so reading it waits for the forward pass only. In a loop without
    `ForwardEnd` it begins later.
    """

    def __init__(self) -> None:
        self._losses: dict[str, list[tuple[int, Fetched]]] = {}
        self._begun: list[tuple[ReferenceType[Tensor], Fetched]] = []  # whose optimizers are unknown so far
        self._batch = 0

    def open_batch(self, run: Run) -> None:
        # At `BatchStart`: adds the losses of the previous micro-batch, unless it was skipped.
        if run.stepping.window:
            windows = run.stepping.windows
            for name, loss in run.stepping.losses.items():
                self._add(name, loss, windows[name])
        self._begun.clear()
        self._batch = run.progress.batch

    def fetch(self, run: Run) -> None:
        self._begun.append((ref(run.loss), Fetched(run.loss)))

    def take_bad(self, run: Run) -> dict[int, float]:
        """Return the NaN and infinite losses by batch index, and clear the window. Call it at `GradientsReady`.

        Raises:
            RuntimeError: the loop did not get the loss.
        """
        self._add(run.stepping.optimizer_name, run.loss, run.stepping.window)
        fetched = self._losses.pop(run.stepping.optimizer_name)
        if not fetched:
            raise RuntimeError(
                "A plugin checks the loss of this step, but the loop did not get it: call run.step(loss) instead of "
                "run.step_with_gradients; in a train_function, call iterator.step(loss)."
            )
        losses = {batch: loss.read() for batch, loss in fetched}
        return {batch: loss for batch, loss in losses.items() if not math.isfinite(loss)}

    def _add(self, name: str, loss: Tensor, window: int) -> None:
        losses = self._losses.setdefault(name, [])
        if window > len(losses):
            begun = next((fetched for original, fetched in self._begun if original() is loss), None)
            losses.append((self._batch, begun or Fetched(loss)))


class _LossGuard(Plugin):
    """Collects the losses of a window, to be judged before its step."""

    exclusive = ("non-finite losses",)

    def reset(self) -> None:
        self._losses = WindowLosses()

    @on(BatchStart)
    def begin_batch(self, run: Run, event: BatchStart) -> None:
        """Record the losses of a window's earlier micro-batches."""
        self._losses.open_batch(run)

    @on(ForwardEnd, optional=True)
    def fetch(self, run: Run, event: ForwardEnd) -> None:
        """Start copying the loss to the host, before the backward pass is queued."""
        self._losses.fetch(run)


class NaNGuard(_LossGuard):
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

    def __init__(self, action: Literal["raise", "skip", "stop"] = "raise", *, max_skips: int = 10) -> None:
        if action not in ("raise", "skip", "stop"):
            raise ValueError(f"NaNGuard(action) takes 'raise', 'skip' or 'stop', got {action!r}.")
        self.action, self.max_skips = action, check_whole_number("max_skips", max_skips, at_least=1)
        self.asks = {"raise": (), "skip": ("skip_step",), "stop": ("skip_step", "stop")}[action]
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._skips: dict[str, int] = {}
        self._stop_reason = ""

    def describe(self, run: Run) -> str:
        acts = {"raise": "fails the run", "skip": "skips the step", "stop": "skips the step, and stops the run"}
        return f"{acts[self.action]} when a loss is not a number"

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
            raise FloatingPointError(f"{loss} at step {run.progress.steps}{times}: {ADVICE}.")
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


class RollBack(_LossGuard):
    """Return to a good checkpoint after a NaN or infinite loss.

    The batches with such a loss are then skipped. As in `NaNGuard`, losses are checked before every optimizer step,
    which waits for the forward pass. A good checkpoint is intact and has finite parameters; otherwise an older one of
    this run, or the one that it was resumed from, is used. If it is sharded, the rank loads all weights into host
    memory. Pending saves are awaited.

    Batches are identified by epoch and position, so their order must be reproducible: use `RNGCapture`, or do not
    shuffle. `NaNGuard` handles such losses in another way, so only one of the two can be registered.

    Args:
        max_times: how often a training may roll back, including resumed runs.

    Raises:
        ValueError: `max_times` is not positive.
        FloatingPointError: a loss is not finite, and `max_times` is reached or there is no good checkpoint.
    """

    needs = ("save",)
    asks = ("skip_batch", "skip_step", "roll_back")

    def __init__(self, max_times: int = 3) -> None:
        self.max_times = check_whole_number("max_times", max_times, at_least=1)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.times = 0
        self.skipped: set[tuple[int, int]] = set()
        self._paths: list[Path] = []

    def describe(self, run: Run) -> str:
        return f"goes back to the last checkpoint when a loss is not a number, at most {self.max_times} times"

    @on(CheckpointSaved)
    def remember(self, run: Run, event: CheckpointSaved) -> None:
        """Record a checkpoint of this run; the folder may contain others."""
        self._paths = [*(path for path in self._paths if path != event.path), event.path]

    @on(CheckpointLoaded)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Discard the checkpoints that were written after the loaded one."""
        if event.path in self._paths:
            del self._paths[self._paths.index(event.path) + 1 :]
        else:
            self._paths = [] if event.path is None else [event.path]

    def begin_batch(self, run: Run, event: BatchStart) -> None:
        """Skip batches that have caused a roll-back."""
        super().begin_batch(run, event)
        if (run.progress.epoch, run.progress.batch) in self.skipped:
            run.control.skip_batch("its loss was not a number before the roll-back")

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def judge(self, run: Run, event: GradientsReady) -> None:
        """Roll back if a loss of the window is not finite."""
        if bad := self._losses.take_bad(run):
            place = run.progress
            bad_loss = f"the {run.stepping.label('loss')} of epoch {place.epoch}, batch {min(bad)} is {bad[min(bad)]}"
            run.control.skip_step(bad_loss)
            if not run.control.is_rolling_back:  # because of the loss of another optimizer
                self._go_back(run, bad_loss)
            self.skipped |= {(place.epoch, batch) for batch in bad}

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times, "skipped": [list(place) for place in sorted(self.skipped)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times = max(self.times, state["times"])
        self.skipped |= {(epoch, batch) for epoch, batch in state["skipped"]}

    def _go_back(self, run: Run, bad_loss: str) -> None:
        if self.times >= self.max_times:
            times = f"already rolled back {self.times} times (max_times={self.max_times})"
            raise FloatingPointError(f"{bad_loss}, and the run has {times}: {ADVICE}.")
        if run.engine.world_size == 1:  # with several ranks, a save ends on all together, and this one may be alone
            run.hooks.settle()
        state, path = self._last_good(run, bad_loss)
        self.times += 1
        run.note(f"rolled back at step {run.progress.steps} to {path} ({self.times} of {self.max_times}): {bad_loss}")
        run.roll_back(state, path)

    def _last_good(self, run: Run, bad_loss: str) -> tuple[dict[str, Any], Path]:
        if run.report.is_replay and self._paths:  # a replay has no weights; the recording shows which one was good
            return {}, self._paths[-1]
        from ..core.checkpoint.checks import check_resumable
        from ..core.checkpoint.storage.reader import load  # not needed by NaNGuard

        passed_over = []
        for path in [path for path in reversed(self._paths) if path.exists()]:
            try:
                state = load(path)
                check_resumable(state, path)
                _check_finite(run, state, path)
            except (FileNotFoundError, ValueError) as error:
                passed_over.append(str(error))
            else:
                return state, path
        reason = "no checkpoint to roll back to: save earlier or more often."
        if passed_over:
            reason = f"no usable checkpoint. {' '.join(passed_over)}"
        raise FloatingPointError(f"{bad_loss}, and there is {reason}")


def _check_finite(run: Run, state: Mapping[str, Any], path: Path) -> None:
    # A buffer may contain an infinity, as a mask does. Each rank reads all shards, because it may be the only one here.
    from ..core.checkpoint.ranks import join_weights  # not needed by NaNGuard

    modules = join_weights(state, path)
    for module_name, module in run.modules.items():
        saved = modules.get(module_name, {})
        for name, _ in module.named_parameters():
            if name in saved and not bool(torch.isfinite(saved[name]).all()):
                raise ValueError(f"The checkpoint {path} cannot be used: {module_name}.{name} is not finite.")
