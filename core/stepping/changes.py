"""Changes of a run that were requested, such as of its learning rate: made at a boundary, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...events import Request, Run
from ...events.checks import known_names
from ...events.control import LOADED
from ...plugins.discovery import switched_off
from ..checkpoint.state.rates import scale_optimizer, scale_scheduler, set_rate
from ..engines.options import modules_of
from .optimizers import held_parameters


def serve_change(run: Run, request: Request) -> tuple[str, bool]:
    """Make a change; return why it cannot be made, which is a warning of the result, or nothing; and if it did any."""
    if refusal := refuse_change(run, request.verb, request.target, request.value):
        run.warn(f"{request.by} requested {request.what} ({request.reason}), and it could not be done: {refusal}")
        return refusal, False
    return "", (_set_learning_rate if request.verb == "set_learning_rate" else _switch)(run, request)


def restore_switches(run: Run, former: Mapping[str, bool], *, goes_back: bool) -> None:
    """Enable and disable plugins as in the loaded state.

    Args:
        run: the run.
        former: the plugins that were switched before that.
        goes_back: whether to switch those back that the state does not name, as in a roll-back. A resume keeps them:
            the program switched them at its start.
    """
    wanted = {name: enabled != goes_back for name, enabled in former.items()} | run.control.switches
    run.control.switches = wanted
    for name, enabled in wanted.items():
        if name in run.plugins and run.plugins.is_enabled(name) != enabled:
            (run.plugins.enable if enabled else run.plugins.disable)(name, by=LOADED)
            run.note(f"plugin {name!r} is {'enabled' if enabled else 'disabled'}, as in the loaded state")


def refuse_change(run: Run, verb: str, target: str, value: float | None) -> str:
    """Return why a change cannot be made now; empty if it can."""
    if verb == "set_learning_rate":
        assert value is not None  # its verb takes one
        return _refuse_rate(run, value, target)
    return _refuse_switch(run, target, enabled=verb == "enable_plugin")


def _refuse_switch(run: Run, name: str, *, enabled: bool) -> str:
    if name not in run.plugins:
        return f"there is no plugin {name!r}.{known_names(name, run.plugins.names())}"
    if not enabled or run.plugins.is_enabled(name):
        return ""
    if switched_off(name):
        return f"the environment keeps plugin {name!r} off."
    control, asks = run.control, getattr(run.plugins[name], "asks", ())
    voted = {"skip_batch": control.votes_on_batches, "skip_step": control.votes_on_steps}
    for verb in [verb for verb, votes in voted.items() if control.is_shared and verb in asks and not votes]:
        return (
            f"plugin {name!r} asks for {verb}, on which the ranks have to vote, and whether they do was decided when "
            f"the run began: begin it with the plugin enabled."
        )
    return ""


def _refuse_rate(run: Run, rate: float, optimizer: str) -> str:
    optimizers: Mapping[str, Any] = run.optimizers
    if optimizer and optimizer not in optimizers:
        return f"there is no optimizer {optimizer!r}.{known_names(optimizer, optimizers)}"
    names = [optimizer] if optimizer else list(optimizers)
    present = {name: _rate(optimizers[name]) for name in names}
    if len(set(present.values())) > 1:
        rates = ", ".join(f"{name} has {value:g}" for name, value in present.items())
        return f"the optimizers have different rates ({rates}): name the one that is meant."
    for name in names:
        scheduler = run.schedulers.get(name)
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            return (
                f"the scheduler {type(scheduler).__name__} is not one of torch, so what it computes rates from is not "
                f"known, and it would undo the change at its next step."
            )
        if refusal := _refuse_size(rate, optimizers[name]):
            return refusal
        if present[name] == 0.0:
            return (
                "the learning rate is 0 now, so there is no factor by which its schedule could be scaled to "
                f"{rate:g}: ask again when it is not."
            )
    return ""


def _refuse_size(rate: float, optimizer: Any) -> str:
    """Return why a rate is so large that a step would fail, and so would each resumed run; empty if it is not.

    The square root leaves room for what an optimizer multiplies it by.
    """
    first = _rate(optimizer)
    for group in optimizer.param_groups:
        own = rate * float(group["lr"]) / first if first else rate
        for dtype in {each.dtype for each in group["params"] if each.is_floating_point() or each.is_complex()}:
            if own > (largest := torch.finfo(dtype).max ** 0.5):
                allowed = f"the learning rate of {dtype} parameters is at most {largest:.2g}"
                return f"{allowed}; with {rate:g} it would be {own:g}."
    return ""


def _set_learning_rate(run: Run, request: Request) -> bool:
    assert request.value is not None  # its verb takes one
    changed = False
    for name in [request.target] if request.target else run.optimizers:
        optimizer = run.optimizers[name]
        first = _rate(optimizer)
        changed = changed or first != request.value
        parts = [float(group["lr"]) / first for group in optimizer.param_groups]
        scale_optimizer(optimizer, request.value / first)
        for group, part in zip(optimizer.param_groups, parts, strict=True):
            set_rate(group, "lr", request.value * part)  # the rate itself, without the rounding of the factor
        if name in run.schedulers:
            scale_scheduler(run.schedulers[name], request.value / first)
    return changed


def _switch(run: Run, request: Request) -> bool:
    enabled = request.verb == "enable_plugin"
    changed: bool = run.plugins.is_enabled(request.target) != enabled
    (run.plugins.enable if enabled else run.plugins.disable)(request.target, by=request.by)
    return changed


def _rate(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"])


REMEDY = "Change the model before fit, which makes the optimizer of its parameters."


class GivenModules:
    """The modules of a task before the handlers of `TrainStart`, which come after its optimizers are made.

    Args:
        task: the task.
    """

    def __init__(self, task: Any) -> None:
        self._task, self._modules = task, modules_of(task)
        self._parameters = [each for module in self._modules.values() for each in module.parameters()]

    def check(self, optimizers: Iterable[torch.optim.Optimizer], world_size: int) -> None:
        """Raise ValueError where a handler has put modules into the task that would not be trained."""
        now = modules_of(self._task)
        for name in now.keys() | self._modules.keys():
            if now.get(name) is not self._modules.get(name):
                raise ValueError(
                    f"A handler of TrainStart replaced, added or removed the task's module {name!r}: the run trains, "
                    f"moves and saves those that fit was given. {REMEDY}"
                )
        before, held = {id(each) for each in self._parameters}, set().union(*map(held_parameters, optimizers))
        added = {
            f"{name}.{part}": each
            for name, module in now.items()
            for part, each in module.named_parameters()
            if id(each) not in before and each.requires_grad
        }
        names = [name for name, each in added.items() if world_size > 1 or id(each) not in held]
        if names:
            what = "no optimizer holds" if world_size == 1 else "the ranks would not exchange gradients of"
            raise ValueError(
                f"A handler of TrainStart put parameters into the task that {what}: {', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}. They would not be trained. {REMEDY}"
                + (" Or add them there: run.optimizer.add_param_group({'params': [...]})." if world_size == 1 else "")
            )
