"""After a rehearsal, a search or an overfitting everything is as it was: what there is, and the fit that follows."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph import tuning
from heliograph.core.data import rng
from heliograph.core.objects.equality import Leaf, leaves
from heliograph.tests.core.rehearsal.pair import FACTS, Facts, Pair
from heliograph.tests.kit import adam, random_batches, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Draws from every generator, keeps what it has read, and counts."""

    def __init__(self) -> None:
        self.generator, self.read = np.random.default_rng(5), dict[int, int]()

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read[index] = self.read.get(index, 0) + 1
        noise = random.random() + np.random.rand() + self.generator.random()
        return torch.rand(4) + noise + index, torch.tensor([1.0, index])


class Net(h.Task):
    """Dropout, a batch norm, a buffer that is not saved, a counter, an odd gradient, a frozen part in eval mode."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 2))
        self.model.register_buffer("hidden", torch.ones(3), persistent=False)
        self.frozen = nn.Linear(2, 2).requires_grad_(False).eval()
        self.model[0].weight.grad = torch.full((6, 4), 0.25)
        self.calls, self.log = 0, [0.0]

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        self.calls += 1
        self.model.get_buffer("hidden").add_(1)
        loss = nn.functional.mse_loss(self.frozen(self.model(batch[0])), batch[1])
        self.log.append(random.random())
        return loss + 0.01 * self.log[-1] * loss

    def validation_step(self, run: h.Run, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1]) + torch.rand(()) * 0


def trainer(folder: Path, *more: h.Plugin, rng_capture: bool = True) -> h.Trainer:
    """Return a trainer with nearly everything."""
    often = h.Every(steps=4)
    plugins = [h.LogSchedule(often), h.ValidationSchedule(often), h.SaveSchedule(often), h.EMA(0.9)]
    plugins += [h.Checkpoint(folder / "runs", resume="auto"), h.JsonlLog(folder / "log.jsonl"), Facts(), *more]
    return h.Trainer([*[h.RNGCapture()] * rng_capture, *plugins], device="cpu")


def dataset(**params: Any) -> dict[str, Any]:
    return {"train": Drawing(), "loader_params": {"batch_size": 4, "shuffle": True, **params}}


def loader() -> dict[str, Any]:
    return {"train": DataLoader(Drawing(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))}


def made() -> dict[str, Any]:
    """A task, an optimizer object that has stepped before, and its scheduler."""
    task = Net()
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.02)
    optimizer.step()
    return {
        "task": task,
        "train": random_batches(7),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }


def pair() -> dict[str, Any]:
    return {"task": Pair(), "train": random_batches(7), "optimizer": {"one": adam(), "two": sgd()}}


def phases() -> dict[str, Any]:
    return {"train": h.Phases(random_batches(4), random_batches(5, seed=1))}


KINDS: dict[str, tuple[Callable[[], dict[str, Any]], list[Callable[[], h.Plugin]]]] = {
    "a dataset that draws": (dataset, [lambda: h.GradientAccumulation(2)]),
    "workers": (lambda: dataset(num_workers=1), []),
    "workers that stay": (lambda: dataset(num_workers=1, persistent_workers=True), []),
    "a loader": (loader, [lambda: h.GradientClipping(0.5)]),
    "objects": (made, [lambda: h.LearningRate("step")]),
    "several optimizers": (pair, []),
    "phases": (phases, []),
}
BEFORE = ("rehearse", "overfit", "find_learning_rate", "find_batch_size")


def options_of(kind: str) -> dict[str, Any]:
    return {"task": Net(), "optimizer": adam(), "validation": random_batches(3, seed=7), "epochs": 3} | KINDS[kind][0]()


def do(what: str, made: h.Trainer, options: dict[str, Any]) -> None:
    """Do something of which nothing may be left."""
    if what == "rehearse":
        assert tuning.rehearse(made, **options).problems in ((), *UNEQUAL)
    elif what == "overfit":
        short = {name: value for name, value in options.items() if name not in ("epochs", "validation")}
        tuning.overfit(made, **short, steps=3)
    elif what == "find_learning_rate":
        short = {name: value for name, value in options.items() if name not in ("epochs", "validation", "scheduler")}
        tuning.find_learning_rate(made, **short, steps=4, lowest=0.01, highest=0.1)
    elif "loader_params" in options:
        tuning.find_batch_size(made, **options, largest=8)


UNEQUAL: tuple[Any, ...] = ()


def everything(made: h.Trainer, options: dict[str, Any]) -> dict[str, Leaf]:
    """Return every value that the objects hold, the modes, the gradients, and the states of the generators."""
    modules = [
        part for root in vars(options["task"]).values() if isinstance(root, nn.Module) for part in root.modules()
    ]
    parameters = [each for part in modules for each in part.parameters(recurse=False)]
    optimizer, data = options["optimizer"], options["train"]
    held = {
        "task": {name: value for name, value in vars(options["task"]).items() if not isinstance(value, nn.Module)},
        "modes": [part.training for part in modules],
        "values": [*parameters, *(each for part in modules for each in part.buffers(recurse=False))],
        "gradients": [each.grad for each in parameters],
        "names": [sorted(vars(part)) for part in modules],
        "optimizer": optimizer.state_dict() if isinstance(optimizer, torch.optim.Optimizer) else None,
        "read": dict(data.read) if isinstance(data, Drawing) else None,
        "generators": rng.capture(),
        "plugins": {name: made.plugins[name].state_dict() for name in made.plugins.names() if name != "rng_capture"},
        "registered": made.plugins.names(),
        "plan": made.plan(),
        "signals": [repr(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)],
        "loggers": [repr(each) for each in (logging.getLogger("heliograph"), *logging.getLogger().handlers)],
        "flags": [torch.is_grad_enabled(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()],
    }
    return leaves(held)


def tree(folder: Path) -> list[Path]:
    """Return all files, except the line that a rehearsal without a problem leaves beside the checkpoints."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".verified.jsonl")


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make temporary folders where they can be looked at, and keep the generators."""
    (tmp_path / "tmp").mkdir()
    multiprocessing.util.get_temp_dir()  # kept for the whole process, whose sockets take no path as long as this one
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    FACTS.clear()
    with rng.kept():
        yield


@pytest.mark.sample(8)
@pytest.mark.parametrize("what", BEFORE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_there_is_and_the_fit_that_follows(kind: str, what: str, tmp_path: Path) -> None:
    if kind == "several optimizers" and what == "find_learning_rate":
        pytest.skip("refused")
    results, children = list[Any](), set(multiprocessing.active_children())
    for before in (None, what):
        folder = tmp_path / str(before)
        folder.mkdir()
        options, own = options_of(kind), trainer(folder, *(make() for make in KINDS[kind][1]))
        rng.seed_all(11)
        if before is not None:
            expected, listing = everything(own, options), tree(tmp_path)
            do(before, own, options)
            assert everything(own, options) == expected
            assert tree(tmp_path) == listing
            gc.collect()
            assert set(multiprocessing.active_children()) <= children  # those of other tests
        FACTS.clear()
        own.fit(**options)
        results.append((list(FACTS), leaves(rng.capture()), options["task"]))
    (facts, draws, task), (facts_after, draws_after, task_after) = results
    assert len(facts) >= 9
    assert facts_after == facts
    assert draws_after == draws
    for root, root_after in zip(_modules(task), _modules(task_after), strict=True):
        assert leaves(dict(root.state_dict())) == leaves(dict(root_after.state_dict()))


def _modules(task: Any) -> list[nn.Module]:
    return [each for each in vars(task).values() if isinstance(each, nn.Module)]


class Fails(h.Plugin):
    """Raises at the n-th occurrence of an event."""

    def __init__(self, event: str, error: type[BaseException], number: int = 1) -> None:
        self.event, self.error, self.number = event, error, number

    def _count(self, name: str) -> None:
        self.number -= name == self.event
        if self.number == 0:
            self.number = -1
            if self.error is KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise self.error

    @h.on(h.BatchEnd, h.SavePoint, h.ValidationEnd)
    def first(self, run: h.Run, event: h.BatchEnd | h.SavePoint | h.ValidationEnd) -> None:
        self._count(event.name)

    @h.on(h.CheckpointLoaded, h.TrainEnd, h.EpochStart)
    def second(self, run: h.Run, event: h.CheckpointLoaded | h.TrainEnd | h.EpochStart) -> None:
        self._count(event.name)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("event", "number"),
    [("epoch_start", 1), ("batch_end", 2), ("validation_end", 1), ("save_point", 1), ("checkpoint_loaded", 1)],
)
def test_after_an_error_and_after_ctrl_c(event: str, number: int, error: type[BaseException], tmp_path: Path) -> None:
    """In the run, and, at `checkpoint_loaded`, in the one that resumes it."""
    fails = Fails(event, error, number)
    folder = tmp_path / "x"
    folder.mkdir()
    options, own = options_of("a dataset that draws"), trainer(folder, fails)
    rng.seed_all(11)
    expected, listing = everything(own, options), tree(tmp_path)
    with pytest.raises(error) as raised:
        tuning.rehearse(own, **options)
    assert everything(own, options) == expected
    assert tree(tmp_path) == listing
    assert fails.number == number
    which = "resumed" if event == "checkpoint_loaded" else "whole"
    if error is LookupError:
        assert any(f"heliograph: in the {which}" in line for line in raised.value.__notes__)


def test_a_run_after_another_is_rehearsed_with_what_that_left(tmp_path: Path) -> None:
    """Weights, plugins and generators are not new ones."""
    options, own = options_of("a dataset that draws"), trainer(tmp_path)
    own.fit(**options)
    expected, listing = everything(own, options), tree(tmp_path)
    contents = [path.read_bytes() for path in listing if path.is_file()]
    assert tuning.rehearse(own, **options).problems == ()
    assert everything(own, options) == expected
    assert tree(tmp_path) == listing
    assert [path.read_bytes() for path in listing if path.is_file()] == contents
