"""Wrappers for Trainer methods that begin, end or fail without calling a callback, and metric names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakSet

from ...hosted.training import HostedTraining
from .requests import FlagRequests

PLACE = ("epoch", "step")  # which the progress has
SUMMARY = "train_"  # what is logged once, at the end
MEANS = ("loss", "samples_per_second", "steps_per_second", "tokens_per_second")  # in it: of all since the beginning

LOOP = "_inner_training_loop"  # one attempt of auto_find_batch_size; no public method sees its error
PREFIX = "metric_key_prefix"
ITEMS = "num_items_in_batch"


def of_log(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return logged values under our names; names with a `/` are kept.

    The summary at the end has means over the whole training; they are renamed to `train/mean_...`.
    """
    names = {f"{SUMMARY}{name}": f"train/mean_{name}" for name in MEANS}
    metrics = {}
    for name, value in _numbers(logs).items():
        default = name if "/" in name else f"train/{name.removeprefix(SUMMARY)}"
        metrics[names.get(name, default)] = value
    return metrics


def of_evaluation(results: Mapping[str, Any], sets: Iterable[str], prefix: str = "eval") -> dict[str, float]:
    """Return the results of an evaluation under our names.

    Args:
        results: by the names of the Trainer, such as `eval_loss`, or `eval_news_loss` for the set `news`.
        sets: the names of the sets; a single one has the empty name.
        prefix: the prefix of the names. A user's own prefix becomes a part of our names, because the data may differ.
    """
    named = sorted(filter(None, sets), key=len, reverse=True)
    metrics = {}
    for name, value in _numbers(results).items():
        metric = name.removeprefix(f"{prefix}_")
        dataset = next((candidate for candidate in named if metric.startswith(f"{candidate}_")), "")
        qualified = f"{dataset}/{metric.removeprefix(f'{dataset}_')}" if dataset else metric
        metrics[f"validation/{qualified}" if prefix == "eval" else f"validation/{prefix}/{qualified}"] = value
    return metrics


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if name not in PLACE and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TrainerPatches:
    """Wraps the methods of Trainers; outside of a run the wrappers do nothing."""

    def __init__(self, training: HostedTraining, requests: FlagRequests) -> None:
        self._training, self._requests = training, requests
        self._wrapped: WeakSet[Any] = WeakSet()
        self._dataset = ""

    def wrap(self, trainer: Any) -> bool:
        if trainer in self._wrapped:
            return False
        self._wrapped.add(trainer)
        for name, make in (
            (LOOP, self._train),
            ("training_step", self._training_step),
            ("compute_loss", self._compute_loss),
            ("prediction_step", self._prediction_step),
            ("evaluate", self._evaluate),
        ):
            method = getattr(trainer, name)
            setattr(trainer, name, wraps(method)(make(trainer, method)))
        return True

    def _train(self, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **options: Any) -> Any:
            try:
                return method(*args, **options)
            except BaseException as error:
                self._training.fail(error)
                raise

        return train

    def _training_step(self, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            training = self._training
            if training.run is None:
                return method(model, inputs, *args, **options)
            training.begin_batch(inputs)
            try:
                loss = method(model, inputs, *args, **options)
            except BaseException as error:  # if the callback was added late, the running loop is not wrapped
                training.fail(error)
                raise
            number = _window(trainer)
            training.end_backward(loss if number == 1 else loss * number)
            return loss

        return training_step

    def _compute_loss(self, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            run = self._training.run
            if run is not None and run.phase == "train" and run.data.in_hand:
                loss = result[0] if isinstance(result, tuple) else result
                is_part = options.get(ITEMS) is not None
                self._training.end_forward(loss * _window(trainer) if is_part else loss)
            return result

        return compute_loss

    def _prediction_step(self, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def prediction_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            training = self._training
            if training.run is None or training.run.phase != "validation":
                return method(model, inputs, *args, **options)
            training.begin_validation_batch(inputs, self._dataset)
            result = method(model, inputs, *args, **options)
            training.end_validation_batch(self._dataset)
            return result

        return prediction_step

    def _evaluate(self, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        parameters = signature(method)

        def evaluate(*args: Any, **options: Any) -> Any:
            training = self._training
            prefix = parameters.bind_partial(*args, **options).arguments.get(PREFIX, "eval")
            if training.run is None:
                return method(*args, **options)
            sets = training.run.data.validation_sets
            if training.run.phase == "validation":  # one of several sets
                self._dataset = prefix.removeprefix("eval_")
                return method(*args, **options)
            self._dataset = ""
            training.begin_validation()
            results = method(*args, **options)
            training.end_validation(of_evaluation(results, sets, prefix))
            self._requests.serve("validation", trainer.control)
            return results

        return evaluate


def _window(trainer: Any) -> int:
    return int(getattr(trainer, "current_gradient_accumulation_steps", 1))
