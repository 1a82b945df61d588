"""State of plugins, rules and handlers that no `state_dict` shows."""

from __future__ import annotations

from math import sin
from random import Random
from typing import Any, ClassVar

import heliograph as h
from heliograph.packages.tests.torture.hidden import Hidden
from heliograph.packages.tests.torture.hidden_in_tasks import ThirdParty
from heliograph.packages.tests.torture.parts import Net, Parts
from heliograph_rules import RuleController, RuleFiring, register_function
from torch import Tensor


class InPlugin(Hidden, is_base=True):
    """A plugin that has a state."""

    place = "plugin"
    kind: ClassVar[type[h.Plugin]]

    def hide(self, parts: Parts) -> None:
        plugin = self.kind()
        parts.plugins[plugin.name] = plugin


class Forgets(h.Plugin):
    def __init__(self) -> None:
        self.count = 0

    @h.on(h.BatchStart)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        self.count += 1
        run.control.scale_loss(1 + sin(self.count) / 2, "it counts")


class Attribute(InPlugin):
    """A counter that a plugin goes by, and does not save."""

    row, kind = "E3", Forgets


class HoldsPython(h.Plugin):
    def __init__(self) -> None:
        self.generator = Random(3)

    @h.on(h.BatchStart)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        run.control.scale_loss(0.5 + self.generator.random(), "it draws")


class HeldGenerator(InPlugin):
    """A generator in a plugin."""

    row, kind = "E3", HoldsPython


class HoldsThirdParty(h.Plugin):
    def __init__(self) -> None:
        self.generator = ThirdParty()

    @h.on(h.BatchStart)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        run.control.scale_loss(0.5 + self.generator.random(), "it draws")


class ThirdPartyGenerator(InPlugin):
    """A third party's generator in a plugin."""

    row, kind = "E3", HoldsThirdParty


class Stashes(h.Plugin):
    """Adds the former step's gradients to each step's."""

    def __init__(self) -> None:
        self.former: list[Tensor] = []

    @h.on(h.GradientsReady)
    def add(self, run: h.Run, event: h.GradientsReady) -> None:
        gradients = [p.grad for group in run.optimizer.param_groups for p in group["params"] if p.grad is not None]
        now = [gradient.clone() for gradient in gradients]
        for gradient, former in zip(gradients, self.former, strict=False):
            gradient.add_(former, alpha=0.5)
        self.former = now


class StashedGradients(InPlugin):
    """Gradients that a plugin keeps for the next step."""

    row, kind = "own", Stashes


class Switches(h.Plugin):
    """Switches another plugin off at one step."""

    @h.on(h.StepEnd)
    def switch(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 3:
            assert isinstance(run, h.TrainRun)
            run.plugins.disable("gradient_clipping")


class SwitchedOff(InPlugin):
    """A plugin that another one switches off in mid-run."""

    row, kind = "own", Switches
    wants: ClassVar[dict[str, Any]] = {"clipping": 0.05}


class Connects(h.Plugin):
    """Connects a handler that counts in a closure."""

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        count = 0

        def scale(run: h.Run, event: h.BatchStart) -> None:
            nonlocal count
            count += 1
            run.control.scale_loss(1 + sin(count) / 2, "it counts")

        run.bus.on(h.BatchStart, scale)


class Handler(InPlugin):
    """A handler that counts in a closure."""

    row, kind = "own", Connects


def halve(run: h.Run, event: h.BatchStart) -> None:
    run.control.scale_loss(0.5, "it listens")


class ConnectsLater(h.Plugin):
    """Connects a function at one step."""

    @h.on(h.StepEnd)
    def connect(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 3:
            run.bus.on(h.BatchStart, halve)


class LaterHandler(InPlugin):
    """A handler that is connected in mid-run."""

    row, kind = "own", ConnectsLater
    wants: ClassVar[dict[str, Any]] = {"poison": None}  # a roll back would connect it twice


class Pauses(h.Plugin):
    """Connects a function at the start, and pauses it at one step."""

    @h.on(h.TrainStart)
    def connect(self, run: h.Run, event: h.TrainStart) -> None:
        handle = run.bus.on(h.BatchStart, halve)

        def pause(run: h.Run, event: h.StepEnd) -> None:
            if run.progress.steps == 3:
                handle.pause()

        run.bus.on(h.StepEnd, pause)


class PausedHandler(InPlugin):
    """A handler that is paused in mid-run."""

    row, kind = "own", Pauses


@register_function
def freeze_first(run: h.Run, firing: RuleFiring) -> None:
    _net(run).first.requires_grad_(False)


@register_function
def stop_learning_norm(run: h.Run, firing: RuleFiring) -> None:
    _net(run).norm.eval()


def _net(run: h.Run) -> Net:
    return next(module for module in run.modules["model"].modules() if isinstance(module, Net))


class ByRule(Hidden, is_base=True):
    """What a rule's CallFunction does to the model in mid-run."""

    place = "rule"
    function: ClassVar[str]

    def hide(self, parts: Parts) -> None:
        rules: dict[str, Any] = {
            "controller_metrics": [{"name": "state", "class": "TrainingState"}],
            "operations": [{"name": "call", "class": "CallFunction", "arguments": {"function": self.function}}],
            "controllers": [
                {
                    "name": self.function,
                    "triggers": ["on_step_end"],
                    "rule": "state.global_step == 3",
                    "operations": ["call.should_call"],
                }
            ],
        }
        parts.plugins["freezer"] = RuleController(rules).named("freezer")


class FrozenByRule(ByRule):
    """requires_grad that a rule's CallFunction changes."""

    row, function = "E3", "freeze_first"


class EvaluatedByRule(ByRule):
    """eval() that a rule's CallFunction calls."""

    row, function = "E3", "stop_learning_norm"
    wants: ClassVar[dict[str, Any]] = {"norm": True, "poison": None}
