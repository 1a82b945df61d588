"""What commit cf23987 drew, and left in mid-run, is drawn and resumed to the last bit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from heliograph import Checkpoint, RunResult
from heliograph.__main__ import main
from heliograph.core.checkpoint import storage
from heliograph.tests.kit import GOLDEN, load_golden
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import Recorder

FORMER = GOLDEN / "draws_1"
ALONE = [("alone", 4), ("alone", 6), ("workers", 6)]
make = load_golden("make_draws")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the files."""
    return shutil.copytree(FORMER, tmp_path / "former")


def whole(kind: str, rank: int = 0) -> dict[str, list[float]]:
    """Return the losses and the weights of the run that nothing stopped; a task keeps its losses over a resume."""
    kept: dict[str, list[float]] = json.loads((FORMER / kind / f"whole_{rank}.json").read_text())
    return kept


def resume(folder: Path, kind: str, step: int, workers: int | None = None) -> tuple[dict[str, Any], RunResult]:
    """Do the rest of the run that left these files."""
    place = folder / kind
    checkpoint = Checkpoint(place, keep_last=None, resume=place / f"draws_epoch_1_iter_{step}.pth")
    done: tuple[dict[str, Any], RunResult] = make.fit(kind, checkpoint, Recorder(place, losses=True), workers=workers)
    return done


@pytest.mark.parametrize(("kind", "step"), ALONE)
def test_the_rest_of_a_run_equals_the_run_that_nothing_stopped(
    kind: str, step: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = storage.read_manifest(folder / kind / f"draws_epoch_1_iter_{step}.pth")
    monkeypatch.setattr("heliograph.core.snapshot.versions", lambda: dict(written.versions))
    found, result = resume(folder, kind, step)

    assert found == whole(kind)
    assert result.resume is not None
    assert (result.resume.guarantee, result.resume.reasons) == ("exact", ())


@pytest.mark.parametrize(("kind", "workers"), [("alone", 2), ("workers", 0)])
def test_it_does_so_with_another_number_of_workers(kind: str, workers: int, folder: Path) -> None:
    found, _ = resume(folder, kind, 6, workers)

    assert found == whole(kind)


@pytest.mark.parametrize("kind", ["alone", "workers"])
def test_a_whole_run_draws_what_it_drew(kind: str) -> None:
    found, _ = make.fit(kind)

    assert found == whole("alone") == whole("workers")


@pytest.mark.parametrize("kind", ["alone", "workers"])
def test_the_recording_says_of_both_parts(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder / kind)]) == 0
    assert capsys.readouterr().out.startswith("draws: completed\n  6 steps done\n")
    _, result = resume(folder, kind, 6)
    story = result.explain()

    assert story.startswith("draws: completed\n  3 epochs done\n")
    assert "epoch 1, batch 2, step 6, 24 samples" in story


# Two ranks.


def resume_on_ranks(folder: Path) -> dict[str, Any]:
    found, _ = resume(folder, "ranks", 6)
    return found


def train_on_ranks() -> tuple[dict[str, Any], str]:
    found, _ = make.fit("ranks")
    return found, os.environ["RANK"]


def test_two_ranks_resume_what_two_ranks_left(ranks: Pool, folder: Path) -> None:
    assert ranks(2).run(resume_on_ranks, folder) == [whole("ranks", rank) for rank in range(2)]


def test_two_ranks_draw_what_they_drew(ranks: Pool) -> None:
    assert ranks(2).run(train_on_ranks) == [(whole("ranks", rank), str(rank)) for rank in range(2)]
