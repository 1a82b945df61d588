"""The attempts of a random program: the training, and what is done after it; of each an account that can be judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isnan
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import heliograph as h
import torch
from heliograph.packages.tests.torture.silent_parts import (
    VALIDATION,
    Parts,
    modules_of,
    mse,
    parts_of,
    plugins_of,
    random_batches,
    task_of,
)
from heliograph.packages.tests.torture.silent_program import Program, without
from heliograph.packages.tests.torture.silent_witness import (
    Batch,
    EndlessError,
    Mark,
    Notebook,
    Witness,
    digest,
    digest_of_state,
)
from torch import nn

OTHER = 77  # the seed of other weights
TEST = 40  # the seed of the data of a test


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint is, as its file says."""

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    samples: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """What one attempt has done, and what its result says.

    Attributes:
        kind: what it is.
        marks: what happened, in its order.
        error: the type and the text of what was raised; empty where nothing was.
        is_endless: whether that was the witness, since the run did not end.
        said: the warnings of the result, but for those about the witness.
        plugin_errors: how many errors of each observer the result lists.
        best: the name of the file that the result calls the best.
        at: where it was resumed; None where it started fresh.
        weights: a digest of the task's at the end.
        stored: a digest of the weights in each checkpoint on disk at the end.
        averages: the same of the average that validations were measured on, where it holds one.
        files_before: a digest of each file on disk when it began.
        files: the same at the end.
        lines_before: the lines of the logs on disk when it began.
        lines: the same at the end.
        scheduler_steps: how often each scheduler was stepped, by torch's own count.
        largest_norm: of the gradients that an optimizer was stepped with.
        off_average: how far the task's weights are from the average at the end.
        tested: the metric of a test.
        given: what it is with the weights as they were given.
        averaged: what it is with the average of the training's weights; None where it left others.
    """

    kind: Literal["training", "resume", "rerun", "test"]
    marks: tuple[Mark, ...] = ()
    error: str = ""
    is_endless: bool = False
    status: str = ""
    said: tuple[str, ...] = ()
    plugin_errors: Mapping[str, int] = field(default_factory=dict)
    best: str = ""
    at: Place | None = None
    weights: int = 0
    stored: Mapping[str, int] = field(default_factory=dict)
    averages: Mapping[str, int] = field(default_factory=dict)
    files_before: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    lines_before: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    scheduler_steps: Mapping[str, int] = field(default_factory=dict)
    largest_norm: float = 0.0
    off_average: float | None = None
    tested: float | None = None
    given: float = 0.0
    averaged: float | None = None

    def happened(self, what: str) -> list[Mark]:
        """Return the marks of a kind."""
        return [mark for mark in self.marks if mark.what == what]


class Attempts:
    """Carries out a program in a folder.

    Args:
        program: the program.
        folder: where its files lie.
    """

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.notebook = Notebook()
        self.witness = Witness(ref(self.notebook))
        self.trainer: h.Trainer | None = None
        self.has_loaded = False  # whether the training ended well, with a best checkpoint or an average to load

    def accounts(self) -> tuple[Account, ...]:
        """Carry out everything; return an account of each attempt."""
        program = self.program
        first, task = self._train(program, "training", program.seed)
        if first.is_endless or not program.then:
            return (first,)
        if program.then == "resume":
            rest = replace(program, deeds=without(program.deeds, "raise", "stop"))
            return first, self._train(rest, "resume", program.seed)[0]
        if program.then in ("rerun", "renamed"):
            return first, self._train(program, "rerun", OTHER)[0]
        return first, self._test(task)

    def _train(self, program: Program, kind: Literal["training", "resume", "rerun"], seed: int) -> tuple[Account, Any]:
        notebook = self._open(Notebook(program.decay))
        files, lines, places = _files(self.folder), _lines(self.folder), _places(self.folder)
        parts = parts_of(program, notebook, seed)
        notebook.weights = digest(modules_of(parts.task))
        result, error = _caught(lambda: self._fit(program, parts, kind))
        has_best = result is not None and (program.loads_average or result.best_checkpoint is not None)
        self.has_loaded = has_best and any(mark.what == "TrainEnd" for mark in notebook.marks)
        loaded = [mark.name for mark in notebook.marks if mark.what == "CheckpointLoaded"]
        modules = modules_of(parts.task)
        account = Account(
            kind=kind,
            marks=tuple(notebook.marks),
            error=error,
            is_endless=error.startswith(EndlessError.__name__),
            at=places[loaded[0]] if loaded else None,
            weights=digest(modules),
            stored=_stored(self.folder),
            averages=_stored(self.folder, averaged=True),
            files_before=files,
            files=_files(self.folder),
            lines_before=lines,
            lines=_lines(self.folder),
            scheduler_steps={name: each.last_epoch for name, each in notebook.schedulers.items()},
            largest_norm=notebook.largest_norm,
            off_average=_off_average(notebook, modules),
        )
        return _completed(account, result), parts.task

    def _open(self, notebook: Notebook) -> Notebook:
        self.notebook, self.witness.notebook = notebook, ref(notebook)
        return notebook

    def _fit(self, program: Program, parts: Parts, kind: str) -> h.RunResult:
        if self.trainer is None or kind == "resume" or not program.reuses:
            plugins = plugins_of(program, self.folder, self.witness, resumes=kind == "resume")
            self.trainer = h.Trainer(plugins, device="cpu", precision=program.precision)
        return self.trainer.fit(
            parts.task,
            parts.train,
            validation=parts.validation,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            epochs=program.epochs,
            steps=program.steps,
            name="another" if kind == "rerun" and program.then == "renamed" else "run",
        )

    def _test(self, task: Any) -> Account:
        program, trained = self.program, self.notebook
        notebook = self._open(Notebook())
        if program.then == "test another":
            task = task_of(program, ref(notebook), OTHER)
        modules = modules_of(task)
        if program.then == "test changed":
            with torch.no_grad():
                for parameter in (each for module in modules.values() for each in module.parameters()):
                    parameter.fill_(0.3)
        batches = random_batches(VALIDATION, TEST)
        given = _loss(task, batches)
        loads = program.loads_average or (program.keeps is not None and program.keeps.load_best is not None)
        is_replaced = program.then != "test" or (loads and self.has_loaded)
        trainer = self.trainer
        result, error = (None, "") if trainer is None else _caught(lambda: trainer.test(task, batches))
        account = Account(
            kind="test",
            marks=tuple(notebook.marks),
            error=error,
            tested=None if result is None else result.metrics["test/loss"],
            given=given,
            averaged=None if is_replaced else _averaged_loss(trained, task, batches),
        )
        return _completed(account, result)


def _caught(attempt: Callable[[], h.RunResult]) -> tuple[h.RunResult | None, str]:
    """Return the result, or the type and the text of the error."""
    try:
        return attempt(), ""
    except Exception as error:  # noqa: BLE001  # whatever it is, the law looks at it
        return None, f"{type(error).__name__}: {error}"


def _completed(account: Account, result: h.RunResult | None) -> Account:
    """Add what a result says."""
    if result is None:
        return account
    return replace(
        account,
        status=result.status,
        said=tuple(each for each in result.warnings if "witness" not in each.lower()),
        plugin_errors={name: len(errors) for name, errors in result.plugin_errors.items()},
        best=result.best_checkpoint.name if result.best_checkpoint else "",
    )


def _checkpoints(folder: Path) -> dict[str, Any]:
    """Return what is in each checkpoint on disk, by its file's name."""
    paths = sorted(folder.glob("checkpoints/*.pth"))
    return {path.name: torch.load(path, weights_only=True) for path in paths}


def _stored(folder: Path, *, averaged: bool = False) -> dict[str, int]:
    found = {}
    for name, state in _checkpoints(folder).items():
        averages = (state["plugins"].get("ema") or {}).get("weights", {}) if averaged else {}
        modules = {each: {**weights, **averages.get(each, {})} for each, weights in state["modules"].items()}
        found[name] = digest_of_state(modules)
    return found


def _places(folder: Path) -> dict[str, Place]:
    found = {}
    for name, state in _checkpoints(folder).items():
        at = state["progress"]
        found[name] = Place(at["epoch"], at["batch"], at["batch"] + at["earlier_batches"], at["samples"], at["steps"])
    return found


def _files(folder: Path) -> dict[str, str]:
    """Return a digest of every checkpoint on disk."""
    paths = sorted(folder.glob("checkpoints/*.pth"))
    return {path.name: blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in paths}


def _lines(folder: Path) -> tuple[str, ...]:
    """Return the lines of every log on disk."""
    return tuple(line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines())


def _off_average(notebook: Notebook, modules: Mapping[str, nn.Module]) -> float | None:
    """Return how far parameters are from their average; None where there is no average, or it is not a number."""
    if not notebook.average:
        return None
    pairs = [(each.detach(), notebook.average[each.data_ptr()]) for each in _parameters(modules)]
    off = max(float((value - average).abs().max()) for value, average in pairs)
    return None if isnan(off) else off


def _averaged_loss(trained: Notebook, task: Any, batches: list[Batch]) -> float | None:
    """Return the loss with the average of the training, None where there is none."""
    if not trained.average:
        return None
    kept = [(each, each.detach().clone()) for each in _parameters(modules_of(task))]
    for parameter, _ in kept:
        parameter.data.copy_(trained.average[parameter.data_ptr()])
    loss = _loss(task, batches)
    for parameter, value in kept:
        parameter.data.copy_(value)
    return loss


def _parameters(modules: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules.values() for parameter in module.parameters()]


def _loss(task: Any, batches: list[Batch]) -> float:
    """Return the mean over the samples."""
    model = next(iter(modules_of(task).values()))
    with torch.no_grad():
        parts = [float(mse(model(inputs), targets)) * len(inputs) for inputs, targets in batches]
    return sum(parts) / sum(len(inputs) for inputs, _ in batches)
