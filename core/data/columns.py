"""Batches that are dicts of columns, and models that compute their own loss, such as in transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..system.extras import kind_of


class Columns:
    """The columns of a batch that the model, the loss and the metrics get.

    Args:
        loss_fn: None if the model computes its loss.
        inputs: one column, passed by position; several, passed by name; None for all columns.
        targets: the column for the loss function and the metrics.

    Raises:
        TypeError: an argument is not the name of a column.
        ValueError: a loss function is given without `inputs` or `targets`.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Tensor] | None, inputs: str | Sequence[str] | None, targets: str | None
    ) -> None:
        names = [inputs] if isinstance(inputs, str) else inputs or []
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in [*names, targets or ""]):
            raise TypeError(
                f"inputs= takes the name of a column of the batches, or a tuple of names, and targets= one name; got "
                f"{inputs!r} and {targets!r}."
            )
        if loss_fn is not None and (inputs is None or targets is None):
            missing = "inputs" if inputs is None else "targets"
            raise ValueError(
                f"Supervised(model, loss_fn) for batches that are dicts needs inputs= and targets=, for example "
                f"inputs='image', targets='label': {missing}= is missing."
            )
        self._model_has_loss = loss_fn is None
        self._inputs, self._targets = inputs, targets or "labels"
        self._needs_targets = targets is not None

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the outputs of the model and the targets, None if the batch has none and `targets` was not given.

        Raises:
            TypeError: the batch is not a dict.
            ValueError: it lacks a column.
        """
        outputs = self.outputs(model, batch)
        if self._needs_targets and self._targets not in batch:
            raise _lacks(self._targets, batch)
        return outputs, batch.get(self._targets)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            arguments = "without a loss function" if self._model_has_loss else "with inputs= and targets="
            raise TypeError(
                f"Supervised {arguments} takes batches that are dicts, got "
                f"{type(batch).__name__}. For batches of (inputs, targets), give Supervised(model, loss_fn)."
            )
        if self._inputs is None:
            return model(**batch)
        wanted = [self._inputs] if isinstance(self._inputs, str) else [*self._inputs]
        if lacking := [name for name in wanted if name not in batch]:
            raise _lacks(lacking[0], batch)
        if isinstance(self._inputs, str):
            return model(batch[self._inputs])
        return model(**{name: batch[name] for name in wanted})

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return self.measured(self.outputs(model, batch))

    def measured(self, outputs: Any) -> Any:
        """Return the part of the outputs for metrics and predictions: the logits if the model computes its loss.

        Raises:
            TypeError: there are no logits.
        """
        if not self._model_has_loss:
            return outputs
        if (logits := part_of_outputs(outputs, "logits")) is None:
            raise TypeError(
                f"The model returned {kind_of(outputs)} without logits, which metrics and predictions "
                f"need. Subclass Supervised and define validation_step or predict_step."
            )
        return logits


def loss_of_model(outputs: Any, _targets: Any) -> Any:
    loss = part_of_outputs(outputs, "loss")
    if loss is None:
        raise TypeError(
            f"The model returned {kind_of(outputs)} without a loss. A transformers model computes it if the "
            f"batch has the column 'labels'. Otherwise use Supervised(model, loss_fn, inputs=..., targets=...)."
        )
    return loss


def part_of_outputs(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _lacks(name: str, batch: Mapping[str, Any]) -> ValueError:
    return ValueError(f"The batch has no column {name!r}; it has {', '.join(map(repr, batch))}.")


def no_loss_function(loss_fn: Any) -> TypeError:
    if isinstance(loss_fn, type):
        return TypeError(f"Supervised(model, loss_fn) takes an object, not a class: write {loss_fn.__name__}().")
    form = "a function of (outputs, targets), such as torch.nn.functional.cross_entropy"
    return TypeError(f"Supervised(model, loss_fn) takes {form}; got {loss_fn!r}.")


def no_pair(batch: Any, describe: Callable[[Any], str]) -> TypeError:
    # Unpacking a dict, a tensor or a string would silently yield its items.
    if isinstance(batch, Mapping):
        return TypeError(
            f"Supervised takes batches of (inputs, targets), got a dict with the keys {sorted(map(str, batch))}. Name "
            f"its columns: Supervised(model, loss_fn, inputs='image', targets='label'); or pass no loss_fn if the "
            f"model computes its own loss, as transformers models do."
        )
    parts = f": {', '.join(map(describe, batch[:8]))}" if isinstance(batch, list | tuple) and batch else ""
    advice = (
        "Pass several inputs as one, as in ((ids, mask), targets); a dataset, such as TensorDataset(inputs, targets), "
        "or a collate_fn can make such pairs."
    )
    return TypeError(
        f"Supervised takes batches of (inputs, targets), got {describe(batch)}{parts}. {advice} Or subclass Task, "
        f"whose training_step(run, batch) gets the unchanged batch."
    )
