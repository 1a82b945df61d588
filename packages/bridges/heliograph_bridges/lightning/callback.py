"""`HeliographCallback`: plugins in the loop of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from heliograph import GradientsReady
from torch import Tensor
from torch.optim import Optimizer

from ..hosted.host import HostLoop
from ..hosted.run import TrainingFacts
from ..hosted.saved import Position
from ..hosted.training import LOSS, HostedTraining, PluginOwner, drop_gradients
from .flavour import installed
from .names import our_name

NAME = "Lightning"
HOST = HostLoop(
    NAME,
    frozenset({"skip_step", "veto_stop"}),
    cannot=frozenset({"end_epoch", "validation"}),
    remedies={
        "hold_step": "set Trainer(accumulate_grad_batches=)",
        "end_epoch": "set Trainer(limit_train_batches=)",
        "validation": "set Trainer(check_val_every_n_epoch=) or Trainer(val_check_interval=)",
        "save": "pass HeliographCallback(save_to='a/folder'), or use ModelCheckpoint",
        "skip_step": "train with heliograph.Trainer, which takes several optimizers by name",
        "checkpoints": "use ModelCheckpoint, whose checkpoints include the states of plugins",
        "veto_stop": "set Trainer(min_epochs=) or Trainer(min_steps=)",
        "length": "set Trainer(max_steps=)",
        "rng": "call seed_everything(...)",
    },
)


def host_of(trainer: Any, *, saves: bool) -> HostLoop:
    host = HOST if saves else replace(HOST, cannot=HOST.cannot | {"save"})
    if len(trainer.optimizers) > 1:
        host = replace(host, verbs=host.verbs - {"skip_step"}, lacks=frozenset({GradientsReady}))
    return host


def facts_of(trainer: Any, module: Any, name: str, hyper_parameters: Mapping[str, Any] | None) -> TrainingFacts:
    loader, batches = trainer.train_dataloader, trainer.num_training_batches
    validates = sum(trainer.num_val_batches or [0]) > 0
    return TrainingFacts(
        modules={"model": module},
        optimizer=trainer.optimizers[0] if trainer.optimizers else None,
        device=trainer.strategy.root_device,
        epochs=_limit(trainer.max_epochs),
        steps=_limit(trainer.max_steps),
        batches=int(batches) if batches != float("inf") else None,
        loader=loader,
        batch_size=getattr(loader, "batch_size", None),
        validation={"": trainer.val_dataloaders} if validates else {},
        does=frozenset({"validation"} if validates else ()),
        name=name,
        hyper_parameters=dict(module.hparams if hyper_parameters is None else hyper_parameters),
        world_size=trainer.world_size,
    )


def position_of(trainer: Any) -> Position:
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return Position(trainer.current_epoch, 0 if done >= trainer.num_training_batches else done, trainer.global_step)


def set_of(trainer: Any, index: int) -> str:
    return str(index) if len(trainer.num_val_batches) > 1 else ""


def _limit(number: int | None) -> int | None:
    return None if number in (None, -1) else number


class LoggedValues:
    """The values that Lightning logged, by phase and step, under our names."""

    def __init__(self) -> None:
        self._updates: dict[str, int] = {}  # of each value at the last log
        self._of_epoch: dict[str, float] = {}  # means of epochs, until they are logged

    def of_validation(self, trainer: Any) -> dict[str, float]:
        return _values(trainer.fit_loop.epoch_loop.val_loop._results, "validation", on_step=False)

    def end_epoch(self, trainer: Any) -> None:
        results = trainer.fit_loop.epoch_loop._results
        self._of_epoch = self.of_step(trainer) | _values(results, "train", on_step=False)
        self._updates.clear()  # Lightning resets its values

    def of_training(self, trainer: Any, *, in_epoch: bool) -> dict[str, float]:
        metrics, self._of_epoch = self._of_epoch, {}
        if in_epoch:
            metrics.pop(LOSS, None)
            metrics |= self.of_step(trainer)
        return metrics

    def of_step(self, trainer: Any) -> dict[str, float]:
        results = trainer.fit_loop.epoch_loop._results
        before, self._updates = self._updates, {key: result.update_count for key, result in results.items()}
        new = {key for key, count in self._updates.items() if count != before.get(key)}
        return _values(results, "train", on_step=True, keys=new)


def _values(results: Any, phase: str, *, on_step: bool, keys: Any = None) -> dict[str, float]:
    values = dict[str, float]()
    for key, result in results.items():
        if result.has_reset or (keys is not None and key not in keys):
            continue
        value = results._get_cache(result, on_step)
        if value is not None:
            values |= dict.fromkeys((our_name(n, phase) for n in results._forked_name(result, on_step)), float(value))
    return values


Callback: Any = installed("HeliographCallback").callback


class HeliographCallback(PluginOwner, Callback):  # type: ignore[misc]  # its base is known when it runs
    """Run plugins in the trainings of a `lightning.pytorch.Trainer`.

    Lightning's hooks emit the events. Requests to stop, to log, to save and to drop a step are served; plugins with
    other requests raise an error when the training starts. The states of the plugins are saved in Lightning's
    checkpoints. On several ranks the requests are exchanged at each step boundary, and all ranks serve them.

    Args:
        plugins: plugin objects, in their order within a lane.
        save_to: the folder for requested checkpoints, `step=<step>.ckpt`; None if only Lightning saves.
        name: the run's name, which is part of file names.
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
        return f"heliograph:{self._name}"

    def state_dict(self) -> dict[str, Any]:
        return self._training.state() or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state or None

    # The training.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        saved, self._saved = self._saved, None
        self._training.host = host_of(trainer, saves=self._save_to is not None)
        facts = facts_of(trainer, pl_module, self._name, self._hyper_parameters)
        path = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        leave = self._training.begin(facts, saved, path, position_of(trainer))
        self._in_epoch, self._measured = False, LoggedValues()
        for optimizer in trainer.optimizers[:1]:
            self._hooks.append(optimizer.register_step_post_hook(self._note_step))
        trainer.should_stop = trainer.should_stop or leave.stop

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin_epoch(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # The module's own hook, which Lightning calls last, may still log values of the epoch.
        hook = pl_module.on_train_epoch_end
        original = {"on_train_epoch_end": hook} if "on_train_epoch_end" in vars(pl_module) else {}

        def restore() -> None:
            del pl_module.on_train_epoch_end
            vars(pl_module).update(original)

        def end() -> None:
            self._module_hook.close()
            hook()
            self._end_epoch(trainer)

        self._module_hook.callback(restore)
        pl_module.on_train_epoch_end = end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove_hooks()
        if trainer.should_stop:
            self._training.stop_by_host("should_stop was set")
        self._training.end(self._actions(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._remove_hooks()
        self._training.fail(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._training.fail(RuntimeError(f"{NAME} left the training early."))

    # A batch.

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._in_epoch:
            self._begin_epoch(trainer)
        self._is_stepping = self._has_stepped = False
        self._training.begin_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._loss = loss.detach() * divisor if divisor > 1 else loss.detach()
        self._training.end_forward(self._loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._training.end_backward(self._loss)
        self._training.track_loss(self._loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if self._is_stepping:  # another optimizer of the same batch
            return
        self._is_stepping = True
        if self._training.begin_step():
            drop_gradients(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._is_stepping:
            self._training.end_step(stepped=self._has_stepped)
        self._training.end_batch()
        if self._is_stepping:
            self._boundary(trainer)

    # A validation.

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._training.run is None or trainer.sanity_checking:
            return
        self._is_validating = True
        self._training.begin_validation(sum(trainer.num_val_batches))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_validating:
            self._training.begin_validation_batch(batch, set_of(trainer, dataloader_idx))

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_validating:
            self._training.end_validation_batch(set_of(trainer, dataloader_idx))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
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
