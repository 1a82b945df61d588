"""The methods of a Trainer that begin, end or fail without calling a callback: wrapped, so that our events come."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakSet

from ...hosted.training import HostedTraining
from . import names
from .requests import Requests

LOOP = "_inner_training_loop"  # each attempt of auto_find_batch_size; nothing public sees the error of one
PREFIX = "metric_key_prefix"
ITEMS = "num_items_in_batch"


class Methods:
    """Wraps the methods of Trainers; outside of a run of ours, they are as they were.

    Args:
        training: the plugins.
        requests: what they ask for.
    """

    def __init__(self, training: HostedTraining, requests: Requests) -> None:
        self._training, self._requests = training, requests
        self._wrapped: WeakSet[Any] = WeakSet()
        self._dataset = ""

    def wrap(self, trainer: Any) -> bool:
        """Wrap the methods of a Trainer, once; return whether this call did."""
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
        """Close the run with whatever error ends the training, or an attempt: no callback is called then."""

        def train(*args: Any, **options: Any) -> Any:
            try:
                return method(*args, **options)
            except BaseException as error:
                self._training.fail(error)
                raise

        return train

    def _training_step(self, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        """Begin a micro-batch, and end its backward pass; the loss is that part of a window's mean."""

        def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            training = self._training
            if training.run is None:
                return method(model, inputs, *args, **options)
            training.begin_batch(inputs)
            try:
                loss = method(model, inputs, *args, **options)
            except BaseException as error:  # where the callback came late, nothing wraps the loop that runs
                training.fail(error)
                raise
            number = _window(trainer)
            training.end_backward(loss if number == 1 else loss * number)
            return loss

        return training_step

    def _compute_loss(self, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        """End a forward pass of the training; in a window with a count the loss is a part of the mean, too."""

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
        """Begin and end a batch of a validation."""

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
        """Begin and end a validation; of several sets, the Trainer calls itself for each."""
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
            training.end_validation(names.of_evaluation(results, sets, prefix))
            self._requests.serve("validation", trainer.control)
            return results

        return evaluate


def _window(trainer: Any) -> int:
    """Return how many micro-batches the window in hand has."""
    return int(getattr(trainer, "current_gradient_accumulation_steps", 1))
