"""Seed every random generator, save and restore them, and let nothing but the training draw from its stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..core.data.draws import rng
from ..core.data.draws.generators import Generator, digest, isolated
from ..core.data.draws.held_generators import find_generators
from ..events import (
    CheckpointLoaded,
    CheckpointPruned,
    CheckpointSaved,
    EpochStart,
    Lane,
    LastBoundary,
    Run,
    SavePoint,
    TestEnd,
    TestStart,
    TrainEnd,
    TrainStart,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
)
from ..events.checks import check_whole_number
from ..plugins import Plugin, on

State = dict[str, Any]


class RNGCapture(Plugin):
    """Make a run's random draws repeatable, and a resumed run's draws those of the run that was never interrupted.

    Seeds python, NumPy's legacy generator, a private `numpy.random.Generator` (see `generator`), torch on the CPU and
    on every CUDA device. Their states are saved with every checkpoint, with those of the generators that the task
    holds (these are not seeded), and restored when the loader is at its position. The order of samples, and what is
    drawn while a batch is loaded, become a function of (seed, epoch, position), and so touch none of these generators.
    What a validation or test draws is taken back, and so is what observers draw on the CPU (plugins with
    `policy = "observer"`), unless such a plugin says `draws = False`. A resumed run keeps the seed that it began with.

    On several ranks each has a stream of its own, seeded from (seed, rank) and restored to that rank; the order of
    samples and what loading draws go by the one seed. A rank that no checkpoint knows begins a stream of its own.

    Args:
        seed: for all of them.
        isolate_validation: put the generators back as they were when a validation began.
        probe: load the first batch that is read of a loader a second time, under the same key, and lower the guarantee
            if it comes out differently. Datasets that can hold no state, such as a `TensorDataset`, are spared that.
    """

    exclusive = ("rng",)

    def __init__(self, seed: int = 6691, *, isolate_validation: bool = True, probe: bool = True) -> None:
        self.seed = check_whole_number("seed", seed, at_least=0)
        self.isolate_validation, self.probe = isolate_validation, probe
        self._generator: np.random.Generator | None = None
        self._held: list[Generator] = []
        self._rank = 0
        self._is_new = False  # no state is of this rank: it was not there when the checkpoint was written
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
        self._saved, self._rank = None, run.engine.rank
        self._held = find_generators((run.task,))
        self._seed(self.seed, 0)
        run.key_draws(self.seed, probe=self.probe)
        run.isolate_observers(partial(isolated, one_thread=False))

    @on(CheckpointLoaded, lane=Lane.REPORT)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Restore the states: what was due where the run was left is served with them."""
        if self._is_new:
            self._is_new = False
            self._seed(self.seed, run.progress.steps)
        run.when_positioned(self._arrive)

    @on(EpochStart, lane=Lane.TRANSFORM)
    def begin_again(self, run: Run, event: EpochStart) -> None:
        """In an epoch that is resumed, undo the draws made until its loader is at its position."""
        if event.resumed:
            self._set_aside(run)

    @on(SavePoint, CheckpointSaved, CheckpointPruned, lane=Lane.TRANSFORM)
    def begin_save(self, run: Run, event: SavePoint | CheckpointSaved | CheckpointPruned) -> None:
        """Take back what is drawn here: a run that resumes from the state that is saved does not draw it."""
        self._set_aside(run)

    @on(LastBoundary, TrainEnd, lane=Lane.TRANSFORM)
    def begin_end(self, run: Run, event: LastBoundary | TrainEnd) -> None:
        """Take back what is drawn here: a run that was stopped and is resumed has an end of its own."""
        self._set_aside(run)

    @on(ValidationStart, TestStart, lane=Lane.TRANSFORM)
    def isolate(self, run: Run, event: ValidationStart | TestStart) -> None:
        """Set the training stream aside."""
        if self.isolate_validation:
            self._before_validation = self._capture()

    @on(ValidationEnd, ValidationCut, TestEnd, lane=Lane.REPORT)
    def put_back(self, run: Run, event: ValidationEnd | ValidationCut | TestEnd) -> None:
        """Continue with the training stream."""
        if self._before_validation is not None:
            self._restore(self._before_validation)
            self._before_validation = None

    def state_dict(self) -> State:
        """Return the state of every generator."""
        if self._generator is None:
            return {}
        return {**(self._saved or self._capture()), "rank": self._rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until everybody has taken his; that of another rank is none for this one."""
        self._is_new = state.get("rank", 0) != self._rank
        self._saved = None if self._is_new else state or None

    def close(self) -> None:
        """Let go of a validation that never ended."""
        self._before_validation = None

    def _seed(self, seed: int, step: int) -> None:
        """Begin every stream: on the main rank by the seed itself, on others by what no other rank or step has."""
        if self._rank:
            seed = int.from_bytes(digest(seed, self._rank, step, size=8, purpose=b"rank"), "little")
        self._generator = np.random.default_rng(seed)
        rng.seed_all(seed)

    def _set_aside(self, run: Run) -> None:
        if self._saved is None:
            self._saved = self._capture()
            run.when_positioned(self._arrive)

    def _arrive(self) -> None:
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None

    def _capture(self) -> State:
        own = {} if self._generator is None else rng.generator_state(self._generator)
        held = [rng.generator_state(generator) for generator in self._held]
        return {"globals": rng.capture(), "generator": own, "held": held}

    def _restore(self, state: Mapping[str, Any]) -> None:
        rng.restore(state["globals"])
        if self._generator is not None and state["generator"]:
            rng.set_generator_state(self._generator, state["generator"])
        for generator, held in zip(self._held, state["held"], strict=False):  # the task may be another one now
            rng.set_generator_state(generator, held)
