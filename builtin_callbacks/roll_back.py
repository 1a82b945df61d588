"""Go back to the last good checkpoint when the loss is not a number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.checkpoint import storage
from ..core.checkpoint.state.ranks import join_weights
from ..core.checkpoint.state.schema import check_resumable
from ..core.metrics.window_losses import WindowLosses
from ..events import BatchStart, CheckpointLoaded, CheckpointSaved, ForwardEnd, GradientsReady, Lane, Run
from ..events.checks import check_whole_number
from ..plugins import Plugin, on


class RollBack(Plugin):
    """Go back to a good checkpoint after a NaN loss.

    Infinite losses count too; the batches with such a loss are then left out. Looks at the losses before every
    optimizer step, and waits for the forward pass for that, as `NaNGuard` does. A good checkpoint is whole, and all
    parameters in it are finite numbers; one that is not is skipped for an older one that this run wrote, or was resumed
    from. Of one in shards, the rank that goes back reads all weights into host memory. Saves in flight are waited for.
    Batches are known by epoch and place in it, so their order must be the same after the return: it is with
    `RNGCapture`, or without shuffling. `NaNGuard` is another answer to the same question, so only one of the two may be
    registered.

    Args:
        max_times: how often a run may go back, resumes included.

    Raises:
        ValueError: `max_times` is not positive.
        FloatingPointError: a loss is not a number, and the run went back too often or there is no good checkpoint.
    """

    exclusive = ("non-finite losses",)
    needs = ("save",)
    asks = ("skip_batch", "skip_step", "roll_back")

    def __init__(self, max_times: int = 3) -> None:
        self.max_times = check_whole_number("max_times", max_times, at_least=1)
        self.times = 0
        self.skipped: set[tuple[int, int]] = set()
        self._paths: list[Path] = []
        self._losses = WindowLosses()

    def reset(self) -> None:
        self.times, self.skipped, self._paths, self._losses = 0, set(), [], WindowLosses()

    def describe(self, run: Run) -> str:
        return f"goes back to the last checkpoint when a loss is not a number, at most {self.max_times} times"

    @on(CheckpointSaved)
    def remember(self, run: Run, event: CheckpointSaved) -> None:
        """Remember where there is something to go back to; a folder may hold checkpoints of another training, too."""
        self._paths = [*(path for path in self._paths if path != event.path), event.path]

    @on(CheckpointLoaded)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Forget the checkpoints that were written after this one; of a state without a file it is not known which."""
        if event.path in self._paths:
            del self._paths[self._paths.index(event.path) + 1 :]
        else:
            self._paths = [] if event.path is None else [event.path]

    @on(BatchStart)
    def leave_out(self, run: Run, event: BatchStart) -> None:
        """Leave out what made the run go back."""
        self._losses.open_batch(run)
        if (run.progress.epoch, run.progress.batch) in self.skipped:
            run.control.skip_batch("its loss was not a number when it was last here")

    @on(ForwardEnd, optional=True)
    def fetch(self, run: Run, event: ForwardEnd) -> None:
        """Begin to copy the loss to the host, before the device is given the backward pass."""
        self._losses.fetch(run)

    @on(GradientsReady, lane=Lane.TRANSFORM)
    def judge(self, run: Run, event: GradientsReady) -> None:
        """Go back where a loss of the window is not a number."""
        if bad := self._losses.take_bad(run):
            place = run.progress
            what = f"the {run.stepping.label('loss')} of epoch {place.epoch}, batch {min(bad)} is {bad[min(bad)]}"
            run.control.skip_step(what)
            if not run.control.is_rolling_back:  # as it does already for the loss of another optimizer
                self._go_back(run, what)
            self.skipped |= {(place.epoch, batch) for batch in bad}

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times, "skipped": [list(place) for place in sorted(self.skipped)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times = max(self.times, state["times"])
        self.skipped |= {(epoch, batch) for epoch, batch in state["skipped"]}

    def _go_back(self, run: Run, what: str) -> None:
        if self.times >= self.max_times:
            raise FloatingPointError(
                f"{what}, and the run went back {self.times} times already (max_times={self.max_times}): lower the "
                f"learning rate, clip gradients, check the data."
            )
        if run.engine.world_size == 1:  # else this rank may be alone here, and a save ends on all ranks together
            run.hooks.settle()
        state, path = self._last_good(run, what)
        self.times += 1
        run.note(f"rolled back at step {run.progress.steps} to {path} ({self.times} of {self.max_times}): {what}")
        run.roll_back(state, path)

    def _last_good(self, run: Run, what: str) -> tuple[dict[str, Any], Path]:
        if (
            run.report.is_replay and self._paths
        ):  # there are no weights to look at: whether it was good, the recording shows
            return {}, self._paths[-1]
        passed_over = []
        for path in [path for path in reversed(self._paths) if path.exists()]:
            try:
                state = storage.load(path)
                check_resumable(state, path)
                _check_finite(run, state, path)
            except (FileNotFoundError, ValueError) as error:
                passed_over.append(str(error))
            else:
                return state, path
        why = "none yet: save earlier or more often."
        if passed_over:
            why = f"none that can be used. {' '.join(passed_over)}"
        raise FloatingPointError(f"{what}, and of the checkpoints to go back to there is {why}")


def _check_finite(run: Run, state: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError unless all parameters are finite; a buffer may well hold an infinity, as a mask does."""
    modules = join_weights(state, path)  # of shards, too, each rank reads all: it may be the only one to ask
    for module_name, module in run.modules.items():
        saved = modules.get(module_name, {})
        for name, _ in module.named_parameters():
            if name in saved and not bool(torch.isfinite(saved[name]).all()):
                raise ValueError(
                    f"The checkpoint {path} cannot be used: {module_name}.{name} in it is not a finite number."
                )
