"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..core.engines.options import parameters_of
from ..core.engines.weights import EVALUATED, LEFT_WEIGHTS, check_average
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.checks import check_number, check_whole_number
from ..plugins import Plugin, on

Weights = dict[str, dict[str, Tensor]]


class EMA(Plugin):
    """Maintain an exponential moving average of the parameters.

    The average starts with the weights after the first optimizer step and is updated after every step. As by default in
    `torch.optim.swa_utils.AveragedModel`, only parameters are averaged; buffers, such as batch-norm statistics, are
    used unchanged. Every checkpoint contains the average and the trained weights: `load_weights(task, path)` loads the
    average if validations used it, and `load_weights(task, path, average=False)` the trained weights.

    Args:
        decay: the share of the previous average that remains at every update, between 0 and 1, both excluded.
        every: optimizer steps between two updates; steps of several optimizers are counted separately.
        validate: validate and test with the averaged weights. `LoadBest` then loads the average of the best checkpoint.
            After the training, `trainer.validate` and `trainer.test` use the average as long as the model has the
            trained weights. If you load other weights or use another model, those are evaluated. Changes through
            `parameter.data`, or by a fused optimizer in your own loop, are not detected.
        load_at_end: load the averaged weights into the model when a training was completed or stopped, after the last
            save and before other handlers of `RunClosed`. Cannot be combined with `LoadBest`.

    Raises:
        ValueError: an argument is out of range; at the start of a run, the parameters are sharded; or the parameters of
            the model have changed since the average began.
    """

    def __init__(
        self, decay: float = 0.999, *, every: int = 1, validate: bool = True, load_at_end: bool = False
    ) -> None:
        self.decay = check_number("decay", decay, more_than=0, less_than=1)
        self.every = check_whole_number("every", every, of="optimizer steps", at_least=1)
        self.validate, self.load_at_end = validate, load_at_end
        self.exclusive = ("validation_weights",) * validate + (LEFT_WEIGHTS,) * load_at_end
        self._average: Callable[..., object] = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch's
        self.weights: Weights = {}
        self._updates: dict[str, int] = {}
        self._steps: dict[str, int] = {}  # of several optimizers, by name
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._trained: list[tuple[ref[Tensor], int]] = []  # the parameters that a training left, and their versions

    def reset(self) -> None:
        self.weights, self._updates, self._steps, self._trained = {}, {}, {}, []

    def describe(self, run: Run) -> str:
        uses = ["validates with it"] * self.validate + ["leaves it at the end"] * self.load_at_end
        return f"averages the weights, decay {self.decay:g}" + "".join(f", {use}" for use in uses)

    @on(ev.TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Raise ValueError for sharded parameters."""
        for name, module in run.modules.items():
            if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
                raise ValueError(f"EMA cannot average the parameters of {name!r}, which are sharded: use DDPEngine.")

    @on(ev.StepEnd, lane=Lane.MEASURE)
    def update(self, run: Run, event: ev.StepEnd) -> None:
        """Update the average of the stepped optimizer's parameters if it is due."""
        name, steps = run.stepping.optimizer_name, run.progress.steps
        if len(run.optimizers) > 1:
            steps = self._steps[name] = self._steps.get(name, 0) + 1
        updates, is_due = self._updates.get(name, 0), steps % self.every == 0
        if not is_due and (updates or not self.weights):
            return
        if not self.weights:
            self.weights = {name: _copied(module) for name, module in run.modules.items()}
        stepped = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
        pairs = [pair for name, module in run.modules.items() for pair in self._pairs(name, module, stepped)]
        if updates:
            averages, values = zip(*pairs, strict=True)
            self._average(averages, values, updates)
        else:
            for average, value in pairs:
                average.copy_(value)
        self._updates[name] = updates + is_due

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.TRANSFORM, optional=True)
    def put_in(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Evaluate with the averaged weights if the model has the trained weights."""
        if not (self.validate and self.weights):
            return
        if run.optimizer is not None or self._is_average_of(run.modules):
            self._swap_in(run.modules)
        elif not self.load_at_end and not any(note.startswith(EVALUATED) for note in run.report.notes):
            run.note(f"{self.name}: evaluated the current weights of the model, not the average: they have changed")

    @on(ev.ValidationEnd, ev.ValidationCut, ev.TestEnd, ev.PredictEnd, lane=Lane.TRANSFORM, optional=True)
    def put_back(self, run: Run, event: ev.ValidationEnd | ev.ValidationCut | ev.TestEnd | ev.PredictEnd) -> None:
        """Restore the trained weights after an evaluation."""
        self._swap_out()

    @on(ev.RunFailed, ev.LastBoundary, lane=Lane.TRANSFORM)
    def give_back(self, run: Run, event: ev.RunFailed | ev.LastBoundary) -> None:
        """Restore the trained weights at the end or after a failure."""
        self._swap_out()
        if run.optimizer is not None and self.validate and self.weights:
            self._trained = [(ref(parameter), parameter._version) for parameter in _parameters(run.modules)]

    @on(ev.RunClosed, lane=Lane.TRANSFORM)
    def load(self, run: Run, event: ev.RunClosed) -> None:
        """Load the averaged weights at the end if `load_at_end` is set."""
        if run.optimizer is None or event.status not in ("completed", "stopped"):
            return
        steps = self._steps or {run.stepping.optimizer_name: run.progress.steps}
        if names := [name for name, count in steps.items() if count and not self._updates.get(name)]:
            who = f"Plugin {self.name!r} never averaged the weights of {', '.join(names)}"
            run.warn(f"{who}: the optimizer made fewer than every={self.every} steps.")
        if self.load_at_end and self.weights:
            self._copy_into(run.modules)
            run.note(f"the model has the averaged weights ({max(self._updates.values())} updates)")

    @contextmanager
    def applied(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Use the averaged weights in modules within a `with` block.

        Args:
            modules: the modules by their name in the task, such as `{"model": model}`.

        Raises:
            ValueError: there is no average yet, or it belongs to other modules.
        """
        if not self.weights:
            raise ValueError("There is no average yet: it starts at the first optimizer step of a training.")
        self._swap_in(modules)
        try:
            yield
        finally:
            self._swap_out()

    def state_dict(self) -> dict[str, Any]:
        steps = {"steps": self._steps} if self._steps else {}
        if not self.weights:
            return steps
        return {"weights": self.weights, "updates": self._updates, "evaluates": self.validate, **steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = {name: dict(weights) for name, weights in state.get("weights", {}).items()}
        self._updates, self._steps = dict(state.get("updates", {})), dict(state.get("steps", {}))

    def close(self) -> None:
        self._swap_out()

    def _pairs(self, name: str, module: nn.Module, chosen: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for key, parameter in parameters_of(module):
            if id(parameter) in chosen:
                if key not in self.weights.get(name, ()):
                    self._check({name: module})
                average = self.weights[name][key].to(parameter.device)  # a loaded average may be on the CPU
                self.weights[name][key] = average
                yield average, parameter.detach()

    def _swap_in(self, modules: Mapping[str, nn.Module]) -> None:
        self._swap_out()
        self._check(modules)
        self._aside += [(parameter, parameter.detach().clone()) for parameter in _parameters(modules)]
        self._copy_into(modules)

    def _swap_out(self) -> None:
        while self._aside:
            parameter, value = self._aside.pop()
            parameter.data.copy_(value)

    def _copy_into(self, modules: Mapping[str, nn.Module]) -> None:
        self._check(modules)
        for name, module in modules.items():
            for key, parameter in parameters_of(module):
                parameter.data.copy_(self.weights[name][key])  # keeps its version, unlike an optimizer or a load

    def _check(self, modules: Mapping[str, nn.Module]) -> None:
        try:
            check_average(
                modules, {name: self.weights.get(name, {}) for name in modules}, f"The average of {self.name}"
            )
        except ValueError as error:
            raise ValueError(f"{error} Prune, parametrize, add and remove parameters before the first step.") from None

    def _is_average_of(self, modules: Mapping[str, nn.Module]) -> bool:
        parameters = list(_parameters(modules))
        return len(parameters) == len(self._trained) and all(
            trained() is parameter and version == parameter._version
            for (trained, version), parameter in zip(self._trained, parameters, strict=True)
        )


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules.values():
        yield from module.parameters()


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {key: parameter.detach().clone() for key, parameter in parameters_of(module)}
