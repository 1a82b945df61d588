"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..core.engines.weights import EVALUATED, LEFT_WEIGHTS, check_average, parameters_of
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.checks import check_number, check_whole_number
from ..plugins import Plugin, on

Weights = dict[str, dict[str, Tensor]]


class EMA(Plugin):
    """Keep an exponential moving average of the parameters.

    It is updated after every optimizer step. The average begins with the weights of the first step. Only parameters are
    averaged, as `torch.optim.swa_utils.AveragedModel` does by default; buffers such as the statistics of a batch norm
    are used as they are (averaging counters would truncate them). It is saved with every checkpoint, beside the weights
    that are trained: `load_weights(task, path)` loads the average, if validations were measured on it, and
    `load_weights(task, path, average=False)` the trained weights.

    Args:
        decay: the share of the former average that is kept at every update, from 0 to 1 (both excluded).
        every: optimizer steps from one update to the next; the steps of several optimizers are counted separately.
        validate: validate and test with the averaged weights. `LoadBest` then loads the average of the
            best checkpoint, as that was measured. `trainer.validate` and `trainer.test` do so while the model has the
            weights that the training left; if others were loaded, or it is another model, these are evaluated. Changes
            through `parameter.data`, or by a fused optimizer in your own loop, are not noticed.
        load_at_end: at the end of a training that completed or was stopped, leave the model with the averaged weights,
            after the last save, and before other handlers of `RunClosed`; not together with `LoadBest`.

    Raises:
        ValueError: an argument is out of its range; at the run's start, the parameters are sharded; the model has other
            parameters than when the average began.
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
        """Forget the former run."""
        self.weights, self._updates, self._steps, self._trained = {}, {}, {}, []

    def describe(self, run: Run) -> str:
        """Say what is averaged, and what for."""
        uses = ["validates with it"] * self.validate + ["leaves it at the end"] * self.load_at_end
        return f"averages the weights, decay {self.decay:g}" + "".join(f", {use}" for use in uses)

    @on(ev.TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Refuse sharded parameters."""
        for name, module in run.modules.items():
            if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
                raise ValueError(f"EMA averages whole parameters, those of {name!r} are sharded: use DDPEngine.")

    @on(ev.StepEnd, lane=Lane.MEASURE)
    def update(self, run: Run, event: ev.StepEnd) -> None:
        """Average what the optimizer in hand has stepped, where that is due; before its first update, copy it."""
        name, steps = run.stepping.optimizer_name, run.progress.steps
        if len(run.optimizers) > 1:
            steps = self._steps[name] = self._steps.get(name, 0) + 1
        updates, is_due = self._updates.get(name, 0), steps % self.every == 0
        if not is_due and (updates or not self.weights):
            return
        if not self.weights:
            self.weights = {name: _copied(module) for name, module in run.modules.items()}
        stepped = {id(each) for group in run.optimizer.param_groups for each in group["params"]}
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
        """Evaluate with the averaged weights, if that was asked for, there are any, and they are those of the model."""
        if not (self.validate and self.weights):
            return
        if run.optimizer is not None or self._is_average_of(run.modules):
            self._swap_in(run.modules)
        elif not self.load_at_end and not any(note.startswith(EVALUATED) for note in run.report.notes):
            run.note(
                f"{self.name}: evaluated with the weights that the model has, not with the average, which is of the "
                f"weights that the training left: others were loaded since, or it is another model"
            )

    @on(ev.ValidationEnd, ev.ValidationCut, ev.TestEnd, ev.PredictEnd, lane=Lane.TRANSFORM, optional=True)
    def put_back(self, run: Run, event: ev.ValidationEnd | ev.ValidationCut | ev.TestEnd | ev.PredictEnd) -> None:
        """Continue with the trained weights."""
        self._swap_out()

    @on(ev.RunFailed, ev.LastBoundary, lane=Lane.TRANSFORM)
    def give_back(self, run: Run, event: ev.RunFailed | ev.LastBoundary) -> None:
        """Give the trained weights back, whatever failed, and note which the training leaves."""
        self._swap_out()
        if run.optimizer is not None and self.validate and self.weights:
            self._trained = [(ref(parameter), parameter._version) for parameter in _parameters(run.modules)]

    @on(ev.RunClosed, lane=Lane.TRANSFORM)
    def load(self, run: Run, event: ev.RunClosed) -> None:
        """Leave the model with the average, if that was asked for and the training ended well."""
        if run.optimizer is None or event.status not in ("completed", "stopped"):
            return
        steps = self._steps or {run.stepping.optimizer_name: run.progress.steps}
        if names := [name for name, count in steps.items() if count and not self._updates.get(name)]:
            run.warn(
                f"Plugin {self.name!r} never averaged the weights of {', '.join(names)}: it does so every {self.every} "
                f"steps of an optimizer, and there were fewer."
            )
        if self.load_at_end and self.weights:
            self._copy_into(run.modules)
            run.note(f"the model has the averaged weights ({max(self._updates.values())} updates)")

    @contextmanager
    def applied(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Let modules have the averaged weights for a while.

        Args:
            modules: by their name in the task, such as `{"model": model}`.

        Raises:
            ValueError: there is no average yet, or it is of other modules.
        """
        if not self.weights:
            raise ValueError("There is no average yet: it begins with the first optimizer step of a training.")
        self._swap_in(modules)
        try:
            yield
        finally:
            self._swap_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the average, and whether validations are measured on it."""
        steps = {"steps": self._steps} if self._steps else {}
        if not self.weights:
            return steps
        return {"weights": self.weights, "updates": self._updates, "evaluates": self.validate, **steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved average."""
        self.weights = {name: dict(weights) for name, weights in state.get("weights", {}).items()}
        self._updates, self._steps = dict(state.get("updates", {})), dict(state.get("steps", {}))

    def close(self) -> None:
        """Continue with the trained weights, whatever ended the run."""
        self._swap_out()

    def _pairs(self, name: str, module: nn.Module, chosen: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for key, parameter in parameters_of(module):
            if id(parameter) in chosen:
                if key not in self.weights.get(name, ()):
                    self._check({name: module})
                average = self.weights[name][key].to(parameter.device)  # a loaded one is not there yet
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
            raise ValueError(
                f"{error} Pruning and parametrizations give parameters other names: apply them, as all that adds or "
                f"removes parameters, before the first step."
            ) from None

    def _is_average_of(self, modules: Mapping[str, nn.Module]) -> bool:
        """Return whether modules are those of the training, and nothing has written to their parameters since."""
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
