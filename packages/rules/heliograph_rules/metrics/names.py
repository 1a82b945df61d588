"""Our metrics under the names that rules of the ancestors know, and the epoch as they count it."""

from __future__ import annotations

from collections.abc import Mapping

from heliograph import Run, StepEnd
from heliograph.events import Event

PREFIXES = {"train": "", "validation": "eval_", "test": "test_", "predict": "predict_"}


def ancestor_name(name: str) -> str:
    """Return `eval_loss` for `validation/loss`, `eval_<set>_loss` for `validation/<set>/loss`, `loss` for `train/loss`.

    The norm of the gradients is `grad_norm`; what belongs to no part of the data keeps its name.
    """
    split, _, rest = name.partition("/")
    if split not in PREFIXES or not rest:
        return name
    if split == "train":
        return "grad_norm" if rest == "gradient_norm" else rest
    return PREFIXES[split] + rest.replace("/", "_")


def under_both_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by our names and by the ancestors', as python's own numbers."""
    theirs = {ancestor_name(name): float(value) for name, value in metrics.items()}
    return theirs | {name: float(value) for name, value in metrics.items()}


def fractional_epoch(run: Run, event: Event) -> float:
    """Return the finished epochs, with the part of the current one that is done, where its length is known."""
    progress, length = run.progress, run.length.batches_per_epoch
    if not length:
        return float(progress.epoch)
    done = progress.batch + isinstance(event, StepEnd)  # the batch of a step is counted when it ends
    return progress.epoch + min(1.0, done / length)
