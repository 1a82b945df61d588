"""A fork has the samples and the draws of its parent, and differs first where it was changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.builtin_callbacks.checkpoint.description import describe
from heliograph.builtin_callbacks.recorder.diverge.report import Kind
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.format.records import EventEntry
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.state.leaves import Leaf, leaves
from heliograph.testing.resume import UsageError
from heliograph.tests.kit import dropout_task, random_batches
from heliograph.tests.mutated_programs import Program, make

OF_THE_TRAINING = (
    "training_id", "forked_from", "saved_at", "run_name", "log_history", "unseen",
)  # fmt: skip


def program(folder: Path, *plugins: Any, **options: Any) -> tuple[h.Trainer, dict[str, Any]]:
    """Return a trainer that saves every third step."""
    torch.manual_seed(0)
    saving = [h.SaveSchedule(steps=3), h.Checkpoint(folder, keep_last=None, resume="auto")]
    recorder = h.Recorder(folder, digests=h.Digests(gradients=1, weights=1))
    trainer = h.Trainer([h.RNGCapture(1), h.GradientClipping(0.1), *saving, recorder, *plugins], device="cpu")
    batches, adam = random_batches(5, inputs=16, outputs=1), partial(torch.optim.AdamW, lr=0.01)
    return trainer, {"task": dropout_task(), "train": batches, "optimizer": adam, "epochs": 2, **options}


def trained(folder: Path) -> h.RunResult:
    """Train."""
    trainer, options = program(folder)
    return trainer.fit(**options)


def saved_state(path: Path | None) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    assert path is not None
    return storage.load(path)


def state_of(path: Path | None) -> dict[str, Leaf]:
    """Return what is in a checkpoint, but for what belongs to its training."""
    state = saved_state(path)
    for name in OF_THE_TRAINING:
        state.pop(name, None)
    state["progress"].pop("earlier_seconds")
    state["plugins"] = {name: state["plugins"][name] for name in ("rng_capture",)}
    return leaves(state)


@pytest.mark.parametrize("at", [0, 3, 5, 9])
def test_with_nothing_changed_it_equals_its_parent(at: int, tmp_path: Path) -> None:
    parent = trained(tmp_path / "x")
    forked = h.fork(tmp_path / "x", program, at=at, into=tmp_path / "y")
    assert state_of(forked.last_checkpoint) == state_of(parent.last_checkpoint)
    assert forked.metrics == parent.metrics
    divergence = h.diverge(tmp_path / "x", tmp_path / "y")
    assert divergence.first is None
    assert divergence.digested == divergence.batches == (10 if at == 0 else 7 if at < 9 else 1)
    assert forked.warnings == ()


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
def test_with_nothing_changed_any_program_equals_its_parent(seed: int, tmp_path: Path) -> None:
    trainer, options = make(Program(seed), tmp_path / "x")
    parent = trainer.fit(**options)
    at = 1 + seed % max(1, parent.progress.steps - 1)
    forked = h.fork(tmp_path / "x", lambda folder: make(Program(seed), folder), at=at, into=tmp_path / "y")
    assert state_of(forked.last_checkpoint) == state_of(parent.last_checkpoint)
    assert h.diverge(tmp_path / "x", tmp_path / "y").first is None


def halve_rate(run: h.Run) -> None:
    """Change the learning rate."""
    run.optimizer.param_groups[0]["lr"] /= 2


def decay(run: h.Run) -> None:
    """Change the weight decay."""
    run.optimizer.param_groups[0]["weight_decay"] = 0.5


def unclip(run: h.Run) -> None:
    """Switch a plugin off."""
    run.plugins.disable("gradient_clipping")


CHANGES: dict[str, tuple[Callable[[h.Run], None], Kind]] = {
    "a learning rate": (halve_rate, "learning_rate"),
    "a weight decay": (decay, "options"),
    "a plugin": (unclip, "plugin"),
}


@pytest.mark.parametrize("at", [3, 5])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_acts_from_its_step_on_and_nowhere_before(name: str, at: int, tmp_path: Path) -> None:
    change, kind = CHANGES[name]
    trained(tmp_path / "x")
    h.fork(tmp_path / "x", program, at=at, into=tmp_path / "y", change=change)
    found = h.diverge(tmp_path / "x", tmp_path / "y").first
    assert found is not None
    assert found.kind == kind
    assert found.epoch * 5 + found.batch == at + (kind != "plugin")  # it is toggled before the batch counts


def test_other_data_from_a_step_on(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def with_other_data(folder: Path) -> Any:
        trainer, options = program(folder)
        options["train"][3][0].add_(0.5)
        return trainer, options

    h.fork(tmp_path / "x", with_other_data, at=3, into=tmp_path / "y", exact=False)
    found = h.diverge(tmp_path / "x", tmp_path / "y").first
    assert found is not None
    assert (found.kind, found.epoch, found.batch) == ("data", 0, 4)


def test_its_lineage_is_in_its_state_its_manifests_and_its_recording(tmp_path: Path) -> None:
    parent = trained(tmp_path / "x")
    child = h.fork(tmp_path / "x", program, at=6, into=tmp_path / "y", change=halve_rate)
    grandchild = h.fork(tmp_path / "y", program, at=9, into=tmp_path / "z")
    ids = [saved_state(each.last_checkpoint)["training_id"] for each in (parent, child, grandchild)]
    assert len(set(ids)) == 3
    origin = {"training": ids[0], "step": 6, "recording": str(parent.recording)}
    later = {"training": ids[1], "step": 9, "recording": str(child.recording), "forked_from": origin}
    assert saved_state(child.last_checkpoint)["forked_from"] == origin
    assert saved_state(grandchild.last_checkpoint)["forked_from"] == later
    assert grandchild.last_checkpoint is not None
    assert storage.read_manifest(grandchild.last_checkpoint).forked_from == f"training {ids[1]} at step 9"
    assert f"fork of     training {ids[1]} at step 9" in describe(grandchild.last_checkpoint)
    entries = read(tmp_path / "z").attempts[0].entries
    (loaded,) = [each for each in entries if isinstance(each, EventEntry) and each.event == "checkpoint_loaded"]
    assert loaded.data["forked_from"] == later
    assert f"a fork of {child.recording} at step 9" in grandchild.notes
    story = "".join(grandchild.explain().split())  # paths are wrapped
    for run, step in ((child, 9), (parent, 6)):
        assert f"aforkof{run.recording}atstep{step}" in story


def test_it_is_resumed_as_any_training(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    whole = h.fork(tmp_path / "x", program, at=3, into=tmp_path / "y", change=halve_rate)

    class Failing(h.Plugin):
        """Fails at a step."""

        affects_training = False

        @h.on(h.StepEnd)
        def fail(self, run: h.Run, event: h.StepEnd) -> None:
            """Fail."""
            if run.progress.steps == 8:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        h.fork(
            tmp_path / "x", lambda folder: program(folder, Failing()), at=3, into=tmp_path / "z", change=halve_rate
        )  # fmt: skip
    trainer, options = program(tmp_path / "z")
    resumed = trainer.fit(**options)
    assert resumed.resume is not None
    assert (resumed.resume.guarantee, resumed.resume.step) == ("exact", 6)
    assert state_of(resumed.last_checkpoint) == state_of(whole.last_checkpoint)
    assert saved_state(resumed.last_checkpoint)["forked_from"]["step"] == 3
    assert h.diverge(tmp_path / "y", tmp_path / "z").first is None


def test_a_kill_before_its_first_scheduled_save_does_not_lose_the_change(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    class Failing(h.Plugin):
        """Fails at a step."""

        affects_training = False

        @h.on(h.StepEnd)
        def fail(self, run: h.Run, event: h.StepEnd) -> None:
            """Fail."""
            if run.progress.steps == 6:
                raise RuntimeError("killed")

    def failing(folder: Path) -> Any:
        return program(folder, Failing())

    with pytest.raises(RuntimeError, match="killed"):
        h.fork(tmp_path / "x", failing, at=4, into=tmp_path / "y", change=halve_rate)
    trainer, options = program(tmp_path / "y")
    resumed = trainer.fit(**options).resume
    assert resumed is not None
    assert resumed.step == 5
    found = h.diverge(tmp_path / "x", tmp_path / "y").first
    assert found is not None
    assert (found.kind, found.step) == ("learning_rate", 5)


def test_by_default_it_begins_at_the_newest_checkpoint(tmp_path: Path) -> None:
    trainer, options = program(tmp_path / "x", epochs=1)
    trainer.fit(**options)
    assert h.fork(tmp_path / "x", program, into=tmp_path / "y").progress.steps == 10
    assert h.diverge(tmp_path / "x", tmp_path / "y").first is not None  # it is longer


def test_a_step_that_it_never_reaches_is_a_warning(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    result = h.fork(tmp_path / "x", program, at=10, into=tmp_path / "y", change=halve_rate)
    assert result.warnings == ("Nothing was changed: the run ended before a batch after step 10.",)


def test_another_program_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def other(folder: Path) -> Any:
        trainer, options = program(folder)
        options["train"][3][0].add_(0.5)
        return trainer, options

    with pytest.raises(h.NotExact, match="The first difference: epoch 0, batch 4, step 4: another batch"):
        h.fork(tmp_path / "x", other, at=5, into=tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_a_folder_with_a_training_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises(ValueError, match=r"x holds a training already .*give into= another folder"):
        h.fork(tmp_path / "x", program, at=3, into=tmp_path / "x")


def test_a_program_without_a_folder_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises(UsageError, match="let make_trainer take it"):
        h.fork(tmp_path / "x", lambda: program(tmp_path / "x"), at=3, into=tmp_path / "y")


def test_a_change_that_is_no_function(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises(TypeError, match="takes a function of the run"):
        h.fork(tmp_path / "x", program, at=3, into=tmp_path / "y", change={"lr": 1})  # type: ignore[arg-type]


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    trainer, options = program(tmp_path / "x")
    for name in ("checkpoint", "save_schedule"):
        trainer.plugins.unregister(name)
    trainer.fit(**options)
    with pytest.raises(ValueError, match="has no checkpoint that could be continued"):
        h.fork(tmp_path / "x", program, into=tmp_path / "y")


def test_the_pages_of_its_parent_stay_as_they_are(tmp_path: Path) -> None:
    def tracked(folder: Path) -> Any:
        log = [h.LogSchedule(steps=1), h.CSVLog(tmp_path / "log.csv"), h.JsonlLog(tmp_path / "log.jsonl")]
        return program(folder, *log)

    trainer, options = tracked(tmp_path / "x")
    trainer.fit(**options)
    before = {name: (tmp_path / name).read_text() for name in ("log.csv", "log.jsonl")}
    result = h.fork(tmp_path / "x", tracked, at=6, into=tmp_path / "y", change=halve_rate)
    assert {name: (tmp_path / name).read_text()[: len(text)] for name, text in before.items()} == before
    assert any("plugins that start fresh" in note for note in result.notes)


def test_its_parent_is_a_hyper_parameter_for_trackers(tmp_path: Path) -> None:
    parent = trained(tmp_path / "x")
    seen: list[Any] = []

    class Seeing(h.Plugin):
        """Keeps the description of the run."""

        affects_training = False

        @h.on(h.TrainStart)
        def see(self, run: h.Run, event: h.TrainStart) -> None:
            """Keep it."""
            seen.append(dict(run.hyper_parameters))

    h.fork(
        tmp_path / "x", lambda folder: program(folder, Seeing(), hyper_parameters={"a": 1}), at=6, into=tmp_path / "y"
    )
    assert seen == [{"a": 1, "forked_from": f"{parent.recording} at step 6"}]


def test_a_refusal_is_raised_itself_through_any_plugin(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def other(folder: Path) -> Any:
        trainer, options = program(folder, h.ExceptionPassThrough())
        options["train"][3][0].add_(0.5)
        return trainer, options

    with pytest.raises(h.NotExact, match="The first difference: epoch 0, batch 4"):
        h.fork(tmp_path / "x", other, at=5, into=tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_a_change_that_fails_leaves_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def fail(run: h.Run) -> None:
        raise ZeroDivisionError("in the change")

    with pytest.raises(ZeroDivisionError, match="in the change"):
        h.fork(tmp_path / "x", program, at=5, into=tmp_path / "y", change=fail)
    assert not (tmp_path / "y").exists()
