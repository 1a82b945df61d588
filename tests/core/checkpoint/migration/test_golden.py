"""Checkpoints of every schema there ever was can be read, migrated and gone on from."""

from __future__ import annotations

import random
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from heliograph import Checkpoint, RunResult
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.migration.migrations import migrate
from heliograph.core.checkpoint.state.schema import SCHEMA

GOLDEN = Path(__file__).parents[3] / "golden"
SCHEMAS = range(1, SCHEMA + 1)
CASES = [(schema, step) for schema in SCHEMAS for step in (4, 6)]


def load_maker() -> ModuleType:
    spec = spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_maker()


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy of a schema's files, brought up to date."""
    copy = tmp_path / "golden"
    shutil.copytree(GOLDEN / f"schema_{request.param}", copy)
    migrate(copy)
    return copy


@pytest.mark.parametrize("schema", SCHEMAS)
def test_there_are_golden_files_of_every_schema(schema: int) -> None:
    for path in sorted((GOLDEN / f"schema_{schema}").glob("*.pth")):
        assert torch.load(path, weights_only=True)["schema"] == schema
    names = [path.name for path in (GOLDEN / f"schema_{schema}").glob("*.pth")]
    assert sorted(names) == ["golden_epoch_1_iter_4.pth", "golden_epoch_1_iter_6.pth"]


def test_golden_files_of_the_present_schema_need_no_migration() -> None:
    for path in (GOLDEN / f"schema_{SCHEMA}").glob("*.pth"):
        assert storage.load(path)["schema"] == SCHEMA


@pytest.mark.parametrize(("folder", "step"), CASES, indirect=["folder"])
def test_a_run_goes_on_from_it(folder: Path, step: int, tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder, keep_last=None, resume=folder / f"golden_epoch_1_iter_{step}.pth")
    result = make.fit(checkpoint, tmp_path / "logs", epochs=make.EPOCHS)
    place = result.progress
    assert (place.epoch, place.batch, place.steps) == (make.EPOCHS, 0, make.EPOCHS * make.BATCHES)
    assert (place.samples, place.validations) == (16 * make.EPOCHS, make.EPOCHS)
    assert result.metrics["train/learning_rate"] == pytest.approx(0.1 * 0.5**2)
    assert f"resumed at epoch 1, batch {step - 4}, step {step}" in "\n".join(result.notes)


@pytest.mark.parametrize("folder", SCHEMAS, indirect=True)
def test_it_knows_the_newest_and_the_best(folder: Path, tmp_path: Path) -> None:
    entries, passed_over = storage.entries(folder, make.NAME)
    assert [each.progress["steps"] for each in entries] == [6, 4]
    assert passed_over == []
    metric, mode, value = entries[1].judged_by or ("", "", None)
    assert (metric, mode) == ("validation/loss", "min")
    assert value == entries[1].metrics["validation/loss"]
    assert entries[0].judged_by is None


@pytest.mark.parametrize("folder", SCHEMAS, indirect=True)
def test_a_resumed_run_goes_on_keeping_what_is_kept(folder: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder, keep_last=1, keep_best=1, monitor="validation/loss", resume="auto")
    result = make.fit(checkpoint, tmp_path / "logs", epochs=2)
    best = min(storage.read_manifest(path).metrics["validation/loss"] for path in folder.glob("*.pth"))
    assert result.best_checkpoint is not None
    assert storage.read_manifest(result.best_checkpoint).metrics["validation/loss"] == best
    names = {path.name for path in folder.glob("*.pth")}  # the former have no identity: they may be of two trainings
    assert names == {"golden_epoch_2_iter_8.pth", "golden_epoch_1_iter_4.pth", "golden_epoch_1_iter_6.pth"}

    make.fit(checkpoint, tmp_path / "logs", epochs=3)
    names = {path.name for path in folder.glob("*.pth")}
    assert names - {result.best_checkpoint.name} == {
        "golden_epoch_3_iter_12.pth",
        "golden_epoch_1_iter_4.pth",
        "golden_epoch_1_iter_6.pth",
    } - {result.best_checkpoint.name}


@pytest.mark.parametrize("folder", SCHEMAS, indirect=True)
def test_its_weights_serve_without_a_run(folder: Path) -> None:
    task = make.make_task()
    metrics = storage.load_weights(task, folder / "golden_epoch_1_iter_4.pth")  # saved behind its validation
    inputs, targets = make.make_data().tensors
    with torch.no_grad():
        loss = task.loss_fn(task.model.eval()(inputs), targets).item()
    assert loss == pytest.approx(metrics["validation/loss"], rel=1e-5)


def test_what_was_migrated_does_not_claim_to_be_exact(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "schema_1", tmp_path / "golden")
    migrate(tmp_path / "golden")
    result = make.fit(Checkpoint(tmp_path / "golden", resume="auto"), tmp_path / "logs", epochs=2)
    assert result.resume is not None
    assert result.resume.guarantee == "not exact"
    assert "it was migrated" in result.resume.reasons[0]


def test_a_run_goes_on_from_a_checkpoint_of_helios(tmp_path: Path) -> None:
    task = make.make_task()
    with torch.no_grad():
        task.model[0].weight.fill_(0.125)
    optimizer = make.make_optimizer(list(task.model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    parts = {"model": task.model, "optimizer": optimizer, "scheduler": scheduler}
    saved = {
        "version": "1.0.0",
        "training_state": {
            "current_iteration": 4,
            "global_iteration": 4,
            "global_epoch": 1,
            "validation_cycles": 1,
            "dataset_iter": 0,
        },
        "model": {name: part.state_dict() for name, part in parts.items()},
        "rng": {
            "torch": torch.get_rng_state(),
            "rand": random.getstate(),
            "numpy": np.random.default_rng(1).bit_generator.state,
        },
    }
    torch.save(saved, tmp_path / "golden_epoch_1_iter_4.pth")
    migrate(tmp_path)
    weights = storage.load(tmp_path / "golden_epoch_1_iter_4.pth")["modules"]["model"]["0.weight"]
    result = make.fit(Checkpoint(tmp_path, resume="auto"), tmp_path / "logs", epochs=make.EPOCHS)
    assert torch.equal(weights, torch.full((3, 2), 0.125))
    place = result.progress
    assert (place.epoch, place.steps, place.samples) == (make.EPOCHS, make.EPOCHS * make.BATCHES, 32)
    assert result.resume is not None
    assert result.resume.guarantee == "not exact"
    assert "early_stopping" in result.resume.fresh_plugins
    assert "rng_capture" not in result.resume.fresh_plugins


@pytest.mark.parametrize("step", [4, 6])
def test_what_needs_no_migration_is_exact(step: int, tmp_path: Path) -> None:
    """The rest of the run is the one that a run from the beginning has; only floating point may differ by machine."""
    shutil.copytree(GOLDEN / f"schema_{SCHEMA}", tmp_path / "golden")
    resume = tmp_path / "golden" / f"golden_epoch_1_iter_{step}.pth"
    resumed = make.fit(Checkpoint(tmp_path / "golden", resume=resume), tmp_path / "logs", epochs=make.EPOCHS)
    whole = make.fit(Checkpoint(tmp_path / "whole"), tmp_path / "logs", epochs=make.EPOCHS)
    assert resumed.resume is not None
    assert resumed.resume.guarantee == "exact"
    assert resumed.metrics == pytest.approx(whole.metrics, rel=1e-4)


@pytest.mark.parametrize("schema", SCHEMAS[:-1])
@pytest.mark.parametrize("how", ["auto", "path"])
def test_an_older_schema_is_gone_on_from_as_it_is(schema: int, how: str, tmp_path: Path) -> None:
    """As if it had been migrated before; the files stay."""
    shutil.copytree(GOLDEN / f"schema_{schema}", tmp_path / "golden")
    shutil.copytree(GOLDEN / f"schema_{schema}", tmp_path / "migrated")
    said = [line.strip() for line in migrate(tmp_path / "migrated") if line.startswith("    ")]
    before = {path: path.read_bytes() for path in (tmp_path / "golden").iterdir() if path.suffix in (".pth", ".json")}

    def resumed(folder: Path) -> RunResult:
        newest = folder / "golden_epoch_1_iter_6.pth"
        result: RunResult = make.fit(
            Checkpoint(folder, resume="auto" if how == "auto" else newest), tmp_path / "logs", epochs=2
        )
        return result

    result, migrated = resumed(tmp_path / "golden"), resumed(tmp_path / "migrated")
    assert {path: path.read_bytes() for path in before} == before
    assert result.last_checkpoint is not None
    assert "resumed at epoch 1, batch 2, step 6" in "\n".join(result.notes)
    told = [note for note in result.notes if note.startswith("the checkpoint was migrated in memory, ")]
    assert told
    assert {note.removeprefix("the checkpoint was migrated in memory, ") for note in told} <= set(said)
    assert result.resume is not None
    assert migrated.resume is not None
    assert (result.resume.guarantee, result.resume.reasons) == (migrated.resume.guarantee, migrated.resume.reasons)
    assert result.metrics == migrated.metrics
    assert not any(note.startswith("passed over: ") and "iter_6" in note for note in result.notes)
