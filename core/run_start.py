"""The start of a run with handlers: the isolation of observers, and modules that a handler adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..events import Event
from ..plugins.filters import Filter
from .engines.options import modules_of
from .stepping.optimizers import held_parameters

if TYPE_CHECKING:
    from ..events import Run
    from ..events.bus import Receiver


@contextmanager
def isolating(run: Any) -> Iterator[None]:
    Filter.plan_all(run)

    def isolate(receiver: Receiver, owner: str) -> Receiver:
        if not run.plugins.runs_apart(owner):
            return receiver

        def isolated(sender: Run, *, event: Event) -> None:
            with run.hooks.apart():
                receiver(sender, event=event)

        return isolated

    remove = run.bus.intercept(isolate)
    run.hooks.closing.callback(remove)
    yield
    if run.hooks.apart is nullcontext:
        remove()


class InitialModules:
    """The parameters of a task before the handlers of `TrainStart` run; the optimizers are made before those."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._parameters = [parameter for module in modules_of(task).values() for parameter in module.parameters()]

    def check(self, optimizers: Iterable[torch.optim.Optimizer], world_size: int) -> None:
        trained = set(map(id, self._parameters))
        if world_size == 1:
            trained = trained.union(*map(held_parameters, optimizers))
        names = [
            f"{name}.{part}"
            for name, module in modules_of(self._task).items()
            for part, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in trained
        ]
        if names:
            problem = "are in no optimizer" if world_size == 1 else "have no gradient exchange between the ranks"
            raise ValueError(
                f"A handler of TrainStart added parameters to the task that {problem}: {', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}. They would not be trained. Change the model before you call "
                f"fit, which creates the optimizer from its parameters, or, in one process, call "
                f"run.optimizer.add_param_group in the handler."
            )
