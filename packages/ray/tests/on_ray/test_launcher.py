"""The launcher for clusters: values, messages and errors of its workers are those of `launch`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import heliograph as h
import pytest
import torch
from heliograph.packages.ray.tests.on_ray import calls
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.test_promises_on_ranks import NotTodayError, Watchful, train
from heliograph_ray import RayLauncher

pytestmark = pytest.mark.usefixtures("local_ray")


def entered(folder: Path) -> list[str]:
    """Return, for each rank, an `x` for each call of the function."""
    return [(folder / f"entered-{rank}").read_text() for rank in range(2)]


@pytest.mark.whole
@pytest.mark.timeout(90)
def test_values_and_messages_of_all_ranks_arrive(tmp_path: Path) -> None:
    values = RayLauncher(2, storage_path=tmp_path).run(calls.put_messages, 3, size=20_000_000)
    assert values == [(0, 2, bytes(20_000_000)), (3, 2, bytes(20_000_000))]
    for rank in range(2):
        assert [message for of, message in values.messages if of == rank] == [(rank, n) for n in range(100)]
    assert [each.kind for each in values.attempts] == ["completed"]
    assert values.result is None
    assert values.storage.startswith(f"{tmp_path}/heliograph-")


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_two_workers_equal_two_processes_of_launch(tmp_path: Path) -> None:
    values = RayLauncher(2, storage_path=tmp_path / "storage").run(train, tmp_path / "on_ray")
    first, second = h.launch(train, tmp_path / "launched", nprocs=2)
    assert [each[:4] for each in values] == [first[:4], second[:4]]
    alone = train(tmp_path / "alone")
    assert first[:2] == alone[:2] == ("completed", 12)
    for ours, theirs in zip(first[3], alone[3], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
    assert values.result is not None
    assert (values.result.status, values.result.progress.steps, values.result.metrics) == first[:3]


@pytest.mark.whole
@pytest.mark.timeout(90)
def test_an_error_of_the_user_ends_the_run_with_its_own_type(tmp_path: Path) -> None:
    with pytest.raises(calls.OwnError, match="own") as caught:
        RayLauncher(2, max_failures=5, storage_path=tmp_path / "storage").run(calls.fail, tmp_path)
    assert vars(caught.value)["code"] == 7
    assert vars(caught.value)["heliograph_rank"] == 1
    assert "raise OwnError(code=7)" in caught.value.__notes__[0]
    assert entered(tmp_path) == ["x", "x"]


@pytest.mark.whole
@pytest.mark.timeout(90)
@pytest.mark.parametrize("listed", [True, False])
def test_exception_pass_through_applies(tmp_path: Path, *, listed: bool) -> None:
    kinds = {"train": (NotTodayError,)} if listed else {}
    plugins = [Watchful(1, 5, fails=True), h.ExceptionPassThrough(**kinds)]
    with pytest.raises(NotTodayError if listed else h.TrainingError) as caught:
        RayLauncher(2, max_failures=5, storage_path=tmp_path / "storage").run(train, tmp_path, *plugins)
    assert vars(caught.value)["heliograph_rank"] == 1
    error = caught.value if listed else caught.value.__cause__
    assert isinstance(error, NotTodayError)
    assert error.args[1:] == (1,)
    assert_facts(error.args[0], "disk is on fire")


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_workers_that_die_in_every_attempt_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(h.RankFailed) as caught:
        RayLauncher(2, max_failures=1, backoff=0.25, storage_path=tmp_path / "storage").run(calls.die, tmp_path)
    assert caught.value.kind in ("died", "left")
    assert "2 was the last:" in caught.value.__notes__[0]
    assert entered(tmp_path) == ["xx", "xx"]
    warnings = [each for each in caplog.messages if each.startswith("attempt")]
    assert [each.partition(";")[0] for each in warnings] == ["attempt 1 was lost"]


@pytest.mark.whole
@pytest.mark.timeout(90)
def test_on_an_interrupt_the_trainings_save_and_stop(tmp_path: Path) -> None:
    def interrupt(rank: int, message: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        RayLauncher(2, storage_path=tmp_path / "storage").run(calls.train_forever, tmp_path, on_message=interrupt)
    for rank in range(2):
        text = (tmp_path / f"ended-{rank}").read_text()
        assert text.startswith("stopped: ")
        assert "  launcher" in text  # and `on rank 1` if that one received it first
        assert_facts(text, ": stop - ", "RayLauncher.run is ending")
    assert list(tmp_path.glob("run_*.pth"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
