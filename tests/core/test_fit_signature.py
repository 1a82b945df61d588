"""What `fit?` and editors show: every argument of `fit`, with its type and its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heliograph import Trainer, ValidationSchedule
from heliograph.core.settings import FitOptions
from heliograph.tests import kit
from torch.utils.data import TensorDataset

OWN = {"self", "task", "train"}


def shown(method: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of each parameter that a method shows."""
    return {name: (each.annotation, each.default) for name, each in inspect.signature(method).parameters.items()}


def test_the_signature_of_fit_names_each_argument_with_its_type_and_default() -> None:
    arguments = shown(Trainer.fit)

    assert arguments["optimizer"] == ("Optimizers", inspect.Parameter.empty)
    assert arguments["validation"] == ("Loaders | None", None)
    assert arguments["max_skipped_steps"] == ("int | None", 100)
    assert arguments["name"] == ("str", "run")
    assert arguments["on_interrupt"] == ("Literal['raise', 'return']", "raise")
    assert "options" not in arguments


@pytest.mark.parametrize("method", [Trainer.fit, Trainer.run])
def test_the_signature_is_made_of_the_list_that_arguments_are_checked_by(method: Callable[..., Any]) -> None:
    assert shown(method).keys() - OWN - {"on_interrupt"} == FitOptions.__annotations__.keys()


def test_the_docstring_explains_every_argument_in_the_order_of_the_signature() -> None:
    text = inspect.getdoc(Trainer.fit) or ""
    explained = [line.split(":")[0].strip() for line in text.split("\n") if line.startswith(" " * 4) and line[4] != " "]
    names = [name for name in explained if name in shown(Trainer.fit)]

    assert names == [name for name in shown(Trainer.fit) if name != "self"]


def test_words_that_fit_does_not_know_are_explained_by_it_not_by_python() -> None:
    with pytest.raises(TypeError, match=r"argument 'resume'\. To resume,"):
        kit.fit(resume="auto")


def test_validation_data_may_be_a_dataset_for_a_type_checker_too() -> None:
    """It refused what the docstring allows: torch's datasets have no `__iter__`."""
    inputs, targets = (torch.cat(parts) for parts in zip(*kit.class_batches(3), strict=True))
    measured = [
        Trainer([ValidationSchedule(epochs=1)], device="cpu").fit(
            kit.linear_classifier(),
            TensorDataset(inputs, targets),
            loader_params={"batch_size": len(inputs)},
            validation=validation,
            optimizer=kit.sgd(),
            epochs=1,
        )
        for validation in (TensorDataset(inputs, targets), [(inputs, targets)])
    ]

    assert measured[0].metrics == measured[1].metrics
    assert "validation/loss" in measured[0].metrics
