from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.events import Request
from heliograph.packages.recorder.tests.recordings import attempt, fit
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import sgd
from heliograph_recorder import Recorder
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Batches, Counters, EventEntry, Recording
from heliograph_recorder.replays.replay import replay
from heliograph_recorder.replays.report import Replayed, ReplayedRequest
from heliograph_testing.chaos import Chaos, Fault
from torch import nn


def stepwise() -> list[Any]:
    return [h.LogSchedule(h.Every(steps=4)), h.ValidationSchedule(h.Every(steps=4))]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Return the recording of 16 steps in two epochs, with a log and a validation after every fourth."""
    folder = tmp_path_factory.mktemp("run")
    fit([*stepwise(), Recorder(folder)])
    return read(folder)


class Rising(h.Plugin):
    """Makes every validation worse than the one before."""

    @h.on(h.ValidationEnd, lane=h.Lane.MEASURE)
    def rise(self, run: h.Run, event: h.ValidationEnd) -> None:
        event.metrics["validation/rising"] = float(run.progress.steps)


@pytest.fixture(scope="module")
def rising(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Return the same, with a metric that gets worse, on which nobody stops."""
    folder = tmp_path_factory.mktemp("rising")
    fit([*stepwise(), Rising(), Recorder(folder)])
    return read(folder)


def stopping(patience: int) -> h.EarlyStopping:
    return h.EarlyStopping("validation/rising", patience=patience, mode="min")


class Reads(h.Plugin):
    """Reads something of the run on every batch."""

    def __init__(self, what: str, name: str = "reads") -> None:
        self.what, self.name = what, name
        self.values: list[Any] = []

    @h.on(h.BatchEnd)
    def read(self, run: h.Run, event: h.BatchEnd) -> None:
        value = run
        for word in self.what.split("."):
            value = getattr(value, word)
        self.values.append(value)


def test_another_schedule_requests_at_its_own_steps(recording: Recording) -> None:
    replayed = replay(recording, [h.LogSchedule(h.Every(steps=6), at_end=True)])
    steps = [(each.request.step, each.request.event) for each in replayed.asked]
    assert steps == [(6, "batch_end"), (12, "batch_end")]  # and the last step had its log
    assert [(attempt, request.step) for attempt, request in replayed.recorded_requests("log_schedule")] == [
        (1, 4),
        (1, 8),
        (1, 12),
        (1, 16),
    ]
    assert str(replayed.asked[1]) == ("attempt 1, epoch 1 batch 4 step 12 on batch_end: log - every 6 steps")


def test_a_stop_ends_the_run_where_it_would_have(rising: Recording) -> None:
    replayed = replay(rising, [stopping(2)])
    (end,) = replayed.ends
    assert (end.attempt, end.by, end.epoch, end.batch, end.step, end.did) == (1, "early_stopping", 1, 4, 12, False)
    assert end.reason == "validation/rising has not improved on 4 in 2 checks"
    assert [(each.request.step, each.after_end) for each in replayed.asked] == [
        (12, False),
        (16, True),
    ]
    text = str(replayed)
    assert "early_stopping would have requested" in text
    assert "recorded run continued" in text
    assert "the first: " not in text
    both = str(replay(rising, [stopping(2), stopping(3).named("later")]))
    assert_facts(
        both,
        "\nlater would have",
        "nothing\n",
        "after that end",
        "attempt 1, epoch 1",
        "batch 8 step 16",
        "validation_end: stop - ",
    )
    assert "4, step 12, stopped" in text
    assert "(the recorded run continued)" in text
    assert "0, step 16: 2" in text


class Warns(h.Plugin):
    """Says at the end that something did not happen."""

    @h.on(h.RunClosed)
    def warn(self, run: h.Run, event: h.RunClosed) -> None:
        run.warn("Nothing was saved.")


def test_the_warnings_of_a_replayed_plugin_are_in_the_report(tmp_path: Path) -> None:
    fit([*stepwise(), Recorder(tmp_path)])
    assert replay(tmp_path, [Warns()]).notes == ["WARNING: Nothing was saved."]


def test_a_run_that_was_stopped_would_have_continued(tmp_path: Path) -> None:
    fit([*stepwise(), Rising(), stopping(1), Recorder(tmp_path)])
    replayed = replay(tmp_path, [stopping(5)])
    assert not replayed.asked
    assert not replayed.ends
    assert_each(replayed.notes, ("attempt 1", "stopped at epoch 1", "batch 0 step 8", "not recorded"))
    assert "request: attempt 1," in str(replayed)


def test_the_same_plugin_ends_the_run_as_it_did(tmp_path: Path) -> None:
    fit([*stepwise(), Rising(), stopping(2), Recorder(tmp_path)])
    replayed = replay(tmp_path, [stopping(2)])
    (end,) = replayed.ends
    assert (end.epoch, end.batch, end.step, end.did) == (1, 4, 12, True)
    assert not replayed.notes


def test_requests_of_others_are_in_the_control(rising: Recording) -> None:
    seen: list[tuple[int, bool, bool]] = []

    class Sees(h.Plugin):
        @h.on(h.BatchEnd)
        def see(self, run: h.Run, event: h.BatchEnd) -> None:
            seen.append((run.progress.steps, run.control.should_log, run.control.should_validate))

    replay(rising, [Sees()])
    assert [step for step, log, validation in seen if log and validation] == [4, 8, 12, 16]
    assert len(seen) == 16


def test_a_veto_of_a_replayed_plugin_postpones_the_stop(rising: Recording) -> None:
    class Vetoes(h.Plugin):
        @h.on(h.ShouldStop)
        def veto(self, run: h.Run, event: h.ShouldStop) -> None:
            if run.control.should_stop and run.progress.steps < 14:
                run.control.veto_stop("not yet")

    replayed = replay(rising, [stopping(2), Vetoes()])
    (end,) = replayed.ends
    assert (end.step, end.by) == (14, "early_stopping")
    assert [(request.step, request.times) for request in replayed.requests("vetoes")] == [(12, 2)]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("task", "'task'"),
        ("modules", "'modules'"),
        ("batch", "'batch'"),
        ("stepping.forward", "'forward'"),
        ("outputs", "'outputs'"),
        ("loss", "losses=True"),
        ("schedulers", "'schedulers'"),
        ("data.train_loader", "'train_loader' of the data"),
        ("engine.device", "'device' of the engine"),
        ("data.seed", "'seed' of the data"),
        ("report.plugin_seconds", "`explain`"),
        ("optimizer.state", "'state' of the optimizer"),
    ],
)
def test_a_plugin_that_reads_what_is_not_recorded_is_switched_off_and_the_others_continue(
    recording: Recording, what: str, message: str
) -> None:
    plugin, other = Reads(what), Reads("progress.steps", "other")
    replayed = replay(recording, [plugin, other])
    (text,) = replayed.unheld["reads"]
    assert message in text
    assert_facts(text, "(batch_end, attempt 1", "epoch 0 batch 1", "step 1)")
    assert_facts(str(replayed), "reads would have", "nothing\n", "switched off", text)
    assert other.values == list(range(1, 17))
    assert plugin.values == []


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("name", "run"),
        ("length.max_epochs", 2),
        ("length.batches_per_epoch", 8),
        ("data.validation_sets", ("",)),
        ("engine.world_size", 1),
        ("report.is_replay", True),
        ("stepping.optimizer_name", "optimizer"),
        ("report.queue", None),
        ("report.tracks", False),
        ("hyper_parameters", {}),
    ],
)
def test_what_is_recorded_can_be_read(recording: Recording, what: str, value: Any) -> None:
    plugin = Reads(what)
    replayed = replay(recording, [plugin])
    assert not replayed.unheld
    assert plugin.values == [value] * 16


def test_losses_are_tensors_of_what_was_recorded(tmp_path: Path) -> None:
    fit([Recorder(tmp_path, losses=True)], validation=None, epochs=1)
    plugin = Reads("loss")
    replay(tmp_path, [plugin])
    (block,) = [entry for entry in read(tmp_path).attempts[0].entries if isinstance(entry, Batches)]
    assert block.losses is not None
    assert [loss.item() for loss in plugin.values] == list(block.losses)
    assert plugin.values[0].dtype == torch.float64
    assert plugin.values[0].shape == ()


def test_a_guard_needs_the_losses(recording: Recording) -> None:
    replayed = replay(recording, [h.NaNGuard("skip")])
    (text,) = replayed.unheld["nan_guard"]
    assert "losses=True" in text
    assert_facts(text, "(forward_end, attempt 1", "epoch 0 batch 0", "step 0)")


def test_built_in_plugins_change_nothing_outside_the_replay(recording: Recording, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    state = torch.get_rng_state()
    plugins = [h.RNGCapture(), h.Checkpoint(tmp_path / "checkpoints"), h.Preemption(), h.EMA(), h.LearningRate("step")]
    replayed = replay(recording, [*plugins, Recorder(tmp_path / "again")])
    names = {"preemption", "rng_capture", "ema", "learning_rate", "checkpoint", "verify_resume", "recorder"}
    assert set(replayed.unheld) == names
    assert "signals that the process" in replayed.unheld["preemption"][0]
    assert {number: signal.getsignal(number) for number in before} == before
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plugin_that_fails_would_have_failed_the_run(recording: Recording) -> None:
    class Fails(h.Plugin):
        @h.on(h.Log)
        def fail(self, run: h.Run, event: h.Log) -> None:
            raise KeyError("what")

    replayed = replay(recording, [Fails(), h.LogSchedule(h.Every(steps=8))])
    assert_each(replayed.failed.items(), ("fails", "KeyError: 'what' (log", "attempt 1", "epoch 0 batch 4", "step 4"))
    (end,) = replayed.ends
    assert (end.is_failure, end.by, end.step, end.did) == (True, "fails", 4, False)
    assert [(request.step) for request in replayed.requests("log_schedule")] == [8, 16]
    assert "fails: KeyError: 'what'" in str(replayed)


def test_an_observer_is_forgiven(recording: Recording, caplog: pytest.LogCaptureFixture) -> None:
    class Watches(h.Plugin):
        policy = "observer"

        @h.on(h.Log)
        def fail(self, run: h.Run, event: h.Log) -> None:
            raise KeyError("what")

    replayed = replay(recording, [Watches()])
    assert not replayed.ends
    (note,) = replayed.notes
    assert_facts(note, "'watches'", "3 errors", "log at step ")


def test_logs_can_be_written_again(tmp_path: Path) -> None:
    first = h.JsonlLog(tmp_path / "live.jsonl")
    fit([*stepwise(), h.LearningRate("epoch"), first, Recorder(tmp_path / "run")], scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))  # fmt: skip  # noqa: E501
    again = [h.JsonlLog(tmp_path / "again.jsonl"), h.TensorBoard(tmp_path / "tensorboard"), h.FileLog(tmp_path / "log")]
    replayed = replay(tmp_path / "run", again)
    assert not replayed.unheld
    assert not replayed.failed
    varying = ("time", "attempt", "training")
    lines = [
        [
            {key: value for key, value in json.loads(line).items() if key not in varying}
            for line in path.read_text().splitlines()
        ]
        for path in (tmp_path / "live.jsonl", tmp_path / "again.jsonl")
    ]
    without = [[{**line, "metrics": _plain(line.get("metrics", {}))} for line in each] for each in lines]
    assert without[0] == without[1]
    assert len(without[0]) == 9
    assert list((tmp_path / "tensorboard").iterdir())
    (log,) = (tmp_path / "log").iterdir()
    assert log.read_text().count("epochs done: 1") == 1


def _plain(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics but for the throughput, which is measured again."""
    return {name: value for name, value in metrics.items() if name != "train/samples_per_second"}


def test_the_order_of_the_steps_of_several_optimizers_is_not_recorded(tmp_path: Path) -> None:
    class Pair(h.Task):
        def __init__(self) -> None:
            self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

        def training_step(self, run: h.Run, batch: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
            yield "one", self.one(batch).sum()
            yield "two", self.two(batch).sum()

    class Steps(h.Plugin):
        @h.on(h.StepEnd)
        def see(self, run: h.Run, event: h.StepEnd) -> None: ...

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    plugins = [h.LogSchedule(h.Every(steps=2)), Recorder(tmp_path)]
    data = [torch.ones(1, 1)] * 4
    result = h.Trainer(plugins, device="cpu").fit(Pair(), data, optimizer={"one": sgd, "two": sgd}, epochs=1)
    with pytest.raises(ValueError, match="several optimizers"):
        replay(tmp_path, [Steps()])
    replayed = replay(tmp_path, [h.LogSchedule(h.Every(steps=2))])
    assert [request.step for request in replayed.requests("log_schedule")] == [each.step for each in result.history]


def test_plugins_of_a_resumed_run_continue_from_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    class Dies(h.Plugin):
        @h.on(h.BatchEnd)
        def die(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == 10:
                raise RuntimeError("the power is out")

    def plugins() -> list[Any]:
        saving = [h.SaveSchedule(h.Every(steps=8)), h.Checkpoint(tmp_path, resume="auto")]
        return [*stepwise(), Rising(), *saving, Recorder(tmp_path)]

    with pytest.raises(RuntimeError, match="the power is out"):
        fit([*plugins(), Dies()])
    fit(plugins())
    replayed = replay(tmp_path, [stopping(3), h.LogSchedule(h.Every(steps=3))])
    assert [each.status for each in replayed.recorded] == ["failed", "completed"]
    (end,) = replayed.ends  # checks at 4, 8, and in the second attempt at 12 and 16
    assert (end.attempt, end.step) == (2, 16)
    logs = [(each.attempt, each.request.step) for each in replayed.asked if each.request.verb == "log"]
    assert logs == [(1, 3), (1, 6), (1, 9), (2, 9), (2, 12), (2, 15)]


def test_a_checkpoint_of_another_run_leaves_plugins_without_a_state(tmp_path: Path) -> None:
    fit([h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(tmp_path)], validation=None, epochs=1)
    fit(
        [h.Checkpoint(tmp_path, resume="auto"), h.SaveSchedule(h.Every(epochs=5)), Recorder(tmp_path)],
        validation=None,
    )
    replayed = replay(tmp_path, [h.LogSchedule(h.Every(steps=5))])
    assert [request.step for request in replayed.requests("log_schedule")] == [10, 15]
    (note,) = replayed.notes
    assert_facts(note, "attempt 1", "continued from ", "not recorded", "without")


def test_a_validation_without_a_training_is_replayed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
    trainer = h.Trainer([Recorder(tmp_path)], device="cpu")
    trainer.validate(
        task, {"a": [(torch.ones(2, 1), torch.ones(2, 1))] * 3, "b": [(torch.ones(1, 1), torch.ones(1, 1))]}
    )

    class Counts(h.Plugin):
        def __init__(self) -> None:
            self.batches: list[tuple[str, int]] = []

        @h.on(h.ValidationBatchEnd)
        def count(self, run: h.Run, event: h.ValidationBatchEnd) -> None:
            self.batches.append((event.dataset, run.progress.evaluated))
            assert run.data.evaluation_batches == 4
            assert run.optimizer is None
            if len(self.batches) == 2:
                run.control.cut_validation("enough")

    plugin = Counts()
    replayed = replay(tmp_path, [plugin])
    assert plugin.batches == [("a", 1), ("a", 2), ("a", 3), ("b", 4)]  # the recorded validation is not cut
    assert [request.verb for request in replayed.requests("counts")] == ["cut_validation"]
    assert not replayed.failed


def test_a_notice_in_the_last_validation_is_known_by_its_cut(tmp_path: Path) -> None:
    plugins = [h.ValidationSchedule(epochs=9), h.SaveSchedule(epochs=9), h.Checkpoint(tmp_path / "saved")]
    notice = Chaos([Fault("preempt", at="validation_batch_end")], journal=tmp_path / "journal.jsonl")
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 4
    task = h.Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
    trainer = h.Trainer([*plugins, Recorder(tmp_path), h.Preemption(), notice], device="cpu")
    result = trainer.fit(task, data, validation=data, optimizer=sgd(), epochs=1, on_interrupt="return")
    assert (result.stopped_by, result.progress.validations) == ("preemption", 0)
    assert [each.by for each in result.history if each.verb == "save"] == ["save_schedule", "preemption"]
    assert len(list((tmp_path / "saved").glob("*.pth"))) == 1
    replayed = replay(tmp_path, [h.EarlyStopping("validation/loss")])
    assert not [note for note in replayed.notes if note.startswith("WARNING")]


def test_a_plugin_is_toggled_as_in_the_run(tmp_path: Path) -> None:
    def plugins() -> list[Any]:
        return [h.LogSchedule(h.Every(steps=2)), h.ValidationSchedule(h.Every(steps=4))]

    trainer = h.Trainer([*plugins(), Recorder(tmp_path)], device="cpu")
    steps = {4: trainer.plugins.disable, 10: trainer.plugins.enable}

    def toggle(run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.steps in steps:
            steps[run.progress.steps]("log_schedule")

    trainer.bus.on(h.BatchEnd, toggle)
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 16
    task = h.Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
    result = trainer.fit(task, data, validation=data[:1], optimizer=sgd(), epochs=1)
    live = [request.step for request in result.history if request.verb == "log"]
    assert live == [2, 4, 11, 12, 14, 16]
    replayed = replay(tmp_path, [h.LogSchedule(h.Every(steps=2))])
    assert [request.step for request in replayed.requests("log_schedule")] == live


def test_a_plugin_that_was_disabled_after_the_last_save_is_enabled_in_the_next_attempt(tmp_path: Path) -> None:
    def train(disable_at: int, fail_at: int) -> h.RunResult:
        saving = [h.SaveSchedule(steps=2, at_end=False), h.Checkpoint(tmp_path, resume="auto")]
        trainer = h.Trainer([h.LogSchedule(h.Every(steps=1)), *saving, Recorder(tmp_path)], device="cpu")

        def act(run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == disable_at:
                trainer.plugins.disable("log_schedule")
            if run.progress.steps == fail_at:
                raise RuntimeError("the power is out")

        trainer.bus.on(h.BatchEnd, act, lane=h.Lane.REPORT)
        data = [(torch.ones(1, 1), torch.ones(1, 1))] * 6
        return trainer.fit(h.Supervised(nn.Linear(1, 1), nn.functional.mse_loss), data, optimizer=sgd(), epochs=1)

    with pytest.raises(RuntimeError, match="the power is out"):
        train(3, 4)
    result = train(-1, -1)
    replayed = replay(tmp_path, [h.LogSchedule(h.Every(steps=1))])
    steps = [asked.request.step for asked in replayed.asked if asked.attempt == 2]
    assert steps == [request.step for request in result.history if request.verb == "log"] == [3, 4, 5, 6]


def test_damage_is_noted() -> None:
    damaged = attempt(
        EventEntry("train_start", 0.0, Counters()), damage=("line 7: no JSON",), plan={"train_start": ("recorder",)}
    )
    replayed = replay(Recording(Path("x.recording"), (damaged,)), [h.LogSchedule(h.Every(steps=2))])
    assert_each(replayed.notes, ("attempt 1", "line 7", "no JSON"))
    assert "killed" in replayed.recorded[0].status
    assert "epoch 0, batch 0," in str(replayed)


def test_only_the_last_attempt_may_be_running() -> None:
    killed = attempt(EventEntry("train_start", 0.0, Counters()), plan={"train_start": ("recorder",)})
    text = str(replay(Recording(Path("x.recording"), (killed, killed)), []))
    assert_facts(text, "attempt 1", "killed at epoch 0", "batch 0, step 0\n")
    assert "epoch 0, batch 0," in text


def test_much_damage_is_shortened() -> None:
    damaged = attempt(damage=tuple(f"line {number}: it is damaged" for number in range(2, 1_300)))
    notes = replay(Recording(Path("x.recording"), (damaged,)), []).notes
    assert_each(notes[9:], ("attempt 1", "line 11", "it is damaged"), ("attempt 1", "1,288 more"))


def test_an_empty_recording_is_noted() -> None:
    replayed = replay(Recording(Path("x.recording"), ()), [h.LogSchedule(h.Every(steps=2))])
    (note,) = replayed.notes
    assert "killed" in note


def test_two_plugins_of_one_name_are_refused(recording: Recording) -> None:
    with pytest.raises(ValueError, match="'log_schedule'"):
        replay(recording, [h.LogSchedule(h.Every(steps=2)), h.LogSchedule(h.Every(steps=3))])


def test_there_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no recording"):
        replay(tmp_path, [])


def test_an_event_during_a_batch_does_not_count_it_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stumbles(h.Plugin):
        policy = "observer"

        @h.on(h.StepEnd)
        def stumble(self, run: h.Run, event: h.StepEnd) -> None:
            raise RuntimeError("once more")

    class Counts(h.Plugin):
        def __init__(self) -> None:
            self.steps: list[int] = []

        @h.on(h.StepEnd)
        def count(self, run: h.Run, event: h.StepEnd) -> None:
            self.steps.append(run.progress.steps)

    fit([Stumbles(), Recorder(tmp_path)], validation=None, epochs=1)
    plugin = Counts()
    replay(tmp_path, [plugin])
    assert plugin.steps == list(range(1, 9))


def test_control_characters_of_reasons_are_escaped() -> None:
    request = Request("stop", "mine", "one\x1b[2J\ntwo", 0, 1, 1)
    replayed = Replayed(Path("a"), ("mine",), [ReplayedRequest(1, request, after_end=False)])
    assert str(replayed).splitlines()[-1] == r"  attempt 1, epoch 0 batch 1 step 1: stop - one\x1b[2J two"
