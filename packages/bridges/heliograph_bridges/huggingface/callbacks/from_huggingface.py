"""`from_huggingface`: a callback of the Hugging Face Trainer as a plugin."""

from __future__ import annotations

import os
from inspect import signature
from typing import Any

from heliograph.spi import require

from .arguments import check_given
from .plugin import HuggingFacePlugin

BARS = "draws its own progress bar, which conflicts with others: add ProgressBar() to the plugins"
REPLACED = {
    "DefaultFlowCallback": (
        "decides when the Trainer logs, evaluates and saves: add LogSchedule, ValidationSchedule and SaveSchedule to "
        "the plugins"
    ),
    "ProgressCallback": BARS,
    "NotebookProgressCallback": BARS,
    "RichProgressCallback": BARS,
    "PrinterCallback": "prints the logs like a progress bar: add ProgressBar() or FileLog() to the plugins",
    "JITCheckpointCallback": "saves with the Trainer's own method: add Preemption() and a Checkpoint to the plugins",
}
UPLOADS = {  # by class: the environment variable, and its values, that enable uploads of the Trainer's files
    "WandbCallback": ("WANDB_LOG_MODEL", ("end", "checkpoint")),
    "MLflowCallback": ("HF_MLFLOW_LOG_ARTIFACTS", ("1", "on", "yes", "true")),
}


def from_huggingface(callback: Any, args: Any = None, *, processing_class: Any = None) -> HuggingFacePlugin:
    """Return a plugin that calls a callback of the Hugging Face Trainer or of TRL.

    Its methods are called at the same points as by the Trainer, with an updated `TrainerState` and metrics
    under the Trainer's names (`loss`, `eval_loss`). A flag that it sets in `control` becomes a request by the plugin;
    if it resets the flag, the request is withdrawn. Its state is saved in checkpoints if it has `ExportableState`, or
    `state_dict` and `load_state_dict`.

    Args:
        callback: a `transformers.TrainerCallback`, or such a class without required arguments.
        args: the `args` of the callback: a `transformers.TrainingArguments`, or a dict of values
            that the run does not have, such as `{"metric_for_best_model": "accuracy"}`.
        processing_class: the `processing_class` of the callback, for example a tokenizer.

    Raises:
        TypeError: the callback or the arguments have the wrong type.
        ValueError: the callback is not supported; the message names an alternative.
        ImportError: transformers is not installed.
    """
    base = require("transformers", "from_huggingface", extra="transformers").TrainerCallback
    check_given(args)
    if isinstance(callback, type) and issubclass(callback, base):
        callback = callback()
    check(callback, args, base)
    return HuggingFacePlugin(callback, args, processing_class)


def check(callback: Any, args: Any, base: type) -> None:
    if not isinstance(callback, base):
        raise TypeError(
            f"from_huggingface takes a transformers.TrainerCallback, got {callback!r}. An object with methods marked "
            f"@on is registered as it is, as in Trainer([...])."
        )
    kind = type(callback)
    for name in (base_class.__name__ for base_class in kind.__mro__):
        if name in REPLACED:
            raise ValueError(f"{kind.__name__} cannot run in a Heliograph training: it {REPLACED[name]}.")
        if name in UPLOADS:
            _check_uploads(kind.__name__, *UPLOADS[name])
    if _needs_trainer(callback):
        raise ValueError(
            f"{kind.__name__} cannot run in a Heliograph training: it calls methods of a transformers.Trainer. Write a "
            f"plugin instead, a class with methods marked @on."
        )
    if getattr(args, "push_to_hub", False):
        raise ValueError(
            "args has push_to_hub=True, but Heliograph does not push to a hub, so on_push_begin would never be called. "
            "Set it to False, and push after the training."
        )


def _check_uploads(kind: str, variable: str, values: tuple[str, ...]) -> None:
    value = os.environ.get(variable, "")
    if value.lower() in values:
        raise ValueError(
            f"{kind} cannot run in a Heliograph training with {variable}={value}: it uploads the folders that a "
            f"transformers.Trainer saves, but Checkpoint writes other files. Unset the variable."
        )


def _needs_trainer(callback: Any) -> bool:
    kind = type(callback)
    takes = "trainer" in signature(kind.__init__).parameters or hasattr(callback, "set_trainer")
    holds = any(type(value).__name__.endswith("Trainer") for value in vars(callback).values())
    return takes or holds
