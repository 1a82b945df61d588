"""Operations that make requests of the loop, call a function, or scale the learning rate or a loss."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import heliograph as h
from heliograph.events import Event, Pending
from heliograph.spi import describe, is_number, known_names, scale_optimizer, scale_scheduler

from ..base import Action, RuleFiring, RuleOperation
from ..errors import RuleError, RuleKeyError, RuleTypeError, show

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
_FUNCTIONS: dict[str, Function] = {}


def register_function(function: F, name: str | None = None) -> F:
    """Register a function for `CallFunction`, so that rule files can name it; usable as a decorator.

    Args:
        function: called as `function(run, firing, **arguments)`; its result is ignored.
        name: the name in files; by default the name of the function.

    Returns:
        The function.

    Raises:
        TypeError: `function` is not callable, or has no name.
        ValueError: another function with this name is registered.
    """
    file_name = getattr(function, "__name__", None) if name is None else name
    if not callable(function) or not isinstance(file_name, str):
        raise TypeError(f"register_function takes a function and a name, got {function!r} and {name!r}.")
    _check_registered(file_name, function, _FUNCTIONS.setdefault(file_name, function))
    return function


def _check_registered(name: str, function: Function, registered: Function) -> None:
    if registered is not function:
        raise ValueError(
            f"Another function is registered as {name!r}, {describe(registered)}: choose a different name."
        )


def find_function(name: str, additions: Mapping[str, Function]) -> Function:
    functions = _FUNCTIONS | dict(additions)
    if name not in functions:
        raise RuleKeyError(f"Undefined function {name!r}.{known_names(name, functions)}")
    _check_registered(name, functions[name], _FUNCTIONS.get(name, functions[name]))
    return functions[name]


BEFORE_SAVES = (
    h.EpochStart, h.BatchStart, h.GradientsReady, h.StepEnd, h.BatchEnd, h.Log, h.ValidationEnd, h.EpochEnd,
    h.LastBoundary, h.TrainEnd,
)  # fmt: skip
EVALUATING = (
    h.ValidationStart, h.ValidationBatchStart, h.ValidationBatchEnd, h.TestStart, h.TestBatchStart, h.TestBatchEnd,
    h.PredictStart, h.PredictBatchStart, h.PredictBatchEnd,
)  # fmt: skip


class ControlRequest(NamedTuple):
    """A request to the control.

    Attributes:
        method: the method of the control.
        asks, only_on, answers: see `RuleOperation`.
    """

    method: str
    asks: str = ""
    only_on: tuple[type[Event], ...] = ()
    answers: tuple[type[Event], ...] = ()


REQUESTS: Mapping[str, ControlRequest] = {
    "stop": ControlRequest("stop", "stop"),
    "end_epoch": ControlRequest("end_epoch"),
    "validate": ControlRequest("request_validation", "validation", answers=(h.ValidationEnd,)),
    "save": ControlRequest("request_save", "save", answers=(h.SavePoint, h.CheckpointSaved)),
    "log": ControlRequest("request_log", "log", answers=(h.Log,)),
    "next_phase": ControlRequest("next_phase", "next_phase"),
    "skip_batch": ControlRequest("skip_batch", "skip_batch", (h.BatchStart,)),
    "hold_step": ControlRequest("hold_step", "hold_step", (h.BatchStart,)),
    "skip_step": ControlRequest("skip_step", "skip_step", (h.GradientsReady,)),
    "veto_stop": ControlRequest("veto_stop", "veto_stop", (h.ShouldStop,)),
    "veto_save": ControlRequest("veto_save", "veto_save", BEFORE_SAVES),
    "cut_validation": ControlRequest("cut_validation", only_on=EVALUATING),
}
WITHDRAWALS: Mapping[str, Pending] = {
    "stop": "stop",
    "end_epoch": "end_epoch",
    "validate": "validation",
    "save": "save",
    "log": "log",
}


class Controls(RuleOperation):
    """Make requests by the names of Heliograph: `should_stop`, `should_validate`, `should_save`, ..."""

    names: Mapping[str, str] = {}  # other names of requests

    def __init__(self, name: str) -> None:
        super().__init__(name)
        requests = {f"should_{self.names.get(word, word)}": request for word, request in REQUESTS.items()}
        self.asks = {action: request.asks for action, request in requests.items() if request.asks}
        self.only_on = {action: request.only_on for action, request in requests.items() if request.only_on}
        self.answers = {action: request.answers for action, request in requests.items()}
        self._actions: dict[str, Action] = {
            action: partial(self._request, request) for action, request in requests.items()
        }
        for word, verb in WITHDRAWALS.items():
            self._actions[f"should_withdraw_{self.names.get(word, word)}"] = partial(self._withdraw, verb)

    def actions(self) -> dict[str, Action]:
        return self._actions

    def _request(self, request: ControlRequest, run: h.Run, firing: RuleFiring) -> None:
        if not isinstance(firing.event, request.answers):
            getattr(run.control, request.method)(firing.reason)

    def _withdraw(self, verb: Pending, run: h.Run, firing: RuleFiring) -> None:
        run.control.withdraw(verb, firing.reason)


class HFControls(Controls):
    """Make requests by the names of fms-hf-tuning: `should_training_stop`, `should_evaluate`, ..."""

    names: Mapping[str, str] = {"stop": "training_stop", "end_epoch": "epoch_stop", "validate": "evaluate"}


class CallFunction(RuleOperation):
    """Call a registered function, or a function of the controller, with the run and the firing.

    Args:
        name: the name that controllers use.
        function: the name of the function or, in Python, the function itself, called as `f(run, firing, **arguments)`.
        **arguments: its further arguments.

    Raises:
        RuleTypeError: `function` is neither a name nor callable.
    """

    def __init__(self, name: str, function: str | Function, **arguments: Any) -> None:
        super().__init__(name)
        if not isinstance(function, str) and not callable(function):
            raise RuleTypeError(f"CallFunction takes a function or the name of one, got {show(function)}.")
        self.arguments = arguments
        self._function = function

    def bind(self, functions: Mapping[str, Function]) -> None:
        if isinstance(self._function, str):
            self._function = find_function(self._function, functions)
        try:
            signature = inspect.signature(self._function)
        except ValueError:  # a builtin without a signature
            return
        try:
            signature.bind(None, None, **self.arguments)
        except TypeError as error:
            form = ", ".join(["run", "firing", *(f"{name}=..." for name in self.arguments)])
            raise RuleTypeError(f"{describe(self._function)} cannot be called as ({form}): {error}.") from None

    def should_call(self, run: h.Run, firing: RuleFiring) -> None:
        assert callable(self._function)  # bind() has replaced a name
        self._function(run, firing, **self.arguments)


logger = logging.getLogger("heliograph")


class ScaleLearningRate(RuleOperation):
    """Multiply the learning rate by a factor, now and in the rest of its schedule.

    The scheduler's base rates, maximum rates and `eta_min` are scaled too; the `min_lr` of a plateau scheduler does not
    change. Checkpoints contain the result.

    Args:
        name: the name that controllers use.
        factor: a positive number.
        minimum: a lower bound of the scaled rates. All groups of an optimizer are scaled by the same factor, so their
            ratios stay. A scheduler may go below it later.
        optimizer: the name of an optimizer; by default all of them.

    Raises:
        RuleError: a number is out of range; during the run, the optimizer does not exist.
    """

    shared = True

    def __init__(self, name: str, factor: float, minimum: float = 0.0, optimizer: str | None = None) -> None:
        super().__init__(name)
        if not is_number(factor) or not 0 < factor < inf:
            raise RuleError(f"factor must be a positive number, for example 0.5, got {show(factor)}.")
        if not is_number(minimum) or not 0 <= minimum < inf:
            raise RuleError(f"minimum must be a learning rate of at least 0, got {show(minimum)}.")
        if optimizer is not None and not isinstance(optimizer, str):
            raise RuleError(f"optimizer must be the name of an optimizer, got {show(optimizer)}.")
        self.factor, self.minimum, self.optimizer = factor, minimum, optimizer

    def should_scale(self, run: h.Run, firing: RuleFiring) -> None:
        optimizers, schedulers = run.optimizers, run.schedulers
        names = list(optimizers) if self.optimizer is None else [self.optimizer]
        for name in names:
            if name not in optimizers:
                raise RuleError(f"Cannot scale optimizer {name!r}: it does not exist.{known_names(name, optimizers)}")
            groups = optimizers[name].param_groups
            factor = self._bound([float(group["lr"]) for group in groups])
            scale_optimizer(optimizers[name], factor)
            if name in schedulers:
                scale_scheduler(schedulers[name], factor)
            rates = ", ".join(f"{float(group['lr']):.6g}" for group in groups)
            logger.info("learning rate of %r scaled by %.6g to %s: %s", name, factor, rates, firing.reason)

    def _bound(self, rates: Iterable[float]) -> float:
        # The minimum never increases a rate.
        bounds = [min(1.0, self.minimum / rate) for rate in rates if rate > 0]
        return max([self.factor, *bounds])


class ScaleLoss(RuleOperation):
    """Multiply the loss of the current micro-batch by a factor, for its backward pass only.

    Args:
        name: the name that controllers use.
        factor: a finite number.

    Raises:
        RuleError: the factor is not a finite number.
    """

    shared = True
    only_on: Mapping[str, tuple[type[Event], ...]] = {"should_scale": (h.BatchStart,)}
    asks: Mapping[str, str] = {"should_scale": "scale_loss"}

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(name)
        if not is_number(factor) or not -inf < factor < inf:
            raise RuleError(f"factor must be a finite number, for example 0.5, got {show(factor)}.")
        self.factor = factor

    def should_scale(self, run: h.Run, firing: RuleFiring) -> None:
        run.control.scale_loss(self.factor, firing.reason)
