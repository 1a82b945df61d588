"""A heliograph plugin of a third party: an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from heliograph import (
    CheckpointLoaded,
    Lane,
    Plugin,
    Run,
    RunFailed,
    StepEnd,
    ValidationEnd,
    ValidationStart,
    on,
)
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

__all__ = ["WeightAveraging"]


class WeightAveraging(Plugin):
    """Keep an exponential moving average of the weights, and validate with it.

    After each optimizer step, `average = decay * average + (1 - decay) * weights`, for every parameter and every
    floating-point buffer of the task's modules, in at least 32 bits. Integer buffers (BatchNorm's counters) are copied,
    and so are elements of a buffer whose average would not be finite (a mask of `-inf`). The average outlives the run;
    the next `fit` begins a new one.

    Args:
        decay: how much of the old average stays at a step; at least 0 and below 1.
        start_step: the average begins as a copy of the weights after this many optimizer steps; 0 means what 1 means.
        validate_with_average: whether validations within `fit` use the averaged weights. They are put in at
            `ValidationStart` and the trained ones back at the end of `ValidationEnd`, hence before a checkpoint.

    Attributes:
        updates: how many optimizer steps the average is made of.

    Raises:
        ValueError: an argument is out of its range; when a run is resumed, the saved average is of other modules.
    """

    # Two plugins that lend the model other weights during a validation would give back each other's.
    exclusive = ("validation_weights",)

    def __init__(self, decay: float = 0.999, *, start_step: int = 0, validate_with_average: bool = True) -> None:
        if not isinstance(decay, int | float) or isinstance(decay, bool) or not 0 <= decay < 1:
            raise ValueError(f"decay must be a number of at least 0 and below 1, got {decay!r}.")
        if not isinstance(start_step, int) or isinstance(start_step, bool) or start_step < 0:
            raise ValueError(f"start_step must be a whole number of at least 0, got {start_step!r}.")
        if not isinstance(validate_with_average, bool):
            raise ValueError(f"validate_with_average is True or False, got {validate_with_average!r}.")
        self.decay, self.start_step, self.validate_with_average = decay, start_step, validate_with_average
        self.updates = 0
        self._average: dict[str, Tensor] = {}
        self._lent: list[tuple[Tensor, Tensor]] = []
        # Not torch's AveragedModel: it averages integer counters too, or else copies every buffer.
        self._blend = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch has no annotation here

    def reset(self) -> None:
        """Forget the former run."""
        self.updates, self._average = 0, {}

    @on(CheckpointLoaded)
    def check_loaded(self, run: Run, event: CheckpointLoaded) -> None:
        """Move a restored average to where the weights are, and see that it is one of them."""
        weights = _tensors(run.modules)
        if self._average:
            _check_same(self._average, weights, "the run's modules")
            self._average = {name: each.to(weights[name].device) for name, each in self._average.items()}

    @on(StepEnd, lane=Lane.MEASURE)
    def update(self, run: Run, event: StepEnd) -> None:
        """Move the average towards the weights that the optimizer has just left."""
        if run.progress.steps < self.start_step:
            return
        parameters, buffers = _parameters(run.modules), _buffers(run.modules)
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for name, weight in (parameters | buffers).items():
            average = self._entry(name, weight)
            weight = weight.to(average.dtype)
            if not _has_mean(weight):
                average.copy_(weight)
            elif name in parameters:
                averages.append(average)
                weights.append(weight)
            else:
                blended = average.lerp(weight, 1 - self.decay)
                average.copy_(blended.where(blended.isfinite(), weight))
        if averages:
            self._blend(averages, weights, self.updates)
        self.updates += 1

    @on(ValidationStart, lane=Lane.TRANSFORM)
    def lend(self, run: Run, event: ValidationStart) -> None:
        """Put the averaged weights in for a validation within training."""
        if not self.validate_with_average or not self._average or run.optimizer is None:
            return
        weights = _tensors(run.modules)
        self._lent = [(weight, weight.clone()) for weight in weights.values()]
        for name, weight in weights.items():
            weight.copy_(self._average[name])

    @on(ValidationEnd, lane=Lane.REPORT)
    def give_back(self, run: Run, event: ValidationEnd) -> None:
        """Put the trained weights back."""
        self.close()

    @on(RunFailed, lane=Lane.TRANSFORM)
    def give_back_early(self, run: Run, event: RunFailed) -> None:
        """Put the trained weights back before anybody saves what a failed run has left."""
        self.close()

    def close(self) -> None:
        """Put the trained weights back, if a validation was left halfway; the average is kept."""
        lent, self._lent = self._lent, []
        for weight, trained in lent:
            weight.copy_(trained)

    def copy_to(self, module: nn.Module, name: str | None = None) -> None:
        """Copy the averaged weights into a module.

        Args:
            module: one of the same structure as the trained module, or the trained one itself.
            name: which of the task's modules it is, such as `model`; not needed where the task has only one.

        Raises:
            LookupError: nothing was averaged yet, or no module of this name was, or several were and none is named.
            ValueError: the module has other parameters or buffers than the averaged one.
        """
        names = sorted({key.partition(".")[0] for key in self._average})
        if not names:
            raise LookupError("No weights were averaged yet: fit must reach start_step first.")
        if name is None and len(names) > 1:
            raise LookupError(f"Several modules were averaged: say which with name=, one of {', '.join(names)}.")
        name = name or names[0]
        if name not in names:
            raise LookupError(f"No module {name!r} was averaged. Known: {', '.join(names)}.")
        average = {key: each for key, each in self._average.items() if key.partition(".")[0] == name}
        weights = _tensors({name: module})
        _check_same(average, weights, f"the {type(module).__name__} given")
        for key, weight in weights.items():
            weight.copy_(average[key])

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved average."""
        self.updates = state["updates"]
        self._average = {name: each.clone() for name, each in state["average"].items()}

    def _entry(self, name: str, weight: Tensor) -> Tensor:
        """Return the average of a tensor, which begins as its copy."""
        if name not in self._average:
            wide = torch.promote_types(weight.dtype, torch.float32) if _has_mean(weight) else weight.dtype
            self._average[name] = weight.to(wide, copy=True)
        return self._average[name]


def _has_mean(weight: Tensor) -> bool:
    return weight.is_floating_point() or weight.is_complex()


def _parameters(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{key}.{name}": each.detach() for key, mod in modules.items() for name, each in mod.named_parameters()}


def _buffers(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{key}.{name}": each.detach() for key, mod in modules.items() for name, each in mod.named_buffers()}


def _tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return everything that is averaged, by module and name, as aliases that no gradient flows through."""
    return _parameters(modules) | _buffers(modules)


def _check_same(average: Mapping[str, Tensor], weights: Mapping[str, Tensor], whose: str) -> None:
    """Raise ValueError unless two sets of tensors have the same names and shapes."""
    names = sorted(average.keys() ^ weights.keys())
    names += [name for name in average if name in weights and average[name].shape != weights[name].shape]
    if names:
        raise ValueError(f"The average is of another module than {whose}: they differ in {', '.join(names)}.")
