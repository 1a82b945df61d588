"""What a handler is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .bus import Bus
    from .catalogue import Event, Phase
    from .control import Control
    from .engine import Engine
    from .progress import Progress


class Run(Protocol):
    """One `fit`, `validate` or `test`, fresh for every call. Plugins read; what they may write is said so.

    Attributes:
        name: the run's name, as in file names.
        phase: what is going on now: train, validation or test.
        progress: where the run is.
        origin: where this run began: zeros, or the resumed position. A new object for every start.
        control: what to ask of the loop.
        metrics: the latest value of every metric, such as `validation/loss`.
        hyper_parameters: what the user said of this run, for loggers.
        task: the user's model code.
        modules: the modules of the task by name.
        optimizer: the optimizer; None while no training goes on.
        scheduler: the learning-rate scheduler that `fit` was given, or None.
        engine: the hardware.
        bus: the signals, to connect to.
        train_loader: the iterable of training batches, or None.
        batches_per_epoch: its length, None where nobody knows.
        max_epochs: the run's length in epochs, None where it has no such limit.
        max_steps: the run's length in optimizer steps, None where it has no such limit.
        evaluation_batches: batches of the running validation or test, all sets together; None where nobody knows.
        batch: the batch in hand; a `TRANSFORM` handler of `BatchStart` may replace it.
        loss: the last training loss, unscaled; it lives until the next forward or the end of the epoch.
        outputs: what the task's step left here for handlers; dropped when the batch ends.
        window: how many micro-batches have left their gradients since the last step.
        best_checkpoint: where the best state lies; written by who stores it.
        last_checkpoint: where the newest state lies; written by who stores it.
        plugin_seconds: seconds in each plugin's handlers; written by who measures them.
    """

    name: str
    phase: Phase
    progress: Progress
    origin: Progress
    control: Control
    metrics: dict[str, float]
    hyper_parameters: Mapping[str, Any]
    task: Any
    modules: Mapping[str, Any]
    optimizer: Any
    scheduler: Any
    bus: Bus
    train_loader: Any
    batches_per_epoch: int | None
    max_epochs: int | None
    max_steps: int | None
    evaluation_batches: int | None
    batch: Any
    loss: Any
    outputs: Any
    window: int
    best_checkpoint: Path | None
    last_checkpoint: Path | None
    plugin_seconds: dict[str, float]

    @property
    def engine(self) -> Engine:
        """The hardware."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the last of its epoch."""

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets; one empty name for a single set, none without."""

    @property
    def tracks(self) -> bool:
        """Whether somebody will read what is tracked now; if not, a task may spare itself the work."""

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a value to the running mean of `<phase>/<name>`; a tensor stays on its device until it is logged."""

    def state_dict(self) -> dict[str, Any]:
        """Return one consistent cut of everything that a resumed run needs, as plain types and tensors."""

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """From `TrainStart` only: continue from a saved state, applied when every `TrainStart` handler has run."""

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Call `action` once, when the loader of the resumed epoch stands where it was and before it is read."""

    def replace_error(self, error: BaseException) -> None:
        """From `RunFailed` only: let this error leave instead, raised from the original."""

    def note(self, text: str) -> None:
        """Add a line that the result shows: what a plugin skipped, wrote or found."""

    def emit(self, event: Event) -> None:
        """Emit an event of one's own on this run's bus."""
