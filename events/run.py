"""What a handler is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .bus import Bus
    from .catalogue import Event, Phase
    from .control import Control
    from .engine import Engine
    from .progress import Progress
    from .resume_facts import ResumeFacts


class CheckpointSource(Protocol):
    """Where checkpoints of a run are besides its own folder, such as the storage of a cluster.

    Attributes:
        patience: seconds to wait until a process that this one replaces has released the folder.
    """

    patience: float

    def fetch(self, store: Any, resume: str | Path | None) -> tuple[str | Path | None, list[str]]:
        """Put what a run is to resume into its folder; called on the main rank.

        Args:
            store: the run's `heliograph.core.checkpoint.storage.Store`, open.
            resume: what the run was asked to resume: None, `auto` or a path.

        Returns:
            What it is to resume: that, or the path of what was fetched; and notes for the result.
        """


class RunLength(Protocol):
    """How long a run is, and how much of it is done: `run.length`, valid in every event."""

    @property
    def max_epochs(self) -> float | None:
        """The length in epochs, perhaps a fraction such as 1.5; None without such a limit."""

    @property
    def max_steps(self) -> int | None:
        """The length in optimizer steps; None without such a limit."""

    @property
    def batches_per_epoch(self) -> int | None:
        """The length of the train loader; None if it is unknown."""

    @property
    def planned_steps(self) -> int | None:
        """The optimizer steps from the run's first beginning to its end; None if they are unknown before.

        Skipped steps and epochs that end early are not foreseen. After a resume in epochs of another length: the steps
        that were done, and those that remain.
        """

    @property
    def unknown(self) -> str:
        """Why `planned_steps` is None, and how to change that, as the rest of a sentence; empty if it is a number."""

    @property
    def scheduler_steps(self) -> Mapping[str, int]:
        """For how many steps the schedulers were made that are functions of it, by the names of their optimizers."""

    @property
    def epoch_fraction(self) -> float | None:
        """How many epochs are done, such as 1.25; None if the loader has no length."""

    @property
    def fraction(self) -> float | None:
        """Which part of the planned steps is done, from 0 to 1; None if these are unknown."""


class RunData(Protocol):
    """The data of a run: `run.data`, valid in every event.

    Attributes:
        seed: the key of the order of samples and of the draws of loading; None until it is decided.
        phase: which of several training phases is read, from 0.
        stream: of a training on weighted streams, the name of the stream that the current or last batch is of.
        evaluation_batches: batches of the running validation, test or prediction, of all its sets; None if unknown.
    """

    seed: int | None
    phase: int
    stream: str | None
    evaluation_batches: int | None

    @property
    def train_loader(self) -> Any:
        """The iterable of training batches that is read now, or None."""

    @property
    def validation_loaders(self) -> Mapping[str, Any]:
        """The validation loaders, by the names of their sets."""

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets; one empty name for a single set, none without."""

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of one process; 1 if batches are dealt out to the ranks, None if it is unknown."""

    @property
    def in_hand(self) -> bool:
        """Whether a batch is being processed: from before its `BatchStart` until its `BatchEnd`."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last of its epoch."""

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """How the epochs of each phase lie in the batches of all processes, as plain types."""

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        """From `TrainStart` only: let loading draw by (seed, epoch, position), apart from the training's stream.

        With `probe`, the first batch that is read is loaded a second time and compared, to find hidden state.
        """

    def resume_facts(self) -> ResumeFacts:
        """Return what is known about a resume of this run: untracked state, differences, the position of the data."""

    def report_untracked(self, path: str, kind: str) -> None:
        """Report state that no checkpoint holds and that may influence the training, by its path and type."""

    def report_difference(self, text: str) -> None:
        """Report in a sentence what is not as it was when the state was saved."""


class RunStepping(Protocol):
    """The optimizer steps and the micro-batches that they are made of: `run.stepping`, valid in a training.

    Attributes:
        forward: the training step as the engine runs it, called with the run and a batch; a `TRANSFORM` handler of
            `TrainStart` may replace it.
    """

    forward: Callable[..., Any]

    @property
    def window(self) -> int:
        """How many micro-batches have added gradients since the last step; of several optimizers, see `windows`.

        In `GradientsReady` and `StepEnd` that of the optimizer that is stepped, elsewhere the longest.
        """

    @property
    def windows(self) -> Mapping[str, int]:
        """How many micro-batches have added gradients since the last step of each optimizer, by its name."""

    @property
    def window_count(self) -> float | None:
        """In `GradientsReady` and `StepEnd`: the count, of all ranks, that the gradients were divided by; else None."""

    @property
    def optimizer_name(self) -> str:
        """The name of `run.optimizer`; empty outside a training."""

    @property
    def losses(self) -> Mapping[str, Any]:
        """The last training loss of each optimizer by its name, None if there is none yet in this epoch."""

    @property
    def batch_losses(self) -> Sequence[Any]:
        """The losses of the last batch that had some, in the order in which they were taken."""

    def label(self, name: str, optimizer: str | None = None) -> str:
        """Return the name to track a value of an optimizer by: unchanged, or `generator_<name>` if they have names.

        Args:
            name: what is tracked, such as `gradient_norm`.
            optimizer: whose it is; by default the one that is stepped.
        """

    def weigh(self, count: Any) -> None:
        """Say what the losses of the batch in hand are means over, such as the number of its tokens.

        The gradients of a window, of all ranks, are then those of one batch, and the tracked losses are means over
        what is counted; see "Losses over tokens" in the documentation. To be called in `training_step`, before
        `run.step(loss)`, in `validation_step` and `test_step`, or in a handler of `BatchStart`; once for each loss.
        A step that returns a sum with its count needs no such call.

        Args:
            count: at least 0; an integer, or a tensor of one element, which stays on its device.

        Raises:
            RuntimeError: there is no batch in hand, or it was weighed already.
            TypeError: the count is neither a number nor a tensor of one.
            ValueError: it is negative or not finite.
        """


class RunCheckpoints(Protocol):
    """The checkpoints of a run, and what it was resumed from: `run.checkpoints`.

    Attributes:
        best: the file of the best state; written by the plugin that stores it.
        last: the file of the newest state; written by the plugin that stores it.
        source: where else checkpoints of the run are; written at `TrainStart` by the plugin that knows, in a lane
            before `PERSIST`, and read by the plugin that resumes.
        training_id: of which training this run is a part; a resumed run has that of its checkpoint. Written by the
            plugin that resumes.
        forked_from: of a fork (`heliograph_recorder.fork`): the `training` that it was forked from, the optimizer
            `step`, the `recording`, and where that was a fork, too, its `forked_from`; None of others.
        resumed_from: the file of the checkpoint that this run was resumed from, if any.
        resumed_at: the position at which it was resumed; None if it was not.
        in_boundary: whether the state that was loaded was saved at the end of a boundary, of which only `ShouldStop` is
            left to be emitted.
        batch_note: how the global batch differs from the checkpoint's; None if it does not.
        verified_steps: the steps done again after a resume that equal the killed run's; written by the plugin that
            compares them.
        difference: where what is done again differs first; written by the plugin that compares it.
    """

    best: Path | None
    last: Path | None
    source: CheckpointSource | None
    training_id: str
    forked_from: Mapping[str, Any] | None
    resumed_from: Path | None
    resumed_at: Progress | None
    in_boundary: bool
    batch_note: str | None
    verified_steps: int
    difference: str | None

    @property
    def is_resuming(self) -> bool:
        """Whether a state waits to be applied: some plugin has called `resume` or `roll_back`."""


class RunHooks(Protocol):
    """What a plugin can ask the run to call, and how the run ends: `run.hooks`, valid until `RunClosed`."""

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Call `action` once, when the loader of the resumed epoch is at its position and before it is read."""

    def when_settling(self, action: Callable[[], None]) -> None:
        """Call `action` at every `settle()`: it waits for what its plugin does in the background, and emits its events.

        It is called before the run rolls back, too. To give the same action again does nothing.
        """

    def when_leaving(self, action: Callable[[], None]) -> None:
        """Call `action` before this rank leaves its group for an error: to wait for what uses the group in a thread.

        To give the same action again does nothing.
        """

    def settle(self) -> None:
        """Wait until what plugins do in the background is done, such as a save, and its events are emitted.

        Raises:
            BaseException: some of it failed.
        """

    def isolate_observers(self, apart: Callable[[], AbstractContextManager[Any]]) -> None:
        """From `TrainStart` only: run the handlers of observers, but those that never draw, within `apart()`."""

    def exit_with(self, status: int) -> None:
        """Let the process exit with this status (0 to 255), unless the run fails.

        `fit`, `validate`, `test` and `predict` raise SystemExit with it when the run is closed; with
        `fit(on_interrupt="return")`, and in the user's own loop, it is in `result.exit_status` only.
        """

    def raise_when_closed(self, error: BaseException) -> None:
        """Let `fit` raise this instead of returning, when a run that did not fail is closed.

        An exit status that another plugin requested takes precedence. In the user's own loop it has no effect.
        """

    def replace_error(self, error: BaseException) -> None:
        """From `RunFailed` only: raise this error instead, from the original."""


class RunReport(Protocol):
    """What the result shows, and facts of the process: `run.report`, valid in every event.

    Attributes:
        notes: the lines that the result shows, so far; `run.note` adds one.
        warnings: what was asked for and has not happened, so far; `run.warn` adds one.
        recording: the file of the recording; written by the plugin that records.
        plugin_seconds: seconds in each plugin's handlers; written by the plugin that measures them.
        has_left_group: whether this rank has left the others because of an error that they do not share: no collective
            is possible any more.
    """

    notes: list[str]
    warnings: list[str]
    recording: Path | None
    plugin_seconds: dict[str, float]
    has_left_group: bool

    @property
    def is_replay(self) -> bool:
        """Whether this is the replay of a recording (`heliograph_recorder.replay`), not a training."""

    @property
    def queue(self) -> Any:
        """Where to `put` what the process that called `heliograph.launch` is to get at once; None without it."""

    @property
    def ranks_meet(self) -> bool:
        """Whether the ranks meet when this batch is done: the same on all of them; never in a single process."""

    @property
    def tracks(self) -> bool:
        """Whether tracked values are read now; if not, a task may save the work."""

    def plan(self) -> str:
        """Return what will happen, in a few lines: the model, the hardware, the length, what each plugin will do."""

    def reason(self, error: BaseException | None) -> str:
        """Return why the run ends, in words; known once `RunClosed` is emitted.

        Args:
            error: what failed it, if anything did.
        """


class Run(Protocol):
    """One `fit`, `validate`, `test` or `predict`, fresh for every call. Plugins read; what they may write is said so.

    Attributes:
        name: the run's name, as in file names; a `TRANSFORM` handler of `TrainStart` may replace it.
        phase: what is running now: train, validation, test or predict.
        progress: where the run is.
        origin: where this run began: zeros, or the resumed position. A new object for every start.
        control: what to ask of the loop.
        metrics: the latest value of every metric, such as `validation/loss`.
        batch: the current batch; a `TRANSFORM` handler of `BatchStart` may replace it.
        loss: the last training loss, unscaled; it lives until the next forward or the end of the epoch.
        outputs: what the task's step has put here for handlers, what `predict_step` returned; None after the batch.
        bus: the signals, to connect to.
        plugins: the trainer's `heliograph.Plugins`: to look one up, to enable or disable it.
    """

    name: str
    phase: Phase
    progress: Progress
    origin: Progress
    control: Control
    metrics: dict[str, float]
    batch: Any
    loss: Any
    outputs: Any
    bus: Bus
    plugins: Any

    @property
    def length(self) -> RunLength:
        """How long the run is, and how much of it is done."""

    @property
    def data(self) -> RunData:
        """The data of the run."""

    @property
    def stepping(self) -> RunStepping:
        """The optimizer steps, and the micro-batches that they are made of."""

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of the run, and what it was resumed from."""

    @property
    def hooks(self) -> RunHooks:
        """What a plugin can ask the run to call, and how the run ends."""

    @property
    def report(self) -> RunReport:
        """What the result shows, and facts of the process."""

    @property
    def hyper_parameters(self) -> Mapping[str, Any]:
        """The user's description of this run, for loggers."""

    @property
    def task(self) -> Any:
        """The user's model code."""

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules of the task by name."""

    @property
    def optimizers(self) -> Mapping[str, Any]:
        """The optimizers by name; a single one is called `optimizer`. Empty outside a training."""

    @property
    def schedulers(self) -> Mapping[str, Any]:
        """The learning-rate schedulers that `fit` was given, by the names of their optimizers."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; None outside a training.

        Of several, in `GradientsReady` and `StepEnd` the one that is stepped, else the first.
        """

    @property
    def scheduler(self) -> Any:
        """The scheduler of `optimizer`, or None."""

    @property
    def engine(self) -> Engine:
        """The hardware."""

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a value to the running mean of `<phase>/<name>`; a tensor stays on its device until it is logged.

        The phase is put before the name, and may be there already: `loss` and `train/loss` are the same in training.
        """

    def collect(self, name: str, value: Any) -> None:
        """In a validation, test or prediction: keep a value of the batch in hand for `run.collected`.

        It is copied to the CPU, where all of a set needs memory, on several ranks in every process. A validation that
        is cut short gives nothing of it.

        Args:
            name: what to call it, without `/`.
            value: tensors or arrays whose first dimension is the samples, lists with an item for each sample, or dicts
                and tuples of these; alike for all batches but for the number of samples.

        Raises:
            RuntimeError: no evaluation runs, or it has no batch in hand.
            TypeError: the value is of another type.
            ValueError: it is not like those of the batches before; on several ranks, the loader is read by each as it
                is, so its batches have no order.
        """

    @property
    def collected(self) -> Mapping[str, Any]:
        """What was collected, of the whole set, in the order of the data, on every rank the same.

        For handlers of `ValidationEnd`, `TestEnd` and `PredictEnd`; empty elsewhere. By name; of a named set as
        `<set>/<name>`.
        """

    def log_image(self, name: str, image: Any) -> None:
        """Show an image in every tracker, at the current step; on several ranks the main one's.

        Args:
            name: what to call it, such as `samples`.
            image: a tensor of shape (channels, height, width) or (height, width), or an array of shape (height, width,
                channels); bytes, or floats from 0 to 1. It is copied at once, from its device, too.

        Raises:
            TypeError: it is not an image.
            ValueError: its shape is not one of an image.
        """

    def log_figure(self, name: str, figure: Any) -> None:
        """Show a figure of matplotlib in every tracker, as it is now: as an image."""

    def log_text(self, name: str, text: str) -> None:
        """Show a text in every tracker, at the current step."""

    def log_histogram(self, name: str, values: Any) -> None:
        """Show the distribution of a tensor's or an array's values in every tracker; they are copied at once."""

    def log_curve(self, name: str, labels: Any, scores: Any) -> None:
        """Show a precision-recall curve in every tracker.

        Args:
            name: what to call it.
            labels: of each sample whether it is positive: 0 or 1.
            scores: of each sample its score, from 0 to 1.

        Raises:
            ValueError: there are more of one than of the other, or they are out of their range.
        """

    def log_file(self, name: str, path: str | Path) -> None:
        """Keep a file with the run in every tracker; it is read soon after, in another thread.

        Raises:
            ValueError: there is no such file.
        """

    def state_dict(self, shards: Mapping[str, Any] | None = None, *, weights_only: bool = False) -> dict[str, Any]:
        """Return one consistent snapshot of everything that a resumed run needs, as plain types and tensors.

        On several ranks a collective: every rank must call it. The main rank gets the whole, the others their own.

        Args:
            shards: what describes the shards that are saved beside it: it holds no weights then.
            weights_only: return only the weights, averages of them, counters and metrics: no run can resume it.
        """

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """From `TrainStart` only: continue from a saved state, applied when every `TrainStart` handler has run."""

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Discard the epoch at the next step boundary, without its end event, and continue from a saved state.

        Accumulated gradients are dropped at once, and so are requests that were not served yet, except a stop. What
        follows is as in a resume: the state is applied, `CheckpointLoaded` is emitted, and `origin` is a new object.
        The state is of this run, as `state_dict()` returned it.
        """

    def note(self, text: str) -> None:
        """Add a line that the result shows: what a plugin skipped, wrote or found."""

    def warn(self, text: str) -> None:
        """Say that something that was asked for has not happened, or will not; the same sentence counts once.

        The result has it in `warnings`. `Trainer(strict=True)` raises: before the first epoch what is said at
        `TrainStart`, the rest when the run is closed. Say it at `RunClosed` at the latest, before lane `REPORT`.

        Args:
            text: a sentence that says what is missing, why, and how to mend it.
        """

    def emit(self, event: Event) -> None:
        """Emit an event on this run's bus, such as one that a plugin declares."""
