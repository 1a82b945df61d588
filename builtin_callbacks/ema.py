"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..events import (
    Lane,
    Run,
    RunClosed,
    RunFailed,
    StepEnd,
    TestEnd,
    TestStart,
    TrainStart,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
)
from ..events.checks import check_number, check_whole_number
from ..plugins import Plugin, on

Weights = dict[str, dict[str, Tensor]]


class EMA(Plugin):
    """Keep an exponential moving average of the parameters.

    It is updated after every optimizer step. The average begins with the weights of the first step. Only parameters are
    averaged, as `torch.optim.swa_utils.AveragedModel` does by default; buffers such as the statistics of a batch norm
    are used as they are (averaging counters would truncate them). It is saved with every checkpoint, beside the weights
    that are trained: `torch.load(path)["plugins"]["ema"]["weights"]["model"]`.

    Args:
        decay: the share of the former average that is kept at every update, from 0 to 1 (both excluded).
        every: optimizer steps from one update to the next.
        validate: validate and test with the averaged weights, too.
        load_at_end: at the end of a training that completed or was stopped, leave the model with the averaged weights,
            after the last save.

    Raises:
        ValueError: an argument is out of its range; at the run's start, the parameters are sharded.
    """

    def __init__(
        self, decay: float = 0.999, *, every: int = 1, validate: bool = True, load_at_end: bool = False
    ) -> None:
        self.decay = check_number("decay", decay, more_than=0, less_than=1)
        self.every = check_whole_number("every", every, of="optimizer steps", at_least=1)
        self.validate, self.load_at_end = validate, load_at_end
        if validate:
            self.exclusive = ("validation_weights",)
        self._average: Callable[..., object] = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch's
        self.weights: Weights = {}
        self._updates: dict[str, int] = {}
        self._aside: list[tuple[Tensor, Tensor]] = []

    def reset(self) -> None:
        """Forget the former run."""
        self.weights, self._updates = {}, {}

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Refuse sharded parameters."""
        for name, module in run.modules.items():
            if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
                raise ValueError(f"EMA averages whole parameters, those of {name!r} are sharded: use DDPEngine.")

    @on(StepEnd, lane=Lane.MEASURE)
    def update(self, run: Run, event: StepEnd) -> None:
        """Average what the optimizer in hand has stepped, where that is due."""
        if run.progress.steps % self.every:
            return
        if not self.weights:
            self.weights = {name: _copied(module) for name, module in run.modules.items()}
        stepped = {id(each) for group in run.optimizer.param_groups for each in group["params"]}
        pairs = [pair for name, module in run.modules.items() for pair in self._pairs(name, module, stepped)]
        updates = self._updates.get(run.optimizer_name, 0)
        if updates:
            averages, values = zip(*pairs, strict=True)
            self._average(averages, values, updates)
        else:
            for average, value in pairs:
                average.copy_(value)
        self._updates[run.optimizer_name] = updates + 1

    @on(ValidationStart, TestStart, lane=Lane.TRANSFORM, optional=True)
    def put_in(self, run: Run, event: ValidationStart | TestStart) -> None:
        """Evaluate with the averaged weights, if that was asked for and there are any."""
        if self.validate and self.weights.keys() == run.modules.keys():
            self._swap_in(run.modules)

    @on(ValidationEnd, ValidationCut, TestEnd, lane=Lane.TRANSFORM, optional=True)
    def put_back(self, run: Run, event: ValidationEnd | ValidationCut | TestEnd) -> None:
        """Continue with the trained weights."""
        self._swap_out()

    @on(RunFailed, lane=Lane.TRANSFORM)
    def give_back(self, run: Run, event: RunFailed) -> None:
        """Give the trained weights back, whatever failed."""
        self._swap_out()

    @on(RunClosed, lane=Lane.REPORT)
    def load(self, run: Run, event: RunClosed) -> None:
        """Leave the model with the average, if that was asked for and the training ended well."""
        if self.load_at_end and run.optimizer is not None and event.status in ("completed", "stopped") and self.weights:
            for module_name, weights in self.weights.items():
                _copy(weights, run.modules[module_name])
            run.note(f"the model has the averaged weights ({max(self._updates.values())} updates)")

    @contextmanager
    def applied(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Let modules have the averaged weights for a while.

        Args:
            modules: by their name in the task, such as `{"model": model}`.

        Raises:
            ValueError: there is no average yet, or it is of other modules.
        """
        if not self.weights or self.weights.keys() != modules.keys():
            raise ValueError(f"The average is of {sorted(self.weights) or 'nothing yet'}, not of {sorted(modules)}.")
        self._swap_in(modules)
        try:
            yield
        finally:
            self._swap_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"weights": self.weights, "updates": self._updates} if self.weights else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved average."""
        self.weights = {name: dict(weights) for name, weights in state.get("weights", {}).items()}
        self._updates = dict(state.get("updates", {}))

    def close(self) -> None:
        """Continue with the trained weights, whatever ended the run."""
        self._swap_out()

    def _pairs(self, name: str, module: nn.Module, chosen: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for key, parameter in module.named_parameters():
            if id(parameter) in chosen:
                average = self.weights[name][key].to(parameter.device)  # a loaded one is not there yet
                self.weights[name][key] = average
                yield average, parameter.detach()

    def _swap_in(self, modules: Mapping[str, nn.Module]) -> None:
        self._swap_out()
        for name, module in modules.items():
            self._aside += [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
            _copy(self.weights[name], module)

    def _swap_out(self) -> None:
        with torch.no_grad():
            while self._aside:
                parameter, value = self._aside.pop()
                parameter.copy_(value)


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {key: parameter.detach().clone() for key, parameter in module.named_parameters()}


def _copy(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(weights[key])
