"""What a training of Ignite consists of, as the user names it: checked before anything is attached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from heliograph import BackwardEnd, ForwardEnd, GradientsReady
from heliograph.spi import require
from torch import Tensor, nn

from ..hosted.facts import Facts
from ..hosted.host import Host
from ..hosted.saved import Position

NAME = "Ignite"


@dataclass(frozen=True)
class Parts:
    """The parts of a training, which are the arguments of `attach`.

    Raises:
        TypeError: one has another type.
        ValueError: they contradict each other.
    """

    engine: Any
    model: Any
    optimizer: Any
    loss: Any
    evaluator: Any
    validation: Any
    save: Callable[[Any], Any] | None
    name: str
    hyper_parameters: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        """Check them."""
        kind = require("ignite.engine", "attach", extra="ignite").Engine
        for what, given, allowed in (
            ("engine", [self.engine], kind),
            ("model", self.modules.values(), nn.Module),
            ("evaluator", self.evaluators.values(), kind),
        ):
            if wrong := [each for each in given if not isinstance(each, allowed)]:
                raise TypeError(
                    f"attach({what}=) takes {allowed.__name__} objects, got {type(wrong[0]).__name__}: {wrong[0]!r}."
                )
        if self.optimizer is not None and not hasattr(self.optimizer, "register_step_pre_hook"):
            raise TypeError(f"attach(optimizer=) takes a torch optimizer, got {type(self.optimizer).__name__}.")
        if not (self.loss is None or callable(self.loss)):
            raise TypeError(
                f"attach(loss=) takes a module or a function of the output, got {type(self.loss).__name__}."
            )
        sets = self.validation_sets
        if sets and (not isinstance(sets, Mapping) or set(sets) != set(self.evaluators)):
            raise ValueError(
                f"attach(validation=) takes data for each evaluator, of which there are {sorted(self.evaluators)}; got "
                f"{sorted(sets) if isinstance(sets, Mapping) else type(sets).__name__}."
            )

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """What is trained, by name."""
        return dict(self.model) if isinstance(self.model, Mapping) else {"model": self.model}

    @property
    def evaluators(self) -> Mapping[str, Any]:
        """The engines that validate, by the names of their sets."""
        return _by_name(self.evaluator)

    @property
    def validation_sets(self) -> Mapping[str, Any]:
        """What they are run on, by the same names."""
        several = self.validation is not None and isinstance(self.evaluator, Mapping)
        return self.validation if several else _by_name(self.validation)

    @property
    def loss_module(self) -> nn.Module | None:
        """What computes the loss, where it is a module."""
        return self.loss if isinstance(self.loss, nn.Module) else None

    def loss_of(self, output: Any) -> Tensor:
        """Return the loss of an output."""
        return _loss_in(output) if self.loss is None or self.loss_module is not None else self.loss(output)

    def host(self) -> Host:
        """Return what this loop can do for plugins."""
        within = frozenset[Any]() if self.sees_gradients else {ForwardEnd, BackwardEnd, GradientsReady}
        mends = {
            "checkpoints": "use ignite.handlers.Checkpoint, with what attach returned in its to_save",
            "length": "give engine.run(epoch_length=)"
            if self.optimizer is None
            else "leave attach(optimizer=) out, so that each iteration is a step",
        }
        if not self.sees_gradients:
            mends["skip_step"] = "give attach the optimizer, and the module that computes the loss"
        return Host(
            NAME,
            frozenset({"veto_stop", "skip_step"} if self.sees_gradients else {"veto_stop"}),
            frozenset(within),
            mends,
        )

    @property
    def sees_gradients(self) -> bool:
        """Whether plugins get the loss and the gradients before the step."""
        return self.loss_module is not None and self.optimizer is not None

    def facts(self) -> Facts:
        """Return what the engine says of a training that begins."""
        state = self.engine.state
        loader = state.dataloader
        parameter = next((each for module in self.modules.values() for each in module.parameters()), None)
        return Facts(
            modules=self.modules,
            optimizer=self.optimizer,
            device=torch.device("cpu") if parameter is None else parameter.device,
            epochs=state.max_epochs,
            steps=self._steps(),
            batches=state.epoch_length,
            loader=loader,
            batch_size=getattr(loader, "batch_size", None),
            validation=self.validation_sets or self.evaluators,
            does=frozenset({"validation"} if self.evaluators else ()),
            name=self.name,
            hyper_parameters=dict(self.hyper_parameters or {}),
            world_size=require("ignite.distributed", "attach", extra="ignite").get_world_size(),
        )

    def _steps(self) -> int | None:
        """Return the planned steps, None where they are unknown: the engine plans iterations."""
        state = self.engine.state
        if self.optimizer is not None:  # several iterations may make a step
            return None
        if state.max_epochs is None or state.epoch_length is None:
            return state.max_iters  # type: ignore[no-any-return]
        return int(state.max_epochs * state.epoch_length)

    def position(self) -> Position:
        """Return where the engine begins or continues; how many steps the optimizer has taken it does not know."""
        state = self.engine.state
        if not state.iteration:
            return Position()
        step = state.iteration if self.optimizer is None else None
        if not state.epoch_length:
            return Position(state.epoch, 0, step)
        epoch, batch = divmod(state.iteration, state.epoch_length)
        return Position(epoch, batch, step)

    def is_complete(self) -> bool:
        """Return whether the engine has reached its length."""
        state = self.engine.state
        if state.max_iters is not None:
            return bool(state.iteration >= state.max_iters)
        return state.max_epochs is not None and bool(
            state.iteration >= state.max_epochs * (state.epoch_length or math.inf)
        )


def _by_name(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    return given if isinstance(given, Mapping) else {"": given}


def _loss_in(output: Any) -> Tensor:
    """Return the loss in an engine's output: the output itself, or its item `loss`.

    Raises:
        TypeError: there is none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.detach().reshape(())
    if isinstance(found, int | float):
        return torch.tensor(float(found))
    raise TypeError(
        f"Plugins need the loss of each iteration, and it was not found in the output of the engine, a "
        f"{type(output).__name__}: give attach(loss=) the module that computes it, or a function of the output."
    )
