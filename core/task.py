"""Tasks: the user's model code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..plugins.hints import OF_SELF, explains_arguments, explains_attributes
from .data.sizes import count_samples, size_counter
from .metrics import is_metric_object

if TYPE_CHECKING:
    from ..events import Run
    from .data.columns import Columns

Metric = Callable[[Any, Any], Tensor | float] | nn.Module
Loss = Tensor | tuple[Tensor, int | Tensor]  # a mean, or a sum with its count
Losses = Iterator[tuple[str, Loss]]
Value = Tensor | float | tuple[Tensor | float, int | Tensor]
EvaluationValues = Value | Mapping[str, Value] | None

_PAIRS = (tuple, list)  # other iterables could unpack into keys, rows or letters


@explains_attributes(OF_SELF)
class Task:
    """Base class of tasks: write `training_step`, and `validation_step` if you validate.

    Every `nn.Module` among the attributes is moved, switched between train and eval mode, and saved. A task may also be
    an `nn.Module` instead of a subclass of `Task`: only the method names matter.
    """

    def __repr__(self) -> str:
        """Return the class with its attributes; for a task that is a module, the layers."""
        from ..events.signatures import show_attributes

        return nn.Module.__repr__(self) if isinstance(self, nn.Module) else show_attributes(self)

    def training_step(self, run: Run, batch: Any) -> Loss | Losses:
        """Return the loss of a batch, a scalar tensor, averaged over its samples.

        Or return `(loss_sum, count)`, for example a sum over tokens and their number, an int or a tensor with one
        element. The gradients of a step are then divided by the total count of its micro-batches on all ranks, and so
        are the tracked losses. If the loss is a mean, `run.stepping.weigh(count)` sets the number of items it is a mean
        of.

        If `fit` has several optimizers by name, yield `(name, loss)` for each instead. The code after a `yield` runs
        after the backward pass of that loss and, unless the step is held, after the step of its optimizer.
        """
        raise TypeError(f"{type(self).__name__} needs a method training_step(run, batch) that returns the loss.")

    def validation_step(self, run: Run, batch: Any) -> EvaluationValues:
        """Return the loss of a batch, or values by name; they are averaged, weighted by samples.

        A value `(sum, count)` is averaged over its count; see `training_step`.
        """
        raise TypeError(f"{type(self).__name__} needs a method validation_step(run, batch) to be validated or tested.")

    def test_step(self, run: Run, batch: Any) -> EvaluationValues:
        """Call `validation_step`, unless overridden."""
        return self.validation_step(run, batch)

    def predict_step(self, run: Run, batch: Any) -> Any:
        """Return the outputs of a batch, for `trainer.predict`.

        Outputs are tensors or arrays whose first dimension is the samples, lists with an item for each sample, or dicts
        and tuples of these. Means of values tracked with `run.track` are in the metrics of the result.
        """
        raise TypeError(f"{type(self).__name__} needs a method predict_step(run, batch) that returns the outputs.")

    def validation_names(self) -> Iterable[str] | None:
        """Return the names of all values that `validation_step` measures, such as `loss`, or None if unknown.

        A plugin that monitors another name is then refused before the training begins.
        """
        return None


class Supervised(Task):
    """One model and one loss; batches are pairs (inputs, targets), or dicts of columns.

    Args:
        model: called with the inputs.
        loss_fn: called with (outputs, targets); returns the mean loss of the batch, a scalar tensor. Without it,
            batches are dicts: the model is called with their columns by name and computes the `loss` in its outputs, as
            the models of transformers do.
        inputs: for batches that are dicts, the column with which the model is called, such as `"image"`; or several,
            passed by name, such as `("input_ids", "attention_mask")`.
        targets: for batches that are dicts, the column of the targets.
        metrics: by name. A function of (outputs, targets) returns a mean over the samples of a batch, such as
            `{"accuracy": heliograph.accuracy}`. Batches are averaged, weighted by samples, so use a function for
            accuracy or an error, not for F1 or AUROC. An object with `update(outputs, targets)`, `compute()` and
            `reset()`, such as those of torchmetrics, computes its value over all batches since the last log, or over a
            validation or test set. A copy is made for each of these. On several ranks it synchronizes itself in
            `compute`. In a validation or test, values that are not numbers are in `run.collected` by name. A
            `MetricCollection` may replace the dict. Metrics are read only when they are logged. Without a `loss_fn`,
            metrics get the `logits` of the outputs, and the column `labels` unless `targets` names another.

    Raises:
        TypeError: the model is not an `nn.Module`, or a metric has another type; in a run, a batch is not a pair or
            dict.
        ValueError: a metric is called `loss`, or only one of `inputs` and `targets` is given with a `loss_fn`.
    """

    _columns: Columns | None = None

    @explains_arguments
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor] | nn.Module | None = None,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Supervised(model, loss_fn) takes an nn.Module as its model, got {type(model).__name__}.")
        self.model, self._columns = model, None
        self.metrics: dict[str, Any] = {}
        if metrics is not None:
            from .metrics.metric_objects import named_metrics

            self.metrics = named_metrics(metrics)
        if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
            from .data.columns import no_loss_function

            raise no_loss_function(loss_fn)
        if loss_fn is None or inputs is not None or targets is not None:
            from .data.columns import Columns, loss_of_model

            self._columns = Columns(loss_fn, inputs, targets)
            loss_fn = loss_fn or loss_of_model
        self.loss_fn = loss_fn

    def training_step(self, run: Run, batch: Any) -> Tensor:
        """Return the loss; if there are handlers, `run.outputs` has the outputs until the batch ends."""
        is_pair = batch.__class__ is tuple and self._columns is None and len(batch) == 2  # the usual case avoids a call
        outputs, targets = (self.model(batch[0]), batch[1]) if is_pair else self._forward(batch)
        if run.bus.receiver_count:
            run.outputs = outputs
        if self.metrics and run.report.tracks:
            weight = size_counter(self, count_samples)(batch)
            for name, value in self._measure(outputs, targets):
                run.track(name, value, weight)
        return self.loss_fn(outputs, targets)

    def validation_step(self, run: Run, batch: Any) -> EvaluationValues:
        """Return the loss and the metrics."""
        outputs, targets = self._forward(batch)
        run.outputs = outputs
        loss = {"loss": self.loss_fn(outputs, targets)}
        return loss | dict(self._measure(outputs, targets)) if self.metrics else loss

    def predict_step(self, run: Run, batch: Any) -> Any:
        """Return the model's outputs for the inputs of a batch, with or without targets.

        A list or tuple of two is (inputs, targets), of one (inputs,); anything else is the inputs. For a model that
        computes its own loss, the outputs are the `logits`.
        """
        if self._columns is not None:
            return self._columns.predict(self.model, batch)
        is_pair = type(batch) in (list, tuple) and len(batch) in (1, 2)
        return self.model(batch[0] if is_pair else batch)

    def validation_names(self) -> Iterable[str] | None:
        """Return `loss` and the names of the metrics, or None if a subclass overrides `validation_step`."""
        is_known = type(self).validation_step is Supervised.validation_step and "" not in self.metrics
        return ("loss", *self.metrics) if is_known else None

    def _forward(self, batch: Any) -> tuple[Any, Any]:
        if self._columns is not None:
            return self._columns.forward(self.model, batch)
        if batch.__class__ not in _PAIRS and (
            isinstance(batch, Mapping | Set | str | bytes) or hasattr(batch, "shape")
        ):
            raise _no_pair(batch)
        try:
            inputs, targets = batch
        except (TypeError, ValueError) as error:
            raise _no_pair(batch) from error
        return self.model(inputs), targets

    def _measure(self, outputs: Any, targets: Any) -> Iterator[tuple[str, Any]]:
        from .metrics.metric_objects import measure

        return measure(self.metrics, outputs if self._columns is None else self._columns.measured(outputs), targets)


def _no_pair(batch: Any) -> TypeError:
    from .data.columns import no_pair
    from .objects.program import describe

    return no_pair(batch, describe)


def check_task(task: Any, step: str) -> None:
    """Raise TypeError unless a task has the required step, or if it has a hook that would never be called."""
    if not callable(getattr(task, step, None)):
        raise TypeError(
            f"{type(task).__name__} has no {step}(run, batch), so it cannot be the task here. Wrap a plain model "
            f"in Supervised(model, loss_fn), or subclass Task."
        )
    if any(name.startswith("on_") or name.endswith("_epoch_end") for name in dir(type(task))):
        from ..plugins.entry import check_hooks

        check_hooks(type(task), how="Move it to a plugin, and")


def check_step(task: Any, step: str) -> None:
    """Raise TypeError unless a task defines the required step with the arguments (run, batch)."""
    check_task(task, step)
    if step == "test_step" and _is_unwritten(task, step):
        step = "validation_step"  # test_step calls it
    if _is_unwritten(task, step):
        getattr(task, step)(None, None)  # raises
    code = getattr(getattr(task, step), "__code__", None)
    if code is None or code.co_varnames[1 : code.co_argcount] != ("run", "batch"):
        from .system.errors import check_form

        check_form(task, step)


def can_validate(task: Any) -> bool:
    return callable(getattr(task, "validation_step", None)) and not _is_unwritten(task, "validation_step")


def _is_unwritten(task: Any, step: str) -> bool:
    return getattr(getattr(task, step), "__func__", None) is getattr(Task, step)


def check_parts(task: Any) -> None:
    """Raise ValueError if a task has modules or parameters in containers, where they would not be trained."""
    for name, value in {} if isinstance(task, nn.Module) else vars(task).items():
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        if not isinstance(value, nn.Module) and any(map(_is_trained, items)):
            raise ValueError(
                f"{type(task).__name__}.{name} has modules or parameters outside of a module, so they would not be "
                f"trained. Put them into a module, as in nn.ModuleList(...) or nn.ParameterList([...])."
            )


def _is_trained(value: Any) -> bool:
    return isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and not is_metric_object(value))
