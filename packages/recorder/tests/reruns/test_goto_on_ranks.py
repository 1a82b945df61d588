"""On two ranks every rank goes to the step, and each has the state that it had; forks equal their parent there, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.mutated_programs import Program, make
from heliograph.packages.recorder.tests.reruns.people import People
from heliograph.packages.recorder.tests.reruns.test_goto import Witness
from heliograph.packages.recorder.tests.reruns.varied import state_of, varied
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import NotExact, diverge, fork, goto

Programmed = Callable[[Path], tuple[h.Trainer, dict[str, Any]]]


def programmed(folder: Path, seed: int, workers: int = 0) -> tuple[h.Trainer, dict[str, Any]]:
    """Return a program with the engine that the group needs: half of them have much state."""
    return make(Program(seed), folder, workers=workers) if seed % 2 else varied(seed, folder, workers=workers)


def train_two(folder: Path) -> None:
    trainer, options = programmed(folder, 0)
    trainer.fit(**options)


def test_what_fails_on_another_number_of_ranks_says_so(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(train_two, tmp_path / "x")
    ways: list[Callable[[Programmed], object]] = [
        lambda program: goto(tmp_path / "x", program, step=5),
        lambda program: fork(tmp_path / "x", program, at=5, into=tmp_path / "y"),
    ]
    for way in ways:
        with pytest.raises(NotExact) as caught:
            way(partial(programmed, seed=0))
        facts = "2 ranks", "1 rank", "torchrun --nproc-per-node=2"
        assert [fact for fact in facts if fact not in caught.value.reasons[0]] == []


def go_to_steps(folder: Path, seed: int, *, workers: int = 0, asks: bool = False, count: int = 4) -> list[bool]:
    """Train, then go to some steps; return where each was as it had been."""
    trainer, options = programmed(folder, seed, workers)
    witness = Witness()
    for each in [People(seed)] * asks + [witness]:
        trainer.plugins.register(each)
    trainer.fit(**options)
    found = []
    for step in random.Random(seed).choices(sorted(witness.states), k=count):
        with goto(folder, lambda place: programmed(place, seed, workers), step=step) as paused:
            is_equal = state_of(paused.run) == witness.states[step]
            found.append(is_equal and paused.comparison.first is None)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(20))
def test_any_step_on_two_ranks(seed: int, ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(go_to_steps, tmp_path, seed) == [[True] * 4] * 2


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(4))
def test_any_step_on_two_ranks_with_two_workers(seed: int, ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(go_to_steps, tmp_path, seed, workers=2, count=1) == [[True]] * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_any_step_of_a_run_that_people_have_steered_on_two_ranks(seed: int, ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(go_to_steps, tmp_path, seed, asks=True) == [[True] * 4] * 2


def folders(folder: Path) -> tuple[str, bool]:
    """Return the temporary folder of this rank, and whether it is still there after all is closed."""
    trainer, options = programmed(folder, 1)
    trainer.fit(**options)
    with goto(folder, lambda place: programmed(place, 1), step=3, folder=folder) as paused:
        own = paused._folder.path
        assert own.is_dir()
        assert (own / "program").is_dir()
        paused.finish()
    return str(own), own.exists()


def test_the_folder_is_one_for_all_ranks_and_is_removed(ranks: Pool, tmp_path: Path) -> None:
    (own, _), (of_other, _) = ranks(2).run(folders, tmp_path)
    assert own == of_other
    assert not Path(own).exists()


def go_without_a_folder(folder: Path) -> str:
    """Return the error where the temporary folder cannot be made."""
    trainer, options = programmed(folder, 1)
    trainer.fit(**options)
    try:
        goto(folder, lambda place: programmed(place, 1), step=3, folder=folder / "nowhere")
    except FileNotFoundError as error:
        return str(error)
    return "it was made"


def test_a_folder_that_the_main_rank_cannot_make_is_an_error_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    one, other = ranks(2).run(go_without_a_folder, tmp_path)
    assert "No such file" in one
    assert one == other


def halve_rate(run: h.Run) -> None:
    """Change the learning rate."""
    next(iter(run.optimizers.values())).param_groups[0]["lr"] /= 2


def forked(folder: Path, seed: int, *, changes: bool) -> int:
    """Train, and fork after the third step; return how far the fork came."""
    trainer, options = programmed(folder / "x", seed)
    trainer.fit(**options)
    change = halve_rate if changes else None
    program: Programmed = lambda place: programmed(place, seed)  # noqa: E731
    return fork(folder / "x", program, at=3, into=folder / "y", change=change).progress.steps


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("changes", [False, True])
def test_a_fork_on_two_ranks(seed: int, changes: bool, ranks: Pool, tmp_path: Path) -> None:
    one, other = ranks(2).run(forked, tmp_path, seed, changes=changes)
    assert one == other
    first = diverge(tmp_path / "x", tmp_path / "y").first
    if not changes:
        assert first is None
        return
    assert first is not None
    assert (first.kind, first.step) == ("learning_rate", 4)
