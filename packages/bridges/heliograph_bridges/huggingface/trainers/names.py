"""The names of their metrics as ours: `eval_loss` is `validation/loss`, `loss` is `train/loss`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PLACE = ("epoch", "step")  # which the progress has
SUMMARY = "train_"  # what is logged once, at the end
MEANS = ("loss", "samples_per_second", "steps_per_second", "tokens_per_second")  # in it: of all since the beginning


def of_log(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return what a Trainer logs by our names; those that have a `/` already stay.

    The summary has means of the whole training, which are not those of its last steps: these have the names without
    `mean_`.
    """
    names = {f"{SUMMARY}{name}": f"train/mean_{name}" for name in MEANS}
    metrics = {}
    for name, value in _numbers(logs).items():
        own = name if "/" in name else f"train/{name.removeprefix(SUMMARY)}"
        metrics[names.get(name, own)] = value
    return metrics


def of_evaluation(results: Mapping[str, Any], sets: Iterable[str], prefix: str = "eval") -> dict[str, float]:
    """Return what an evaluation returned by our names.

    Args:
        results: by the names of the Trainer, such as `eval_loss`, or `eval_news_loss` of the set `news`.
        sets: the names of the sets; a single one has the empty name.
        prefix: what the names begin with. That of an evaluation which somebody calls by another prefix becomes a part
            of our names: it is not of the validation sets.
    """
    named = sorted(filter(None, sets), key=len, reverse=True)
    metrics = {}
    for name, value in _numbers(results).items():
        rest = name.removeprefix(f"{prefix}_")
        dataset = next((each for each in named if rest.startswith(f"{each}_")), "")
        own = f"{dataset}/{rest.removeprefix(f'{dataset}_')}" if dataset else rest
        metrics[f"validation/{own}" if prefix == "eval" else f"validation/{prefix}/{own}"] = value
    return metrics


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if name not in PLACE and isinstance(value, int | float) and not isinstance(value, bool)
    }
