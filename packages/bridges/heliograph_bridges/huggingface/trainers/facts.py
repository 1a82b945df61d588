"""What a Trainer says of its training, and what its loop can do."""

from __future__ import annotations

from dataclasses import MISSING, fields
from math import ceil
from pathlib import Path
from typing import Any

from heliograph import GradientsReady
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from ...hosted.facts import Facts
from ...hosted.host import Host
from ...hosted.saved import Position

HOST = Host(
    "transformers.Trainer",
    verbs=frozenset({"skip_step", "veto_stop"}),
    mends={
        "hold_step": "set TrainingArguments(gradient_accumulation_steps=...)",
        "veto_stop": "set TrainingArguments(max_steps=...)",
        "veto_save": "set TrainingArguments(save_strategy=...)",
        "scheduler": "set TrainingArguments(lr_scheduler_type=...), or give Trainer optimizers=(optimizer, scheduler)",
        "batches": "transform batches in the dataset or in data_collator=",
        "checkpoints": "set TrainingArguments(save_strategy=...): its checkpoints hold the states of plugins, too",
        "rng": "set TrainingArguments(seed=...): the Trainer keeps the generators in its checkpoints",
        "roll_back": "call trainer.train(resume_from_checkpoint=...) with an earlier checkpoint",
    },
)


def host_of(trainer: Any) -> Host:
    """Return what the loop of a Trainer can do; under DeepSpeed and FSDP nobody sees whole gradients."""
    package = type(trainer).__module__.partition(".")[0]
    shards = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return Host(
        f"{package}.{type(trainer).__name__}",
        HOST.verbs - {"skip_step"} if shards else HOST.verbs,
        frozenset({GradientsReady}) if shards else frozenset(),
        HOST.mends,
    )


def folder_of(trainer: Any, trial: Any) -> Path:
    """Return where a Trainer writes its checkpoints: in a search each trial has its own folder."""
    return Path(trainer._get_output_dir(trial) or ".")  # nothing public says it


def facts_of(trainer: Any, state: TrainerState, loader: Any, folder: Path) -> Facts:
    """Return what a Trainer says of the training that it begins.

    Args:
        trainer: the Trainer.
        state: its state, with the length of the training.
        loader: what it reads.
        folder: where it writes its checkpoints.
    """
    args: TrainingArguments = trainer.args
    sets = trainer.eval_dataset
    strategies = {"log": args.logging_strategy, "validation": args.eval_strategy, "save": args.save_strategy}
    return Facts(
        modules={"model": trainer.model},
        optimizer=trainer.optimizer,
        device=args.device,
        epochs=None if args.max_steps > 0 else state.num_train_epochs,
        steps=state.max_steps,
        batches=len(loader) if has_length(loader) else None,
        loader=loader,
        batch_size=trainer._train_batch_size,  # which auto_find_batch_size may have reduced; nothing public says it
        validation=sets if isinstance(sets, dict) else {} if sets is None else {"": sets},
        does=frozenset(word for word, strategy in strategies.items() if strategy != "no"),
        name=_name(args, folder),
        hyper_parameters=_changed(args),
        world_size=args.world_size,
    )


def position_of(args: TrainingArguments, state: TrainerState, batches: int | None) -> Position:
    """Return where a Trainer begins or continues its training, as it computes that from its steps.

    Args:
        args: its arguments.
        state: its state.
        batches: the micro-batches in an epoch, None where that is unknown.
    """
    window = args.gradient_accumulation_steps
    steps = state.max_steps if batches is None else max(1, ceil(batches / window))
    epoch, rest = divmod(state.global_step, steps)
    return Position(epoch, 0 if args.ignore_data_skip else rest * window, state.global_step)


def _name(args: TrainingArguments, folder: Path) -> str:
    output = Path(args.output_dir or ".")
    trial = "" if folder == output else f"-{folder.name}"
    name = Path(args.run_name or output).name + trial
    return name.replace("\\", "_").lstrip(".") or "run"


def _changed(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that differ from their defaults."""
    plain = args.to_sanitized_dict()
    defaults = {each.name: each.default for each in fields(args) if each.default is not MISSING}
    return {
        name: value
        for name, value in plain.items()
        if name in defaults and getattr(args, name) != defaults[name] and not name.startswith("_")
    }
