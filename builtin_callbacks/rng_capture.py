"""Seeds, saves, restores and isolates random generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.data import rng
from ..core.data.users_code import search
from ..events import Lane
from ..events import catalogue as ev
from ..events.checks import check_flag, check_whole_number
from ..plugins import Plugin, on

if TYPE_CHECKING:
    from ..events import Run

State = dict[str, Any]
DEFAULT = 6691
SMALL = 2**32  # without a seed, torch seeds itself with a random number of 64 bits
_AT_IMPORT = torch.initial_seed()


def seed_of_user(seed: int) -> int | None:
    """Return the seed that torch was found with, or None if no code has set it."""
    return seed if seed < SMALL or seed != _AT_IMPORT else None


@cache
def _isolation() -> Callable[[], AbstractContextManager[None]]:
    from ..core.data.generators import isolated  # imported when an observer is called that draws

    return partial(isolated, one_thread=False)


class RNGCapture(Plugin):
    """Make random draws reproducible, also across a resume.

    A resumed run draws the same numbers as an uninterrupted run. The plugin seeds Python's `random`, NumPy's legacy
    generator, a private `numpy.random.Generator` (see `generator`), and torch on the CPU and on every CUDA device.
    Every checkpoint contains their states, and those of generators in the task, which are not seeded. They are restored
    when the loader has reached its position.

    The order of samples and all draws while loading depend on (seed, epoch, position) only, and do not advance these
    generators. The draws of an iterable that is no `DataLoader` of a map-style dataset continue one stream in each
    epoch. Validations and tests do not advance the generators either, nor do observers that draw on the CPU (plugins
    with `policy = "observer"`, unless they set `draws = False`). A resumed run keeps its original seed.

    With several ranks, each has its own stream, seeded from (seed, rank) and restored on that rank; sample order and
    loading depend on the seed only. A rank without a saved state starts a new stream.

    Args:
        seed: the seed. By default the seed passed to `torch.manual_seed` before the run, or 6691 if torch was not
            seeded; a note in the result shows it. Seeds of `random` and NumPy cannot be read.
        isolate_validation: restore the generators after a validation.
        probe: load the first batch of a loader twice, with the same key, and report a difference. Datasets that cannot
            have state, such as a `TensorDataset`, are not probed.
    """

    exclusive = ("rng",)

    def __init__(self, seed: int | None = None, *, isolate_validation: bool = True, probe: bool = True) -> None:
        if seed is not None:
            seed = check_whole_number("seed", seed, at_least=0, less_than=2**64, or_else="None")
        check_flag("isolate_validation", isolate_validation)
        check_flag("probe", probe)
        self._passed_seed = seed  # a resumed run keeps the seed of its checkpoint
        self.isolate_validation, self.probe = isolate_validation, probe
        self._generator: np.random.Generator | None = None
        self._task_generators: list[rng.Generator] = []
        self._rank = self._run_seed = 0
        self._seed_before: int | None = None  # torch's seed before the run
        self._torch_seed: int | None = None  # torch's seed set by the run
        self._is_new = False  # the checkpoint has no state of this rank
        self._saved: Mapping[str, Any] | None = None
        self._before_validation: State | None = None

    @property
    def seed(self) -> int | None:
        """The seed that was passed, or None."""
        return self._passed_seed

    @property
    def generator(self) -> np.random.Generator:
        """The private NumPy generator.

        Raises:
            RuntimeError: no run has begun, so it was not seeded.
        """
        if self._generator is None:
            raise RuntimeError("The private NumPy generator does not exist before a run begins.")
        return self._generator

    def describe(self, run: Run) -> str:
        if run.data.seed is not None:
            return ""
        return f"seeds everything random with {'the seed of torch' if self.seed is None else self.seed}"

    @on(ev.TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Seed the generators."""
        self._saved, self._rank = None, run.engine.rank
        self._task_generators = search(run.task).generators
        self._seed_before = torch.initial_seed()
        self._run_seed = self._choose_seed(run, self._seed_before)
        self._seed(self._run_seed, 0)
        run.data.key_draws(self._run_seed, probe=self.probe)
        run.hooks.isolate_observers(lambda: _isolation()())

    @on(ev.TrainStart, lane=Lane.REPORT)
    def note_seed(self, run: Run, event: ev.TrainStart) -> None:
        """Note the seed, unless a checkpoint will replace it."""
        if self.seed is None and not run.checkpoints.is_resuming:
            is_users = self._seed_before is not None and seed_of_user(self._seed_before) == self._run_seed
            not_seeded = "as torch was not seeded; RNGCapture(n) sets another"
            why = "as torch.manual_seed was given" if is_users else not_seeded
            run.note(f"everything random is seeded with {self._run_seed}, {why}")

    @on(ev.CheckpointLoaded, lane=Lane.REPORT)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Restore the states when the loader has reached its position."""
        saved = run.data.seed
        if saved is not None and saved != self._run_seed:
            if self.seed is not None or self._run_seed != DEFAULT:
                run.note(f"the run keeps the seed of its checkpoint, {saved}, not {self._run_seed}")
            self._run_seed = saved
        if self._is_new:
            self._is_new = False
            self._seed(self._run_seed, run.progress.steps)
        run.hooks.when_positioned(self._restore_streams)

    @on(ev.EpochStart, lane=Lane.TRANSFORM)
    def begin_again(self, run: Run, event: ev.EpochStart) -> None:
        """Discard draws until the loader of a resumed epoch reaches its position."""
        if event.resumed:
            self._store_streams(run)

    @on(ev.SavePoint, ev.CheckpointSaved, ev.CheckpointPruned, lane=Lane.TRANSFORM, optional=True)
    def begin_save(self, run: Run, event: ev.SavePoint | ev.CheckpointSaved | ev.CheckpointPruned) -> None:
        """Discard draws during a save, because a resumed run does not repeat them."""
        self._store_streams(run)

    @on(ev.LastBoundary, ev.TrainEnd, lane=Lane.TRANSFORM)
    def begin_end(self, run: Run, event: ev.LastBoundary | ev.TrainEnd) -> None:
        """Discard draws at the end, because a resumed run has another end."""
        self._store_streams(run)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.TRANSFORM, optional=True)
    def isolate(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Store the training's generators before an evaluation."""
        if self.isolate_validation:
            self._before_validation = self._capture()

    @on(ev.ValidationEnd, ev.ValidationCut, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT, optional=True)
    def put_back(self, run: Run, event: ev.ValidationEnd | ev.ValidationCut | ev.TestEnd | ev.PredictEnd) -> None:
        """Restore the training's generators after an evaluation."""
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
        seed_before, self._seed_before = self._seed_before, None
        if seed_before is not None and torch.initial_seed() == self._torch_seed:
            rng.name_seed(seed_before)

    def _choose_seed(self, run: Run, seed_before: int) -> int:
        if self.seed is not None:
            return self.seed
        seed = seed_of_user(seed_before)
        seed = DEFAULT if seed is None else seed
        return seed if run.engine.world_size == 1 else int(run.engine.broadcast(seed))

    def _seed(self, seed: int, step: int) -> None:
        if self._rank:
            seed = int.from_bytes(rng.digest(seed, self._rank, step, size=8, purpose=b"rank"), "little")
        self._generator = np.random.default_rng(seed)
        rng.seed_all(seed)
        self._torch_seed = torch.initial_seed()

    def _store_streams(self, run: Run) -> None:
        if self._saved is None:
            self._saved = self._capture()
            run.hooks.when_positioned(self._restore_streams)

    def _restore_streams(self) -> None:
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None

    def _capture(self) -> State:
        private = {} if self._generator is None else rng.generator_state(self._generator)
        task_states = [rng.generator_state(generator) for generator in self._task_generators]
        return {"globals": rng.capture(), "generator": private, "held": task_states}

    def _restore(self, state: Mapping[str, Any]) -> None:
        rng.restore(state["globals"])
        self._torch_seed = torch.initial_seed()
        if self._generator is not None and state["generator"]:
            rng.set_generator_state(self._generator, state["generator"])
        for generator, task_state in zip(
            self._task_generators, state["held"], strict=False
        ):  # the task may have changed
            rng.set_generator_state(generator, task_state)
