"""`launch`: several processes from one call."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import RankFailed, TrainingError, launch
from heliograph.core.distributed.launcher import child_queue
from heliograph.tests.core.distributed import jobs
from heliograph.tests.messages import assert_each, assert_facts, has_facts
from heliograph.tests.ranks_pool import Pool

pytestmark = pytest.mark.usefixtures("leaves_nothing")

HANG = 60  # seconds after which a script of a test is taken to hang


def has_ended(pid: int) -> bool:
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(end):
        return bool(select.select([end], [], [], HANG)[0])


class Script:
    """A script in a process of its own."""

    def __init__(self, folder: Path, text: str) -> None:
        path = folder / "script.py"
        path.write_text(f"import heliograph\nfrom heliograph.tests.core.distributed import jobs\n{text}")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, str(path)], stdout=pipe, stderr=pipe, text=True, cwd=folder)

    def end(self) -> tuple[int, str, str]:
        """Wait until nobody has its output open any more: it has ended, and so have its ranks."""
        output, errors = self.process.communicate(timeout=HANG)
        return self.process.returncode, output, errors


# Values.


def test_each_ranks_value_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    values = launch(jobs.place, 1, nprocs=2, word="a")
    assert values == [
        {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "args": (1,),
            "kwargs": {"word": "a"},
        }
        for rank in ("0", "1")
    ]
    assert values.messages == []


@pytest.fixture(scope="module")
def uninterrupted(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ranks(2).run(jobs.train_and_die, str(tmp_path_factory.mktemp("uninterrupted")), 0)


def test_all_ranks_are_started_again_after_one_has_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, uninterrupted: Any
) -> None:
    values = launch(jobs.train_and_die, str(tmp_path), 1, nprocs=2, max_failures=-1)

    assert values == uninterrupted == [(8, values[0][1])] * 2
    assert [(each.rank, each.kind) for each in values.failures] == [(1, "died")]
    assert [record.args for record in caplog.records if "started again" in record.msg] == [(values.failures[0], 2)]


@pytest.mark.whole
def test_one_death_too_many_leaves(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="signal SIGKILL ended it") as caught:
        launch(jobs.train_and_die, str(tmp_path), 2, nprocs=2, max_failures=1)
    assert caught.value.rank == 1
    assert len(list(tmp_path.glob("killed*"))) == 2
    assert [note for note in caught.value.__notes__ if "the newest checkpoint is" in note and "of step 4, " in note]


def test_an_error_of_the_function_is_no_death_to_start_again_after() -> None:
    with pytest.raises(ValueError, match="refused"):
        launch(jobs.refuse, nprocs=2, max_failures=-1)
    with pytest.raises(ValueError, match="max_failures, -1 for any"):
        launch(jobs.refuse, nprocs=2, max_failures=-2)


def test_a_single_rank_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (value,) = launch(jobs.place, nprocs=1)
    assert (value["RANK"], value["WORLD_SIZE"], value["OMP_NUM_THREADS"]) == ("0", "1", "3")


def test_there_are_as_many_ranks_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [value["RANK"] for value in launch(jobs.place)] == ["0", "1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="GPU is visible,"):
        launch(jobs.place)


def test_a_rank_starts_without_torch() -> None:
    assert launch(jobs.has_torch, nprocs=1) == [False]


def test_ranks_train_together() -> None:
    values = launch(jobs.train_together, nprocs=2)
    assert values == [1.5, 1.5]
    assert values.failures == ()


def test_large_values_do_not_block() -> None:
    size = 50_000_000
    assert launch(jobs.large, size, nprocs=2) == [b"0" * size, b"1" * size]


def test_ranks_stay_out_of_the_way_of_a_terminals_signals() -> None:
    assert launch(jobs.leads_its_group, nprocs=1) == [True]


def test_a_rank_starts_processes_as_this_one_does() -> None:
    assert launch(jobs.start_method, nprocs=1) == [None]  # the platform's, and the function may choose another
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert launch(jobs.start_method, nprocs=1) == ["forkserver"]
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="workers are not forked")
def test_a_ranks_workers_are_forked() -> None:
    assert launch(jobs.read_with_a_worker, nprocs=1) == [6.0]


def test_it_works_in_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        (value,) = pool.submit(launch, jobs.place, nprocs=1).result()
    assert value["RANK"] == "0"


def test_what_is_registered_for_the_exit_is_called(tmp_path: Path) -> None:
    launch(jobs.register, tmp_path / "reported", nprocs=1)
    assert (tmp_path / "reported").read_text() == "left properly"


def test_a_rank_that_has_reported_must_not_linger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "heliograph"):
        assert launch(jobs.linger, nprocs=1, grace=0.5) == ["done"]
    assert_each(caplog.messages, ("rank 0", "0.5 s", "killed"))


def test_processes_that_a_rank_leaves_are_gone() -> None:
    (pid,) = launch(jobs.leave_a_helper, nprocs=1)
    assert has_ended(pid)


# Messages.


def test_messages_arrive_while_the_ranks_run(fifo: Path) -> None:
    received = []

    def receive(rank: int, message: Any) -> None:
        received.append((rank, message))
        fifo.write_text("answer")

    values = launch(jobs.converse, fifo, nprocs=1, on_message=receive)
    assert values == ["answer"]
    assert received == [(0, {"rank": "0"})]
    assert values.messages == []


def test_messages_are_kept_for_whoever_does_not_listen() -> None:
    large = b"x" * 10_000_000
    values = launch(jobs.put_all, [1, large, "three"], nprocs=2)
    assert values == [None, None]
    for rank in range(2):
        assert [message for of, message in values.messages if of == rank] == [1, large, "three"]


def test_outside_of_launch_there_is_no_queue() -> None:
    assert child_queue() is None


def test_a_message_that_cannot_be_pickled_is_refused_where_it_is_put() -> None:
    with pytest.raises(Exception, match="pickle") as caught:
        launch(jobs.put_a_lambda, nprocs=1)
    assert "in put_a_lambda" in caught.value.__notes__[-1]


def test_a_listener_that_fails_ends_the_ranks_with_a_sigterm() -> None:
    received = []

    def receive(rank: int, message: Any) -> None:
        received.append(message)
        if received == ["ready", "ready"]:
            raise LookupError("not that")

    with pytest.raises(LookupError, match="not that") as caught:
        launch(jobs.close_upon_termination, nprocs=2, on_message=receive)
    assert received == ["ready", "ready"]
    assert any(has_facts(caught.value.__notes__[0], "on_message", f"rank {rank}") for rank in range(2))
    assert len(caught.value.__notes__) == 3


def test_a_message_that_cannot_be_loaded_is_an_error() -> None:
    with pytest.raises(ValueError, match="refused") as caught:
        launch(jobs.put_the_unloadable, nprocs=1)
    assert_each(caught.value.__notes__, ("on_message", "rank 0"))


# Errors.


def test_the_ranks_own_error_is_raised() -> None:
    with pytest.raises(jobs.OwnError) as caught:
        launch(jobs.raise_own, nprocs=1)
    error = caught.value
    assert error.args == ("code 3", "more")
    assert repr(error.__cause__) == "KeyError('missing')"
    assert error.heliograph_rank == 0  # type: ignore[attr-defined]
    (note,) = error.__notes__
    assert_facts(note, "heliograph: ", "rank 0:\n", "Traceback (most recent")
    assert "in raise_own\n" in note


def test_a_failed_run_raises_as_it_does_in_one_process() -> None:
    with pytest.raises(TrainingError, match="OwnError: ") as caught:
        launch(jobs.fit, nprocs=1)
    assert isinstance(caught.value.__cause__, jobs.OwnError)
    assert caught.value.__cause__.code == 4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("errors", "order", "raised", "rank"),
    [
        ([ValueError("a"), KeyError("b")], [0, 1], ValueError, 0),
        ([ValueError("a"), KeyError("b")], [1, 0], KeyError, 1),
        ([RankFailed(1, "KeyError", "'b'", ""), KeyError("b")], [0, 1], KeyError, 1),
        ([SystemExit(0), KeyError("b")], [0, 1], KeyError, 1),
        ([SystemExit(143), SystemExit(143)], [1, 0], SystemExit, 1),
        ([RankFailed(1, "hung", "", "in a"), RankFailed(1, "hung", "", "in b")], [1, 0], RankFailed, 1),
    ],
)
def test_the_error_that_came_first_is_raised(
    fifo: Path, errors: list[BaseException], order: list[int], raised: type[BaseException], rank: int
) -> None:
    with pytest.raises(raised) as caught:
        launch(jobs.fail_in_turn, fifo, errors, order, nprocs=2)
    assert caught.value.args == errors[rank].args
    assert caught.value.heliograph_rank == rank  # type: ignore[attr-defined]
    other = errors[1 - rank]
    assert_each(caught.value.__notes__[1:], (f"rank {1 - rank}", type(other).__name__, other))


def test_an_error_that_was_wrapped_still_follows(fifo: Path) -> None:
    with pytest.raises(KeyError):
        launch(jobs.fail_wrapped_in_turn, fifo, nprocs=2)


def test_ranks_that_do_not_end_after_anothers_failure_are_killed() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        launch(jobs.fail_or_hang, nprocs=2, grace=0.5)
    assert (caught.value.errno, caught.value.filename) == (2, "data.bin")
    assert_facts(caught.value.__notes__[1], "rank 0", "0.5 s", "killed")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("how", "said"), [(7, ".*exit status 7"), (-9, "signal SIGKILL ended it")])
def test_a_rank_that_dies_is_named(how: int, said: str) -> None:
    with pytest.raises(RankFailed, match=rf"^rank 1 died: {said}") as caught:
        launch(jobs.die, how, nprocs=2)
    assert caught.value.rank == caught.value.heliograph_rank == 1  # type: ignore[attr-defined]


def test_processes_that_a_dead_rank_leaves_are_gone() -> None:
    pids = []

    def receive(rank: int, message: Any) -> None:
        pids.append(message)
        if len(pids) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(SystemExit) as caught:
        launch(jobs.die_with_a_helper, nprocs=2, on_message=receive)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert all(map(has_ended, pids))


def test_an_exit_status_reaches_the_script(fifo: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(jobs.leave_status, 143, fifo, nprocs=2)
    assert caught.value.code == 143


# What cannot be sent.


def test_functions_and_arguments_must_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"send <function .*<lambda>"):
        launch(lambda: None, nprocs=1)
    with pytest.raises(TypeError, match="kept at home"):
        launch(jobs.place, jobs.Unpicklable(), nprocs=1)


def test_functions_and_arguments_must_be_loaded() -> None:
    with pytest.raises(TypeError, match=r"arguments .* ValueError: refused") as caught:
        launch(jobs.place, jobs.Unloadable(), nprocs=1)
    assert repr(caught.value.__cause__) == "ValueError('refused')"


def test_values_must_be_pickled_and_loaded() -> None:
    with pytest.raises(Exception, match="pickle") as caught:
        launch(jobs.Unpicklable, nprocs=1)
    assert caught.value.heliograph_rank == 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="refused"):
        launch(jobs.Unloadable, nprocs=1)


# Signals.


class Signaller:
    """Sends this process a signal when so many ranks have put `ready`."""

    def __init__(self, signum: int, count: int = 2) -> None:
        self.signum, self.count = signum, count
        self.received: list[str] = []

    def __call__(self, rank: int, message: str) -> None:
        self.received.append(message)
        if message == "ready" and self.received.count("ready") % self.count == 0:
            os.kill(os.getpid(), self.signum)


def test_ctrl_c_lets_the_ranks_close() -> None:
    receive = Signaller(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(jobs.close_upon_interrupt, nprocs=2, on_message=receive)
    assert receive.received == ["ready", "ready", "closing", "closing"]
    assert len(caught.value.__notes__) == 2


def test_a_second_ctrl_c_kills_them() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(jobs.ignore_interrupts, nprocs=2, on_message=Signaller(signal.SIGINT))
    assert not hasattr(caught.value, "__notes__")


def test_a_sigterm_lets_the_ranks_close() -> None:
    receive = Signaller(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        launch(jobs.close_upon_termination, nprocs=2, on_message=receive)
    assert caught.value.code == 143
    assert receive.received == ["ready", "ready", "saved", "saved"]


def test_a_sigterm_ends_ranks_that_do_not_heed_it() -> None:
    with pytest.raises(SystemExit) as caught:
        launch(jobs.wait_for_termination, nprocs=2, on_message=Signaller(signal.SIGTERM))
    assert caught.value.code == 143
    assert isinstance(caught.value.__cause__, RankFailed)
    assert "signal SIGTERM ended it" in str(caught.value.__cause__)


def test_signals_that_are_ignored_stay_so(fifo: Path) -> None:
    found = []

    def receive(rank: int, message: Any) -> None:
        found.append(signal.getsignal(signal.SIGINT))
        fifo.write_text("")

    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launch(jobs.converse, fifo, nprocs=1, on_message=receive)
    finally:
        signal.signal(signal.SIGINT, former)
    assert found == [signal.SIG_IGN]


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    main = "if __name__ == '__main__':\n    heliograph.launch(jobs.outlive_the_parent, nprocs=2, grace=0.5)\n"
    script = Script(tmp_path, main)
    assert script.process.stdout is not None
    assert [script.process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    script.process.kill()
    status, output, errors = script.end()
    assert (status, output, errors) == (-signal.SIGKILL, "saved\n", "")


# Scripts.


def test_a_scripts_own_functions_and_types_work(tmp_path: Path) -> None:
    script = Script(
        tmp_path,
        "class ScriptError(Exception):\n    pass\n"
        "def own(fails):\n    if fails:\n        raise ScriptError\n    return ScriptError()\n"
        "if __name__ == '__main__':\n"
        "    print([type(value) is ScriptError for value in heliograph.launch(own, False, nprocs=2)])\n"
        "    try:\n        heliograph.launch(own, True, nprocs=1)\n"
        "    except ScriptError as error:\n        print('caught', error.heliograph_rank)\n",
    )
    assert script.end() == (0, "[True, True]\ncaught 0\n", "")


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", ["", ", max_failures=-1"])
def test_a_script_without_its_guard_is_reported(options: str, tmp_path: Path) -> None:
    text = f"print('begins')\nheliograph.launch(jobs.place, nprocs=1{options})\n"
    status, output, errors = Script(tmp_path, text).end()
    assert (status, output) == (1, "begins\nbegins\n")
    assert "RuntimeError: launch was called" in errors
    last = errors.splitlines()[-1]
    assert "RankFailed: rank 0 died:" in last
    assert '`if __name__ == "__main__":`?' in last


def test_an_interactive_session_must_import_the_function() -> None:
    code = "import heliograph\ndef own(): pass\nheliograph.launch(own, nprocs=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert "ValueError: <function own at" in done.stderr
    assert "defined in a notebook" in done.stderr
    code = """from heliograph.tests.core.distributed import jobs
print(jobs.heliograph.launch(jobs.large, 3, nprocs=1))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert (done.stdout, done.stderr) == ("[b'000']\n", "")


# Arguments.


def test_ranks_do_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="process that launch started"):
        launch(jobs.nest, nprocs=1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(RuntimeError, match="process that torchrun started"):
        launch(jobs.place, nprocs=1)


@pytest.mark.parametrize("nprocs", [0, -1, True, 2.0, "2"])
def test_wrong_counts_are_refused(nprocs: Any) -> None:
    with pytest.raises(ValueError, match="least 1, or None"):
        launch(jobs.place, nprocs=nprocs)


@pytest.mark.parametrize("grace", [0, -1.0, True, float("inf"), float("nan")])
def test_wrong_times_are_refused(grace: Any) -> None:
    with pytest.raises(ValueError, match="seconds, more than 0"):
        launch(jobs.place, nprocs=1, grace=grace)
