"""Changes requested during a run (learning rate, plugins), made at a step boundary on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...events import Request, Run
from ...events.checks import known_names
from ...events.control import LOADED
from ...plugins.discovery import switched_off


def serve_change(run: Run, request: Request) -> tuple[str, bool]:
    # Returns why the change was refused, or an empty string, and whether anything changed.
    if refusal := refuse_change(run, request.verb, request.target, request.value):
        run.warn(f"{request.by} requested {request.what} ({request.reason}), but the change was refused: {refusal}")
        return refusal, False
    return "", (_set_learning_rate if request.verb == "set_learning_rate" else _switch)(run, request)


def restore_switches(run: Run, previous: Mapping[str, bool], *, goes_back: bool) -> None:
    """Enable and disable plugins as in the loaded state.

    Args:
        run: the run.
        previous: the plugins that were switched before the state was loaded.
        goes_back: switch plugins back that the state does not name, as in a roll-back. A resume leaves them: the
            program switched them at its start.
    """
    wanted = {name: enabled != goes_back for name, enabled in previous.items()} | run.control.switches
    run.control.switches = wanted
    for name, enabled in wanted.items():
        if name in run.plugins and run.plugins.is_enabled(name) != enabled:
            (run.plugins.enable if enabled else run.plugins.disable)(name, by=LOADED)
            run.note(f"plugin {name!r} is {'enabled' if enabled else 'disabled'}, as in the loaded state")


def refuse_change(run: Run, verb: str, target: str, value: float | None) -> str:
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
            f"plugin {name!r} requests {verb}, which needs a vote of the ranks, and votes are set up when a run "
            f"starts. Start the run with the plugin enabled."
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
        return f"the optimizers have different learning rates ({rates}). Give the name of one optimizer."
    for name in names:
        scheduler = run.schedulers.get(name)
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            return (
                f"the scheduler {type(scheduler).__name__} is not a torch LRScheduler, so it cannot be rescaled and "
                f"would undo the change at its next step."
            )
        if refusal := _refuse_size(rate, optimizers[name]):
            return refusal
        if present[name] == 0.0:
            return (
                f"the learning rate is 0 now, and no factor scales its schedule from 0 to {rate:g}. Repeat the request "
                f"when the rate is above 0."
            )
    return ""


def _refuse_size(rate: float, optimizer: Any) -> str:
    # A larger rate makes this step fail, and every resumed run too. The square root leaves room for the factors of an
    # optimizer.
    first = _rate(optimizer)
    for group in optimizer.param_groups:
        scaled = rate * float(group["lr"]) / first if first else rate
        for dtype in {
            parameter.dtype for parameter in group["params"] if parameter.is_floating_point() or parameter.is_complex()
        }:
            if scaled > (largest := torch.finfo(dtype).max ** 0.5):
                allowed = f"the learning rate of {dtype} parameters is at most {largest:.2g}"
                return f"{allowed}; with {rate:g} it would be {scaled:g}."
    return ""


def _set_learning_rate(run: Run, request: Request) -> bool:
    from ..checkpoint.compatibility import scale_optimizer, scale_scheduler, set_rate  # imported when a rate is set

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
