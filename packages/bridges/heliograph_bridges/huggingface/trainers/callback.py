"""`HeliographCallback`: plugins in the Trainer of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self
from uuid import uuid4

import torch
from heliograph import GradientsReady
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from ...hosted.host import HostLoop
from ...hosted.run import HostedRun, TrainingFacts
from ...hosted.saved import Position, capture, with_ranks
from ...hosted.training import HostedTraining, PluginOwner, drop_gradients
from .methods import TrainerPatches, of_log
from .requests import FlagRequests

HOST = HostLoop(
    "transformers.Trainer",
    verbs=frozenset({"skip_step", "veto_stop"}),
    remedies={
        "hold_step": "set TrainingArguments(gradient_accumulation_steps=...)",
        "veto_stop": "set TrainingArguments(max_steps=...)",
        "veto_save": "set TrainingArguments(save_strategy=...)",
        "scheduler": "set TrainingArguments(lr_scheduler_type=...), or pass optimizers=(optimizer, scheduler)",
        "batches": "transform batches in the dataset or in data_collator=",
        "checkpoints": "set TrainingArguments(save_strategy=...): its checkpoints include the states of plugins",
        "rng": "set TrainingArguments(seed=...): the Trainer saves the generators in its checkpoints",
        "roll_back": "call trainer.train(resume_from_checkpoint=...) with an earlier checkpoint",
    },
)

FILE = "heliograph.pt"  # with the states of the plugins, in the folder of a checkpoint
RESUMED, TRIAL = "resume_from_checkpoint", "trial"
SAME = "those of this training"  # stands for `plugins` when the Trainer recreates callbacks from a checkpoint


def host_of(trainer: Any) -> HostLoop:
    package = type(trainer).__module__.partition(".")[0]
    shards = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return HostLoop(
        f"{package}.{type(trainer).__name__}",
        HOST.verbs - {"skip_step"} if shards else HOST.verbs,
        frozenset({GradientsReady}) if shards else frozenset(),
        HOST.remedies,
    )


def folder_of(trainer: Any, trial: Any) -> Path:
    return Path(trainer._get_output_dir(trial) or ".")  # there is no public method


def facts_of(trainer: Any, state: TrainerState, loader: Any, folder: Path) -> TrainingFacts:
    args: TrainingArguments = trainer.args
    sets = trainer.eval_dataset
    strategies = {"log": args.logging_strategy, "validation": args.eval_strategy, "save": args.save_strategy}
    return TrainingFacts(
        modules={"model": trainer.model},
        optimizer=trainer.optimizer,
        device=args.device,
        epochs=None if args.max_steps > 0 else state.num_train_epochs,
        steps=state.max_steps,
        batches=len(loader) if has_length(loader) else None,
        loader=loader,
        batch_size=trainer._train_batch_size,  # auto_find_batch_size may have reduced it; there is no public attribute
        validation=sets if isinstance(sets, dict) else {} if sets is None else {"": sets},
        does=frozenset(word for word, strategy in strategies.items() if strategy != "no"),
        name=_name(args, folder),
        hyper_parameters=_changed(args),
        world_size=args.world_size,
    )


def position_of(args: TrainingArguments, state: TrainerState, batches: int | None) -> Position:
    window = args.gradient_accumulation_steps
    steps = state.max_steps if batches is None else max(1, ceil(batches / window))
    epoch, extra_steps = divmod(state.global_step, steps)
    return Position(epoch, 0 if args.ignore_data_skip else extra_steps * window, state.global_step)


def _name(args: TrainingArguments, folder: Path) -> str:
    output = Path(args.output_dir or ".")
    trial = "" if folder == output else f"-{folder.name}"
    name = Path(args.run_name or output).name + trial
    return name.replace("\\", "_").lstrip(".") or "run"


def _changed(args: TrainingArguments) -> dict[str, Any]:
    plain = args.to_sanitized_dict()
    defaults = {field.name: field.default for field in fields(args) if field.default is not MISSING}
    return {
        name: value
        for name, value in plain.items()
        if name in defaults and getattr(args, name) != defaults[name] and not name.startswith("_")
    }


def write_state(run: HostedRun, folder: Path, save_id: str) -> None:
    """Write the state of the plugins on all ranks, atomically. A collective."""
    state = with_ranks(run, capture(run))
    if run.engine.is_main:
        partial = folder / f"{FILE}.partial"
        torch.save({"id": save_id, "state": state}, partial)
        partial.replace(folder / FILE)


def read_state(save_id: str, folder: Path) -> dict[str, Any]:
    path = folder / FILE
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
    if content.get("id") != save_id:
        raise ValueError(
            f"The checkpoint {folder} has no {FILE} that matches its trainer_state.json, so the states of plugins are "
            f"missing: it was not completely written or copied. Resume from another checkpoint."
        )
    state: dict[str, Any] = content["state"]
    return state


class CallingTrainer(NamedTuple):
    """The Trainer that calls a callback.

    Attributes:
        trainer: the Trainer.
        checkpoint: the checkpoint that it resumes, if any.
        trial: the trial of a hyper-parameter search, if any.
    """

    trainer: Any
    checkpoint: str | None
    trial: Any


def caller() -> CallingTrainer:
    """Find the calling Trainer on the stack: it passes no reference to itself to callbacks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), Trainer):
            return CallingTrainer(owner, frame.f_locals.get(RESUMED), frame.f_locals.get(TRIAL))
        frame = frame.f_back
    raise RuntimeError(
        "HeliographCallback was not called by a Trainer of transformers: pass it to "
        "Trainer(..., callbacks=[HeliographCallback([...])])."
    )


class HeliographCallback(PluginOwner, TrainerCallback, ExportableState):
    """Run plugins in a Trainer or its subclasses: `callbacks=[HeliographCallback([...])]`.

    The Trainer's loop emits the events, with a real `Run`; requests become flags of the Trainer. The
    states of the plugins are saved in its checkpoints and are always resumed, even without
    `restore_callback_states_from_checkpoint`. On several ranks a request of one rank is served by all, at the same
    step. Unsupported plugins raise an error when the training begins.

    The callback wraps the training loop, `training_step`, `compute_loss`, `prediction_step` and `evaluate` of its
    Trainer object, because these begin or fail without calling a callback.

    Args:
        plugins: plugin objects, in their order within a lane.

    Raises:
        TypeError: a plugin has a handler that does not fit its event.
        ValueError: plugins contradict each other, or, when a training begins, one of them is not supported.
    """

    def __new__(cls, plugins: Iterable[Any] | str) -> Self:
        if plugins != SAME:
            return super().__new__(cls)
        return next(callback for callback in caller().trainer.callback_handler.callbacks if isinstance(callback, cls))

    def __init__(self, plugins: Iterable[Any] | str) -> None:
        if plugins == SAME:
            return
        assert not isinstance(plugins, str)
        self._training = HostedTraining(plugins, HOST)
        self._requests = FlagRequests(self._training)
        self._methods = TrainerPatches(self._training, self._requests)
        self._save_id, self._epoch = "", 0

    # A Trainer that restores callbacks itself sets `saved`; `on_train_begin` reads it.

    def state(self) -> dict[str, Any]:
        self._save_id = uuid4().hex  # the Trainer writes it to trainer_state.json and then calls `on_save`
        saved = {} if self._training.run is None else {"saved": self._save_id}
        return {"args": {"plugins": SAME}, "attributes": saved}

    # The moments of the Trainer, in their order.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._methods.wrap(caller().trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, checkpoint, trial = caller()
        if sum(isinstance(callback, HeliographCallback) for callback in trainer.callback_handler.callbacks) > 1:
            raise ValueError("This Trainer has two HeliographCallbacks: pass all plugins to one of them.")
        is_late = self._methods.wrap(trainer)
        self._training.host = host_of(trainer)
        self._folder = folder_of(trainer, trial)
        facts = facts_of(trainer, state, kwargs.get("train_dataloader"), self._folder)
        states: Any = state.stateful_callbacks  # by class name
        record = states.setdefault(type(self).__name__, {"args": {"plugins": SAME}, "attributes": {}})
        path = saved = None
        if checkpoint is not None:  # otherwise they belong to a previous attempt of auto_find_batch_size
            path, saved = Path(checkpoint), record["attributes"].get("saved")
        position = position_of(args, state, facts.batches)
        leave = self._training.begin(
            facts, None if path is None or saved is None else read_state(saved, path), path, position
        )
        self._epoch = position.epoch
        if is_late:
            self._training.active.note(
                f"the callback was added after {self._training.host.name} was created: an error outside of plugins is "
                f"only noticed when the next training begins"
            )
        self._requests.begin(state.global_step, leave, control)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training.run is not None:
            self._training.begin_epoch(self._epoch)
            self._epoch += 1

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training.run is not None:
            self._requests.finish(control)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training.run is not None and self._training.begin_step():
            drop_gradients(kwargs["optimizer"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training.run is not None:
            self._training.end_batch()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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
        run = self._training.run
        if run is None or run.phase != "train":
            return
        is_due = "loss" in (logs or {}) and not run.data.in_hand  # logged by the loop, and so on all ranks
        self._training.log(of_log(logs or {}), with_tracked=is_due)
        if is_due:
            self._requests.serve("log", control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        run = self._training.run
        if run is None:
            return
        run.boundary_is_open = True  # even if it was closed, because ShouldStop follows this save
        folder = self._folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        write_state(run, folder, self._save_id)
        self._training.save(folder, is_best=state.best_global_step == state.global_step)
        self._requests.serve("save", control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        run = self._training.run
        if run is None:
            return
        self._requests.finish(control)
        if control.should_epoch_stop and not run.control.should_end_epoch:
            run.control.end_epoch("a callback has set should_epoch_stop", by=run.host.name)
        stops_early = control.should_epoch_stop or control.should_training_stop
        is_over = run.data.is_last_batch if run.length.batches_per_epoch is not None else not stops_early
        self._requests.end_epoch(control, has_ended=self._training.end_epoch(is_over=is_over))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        run = self._training.run
        if run is None:
            return
        self._requests.finish(control)
        self._requests.stop_by_host(control)
        self._training.end()
