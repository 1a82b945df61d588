"""Operations that make requests of the loop, and `CallFunction`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from heliograph import (
    BatchEnd,
    BatchStart,
    CheckpointSaved,
    EpochEnd,
    EpochStart,
    GradientsReady,
    LastBoundary,
    Log,
    PredictBatchEnd,
    PredictBatchStart,
    PredictStart,
    Run,
    SavePoint,
    ShouldStop,
    StepEnd,
    TestBatchEnd,
    TestBatchStart,
    TestStart,
    TrainEnd,
    ValidationBatchEnd,
    ValidationBatchStart,
    ValidationEnd,
    ValidationStart,
)
from heliograph.events import Event, Pending
from heliograph.spi import describe, known_names

from ..base import RuleFiring, RuleOperation
from ..errors import RuleKeyError, RuleTypeError, show

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
    EpochStart, BatchStart, GradientsReady, StepEnd, BatchEnd, Log, ValidationEnd, EpochEnd, LastBoundary, TrainEnd,
)  # fmt: skip
EVALUATING = (
    ValidationStart, ValidationBatchStart, ValidationBatchEnd, TestStart, TestBatchStart, TestBatchEnd,
    PredictStart, PredictBatchStart, PredictBatchEnd,
)  # fmt: skip
Verb = Literal["stop", "end_epoch", "request_log", "request_validation", "request_save", "next_phase", "skip_batch", "hold_step", "skip_step", "veto_stop", "veto_save", "cut_validation"]  # fmt: skip  # noqa: E501


LOGGING, VALIDATING, SAVING = (Log,), (ValidationEnd,), (SavePoint, CheckpointSaved)


def make_request(verb: Verb, answers: tuple[type[Event], ...] = ()) -> Callable[[RuleOperation, Run, RuleFiring], None]:
    # The reason of the request is the rule.
    def ask(operation: RuleOperation, run: Run, firing: RuleFiring) -> None:  # noqa: ARG001  # a method
        if not isinstance(firing.event, answers):
            getattr(run.control, verb)(firing.reason)

    return ask


def make_withdrawal(verb: Pending) -> Callable[[RuleOperation, Run, RuleFiring], None]:
    def withdraw(operation: RuleOperation, run: Run, firing: RuleFiring) -> None:  # noqa: ARG001  # a method
        run.control.withdraw(verb, firing.reason)

    return withdraw


class _Requests(RuleOperation):
    """The requests that have the same name in both operations."""

    only_on: Mapping[str, tuple[type[Event], ...]] = {
        "should_skip_batch": (BatchStart,),
        "should_hold_step": (BatchStart,),
        "should_skip_step": (GradientsReady,),
        "should_veto_stop": (ShouldStop,),
        "should_veto_save": BEFORE_SAVES,
        "should_cut_validation": EVALUATING,
    }
    asks: Mapping[str, str] = {
        "should_log": "log",
        "should_save": "save",
        "should_skip_batch": "skip_batch",
        "should_skip_step": "skip_step",
        "should_hold_step": "hold_step",
        "should_next_phase": "next_phase",
        "should_veto_stop": "veto_stop",
        "should_veto_save": "veto_save",
    }
    answers: Mapping[str, tuple[type[Event], ...]] = {
        "should_log": LOGGING,
        "should_save": SAVING,
        "should_evaluate": VALIDATING,
        "should_validate": VALIDATING,
    }

    should_save = make_request("request_save", SAVING)
    should_log = make_request("request_log", LOGGING)
    should_next_phase = make_request("next_phase")
    should_skip_batch = make_request("skip_batch")
    should_hold_step = make_request("hold_step")
    should_skip_step = make_request("skip_step")
    should_veto_stop = make_request("veto_stop")
    should_veto_save = make_request("veto_save")
    should_withdraw_save = make_withdrawal("save")
    should_withdraw_log = make_withdrawal("log")
    should_cut_validation = make_request("cut_validation")


class HFControls(_Requests):
    """Make requests by the names of fms-hf-tuning: `should_training_stop`, `should_evaluate`, ..."""

    asks: Mapping[str, str] = {**_Requests.asks, "should_training_stop": "stop", "should_evaluate": "validation"}

    should_training_stop = make_request("stop")
    should_epoch_stop = make_request("end_epoch")
    should_evaluate = make_request("request_validation", VALIDATING)
    should_withdraw_training_stop = make_withdrawal("stop")
    should_withdraw_epoch_stop = make_withdrawal("end_epoch")
    should_withdraw_evaluate = make_withdrawal("validation")


class Controls(_Requests):
    """Make requests by the names of Heliograph: `should_stop`, `should_validate`, `should_save`, ..."""

    asks: Mapping[str, str] = {**_Requests.asks, "should_stop": "stop", "should_validate": "validation"}

    should_stop = make_request("stop")
    should_end_epoch = make_request("end_epoch")
    should_validate = make_request("request_validation", VALIDATING)
    should_withdraw_stop = make_withdrawal("stop")
    should_withdraw_end_epoch = make_withdrawal("end_epoch")
    should_withdraw_validate = make_withdrawal("validation")


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

    def should_call(self, run: Run, firing: RuleFiring) -> None:
        assert callable(self._function)  # bind() has replaced a name
        self._function(run, firing, **self.arguments)
