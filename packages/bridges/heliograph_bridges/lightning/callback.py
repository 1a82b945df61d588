"""`HeliographCallback`: our plugins in the loop of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..hosted.batches import drop_gradients
from ..hosted.owner import PluginOwner
from ..hosted.training import HostedTraining
from .facts import HOST, NAME, facts_of, host_of, position_of, set_of
from .flavour import installed
from .measured import Measured

Callback: Any = installed("HeliographCallback").callback


class HeliographCallback(PluginOwner, Callback):  # type: ignore[misc]  # its base is known when it runs
    """Let plugins take part in the trainings of a `lightning.pytorch.Trainer`.

    Its hooks become our events. What plugins ask for is done where Lightning can: a stop, a log, a save, a step that is
    dropped; plugins that ask for anything else are refused when the training starts. Their states go into Lightning's
    checkpoints and come out of them. On several ranks they agree at each step boundary, so that what one asks all do.

    Args:
        plugins: plugin objects, in the order in which they run within a lane.
        save_to: the folder for checkpoints that plugins ask for, `step=<step>.ckpt`; None where only Lightning saves.
        name: the run's name, as in file names.
        hyper_parameters: a description for trackers; by default the hyper-parameters of the module.

    Raises:
        ImportError: Lightning is not installed.
        TypeError: a plugin has a handler that does not fit its event.
        ValueError: plugins contradict each other.
    """

    def __init__(
        self,
        plugins: Iterable[Any],
        *,
        save_to: str | Path | None = None,
        name: str = "run",
        hyper_parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._save_to = None if save_to is None else Path(save_to)
        self._training = HostedTraining(plugins, HOST)
        self._name, self._hyper_parameters = name, hyper_parameters
        self._saved: Mapping[str, Any] | None = None
        self._hooks, self._module_hook = list[Any](), ExitStack()
        self._in_epoch = self._is_stepping = self._has_stepped = self._is_validating = False

    @property
    def state_key(self) -> str:
        """Under which name its state is in the checkpoints of Lightning."""
        return f"heliograph:{self._name}"

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the plugins; after a training those of its end, before one none."""
        return self._training.state() or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of Lightning when the training starts."""
        self._saved = state or None

    # The training.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the run."""
        saved, self._saved = self._saved, None
        self._training.host = host_of(trainer, saves=self._save_to is not None)
        facts = facts_of(trainer, pl_module, self._name, self._hyper_parameters)
        leave = self._training.begin(facts, saved, _checkpoint_of(trainer), position_of(trainer))
        self._in_epoch, self._measured = False, Measured()
        for optimizer in trainer.optimizers[:1]:
            self._hooks.append(optimizer.register_step_post_hook(self._note_step))
        trainer.should_stop = trainer.should_stop or leave.stop

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch."""
        self._begin_epoch(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch after the module's own hook, which Lightning calls last and which logs values of the epoch."""
        hook = pl_module.on_train_epoch_end
        own = {"on_train_epoch_end": hook} if "on_train_epoch_end" in vars(pl_module) else {}

        def restore() -> None:
            del pl_module.on_train_epoch_end
            vars(pl_module).update(own)

        def end() -> None:
            self._module_hook.close()
            hook()
            self._end_epoch(trainer)

        self._module_hook.callback(restore)
        pl_module.on_train_epoch_end = end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._remove_hooks()
        if trainer.should_stop:
            self._training.stop_by_host("somebody has set should_stop")
        self._training.end(self._actions(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run for an error, or a Ctrl-C."""
        self._remove_hooks()
        self._training.fail(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close a run that Lightning left without its end."""
        if stage == "fit":
            self._training.fail(RuntimeError(f"{NAME} left the training without an end."))

    # A batch.

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a micro-batch; Lightning says nothing of an epoch that it resumes."""
        if not self._in_epoch:
            self._begin_epoch(trainer)
        self._is_stepping = self._has_stepped = False
        self._training.begin_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Take the loss, which Lightning has divided by the number of micro-batches of a step."""
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._loss = loss.detach() * divisor if divisor > 1 else loss.detach()
        self._training.end_forward(self._loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Count the micro-batch."""
        self._training.end_backward(self._loss)
        self._training.track_loss(self._loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Show the gradients, before they are clipped, and drop them where a plugin asks for it."""
        if self._is_stepping:  # another optimizer of the same batch
            return
        self._is_stepping = True
        if self._training.begin_step():
            drop_gradients(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the micro-batch; where the optimizer stepped, let plugins decide."""
        if self._is_stepping:
            self._training.end_step(stepped=self._has_stepped)
        self._training.end_batch()
        if self._is_stepping:
            self._boundary(trainer)

    # A validation.

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a validation, unless it is Lightning's check before the training."""
        if self._training.run is None or trainer.sanity_checking:
            return
        self._is_validating = True
        self._training.begin_validation(sum(trainer.num_val_batches))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a batch of it."""
        if self._is_validating:
            self._training.begin_validation_batch(batch, set_of(trainer, dataloader_idx))

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End a batch of it."""
        if self._is_validating:
            self._training.end_validation_batch(set_of(trainer, dataloader_idx))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End it, and let plugins decide upon its metrics at once."""
        if self._is_validating:
            self._is_validating = False
            self._training.end_validation(self._measured.of_validation(trainer))
            if not self._training.active.stepping.window:
                self._boundary(trainer)

    # A boundary.

    def _boundary(self, trainer: Any) -> None:
        self._training.serve(self._actions(trainer))
        leave = self._training.close_boundary()
        trainer.should_stop = trainer.should_stop or leave.stop

    def _actions(self, trainer: Any) -> dict[str, Callable[[], object]]:
        return {"log": partial(self._log, trainer), "save": partial(self._save, trainer)}

    def _log(self, trainer: Any) -> None:
        self._training.log(self._measured.of_training(trainer, in_epoch=self._in_epoch))

    def _save(self, trainer: Any) -> None:
        assert self._save_to is not None, "plugins that ask for it are refused"
        path = self._save_to / f"step={self._training.active.progress.steps}.ckpt"
        trainer.save_checkpoint(path)
        self._training.save(path)

    def _end_epoch(self, trainer: Any) -> None:
        batches = self._training.active.progress.batch
        self._in_epoch = False
        self._measured.end_epoch(trainer)
        if self._training.end_epoch(is_over=trainer.is_last_batch or batches >= trainer.num_training_batches):
            self._boundary(trainer)

    def _begin_epoch(self, trainer: Any) -> None:
        self._training.begin_epoch(trainer.current_epoch)
        self._in_epoch = True

    def _note_step(self, *arguments: Any) -> None:
        self._has_stepped = True

    def _remove_hooks(self) -> None:
        self._is_validating = False
        self._module_hook.close()
        while self._hooks:
            self._hooks.pop().remove()


def _checkpoint_of(trainer: Any) -> Path | None:
    return Path(trainer.ckpt_path) if trainer.ckpt_path else None
