"""`StepCheck`: repeats a step from the same state and compares all bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import isgeneratorfunction
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from heliograph import BackwardEnd, Control, EpochStart, Lane, Plugin, Progress, Run, RunClosed, TrainStart, on
from heliograph.core.rehearsal.objects import KeptObjects
from heliograph.events import Alarm, Event
from heliograph.spi import check_whole_number, count
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..digests.checksums import checksum
from .operators import CallDigests, difference_of

STEPS: Callable[[Progress], float] = attrgetter("steps")
logger = logging.getLogger("heliograph")
DROPPED = frozenset(
    "collect emit log_curve log_figure log_file log_histogram log_image log_text note track warn weigh".split()  # noqa: SIM905
)


Outcome: TypeAlias = dict[str, list[int]]  # a checksum of the loss and of each gradient, by name


class Quiet:
    """A run, its control or its stepping without side effects: it tracks, emits and requests nothing."""

    def __init__(self, part: Any) -> None:
        vars(self)["_part"] = part

    def __getattr__(self, name: str) -> Any:
        part = vars(self)["_part"]
        value = getattr(part, name)
        if name in DROPPED or (isinstance(part, Control) and callable(value)):
            return lambda *_, **__: None
        return Quiet(value) if name in ("control", "stepping") else value

    def __setattr__(self, name: str, value: object) -> None:
        pass


class Repetition:
    """Repeats the passes of a batch. Create it before the forward pass.

    It copies the random generators, the gradients, and the state of the task except the parameters: buffers, counters,
    and its own generators.

    Args:
        run: the run.
        forward: the training step, as the engine runs it.
        batch: the batch.

    Attributes:
        parameters: the trained parameters, by name.
    """

    def __init__(self, run: Run, forward: Callable[..., Any], batch: Any) -> None:
        self._run, self._forward = run, forward
        self.parameters = _trained_parameters(run)
        self._versions = {name: parameter._version for name, parameter in self.parameters.items()}
        self._batch = tree_map_only(Tensor, _copy, batch)
        self._gradients = {name: _copy(parameter.grad) for name, parameter in self.parameters.items()}
        self._restore_before = self._snapshot()
        self._loss_gradient: list[Tensor] = []
        self.loss: Tensor

    def begin(self, source: Any, batch: Any) -> Any:
        """Run the forward pass of the training, and record the gradient that its backward pass starts with."""
        returned = self._forward(source, batch)
        self.loss = _loss_of(returned)
        self.loss.register_hook(self._loss_gradient.append)  # type: ignore[no-untyped-call]
        return returned

    @property
    def changed_weights(self) -> list[str]:
        """The parameters that the passes wrote to, so that they cannot be repeated from the same state."""
        return [name for name, parameter in self.parameters.items() if parameter._version != self._versions[name]]

    @contextmanager
    def repeating(self) -> Iterator[Callable[..., Outcome]]:
        """Yield a function that repeats the passes, in a context if it is given one; restore the state at the end."""
        restore_after = self._snapshot()
        gradients = [(parameter, parameter.grad, _copy(parameter.grad)) for parameter in self.parameters.values()]
        try:
            yield self._repeat
        finally:
            restore_after()
            for parameter, gradient, copy in gradients:
                if gradient is not None:
                    gradient.copy_(copy)  # DDP may have written to its memory
                parameter.grad = gradient

    def _repeat(self, context: AbstractContextManager[object] | None = None) -> Outcome:
        self._restore_before()
        for name, parameter in self.parameters.items():
            parameter.grad = _copy(self._gradients[name])
        batch = tree_map_only(Tensor, _copy, self._batch)
        with context or nullcontext(), torch.enable_grad():
            loss = _loss_of(self._forward(Quiet(self._run), batch))
            torch.autograd.backward(loss, self._loss_gradient[0])
        return self.outcome(loss)

    def outcome(self, loss: Tensor) -> Outcome:
        """Return the outcome of both passes; waits for the device."""
        gradients = {f"the gradient of {name}": parameter.grad for name, parameter in self.parameters.items()}
        tensors = {"the loss": loss, **gradients}
        return {name: list(map(int, checksum(tensor))) for name, tensor in tensors.items() if tensor is not None}

    def _snapshot(self) -> Callable[[], None]:
        """Copy the state that the passes may change, except gradients and parameters; return what restores it."""
        run = self._run
        compiled = [part._compiled_call_impl for module in run.modules.values() for part in module.modules()]
        ours = [run, run.bus, run.plugins, run.engine, run.control, *run.plugins]
        objects = KeptObjects([run.task], leave=[*self.parameters.values(), *compiled, *ours])
        engine = dict(vars(run.engine))  # for example whether buffers were broadcast

        def restore() -> None:
            objects.restore()  # and the random generators
            vars(run.engine).update(engine)

        return restore


def _trained_parameters(run: Run) -> dict[str, Tensor]:
    parameters = {
        f"{module}.{name}": parameter
        for module, owner in run.modules.items()
        for name, parameter in owner.named_parameters()
        if parameter.requires_grad
    }
    ids = {id(parameter) for parameter in parameters.values()}
    groups = [group["params"] for optimizer in run.optimizers.values() for group in optimizer.param_groups]
    unnamed = [parameter for group in groups for parameter in group if id(parameter) not in ids]
    return parameters | {f"parameter {number} of the optimizer": tensor for number, tensor in enumerate(unnamed)}


def _loss_of(returned: Any) -> Tensor:
    """Return the tensor of the backward pass: the loss, or the sum of (sum, count)."""
    loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return loss


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)


class StepChecked(Event):
    """`StepCheck` has repeated a step; `difference` is empty if all bits are equal, else says what differs and why."""

    difference: str


class StepDiffers(RuntimeError):  # noqa: N818  # says what happened
    """A repeated step has a different outcome."""


class StepCheck(Plugin):
    """Repeat the passes of a batch from the same state every so many steps, and compare.

    The loss and all gradients must be bitwise identical. Otherwise the hardware computed wrongly (silent data
    corruption), or an operation is not deterministic. More repetitions decide which. If they agree with each
    other, the step was wrong. If all differ, the step is not deterministic, and the first operator whose outputs differ
    is named. This search runs compiled code uncompiled. The first such step is reported, later ones are counted.

    The training does not change by one bit: the generators of torch, NumPy and Python, buffers, gradients and all other
    state of the task are restored, and the metrics, events and requests of a repetition are dropped. State elsewhere in
    the program, such as a generator in a global variable, is not restored. If the step uses it, the training differs
    from one without StepCheck.

    The first micro-batch of a window is repeated. On several ranks, all repeat at the same step, with the same exchange
    of gradients, and the main rank reports for all. A repetition takes the time of both passes, waits for the device,
    and copies gradients, buffers and the batch. A change between two steps, such as a flipped bit in a weight, is not
    detected, because both passes start with it.

    Args:
        every: optimizer steps between two checks; the first step of a run is not checked, since it may initialize
            things.
        action: `warn`: a warning in the result and in the log; `raise`: StepDiffers.

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
        self.reset()

    def reset(self) -> None:
        self._checked = self._different = 0  # steps
        self._last_step = -1  # with a repetition
        self._repetition: Repetition | None = None
        self._forward: Any = None

    def describe(self, run: Run) -> str:
        return f"repeats a batch every {count(self.every, 'step', 'steps')}, and compares all bits"

    @on(TrainStart)
    def check(self, run: Run, event: TrainStart) -> None:
        if obstacle := _obstacle(run):
            raise ValueError(f"StepCheck cannot repeat a step: {obstacle}.")
        run.bus.signal(StepChecked)  # a recorder subscribes to custom events before the first batch

    @on(EpochStart, lane=Lane.REPORT)
    def wrap(self, run: Run, event: EpochStart) -> None:
        if run.stepping.forward is self._forward:
            return
        plain = run.stepping.forward

        def forward(source: Any, batch: Any) -> Any:
            self._repetition = None
            steps = run.progress.steps
            if steps % self.every or steps in (run.origin.steps, self._last_step) or run.stepping.window:
                return plain(source, batch)
            self._last_step = steps
            self._repetition = Repetition(run, plain, batch)
            return self._repetition.begin(source, batch)

        run.stepping.forward = self._forward = forward

    def next_comparison(self, run: Run) -> Alarm:
        steps = run.progress.steps
        return STEPS, steps if self._repetition is not None else (steps // self.every + 1) * self.every

    @on(BackwardEnd, lane=Lane.MEASURE, idle_until="next_comparison", optional=True)
    def compare(self, run: Run, event: BackwardEnd) -> None:
        repetition, self._repetition = self._repetition, None
        if repetition is None:
            return
        changed = repetition.changed_weights
        if run.engine.vote([float(bool(changed))])[0]:
            text = f"its passes write to {changed[0] if changed else 'a parameter of another rank'}"
            run.warn(f"StepCheck cannot repeat step {run.progress.steps} from the same state: {text}.")
            return
        difference = diagnose(run, repetition)
        self._checked += 1
        if difference:
            self._different += 1
            text = f"step {run.progress.steps}, repeated, differs: {difference}"
            if self.action == "raise":
                raise StepDiffers(f"{text[0].upper()}{text[1:]}")
            if self._different == 1:
                logger.warning("StepCheck: %s; later steps that differ are counted", text)
                run.warn(f"StepCheck: {text}")
        run.emit(StepChecked(difference))

    @on(RunClosed)
    def end(self, run: Run, event: RunClosed) -> None:
        if self._different > 1:
            run.warn(f"StepCheck: {self._different} of {self._checked} repeated steps differ.")
        elif self._checked and not self._different:
            run.note(f"{count(self._checked, 'step', 'steps')} repeated by step_check: equal, bit for bit")
        elif not self._checked and run.optimizer is not None and event.status == "completed":
            steps, hint = run.progress.steps - run.origin.steps, "A loop of your own must call run.stepping.forward."
            run.warn(f"StepCheck has repeated no step: of {steps} steps, every {self.every} is checked. {hint}")

    def close(self) -> None:
        self._repetition = self._forward = None


def diagnose(run: Run, repetition: Repetition) -> str:
    """Repeat the passes of a batch, and compare; a collective.

    Return what differs and why, on every rank; empty if all bits are equal.
    """
    original = repetition.outcome(repetition.loss)
    with repetition.repeating() as repeat:
        second = repeat()
        names = [name for name in {**original, **second} if original.get(name) != second.get(name)]
        if not run.engine.vote([float(bool(names))])[0]:
            return ""
        third = repeat()
        recorders = CallDigests(), CallDigests()
        for recorder in recorders:
            repeat(recorder)
        cause = _cause(original, second, third, difference_of(*(recorder.calls for recorder in recorders)))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = f"{names[0]}{more}; {cause}" if names else ""
    if run.engine.world_size == 1:
        return text
    return "; ".join(f"on rank {rank}: {text}" for rank, text in enumerate(run.engine.gather_objects(text)) if text)


def _cause(original: Outcome, second: Outcome, third: Outcome, operator: str | None) -> str:
    """Return why a step differs."""
    if operator is not None:
        return (
            f"not deterministic, or it draws from a generator outside the task, which repetitions advance; the first "
            f"difference between two repetitions: {operator}"
        )
    if second == third:
        return "repetitions agree with each other: the step of the training was computed wrongly (data corruption)"
    if original == third:
        return "another repetition equals the training: the repetition was computed wrongly (data corruption)"
    return "not deterministic: three repetitions differ, and no operator differed between the last two"


def _obstacle(run: Run) -> str:
    """Return why a step cannot be repeated, or an empty text."""
    if isgeneratorfunction(getattr(run.task.training_step, "__func__", run.task.training_step)):
        return "training_step yields losses by name, and optimizers step in between"
    parameters = [parameter for module in run.modules.values() for parameter in module.parameters()]
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        return "its weights are sharded, and only torch's hooks gather and reduce them"
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters):
        return "hooks on its parameters act during the backward pass, for example an optimizer"
    return ""
