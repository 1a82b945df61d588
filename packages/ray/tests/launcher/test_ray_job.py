"""Attempts, and what the driver loop does during them, without a cluster."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any, cast

import pytest
from heliograph.core.distributed.failure import Carried
from heliograph.core.system.errors import RankFailed
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_ray.launcher import capacity, driver_loop
from heliograph_ray.launcher.attempts import Attempt, GroupTracker, summarize_attempts
from heliograph_ray.launcher.calls import RayJob, Setup
from heliograph_ray.launcher.capacity import Sizes
from heliograph_ray.launcher.driver_loop import DriverLoop, Fit
from heliograph_ray.launcher.failures import WorkerFailed, is_secondary
from heliograph_ray.launcher.mailbox import (
    Commands,
    DriverChannel,
    Envelope,
    Exited,
    Failed,
    Message,
    ProgressUpdate,
    QueueItem,
    Reported,
    Resumed,
    Started,
    Value,
)
from heliograph_ray.session import Notice
from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError


class FakeDriverChannel:
    """A mailbox in this process.

    Attributes:
        commands: all that were sent.
        closed: set when the channel is closed.
        dismissed: set when workers that wait for a call are ended.
    """

    def __init__(self) -> None:
        self._envelopes: SimpleQueue[Envelope] = SimpleQueue()
        self.commands: list[Commands] = []
        self.closed = Flag()
        self.dismissed = Flag()

    def put(self, *envelopes: Envelope) -> None:
        """Add envelopes."""
        for each in envelopes:
            self._envelopes.put(each)

    def receive(self, timeout: float) -> list[Envelope]:
        """Return the envelopes."""
        try:
            first = self._envelopes.get(timeout=timeout)
        except Empty:
            return []
        found = [first]
        while not self._envelopes.empty():
            found.append(self._envelopes.get())
        return found

    def command(self, commands: Commands) -> None:
        """Keep commands."""
        self.commands.append(commands)

    def dismiss(self) -> None:
        """Record the call."""
        self.dismissed.set()

    def close(self) -> None:
        """Record the call."""
        self.closed.set()


Attempted = Callable[["Story", str], object]


class Story:
    """A job on two workers, whose attempts are functions of the test.

    Args:
        tries: the attempts.
        options: of the job and of its driver loop.
    """

    def __init__(self, *tries: Attempted, **options: Any) -> None:
        self.channel, self.pauses, self.messages = FakeDriverChannel(), list[float](), list[Any]()
        self.tracker = GroupTracker()
        self._left = list(tries)
        self._fresh = len(tries) - int(options.get("is_reused", False))  # attempts on new workers
        self.loop = DriverLoop(
            cast("DriverChannel", self.channel),
            self.tracker,
            options.get("grace", 10.0),
            options.get("on_message", lambda *message: self.messages.append(message)),
            options.get("on_report"),
            keeps=options.get("keeps", False),
        )
        self.loop.pause = self.pauses.append  # type: ignore[method-assign, assignment]
        setup = SimpleNamespace(
            sizes=Sizes(1, 2, {"CPU": 1.0}),
            max_failures=options.get("max_failures", 0),
            backoff=options.get("backoff", 1.0),
        )
        self._job = RayJob(cast("Setup", setup), self.loop, self.tracker, self._start)

    def run(self) -> list[bytes]:
        """Run the job; return the values."""
        group = self._job.run()
        assert not self._left
        return [value for _, value in sorted(group.values.items())]

    @property
    def attempts(self) -> list[Attempt]:
        """The summaries of the attempts."""
        return summarize_attempts(self.tracker.groups)

    def send(self, fit: str, *messages: Message, ranks: Sequence[int] = (0, 1), group: str = "group") -> None:
        """Send that workers have started, and further messages."""
        for rank in ranks:
            self.channel.put(*(Envelope(fit, group, rank, each) for each in (Started(2, f"n{rank}"), *messages)))

    def begin(self, fit: str, *messages: Message, ranks: Sequence[int] = (0, 1)) -> None:
        """Send messages, and wait until the caller has processed the start of a worker."""
        self.send(fit, *messages, ranks=ranks)
        while self.tracker.group is None:
            Flag().wait(0.01)

    def _start(self, fit: str) -> Fit:
        attempt = self._left.pop(0)
        made = Fit(lambda: attempt(self, fit))
        made.is_reused = len(self._left) >= self._fresh
        return made


def complete(story: Story, fit: str) -> None:
    """Return on both workers."""
    story.send(fit, Value(b"v"))


def lose(*messages: Message) -> Attempted:
    """Return an attempt that sends messages, and loses worker 1."""

    def attempt(story: Story, fit: str) -> None:
        story.send(fit, *messages)
        raise WorkerGroupError("...", {1: RayActorError(error_msg="no heartbeat")})

    return attempt


def failed(error: BaseException) -> Failed:
    """Return the message of a worker about an error."""
    return Failed(Carried.of(error), is_secondary=is_secondary(error))


def test_values_that_arrive_last_are_returned() -> None:
    story = Story(complete)
    assert story.run() == [b"v", b"v"]
    assert [each.kind for each in story.attempts] == ["completed"]


def test_delays_double_until_the_run_gets_further() -> None:
    further = (
        lose(Resumed("run", 0, 0, None), ProgressUpdate("run", 3, 3, 3)),
        lose(Resumed("run", 2, 2, None)),
        lose(ProgressUpdate("run", 3, 3, 3)),
    )
    story = Story(lose(), lose(), *further, complete, max_failures=5, backoff=0.5)
    assert story.run() == [b"v", b"v"]
    assert story.pauses == [0.5, 1.0, 0.5, 1.0, 2.0]
    assert [each.kind for each in story.attempts] == ["lost"] * 5 + ["completed"]
    assert_facts(story.attempts[0].failure, "rank 1 died", "no heartbeat")


def test_a_lost_or_hung_attempt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def hang(story: Story, fit: str) -> None:
        story.send(fit, failed(RankFailed(1, "hung", "it trains on", "")), ranks=[0])
        raise WorkerGroupError("...", {})

    Story(lose(), hang, complete, max_failures=2).run()
    assert_each(
        caplog.messages,
        ("attempt 1 was lost", "in 1 s", "rank 1 died", "no heartbeat"),
        ("attempt 2 hung", "in 2 s", "rank 1 hung", "it trains on"),
    )


def test_the_startup_monitor_runs_until_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []

    def wait(story: Story, fit: str) -> None:
        while not looked:
            Flag().wait(0.01)
        story.begin(fit)
        looked.clear()
        complete(story, fit)

    monkeypatch.setattr(driver_loop, "StartupMonitor", lambda sizes: SimpleNamespace(check=lambda: looked.append(True)))
    Story(wait).run()
    assert looked == []


def test_a_start_timeout_of_ray_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(story: Story, fit: str) -> None:
        raise ControllerError(WorkerGroupStartupTimeoutError(2))

    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 0.5}, available_resources=dict)
    monkeypatch.setattr(capacity, "require", lambda *args, **kwargs: cluster)
    with pytest.raises(TimeoutError, match=r"resources_per_worker={'CPU': 1.0}: CPU: 0 of 0.5 free") as caught:
        Story(give_up, max_failures=9).run()
    assert isinstance(caught.value.__cause__, ControllerError)


def test_a_delay_is_a_minute_at_most() -> None:
    story = Story(*[lose()] * 9, complete, max_failures=-1)
    story.run()
    assert story.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_loss_too_many_is_raised() -> None:
    story = Story(lose(), lose(), max_failures=1)
    with pytest.raises(RankFailed, match="1 died: no heartbeat") as caught:
        story.run()
    assert isinstance(caught.value.__cause__, WorkerGroupError)
    assert_each(caught.value.__notes__, ("attempt 2", "max_failures=1"))
    assert vars(caught.value)["heliograph_rank"] == 1


def test_an_error_of_the_user_ends_the_job_at_once() -> None:
    def attempt(story: Story, fit: str) -> None:
        story.send(fit, failed(RankFailed(1, "KeyError", "'label'", "")), ranks=[0])
        story.send(fit, failed(KeyError("label")), ranks=[1])
        raise WorkerGroupError("...", {0: WorkerFailed(0, "RankFailed")})

    story = Story(attempt, max_failures=9)
    with pytest.raises(KeyError, match="label") as caught:
        story.run()
    assert vars(caught.value)["heliograph_rank"] == 1
    assert caught.value.__cause__ is None
    assert_facts(caught.value.__notes__[0], "raised on rank 1")
    assert "also failed: rank 0," in caught.value.__notes__[1]


def test_a_preemption_is_no_failure_and_has_no_delay() -> None:
    def leave(story: Story, fit: str) -> None:
        story.send(fit, Exited(Notice("ray", "its price rose")), Value(b"half"))

    story = Story(leave, leave, complete)
    assert story.run() == [b"v", b"v"]
    assert story.pauses == [0.0, 0.0]
    assert [(each.kind, each.failure) for each in story.attempts][:2] == [("preempted", "its price rose")] * 2


def test_a_run_that_returned_on_all_ranks_has_completed_even_if_a_worker_dies_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def attempt(story: Story, fit: str) -> None:
        complete(story, fit)
        raise RayActorError(error_msg="switched off")

    assert Story(attempt).run() == [b"v", b"v"]
    assert "when Ray's run failed:" in caplog.text


def test_a_failed_worker_is_released_when_all_have_reported_their_end() -> None:
    def wait(story: Story, fit: str, **failures: Failed) -> None:
        for rank, each in enumerate(failures.values()):
            assert story.channel.commands == []
            story.send(fit, each, ranks=[rank])
        while not story.channel.commands:
            Flag().wait(0.01)
        raise WorkerGroupError("...", {})

    def both(story: Story, fit: str) -> None:
        story.send(fit, ranks=[1])
        wait(story, fit, first=failed(RankFailed(1, "KeyError", "", "")), second=failed(KeyError("label")))

    def one_hangs(story: Story, fit: str) -> None:
        story.send(fit, ranks=[1])
        wait(story, fit, first=failed(RankFailed(1, "hung", "", "")))

    for attempt, error in ((both, KeyError), (one_hangs, RankFailed)):
        story = Story(attempt)
        with pytest.raises(error):
            story.run()
        assert [each.released for each in story.channel.commands] == [frozenset({"group"})]


def test_on_report_can_stop_the_run() -> None:
    def attempt(story: Story, fit: str) -> None:
        story.send(fit, Reported({"loss": 2.0}, None), ranks=[0])
        story.send(fit, Reported({"loss": 3.0}, "there"), ranks=[0])
        while not story.channel.commands:
            Flag().wait(0.01)
        story.send(fit, Exited(Notice("tune", "it is no good")), Value(b"v"))

    def decide(report: Reported) -> tuple[str, str] | None:
        return ("tune", "it is no good") if report.metrics["loss"] > 2 else None

    story = Story(attempt, on_report=decide)
    assert story.run() == [b"v", b"v"]
    assert [each.stop for each in story.channel.commands] == [Notice("tune", "it is no good")]
    assert story.channel.commands[0].exit is None


@pytest.mark.parametrize(
    ("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["int", "term"]
)
def test_after_a_signal_the_workers_are_asked_to_exit(signum: int, error: type[BaseException]) -> None:
    def attempt(story: Story, fit: str) -> None:
        story.begin(fit)
        os.kill(os.getpid(), signum)
        while not story.channel.commands:
            Flag().wait(0.01)
        lose(Exited(Notice("launcher", driver_loop.CALLER_ENDS)))(story, fit)

    before = signal.getsignal(signum)
    story = Story(attempt, max_failures=9)
    with pytest.raises(error) as caught:
        story.run()
    assert getattr(caught.value, "code", 143) == 143
    assert [each.exit for each in story.channel.commands] == [Notice("launcher", driver_loop.CALLER_ENDS)]
    assert signal.getsignal(signum) == before
    assert not story.channel.closed.is_set()


def test_an_interrupt_does_not_wait_for_workers_that_have_not_started() -> None:
    gone = Flag()

    def attempt(story: Story, fit: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert story.channel.closed.wait(10)
        assert gone.wait(10)

    story = Story(attempt, grace=1e9)
    with pytest.raises(KeyboardInterrupt):
        story.run()
    gone.set()
    assert [(each.world_size, each.kind) for each in story.attempts] == [(0, "failed")]


def test_a_second_interrupt_does_not_wait() -> None:
    ended = Flag()

    def attempt(story: Story, fit: str) -> None:
        story.begin(fit)
        os.kill(os.getpid(), signal.SIGINT)
        while not story.loop.signals:
            Flag().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait()

    story = Story(attempt, grace=1e9)
    with pytest.raises(KeyboardInterrupt):
        story.run()
    ended.set()
    assert story.tracker.group is not None  # its end was not waited for


def test_an_error_of_a_worker_is_in_a_note_of_the_interrupt() -> None:
    def attempt(story: Story, fit: str) -> None:
        story.begin(fit, failed(KeyError("label")), ranks=[0])
        os.kill(os.getpid(), signal.SIGINT)
        while not story.channel.commands:
            Flag().wait(0.01)

    with pytest.raises(KeyboardInterrupt) as caught:
        Story(attempt).run()
    assert_each(caught.value.__notes__, ("rank 0", "KeyError: 'label'"))


def test_workers_that_do_not_end_in_time_are_killed() -> None:
    def attempt(story: Story, fit: str) -> None:
        story.send(fit, QueueItem(pickle.dumps("hello")), ranks=[1])
        assert story.channel.closed.wait(10)

    def refuse(rank: int, message: object) -> None:
        raise ValueError(message)

    story = Story(attempt, on_message=refuse, grace=0.01)
    with pytest.raises(ValueError, match="hello") as caught:
        story.run()
    assert_each(caught.value.__notes__, ("processing a message", "rank 1"))
    assert [each.exit is None for each in story.channel.commands] == [False]


def test_after_an_error_of_on_message_no_message_is_delivered() -> None:
    taken: list[object] = []

    def refuse(rank: int, message: object) -> None:
        taken.append(message)
        raise ValueError(message)

    def attempt(story: Story, fit: str) -> None:
        story.send(fit, QueueItem(pickle.dumps("one")), QueueItem(pickle.dumps("two")), Value(b"v"), ranks=[0, 1])

    with pytest.raises(ValueError, match="one"):
        Story(attempt, on_message=refuse).run()
    assert taken == ["one"]


def test_messages_are_kept_in_order_without_those_of_ended_groups() -> None:
    former: list[str] = []

    def first(story: Story, fit: str) -> None:
        former.append(fit)
        lose(QueueItem(pickle.dumps("early")))(story, fit)

    def second(story: Story, fit: str) -> None:
        story.send(former[0], QueueItem(pickle.dumps("late")))
        story.send(fit, QueueItem(pickle.dumps("then")), Value(b"v"), group="another")

    story = Story(first, second, max_failures=1)
    story.run()
    assert story.messages == [(0, "early"), (1, "early"), (0, "then"), (1, "then")]


def test_kept_workers_that_have_returned_end_the_attempt() -> None:
    ended = Flag()

    def wait(story: Story, fit: str) -> None:
        complete(story, fit)
        assert ended.wait(10)

    story = Story(wait, keeps=True)
    assert story.run() == [b"v", b"v"]
    assert not story.channel.dismissed.is_set()
    assert not story.channel.closed.is_set()
    ended.set()


@pytest.mark.parametrize("end", [Exited(Notice("ray", "its price rose")), failed(SystemExit(0))], ids=["exit", "zero"])
def test_kept_workers_are_ended_if_another_one_left(end: Message) -> None:
    def leave(story: Story, fit: str) -> None:
        story.send(fit, Value(b"v"), ranks=[1])
        assert not story.channel.dismissed.is_set()
        story.send(fit, end, ranks=[0])
        assert story.channel.dismissed.wait(10)

    story = Story(leave, complete, keeps=True)
    if isinstance(end, Exited):
        assert story.run() == [b"v", b"v"]
        assert [each.kind for each in story.attempts] == ["preempted", "completed"]
    else:
        with pytest.raises(SystemExit):
            story.run()


def test_kept_workers_are_ended_after_a_signal_that_came_too_late() -> None:
    def attempt(story: Story, fit: str) -> None:
        story.begin(fit)
        os.kill(os.getpid(), signal.SIGINT)
        complete(story, fit)
        assert story.channel.dismissed.wait(10)

    with pytest.raises(KeyboardInterrupt):
        Story(attempt, keeps=True).run()


def test_workers_that_were_lost_between_two_calls_are_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    def find_lost(story: Story, fit: str) -> None:
        story.send(fit, ranks=[0])
        raise WorkerGroupError("...", {1: RayActorError(error_msg="no heartbeat")})

    story = Story(find_lost, complete, keeps=True, is_reused=True)
    assert story.run() == [b"v", b"v"]
    assert [each.kind for each in story.attempts] == ["lost", "completed"]
    assert story.pauses == []
    assert_each(caplog.messages, ("kept workers", "starting new ones", "rank 1 died", "no heartbeat"))
    with pytest.raises(RankFailed):  # it was there when the call began
        Story(lose(), keeps=True, is_reused=True).run()


def test_a_pause_ends_on_a_signal() -> None:
    loop = DriverLoop(cast("DriverChannel", FakeDriverChannel()), GroupTracker(), 1.0, lambda *message: None, None)
    loop.pause(0.0)
    with loop.handle_signals():
        os.kill(os.getpid(), signal.SIGINT)
        loop.pause(1e9)
    assert loop.signals == {signal.SIGINT}
