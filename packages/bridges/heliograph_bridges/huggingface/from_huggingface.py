"""`from_huggingface`: a callback of the Hugging Face Trainer as a plugin."""

from __future__ import annotations

from typing import Any

from heliograph.spi import require

from .callbacks.arguments import check_given
from .callbacks.plugin import HuggingFacePlugin
from .callbacks.refusals import check


def from_huggingface(callback: Any, args: Any = None, *, processing_class: Any = None) -> HuggingFacePlugin:
    """Return a plugin that calls a callback of the Hugging Face Trainer, or of TRL, in a Heliograph training.

    Its methods are called where the Trainer calls them, with a `TrainerState` that is kept up to date, and with metrics
    under their names there (`loss`, `eval_loss`). What it sets in `control` becomes a request in its name; what it
    resets is withdrawn. Its state is in the checkpoints, where it has one: by `ExportableState`, or by `state_dict` and
    `load_state_dict`.

    Args:
        callback: a `transformers.TrainerCallback`, or a class of them that needs no arguments.
        args: what the callback is given as `args`: a `transformers.TrainingArguments`, used as it is; or a dict of what
            it reads and the run does not know, such as `{"metric_for_best_model": "accuracy"}`.
        processing_class: what the callback is given as such, a tokenizer say.

    Raises:
        TypeError: the callback is not one, or the arguments are neither a dict nor `TrainingArguments`.
        ValueError: the callback cannot run here; says why, and what does the same here.
        ImportError: transformers is not installed.
    """
    base = require("transformers", "from_huggingface", extra="transformers").TrainerCallback
    check_given(args)
    if isinstance(callback, type) and issubclass(callback, base):
        callback = callback()
    check(callback, args, base)
    return HuggingFacePlugin(callback, args, processing_class)
