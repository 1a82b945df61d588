"""Tasks: the user's model code."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..events import Run
from .batches import batch_size
from .checkpoint.state.expanded_tensors import loadable

EXTRA_STATE = "_extra_state"  # in torch, what the name ends with of what a module's `set_extra_state` takes
Metric = Callable[[Any, Any], Tensor | float]
Losses = Iterator[tuple[str, Tensor]]
Evaluation = Tensor | Mapping[str, Tensor | float] | None


class Task:
    """Base of tasks: write `training_step`, and `validation_step` where you validate.

    Every `nn.Module` among the attributes is moved, switched between train and eval mode, and saved. A task may itself
    be an `nn.Module` instead of a subclass of this: what counts are the method names.
    """

    def training_step(self, run: Run, batch: Any) -> Tensor | Losses:
        """Return the loss of a batch, a scalar tensor, averaged over its samples.

        Where `fit` is given several optimizers by name, yield `(name, loss)` for each instead. What follows a `yield`
        runs when that loss was taken backward and, unless the step is held, its optimizer was stepped.
        """
        raise TypeError(f"{type(self).__name__} needs a method training_step(run, batch) that returns the loss.")

    def validation_step(self, run: Run, batch: Any) -> Evaluation:
        """Return the loss of a batch, or values by name; they are averaged, weighted by samples."""
        raise TypeError(f"{type(self).__name__} needs a method validation_step(run, batch) to be validated.")

    def test_step(self, run: Run, batch: Any) -> Evaluation:
        """Do as in validation, unless overridden."""
        return self.validation_step(run, batch)


class Supervised(Task):
    """One model, one loss, batches of (inputs, targets).

    Args:
        model: called with the inputs.
        loss_fn: called with (outputs, targets); returns the mean loss of the batch, a scalar tensor.
        metrics: functions of (outputs, targets) by name, each a mean over the batch, such as
            `{"accuracy": heliograph.accuracy}`. Weighted by samples over batches, read only when they are logged.

    Raises:
        TypeError: the model is no `nn.Module`, or a metric is not callable; in a run, a batch is a dict.
        ValueError: a metric is called `loss`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], *, metrics: Mapping[str, Metric] | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Supervised(model, loss_fn) takes an nn.Module as its model, got {type(model).__name__}.")
        self.metrics = dict(metrics or {})
        for name, metric in self.metrics.items():
            if not callable(metric):
                raise TypeError(f"Metric {name!r} must be a function of (outputs, targets), got {metric!r}.")
        if "loss" in self.metrics:
            raise ValueError("A metric cannot be called 'loss': that is the loss itself.")
        self.model = model
        self.loss_fn = loss_fn

    def training_step(self, run: Run, batch: Any) -> Tensor:
        """Return the loss; the outputs are at hand as `run.outputs` until the batch ends, if anybody listens."""
        if isinstance(batch, dict):
            raise _no_pair(batch)
        inputs, targets = batch
        outputs = self.model(inputs)
        if run.bus.links:
            run.outputs = outputs
        if self.metrics and run.tracks:
            weight = batch_size(batch)
            for name, metric in self.metrics.items():
                run.track(name, metric(outputs.detach(), targets), weight)
        return self.loss_fn(outputs, targets)

    def validation_step(self, run: Run, batch: Any) -> Evaluation:
        """Return the loss and the metrics."""
        if isinstance(batch, dict):
            raise _no_pair(batch)
        inputs, targets = batch
        run.outputs = outputs = self.model(inputs)
        values = {name: metric(outputs, targets) for name, metric in self.metrics.items()}
        return {"loss": self.loss_fn(outputs, targets), **values}


def _no_pair(batch: dict[Any, Any]) -> TypeError:
    """Return what to raise where a batch, which would come apart into its keys, is a dict."""
    return TypeError(
        f"Supervised takes batches of (inputs, targets), got a dict with the keys {sorted(map(str, batch))}. Of a Ray "
        f"dataset, name the two columns in their order: loader_params={{'columns': ('image', 'label')}}. Of others, "
        f"give a collate_fn that makes pairs, or subclass Task, whose training_step(run, batch) gets the dict."
    )


def modules_of(task: Any) -> dict[str, nn.Module]:
    """Return the modules of a task by attribute name; the task itself where it is one."""
    if isinstance(task, nn.Module):
        return {"task": task}
    return {name: value for name, value in vars(task).items() if isinstance(value, nn.Module)}


def check_task(task: Any, *steps: str) -> None:
    """Raise TypeError unless a task has the steps that a run will call."""
    for step in steps:
        if not callable(getattr(task, step, None)):
            raise TypeError(
                f"{type(task).__name__} is no task for this: it has no {step}(run, batch). Wrap a plain model in "
                f"Supervised(model, loss_fn), or subclass Task."
            )


def check_parts(task: Any) -> None:
    """Raise ValueError where a task hides modules or parameters that would never be trained, moved or saved."""
    for name, value in {} if isinstance(task, nn.Module) else vars(task).items():
        held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        if not isinstance(value, nn.Module) and any(isinstance(each, nn.Module | nn.Parameter) for each in held):
            raise ValueError(
                f"{type(task).__name__}.{name} holds modules or parameters out of sight: nothing would train them. Put "
                f"them into a module, as in nn.ModuleList(...) or nn.ParameterList([...])."
            )


def check_fits(modules: Mapping[str, nn.Module], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise ValueError unless saved weights are of these modules; nothing is loaded then.

    What a module loads in a way of its own is not looked at: it may take other names, or change its shapes.
    """
    if saved.keys() != modules.keys():
        raise ValueError(
            f"The checkpoint holds the modules {sorted(saved)}, the task has {sorted(modules)}: use the task that "
            f"wrote it."
        )
    for name, module in modules.items():
        own = _own_ways(module)
        now, then = (
            {part: value for part, value in state.items() if not part.startswith(own)}
            for state in (module.state_dict(), saved[name])
        )
        if now.keys() != then.keys():
            names = ", ".join(sorted(now.keys() ^ then.keys())[:5])
            raise ValueError(f"The checkpoint's {name!r} is another network than the task's: they differ in {names}.")
        for part, value in now.items():
            is_weight = isinstance(value, Tensor) and not is_lazy(value) and not part.endswith(EXTRA_STATE)
            if is_weight and value.shape != then[part].shape:
                raise ValueError(
                    f"The checkpoint's {name}.{part} has the shape {list(then[part].shape)}, the task's "
                    f"{list(value.shape)}: use the task that wrote it."
                )


def load_module(name: str, module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load saved weights into a module.

    Raises:
        ValueError: the module does not take them, which `check_fits` cannot foresee where it loads in its own way.
    """
    try:
        module.load_state_dict(loadable(module, weights))
    except RuntimeError as error:
        raise ValueError(
            f"The task's {name!r} does not take the checkpoint's: use the task that wrote it. {error}"
        ) from error


def _own_ways(module: nn.Module) -> tuple[str, ...]:
    """Return what the names of those parts of a module's state begin with that are loaded in a way of its own."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return ("",)
    parts = module.named_modules(remove_duplicate=False)
    return tuple(f"{name}." if name else "" for name, part in parts if _loads_in_its_own_way(part))


def _loads_in_its_own_way(module: nn.Module) -> bool:
    """Return whether anything but torch's own code takes part in loading a module's own state."""
    before: Iterable[Any] = module._load_state_dict_pre_hooks.values()
    after = module._load_state_dict_post_hooks.values()
    loading = [type(module)._load_from_state_dict, *(each.hook for each in before), *after]
    return any(not (getattr(each, "__module__", None) or "").startswith("torch.") for each in loading)


def check_loss(loss: Any) -> None:
    """Raise unless a loss is a scalar tensor."""
    if isinstance(loss, Generator):
        raise TypeError(
            "training_step yields several losses: give their optimizers by the names that it yields them with, as in "
            'optimizer={"generator": ..., "discriminator": ...}.'
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"The loss must be a scalar tensor, got {type(loss).__name__}: return the tensor, not .item().")
    if loss.ndim:
        raise ValueError(
            f"The loss must be a scalar tensor, got shape {list(loss.shape)}: average it, as in loss.mean()."
        )


@contextmanager
def eval_mode(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Switch modules to eval mode, and every submodule back to the mode that it had."""
    modes = [(module, module.training) for root in modules.values() for module in root.modules()]
    for root in modules.values():
        root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
