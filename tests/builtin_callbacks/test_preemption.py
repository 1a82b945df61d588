"""Preemption: real signals, in every phase, in this process and in children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent
from typing import Any

import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    Checkpoint,
    CheckpointSaved,
    EpochEnd,
    EpochStart,
    Event,
    Every,
    Lane,
    Log,
    LogSchedule,
    Plugin,
    Preemption,
    RNGCapture,
    Run,
    RunClosed,
    RunResult,
    SavePoint,
    SaveSchedule,
    ShouldStop,
    StepEnd,
    TestBatchEnd,
    TrainEnd,
    Trainer,
    TrainStart,
    ValidationBatchEnd,
    ValidationEnd,
    ValidationSchedule,
    ValidationStart,
    on,
)
from heliograph.core.host import hosted_by
from heliograph.core.system import signals
from heliograph.plugins import Plugins
from heliograph.tests.kit import EventRecorder
from heliograph.tests.messages import assert_each, assert_facts, has_facts

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Fail where a test leaves a handler behind, and keep the other tests safe from it."""
    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM)}
    yield
    left = {each: signal.getsignal(each) for each in former}
    for each, handler in former.items():
        signal.signal(each, handler)
    assert left == former


EVENTS: list[Any] = [TrainStart, EpochStart, BatchStart, StepEnd, BatchEnd, Log, ValidationStart, ValidationBatchEnd]
EVENTS += [ValidationEnd, SavePoint, CheckpointSaved, ShouldStop, EpochEnd, TrainEnd, TestBatchEnd]


class Send(Plugin):
    """Sends this process a signal, at the first such event at or after some number of batches."""

    affects_training = False  # a fault from outside

    def __init__(self, kind: type[Event], *, batches: int = 0, signum: int = signal.SIGTERM, times: int = 1) -> None:
        self.kind, self.batches, self.signum, self.times = kind, batches, signum, times

    @on(*EVENTS)
    def send(self, run: Run, event: Event) -> None:
        if isinstance(event, self.kind) and run.progress.batches >= self.batches and self.times:
            self.times -= 1
            os.kill(os.getpid(), self.signum)


class Losses(Plugin):
    """Notes what was trained and validated."""

    affects_training = False

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    @on(BatchEnd, ValidationEnd)
    def note(self, run: Run, event: BatchEnd | ValidationEnd) -> None:
        value = run.loss.item() if isinstance(event, BatchEnd) else event.metrics["validation/loss"]
        self.seen.append((run.progress.batches, value))


@pytest.fixture
def fit(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> Make:
    """Return a function that begins or continues with a run of two epochs, and says what of it was done."""

    def make(
        *plugins: Any, folder: str = "a", background: bool = False, **options: Any
    ) -> tuple[RunResult, list[tuple[int, float]], Any]:
        losses, mine = Losses(), task(dropout=0.5)
        schedules = [ValidationSchedule(Every(steps=3)), SaveSchedule(Every(steps=3)), LogSchedule(Every(steps=2))]
        saver = Checkpoint(tmp_path / folder, resume="auto", background=background)
        trainer = Trainer([*schedules, saver, RNGCapture(), losses, *plugins], device="cpu")
        result = trainer.fit(mine, batches(5), validation=batches(4), optimizer=sgd, epochs=2, **options)
        return result, losses.seen, mine

    return make


PLACES = [TrainStart, EpochStart, BatchStart, StepEnd, BatchEnd, Log, ValidationStart, ValidationBatchEnd]
PLACES += [ValidationEnd, SavePoint, CheckpointSaved, EpochEnd]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "at"), [*((kind, 0) for kind in PLACES), *((kind, 5) for kind in PLACES[2:])])
def test_a_run_that_is_preempted_anywhere_continues_as_if_it_had_not_been(
    kind: type[Event], at: int, fit: Make, weights: Make
) -> None:
    plain, expected, theirs = fit(folder="whole")
    first, begun, _ = fit(Send(kind, batches=at), Preemption(), on_interrupt="return")
    assert (first.status, first.stopped_by, first.reason) == ("stopped", "preemption", "SIGTERM was received")
    assert first.exit_status == 143
    assert first.last_checkpoint is not None
    assert first.last_checkpoint.exists()
    second, rest, mine = fit(Preemption())
    assert begun + rest == expected
    assert (second.status, second.exit_status, second.metrics) == ("completed", 0, plain.metrics)
    assert all(map(torch.equal, weights(mine), weights(theirs)))


@pytest.mark.parametrize(
    ("kind", "done"), [(TrainStart, 1), (EpochStart, 1), (BatchStart, 3), (BatchEnd, 3), (ValidationBatchEnd, 3)]
)
def test_training_stops_at_the_next_boundary_and_a_validation_at_its_next_batch(
    kind: type[Event], done: int, fit: Make
) -> None:
    at = {BatchStart: 2, BatchEnd: 3}.get(kind, 0)
    result, seen, _ = fit(Send(kind, batches=at), Preemption(), on_interrupt="return")
    assert (result.progress.batches, result.progress.validations) == (done, 0)
    assert [place for place, _ in seen] == list(range(1, done + 1))
    cut = [each for each in result.history if each.verb == "cut_validation"]
    assert len(cut) == (done == 3)
    assert result.progress.evaluated == (kind is ValidationBatchEnd)


@pytest.mark.parametrize(("background", "times"), [(False, 1), (True, 1), (False, 3)])
def test_one_in_the_last_validation_leaves_the_checkpoint_that_a_whole_run_leaves(
    background: bool, times: int, fit: Make, weights: Make, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _, theirs = fit(folder="whole")
    for _ in range(times):  # each in the validation that the one before has postponed
        send = Send(ValidationBatchEnd, batches=10)
        first, *_ = fit(send, Preemption(), background=background, on_interrupt="return")
        assert (first.status, first.stopped_by, first.exit_status) == ("stopped", "preemption", 143)
        assert "SIGTERM was received: run" in caplog.messages[-1]
    second, _, mine = fit(Preemption(), background=background)
    assert (second.status, second.metrics, second.progress.validations) == ("completed", plain.metrics, 4)
    assert all(map(torch.equal, weights(mine), weights(theirs)))
    whole, cut = (torch.load(result.last_checkpoint, weights_only=True) for result in (plain, second))
    assert second.last_checkpoint == first.last_checkpoint
    parts = ("control", "epoch_begun", "at_save_point")
    assert [cut[part] for part in parts] == [whole[part] for part in parts]
    counters = [{**each["progress"], "earlier_seconds": 0.0} for each in (cut, whole)]
    assert counters[0] == counters[1]


def test_a_validation_that_a_resumed_run_owes_is_postponed_again(fit: Make, weights: Make) -> None:
    plain, expected, theirs = fit(folder="whole")
    seen, saves = list[tuple[int, float]](), list[int]()
    for _ in range(2):
        result, losses, _ = fit(Send(ValidationBatchEnd, batches=3), Preemption(), on_interrupt="return")
        seen += losses
        saves += [each.batch for each in result.history if (each.verb, each.by) == ("save", "preemption")]
    last, losses, mine = fit(Preemption())
    assert (seen + losses, saves) == (expected, [3])
    assert (last.status, last.metrics) == ("completed", plain.metrics)
    assert all(map(torch.equal, weights(mine), weights(theirs)))


def test_where_no_plugin_wrote_the_save_it_is_not_called_saved(fit: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Disable(Plugin):
        @on(BatchEnd, when=At(batches=10))
        def disable(self, run: Run, event: BatchEnd) -> None:
            run.control.disable_plugin("checkpoint", "the disk is full")

        @on(ValidationBatchEnd, when=At(batches=10))
        def send(self, run: Run, event: ValidationBatchEnd) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    result, *_ = fit(Disable(), Preemption(), on_interrupt="return")
    assert (result.status, result.progress.batches) == ("stopped", 10)
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.name == "run_epoch_1_iter_9.pth"
    assert_facts(caplog.messages[-1], "SIGTERM", "'run'", "no plugin saves")


def test_a_run_that_completes_in_spite_of_it_exits_so_too(fit: Make) -> None:
    result, *_ = fit(Send(TrainEnd), Preemption(), on_interrupt="return")
    assert (result.status, result.exit_status) == ("completed", 143)


@pytest.mark.parametrize("background", [False, True])
def test_it_raises_system_exit_when_all_is_closed(background: bool, fit: Make, tmp_path: Path) -> None:
    closed: list[str] = []

    class Closing(Plugin):
        @on(RunClosed)
        def note(self, run: Run, event: RunClosed) -> None:
            closed.append(event.status)

    with pytest.raises(SystemExit) as caught:
        fit(Send(BatchEnd, batches=2), Preemption(), Closing(), background=background)
    assert (caught.value.code, closed) == (143, ["stopped"])
    path = tmp_path / "a" / "run_epoch_0_iter_2.pth"
    assert path.exists()
    facts = (path, "step 2", "no step", "start the program")
    assert any(has_facts(note, *facts) for note in caught.value.__notes__)


def test_without_a_checkpoint_it_would_lose_the_run(task: Make, batches: Make, sgd: Any) -> None:
    result = Trainer([Preemption()], device="cpu").fit(task(), batches(2), optimizer=sgd, epochs=1)
    assert_each(result.warnings, ("'preemption'", "without a save", "Checkpoint('runs/x')"))


@pytest.mark.parametrize(("signum", "requeue", "status"), [(signal.SIGUSR1, None, 138), (signal.SIGTERM, 75, 75)])
def test_the_exit_status_is_the_signal_s_or_the_requeue_code(
    signum: int, requeue: int | None, status: int, fit: Make
) -> None:
    result, *_ = fit(Send(BatchEnd, batches=2, signum=signum), Preemption(requeue=requeue), on_interrupt="return")
    assert (result.exit_status, result.reason) == (status, f"{signal.Signals(signum).name} was received")


def test_another_signal_can_be_chosen_and_the_rest_is_left_alone(fit: Make) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result, *_ = fit(Send(BatchEnd, signum=signal.SIGINT), Preemption([signal.SIGINT]), on_interrupt="return")
    assert (result.status, result.exit_status) == ("stopped", 130)
    result, *_ = fit(Send(BatchEnd, signum=signal.SIGINT), Preemption(), on_interrupt="return")
    assert result.status == "interrupted"


def test_a_second_signal_while_it_stops_changes_nothing(fit: Make) -> None:
    sends = [Send(BatchEnd, batches=2), Send(SavePoint, signum=signal.SIGUSR1).named("again")]
    result, *_ = fit(*sends, Send(TrainEnd).named("at_last"), Preemption(), on_interrupt="return")
    assert (result.exit_status, result.progress.batches) == (143, 2)
    assert [each.verb for each in result.history if each.by == "preemption"] == ["stop", "save"]


def test_a_stop_that_is_vetoed_is_saved_all_the_same(fit: Make, tmp_path: Path) -> None:
    class AtLeast(Plugin):
        @on(ShouldStop)
        def hold_on(self, run: Run, event: ShouldStop) -> None:
            if run.progress.batches < 4:
                run.control.veto_stop("too early")

    result, *_ = fit(Send(BatchEnd, batches=2), Preemption(), AtLeast(), on_interrupt="return")
    assert (result.status, result.progress.batches, result.exit_status) == ("stopped", 4, 143)
    assert [each.batch for each in result.history if each.verb == "save" and each.by == "preemption"] == [2]


def test_where_the_run_goes_back_at_the_same_time_it_is_saved_and_stopped_there(fit: Make) -> None:
    class Back(Plugin):
        @on(SavePoint)
        def keep(self, run: Run, event: SavePoint) -> None:
            self.saved = deepcopy(run.state_dict())

        @on(BatchEnd, when=At(batches=5))
        def go_back(self, run: Run, event: BatchEnd) -> None:
            run.roll_back(self.saved)

    result, *_ = fit(Back(), Send(BatchEnd, batches=5), Preemption(), on_interrupt="return")
    assert (result.status, result.stopped_by, result.progress.batches) == ("stopped", "preemption", 3)
    saves = [each.batch for each in result.history if each.verb == "save" and each.by == "preemption"]
    assert saves == [5, 3]


@pytest.mark.parametrize("method", ["test", "validate"])
def test_a_test_and_a_validation_of_its_own_are_cut_short(method: str, task: Make, batches: Make) -> None:
    kind = TestBatchEnd if method == "test" else ValidationBatchEnd
    received: list[tuple[str, int]] = []
    trainer = Trainer([Send(kind), Preemption()], device="cpu")
    trainer.bus.on(RunClosed, lambda run, event: received.append((event.status, run.progress.evaluated)))
    recorder = EventRecorder(trainer.bus)
    with pytest.raises(SystemExit) as caught:
        getattr(trainer, method)(task(), batches(3))
    assert (caught.value.code, received) == (143, [("stopped", 1)])
    assert recorder.trace[-2:] == ["validation_cut", "run_closed"]


def test_a_run_without_a_signal_is_as_it_was(fit: Make) -> None:
    with_it, seen, _ = fit(Preemption(deadline=3600), folder="with")
    without, expected, _ = fit(folder="without")
    assert (with_it.status, with_it.exit_status, seen) == ("completed", 0, expected)
    assert [each.verb for each in with_it.history] == [each.verb for each in without.history]


def test_the_next_run_on_the_trainer_forgets_the_signal(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([Send(BatchEnd), Preemption()], device="cpu")
    results = [trainer.fit(task(), batches(), optimizer=sgd, epochs=1, on_interrupt="return") for _ in range(2)]
    assert [(result.status, result.exit_status) for result in results] == [("stopped", 143), ("completed", 0)]


# Handlers.


@pytest.mark.parametrize("fails", [False, True])
def test_a_former_handler_is_called_and_given_back(fails: bool, task: Make, batches: Make, sgd: Any) -> None:
    received: list[int] = []

    def former(signum: int, frame: Any) -> None:
        received.append(signum)

    def fail(run: Run, event: BatchEnd) -> None:
        assert signal.getsignal(signal.SIGTERM) is not former
        if fails:
            raise ZeroDivisionError

    before = signal.signal(signal.SIGTERM, former)
    try:
        trainer = Trainer([Send(BatchEnd), Preemption()], device="cpu")
        trainer.bus.on(BatchEnd, fail)
        if fails:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(task(), batches(), optimizer=sgd, epochs=1)
        else:
            trainer.fit(task(), batches(), optimizer=sgd, epochs=1, on_interrupt="return")
        assert signal.getsignal(signal.SIGTERM) is former
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_a_second_ctrl_c_leaves_no_handler_behind(task: Make, batches: Make, sgd: Any) -> None:
    def interrupt(run: Run, event: Event) -> None:
        raise KeyboardInterrupt(event.name)

    trainer = Trainer([Preemption(deadline=3600)], device="cpu")
    trainer.bus.on(BatchEnd, interrupt)
    trainer.bus.on(RunClosed, interrupt)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt, match="run_closed"):
        trainer.fit(task(), batches(), optimizer=sgd, epochs=1)
    assert threading.active_count() == threads


def test_elsewhere_than_in_the_main_thread_it_says_so(task: Make, batches: Make, sgd: Any) -> None:
    errors: list[ValueError] = []

    def train() -> None:
        try:
            Trainer([Preemption()], device="cpu").fit(task(), batches(), optimizer=sgd, epochs=1)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "SIGTERM, SIGUSR1 can only" in str(errors[0])


def test_arguments_are_checked() -> None:
    for deadline in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="0, or None"):
            Preemption(deadline=deadline)
    for requeue in (-1, 256):
        with pytest.raises(ValueError, match="number, at least 0"):
            Preemption(requeue=requeue)
    with pytest.raises(ValueError, match="not SIGKILL or SIGSTOP"):
        Preemption([signal.SIGKILL])
    with pytest.raises(ValueError, match="both claim preemption"):
        Trainer([Preemption(), Preemption().named("again")], device="cpu")


# The deadline.


class Block(Plugin):
    """Blocks for ever when a save is due."""

    def __init__(self, policy: Any = "critical") -> None:
        self.policy = policy
        self.blocked = 0

    @on(SavePoint, lane=Lane.TRANSFORM)
    def block(self, run: Run, event: SavePoint) -> None:
        self.blocked += 1
        SimpleQueue[int]().get()


def test_when_the_deadline_is_over_the_run_fails_where_it_stands(task: Make, batches: Make, sgd: Any) -> None:
    threads, text = threading.active_count(), r"0\.01 s of SIGTERM"
    with pytest.raises(TimeoutError, match=text) as caught:
        plugins = [Send(BatchEnd), Block(), Preemption(deadline=0.01)]
        Trainer(plugins, device="cpu").fit(task(), batches(), optimizer=sgd, epochs=1)
    assert "1, step 1. Increase" in str(caught.value)
    assert "in block on save_point" in caught.value.__notes__[0]
    assert threading.active_count() == threads


def test_whoever_swallows_it_gets_it_again(
    task: Make, batches: Make, sgd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "REPEAT", 0.01)
    swallows, blocks = Block("observer"), Block().named("block_2")
    with pytest.raises(TimeoutError, match="did not end within"):
        plugins = [Send(BatchEnd), swallows, blocks, Preemption(deadline=0.01)]
        Trainer(plugins, device="cpu").fit(task(), batches(), optimizer=sgd, epochs=1)
    assert (swallows.blocked, blocks.blocked) == (1, 1)


def test_a_run_that_ends_in_time_and_the_alarm_clock_are_left_alone(task: Make, batches: Make, sgd: Any) -> None:
    former = signal.signal(signal.SIGALRM, lambda signum, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 3600)
    try:
        plugins = [Send(BatchEnd), Preemption(deadline=3600)]
        result = Trainer(plugins, device="cpu").fit(task(), batches(), optimizer=sgd, epochs=1, on_interrupt="return")
        assert result.status == "stopped"
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


# Other processes.

SCRIPT = dedent(
    """
    import os, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    import heliograph as h


    class Data(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.full((4,), float(index)), index % 2


    class Wait(h.Plugin):
        @h.on(h.BatchEnd, lane=h.Lane.TRANSFORM)
        def wait(self, run, event):
            if run.progress.batches == 2:
                print("ready", flush=True)
                while preemption._received is None:
                    os.sched_yield()


    folder, workers, requeue = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    loader = DataLoader(Data(), batch_size=4, num_workers=workers)
    preemption = h.Preemption(requeue=requeue)
    plugins = [h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(folder), Wait(), preemption]
    h.Trainer(plugins, device="cpu").fit(task, loader, optimizer=torch.optim.SGD, epochs=2)
    print("trained to the end")
    """
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("signum", "workers", "requeue", "status"),
    [
        (signal.SIGTERM, 0, 0, 143),
        (signal.SIGUSR1, 0, 75, 75),
        (signal.SIGTERM, 2, 0, 143),
        (signal.SIGUSR1, 2, 0, 138),
    ],
)
def test_a_signal_to_a_whole_process_group_saves_and_ends_it_with_a_true_status(
    signum: int, workers: int, requeue: int, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "saved"), str(workers), str(requeue)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signum)
        output, errors = child.communicate()
    assert (child.returncode, output) == (status, "")
    assert_facts(errors, signal.Signals(signum).name, "'run'", "saves and stops")
    assert len(errors.splitlines()) == 1
    assert (tmp_path / "saved" / "run_epoch_0_iter_2.pth").exists()


def test_in_a_thread_of_a_host_it_listens_to_nothing(task: Make, batches: Make, sgd: Make) -> None:
    class Host:
        def prepare(self, plugins: Plugins) -> None:
            pass

        def ended(self, result: RunResult) -> None:
            pass

    results: list[RunResult] = []

    def train() -> None:
        trainer = Trainer([Preemption(deadline=60)], device="cpu")
        results.append(trainer.fit(task(), batches(), optimizer=sgd, epochs=1))

    with hosted_by(Host()):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    [result] = results
    assert result.status == "completed"
    assert_each(result.notes, ("preemption", "no signals", "thread of Ray", "ray_report"))


SCONTROL = """#!/bin/sh
echo "$@" >> "$SCONTROL_LOG"
echo "Access denied" >&2
exit $SCONTROL_STATUS
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the log of a `scontrol` that does nothing; the test is in a job of Slurm."""
    log, command = tmp_path / "scontrol.log", tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(SCONTROL, encoding="utf-8")
    command.chmod(0o755)
    variables = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "2", "SCONTROL_LOG": str(log), "SCONTROL_STATUS": "0"}
    for name, value in (variables | {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    return log


class Closed(Plugin):
    """Sees whether the job was requeued when it is closed."""

    def __init__(self, log: Path) -> None:
        self.log, self.exists = log, True

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        pass

    def close(self) -> None:
        self.exists = self.log.exists()


def test_slurm_requeues_the_job_after_the_run(slurm: Path, fit: Make) -> None:
    closed = Closed(slurm)
    with pytest.raises(SystemExit) as exit_error:
        fit(Send(BatchEnd, batches=2), closed, Preemption(requeue="slurm"))
    assert exit_error.value.code == 128 + signal.SIGTERM
    assert slurm.read_text(encoding="utf-8") == "requeue 4711\n"
    assert not closed.exists  # plugins before it are closed first
    result, *_ = fit(Preemption(requeue="slurm"))
    assert result.status == "completed"
    assert any(has_facts(note, "Slurm job 4711", "restart 2") for note in result.notes)
    assert slurm.read_text(encoding="utf-8") == "requeue 4711\n"  # not after a complete run


def test_a_failed_requeue_is_a_warning(
    slurm: Path, fit: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SCONTROL_STATUS", "1")
    result, *_ = fit(Send(BatchEnd, batches=2), Preemption(requeue="slurm"), on_interrupt="return")
    for texts in (result.warnings, caplog.messages):
        assert any(has_facts(text, "scontrol requeue 4711", "status 1", "Access denied") for text in texts)


def test_a_scontrol_that_hangs_is_given_up(
    slurm: Path, fit: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm.parent / "bin" / "scontrol").write_text("#!/bin/sh\nexec tail -f /dev/null\n", encoding="utf-8")
    monkeypatch.setattr("heliograph.builtin_callbacks.preemption.REQUEUE_SECONDS", 0.1)
    result, *_ = fit(Send(BatchEnd, batches=2), Preemption(requeue="slurm"), on_interrupt="return")
    for texts in (result.warnings, caplog.messages):
        assert any(has_facts(text, "scontrol requeue 4711", "0.1 s") for text in texts)


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "scontrol"])
def test_requeue_needs_a_job_of_slurm(missing: str, slurm: Path, fit: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "scontrol":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"slurm.*{missing}.*sbatch"):
        fit(Preemption(requeue="slurm"))


def test_another_requeue_is_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="slurm"):
        Preemption(requeue="lsf")  # type: ignore[arg-type]  # that is the test
