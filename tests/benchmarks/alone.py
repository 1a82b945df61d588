"""What agreement costs a single process: the loop beside the same loop without it.

`core/loop.py` is compiled twice more: as it is (the control), and with every `run.shared` read as the constant False
and every call of `run.agreement` taken out, so that Python drops the tests. Epochs of one run go on through the three
in turn, with the same run, model and memory, so a difference is that of the code.

In the idle loop the engine computes nothing, which shows nanoseconds; there the caches are warm. In the training
loop the model turns them over in every step; there a difference is seldom larger than the noise.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from time import perf_counter
from timeit import timeit
from types import ModuleType
from typing import Any

import heliograph as h
import torch
from heliograph.core import loop
from heliograph.tests.benchmarks.harness import batches_of, sgd, tiny_model
from heliograph.tests.benchmarks.lean import OwnTask
from torch import Tensor

AS_IT_IS, CONTROL, WITHOUT = "as it is", "as it is, once more (control)", "without agreement"
NOBODY, BATCH_END, GRADIENTS = "nobody listens", "1 handler of BatchEnd", "1 handler of GradientsReady"
TRAINING, ONE_TEST = "in the training loop, nobody listens", "one test of run.shared by itself"
IDLE_STEPS, IDLE_TURNS = 1_000, 100
STEPS, TURNS = 100, 200
TESTS = 1_000_000
WARM_UP = 5
TURN = "def turn(run):\n    for batch in batches(run):\n        step(run, run.forward(run, batch))\n"  # as in `fit`
Spent = dict[str, list[float]]


class Alone(ast.NodeTransformer):
    """Takes out of a loop what it asks of the other ranks."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.copy_location(ast.Constant(value=False), node) if ast.unparse(node) == "run.shared" else node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if ast.unparse(node).startswith("run.agreement."):
            return ast.copy_location(ast.Pass(), node)
        return node


def compiled_loop(*, agrees: bool) -> ModuleType:
    """Return the loop of the library, compiled anew, with a function `turn(run)` that trains for an epoch."""
    assert loop.__file__ is not None
    source = Path(loop.__file__).read_text(encoding="utf-8")
    assert "run.shared" in source
    assert "    run.agreement." in source, "what is to be taken out has another name now"
    tree = ast.parse(source + TURN)
    module = ModuleType(loop.__name__)
    module.__package__ = loop.__package__
    changed = tree if agrees else ast.fix_missing_locations(Alone().visit(tree))
    exec(compile(changed, loop.__file__, "exec"), vars(module))
    return module


class Idle(h.DeviceEngine):
    """Computes nothing."""

    @property
    def backward(self) -> Callable[[Tensor], None]:
        return lambda loss: None

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        pass

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return lambda: None

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return lambda: None


class IdleTask(OwnTask):
    """Computes nothing."""

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        return self.loss

    loss = torch.zeros((), requires_grad=True)


def time_agreement(seed: int) -> dict[str, Any]:
    """Return the nanoseconds a step of each turn, by place and version of the loop; and of one test by itself."""
    torch.set_num_threads(1)
    idle, model, shuffle = Idle("cpu"), h.DeviceEngine("cpu"), random.Random(seed).shuffle
    listening: dict[str, tuple[type[h.Event], ...]] = {
        NOBODY: (),
        BATCH_END: (h.BatchEnd,),
        GRADIENTS: (h.GradientsReady,),
    }
    spent: dict[str, Any] = {
        place: race(idle, IdleTask(tiny_model()), IDLE_STEPS, IDLE_TURNS, shuffle, events)
        for place, events in listening.items()
    }
    spent[TRAINING] = race(model, OwnTask(tiny_model()), STEPS, TURNS, shuffle)
    spent[ONE_TEST] = one_test()
    return spent


def race(
    engine: h.DeviceEngine,
    task: h.Task,
    steps: int,
    turns: int,
    shuffle: Callable[[list[str]], None],
    events: tuple[type[h.Event], ...] = (),
) -> Spent:
    """Train epoch by epoch, each through another version of the loop; return the nanoseconds a step of each turn."""
    versions = {name: compiled_loop(agrees=name != WITHOUT).turn for name in (AS_IT_IS, CONTROL, WITHOUT)}
    spent: Spent = {name: [] for name in versions}
    trainer = h.Trainer(engine=engine)
    for event in events:
        trainer.bus.on(event, ignore)
    order = chain.from_iterable(shuffled(list(versions), shuffle) for _ in range(turns))
    with trainer.run(task, batches_of(steps), optimizer=sgd, epochs=turns * len(versions)) as run:
        for _, name in zip(run.epochs(), order, strict=True):
            begin = perf_counter()
            versions[name](run)
            spent[name].append((perf_counter() - begin) / steps * 1e9)
    return {name: each[WARM_UP:] for name, each in spent.items()}


def ignore(run: h.Run, event: h.Event) -> None:
    """Do nothing."""


def shuffled(names: list[str], shuffle: Callable[[list[str]], None]) -> list[str]:
    """Return the names in another order."""
    shuffle(names)
    return names


def one_test() -> float:
    """Return the nanoseconds of a test in a tight loop, the loop subtracted; all that it touches lies in the cache."""
    with h.Trainer(device="cpu").run(OwnTask(tiny_model()), batches_of(1), optimizer=sgd, epochs=1) as run:
        rounds = [
            timeit("if run.shared: pass", globals={"run": run}, number=TESTS) - timeit("pass", number=TESTS)
            for _ in range(5)
        ]
    return sorted(rounds)[2] / TESTS * 1e9
