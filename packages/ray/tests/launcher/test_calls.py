"""How a call of the launcher uses Ray, and what it returns, without a cluster."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train.torch
from heliograph.packages.ray.tests.launcher.test_ray_job import FakeDriverChannel
from heliograph_ray import RayLauncher
from heliograph_ray.launcher import calls, launcher, mailbox
from heliograph_ray.launcher.mailbox import (
    Commands,
    DriverChannel,
    Ended,
    Envelope,
    Mailbox,
    QueueItem,
    Reported,
    Started,
    Value,
    WorkerCall,
)
from heliograph_ray.launcher.worker import run_worker


class FakeTrainer:
    """A fake of Ray's trainer, with two workers that complete.

    Attributes:
        made: all trainers.
    """

    made: list[FakeTrainer]
    channel: FakeDriverChannel

    def __init__(self, function: Any, *, scaling_config: Any, run_config: Any) -> None:
        assert function.func is run_worker
        self.call: WorkerCall = function.args[0]
        self.scaling, self.running = scaling_config, run_config
        self.variables = dict(os.environ)
        self.made.append(self)

    def fit(self) -> None:
        """Send the messages of two workers that complete."""
        function, args, kwargs = pickle.loads(self.call.payload)
        result = SimpleNamespace(status="completed")
        messages = (QueueItem(pickle.dumps("hello")), Reported({"loss": 1.0}, None), Ended(pickle.dumps(result)))
        for rank in range(2):
            value = Value(pickle.dumps((rank, function(*args, **kwargs))))
            for each in (Started(2, "node"), *(messages if rank == 0 else ()), value):
                self.channel.put(Envelope(self.call.fit, "group", rank, each))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> FakeDriverChannel:
    """Return a fake of the caller's channel, with a fake trainer of Ray at the other end."""
    channel = FakeDriverChannel()
    vars(channel)["mailbox"] = "the mailbox"
    monkeypatch.setattr(FakeTrainer, "made", [], raising=False)
    monkeypatch.setattr(FakeTrainer, "channel", channel, raising=False)
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", FakeTrainer)
    monkeypatch.setattr(launcher, "DriverChannel", lambda: channel)
    return channel


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, int]]:
    """Return the connections that are made: (address, number of CPUs)."""
    made: list[tuple[str | None, int]] = []

    @contextmanager
    def connect(address: str | None, *, needed: dict[str, float], cpus: int) -> Iterator[None]:
        made.append((address, cpus))
        assert needed.get("CPU", 0) <= cpus
        yield

    monkeypatch.setattr(calls, "connect", connect)
    return made


def test_a_call_passes_the_launchers_options_to_ray(
    channel: FakeDriverChannel, connections: list[tuple[str | None, int]], tmp_path: Path
) -> None:
    made = RayLauncher(
        (2, 8),
        resources_per_worker={"CPU": 0.5},
        storage_path=tmp_path,
        name="points",
        keep=3,
        grace=7,
        address="auto",
        check_interval=0.25,
        start_timeout=9,
        resize_interval=4,
    )
    values = made.run(max, 3, 2, on_message=lambda rank, message: None)
    (trainer,) = FakeTrainer.made
    assert values == [(0, 3), (1, 3)]
    assert values.messages == []
    assert values.result is not None
    assert values.result.status == "completed"
    assert [each.kind for each in values.attempts] == ["completed"]
    assert values.storage == f"{tmp_path}/points"
    assert connections == [("auto", 1)]
    assert channel.closed.is_set()

    assert (trainer.call.mailbox, trainer.call.grace) == ("the mailbox", 7.0)
    scaling, running = trainer.scaling, trainer.running
    assert (scaling.num_workers, scaling.elastic_resize_monitor_interval_s) == ((2, 8), 4)
    assert (running.name, running.storage_path) == ("points", str(tmp_path))
    assert running.checkpoint_config.num_to_keep == 3
    assert (running.failure_config.max_failures, running.failure_config.max_preemption_failures) == (0, 0)
    assert trainer.variables["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "0.25"
    assert trainer.variables["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "9"
    assert "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S" not in os.environ


@pytest.mark.usefixtures("channel")
@pytest.mark.parametrize(
    ("options", "cpus"),
    [({"num_workers": (2, 8)}, 2), ({"num_workers": 8}, 8)],
)
def test_a_cluster_of_the_calls_own_needs_room_for_the_least_number(
    connections: list[tuple[str | None, int]], tmp_path: Path, options: dict[str, Any], cpus: int
) -> None:
    RayLauncher(**options, storage_path=tmp_path).run(max, 3, 2)
    assert connections == [(None, cpus)]


@pytest.mark.usefixtures("channel", "connections")
def test_without_a_name_every_call_has_one_of_its_own(tmp_path: Path) -> None:
    made = RayLauncher(2, storage_path=tmp_path)
    first, second = made.run(max, 3, 2), made.run(max, 3, 2)
    assert first.messages == [(0, "hello")]
    names = [each.running.name for each in FakeTrainer.made]
    assert len(set(names)) == 2
    assert [first.storage, second.storage] == [f"{FakeTrainer.made[0].running.storage_path}/{name}" for name in names]
    assert FakeTrainer.made[0].call.name != FakeTrainer.made[1].call.name


@pytest.mark.usefixtures("connections")
def test_what_is_reported_goes_to_a_search(channel: FakeDriverChannel, tmp_path: Path) -> None:
    reports: list[Reported] = []
    made = RayLauncher(2, storage_path=tmp_path)
    made._on_report = reports.append
    made.run(max, 3, 2)
    assert reports == [Reported({"loss": 1.0}, None)]
    assert channel.commands == []


def test_the_mailbox_is_an_actor_on_the_callers_node(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class FakeRay:
        """Calls in this process."""

        def remote(self, **options: Any) -> Any:
            done.append(options)
            return lambda kind: SimpleNamespace(options=lambda **more: self._made(kind, more))

        def _made(self, kind: type, options: dict[str, Any]) -> Any:
            done.append((kind, options["scheduling_strategy"]))
            methods = {
                name: SimpleNamespace(remote=lambda *args, name=name: (name, *args)) for name in ("receive", "command")
            }
            return SimpleNamespace(remote=lambda: SimpleNamespace(**methods))

        def get(self, answer: Any) -> Any:
            done.append(answer)
            return []

        def kill(self, actor: Any) -> None:
            done.append("killed")

        def get_runtime_context(self) -> Any:
            return SimpleNamespace(get_node_id=lambda: "here")

        NodeAffinitySchedulingStrategy = staticmethod(lambda node, soft: (node, soft))

    monkeypatch.setattr(mailbox, "require", lambda *args, **kwargs: FakeRay())
    channel = DriverChannel()
    assert channel.receive(0.5) == []
    channel.command(Commands())
    channel.close()
    expected = [{"num_cpus": 0}, (Mailbox, ("here", False)), ("receive", 0.5), ("command", Commands()), "killed"]
    assert done == expected
