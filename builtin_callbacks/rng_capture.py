"""Seed every random generator, save and restore them, and keep validation away from the training stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..core import rng
from ..events import (
    EpochStart,
    Lane,
    Run,
    TestEnd,
    TestStart,
    TrainStart,
    ValidationEnd,
    ValidationStart,
)
from ..plugins import Plugin, on

State = dict[str, Any]


class RNGCapture(Plugin):
    """Make a run's random draws repeatable.

    Seeds python, NumPy's legacy generator, a private `numpy.random.Generator` (see `generator`), torch on the CPU and
    on every CUDA device, and the generators that the training loader holds. Their states are saved with every
    checkpoint and restored when the loader stands where it was. What a validation or test draws is taken back.

    Args:
        seed: for all of them.
        isolate_validation: put the generators back as they were when a validation began.
    """

    exclusive = ("rng",)

    def __init__(self, seed: int = 6691, *, isolate_validation: bool = True) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}.")
        self.seed = seed
        self.isolate_validation = isolate_validation
        self._generator: np.random.Generator | None = None
        self._loader_generators: list[torch.Generator] = []
        self._epoch: State = {}
        self._saved: Mapping[str, Any] | None = None
        self._before_validation: State | None = None

    @property
    def generator(self) -> np.random.Generator:
        """The private NumPy generator.

        Raises:
            RuntimeError: no run has begun, so it has not been seeded.
        """
        if self._generator is None:
            raise RuntimeError("The private NumPy generator is made when a run begins: there is none yet.")
        return self._generator

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Seed everything."""
        self._saved = None
        self._generator = np.random.default_rng(self.seed)
        rng.seed_all(self.seed)
        self._loader_generators = list(_generators_of(run.train_loader))
        for generator in self._loader_generators:
            generator.manual_seed(self.seed)

    @on(EpochStart, lane=Lane.REPORT)
    def start_epoch(self, run: Run, event: EpochStart) -> None:
        """Remember where an epoch begins; put a resumed run where it stood, once its loader stands there."""
        saved = self._saved
        if saved is None:
            self._epoch = self._capture()
        elif run.progress.batch:
            self._epoch = saved["epoch"]
            self._restore(saved["epoch"])
            run.when_positioned(self._arrive)
        else:
            self._arrive()
            self._epoch = self._capture()

    def _arrive(self) -> None:
        if self._saved is not None:
            self._restore(self._saved["now"])
            self._saved = None

    @on(ValidationStart, TestStart, lane=Lane.TRANSFORM)
    def isolate(self, run: Run, event: ValidationStart | TestStart) -> None:
        """Set the training stream aside."""
        if self.isolate_validation:
            self._before_validation = self._capture()

    @on(ValidationEnd, TestEnd, lane=Lane.REPORT)
    def put_back(self, run: Run, event: ValidationEnd | TestEnd) -> None:
        """Go on with the training stream."""
        if self._before_validation is not None:
            self._restore(self._before_validation)
            self._before_validation = None

    def state_dict(self) -> State:
        """Return the state of every generator, now and at the epoch's start."""
        if self._generator is None:
            return {}
        return dict(self._saved or {"now": self._capture(), "epoch": self._epoch})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the epoch begins."""
        self._saved = state or None

    def close(self) -> None:
        """Let go of a validation that never ended."""
        self._before_validation = None

    def _capture(self) -> State:
        loaders = [generator.get_state() for generator in self._loader_generators]
        own = {} if self._generator is None else rng.generator_state(self._generator)
        return {"globals": rng.capture(), "generator": own, "loaders": loaders}

    def _restore(self, state: Mapping[str, Any]) -> None:
        rng.restore(state["globals"])
        if self._generator is not None and state["generator"]:
            rng.set_generator_state(self._generator, state["generator"])
        for generator, saved in zip(self._loader_generators, state["loaders"], strict=False):
            generator.set_state(saved)


def _generators_of(loader: Any) -> Iterator[torch.Generator]:
    """Yield the torch generators that a loader or its sampler holds, each once."""
    seen: list[torch.Generator] = []
    sampler = getattr(loader, "sampler", None)
    for holder in (loader, sampler, getattr(loader, "batch_sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is each for each in seen):
            seen.append(generator)
            yield generator
