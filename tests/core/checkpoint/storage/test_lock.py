"""One writer at a time: a second one is refused, a killed one holds nothing."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heliograph.core.checkpoint.storage import Store, lock
from heliograph.core.checkpoint.storage.lock import Lock
from heliograph.tests.messages import assert_each

fcntl = pytest.importorskip("fcntl", reason="the locks of other processes are made with it")
Make = Callable[..., Any]
CHILD = """
import os, sys
from pathlib import Path
from heliograph.core.checkpoint.storage import Store
store = Store(Path(sys.argv[1]), "run")
store.open()
if os.fork() == 0:  # as a loader's worker: it outlives the kill
    sys.stdin.read()
    os._exit(0)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, opened: Make, state: Make) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        holder = rf"process {child.pid} on {socket.gethostname()}.*\.run\.lock"
        with pytest.raises(ValueError, match=f"written by {holder}"):
            Store(tmp_path, "run").open()
        with pytest.raises(ValueError, match="close that one first"):
            Store(tmp_path, "run").open()
        other = opened("other")
        other.save("a.pth", state(name="other"))

        child.send_signal(signal.SIGKILL)
        child.wait()
        opened().save(
            "b.pth", state()
        )  # although the child's own child is alive and was forked while the lock was held
        assert child.stdin is not None
        child.stdin.close()


@pytest.mark.whole
def test_who_has_patience_waits_for_a_process_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"

        def kill(seconds: float) -> None:
            child.kill()
            child.wait()

        monkeypatch.setattr(lock, "sleep", kill)
        store = Store(tmp_path, "run")
        assert store.open(patience=60.0) == []
        with pytest.raises(ValueError, match="this process"):  # which would wait for itself
            Store(tmp_path, "run").open(patience=60.0)
        store.close()
        assert child.stdin is not None
        child.stdin.close()


def test_patience_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(lock, "monotonic", lambda: clock[0])
    monkeypatch.setattr(lock, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="used by another process"):
            Lock(tmp_path / "lock", "It is used").acquire(patience=2.0)
    assert clock[0] == pytest.approx(2.0, abs=0.15)


def test_the_same_process_is_refused_too(tmp_path: Path, opened: Make, names: Make) -> None:
    first = opened()
    with pytest.raises(ValueError, match=rf"{os.getpid()} on .* \(this"):
        Store(tmp_path, "run").open()
    first.close()
    opened()


def test_nothing_is_left_after_close(tmp_path: Path, opened: Make) -> None:
    store = opened()
    assert (tmp_path / ".run.holder").read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    store.close()
    store.close()

    assert list(tmp_path.iterdir()) == []


def test_the_files_of_a_killed_process_do_not_matter(tmp_path: Path, opened: Make) -> None:
    (tmp_path / ".run.lock").touch()
    (tmp_path / ".run.holder").write_text(f"12345 {'somewhere ' * 8}\n")
    opened()

    assert (tmp_path / ".run.holder").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_a_holder_that_has_not_written_its_name_yet(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="used by another process"):
            Lock(path, "It is used").acquire()


def test_a_lock_file_that_was_removed_in_between_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder unlinks it between our opening and our locking: we would lock what nobody else ever sees."""
    path, times = tmp_path / "lock", []

    def flock(file: Any, operation: int, real: Callable[..., None] = fcntl.flock) -> None:
        times.append(operation)
        if len(times) == 1:
            path.unlink()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = Lock(path, "It is used")
    assert mine.acquire() is True
    assert len(times) == 2
    with pytest.raises(ValueError, match="this process"):
        Lock(path, "It is used").acquire()
    mine.release()
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    stores = [Store(tmp_path, "run"), Store(tmp_path, "run")]
    for store in stores:
        assert_each(store.open(), (tmp_path, "no file locks"))
    for store in stores:
        store.close()
    assert list(tmp_path.iterdir()) == []


def test_what_fails_at_the_start_gives_the_lock_back(tmp_path: Path) -> None:
    (tmp_path / ".run.small.tmp").mkdir()  # what cannot be unlinked
    with pytest.raises(OSError, match="small"):
        Store(tmp_path, "run").open()
    (tmp_path / ".run.small.tmp").rmdir()
    store = Store(tmp_path, "run")
    assert store.open() == []
    store.close()


def test_a_holder_file_that_cannot_be_written_gives_the_lock_back(tmp_path: Path) -> None:
    holder, first = tmp_path / "a.holder", Lock(tmp_path / "a.lock", "A is written")
    holder.mkdir()
    with pytest.raises(OSError, match=r"a\.holder"):
        first.acquire()
    holder.rmdir()
    assert Lock(tmp_path / "a.lock", "A is written").acquire()
