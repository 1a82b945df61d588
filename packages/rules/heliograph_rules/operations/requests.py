"""What rules can ask the loop for, by the ancestors' names and by ours, and functions that they can call."""

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
    """Let rule files name a function that `CallFunction` calls; return it, so that this can be a decorator.

    Args:
        function: called as `function(run, firing, **arguments)`; what it returns is not looked at.
        name: its name in files; its own by default.

    Raises:
        TypeError: it is not a function.
        ValueError: another one has this name.
    """
    called = getattr(function, "__name__", None) if name is None else name
    if not callable(function) or not isinstance(called, str):
        raise TypeError(
            f"register_function takes a function, with a name where it has none, got {function!r}, {name!r}."
        )
    if (other := _FUNCTIONS.setdefault(called, function)) is not function:
        raise ValueError(
            f"Another function is registered as {called!r}, {describe(other)}: give this one another name."
        )
    return function


def find_function(name: str, given: Mapping[str, Function]) -> Function:
    """Return the function of a name.

    Args:
        name: its name in files.
        given: further functions, by their names.

    Raises:
        RuleKeyError: there is none.
        ValueError: one is given, and another one is registered.
    """
    known = _FUNCTIONS | dict(given)
    if name not in known:
        raise RuleKeyError(f"Undefined function {name!r}.{known_names(name, known)}")
    if name in given and (other := _FUNCTIONS.get(name, given[name])) is not given[name]:
        raise ValueError(f"Another function is registered as {name!r}, {describe(other)}: give this one another name.")
    return known[name]


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
    """Return an action that asks the loop for something, with the rule as the reason.

    Args:
        verb: of the control.
        answers: the events of what is asked for; asked there, it has been done.
    """

    def ask(operation: RuleOperation, run: Run, firing: RuleFiring) -> None:  # noqa: ARG001  # a method
        if not isinstance(firing.event, answers):
            getattr(run.control, verb)(firing.reason)

    return ask


def make_withdrawal(verb: Pending) -> Callable[[RuleOperation, Run, RuleFiring], None]:
    """Return an action that takes back what was asked of the loop, with the rule as the reason."""

    def withdraw(operation: RuleOperation, run: Run, firing: RuleFiring) -> None:  # noqa: ARG001  # a method
        run.control.withdraw(verb, firing.reason)

    return withdraw


class _Requests(RuleOperation):
    """The requests that have one name in both vocabularies."""

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
    """Ask the loop, by the ancestors' names: `should_training_stop`, `should_epoch_stop`, `should_evaluate`, ..."""

    asks: Mapping[str, str] = {**_Requests.asks, "should_training_stop": "stop", "should_evaluate": "validation"}

    should_training_stop = make_request("stop")
    should_epoch_stop = make_request("end_epoch")
    should_evaluate = make_request("request_validation", VALIDATING)
    should_withdraw_training_stop = make_withdrawal("stop")
    should_withdraw_epoch_stop = make_withdrawal("end_epoch")
    should_withdraw_evaluate = make_withdrawal("validation")


class Controls(_Requests):
    """Ask the loop, by our names: `should_stop`, `should_end_epoch`, `should_validate`, `should_save`, ..."""

    asks: Mapping[str, str] = {**_Requests.asks, "should_stop": "stop", "should_validate": "validation"}

    should_stop = make_request("stop")
    should_end_epoch = make_request("end_epoch")
    should_validate = make_request("request_validation", VALIDATING)
    should_withdraw_stop = make_withdrawal("stop")
    should_withdraw_end_epoch = make_withdrawal("end_epoch")
    should_withdraw_validate = make_withdrawal("validation")


class CallFunction(RuleOperation):
    """Call a function that `register_function` knows, or that the controller was given, with the run and the firing.

    Args:
        name: what controllers call the operation.
        function: the function's name, or in Python the function itself, called as `f(run, firing, **arguments)`.
        **arguments: its further arguments.

    Raises:
        RuleTypeError: it is neither.
    """

    def __init__(self, name: str, function: str | Function, **arguments: Any) -> None:
        super().__init__(name)
        if not isinstance(function, str) and not callable(function):
            raise RuleTypeError(f"CallFunction takes the name of a function, or a function, got {show(function)}.")
        self.arguments = arguments
        self._function = function

    def bind(self, functions: Mapping[str, Function]) -> None:
        """Find the function.

        Raises:
            RuleKeyError: there is none of this name.
            RuleTypeError: it does not take the arguments.
        """
        if isinstance(self._function, str):
            self._function = find_function(self._function, functions)
        try:
            signature = inspect.signature(self._function)
        except ValueError:  # one of Python's own, without a signature
            return
        try:
            signature.bind(None, None, **self.arguments)
        except TypeError as error:
            form = ", ".join(["run", "firing", *(f"{each}=..." for each in self.arguments)])
            raise RuleTypeError(f"{describe(self._function)} cannot be called as ({form}): {error}.") from None

    def should_call(self, run: Run, firing: RuleFiring) -> None:
        """Call it."""
        assert callable(self._function)  # bound
        self._function(run, firing, **self.arguments)
