"""The connection to a cluster: to an existing one, or to one that is started and ended here."""

from __future__ import annotations

import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from heliograph.packages.tests.facts import assert_each
from heliograph_ray import cluster as starting
from heliograph_ray.cluster import connect


class FakeRay:
    """Records its calls.

    Args:
        here: the address of the cluster that it is connected to; empty for none.
    """

    def __init__(self, here: str = "") -> None:
        self.here, self.done = here, list[Any]()

    def is_initialized(self) -> bool:
        """Return whether there is a connection."""
        return bool(self.here)

    def init(self, address: str, **options: Any) -> None:
        """Connect, and install a handler of SIGTERM, as Ray does."""
        if address == "nowhere:1":
            raise ConnectionError("nobody answers")
        self.done.append((address, options))
        self.here = address
        signal.signal(signal.SIGTERM, lambda signum, frame: None)

    def shutdown(self) -> None:
        """End the connection."""
        self.done.append("shutdown")
        self.here = ""

    def cluster_resources(self) -> dict[str, float]:
        """Return its resources."""
        return {"CPU": 2.0}

    def get_runtime_context(self) -> Any:
        """Return its address."""
        return SimpleNamespace(gcs_address=self.here)


def use(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> FakeRay:
    """Replace Ray."""
    monkeypatch.setattr(starting, "require", lambda *args, **kwargs: ray)
    monkeypatch.setattr(starting, "create_connection", lambda address, timeout: SimpleNamespace(close=bool))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return ray


def test_missing_resources_of_a_started_cluster_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = use(monkeypatch, FakeRay())
    message = "2 GPU.* has 0"
    with pytest.raises(ValueError, match=message), connect(None, needed={"CPU": 2.0, "GPU": 2.0}):
        pass
    assert ray.done[1:] == ["shutdown"]
    with connect("other:1", needed={"GPU": 2.0}):
        assert ray.here == "other:1"


def test_a_cluster_is_started_with_a_cpu_for_each_worker_and_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, before = use(monkeypatch, FakeRay()), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), connect(None, needed={}, cpus=1000):
        assert ray.done == [("local", {"num_cpus": 1000, "include_dashboard": False})]
        assert signal.getsignal(signal.SIGTERM) == before
        raise KeyError
    assert ray.done[1:] == ["shutdown"]
    assert not ray.is_initialized()


def test_a_started_cluster_has_at_least_the_cores_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = use(monkeypatch, FakeRay())
    with connect(None, needed={}):
        assert ray.done[0][1]["num_cpus"] == os.cpu_count()


@pytest.mark.parametrize(("cpus", "said"), [(2, []), (8, [("8 CPUs", "2 cores")])])
def test_workers_that_share_cores_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cpus: int, said: list[tuple[str, ...]]
) -> None:
    use(monkeypatch, FakeRay())
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with connect(None, needed={}, cpus=cpus):
        pass
    assert_each(caplog.messages, *said)


@pytest.mark.parametrize(("address", "variable"), [("host:6379", None), (None, "host:6379"), ("host:6379", "other:1")])
def test_an_existing_cluster_is_connected_to_and_disconnected_from(
    monkeypatch: pytest.MonkeyPatch, address: str | None, variable: str | None
) -> None:
    ray = use(monkeypatch, FakeRay())
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with connect(address, needed={}):
        pass
    assert ray.done == [("host:6379", {}), "shutdown"]


@pytest.mark.parametrize("address", [None, "auto", "host:6379"])
def test_an_existing_connection_is_used_and_kept(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    ray = use(monkeypatch, FakeRay("host:6379"))
    with connect(address, needed={}):
        pass
    assert ray.done == []


def test_a_cluster_of_somebody_else_is_not_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = use(monkeypatch, FakeRay())
    with connect(None, needed={}):
        ray.shutdown()
        ray.init("other:1")
    assert ray.done[1:] == ["shutdown", ("other:1", {})]
    with connect(None, needed={}):
        ray.shutdown()
    assert ray.done[-1] == "shutdown"


def test_what_is_kept_for_later_calls_is_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, ended = use(monkeypatch, FakeRay("host:6379")), list[str]()

    class Workers:
        """Has another connection."""

        def close_if_idle(self) -> None:
            ended.append(ray.here)
            starting.KEEPERS.discard(self)
            ray.shutdown()

    starting.KEEPERS.add(Workers())
    with connect("other:1", needed={}):
        assert (ended, ray.here) == (["host:6379"], "other:1")


def test_a_connection_to_another_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRay("host:6379"))
    with pytest.raises(RuntimeError, match=r"'other:1' .* cluster"):
        connect("other:1", needed={}).__enter__()


def test_without_a_cluster_the_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = use(monkeypatch, FakeRay())
    with pytest.raises(ConnectionError, match="`ray start --head`"):
        connect("nowhere:1", needed={}).__enter__()
    assert ray.done == []


@pytest.mark.parametrize("address", ["127.0.0.1:6399", "[::1]:6399"])
def test_an_address_that_does_not_answer_is_refused_before_ray_tries(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    ray, tried = use(monkeypatch, FakeRay()), list[Any]()

    def refuse(address: tuple[str, int], timeout: float) -> None:
        tried.append((address, timeout))
        raise TimeoutError("timed out")

    monkeypatch.setattr(starting, "create_connection", refuse)
    with pytest.raises(ConnectionError, match=f"Ray cluster at '{re.escape(address)}':"):
        connect(address, needed={}).__enter__()
    assert tried == [((address.rpartition(":")[0].strip("[]"), 6399), 10.0)]
    assert ray.done == []


def test_the_address_in_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = use(monkeypatch, FakeRay())
    monkeypatch.setenv("RAY_ADDRESS", "http://host:8265")
    with pytest.raises(ValueError, match="RAY_ADDRESS is 'auto', 'host:port',"):
        connect(None, needed={}).__enter__()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with connect(None, needed={}):
        assert ray.done[0][0] == "local"
