"""A fork has the samples and the draws of its parent, and differs first where it was changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.checkpoint.storage import reader
from heliograph.core.objects.equality import Leaf, leaves
from heliograph.core.program import UsageError
from heliograph.packages.recorder.tests.mutated_programs import Program, make
from heliograph.packages.recorder.tests.reruns.failing import Failing
from heliograph.packages.recorder.tests.reruns.varied import OF_THE_FILES, varied
from heliograph.packages.recorder.tests.reruns.varied import state_of as state_of_run
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import dropout_task, random_batches
from heliograph_recorder import Digests, NotExact, Recorder, diverge, fork, goto
from heliograph_recorder.divergence.compare import Kind
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import EventEntry
from heliograph_trackers import CSVLog

OF_THE_TRAINING = (
    "training_id", "forked_from", "saved_at", "run_name", "log_history", "objects",
)  # fmt: skip


def program(folder: Path, *plugins: Any, **options: Any) -> tuple[h.Trainer, dict[str, Any]]:
    """Return a trainer that saves every third step."""
    torch.manual_seed(0)
    saving = [h.SaveSchedule(steps=3), h.Checkpoint(folder, keep_last=None, resume="auto")]
    recorder = Recorder(folder, digests=Digests(gradients=1, weights=1))
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
    return reader.load(path)


def state_of(path: Path | None) -> dict[str, Leaf]:
    """Return what is in a checkpoint, but for what belongs to its training."""
    state = saved_state(path)
    for name in OF_THE_TRAINING:
        state.pop(name, None)
    state["progress"].pop("earlier_seconds")
    for name in OF_THE_FILES:
        state["plugins"].pop(name, None)
    return leaves(state)


@pytest.mark.parametrize("at", [0, 3, 5, 9])
def test_with_nothing_changed_it_equals_its_parent(at: int, tmp_path: Path) -> None:
    parent = trained(tmp_path / "x")
    forked = fork(tmp_path / "x", program, at=at, into=tmp_path / "y")
    assert state_of(forked.last_checkpoint) == state_of(parent.last_checkpoint)
    assert forked.metrics == parent.metrics
    divergence = diverge(tmp_path / "x", tmp_path / "y")
    assert divergence.first is None
    assert divergence.digested == divergence.batches == (10 if at == 0 else 7 if at < 9 else 1)
    assert forked.warnings == ()


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
def test_with_nothing_changed_any_program_equals_its_parent(seed: int, tmp_path: Path) -> None:
    made = partial(make, Program(seed)) if seed % 2 else partial(varied, seed)
    trainer, options = made(tmp_path / "x")
    parent = trainer.fit(**options)
    at = 1 + seed % max(1, parent.progress.steps - 1)
    forked = fork(tmp_path / "x", lambda folder: made(folder), at=at, into=tmp_path / "y")
    assert state_of(forked.last_checkpoint) == state_of(parent.last_checkpoint)
    assert diverge(tmp_path / "x", tmp_path / "y").first is None


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
    fork(tmp_path / "x", program, at=at, into=tmp_path / "y", change=change)
    found = diverge(tmp_path / "x", tmp_path / "y").first
    assert found is not None
    assert found.kind == kind
    assert found.epoch * 5 + found.batch == at + (kind != "plugin")  # it is toggled before the batch counts


def test_other_data_from_a_step_on(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def with_other_data(folder: Path) -> Any:
        trainer, options = program(folder)
        options["train"][3][0].add_(0.5)
        return trainer, options

    forked = fork(tmp_path / "x", with_other_data, at=3, into=tmp_path / "y", exact=False)
    assert [each for each in forked.warnings if "differs from its parent" in each] == []
    found = diverge(tmp_path / "x", tmp_path / "y").first
    assert found is not None
    assert (found.kind, found.epoch, found.batch) == ("data", 0, 4)


def test_a_program_that_acts_before_the_step_is_a_warning(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def with_other_data(folder: Path) -> Any:
        trainer, options = program(folder)
        options["train"][3][0].add_(0.5)
        return trainer, options

    forked = fork(tmp_path / "x", with_other_data, at=5, into=tmp_path / "y", exact=False)
    (warning,) = [each for each in forked.warnings if "differs from its parent" in each]
    assert "4: the batch differs" in warning
    assert "give at=3 " in warning


def test_its_lineage_is_in_its_state_its_manifests_and_its_recording(tmp_path: Path) -> None:
    parent = trained(tmp_path / "x")
    child = fork(tmp_path / "x", program, at=6, into=tmp_path / "y", change=halve_rate)
    grandchild = fork(tmp_path / "y", program, at=9, into=tmp_path / "z")
    ids = [saved_state(each.last_checkpoint)["training_id"] for each in (parent, child, grandchild)]
    assert len(set(ids)) == 3
    origin = {"training": ids[0], "step": 6, "recording": str(parent.recording)}
    later = {"training": ids[1], "step": 9, "recording": str(child.recording), "forked_from": origin}
    assert saved_state(child.last_checkpoint)["forked_from"] == origin
    assert saved_state(grandchild.last_checkpoint)["forked_from"] == later
    assert grandchild.last_checkpoint is not None
    entries = read(tmp_path / "z").attempts[0].entries
    (loaded,) = [each for each in entries if isinstance(each, EventEntry) and each.event == "checkpoint_loaded"]
    assert loaded.data["forked_from"] == later
    assert f"a fork of {child.recording} at step 9" in grandchild.notes
    story = "".join(grandchild.explain().split())  # paths are wrapped
    for run, step in ((child, 9), (parent, 6)):
        assert f"aforkof{run.recording}atstep{step}" in story


def test_it_is_resumed_as_any_training(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    whole = fork(tmp_path / "x", program, at=3, into=tmp_path / "y", change=halve_rate)

    with pytest.raises(RuntimeError, match="killed"):
        fork(
            tmp_path / "x", lambda folder: program(folder, Failing(8)), at=3, into=tmp_path / "z", change=halve_rate
        )  # fmt: skip
    trainer, options = program(tmp_path / "z")
    resumed = trainer.fit(**options)
    assert resumed.resume is not None
    assert (resumed.resume.reasons, resumed.resume.step) == ((), 6)
    assert state_of(resumed.last_checkpoint) == state_of(whole.last_checkpoint)
    assert saved_state(resumed.last_checkpoint)["forked_from"]["step"] == 3
    assert diverge(tmp_path / "y", tmp_path / "z").first is None


def test_a_kill_before_its_first_scheduled_save_does_not_lose_the_change(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def failing(folder: Path) -> Any:
        return program(folder, Failing(6))

    with pytest.raises(RuntimeError, match="killed"):
        fork(tmp_path / "x", failing, at=4, into=tmp_path / "y", change=halve_rate)
    trainer, options = program(tmp_path / "y")
    resumed = trainer.fit(**options).resume
    assert resumed is not None
    assert resumed.step == 5
    found = diverge(tmp_path / "x", tmp_path / "y").first
    assert found is not None
    assert (found.kind, found.step) == ("learning_rate", 5)


def test_by_default_it_begins_at_the_newest_checkpoint(tmp_path: Path) -> None:
    trainer, options = program(tmp_path / "x", epochs=1)
    trainer.fit(**options)
    assert fork(tmp_path / "x", program, into=tmp_path / "y").progress.steps == 10
    assert diverge(tmp_path / "x", tmp_path / "y").first is not None  # it is longer


def test_a_step_that_it_never_reaches_is_a_warning(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    for path in (tmp_path / "x").glob("*iter_10*"):
        path.unlink()
    result = fork(tmp_path / "x", program, at=10, into=tmp_path / "y", change=halve_rate)
    assert_each(result.warnings, ("Nothing was changed", "step 10"))


@pytest.mark.parametrize("at", [10, None])
def test_where_nothing_is_left_to_train_nothing_is_written(at: int | None, tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises(ValueError, match=r"step 10 of .*\(--at"):
        fork(tmp_path / "x", program, at=at, into=tmp_path / "y", change=halve_rate)
    assert not (tmp_path / "y").exists()
    assert fork(tmp_path / "x", partial(longer, epochs=3), at=at, into=tmp_path / "y").progress.steps == 15


def longer(folder: Path, epochs: int = 3) -> Any:
    """Return the program with another length."""
    return program(folder, epochs=epochs)


def test_a_recording_with_little_to_compare_is_a_warning(tmp_path: Path) -> None:
    def plain(folder: Path) -> Any:
        trainer, options = program(folder)
        trainer.plugins.unregister("recorder")
        trainer.plugins.register(Recorder(folder))
        return trainer, options

    trainer, options = plain(tmp_path / "x")
    trainer.fit(**options)
    forked = fork(tmp_path / "x", plain, at=5, into=tmp_path / "y")
    assert [each for each in forked.warnings if each.startswith("the recording has neither")]
    assert fork(tmp_path / "x", plain, at=6, into=tmp_path / "z").warnings == ()  # nothing is done again
    with goto(tmp_path / "x", plain, step=6) as paused:
        assert [each for each in paused.notes if each.startswith("the recording has neither")]
        assert str(paused.comparison).startswith("These runs cannot be")


def test_into_a_fork_with_its_change(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    fork(tmp_path / "x", program, at=5, into=tmp_path / "y", change=halve_rate)
    states: dict[int, Any] = {}

    def see(run: h.Run, event: h.GradientsReady) -> None:
        states[run.progress.steps + 1] = state_of_run(run)

    def seen(folder: Path) -> Any:
        trainer, options = program(folder)
        trainer.bus.on(h.GradientsReady, see, lane=h.Lane.REPORT)
        return trainer, options

    fork(tmp_path / "x", seen, at=5, into=tmp_path / "z", change=halve_rate)
    kept = dict(states)
    for path in (tmp_path / "y").glob("*.pth"):
        path.unlink()  # so that the change lies on the way
    for step in (5, 6, 9):
        with goto(tmp_path / "y", program, step=step, change=halve_rate) as paused:
            assert state_of_run(paused.run) == kept[step]
            assert paused.comparison.first is None
            assert paused.notes == []
    with pytest.raises(NotExact, match=r"halve_rate after step 5.*--change"):
        goto(tmp_path / "y", program, step=5)
    with goto(tmp_path / "y", program, step=7, exact=False) as paused:
        assert paused.comparison.first is not None
    with pytest.raises(NotExact, match="halve_rate after step 5"):
        fork(tmp_path / "y", program, at=7, into=tmp_path / "grandchild")
    again = fork(tmp_path / "y", program, at=5, into=tmp_path / "grandchild", change=halve_rate)
    assert again.progress.steps == 10
    assert diverge(tmp_path / "y", tmp_path / "grandchild").first is None


def test_the_save_of_a_change_is_where_a_fork_is_continued(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    fork(tmp_path / "x", program, at=5, into=tmp_path / "y", change=halve_rate)
    with goto(tmp_path / "y", program, step=8) as paused:
        assert paused.comparison.first is None
        assert paused.comparison.digested == 1  # since the save after step 6


@pytest.mark.parametrize("change", [halve_rate, 7])
def test_a_change_of_what_is_no_fork(change: Any, tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises((ValueError, TypeError), match=r"a changed fork|got 7"):
        goto(tmp_path / "x", program, step=3, change=change)


def test_a_fork_that_stops_is_reported_by_its_stop(tmp_path: Path) -> None:
    def stop(run: h.Run) -> None:
        run.control.stop("enough", by="fork")

    def validating(folder: Path) -> Any:
        validation = random_batches(1, inputs=16, outputs=1)
        return program(folder, h.ValidationSchedule(epochs=1), validation=validation)

    trainer, options = validating(tmp_path / "x")
    trainer.fit(**options)
    fork(tmp_path / "x", validating, at=6, into=tmp_path / "y", change=stop)
    found = diverge(tmp_path / "x", tmp_path / "y")
    assert found.first is not None
    assert_facts(found.first.text, "stopped by fork", "enough")


def test_a_fork_that_goes_back_to_before_its_change_is_changed_again(tmp_path: Path) -> None:
    rates: list[tuple[int, float]] = []

    def poisoned(folder: Path) -> Any:
        met: list[int] = []

        def poison(run: h.Run, event: h.BatchStart) -> None:
            rates.append((run.progress.batches, run.optimizer.param_groups[0]["lr"]))
            if folder.name == "y" and run.progress.batches == 5 and not met:
                met.append(5)
                run.batch = [torch.full_like(each, torch.nan) for each in run.batch]

        trainer, options = program(folder, h.RollBack())
        trainer.bus.on(h.BatchStart, poison)
        return trainer, options

    trainer, options = poisoned(tmp_path / "x")
    parent = saved_state(trainer.fit(**options).last_checkpoint)
    rates.clear()
    forked = fork(tmp_path / "x", poisoned, at=5, into=tmp_path / "y", change=halve_rate)
    assert [rate for batch, rate in rates if batch < 5] == [0.01] * 4  # 3 and 4, twice
    assert {rate for batch, rate in rates if batch >= 5} == {0.005}
    assert any("back at step 5" in note for note in forked.notes)
    state = saved_state(forked.last_checkpoint)
    assert state["forked_from"]["step"] == 5
    assert state["training_id"] != parent["training_id"]
    assert state["progress"]["steps"] == parent["progress"]["steps"] - 1  # the batch that is no number is left out
    assert min(int(path.stem.rpartition("_")[2]) for path in (tmp_path / "y").glob("*.pth")) == 5


def test_another_program_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def other(folder: Path) -> Any:
        trainer, options = program(folder)
        options["train"][3][0].add_(0.5)
        return trainer, options

    with pytest.raises(NotExact, match="4: the batch differs"):
        fork(tmp_path / "x", other, at=5, into=tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_a_folder_with_a_training_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises(ValueError, match=r"x already has .*\(--into"):
        fork(tmp_path / "x", program, at=3, into=tmp_path / "x")


def test_a_program_without_a_folder_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises(UsageError, match=r"takes no folder"):
        fork(tmp_path / "x", lambda: program(tmp_path / "x"), at=3, into=tmp_path / "y")


def test_a_change_that_is_no_function(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    with pytest.raises(TypeError, match="takes a function"):
        fork(tmp_path / "x", program, at=3, into=tmp_path / "y", change={"lr": 1})  # type: ignore[arg-type]


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    trainer, options = program(tmp_path / "x")
    for name in ("checkpoint", "save_schedule"):
        trainer.plugins.unregister(name)
    trainer.fit(**options)
    with pytest.raises(ValueError, match="has no checkpoint"):
        fork(tmp_path / "x", program, into=tmp_path / "y")


def test_the_pages_of_its_parent_stay_as_they_are(tmp_path: Path) -> None:
    def tracked(folder: Path) -> Any:
        log = [h.LogSchedule(steps=1), CSVLog(tmp_path / "log.csv"), h.JsonlLog(tmp_path / "log.jsonl")]
        return program(folder, *log)

    trainer, options = tracked(tmp_path / "x")
    trainer.fit(**options)
    before = {name: (tmp_path / name).read_text() for name in ("log.csv", "log.jsonl")}
    result = fork(tmp_path / "x", tracked, at=6, into=tmp_path / "y", change=halve_rate)
    assert {name: (tmp_path / name).read_text()[: len(text)] for name, text in before.items()} == before
    assert any("checkpoint start fresh: " in note for note in result.notes)


def test_its_parent_is_a_hyper_parameter_for_trackers(tmp_path: Path) -> None:
    parent = trained(tmp_path / "x")
    seen: list[Any] = []

    class Seeing(h.Plugin):
        """Keeps the description."""

        affects_training = False

        @h.on(h.TrainStart)
        def see(self, run: h.Run, event: h.TrainStart) -> None:
            """Keep it."""
            seen.append(dict(run.hyper_parameters))

    fork(tmp_path / "x", lambda folder: program(folder, Seeing(), hyper_parameters={"a": 1}), at=6, into=tmp_path / "y")
    assert seen == [{"a": 1, "forked_from": f"{parent.recording} at step 6"}]


def test_a_change_that_fails_leaves_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "x")

    def fail(run: h.Run) -> None:
        raise ZeroDivisionError("in the change")

    with pytest.raises(ZeroDivisionError, match="in the change"):
        fork(tmp_path / "x", program, at=5, into=tmp_path / "y", change=fail)
    assert not (tmp_path / "y").exists()
