"""What a rehearsal does and reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    DataModule,
    EarlyStopping,
    EpochEnd,
    Event,
    Every,
    GradientAccumulation,
    LearningRate,
    LogSchedule,
    Once,
    Phases,
    Plugin,
    RNGCapture,
    Run,
    SavePoint,
    SaveSchedule,
    StepEnd,
    Supervised,
    Task,
    Trainer,
    TrainStart,
    ValidationSchedule,
    on,
    tuning,
    warmup_cosine,
)
from heliograph.core.rehearsal.report import Rehearsal, plan_of
from heliograph.tests.core.rehearsal.pair import Pair
from heliograph.tests.kit import adam, class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn

FIRST_STEP = ["batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end", "log"]
VALIDATION = [
    "validation_start",
    *["validation_batch_start", "validation_batch_end"] * 2,
    "validation_end",
]
SAVE = ["save_point", "checkpoint_saved"]
WHOLE = [
    *["train_start", "epoch_start"],
    *[*FIRST_STEP, *VALIDATION, *SAVE, "should_stop"],
    *["batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end", "should_stop"],
    *["epoch_end", "log", *VALIDATION, *SAVE, "checkpoint_pruned", "should_stop"],
    *["last_boundary", "train_end", "run_closed"],
]
RESUMED = [
    *["train_start", "checkpoint_loaded", "should_stop", "epoch_start"],
    *["batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end", "should_stop"],
    *["epoch_end", "log", *VALIDATION, *SAVE, "checkpoint_pruned", "should_stop"],
    *["last_boundary", "train_end", "run_closed"],
]


RESUMED_EQUAL = "resumed at step 1; nothing to verify: no step was repeated"
SINK: list[Any] = []  # of the module, and so out of reach: what objects hold is put back


@pytest.fixture(autouse=True)
def _empty() -> None:
    SINK.clear()


def planned(folder: Path, *more: Any, **options: Any) -> list[Any]:
    """Return the plugins of a long training, which log, validate and save every ten epochs."""
    every = Every(epochs=10)
    schedules = [LogSchedule(every), ValidationSchedule(every), SaveSchedule(every)]
    return [RNGCapture(), *schedules, Checkpoint(folder / "runs", **options), *more]


def rehearse(plugins: list[Any], task: Any = None, train: Any = None, **options: Any) -> Rehearsal:
    options = {"optimizer": adam(), "epochs": 100, "validation": class_batches(3), **options}
    task = linear_classifier() if task is None else task
    return tuning.rehearse(
        Trainer(plugins, device="cpu"), task, class_batches(5) if train is None else train, **options
    )


def test_the_events_of_a_rehearsal(tmp_path: Path) -> None:
    """Of a training that logs, validates and saves every ten epochs; then those of the run that resumes it."""
    found = rehearse(planned(tmp_path))
    assert list(found.events) == WHOLE
    assert list(found.resumed_events) == RESUMED
    assert found.ok
    assert found.resume == RESUMED_EQUAL
    assert found.problems == found.warnings == ()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "runs" / ".verified.jsonl"]


def test_a_resume_quotes_the_rehearsal(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": adam(), "validation": class_batches(3), "epochs": 20}
    for before in (None, f"{date.today()}, 1 step"):
        if before is not None:
            found = tuning.rehearse(
                Trainer(planned(tmp_path), device="cpu"), linear_classifier(), class_batches(5), **options
            )
            assert found.ok
        trainer = Trainer(planned(tmp_path, resume="auto"), device="cpu")
        trainer.fit(linear_classifier(), class_batches(5), **{**options, "epochs": 10})
        trainer = Trainer(planned(tmp_path, resume="auto"), device="cpu")
        result = trainer.fit(linear_classifier(), class_batches(5), **options)
        assert result.resume is not None
        assert result.resume.verified_before == before
        assert (f"verified before: {before}" in str(result)) == (before is not None)
    (line,) = map(json.loads, (tmp_path / "runs" / ".verified.jsonl").read_text().splitlines())
    assert line == {
        "date": str(date.today()), "run": "run", "steps": 1, "result": "identical", "by": "rehearse",
    }  # fmt: skip


def test_a_rehearsal_with_a_problem_and_a_search_for_a_batch_size_leave_no_line(tmp_path: Path) -> None:
    class Stops(Plugin):
        asks = ("stop",)

        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            run.control.stop("enough")

    assert not rehearse(planned(tmp_path, Stops())).ok
    assert list(tmp_path.iterdir()) == []
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    trainer = Trainer([RNGCapture(), Checkpoint(tmp_path / "runs", every=Every(epochs=1))], device="cpu")
    assert tuning.find_batch_size(trainer, linear_classifier(), data, largest=4, optimizer=adam()) == 4
    assert list(tmp_path.iterdir()) == []


def test_the_length_and_the_size_are_predicted(tmp_path: Path) -> None:
    found = rehearse(planned(tmp_path, keep_last=3))
    length = found.prediction
    assert (length.steps, length.validations, length.saves) == (500, 10, 10)
    assert length.validation_seconds is not None
    assert length.save_seconds is not None
    rest = 10 * length.validation_seconds + 10 * length.save_seconds
    assert found.seconds == pytest.approx(length.first_step_seconds + 499 * length.step_seconds + rest)
    assert found.checkpoint_bytes is not None
    assert found.bytes == 4 * found.checkpoint_bytes  # three, and the one that is being written
    assert found.free_bytes is not None
    assert found.free_bytes > found.bytes
    assert found.gpu_bytes is None
    assert found.redirected == {"checkpoint": [tmp_path / "runs"]}


@pytest.mark.parametrize(("limit", "batches"), [(None, 7), (0.5, 3), ({"b": 1}, 5)])
def test_a_limited_validation_is_predicted_as_it_will_be(limit: Any, batches: int) -> None:
    sets = {"a": class_batches(4), "b": class_batches(3)}
    if limit == 0.5:
        sets = {"a": class_batches(4), "b": class_batches(2)}  # 2 and 1
    trainer = Trainer([ValidationSchedule(epochs=1)], device="cpu")
    options: Any = {"validation": sets, "limit_validation": limit, "optimizer": adam(), "epochs": 2}
    run = trainer.run(linear_classifier(), class_batches(3), **options)
    assert plan_of(run).validation_batches == batches
    run.hooks.closing.close()
    found = tuning.rehearse(trainer, linear_classifier(), class_batches(3), **options)
    assert found.ok
    read = 3 if limit == {"b": 1} else 4  # two of each set, but no more than the run itself would read
    assert found.events.count("validation_batch_end") == read * found.events.count("validation_end")


def test_the_report_is_a_text_for_people(tmp_path: Path) -> None:
    lines = str(rehearse(planned(tmp_path)))
    assert max(map(len, lines.split("\n"))) <= 80 + len(str(tmp_path))
    text = " ".join(lines.split())
    assert "run 'run' model: Supervised" in text
    assert "length: 100 epochs, 500" in text
    assert "rehearsed: 2 steps, 2" in text
    assert "500 steps of " in text
    assert "; 10 validations" in text
    assert f"; to {tmp_path / 'runs'}" in text
    assert text.endswith("no problems")


def test_a_length_that_is_not_known_is_not_predicted() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            yield from class_batches(7)

    found = rehearse([EarlyStopping("train/loss"), LogSchedule(Every(epochs=1))], None, Endless(), validation=None)
    assert found.prediction.steps is None
    assert found.seconds is None
    assert found.prediction.saves == 0
    assert "an unknown time" in str(found)


@pytest.mark.parametrize("steps", [1, 20])
def test_steps_are_a_length_for_schedulers_and_fractions_where_the_loader_has_none(steps: int, tmp_path: Path) -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            yield from class_batches(7)

    plugins = [LearningRate("step"), LogSchedule(fraction=0.5), Checkpoint(tmp_path, every=Every(epochs=1))]
    length = {"steps": steps, "epochs": None, "scheduler": warmup_cosine(0.3)}
    found = rehearse(plugins, None, Endless(), validation=None, **length)
    assert found.problems == ()
    assert found.prediction.steps == steps
    assert found.events.count("step_end") == min(steps, 2)
    assert found.events.count("epoch_end") == (steps > 1)


def test_every_kind_of_schedule_fires() -> None:
    """Of steps, epochs, seconds, samples, once in a run, and in filters of handlers."""

    class Rare(Plugin):
        @on(StepEnd, when=Every(steps=10_000))
        def by_steps(self, run: Run, event: StepEnd) -> None:
            SINK.append("steps")

        @on(BatchEnd, when=Every(seconds=36_000))
        def by_seconds(self, run: Run, event: BatchEnd) -> None:
            SINK.append("seconds")

        @on(EpochEnd, when=Every(epochs=50))
        def by_epochs(self, run: Run, event: EpochEnd) -> None:
            SINK.append("epochs")

        @on(BatchEnd, when=Once())
        def once(self, run: Run, event: BatchEnd) -> None:
            SINK.append("once")

    rare = Rare()
    trainer = Trainer([rare], device="cpu")
    options: dict[str, Any] = {"optimizer": sgd(), "epochs": 1}
    tuning.rehearse(trainer, linear_classifier(), class_batches(4), **options)
    assert SINK == ["steps", "seconds", "once", "steps", "seconds", "epochs"]
    SINK.clear()
    trainer.fit(linear_classifier(), class_batches(4), **options)
    assert SINK == ["once"]  # the filters are what they were


def test_a_validation_step_that_raises_is_found_before_the_first_hour(tmp_path: Path) -> None:
    class Wrong(Task):
        def __init__(self) -> None:
            self.model = nn.Linear(4, 2)

        def training_step(self, run: Run, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, run: Run, batch: Any) -> Tensor:
            raise KeyError("labels")

    with pytest.raises(KeyError, match="labels") as raised:
        rehearse(planned(tmp_path), Wrong())
    notes = "\n".join(raised.value.__notes__)
    assert "(batch 0), epoch 0," in notes
    assert "heliograph: in the whole" in notes
    assert list(tmp_path.iterdir()) == []


def test_what_fit_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plugin requests a validation"):
        rehearse([], validation=class_batches(1))
    with pytest.raises(TypeError, match="argument 'epoch'"):
        rehearse([], validation=None, epoch=3)


@pytest.mark.parametrize("where", ["train", "stream", "validation"])
def test_data_that_can_be_read_only_once_are_refused(where: str) -> None:
    stream = iter(class_batches(3))
    given = {"train": stream, "stream": {"a": stream, "b": class_batches(2)}}
    train, options = (given.get(where), {} if where in given else {"validation": {"a": stream}})
    with pytest.raises(ValueError, match="list_iterator can be read"):
        rehearse([ValidationSchedule(Every(epochs=1))], None, train, **options)
    assert len(list(stream)) == 3


def test_state_that_no_checkpoint_holds_is_a_problem(tmp_path: Path) -> None:
    """A plugin whose state is not saved, and which the weights depend on."""

    class Growing(Plugin):
        def __init__(self) -> None:
            self.factor, self.numbers = 1.0, count(2)

        @on(StepEnd)
        def scale(self, run: Run, event: StepEnd) -> None:
            self.factor = float(next(self.numbers))
            run.task.model.weight.data.mul_(self.factor)

    growing = Growing()
    found = rehearse(planned(tmp_path, growing))
    assert not found.ok
    assert_facts(found.problems[0], "resumed run", "model.weight", "epoch 0")
    assert "plugins.growing.numbers (itertools.count)" in found.problems[0]
    assert growing.factor == 1.0


def test_draws_that_are_not_kept_are_a_problem(tmp_path: Path) -> None:
    """Dropout without RNGCapture."""
    torch.manual_seed(0)
    task = Supervised(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), nn.functional.cross_entropy)
    (problem,) = rehearse(planned(tmp_path)[1:], task).problems
    assert "epoch 0, batch 2," in problem
    assert "untracked: random generators" in problem


def test_accumulation_phases_and_several_sets(tmp_path: Path) -> None:
    """Two windows of each phase, two batches of each set."""

    class Phase(Plugin):
        affects_training = False

        @on(BatchEnd)
        def note(self, run: Run, event: BatchEnd) -> None:
            with places.open("a") as file:  # objects are put back
                print(run.progress.epoch, run.progress.batch, file=file)

    places = tmp_path / "places"

    sets = {"a": class_batches(4), "b": class_batches(1)}
    data = Phases(class_batches(9), class_batches(8))
    plugins = planned(tmp_path, GradientAccumulation(3), Phase())
    found = rehearse(plugins, None, data, validation=sets)
    assert found.ok
    whole = [(0, batch) for batch in range(1, 7)] + [(1, batch) for batch in range(1, 7)]
    seen = [tuple(map(int, line.split())) for line in places.read_text().splitlines()]
    assert seen == [*whole, *whole[3:]]  # and the run that resumes after the first window
    assert found.events.count("validation_batch_end") == found.events.count("validation_end") * 3


def test_several_optimizers_and_a_scheduler(tmp_path: Path) -> None:
    task = Pair(nn.functional.cross_entropy)
    before = {name: value.clone() for name, value in task.one.state_dict().items()}
    schedulers = {name: lambda each: torch.optim.lr_scheduler.StepLR(each, 1) for name in ("one", "two")}
    found = rehearse(
        planned(tmp_path, LearningRate("step")), task, optimizer={"one": adam(), "two": sgd()}, scheduler=schedulers
    )
    assert found.ok
    assert found.events.count("step_end") == 4
    assert all(torch.equal(before[name], value) for name, value in task.one.state_dict().items())


def test_a_data_module_is_opened_and_closed_by_each_run(tmp_path: Path) -> None:
    class Data(DataModule):
        def set_up(self) -> None:
            SINK.append("set_up")

        def tear_down(self) -> None:
            SINK.append("tear_down")

        def train(self) -> Any:
            return class_batches(5)

        def validation(self) -> Any:
            return class_batches(3)

    trainer = Trainer(planned(tmp_path), device="cpu")
    assert tuning.rehearse(trainer, linear_classifier(), Data(), optimizer=adam(), epochs=100).ok
    assert SINK == ["set_up", "tear_down"] * 3  # the plan, the run, the one that resumes it


def test_the_checkpoints_of_the_run_are_neither_resumed_nor_touched(tmp_path: Path) -> None:
    plugins = planned(tmp_path, resume="auto")
    task = linear_classifier()
    options: dict[str, Any] = {"optimizer": adam(), "validation": class_batches(3)}
    Trainer(plugins, device="cpu").fit(task, class_batches(5), epochs=2, **options)
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*.pth")}
    found = tuning.rehearse(
        Trainer(planned(tmp_path, resume="auto"), device="cpu"), task, class_batches(5), epochs=100, **options
    )
    assert found.ok
    assert list(found.events) == WHOLE
    assert {path: path.read_bytes() for path in (tmp_path / "runs").glob("*.pth")} == before


def test_a_plugin_that_writes_where_it_always_does_is_named(tmp_path: Path) -> None:
    class Notes(Plugin):
        def __init__(self) -> None:
            self.path = tmp_path / "notes.txt"

        @on(EpochEnd)
        def write(self, run: Run, event: EpochEnd) -> None:
            self.path.write_text("an epoch")

    found = rehearse([Notes()], validation=None)
    assert found.unredirected == ("notes",)
    assert "not redirected: notes" in str(found)


def test_a_plugin_that_takes_no_part(tmp_path: Path) -> None:
    class Report(Plugin):
        rehearses = False

        @on(TrainStart)
        def send(self, run: Run, event: TrainStart) -> None:
            SINK.append("sent")

    report = Report()
    trainer = Trainer([report], device="cpu")
    found = tuning.rehearse(trainer, linear_classifier(), class_batches(3), optimizer=sgd(), epochs=3)
    assert found.left_out == ("report",)
    assert SINK == []
    assert trainer.plugins.is_enabled(report)


def test_a_saver_of_ones_own_is_not_resumed() -> None:
    """It has no way to resume: `verify-resume` compares such a program."""

    class Saver(Plugin):
        @on(SavePoint)
        def save(self, run: Run, event: SavePoint) -> None:
            run.state_dict()

    found = rehearse([RNGCapture(), SaveSchedule(Every(epochs=1)), Saver()], validation=None)
    assert found.ok
    assert (found.resume, found.checkpoint_bytes, found.resumed_events) == ("", None, ())
    assert "no resume: no plugin can do it" in " ".join(str(found).split())


def test_a_place_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    (problem,) = rehearse([*planned(tmp_path)[:-1], Checkpoint(tmp_path / "runs" / "x")]).problems
    assert_facts(problem, "'checkpoint'", tmp_path / "runs" / "x", tmp_path / "runs", "is a file")


def test_a_disk_that_is_too_small_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph.core.rehearsal.rehearsal.room", lambda path: (100, ""))
    monkeypatch.setattr("heliograph.core.rehearsal.rehearsal.room", lambda path: (100, ""))
    (problem,) = rehearse(planned(tmp_path)).problems
    assert_facts(problem, "bytes", "100 are free")


def test_the_failure_of_an_observer_and_an_early_stop_are_problems() -> None:
    class Breaks(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            raise LookupError("no such metric")

    class Stops(Plugin):
        asks = ("stop",)

        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            run.control.stop("enough")

    breaks, stops = rehearse([Breaks(), Stops()], validation=None).problems[::-1]
    assert_facts(breaks, "'breaks' failed", "batch_end", "step 1", "LookupError: no such metric")
    assert_facts(stops, "'stops'", "stopped", "enough")


def test_warnings_are_problems_where_the_trainer_is_strict(tmp_path: Path) -> None:
    """Nothing writes what is saved."""
    plugins = [SaveSchedule(Every(epochs=1))]
    options: dict[str, Any] = {"optimizer": sgd(), "epochs": 2}
    found = tuning.rehearse(Trainer(plugins, device="cpu"), linear_classifier(), class_batches(3), **options)
    assert found.ok
    assert "no plugin writes" in found.warnings[0]
    strict = Trainer([SaveSchedule(Every(epochs=1))], device="cpu", strict=True)
    found = tuning.rehearse(strict, linear_classifier(), class_batches(3), **options)
    assert "no plugin writes" in found.problems[0]


def test_a_short_run_is_rehearsed_whole(tmp_path: Path) -> None:
    """Shorter than two steps an epoch."""
    found = rehearse(planned(tmp_path), None, class_batches(1), epochs=None, steps=1)
    assert found.ok
    assert found.events.count("step_end") == 1
    assert found.prediction.steps == 1


def test_readers_of_events_of_ones_own_are_called() -> None:
    class Custom(Event):
        """Something else."""

    class Emits(Plugin):
        @on(EpochEnd)
        def emit(self, run: Run, event: EpochEnd) -> None:
            run.bus.signal(Custom).emit(run, Custom())

    trainer = Trainer([Emits()], device="cpu")
    trainer.bus.on(Custom, lambda run, event: SINK.append(event.name))
    found = tuning.rehearse(trainer, linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1)
    assert SINK == ["custom"]
    assert "custom" in found.events


class Streams(Task):
    """Trains on batches by name, and validates on others."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)

    def training_step(self, run: Run, batch: dict[str, Any]) -> Tensor:
        losses = [nn.functional.cross_entropy(self.model(inputs), classes) for inputs, classes in batch.values()]
        return torch.stack(losses).mean()

    def validation_step(self, run: Run, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


def test_streams_and_a_checkpoint_that_requests_its_saves(tmp_path: Path) -> None:
    rarely = Every(epochs=10)
    trainer = Trainer([RNGCapture(), Checkpoint(tmp_path / "runs", every=rarely), ValidationSchedule(rarely)])
    streams: dict[str, Any] = {"train": {"a": class_batches(4), "b": class_batches(6)}, "optimizer": adam(0.1)}
    found = tuning.rehearse(trainer, Streams(), **streams, validation=class_batches(3), epochs=20)
    assert found.ok
    assert found.resume == RESUMED_EQUAL
    assert found.prediction.saves == 2
    assert found.bytes is not None
    assert found.free_bytes is not None
    overfitting = tuning.overfit(trainer, Streams(), **streams, steps=5)
    assert overfitting.last_loss < overfitting.first_loss
    assert overfitting.metrics == {}
    assert len(tuning.find_learning_rate(trainer, Streams(), **streams, steps=7, highest=1.0).rates) == 7


def test_what_would_fail_at_the_start_fails_here_too(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.pth"):
        rehearse([Checkpoint(tmp_path, every=Every(epochs=1), resume=tmp_path / "missing.pth")], validation=None)
    assert not list(tmp_path.iterdir())
