"""Batches that are dicts of columns, and models that compute their loss themselves, such as those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..system.extras import kind_of

LABELS = "labels"


class Columns:
    """Which columns of a batch the model, the loss and the metrics take.

    Args:
        loss_fn: None where the model computes its loss.
        inputs: one column, which the model is called with; several, which it is called with by their names; None, all.
        targets: the column that the loss function and metrics are given.

    Raises:
        TypeError: they are not the names of columns.
        ValueError: a loss function is given, but not both.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Tensor] | None, inputs: str | Sequence[str] | None, targets: str | None
    ) -> None:
        names = [inputs] if isinstance(inputs, str) else inputs or []
        if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
            raise TypeError(f"inputs= takes the name of a column of the batches, or a tuple of some, got {inputs!r}.")
        if not isinstance(targets, str | None):
            raise TypeError(f"targets= takes the name of one column of the batches, got {targets!r}.")
        if loss_fn is not None and (inputs is None or targets is None):
            missing = "inputs" if inputs is None else "targets"
            raise ValueError(
                f"Supervised(model, loss_fn) for batches that are dicts takes both, inputs='image' and "
                f"targets='label', say: {missing}= is missing."
            )
        self._has_own_loss = loss_fn is None
        self._inputs, self._targets = inputs, targets or LABELS
        self._asked = targets is not None

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the outputs of the model, and the targets; None where the batch has none and none were named.

        Raises:
            TypeError: the batch is not a dict.
            ValueError: it has no such column.
        """
        outputs = self.outputs(model, batch)
        if self._asked and self._targets not in batch:
            raise _lacks(self._targets, batch)
        return outputs, batch.get(self._targets)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Return the outputs of the model for its columns of a batch."""
        if not isinstance(batch, Mapping):
            given = "a loss function" if self._has_own_loss else "inputs= and targets="
            raise TypeError(
                f"Supervised with{'out' if self._has_own_loss else ''} {given} takes batches that are dicts, got "
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
        """Return what is predicted for a batch, which may have no targets."""
        return self.measured(self.outputs(model, batch))

    def measured(self, outputs: Any) -> Any:
        """Return what of the outputs metrics and predictions are of: of a model with a loss of its own, the logits.

        Raises:
            TypeError: there are none.
        """
        if not self._has_own_loss:
            return outputs
        if (logits := part_of_outputs(outputs, "logits")) is None:
            raise TypeError(
                f"The model returned {kind_of(outputs)} without logits, which metrics and predictions are made "
                f"of. Subclass Supervised, and write the validation_step or predict_step."
            )
        return logits


def loss_of_model(outputs: Any, _targets: Any) -> Any:
    """Return the loss that a model has computed.

    Raises:
        TypeError: there is none.
    """
    loss = part_of_outputs(outputs, "loss")
    if loss is None:
        raise TypeError(
            f"The model returned {kind_of(outputs)} without a loss. Models of transformers compute it where "
            f"the batch has the column 'labels'. Else give Supervised(model, loss_fn, inputs=..., targets=...)."
        )
    return loss


def part_of_outputs(outputs: Any, name: str) -> Any:
    """Return a part of a model's outputs by its name, None where there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _lacks(name: str, batch: Mapping[str, Any]) -> ValueError:
    return ValueError(f"The batch has no column {name!r}; it has {', '.join(map(repr, batch))}.")


def no_loss_function(given: Any) -> TypeError:
    """Return what to raise where a loss function is none."""
    if isinstance(given, type):
        return TypeError(f"Supervised(model, loss_fn) takes an object, not a class: write {given.__name__}().")
    form = "a function of (outputs, targets), such as torch.nn.functional.cross_entropy"
    return TypeError(f"Supervised(model, loss_fn) takes {form}; got {given!r}.")


def no_pair(batch: Any, describe: Callable[[Any], str]) -> TypeError:
    """Return what to raise where a batch is not a pair: a dict, a tensor or a text would come apart into its items."""
    if isinstance(batch, Mapping):
        return TypeError(
            f"Supervised takes batches of (inputs, targets), got a dict with the keys {sorted(map(str, batch))}. Name "
            f"its columns: Supervised(model, loss_fn, inputs='image', targets='label'); or give no loss_fn where the "
            f"model computes its own loss, as those of transformers do."
        )
    parts = f": {', '.join(map(describe, batch[:8]))}" if isinstance(batch, list | tuple) and batch else ""
    if hasattr(batch, "shape"):
        mend = "TensorDataset(inputs, targets) with loader_params={'batch_size': 32} makes such pairs of two tensors."
    else:
        mend = (
            "Give several inputs as one, as in ((ids, mask), targets): the model is called with the first part, the "
            "loss with its outputs and the second. A dataset or a collate_fn makes such pairs."
        )
    return TypeError(
        f"Supervised takes batches of (inputs, targets), got {describe(batch)}{parts}. {mend} Or subclass Task, whose "
        f"training_step(run, batch) gets the batch as it is."
    )
