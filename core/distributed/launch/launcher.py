"""`launch`: several processes on one machine that train together, from their start to their end."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_all_start_methods, get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

from ....events.checks import check_number, check_whole_number
from ....events.errors import describe_error
from ...system.errors import RankFailed
from ...system.extras import kind_of
from ...system.signals import SignalHook
from .exceptions import Carried, ProcessFailure, died
from .queue import Frame, open_queue, receive, send

LAUNCHED = "HELIOGRAPH_LAUNCHED"  # set in the environment of a rank
DRAIN = 5.0  # seconds to read what a dead rank had written, where a process of its own keeps the pipe open


class RankProcess:
    """A rank's process. What it writes, and its end, go to `events`, each by a thread that waits for it.

    Args:
        rank: its number.
        variables: what to set in its environment.
        call: the function and its arguments, pickled.
        grace: seconds that it has left to end when this process is gone.
        events: where its frames go, and one of the kind `ended`, the last.

    Attributes:
        began: whether it got as far as the function.
        report: how it ended, as it says; None as long as it does not.
        ended: whether the process is gone.
    """

    def __init__(
        self, rank: int, variables: Mapping[str, str], call: bytes, grace: float, events: SimpleQueue[Frame]
    ) -> None:
        self.rank, self.began, self.ended = rank, False, False
        self.report: Frame | None = None
        self._events = events
        # Forked, it would inherit threads' locks without the threads; torch does not survive that.
        spawn = get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        # No daemon: those may not have children, such as the workers of a loader.
        given = theirs, rank, call, grace, get_start_method()
        self._process = spawn.Process(target=enter, args=given, name=f"rank-{rank}", daemon=False)
        with theirs, environment(variables), _interrupts_blocked():
            self._process.start()
        self._reader = self._start_reading()
        self._waiter = Thread(target=self._wait, name="heliograph-launch", daemon=True)
        self._waiter.start()

    @property
    def status(self) -> int:
        """How the process ended: its exit status, or minus the number of the signal that ended it."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def is_alive(self) -> bool:
        """Whether the process lives."""
        return not self.ended and self._process.is_alive()

    def acknowledge(self, call: bytes = b"") -> None:
        """Answer that its report has arrived: it ends, or makes another call, pickled."""
        if call:
            self._reader.join()
            self.report, self._reader = None, self._start_reading()
        with suppress(OSError):  # it may have died since
            send(self._pipe, Frame("acknowledged", payload=call))

    def pass_on(self, signum: int) -> None:
        """Send it a signal that this process got."""
        if not self.ended and self._process.pid is not None:
            with suppress(ProcessLookupError):  # not reaped before it counts as ended, so no other process is meant
                os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """Kill it, and the processes that it started, unless it has ended."""
        if not self.ended:
            self._kill_group()
            self._process.kill()

    def close(self) -> None:
        """Kill it if it lives, and leave nothing of it."""
        self.kill()
        self._waiter.join()
        self._process.join()
        if not self._reader.is_alive():
            self._pipe.close()

    def _start_reading(self) -> Thread:
        reader = Thread(target=self._read, name="heliograph-launch", daemon=True)
        reader.start()
        return reader

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            kind = ""
            while kind not in ("value", "error"):
                frame = receive(self._pipe, self.rank)
                kind = frame.kind
                self._events.put(frame)

    def _wait(self) -> None:
        """Wait for the process's end, and leave it to the main thread to reap it: so the number stays its own."""
        assert self._process.pid is not None
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # reaped by somebody who waits for any child
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:  # Windows
            self._process.join()
        if self._reader.is_alive():  # no report: it left without closing what it had started
            self._kill_group()
            self._reader.join(DRAIN)
        self._events.put(Frame("ended", self.rank))

    def _kill_group(self) -> None:
        if hasattr(os, "killpg") and self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):  # it leads none, or macOS: only zombies are in it
                os.killpg(self._process.pid, signal.SIGKILL)


@contextmanager
def hosting() -> Iterator[Mapping[str, str]]:
    """Host the store by which ranks find each other, on a free port that only this machine reaches.

    Yields:
        the variables that lead a rank there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not for strict checkers

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        # The store gets the very socket: no other job can take the port in between.
        store: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=free.detach())
    try:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    finally:
        del store  # a traceback may keep this frame


def variables(rank: int, count: int, store: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank's environment says of its place.

    Args:
        rank: its number.
        count: how many there are.
        store: the variables that lead to the store.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, LAUNCHED: 1}
    found = {name: str(value) for name, value in place.items()} | dict(store)
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = "1"  # as torchrun does: else every process takes all cores
    return found


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment, which a process that is started now inherits; put it back."""
    former = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C, also in a process that is started now, until that one is ready for it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class Line:
    """The line to the parent. Threads write and read it, as a signal might tear what the main thread writes.

    Args:
        pipe: to the parent.
        grace: seconds that this process has left to end when the parent is gone.
    """

    def __init__(self, pipe: Connection, grace: float) -> None:
        self._pipe, self._grace = pipe, grace
        self._outgoing: SimpleQueue[Frame] = SimpleQueue()
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        for target in (self._write, self._read):
            threading.Thread(target=target, name="heliograph-launch", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send a frame without waiting."""
        self._outgoing.put(frame)

    def report(self, frame: Frame) -> bytes:
        """Send how a call ended, and wait until the parent has it, or is gone; return the next call, if any."""
        self.send(frame)
        return self._answers.get()

    def _write(self) -> None:
        with suppress(OSError):  # the parent is gone: the reading thread sees to that
            while True:
                send(self._pipe, self._outgoing.get())

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._answers.put(receive(self._pipe, -1).payload)
        self._answers.put(b"")
        os.kill(os.getpid(), signal.SIGTERM)  # the parent is gone: end as upon a cluster's signal
        threading.Event().wait(self._grace)
        os._exit(1)


def enter(pipe: Connection, rank: int, call: bytes, grace: float, start_method: str) -> None:
    """Be a rank; do not return.

    Args:
        pipe: to the parent.
        rank: this process's number.
        call: the function and its arguments, pickled; further calls come from the parent.
        grace: seconds that it has left to end when the parent is gone.
        start_method: how the parent starts processes by default, and so how this one does.
    """
    # Spawned, it would spawn its own ones, a loader's workers, too. What nobody has chosen stays open to choose.
    set_start_method(None if start_method == get_all_start_methods()[0] else start_method, force=True)
    if hasattr(os, "setpgid"):  # Windows has none
        os.setpgid(0, 0)  # a terminal's Ctrl-C comes once, by way of the parent
    send(pipe, Frame("began"))
    line = Line(pipe, grace)
    open_queue(lambda message: line.send(Frame("message", payload=message)))
    while call:
        report = _run(rank, call)
        _flush()
        call = line.report(report)
    _leave()


def _run(rank: int, call: bytes) -> Frame:
    try:
        _block_interrupts(signal.SIG_UNBLOCK)
        function, args, kwargs = _load(call)
        return Frame("value", payload=_dump(function(*args, **kwargs), rank))
    except BaseException as error:  # noqa: BLE001  # raised in the parent
        return Frame("error", payload=pickle.dumps(Carried.of(error)))
    finally:
        _block_interrupts(signal.SIG_BLOCK)


def _block_interrupts(how: int) -> None:
    """Block Ctrl-C or let it through again. The parent starts its children with it blocked."""
    if hasattr(signal, "pthread_sigmask"):  # Windows has none
        signal.pthread_sigmask(how, {signal.SIGINT})


def _load(call: bytes) -> Any:
    try:
        return pickle.loads(call)  # noqa: S301  # from our own parent
    except Exception as error:
        raise TypeError(
            f"launch could not load the function or its arguments in a new process: {describe_error(error)}. "
            f"What they are made of must be defined at module level in files that this process can import; in the "
            f'script itself, outside of `if __name__ == "__main__":`.'
        ) from error


def _dump(value: Any, rank: int) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"Rank {rank} returned {kind_of(value)} that cannot be pickled, and so cannot be sent to the "
            f"process that called launch: {error}. Return plain data, or nothing."
        ) from error


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # None, closed, or nobody reads it
            stream.flush()


def _leave() -> None:
    """End as the interpreter does, but for destroying what C++ code holds: gloo may abort the process at that."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(0)


class RankValues(list[Any]):
    """What `launch` returns: the value of each rank, by rank.

    Attributes:
        messages: (rank, object) of all that was put into the ranks' queues, as it came; empty with `on_message`.
        failures: the ranks that died or hung, after each of which all were started again.
    """

    def __init__(
        self, values: Iterable[Any], messages: list[tuple[int, Any]], failures: Iterable[RankFailed] = ()
    ) -> None:
        super().__init__(values)
        self.messages, self.failures = messages, tuple(failures)


def launch(
    fn: Callable[..., Any],
    /,
    *args: Any,
    nprocs: int | None = None,
    on_message: Callable[[int, Any], object] | None = None,
    grace: float = 30.0,
    max_failures: int = 0,
    **kwargs: Any,
) -> RankValues:
    """Call `fn(*args, **kwargs)` in several new processes on this machine; return what each returned.

    The processes find each other as under torchrun: an engine within `fn` makes them a group (so does
    `torch.distributed.init_process_group()`). Each is a fresh interpreter that imports the script again, so the script
    must call launch under `if __name__ == "__main__":`, and `fn` must be importable: a function at module level, not a
    lambda, and not one from a notebook or an interactive session. Arguments, values and messages are pickled; an
    argument that a parameter of launch hides is given by `functools.partial`. Unless the environment sets
    `OMP_NUM_THREADS`, it is 1, as under torchrun. They start processes of their own, such as the workers of a loader,
    by the start method that multiprocessing has in this one.

    A rank has succeeded when `fn` has returned and the value has arrived here, whatever becomes of its process after
    that. When one fails, the error leaves launch here, and its type, cause and attributes are those that it had there;
    a type that cannot be imported here is replaced by one of the same name that inherits from its nearest base that
    can. The error of the rank that failed first is raised, not one that merely followed; its traceback and the errors
    of other ranks are in its notes, its rank is in `heliograph_rank`. A SystemExit leaves as well, so that the script
    exits with the status that `fn` wanted; one with status 0 does so when the other ranks have ended by themselves.

    In the main thread, Ctrl-C, SIGTERM and SIGUSR1 are passed on to the ranks, which close properly; a second Ctrl-C
    kills them. If this process is killed, the ranks get a SIGTERM. None of them outlives launch, however it ends.

    Args:
        fn: what each process calls.
        args: its positional arguments.
        nprocs: how many processes; by default, one for each GPU that is visible.
        on_message: called in this thread with rank and object for everything that a rank puts into its queue
            (`run.report.queue`), while the ranks run; when it raises, they get a SIGTERM. By default, they are kept.
        grace: seconds that the others have to close and report when a rank has failed, and that all have to exit when
            they have reported; who has not ended then is killed.
        max_failures: how many times all ranks are started again because one died without a report (killed, out of
            memory) or hung; -1 for any number. `fn` is then called from its beginning, so let it resume, as with
            `Checkpoint(folder, resume="auto")`. What `fn` raises is not repeated: it leaves launch at once. So does a
            failure before any rank has called `fn`.
        kwargs: its keyword arguments.

    Raises:
        ValueError: an argument is out of its range; there is no GPU to count; `fn` is from an interactive session.
        TypeError: `fn`, its arguments or its value cannot be pickled.
        RuntimeError: this process was itself started by launch or torchrun.
        RankFailed: a rank died without a report, or hung, once more than `max_failures`.
        KeyboardInterrupt: upon Ctrl-C.
        BaseException: what `fn` or `on_message` raised.
    """
    _refuse_nesting()
    count = _check_count(nprocs)
    grace = check_number("grace", grace, of="seconds", more_than=0)
    messages: list[tuple[int, Any]] = []

    def keep(rank: int, message: Any) -> None:
        messages.append((rank, message))

    most = check_whole_number("max_failures, -1 for any number,", max_failures, at_least=-1)
    call, failures = _pickle(fn, args, kwargs), list[RankFailed]()
    while True:
        job = Job(count, grace)
        try:
            return RankValues(job.run(call, on_message or keep), messages, failures)
        except RankFailed as error:
            if len(failures) == most or not job.has_begun:  # a script that fails when it is imported always does
                raise
            failures.append(error)
            logger.warning("%s. All ranks are started again, for the attempt number %d", error, len(failures) + 1)


class KeptRanks:
    """Ranks that stay alive between calls: the first call starts them, as `launch` does, the others find them ready.

    They are given up when a call fails, when none comes for a while, by `close`, and when this process ends. The
    environment of their first call is theirs.

    Args:
        nprocs: as of `launch`.
        grace: as of `launch`.
        idle: seconds without a call after which they are given up.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, nprocs: int | None = None, *, grace: float = 30.0, idle: float = 60.0) -> None:
        self._nprocs, self._grace = nprocs, check_number("grace", grace, of="seconds", more_than=0)
        self._idle = check_number("idle", idle, of="seconds", more_than=0)
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._timer: threading.Timer | None = None

    def run(
        self, fn: Callable[..., Any], /, *args: Any, on_message: Callable[[int, Any], object], **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on each rank; return the values by rank. See `launch`, also for what it raises."""
        _refuse_nesting()
        call = _pickle(fn, args, kwargs)
        with self._lock:
            self._stop_timer()
            if self._job is None or not self._job.is_ready:
                self._end()
                self._job = Job(_check_count(self._nprocs), self._grace)
                atexit.register(self.close)  # before multiprocessing waits for its children, since it came later
            try:
                values = self._job.run(call, on_message, keep=True)
            except BaseException:  # also a Ctrl-C: ranks whose call did not end well are not used again
                self._end()
                raise
            self._timer = threading.Timer(self._idle, self.close)
            self._timer.daemon = True
            self._timer.start()
            return values

    def close(self) -> None:
        """Let the ranks end, and wait for it; they start again with the next call."""
        with self._lock:
            self._stop_timer()
            self._end()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            atexit.unregister(self.close)
            job.close()


def _refuse_nesting() -> None:
    starter = "launch" if LAUNCHED in os.environ else "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else None
    if starter is not None:
        raise RuntimeError(
            f"launch was called in a process that {starter} started. Call it once, and from the script only: under "
            f'`if __name__ == "__main__":`, as each process imports the script again. Within a rank, and under '
            f"torchrun, call the function itself."
        )


def _check_count(nprocs: int | None) -> int:
    if nprocs is None:
        import torch

        nprocs = torch.cuda.device_count()
        if not nprocs:
            raise ValueError("No GPU is visible, so launch cannot know how many processes to start: give nprocs.")
    return check_whole_number("nprocs", nprocs, at_least=1, or_else="None for one per visible GPU")


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(fn):
        raise TypeError(f"launch takes a function and its arguments, got {fn!r} as the function.")
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise ValueError(
            f"{fn!r} was defined in a notebook or an interactive session, which new processes cannot import. Put it "
            f"into a file, and import it from there."
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"launch cannot send {fn!r} and its arguments to new processes: {error}. It takes a function at module "
            f"level (no lambda, none within a function) and arguments that can be pickled."
        ) from error


PASSED_ON = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
TICK = 1.0  # seconds until a signal is handled that came just before the wait began, which it then does not interrupt

logger = logging.getLogger("heliograph")


class Job:
    """Ranks that run a call, and end then, or wait for the next one.

    Args:
        count: how many ranks.
        grace: seconds that the others have when one has failed.
    """

    def __init__(self, count: int, grace: float) -> None:
        self._count, self._grace = count, grace
        self._events: SimpleQueue[Frame] = SimpleQueue()  # a signal handler may put into this kind
        self._processes: list[RankProcess] = []
        self._ranks = ExitStack()  # their processes, and the store by which they meet
        self._keeps = False
        self._failures: list[ProcessFailure] = []
        self._killed: list[int] = []
        self._sent: set[int] = set()
        self._deadline: float | None = None
        self._on_message: Callable[[int, Any], object]

    @property
    def is_ready(self) -> bool:
        """Whether all ranks wait for a call."""
        return bool(self._processes) and all(process.is_alive for process in self._processes)

    @property
    def has_begun(self) -> bool:
        """Whether any rank has got as far as the function."""
        return any(process.began for process in self._processes)

    def run(self, call: bytes, on_message: Callable[[int, Any], object], *, keep: bool = False) -> list[Any]:
        """Run a call on the ranks; return their values, by rank.

        Args:
            call: the function and its arguments, pickled.
            on_message: called with rank and object for what is put into a rank's queue.
            keep: whether the ranks wait for another call, unless one of them fails.

        Raises:
            BaseException: what a rank raised.
        """
        self._on_message, self._keeps = on_message, keep
        self._sent.clear()  # of an earlier call
        with ExitStack() as stack:
            stack.callback(self._close_unless_kept)
            self._listen(stack)
            if self._processes:
                for process in self._processes:
                    process.acknowledge(call)
            else:
                self._start(call)
            while not self._is_done:
                self._wait()
        ProcessFailure.raise_first(self._failures, self._killed, self._grace, self._sent)
        return [self._value(process) for process in self._processes]

    def close(self) -> None:
        """Let ranks that wait end, and wait for them; whoever does not end is killed."""
        for process in self._processes:
            process.acknowledge()
        self._hurry()
        while not all(process.ended for process in self._processes):
            self._wait()
        self._ranks.close()

    def _close_unless_kept(self) -> None:
        if not (self._keeps and self._is_done):  # also where a second Ctrl-C has ended the wait
            self._ranks.close()

    @property
    def _is_done(self) -> bool:
        if self._keeps:
            return all(process.report is not None for process in self._processes)
        return all(process.ended for process in self._processes)

    def _start(self, call: bytes) -> None:
        store = self._ranks.enter_context(hosting())
        for rank in range(self._count):
            process = RankProcess(rank, variables(rank, self._count, store), call, self._grace, self._events)
            self._ranks.callback(process.close)
            self._processes.append(process)

    def _listen(self, stack: ExitStack) -> None:
        """Handle the signals that are to be passed on, except those that this process ignores."""
        signals = [each for each in PASSED_ON if signal.getsignal(each) not in (signal.SIG_IGN, None)]
        if signals and threading.current_thread() is threading.main_thread():
            hook = SignalHook(signals, lambda signum: self._events.put(Frame("signal", signum=signum)))
            stack.callback(hook.restore)
            hook.install()

    def _wait(self) -> None:
        """Wait for the next event, and act on it."""
        if self._deadline is not None and monotonic() >= self._deadline:
            self._deadline = None
            self._give_up()
        left = TICK if self._deadline is None else max(0.0, min(TICK, self._deadline - monotonic()))
        try:
            event = self._events.get(timeout=left)
        except Empty:
            return
        if event.kind == "signal":
            self._pass_on(event.signum)
        else:
            self._handle(self._processes[event.rank], event)

    def _handle(self, process: RankProcess, event: Frame) -> None:
        if event.kind == "began":
            process.began = True
        elif event.kind == "message":
            self._deliver(process.rank, event.payload)
        elif event.kind == "ended":
            process.ended = True
            if process.report is None and process.rank not in self._killed:
                self._fail(died(process.rank, process.status, began=process.began))
        else:
            process.report = event
            if not self._keeps:
                process.acknowledge()
            if event.kind == "error":
                carried = pickle.loads(event.payload)  # noqa: S301  # from our own child
                self._fail(ProcessFailure(carried.rebuild(), carried.text, process.rank))
            if not self._keeps and all(each.report is not None for each in self._processes):
                self._hurry()

    def _deliver(self, rank: int, payload: bytes) -> None:
        if any(failure.rank is None for failure in self._failures):
            return
        try:
            self._on_message(rank, pickle.loads(payload))  # noqa: S301  # from our own child
        except Exception as error:  # noqa: BLE001  # raised when the ranks have ended
            error.add_note(f"heliograph: while a message of rank {rank} was taken")
            self._fail(ProcessFailure(error))
            self._pass_on(signal.SIGTERM)

    def _fail(self, failure: ProcessFailure) -> None:
        self._failures.append(failure)
        if self._keeps:
            self._keeps = False
            for process in self._processes:
                if process.report is not None:
                    process.acknowledge()
        if not failure.is_no_failure:
            self._hurry()

    def _hurry(self) -> None:
        """Have the ranks end within the grace, counted from the first reason."""
        if self._deadline is None:
            self._deadline = monotonic() + self._grace

    def _give_up(self) -> None:
        for process in self._processes:
            if process.ended:
                continue
            process.kill()
            self._killed.append(process.rank)
            if process.report is not None:
                logger.warning(
                    "rank %d had reported, but did not end within %g s, and was killed", process.rank, self._grace
                )

    def _pass_on(self, signum: int) -> None:
        """Pass a signal on to the ranks; upon a second Ctrl-C, leave: what is left is killed."""
        if signum == signal.SIGINT and signum in self._sent:
            raise KeyboardInterrupt
        self._sent.add(signum)
        for process in self._processes:
            process.pass_on(signum)

    def _value(self, process: RankProcess) -> Any:
        assert process.report is not None
        try:
            return pickle.loads(process.report.payload)  # noqa: S301  # from our own child
        except Exception as error:
            raise TypeError(
                f"The value of rank {process.rank} cannot be loaded in this process: {error}. Return plain data."
            ) from error
