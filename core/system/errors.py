"""Errors of the framework's own."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from inspect import Signature, signature
from pathlib import Path
from typing import Any

RESUME = "To resume, register Checkpoint(folder, resume='auto')."
PLUGINS = "Plugins are given to the trainer as a list: Trainer([EarlyStopping(), ...])."
LENGTH = "The length of a training is given to fit: epochs= or steps=."
VALIDATION = "fit takes the data to validate with as validation=."
VALIDATE_WHEN = "When to validate is for a plugin: ValidationSchedule(epochs=1)."
LOG = "Logs are written by plugins, such as JsonlLog(path), when LogSchedule(steps=50) says so."
SAVE = "Checkpoints are written by the plugin Checkpoint(folder, every=Every(epochs=1))."
DEVICE = "The hardware is chosen by Trainer(device='cuda') or gpus=[0, 1]; several processes by torchrun or launch."
CLIP = "Gradients are clipped by the plugin GradientClipping(1.0)."
ACCUMULATE = "Gradients of several batches are added up by the plugin GradientAccumulation(4)."
SEED = "Random generators are seeded, and kept for a resume, by the plugin RNGCapture(seed)."
BATCHES = "How a dataset is batched is given to fit: loader_params={'batch_size': 32, 'shuffle': True}."
OPTIMIZER = "fit takes an optimizer, or a function that makes one: optimizer=partial(torch.optim.Adam, lr=0.001)."
SCHEDULER = "fit takes scheduler=, such as warmup_cosine(0.03), and the plugin LearningRate('step') steps it."
TASK = "fit(task, train) begins with the task: Supervised(model, loss_fn, metrics={'accuracy': accuracy}), say."
FIT = "It is an argument of fit: trainer.fit(task, train, optimizer=..., epochs=...)."
PRECISION = "Precision and determinism are options of the trainer: Trainer(precision='bf16', deterministic=True)."
BAR = "Progress is shown by the plugin ProgressBar()."

# Words of Lightning, the HF Trainer, Keras, Catalyst, Ignite and skorch.
WORDS = {
    RESUME: "resume resume_from resume_from_checkpoint ckpt_path checkpoint_path initial_epoch",
    PLUGINS: "callbacks callback plugin plugins hooks handlers",
    LENGTH: "epochs steps max_epochs max_steps num_epochs n_epochs num_train_epochs total_steps min_epochs max_time "
    "nb_epoch",
    VALIDATION: "val val_data val_loader val_dataloader val_dataloaders valid_loader valid_data validation_data "
    "validation_loader eval_dataset eval_data eval_loader eval_dataloader validation_split train_split",
    VALIDATE_WHEN: "eval_steps eval_strategy evaluation_strategy check_val_every_n_epoch val_check_interval "
    "validation_freq validate_every limit_val_batches num_sanity_val_steps",
    LOG: "logger loggers logging_dir logging_steps log_every_n_steps report_to log_dir logdir",
    SAVE: "save_steps save_strategy save_total_limit enable_checkpointing checkpoint checkpoint_callback save_dir "
    "output_dir default_root_dir",
    DEVICE: "device devices gpus use_cpu engine accelerator strategy num_nodes n_gpu no_cuda tpu_cores",
    CLIP: "gradient_clip_val max_grad_norm clip_grad grad_clip clip_grad_norm gradient_clip_algorithm",
    ACCUMULATE: "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
    SEED: "seed random_state data_seed seed_everything",
    BATCHES: "batch_size per_device_train_batch_size per_device_eval_batch_size shuffle num_workers collate_fn "
    "drop_last data_collator train_dataset train_dataloader train_dataloaders train_data train_loader loaders",
    OPTIMIZER: "lr learning_rate optimizers optim optimizer_cls weight_decay",
    SCHEDULER: "lr_scheduler schedulers lr_schedulers lr_scheduler_type warmup_steps warmup_ratio",
    FIT: "name optimizer scheduler validation loader_params hyper_parameters on_interrupt task train",
    PRECISION: "precision deterministic cudnn_benchmark benchmark amp use_amp mixed_precision fp16 bf16 tf32",
    TASK: "model module loss loss_fn criterion loss_function compute_loss metrics metric compute_metrics",
    BAR: "verbose progress_bar enable_progress_bar disable_tqdm",
}

SEEN = {"died": "died", "hung": "hung", "left": "left the group"}  # what the others saw, where a rank reported nothing


class TrainingError(RuntimeError):
    """A run failed with an exception that is on no pass-through list; the original is its `__cause__`."""


class RankFailed(RuntimeError):  # noqa: N818  # an error of another rank
    """Another rank failed, so that this one cannot continue; the collective that failed here is its `__cause__`.

    Attributes:
        rank: the one that failed first.
        kind: the qualified name of its exception's type; `died`, `hung` or `left` where it did not report it.
        text: its exception's text, or what the others saw of it.
        place: where in the run it was.
    """

    def __init__(self, rank: int, kind: str, text: str, place: str) -> None:
        super().__init__(rank, kind, text, place)  # as given, so that it can be pickled
        self.rank, self.kind, self.text, self.place = rank, kind, text, place

    def __str__(self) -> str:
        happened = SEEN.get(self.kind, f"failed with {self.kind}")
        return (
            f"rank {self.rank} {happened}" + f": {self.text}" * bool(self.text) + f" ({self.place})" * bool(self.place)
        )


class NotRecorded(RuntimeError):  # noqa: N818  # says what is missing
    """A replayed plugin asks for what the recording of the run does not hold, such as the model.

    Args:
        what: what it asked for.
        mend: what would record it, if anything does.
    """

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(f"A recording does not hold {what}." + f" {mend}" * bool(mend))
        self.what, self.mend = what, mend


class ResumeDiffers(RuntimeError):  # noqa: N818  # says what happened
    """A step that a resumed run does again is not what the killed run had done.

    Attributes:
        difference: in words, with both values.
        step: after how many optimizer steps.
        batch: which one of the run, from 1.
        path: the file with what the killed run had done.
        causes: the likely causes.
    """

    def __init__(self, difference: str, step: int, batch: int, path: Path, causes: str) -> None:
        super().__init__(difference, step, batch, path, causes)  # as given, so that it can be pickled
        self.difference, self.step, self.batch = difference, step, batch
        self.path, self.causes = path, causes

    def __str__(self) -> str:
        return (
            f"What is done again {self.difference} (batch {self.batch} of the run, as the killed one had left it in "
            f"{self.path}). Likely cause: {self.causes}. To continue all the same: Checkpoint(on_difference='note')."
        )


def add_run_note(error: BaseException, text: str) -> None:
    """Add a note on the run as a whole: `launch` adds it to the error that it raises, whichever rank's that is."""
    error.add_note(f"heliograph: {text}")
    error.heliograph_run_notes = (*getattr(error, "heliograph_run_notes", ()), text)  # type: ignore[attr-defined]


def run_notes(error: BaseException | None) -> list[str]:
    """Return the notes on the run as a whole of an error and its causes."""
    found: list[str] = []
    while error is not None:
        found += getattr(error, "heliograph_run_notes", ())
        error = error.__cause__
    return found


def hint(word: str) -> str:
    """Return the tail of an error sentence about a word of other frameworks: what it is here; empty for others."""
    return next((f" {text}" for text, words in WORDS.items() if word in words.split()), "")


def check_form(task: Any, step: str) -> None:
    """Raise TypeError unless a step of a task takes `(run, batch)`; not where its first argument is called `batch`."""
    try:
        form = signature(getattr(task, step), follow_wrapped=False)
    except ValueError:  # one in C may have none
        return
    try:
        form.bind(None, None)
    except TypeError:
        raise _wrong_form(type(task), step, form) from None
    if next(iter(form.parameters)) == "batch":
        raise _wrong_form(type(task), step, form)


def _wrong_form(kind: type, step: str, form: Signature) -> TypeError:
    mend = f"Write def {step}(self, run, batch); the number of the batch is run.progress.batch."
    if {"lightning", "pytorch_lightning"} & {each.__module__.partition(".")[0] for each in kind.__mro__}:
        mend = (
            f"A LightningModule trains in Lightning's Trainer, with our plugins in its callbacks: "
            f"HeliographCallback([...]) of heliograph_bridges.lightning (pip install ./packages/bridges). To train it "
            f"here, put it into a Task that has {step}(self, run, batch)."
        )
    return TypeError(f"{kind.__name__}.{step}{form} does not fit: it is called with (run, batch). {mend}")


def wrong_loss(loss: Any) -> TypeError | ValueError:
    """Return the error of a loss that is not a scalar tensor."""
    from torch import Tensor  # which this file does not need else

    if isinstance(loss, Generator):
        return TypeError(
            "training_step yields several losses: give their optimizers by the names that it yields them with, as in "
            'optimizer={"generator": ..., "discriminator": ...}.'
        )
    if isinstance(loss, Tensor):
        return ValueError(
            f"The loss must be a scalar tensor, got shape {list(loss.shape)}: average it, as in loss.mean()."
        )
    hint = "return the tensor, not .item()."
    if isinstance(loss, Mapping):
        hint = "take .loss of a model's outputs, or add several losses up; run.track(name, value) logs each."
    elif isinstance(loss, list):
        hint = "a sum with its count is a tuple, (loss_sum, count)."
    elif loss is None:
        hint = "is a return missing?"
    return TypeError(f"The loss must be a scalar tensor, got {type(loss).__name__}: {hint}")
