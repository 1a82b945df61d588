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
    """One `fit`, `validate` or `test`, fresh for every call. Plugins may replace `batch`, and write `metrics`."""

    batch: Any
    """The batch in hand; a `TRANSFORM` handler of `BatchStart` may replace it."""
    outputs: Any
    """What the task's step left here for handlers; dropped when the batch ends."""
    best_checkpoint: Path | None
    last_checkpoint: Path | None
    plugin_seconds: dict[str, float]
    """Seconds in each plugin's handlers, where a plugin measures them."""

    @property
    def name(self) -> str:
        """The run's name, as in file names."""

    @property
    def phase(self) -> Phase:
        """What is going on now: train, validation or test."""

    @property
    def progress(self) -> Progress:
        """Where the run is."""

    @property
    def origin(self) -> Progress:
        """Where this run began: zeros, or the resumed position. A new object for every start."""

    @property
    def control(self) -> Control:
        """What to ask of the loop."""

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of every metric, such as `validation/loss`."""

    @property
    def hyper_parameters(self) -> Mapping[str, Any]:
        """What the user said of this run, for loggers."""

    @property
    def task(self) -> Any:
        """The user's model code."""

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules of the task by name."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; None while no training goes on."""

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler that `fit` was given, or None."""

    @property
    def train_loader(self) -> Any:
        """The iterable of training batches, or None."""

    @property
    def engine(self) -> Engine:
        """The hardware."""

    @property
    def bus(self) -> Bus:
        """Where to emit events of one's own."""

    @property
    def loss(self) -> Any:
        """The last training loss, unscaled; it lives until the next forward or the end of the epoch."""

    @property
    def window(self) -> int:
        """How many micro-batches have left their gradients since the last step."""

    @property
    def batches_per_epoch(self) -> int | None:
        """Training batches in an epoch, None where nobody knows."""

    @property
    def max_epochs(self) -> int | None:
        """The run's length in epochs, None where it has no such limit."""

    @property
    def max_steps(self) -> int | None:
        """The run's length in optimizer steps, None where it has no such limit."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the last of its epoch."""

    @property
    def evaluation_batches(self) -> int | None:
        """Batches of the running validation or test, all sets together; None where nobody knows."""

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

    def resume(self, state: Mapping[str, Any], path: Path | None = None) -> None:
        """From `TrainStart` only: continue from a saved state, applied when every `TrainStart` handler has run."""

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Call `action` once, when the loader of the resumed epoch stands where it was and before it is read."""

    def replace_error(self, error: BaseException) -> None:
        """From `RunFailed` only: let this error leave instead, raised from the original."""

    def note(self, text: str) -> None:
        """Add a line that the result shows: what a plugin skipped, wrote or found."""

    def emit(self, event: Event) -> None:
        """Emit an event of one's own on this run's bus."""
