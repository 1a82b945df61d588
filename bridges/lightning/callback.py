"""`HeliographCallback`: our plugins in the loop of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...core.result import RunResult
from ..hosted.facts import Facts
from ..hosted.host import Host
from ..hosted.saved import capture
from ..hosted.training import HostedTraining
from .flavour import installed
from .measured import Measured

NAME = "Lightning"
MENDS = {
    "hold_step": "set Trainer(accumulate_grad_batches=)",
    "end_epoch": "set Trainer(limit_train_batches=)",
    "validation": "set Trainer(check_val_every_n_epoch=) or Trainer(val_check_interval=)",
    "save": "give HeliographCallback(save_to='a/folder'), or let ModelCheckpoint save",
    "checkpoints": "let ModelCheckpoint write them: they hold the states of these plugins, too",
    "veto_stop": "set Trainer(min_epochs=) or Trainer(min_steps=)",
    "rng": "call seed_everything(...)",
}
Callback: Any = installed("HeliographCallback").callback


class HeliographCallback(Callback):  # type: ignore[misc]  # its base is known when it runs
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
        cannot = frozenset({"end_epoch", "validation"} | ({"save"} if save_to is None else set()))
        self._training = HostedTraining(
            plugins, Host(NAME, frozenset({"skip_step", "veto_stop"}), cannot=cannot, mends=MENDS)
        )
        self._name, self._hyper_parameters = name, hyper_parameters
        self._saved: Mapping[str, Any] | None = None
        self._measured = Measured()
        self._is_stepping = self._in_boundary = self._is_validating = False

    @property
    def result(self) -> RunResult | None:
        """How the last training ended; None before the first."""
        return self._training.result

    @property
    def state_key(self) -> str:
        """Under which name its state is in the checkpoints of Lightning."""
        return f"heliograph:{self._name}"

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the plugins; none outside of a training."""
        if self._training.run is None:
            return {}
        return {**capture(self._training.run), "in_boundary": self._in_boundary}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of Lightning when the training starts."""
        self._saved = state or None

    # The training.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the run."""
        saved, self._saved = self._saved, None
        leave = self._training.begin(self._facts(trainer, pl_module), saved)
        if len(trainer.optimizers) > 1:
            self._training.active.note(f"{NAME} has {len(trainer.optimizers)} optimizers: plugins see the first")
        trainer.should_stop = trainer.should_stop or leave.stop

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch; the one before may have been saved before it was ended."""
        run = self._training.active
        if run.work.has_begun and trainer.current_epoch > run.progress.epoch:
            self._training.end_epoch(is_over=True)
        self._training.begin_epoch(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch, unless it was left in the middle."""
        is_over = self._training.active.progress.batch >= trainer.num_training_batches
        if self._training.end_epoch(is_over=is_over):
            self._boundary(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._training.end(lambda due: self._serve(trainer, due))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run for an error, or a Ctrl-C."""
        self._training.fail(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close a run that Lightning left without its end."""
        if stage == "fit":
            self._training.fail(RuntimeError(f"{NAME} left the training without an end."))

    # A batch.

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a micro-batch."""
        self._is_stepping = False
        self._training.begin_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Take the loss, which Lightning has divided by the number of micro-batches of a step."""
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._loss = loss.detach() * divisor if divisor > 1 else loss.detach()
        self._training.end_forward(self._loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Count the micro-batch."""
        run = self._training.active
        self._training.end_backward(self._loss)
        run.track("loss", self._loss, run.size_of(run.batch))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Show the gradients, before they are clipped, and drop them where a plugin asks for it."""
        if self._is_stepping:  # another optimizer of the same batch
            return
        self._is_stepping = True
        if self._training.begin_step():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the micro-batch; where the optimizer stepped, let plugins decide."""
        if self._is_stepping:
            self._training.end_step()
        self._training.end_batch()
        if self._is_stepping:
            self._boundary(trainer)

    # A validation.

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a validation, unless it is Lightning's check before the training."""
        if self._training.run is None or trainer.sanity_checking:
            return
        self._is_validating = True
        self._measured.remember(trainer.callback_metrics)
        self._training.begin_validation(sum(trainer.num_val_batches))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a batch of it."""
        if self._is_validating:
            self._training.begin_validation_batch(batch, _set_of(trainer, dataloader_idx))

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End a batch of it."""
        if self._is_validating:
            self._training.end_validation_batch(_set_of(trainer, dataloader_idx))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End it, and let plugins decide upon its metrics at once."""
        if self._is_validating:
            self._is_validating = False
            self._training.end_validation(self._measured.of_validation(trainer.callback_metrics))
            self._boundary(trainer)

    # A boundary.

    def _boundary(self, trainer: Any) -> None:
        self._in_boundary = True
        self._serve(trainer, self._training.open_boundary())
        leave = self._training.close_boundary()
        self._in_boundary = False
        trainer.should_stop = trainer.should_stop or leave.stop

    def _serve(self, trainer: Any, due: frozenset[str]) -> None:
        if "log" in due:
            self._training.log(self._measured.of_training(trainer.callback_metrics))
        if "save" in due:
            assert self._save_to is not None, "plugins that ask for it are refused"
            path = self._save_to / f"step={self._training.active.progress.steps}.ckpt"
            trainer.save_checkpoint(path)
            self._training.save(path)

    def _facts(self, trainer: Any, pl_module: Any) -> Facts:
        loader, batches = trainer.train_dataloader, trainer.num_training_batches
        validates = sum(trainer.num_val_batches or [0]) > 0
        return Facts(
            modules={"model": pl_module},
            optimizer=trainer.optimizers[0] if trainer.optimizers else None,
            device=trainer.strategy.root_device,
            epochs=_limit(trainer.max_epochs),
            steps=_limit(trainer.max_steps),
            batches=int(batches) if batches != float("inf") else None,
            loader=loader,
            batch_size=getattr(loader, "batch_size", None),
            validation={"": trainer.val_dataloaders} if validates else {},
            does=frozenset({"validation"} if validates else ()),
            name=self._name,
            hyper_parameters=self._given_hyper_parameters(pl_module),
            world_size=trainer.world_size,
        )

    def _given_hyper_parameters(self, pl_module: Any) -> Mapping[str, Any]:
        return dict(pl_module.hparams) if self._hyper_parameters is None else dict(self._hyper_parameters)


def _limit(number: int | None) -> int | None:
    return None if number in (None, -1) else number


def _set_of(trainer: Any, index: int) -> str:
    """Return the name of a validation set: empty for the only one, else its number."""
    return str(index) if len(trainer.num_val_batches) > 1 else ""
