"""A launcher that starts a cluster of its own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import ray
from heliograph.packages.ray.tests.on_ray import calls
from heliograph_ray import RayLauncher


@pytest.mark.whole
@pytest.mark.timeout(90)
def test_an_own_cluster_is_shut_down_after_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    values = RayLauncher(1, storage_path=tmp_path, name="alone").run(calls.put_messages, 3, size=1)
    assert values == [(0, 1, b"\0")]
    assert values.storage == f"{tmp_path}/alone"
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before
