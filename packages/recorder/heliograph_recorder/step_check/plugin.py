"""Do a step once more, and compare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import isgeneratorfunction
from operator import attrgetter
from typing import Any, Literal

from heliograph import BackwardEnd, BatchStart, EpochStart, Lane, Plugin, Progress, Run, RunClosed, TrainStart, on
from heliograph.events import Alarm, Event
from heliograph.spi import check_whole_number, count

from .operators import OperatorDifference
from .repetition import Repetition
from .verdict import diagnose

STEPS: Callable[[Progress], float] = attrgetter("steps")
MOST_DIAGNOSES = 3  # of later differences the operator that was seen is the known one
logger = logging.getLogger("heliograph")


class StepChecked(Event):
    """`StepCheck` has repeated a step; `difference` says what differs and why, empty where all bits are equal."""

    difference: str


class StepDiffers(RuntimeError):  # noqa: N818  # says what happened
    """A step that was done once more came out differently."""


class StepCheck(Plugin):
    """Every so many steps, do the forward and backward pass of a batch once more from the same state, and compare.

    The loss and all gradients must be equal, bit for bit. If they are not, the hardware has computed wrongly (silent
    data corruption), or an operation is not deterministic. Two more repetitions decide which: a step that three
    repetitions contradict was wrong; repetitions that differ among themselves are not deterministic, and the first
    operator whose outputs differ is named, as far as operators are seen: not within compiled code, which runs
    uncompiled then. It is looked for at the first three differences, and what has the same cause is reported once, and
    counted. The training does not change by one bit: the global generators of torch, NumPy and Python, buffers,
    gradients and what else the task holds are put back, and what the repetition tracks or requests is dropped. Not put
    back is what the program holds elsewhere, such as a generator in a global variable: where the step draws from it,
    the training is another one than without StepCheck.

    The first micro-batch of a window is repeated. On several ranks all repeat at the same step, with the same exchange
    of gradients, and the main one reports for all. A repetition takes the time of the two passes, waits for the device,
    and copies gradients, buffers and the batch. What changes between two steps, such as a flipped bit in a weight, is
    not seen: both times the pass begins with it.

    Args:
        every: optimizer steps from one check to the next; the first step of a run is not checked, as it may set things
            up.
        action: `warn`: the result has a warning, and the log; `raise`: StepDiffers.

    Raises:
        ValueError: an argument is out of its range; at a run's start, the step cannot be repeated: it yields losses by
            name, its weights are sharded, or hooks on them act in the backward pass.
        StepDiffers: a step differs, with `action="raise"`.
    """

    affects_training = False

    def __init__(self, every: int = 1000, *, action: Literal["warn", "raise"] = "warn") -> None:
        if action not in ("warn", "raise"):
            raise ValueError(f"StepCheck(action=) is 'warn' or 'raise', got {action!r}.")
        self.every, self.action = check_whole_number("every", every, of="optimizer steps", at_least=1), action
        self._forget()

    def reset(self) -> None:
        """Forget the former run."""
        self._forget()

    def _forget(self) -> None:
        self._checked = self._found = 0
        self._causes: dict[tuple[str, ...], int] = {}  # how many steps each made differ
        self._operator: OperatorDifference | None = None  # that was seen to differ
        self._is_due = False
        self._last = -1  # the step before which a batch was repeated last
        self._repetition: Repetition | None = None
        self._forward: Any = None

    def describe(self, run: Run) -> str:
        """Say how often."""
        return f"repeats a batch every {count(self.every, 'step', 'steps')}, and compares all bits"

    @on(TrainStart)
    def check(self, run: Run, event: TrainStart) -> None:
        """Refuse what cannot be repeated."""
        if why := _obstacle(run):
            raise ValueError(f"StepCheck cannot repeat a step: {why}.")
        run.bus.signal(StepChecked)  # a recorder subscribes to the custom events that there are before the first batch

    @on(EpochStart, lane=Lane.REPORT)
    def wrap(self, run: Run, event: EpochStart) -> None:
        """Look at the forward pass from now on."""
        if run.stepping.forward is self._forward:
            return
        plain = run.stepping.forward

        def forward(of: Any, batch: Any) -> Any:
            if not self._is_due:
                return plain(of, batch)
            self._is_due = False
            self._repetition = Repetition(run, plain, batch)
            returned = plain(of, batch)
            self._repetition.watch(returned)
            return returned

        run.stepping.forward = self._forward = forward

    def next_due(self, run: Run) -> Alarm:
        """Return the step before which a batch is repeated next."""
        steps = run.progress.steps
        due = steps % self.every == 0 and steps > run.origin.steps and steps != self._last
        return STEPS, steps if due else (steps // self.every + 1) * self.every

    @on(BatchStart, lane=Lane.REPORT, idle_until="next_due", optional=True)
    def begin(self, run: Run, event: BatchStart) -> None:
        """Let the batch be repeated, if it is the first of a window that is due."""
        steps = run.progress.steps
        self._repetition = None
        if not run.stepping.window and steps % self.every == 0 and steps > run.origin.steps and steps != self._last:
            self._is_due, self._last = not run.control.skips_batch, steps

    def next_comparison(self, run: Run) -> Alarm:
        """Return the step whose passes are compared next: this one, if its batch is to be repeated."""
        steps = run.progress.steps
        return STEPS, steps if self._repetition is not None else (steps // self.every + 1) * self.every

    @on(BackwardEnd, lane=Lane.MEASURE, idle_until="next_comparison", optional=True)
    def compare(self, run: Run, event: BackwardEnd) -> None:
        """Repeat the passes that have just been done."""
        repetition, self._repetition = self._repetition, None
        if repetition is None:
            return
        changed = repetition.changed_weights
        if run.engine.vote([float(bool(changed))])[0]:
            what = changed[0] if changed else "a parameter on another rank"
            run.warn(
                f"StepCheck has not checked step {run.progress.steps}: its passes write to {what}, so that they cannot "
                f"be repeated from the same state."
            )
            return
        looks = self._found < MOST_DIAGNOSES
        found = diagnose(run, repetition, known=self._operator, names_operator=looks)
        self._checked += 1
        self._operator = found.operator or self._operator
        if found.text:
            self._report(run, f"step {run.progress.steps}, repeated, differs: {found.text}", found.causes)
        run.emit(StepChecked(found.text))

    @on(RunClosed)
    def end(self, run: Run, event: RunClosed) -> None:
        """Say how many steps were checked, and how many differ."""
        if self._found > 1:
            each = "; ".join(f"{times}: {', '.join(causes)}" for causes, times in self._causes.items())
            run.warn(f"StepCheck: {self._found} of {self._checked} repeated steps differ. {each}.")
        elif self._checked and not self._found:
            run.note(f"{count(self._checked, 'step', 'steps')} repeated by step_check: equal, bit for bit")
        elif not self._checked and run.optimizer is not None and event.status == "completed":
            run.warn(
                f"StepCheck has repeated no step: the run has done {run.progress.steps - run.origin.steps}, and one is "
                f"repeated every {self.every}, where the loop calls run.stepping.forward."
            )

    def close(self) -> None:
        """Let go of a batch."""
        self._repetition = self._forward = None
        self._is_due = False

    def _report(self, run: Run, text: str, causes: tuple[str, ...]) -> None:
        """Report what has a new cause, and count what has a known one."""
        self._found += 1
        times = self._causes[causes] = self._causes.get(causes, 0) + 1
        if self.action == "raise":
            logger.warning("StepCheck: %s", text)
            raise StepDiffers(f"{text[0].upper()}{text[1:]}")
        if times == 1:
            logger.warning("StepCheck: %s; later steps that differ for the same cause are counted", text)
            run.warn(f"StepCheck: {text}")


def _obstacle(run: Run) -> str:
    """Return why a step cannot be repeated, empty where it can."""
    if isgeneratorfunction(getattr(run.task.training_step, "__func__", run.task.training_step)):
        return "training_step yields losses by name, and optimizers step in between"
    parameters = [each for module in run.modules.values() for each in module.parameters()]
    if any(hasattr(each, "to_local") for each in parameters):
        return "its weights are sharded, which only torch's own hooks gather and reduce"
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters):
        return "hooks on its parameters act as soon as there is a gradient, as an optimizer in the backward pass does"
    return ""
