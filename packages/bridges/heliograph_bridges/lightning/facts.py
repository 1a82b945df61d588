"""What Lightning's Trainer says of its training, and what its loop can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heliograph import GradientsReady

from ..hosted.facts import Facts
from ..hosted.host import Host
from ..hosted.saved import Position

NAME = "Lightning"
HOST = Host(
    NAME,
    frozenset({"skip_step", "veto_stop"}),
    cannot=frozenset({"end_epoch", "validation"}),
    mends={
        "hold_step": "set Trainer(accumulate_grad_batches=)",
        "end_epoch": "set Trainer(limit_train_batches=)",
        "validation": "set Trainer(check_val_every_n_epoch=) or Trainer(val_check_interval=)",
        "save": "give HeliographCallback(save_to='a/folder'), or let ModelCheckpoint save",
        "skip_step": "train with heliograph.Trainer, which takes several optimizers by name",
        "checkpoints": "let ModelCheckpoint write them: they hold the states of these plugins, too",
        "veto_stop": "set Trainer(min_epochs=) or Trainer(min_steps=)",
        "length": "set Trainer(max_steps=)",
        "rng": "call seed_everything(...)",
    },
)


def host_of(trainer: Any, *, saves: bool) -> Host:
    """Return what the loop of a Trainer can do: with several optimizers, no plugin sees the gradients of all.

    Args:
        trainer: the Trainer.
        saves: whether there is a folder for checkpoints that plugins ask for.
    """
    host = HOST if saves else replace(HOST, cannot=HOST.cannot | {"save"})
    if len(trainer.optimizers) > 1:
        host = replace(host, verbs=host.verbs - {"skip_step"}, lacks=frozenset({GradientsReady}))
    return host


def facts_of(trainer: Any, module: Any, name: str, hyper_parameters: Mapping[str, Any] | None) -> Facts:
    """Return what a Trainer says of the training that it begins.

    Args:
        trainer: the Trainer.
        module: what it trains.
        name: of the run.
        hyper_parameters: for trackers; None for those of the module.
    """
    loader, batches = trainer.train_dataloader, trainer.num_training_batches
    validates = sum(trainer.num_val_batches or [0]) > 0
    return Facts(
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
    """Return where a Trainer begins or continues its training."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return Position(trainer.current_epoch, 0 if done >= trainer.num_training_batches else done, trainer.global_step)


def set_of(trainer: Any, index: int) -> str:
    """Return the name of a validation set: empty for the only one, else its number."""
    return str(index) if len(trainer.num_val_batches) > 1 else ""


def _limit(number: int | None) -> int | None:
    return None if number in (None, -1) else number
