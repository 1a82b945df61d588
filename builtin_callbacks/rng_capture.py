"""Seed every random generator, save and restore them, and let nothing but the training draw from its stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core.data.draws import rng
from ..core.data.draws.generator_search import search
from ..core.data.draws.generators import Generator, digest, isolated
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.checks import check_flag, check_whole_number
from ..plugins import Plugin, on

State = dict[str, Any]
DEFAULT = 6691
SMALL = 2**32  # the seed of a torch that nobody has seeded is a random number of 64 bits
_AT_IMPORT = torch.initial_seed()


def seed_of_user(seed: int) -> int | None:
    """Return a seed that torch was found with; None where nobody gave it that."""
    return seed if seed < SMALL or seed != _AT_IMPORT else None


class RNGCapture(Plugin):
    """Make random draws repeatable, across a resume too.

    A resumed run draws what an uninterrupted one would have drawn. Seeds python, NumPy's legacy generator, a private
    `numpy.random.Generator` (see `generator`), torch on the CPU and on every CUDA device. Their states are saved with
    every checkpoint, with those of the generators that the task holds (these are not seeded), and restored when the
    loader is at its position. The order of samples, and what is drawn while a batch is loaded, become a function of
    (seed, epoch, position), and so touch none of these generators. What a validation or test draws is taken back, and
    so is what observers draw on the CPU (plugins with `policy = "observer"`), unless such a plugin says `draws =
    False`. A resumed run keeps the seed that it began with.

    On several ranks each has a stream of its own, seeded from (seed, rank) and restored to that rank; the order of
    samples and what loading draws go by the one seed. A rank that no checkpoint knows begins a stream of its own.

    Args:
        seed: for all of them. By default the one that you gave `torch.manual_seed` before the run, or 6691 where nobody
            seeded torch; a note in the result says which. Seeds of `random` and NumPy cannot be found out.
        isolate_validation: put the generators back as they were when a validation began.
        probe: load the first batch that is read of a loader a second time, under the same key, and list it
            if it comes out differently. Datasets that can hold no state, such as a `TensorDataset`, are spared that.
    """

    exclusive = ("rng",)

    def __init__(self, seed: int | None = None, *, isolate_validation: bool = True, probe: bool = True) -> None:
        if seed is not None:
            seed = check_whole_number("seed", seed, at_least=0, less_than=2**64, or_else="None")
        check_flag("isolate_validation", isolate_validation)
        check_flag("probe", probe)
        self._given_seed = seed  # a resumed run keeps the seed of its checkpoint
        self.isolate_validation, self.probe = isolate_validation, probe
        self._generator: np.random.Generator | None = None
        self._held: list[Generator] = []
        self._rank = self._taken = 0
        self._found: int | None = None  # what torch was seeded with before the run
        self._given: int | None = None  # and what the run gave it
        self._is_new = False  # no state is of this rank: it was not there when the checkpoint was written
        self._saved: Mapping[str, Any] | None = None
        self._before_validation: State | None = None

    @property
    def seed(self) -> int | None:
        """The seed that you gave."""
        return self._given_seed

    @property
    def generator(self) -> np.random.Generator:
        """The private NumPy generator.

        Raises:
            RuntimeError: no run has begun, so it has not been seeded.
        """
        if self._generator is None:
            raise RuntimeError("The private NumPy generator is made when a run begins: there is none yet.")
        return self._generator

    def describe(self, run: Run) -> str:
        if run.data.seed is not None:
            return ""
        return f"seeds everything random with {'what torch was seeded with' if self.seed is None else self.seed}"

    @on(ev.TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Seed everything."""
        self._saved, self._rank = None, run.engine.rank
        self._held = search(run.task).generators
        self._found = torch.initial_seed()
        self._taken = self._choose_seed(run, self._found)
        self._seed(self._taken, 0)
        run.data.key_draws(self._taken, probe=self.probe)
        run.hooks.isolate_observers(partial(isolated, one_thread=False))

    @on(ev.TrainStart, lane=Lane.REPORT)
    def note_seed(self, run: Run, event: ev.TrainStart) -> None:
        """Say which seed was chosen, if no checkpoint brings one."""
        if self.seed is None and not run.checkpoints.is_resuming:
            is_users = self._found is not None and seed_of_user(self._found) == self._taken
            not_seeded = "as torch was not seeded; RNGCapture(n) sets another"
            why = "as torch.manual_seed was given" if is_users else not_seeded
            run.note(f"everything random is seeded with {self._taken}, {why}")

    @on(ev.CheckpointLoaded, lane=Lane.REPORT)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Restore the states: what was due where the run was left is served with them."""
        saved = run.data.seed
        if saved is not None and saved != self._taken:
            if self.seed is not None or self._taken != DEFAULT:
                run.note(f"the run keeps the seed of its checkpoint, {saved}, not {self._taken}")
            self._taken = saved
        if self._is_new:
            self._is_new = False
            self._seed(self._taken, run.progress.steps)
        run.hooks.when_positioned(self._arrive)

    @on(ev.EpochStart, lane=Lane.TRANSFORM)
    def begin_again(self, run: Run, event: ev.EpochStart) -> None:
        """In an epoch that is resumed, undo the draws made until its loader is at its position."""
        if event.resumed:
            self._set_aside(run)

    @on(ev.SavePoint, ev.CheckpointSaved, ev.CheckpointPruned, lane=Lane.TRANSFORM, optional=True)
    def begin_save(self, run: Run, event: ev.SavePoint | ev.CheckpointSaved | ev.CheckpointPruned) -> None:
        """Take back what is drawn here: a run that resumes from the state that is saved does not draw it."""
        self._set_aside(run)

    @on(ev.LastBoundary, ev.TrainEnd, lane=Lane.TRANSFORM)
    def begin_end(self, run: Run, event: ev.LastBoundary | ev.TrainEnd) -> None:
        """Take back what is drawn here: a run that was stopped and is resumed has an end of its own."""
        self._set_aside(run)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.TRANSFORM, optional=True)
    def isolate(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Set the training stream aside."""
        if self.isolate_validation:
            self._before_validation = self._capture()

    @on(ev.ValidationEnd, ev.ValidationCut, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT, optional=True)
    def put_back(self, run: Run, event: ev.ValidationEnd | ev.ValidationCut | ev.TestEnd | ev.PredictEnd) -> None:
        """Continue with the training stream."""
        if self._before_validation is not None:
            self._restore(self._before_validation)
            self._before_validation = None

    def state_dict(self) -> State:
        if self._generator is None:
            return {}
        return {**(self._saved or self._capture()), "rank": self._rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._is_new = state.get("rank", 0) != self._rank
        self._saved = None if self._is_new else state or None

    def close(self) -> None:
        self._before_validation = None
        found, self._found = self._found, None
        if found is not None and torch.initial_seed() == self._given:
            rng.name_seed(found)

    def _choose_seed(self, run: Run, found: int) -> int:
        """Return the seed of the run; on several ranks the main one's, and this is a collective then."""
        if self.seed is not None:
            return self.seed
        seed = seed_of_user(found)
        seed = DEFAULT if seed is None else seed
        return seed if run.engine.world_size == 1 else int(run.engine.broadcast(seed))

    def _seed(self, seed: int, step: int) -> None:
        """Begin every stream: on the main rank by the seed itself, on others by what no other rank or step has."""
        if self._rank:
            seed = int.from_bytes(digest(seed, self._rank, step, size=8, purpose=b"rank"), "little")
        self._generator = np.random.default_rng(seed)
        rng.seed_all(seed)
        self._given = torch.initial_seed()

    def _set_aside(self, run: Run) -> None:
        if self._saved is None:
            self._saved = self._capture()
            run.hooks.when_positioned(self._arrive)

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
        self._given = torch.initial_seed()
        if self._generator is not None and state["generator"]:
            rng.set_generator_state(self._generator, state["generator"])
        for generator, held in zip(self._held, state["held"], strict=False):  # the task may be another one now
            rng.set_generator_state(generator, held)
