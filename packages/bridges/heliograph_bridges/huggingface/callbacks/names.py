"""Metrics under the names that they have in the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIXES = {"train": "", "validation": "eval_", "test": "test_", "predict": "test_"}
GRAD_NORM = "grad_norm"
RENAMED = {"train/gradient_norm": GRAD_NORM}


def their_name(name: str) -> str:
    """Return `eval_loss` for `validation/loss`, `loss` for `train/loss`, `eval_<set>_loss` for `validation/<set>/loss`.

    Args:
        name: of the metric here; a name without a phase is left as it is.
    """
    if name in RENAMED:
        return RENAMED[name]
    phase, slash, rest = name.partition("/")
    if not slash or phase not in PREFIXES:
        return name
    return PREFIXES[phase] + rest.replace("/", "_")


def their_names(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics under their names in the Trainer."""
    return {their_name(name): value for name, value in metrics.items()}
