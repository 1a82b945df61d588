"""`HeliographCallback`: our plugins in the Trainer of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...hosted.batches import drop_gradients
from ...hosted.owner import PluginOwner
from ...hosted.training import HostedTraining
from . import names
from .facts import HOST, facts_of, folder_of, host_of, position_of
from .methods import Methods
from .requests import Requests
from .saved import SavedState, read
from .stack import caller

SAME = "those of this training"  # in place of plugins, where the Trainer makes callbacks of a checkpoint


class HeliographCallback(PluginOwner, TrainerCallback, ExportableState):
    """Our plugins in a Trainer, and in those made of it, such as TRL's: `callbacks=[HeliographCallback([...])]`.

    Their events come from the loop of the Trainer, with a real `Run`; what they ask for becomes its flags. Its
    checkpoints hold their states, which a resumed training restores whether or not
    `restore_callback_states_from_checkpoint` is set. On several ranks what one of them asks for all do, at the same
    step. A plugin that this loop cannot serve is refused when the training begins.

    The callback wraps the training loop, `training_step`, `compute_loss`, `prediction_step` and `evaluate` of its
    Trainer object, as these begin or fail without calling a callback.

    Args:
        plugins: plugin objects, in the order in which they run within a lane.

    Raises:
        TypeError: a plugin has a handler that does not fit its event.
        ValueError: plugins contradict each other; when a training begins, one of them cannot be served.
    """

    def __new__(cls, plugins: Iterable[Any] | str) -> Self:
        """Return a new callback; the one of the Trainer where that makes its callbacks anew from a checkpoint."""
        if plugins != SAME:
            return super().__new__(cls)
        return next(each for each in caller().trainer.callback_handler.callbacks if isinstance(each, cls))

    def __init__(self, plugins: Iterable[Any] | str) -> None:
        if plugins == SAME:
            return
        assert not isinstance(plugins, str)
        self._training = HostedTraining(plugins, HOST)
        self._requests = Requests(self._training)
        self._methods = Methods(self._training, self._requests)
        self._state, self._epoch = SavedState(), 0

    # Their state. `saved` is what a Trainer sets where it restores callbacks by itself; `on_train_begin` reads it.

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the plugins, and how the Trainer would make this callback from it."""
        run = self._training.run
        saved = {} if run is None else {"saved": self._state.to_json(run)}
        return {"args": {"plugins": SAME}, "attributes": saved}

    # The moments of the Trainer, in their order.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Wrap the methods of the Trainer."""
        self._methods.wrap(caller().trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a run, or continue one."""
        trainer, checkpoint, trial = caller()
        if sum(isinstance(each, HeliographCallback) for each in trainer.callback_handler.callbacks) > 1:
            raise ValueError("This Trainer has two HeliographCallbacks: give all plugins to one, in one list.")
        is_late = self._methods.wrap(trainer)
        self._training.host = host_of(trainer)
        self._folder = folder_of(trainer, trial)
        facts = facts_of(trainer, state, kwargs.get("train_dataloader"), self._folder)
        states: Any = state.stateful_callbacks  # by the names of the classes; a checkpoint without us has none
        own = states.setdefault(type(self).__name__, {"args": {"plugins": SAME}, "attributes": {}})
        path = saved = None
        if checkpoint is not None:  # else what they hold is of a former attempt, as by auto_find_batch_size
            path, saved = Path(checkpoint), own["attributes"].get("saved")
        position = position_of(args, state, facts.batches)
        leave = self._training.begin(facts, None if saved is None else read(saved, path), path, position)
        self._epoch = position.epoch
        if is_late:
            self._training.active.note(
                f"the callback was added when {self._training.host.name} was made already: what fails there outside "
                f"of plugins is seen when the next training begins"
            )
        self._requests.begin(state.global_step, leave, control)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin an epoch."""
        if self._training.run is not None:
            self._training.begin_epoch(self._epoch)
            self._epoch += 1

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise requests again whose flags the Trainer has cleared: nothing was served where another took one back."""
        if self._training.run is not None:
            self._requests.finish(control)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the gradients, which are clipped already; drop them where a plugin says so."""
        if self._training.run is not None and self._training.begin_step():
            drop_gradients(kwargs["optimizer"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End a micro-batch after which no step is due."""
        if self._training.run is not None:
            self._training.end_batch()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End a step and its last micro-batch, and ask the Trainer for what is due."""
        if self._training.run is not None:
            self._training.end_step(stepped=not getattr(kwargs["optimizer"], "step_was_skipped", False))
            self._training.end_batch()
            self._requests.open(control, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log; what an evaluation has measured comes with its end."""
        run = self._training.run
        if run is None or run.phase != "train":
            return
        is_due = "loss" in (logs or {}) and not run.data.in_hand  # by the loop on all ranks, not by somebody on one
        self._training.log(names.of_log(logs or {}), with_tracked=is_due)
        if is_due:
            self._requests.serve("log", control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that was written, and announce it."""
        run = self._training.run
        if run is None:
            return
        run.boundary_is_open = True  # also where it was closed: ShouldStop comes after this save, too
        folder = self._folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._state.write(run, folder)
        self._training.save(folder, is_best=state.best_global_step == state.global_step)
        self._requests.serve("save", control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End an epoch whose data are read, or whose end was granted."""
        run = self._training.run
        if run is None:
            return
        self._requests.finish(control)
        if control.should_epoch_stop and not run.control.should_end_epoch:
            run.control.end_epoch("a callback has set should_epoch_stop", by=run.host.name)
        left = control.should_epoch_stop or control.should_training_stop
        is_over = run.data.is_last_batch if run.length.batches_per_epoch is not None else not left
        self._requests.end_epoch(control, has_ended=self._training.end_epoch(is_over=is_over))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the run."""
        run = self._training.run
        if run is None:
            return
        self._requests.finish(control)
        self._requests.stop_by_host(control)
        self._training.end()
