"""The protocols of a run, the first argument of every handler, and of its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from .bus import Bus
    from .catalogue import Event, Phase
    from .control import Control
    from .progress import Progress, ResumeFacts

Reduction = Literal["sum", "mean", "max"]


class CheckpointSource(Protocol):
    """Another place where checkpoints of a run are stored, such as a cluster.

    Attributes:
        patience: seconds to wait until a process that this one replaces has released the folder.
    """

    patience: float

    def fetch(self, store: Any, resume: str | Path | None) -> tuple[str | Path | None, list[str]]:
        """Copy the checkpoint to resume into the run's folder; called on the main rank.

        Args:
            store: the run's open `heliograph.core.checkpoint.storage.Store`.
            resume: what the run was asked to resume: None, `auto` or a path.

        Returns:
            What to resume instead: the argument, or the path of the fetched file; and notes for the result.
        """


class Engine(Protocol):
    """The device of a run, and the collectives between its processes.

    `reduce`, `gather`, `gather_objects`, `broadcast`, `barrier` and `vote` are collectives: every rank must call them,
    in the same order. They raise in a handler of a plugin that runs on the main rank only.

    Attributes:
        device: the torch device of modules and batches.
        rank: the rank of this process, from 0 to `world_size` - 1.
        local_rank: the rank of this process among those on its machine, from 0.
        world_size: the number of processes that train together.
        is_main: True for rank 0, the process that writes files and draws progress bars.
        is_local_main: True for local rank 0 of every machine.
    """

    device: Any
    rank: int
    local_rank: int
    world_size: int
    is_main: bool
    is_local_main: bool

    @property
    def waited_seconds(self) -> float:
        """Seconds that this process has spent in collectives so far."""

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Reduce a number or a tensor over all ranks; return a new value of the same kind.

        Raises:
            TypeError: the value is neither a number nor a tensor, or the mean of integers or bools is requested.
            ValueError: the reduction is unknown.
        """

    def gather(self, tensor: Any) -> list[Any]:
        """Return the tensors of all ranks, ordered by rank.

        The tensors may differ in the length of their first dimension.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, ordered by rank. They must be picklable."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the tensor or object of rank `source` on all ranks."""

    def barrier(self) -> None:
        """Wait until every rank reaches this call."""

    def vote(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks.

        This is one small all-reduce that does not wait for the device.
        """

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        """Return a context in which collectives raise, for code on one rank only.

        `plugin` and `event` are named in the error.
        """

    def writing(self) -> AbstractContextManager[None]:
        """Return a context that protects this process while it writes a file.

        In this context, in any thread, the process is not ended because another rank has failed.
        """

    def clip_gradients(self, parameters: Iterable[Any], norm: float | None, norm_type: float = 2.0) -> Any:
        """Clip gradients by their total norm over all shards.

        Args:
            parameters: the parameters with the gradients.
            norm: the maximum total norm; None only measures.
            norm_type: the p of the p-norm.

        Returns:
            The norm before clipping, as a tensor on the device.
        """


class RunLength(Protocol):
    """The length of a run: `run.length`, valid in every event."""

    @property
    def max_epochs(self) -> float | None:
        """The length in epochs, possibly a fraction such as 1.5; None if unlimited."""

    @property
    def max_steps(self) -> int | None:
        """The length in optimizer steps; None if unlimited."""

    @property
    def batches_per_epoch(self) -> int | None:
        """The length of the training loader; None if it is unknown."""

    @property
    def planned_steps(self) -> int | None:
        """The planned optimizer steps, including those before a resume; None if unknown.

        Skipped steps and epochs that end early are not taken into account. If the length of an epoch has changed at a
        resume, this is the number of steps done so far plus the remaining ones.
        """

    @property
    def unknown(self) -> str:
        """Why `planned_steps` is None and how to change that; empty if it is a number.

        The text is the end of a sentence.
        """

    @property
    def scheduler_steps(self) -> Mapping[str, int]:
        """The number of steps that schedulers were created for, by optimizer name.

        Only for schedulers that depend on the length of the run.
        """

    @property
    def epoch_fraction(self) -> float | None:
        """The number of epochs done, such as 1.25; None if the loader has no length."""

    @property
    def fraction(self) -> float | None:
        """The fraction of the planned steps that is done, from 0 to 1; None if unknown."""


class RunData(Protocol):
    """The data of a run: `run.data`, valid in every event.

    Attributes:
        seed: the key of the sample order and of random draws while loading; None until it is decided.
        phase: the index of the current training phase, from 0.
        stream: the name of the stream of the current or last batch, for a training on weighted streams.
        evaluation_batches: batches of the current validation, test or prediction, over all of its sets; None if
            unknown.
    """

    seed: int | None
    phase: int
    stream: str | None
    evaluation_batches: int | None

    @property
    def train_loader(self) -> Any:
        """The iterable of training batches that is currently read, or None."""

    @property
    def validation_loaders(self) -> Mapping[str, Any]:
        """The validation loaders, by the name of their set."""

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets; a single set has an empty name."""

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of one process; None if unknown.

        This is 1 if whole batches are distributed over the ranks.
        """

    @property
    def in_hand(self) -> bool:
        """True while a batch is processed, from before `BatchStart` until `BatchEnd`."""

    @property
    def is_last_batch(self) -> bool:
        """True if the current batch is the last of its epoch."""

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """How the epochs of each phase are divided into the batches of all processes."""

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        """Derive random draws while loading from (seed, epoch, position).

        Call this in `TrainStart` only. Loading then does not advance the training's random generators.

        Args:
            seed: the seed of these draws.
            probe: load the first batch twice and compare the results, to detect hidden state.
        """

    def resume_facts(self) -> ResumeFacts:
        """Return the facts of a resume: untracked state, differences, data position."""

    def report_untracked(self, path: str, kind: str) -> None:
        """Report state that no checkpoint contains and that may influence the training."""

    def report_difference(self, text: str) -> None:
        """Report, as a sentence, a difference from the state at the time of the save."""


class RunStepping(Protocol):
    """Optimizer steps and micro-batches: `run.stepping`, valid in a training.

    Attributes:
        forward: the training step as the engine runs it, called with the run and a batch. A `TRANSFORM` handler of
            `TrainStart` may replace it.
    """

    forward: Callable[..., Any]

    @property
    def window(self) -> int:
        """The number of micro-batches that have added gradients since the last step.

        With several optimizers, this is the window of the stepped optimizer in `GradientsReady` and `StepEnd`, and the
        longest window in all other events. See also `windows`.
        """

    @property
    def windows(self) -> Mapping[str, int]:
        """The number of micro-batches since the last step of each optimizer, by its name."""

    @property
    def window_count(self) -> float | None:
        """The total count that the gradients were divided by, over all ranks, or None.

        Set in `GradientsReady` and `StepEnd` if the losses are sums or weighted means.
        """

    @property
    def optimizer_name(self) -> str:
        """The name of `run.optimizer`; empty outside a training."""

    @property
    def losses(self) -> Mapping[str, Any]:
        """The last training loss by optimizer name; None before the first one of an epoch."""

    @property
    def batch_losses(self) -> Sequence[Any]:
        """The losses of the last batch that had any, in the order of their backward."""

    def label(self, name: str, optimizer: str | None = None) -> str:
        """Return the name under which to track a value of an optimizer.

        This is `name`, or for example `generator_<name>` if the optimizers have names.

        Args:
            name: the name of the value, such as `gradient_norm`.
            optimizer: the name of the optimizer; by default the one that is stepped.
        """

    def weigh(self, count: Any) -> None:
        """Declare over how many items, such as tokens, a loss is a mean.

        The gradients of a window, over all ranks, then equal the gradients of one large batch, and the tracked losses
        are weighted means; see "Losses over tokens" in the documentation. Call it once for each loss: in
        `training_step` before `run.step(loss)`, in `validation_step` and `test_step`, or in a handler of `BatchStart`.
        A step that returns a sum and its count does not need this call.

        Args:
            count: at least 0; a number, or a tensor with one element, which stays on its device.

        Raises:
            RuntimeError: there is no current batch, or it already has a count.
            TypeError: the count is neither a number nor a tensor with one element.
            ValueError: the count is negative or not finite.
        """


class RunCheckpoints(Protocol):
    """The checkpoints of a run, and where it was resumed: `run.checkpoints`.

    Attributes:
        best: the file of the best checkpoint; set by the plugin that stores it.
        last: the file of the newest checkpoint; set by the plugin that stores it.
        source: another place where checkpoints of the run are stored. Set by a plugin in `TrainStart`, in a lane before
            `PERSIST`; read by the plugin that resumes.
        training_id: the identifier of the training; a resumed run takes it from its checkpoint. Set by the plugin that
            resumes.
        forked_from: for a fork (`heliograph_recorder.fork`), the `training`, optimizer `step` and `recording` that it
            was forked from, and their `forked_from` if that was a fork too; otherwise None.
        resumed_from: the file of the checkpoint that this run was resumed from, if any.
        resumed_at: the position at which the run was resumed; None if it was not.
        in_boundary: whether the loaded state was saved at the end of a boundary, so that only `ShouldStop` remains to
            be emitted for it.
        batch_note: how the global batch differs from that of the checkpoint; None if it does not.
        verified_steps: the number of repeated steps that are identical to those of the original run; set by the plugin
            that compares them.
        verified_before: date and steps of an earlier comparison of the program; set by the plugin that compares.
        difference: where the resumed run first diverges from the original; set by the plugin that compares them.
        unverified: why repeated steps were not compared; set by the same plugin.
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
    verified_before: str | None
    difference: str | None
    unverified: str | None

    @property
    def is_resuming(self) -> bool:
        """True if a state waits to be applied, after a call of `resume` or `roll_back`."""


class RunHooks(Protocol):
    """Functions for the run to call: `run.hooks`, valid until `RunClosed`."""

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Call `action` once, when the loader of a resumed epoch has reached its position.

        No batch of the resumed position has been read at that time.
        """

    def when_settling(self, action: Callable[[], None]) -> None:
        """Call `action` at every `settle()` and before a roll-back.

        The action waits for the background work of its plugin and emits its events. An action is registered only once.
        """

    def when_leaving(self, action: Callable[[], None]) -> None:
        """Call `action` before this rank leaves its process group because of an error.

        The action waits for threads that use the group. An action is registered only once.
        """

    def settle(self) -> None:
        """Wait until background work of plugins is done and its events are emitted.

        Raises:
            BaseException: some of the work failed.
        """

    def isolate_observers(self, apart: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run handlers of observers within the context `apart()`; in `TrainStart` only.

        Observers with `draws = False` are excluded.
        """

    def exit_with(self, status: int) -> None:
        """Exit the process with this status (0 to 255) unless the run fails.

        `fit`, `validate`, `test` and `predict` raise SystemExit with the status after the run is closed. With
        `fit(on_interrupt="return")`, and in your own loop, the status is only in `result.exit_status`.
        """

    def raise_when_closed(self, error: BaseException) -> None:
        """Raise this error from `fit` when a run that did not fail is closed.

        An exit status requested by another plugin takes precedence. The call has no effect in your own loop.
        """

    def replace_error(self, error: BaseException) -> None:
        """Raise this error from the original one; in `RunFailed` only."""


class RunReport(Protocol):
    """Contents of the result and facts of the process: `run.report`.

    Valid in every event.

    Attributes:
        notes: the lines that the result shows; `run.note` adds one.
        warnings: requested things that did not happen; `run.warn` adds one.
        recording: the file of the recording; set by the plugin that records.
        plugin_seconds: seconds in the handlers of each plugin; set by the plugin that measures them.
        has_left_group: whether this rank has left its process group because of an error of its own; no collective is
            possible then.
    """

    notes: list[str]
    warnings: list[str]
    recording: Path | None
    plugin_seconds: dict[str, float]
    has_left_group: bool

    @property
    def is_replay(self) -> bool:
        """True in the replay of a recording (`heliograph_recorder.replay`)."""

    @property
    def queue(self) -> Any:
        """A queue to the process that called `heliograph.launch`; None without `launch`.

        Objects `put` into it arrive there immediately.
        """

    @property
    def ranks_meet(self) -> bool:
        """True if the ranks exchange data after this batch; the same on all of them.

        Always False in a single process.
        """

    @property
    def tracks(self) -> bool:
        """True if tracked values have a consumer; else a task may skip them."""

    def plan(self) -> str:
        """Return a few lines on the run: model, hardware, length, and each plugin's task."""

    def reason(self, error: BaseException | None) -> str:
        """Return why the run ends, as text; available from `RunClosed` on.

        Args:
            error: the error that failed the run, if any.
        """


class Run(Protocol):
    """One `fit`, `validate`, `test` or `predict`; every call creates a new run.

    Plugins read a run. They may write only those attributes whose description says so.

    Attributes:
        name: the name of the run, used in file names. A `TRANSFORM` handler of `TrainStart` may replace it.
        phase: the current phase: train, validation, test or predict.
        progress: the counters of the run.
        origin: the counters at the start of the run: zeros, or the resumed position. A new object after every start.
        control: requests to the loop.
        metrics: the latest value of every metric, such as `validation/loss`.
        batch: the current batch. A `TRANSFORM` handler of `BatchStart` may replace it.
        loss: the last training loss, unscaled; available until the next forward pass or the end of the epoch. Keep
            `run.loss.item()` or `run.loss.detach().clone()`, since the tensor has its autograd graph.
        outputs: what a step of the task has stored here for handlers, or what `predict_step` returned; None after the
            batch.
        bus: the signals, to connect to.
        plugins: the trainer's `heliograph.Plugins`, to find, enable or disable a plugin.
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
        """The length of the run, and how much of it is done."""

    @property
    def data(self) -> RunData:
        """The data of the run."""

    @property
    def stepping(self) -> RunStepping:
        """The optimizer steps and their micro-batches."""

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of the run, and the checkpoint that it was resumed from."""

    @property
    def hooks(self) -> RunHooks:
        """Functions for the run to call, and how the run ends."""

    @property
    def report(self) -> RunReport:
        """What the result shows, and facts of the process."""

    @property
    def hyper_parameters(self) -> Mapping[str, Any]:
        """Your description of this run, for loggers."""

    @property
    def task(self) -> Any:
        """The task: your model code."""

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules of the task, by name."""

    @property
    def optimizers(self) -> Mapping[str, Any]:
        """The optimizers, by name; a single one is called `optimizer`.

        Empty outside a training.
        """

    @property
    def schedulers(self) -> Mapping[str, Any]:
        """The learning-rate schedulers passed to `fit`, by the name of their optimizer."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; None outside a training.

        With several optimizers, this is the stepped one in `GradientsReady` and `StepEnd`, else the first.
        """

    @property
    def scheduler(self) -> Any:
        """The scheduler of `optimizer`, or None."""

    @property
    def engine(self) -> Engine:
        """The device and the processes."""

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a value to the running mean of `<phase>/<name>`.

        A tensor stays on its device until the mean is logged. The name may already include the phase: in a training,
        `loss` and `train/loss` are the same.
        """

    def collect(self, name: str, value: Any) -> None:
        """Store a value of the current batch for `run.collected`; in an evaluation only.

        The value is copied to the CPU, so the values of a whole set must fit into memory, on every rank. Values of a
        validation that is cut short are discarded.

        Args:
            name: the name of the value, without `/`.
            value: tensors or arrays whose first dimension is the samples, lists with one item for each sample, or dicts
                and tuples of these. Values of different batches may differ in the number of samples only.

        Raises:
            RuntimeError: no evaluation is running, or there is no current batch.
            TypeError: the value has another type.
            ValueError: the value does not match the values of earlier batches. With several ranks also if every rank
                reads the whole loader, because the batches then have no order.
        """

    @property
    def collected(self) -> Mapping[str, Any]:
        """The collected values of the whole set, by name, in the order of the data.

        Available in handlers of `ValidationEnd`, `TestEnd` and `PredictEnd`, and identical on every rank; empty in all
        other events. The values of a named set are under `<set>/<name>`.
        """

    def log_image(self, name: str, image: Any) -> None:
        """Show an image in every tracker, at the current step.

        With several ranks, only the image of the main rank is shown.

        Args:
            name: the title of the image, such as `samples`.
            image: a tensor of shape (channels, height, width) or (height, width), or an array of shape (height, width,
                channels), with `uint8` values, or floats from 0 to 1. It is copied to the CPU immediately.

        Raises:
            TypeError: the value is not an image.
            ValueError: the shape is not that of an image.
        """

    def log_figure(self, name: str, figure: Any) -> None:
        """Show a matplotlib figure in every tracker, rendered immediately as an image."""

    def log_text(self, name: str, text: str) -> None:
        """Show a text in every tracker, at the current step."""

    def log_histogram(self, name: str, values: Any) -> None:
        """Show the distribution of a tensor or an array in every tracker.

        The values are copied immediately.
        """

    def log_curve(self, name: str, labels: Any, scores: Any) -> None:
        """Show a precision-recall curve in every tracker.

        Args:
            name: the title of the curve.
            labels: for each sample, 1 if it is positive, else 0.
            scores: for each sample, its score from 0 to 1.

        Raises:
            ValueError: the lengths differ, or a value is out of range.
        """

    def log_file(self, name: str, path: str | Path) -> None:
        """Store a file with the run in every tracker.

        The file is read a little later, in another thread.

        Raises:
            ValueError: the file does not exist.
        """

    def state_dict(self, shards: Mapping[str, Any] | None = None, *, weights_only: bool = False) -> dict[str, Any]:
        """Return a consistent snapshot of the run, as plain types and tensors.

        With several ranks this is a collective: every rank must call it. The main rank receives the whole state, the
        other ranks their own part.

        Args:
            shards: the description of shards that are saved separately; the snapshot then contains no weights.
            weights_only: return only weights, their averages, counters and metrics. No run can resume from them.
        """

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Continue from a saved state; in `TrainStart` only.

        The state is applied after all handlers of `TrainStart`.
        """

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Discard the epoch at the next step boundary and continue from a saved state.

        No `EpochEnd` is emitted. Accumulated gradients and requests that were not served are dropped immediately,
        except a stop. Then the run resumes: it applies the state, sets a new `origin` and emits `CheckpointLoaded`.

        Args:
            saved: a state of this run, as returned by `state_dict()`.
            path: the file of the state, if any.
        """

    def note(self, text: str) -> None:
        """Add a line to the result, for example what a plugin wrote or skipped."""

    def warn(self, text: str) -> None:
        """Report that something requested did not happen. A repeated text counts once.

        The texts are in the `warnings` of the result. `Trainer(strict=True)` raises an error: before the first epoch
        for warnings of `TrainStart`, otherwise when the run is closed. The last occasion for a warning is `RunClosed`,
        in a lane before `REPORT`.

        Args:
            text: a sentence that says what is missing, why, and how to fix it.
        """

    def emit(self, event: Event) -> None:
        """Emit an event on this run's bus, for example one that a plugin declares."""
