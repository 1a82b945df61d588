"""`launch`: several processes on one machine that train together. Each imports torch when its function does."""

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
from typing import Any, Literal, NamedTuple

from ...events.checks import check_number, check_whole_number, describe_error
from ..system.errors import RankFailed
from ..system.signals import SignalHook
from .failure import Carried, ProcessFailure, silent_death

LAUNCHED = "HELIOGRAPH_LAUNCHED"  # set in the environment of a rank
DRAIN = 5.0  # seconds to read the output of a dead rank whose child processes keep the pipe open


class RankQueue:
    """Sends objects to the process that called `launch`: to its `on_message`, or to the `messages` of its result.

    Args:
        send: sends a pickled object without waiting.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def put(self, value: Any) -> None:
        """Send an object in its current state, without waiting. The objects of one rank arrive in order.

        Args:
            value: can be pickled; a tensor is copied, and one on a GPU is better moved to the CPU first.
        """
        self._send(pickle.dumps(value))


_queues: dict[int, RankQueue] = {}  # by process id: a process forked from a rank, such as a loader's worker, has none


def child_queue() -> RankQueue | None:
    """Return the queue to the process that launched this one; None unless `heliograph.launch` did."""
    return _queues.get(os.getpid())


def open_queue(send: Callable[[bytes], None]) -> None:
    """Make `child_queue` return a queue in this rank."""
    _queues[os.getpid()] = RankQueue(send)


Kind = Literal["began", "message", "value", "error", "acknowledged", "ended", "signal"]


class Frame(NamedTuple):
    """A message; the parent's own events, `ended` and `signal`, do not cross the pipe.

    Attributes:
        kind: of the message.
        rank: its source.
        payload: pickled, if the kind has content.
        signum: the signal that arrived.
    """

    kind: Kind
    rank: int = -1
    payload: bytes = b""
    signum: int = 0


class RankProcess:
    """A rank's process. Threads put its frames and its end into `events`.

    Args:
        rank: its number.
        variables: set in its environment.
        call: the function and its arguments, pickled.
        grace: seconds that it has to end when this process is gone.
        events: receives its frames and, last, a frame of the kind `ended`.

    Attributes:
        began: whether it has called the function.
        report: its value or error, None until it reports.
        ended: whether the process is gone.
    """

    def __init__(
        self, rank: int, variables: Mapping[str, str], call: bytes, grace: float, events: SimpleQueue[Frame]
    ) -> None:
        self.rank, self.began, self.ended = rank, False, False
        self.report: Frame | None = None
        self._events = events
        # A fork would inherit the locks of threads without the threads, which breaks torch.
        spawn = get_context("spawn")
        self._pipe, child_end = spawn.Pipe()
        # Not a daemon: daemons cannot have children, such as the workers of a loader.
        arguments = child_end, call, grace, get_start_method()
        self._process = spawn.Process(target=enter, args=arguments, name=f"rank-{rank}", daemon=False)
        # The process inherits the block, until it is ready for a Ctrl-C.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with child_end, environment(variables):
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        assert self._process.pid is not None
        self._pid = self._process.pid
        self._reader = self._start_reading()
        self._waiter = Thread(target=self._wait, name="heliograph-launch", daemon=True)
        self._waiter.start()

    @property
    def status(self) -> int:
        """The exit status of the process, or minus the number of the signal that ended it."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def is_alive(self) -> bool:
        return not self.ended and self._process.is_alive()

    def acknowledge(self, call: bytes = b"") -> None:
        """Confirm that its report has arrived: it ends, or makes another call, pickled."""
        if call:
            self._reader.join()
            self.report, self._reader = None, self._start_reading()
        with suppress(OSError):  # it may be gone
            self._pipe.send(Frame("acknowledged", payload=call))

    def pass_on(self, signum: int) -> None:
        """Send it a signal that this process got."""
        if not self.ended:
            with suppress(ProcessLookupError):  # it is reaped only after `ended`, so the PID is not reused
                os.kill(self._pid, signum)

    def kill(self) -> None:
        """Kill it and its child processes, unless it has ended."""
        if not self.ended:
            self._kill_group()
            self._process.kill()

    def close(self) -> None:
        """Kill it if it is alive, and free its resources."""
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
                frame: Frame = self._pipe.recv()
                kind = frame.kind
                self._events.put(frame._replace(rank=self.rank))

    def _wait(self) -> None:
        # Only the main thread reaps the process, so that its PID is not reused before.
        with suppress(ChildProcessError):  # reaped by code that waits for any child
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        if self._reader.is_alive():  # no report: its child processes may be alive
            self._kill_group()
            self._reader.join(DRAIN)
        self._events.put(Frame("ended", self.rank))

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # no such group, or macOS: only zombies are in it
            os.killpg(self._pid, signal.SIGKILL)


@contextmanager
def hosting() -> Iterator[Mapping[str, str]]:
    """Host the store for the rendezvous of the ranks, on a free port of the loopback interface.

    Yields:
        the variables with its address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not exported

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        # The store gets this socket, so no other job can take the port in between.
        store: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=free.detach())
    try:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    finally:
        del store  # a traceback may keep this frame alive


def variables(rank: int, count: int, store: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a rank's place.

    Args:
        rank: its number.
        count: the world size.
        store: the variables with the address of the store.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, LAUNCHED: 1}
    result = {name: str(value) for name, value in place.items()} | dict(store)
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        result["OMP_NUM_THREADS"] = "1"  # as torchrun: otherwise every process uses all cores
    return result


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment, which new processes inherit; restore it afterwards."""
    previous = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class ParentConnection:
    """The connection to the parent. Threads use it, because a signal may interrupt a write of the main thread.

    Args:
        pipe: to the parent.
        grace: seconds that this process has to end when the parent is gone.
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
        """Send the result of a call, and wait until the parent has it or is gone; return the next call, if any."""
        self.send(frame)
        return self._answers.get()

    def _write(self) -> None:
        with suppress(OSError):  # the parent is gone: the reading thread handles that
            while True:
                self._pipe.send(self._outgoing.get())

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._answers.put(self._pipe.recv().payload)
        self._answers.put(b"")
        os.kill(os.getpid(), signal.SIGTERM)  # the parent is gone: end as after a cluster's signal
        threading.Event().wait(self._grace)
        os._exit(1)


def enter(pipe: Connection, call: bytes, grace: float, start_method: str) -> None:
    """Run a rank; do not return.

    Args:
        pipe: to the parent.
        call: the function and its arguments, pickled; the parent sends further calls.
        grace: seconds that this process has to end when the parent is gone.
        start_method: the parent's default start method, which this process uses too.
    """
    # A spawned process would also spawn, for example, loader workers. A default stays a default.
    set_start_method(None if start_method == get_all_start_methods()[0] else start_method, force=True)
    os.setpgid(0, 0)  # so that a terminal's Ctrl-C arrives once, through the parent
    pipe.send(Frame("began"))
    parent = ParentConnection(pipe, grace)
    open_queue(lambda message: parent.send(Frame("message", payload=message)))
    while call:
        report = _run(call)
        _flush()
        call = parent.report(report)
    _leave()


def _run(call: bytes) -> Frame:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        function, args, kwargs = _load(call)
        return Frame("value", payload=pickle.dumps(function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001  # raised in the parent
        return Frame("error", payload=pickle.dumps(Carried.of(error)))
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _load(call: bytes) -> Any:
    try:
        return pickle.loads(call)  # noqa: S301  # from our own parent
    except Exception as error:
        raise TypeError(
            f"launch could not load the function or its arguments in a new process: {describe_error(error)}. "
            f"Define them at module level in files that this process can import; in the script itself, outside of "
            f'`if __name__ == "__main__":`.'
        ) from error


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # None, closed, or without a reader
            stream.flush()


def _leave() -> None:
    # As the interpreter ends, but without destroying C++ objects, where gloo may abort the process.
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(0)


class RankValues(list[Any]):
    """The result of `launch`: the value of each rank, by rank.

    Attributes:
        messages: (rank, object) for each object put into the ranks' queues, in order; empty with `on_message`.
        failures: the ranks that died or hung, each followed by a restart of all ranks.
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
    """Call `fn(*args, **kwargs)` in several new processes on this machine; return their values.

    The processes form a group as under torchrun: an engine within `fn` joins it, and so does
    `torch.distributed.init_process_group()`. Each is a new interpreter that imports the script again. So the script
    must call launch under `if __name__ == "__main__":`, and `fn` must be importable: a function at module level, not a
    lambda, and not from a notebook or an interactive session. Arguments, values and messages are pickled; bind
    arguments that have the name of a parameter of launch with `functools.partial`. Unless the environment sets
    `OMP_NUM_THREADS`, it is 1, as under torchrun. The ranks start their own processes, such as loader workers, with the
    start method of this process.

    A rank has succeeded when `fn` has returned and its value has arrived here. When a rank fails, its error leaves
    launch with its type, cause and attributes; a type that cannot be imported here becomes a RuntimeError. The error of
    the rank that failed first is raised, not one that followed from it. Its traceback and the errors of other ranks are
    in its notes, its rank is in `heliograph_rank`. A SystemExit leaves launch as well, so that the script exits with
    the status of `fn`; with status 0 it does so after the other ranks ended.

    In the main thread, Ctrl-C, SIGTERM and SIGUSR1 are passed on to the ranks, which close properly; a second Ctrl-C
    kills them. If this process is killed, the ranks get a SIGTERM. No rank outlives launch.

    Args:
        fn: the function that each process calls.
        args: its positional arguments.
        nprocs: the number of processes; by default, one for each visible GPU.
        on_message: called in this thread with rank and object for each object that a rank puts into its queue
            (`run.report.queue`), while the ranks run. If it raises, the ranks get a SIGTERM. By default, messages are
            kept.
        grace: seconds that the other ranks have to close and report when a rank has failed, and that all have to exit
            after their reports; then they are killed.
        max_failures: how often all ranks are started again after one died without a report (killed, out of memory) or
            hung; -1 for any number. `fn` is then called from its beginning, so let it resume, as with
            `Checkpoint(folder, resume="auto")`. An error that `fn` raises is not retried, nor is a failure before any
            rank has called `fn`.
        kwargs: its keyword arguments.

    Raises:
        ValueError: an argument is out of its range; there is no GPU to count; `fn` is from an interactive session.
        TypeError: `fn`, its arguments or its value cannot be pickled.
        RuntimeError: this process was itself started by launch or torchrun.
        RankFailed: a rank died without a report, or hung, more than `max_failures` times.
        KeyboardInterrupt: after Ctrl-C.
        BaseException: an error of `fn` or `on_message`.
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
            if len(failures) == most or not job.has_begun:  # a script that fails on import fails again
                raise
            failures.append(error)
            logger.warning("%s. All ranks are started again, attempt %d", error, len(failures) + 1)


class KeptRanks:
    """Ranks that stay alive between calls: the first call starts them like `launch`, later calls reuse them.

    They end when a call fails, after some time without a call, by `close`, and with this process. They keep the
    environment of their first call.

    Args:
        nprocs: as for `launch`.
        grace: as for `launch`.
        idle: seconds without a call after which they end.

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
        """Call `fn(*args, **kwargs)` on each rank; return the values by rank. See `launch`, also for its errors."""
        _refuse_nesting()
        call = _pickle(fn, args, kwargs)
        with self._lock:
            self._stop_timer()
            if self._job is None or not self._job.is_ready:
                self._end()
                self._job = Job(_check_count(self._nprocs), self._grace)
                # registered later, so it runs before multiprocessing waits for its children
                atexit.register(self.close)
            try:
                values = self._job.run(call, on_message, keep=True)
            except BaseException:  # also after a Ctrl-C: ranks are not reused after an error
                self._end()
                raise
            self._timer = threading.Timer(self._idle, self.close)
            self._timer.daemon = True
            self._timer.start()
            return values

    def close(self) -> None:
        """End the ranks and wait for them; the next call starts new ones."""
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
            f"launch was called in a process that {starter} started. Call it once, in the script, under "
            f'`if __name__ == "__main__":`, because each process imports the script again. Within a rank, and under '
            f"torchrun, call the function itself."
        )


def _check_count(nprocs: int | None) -> int:
    if nprocs is None:
        import torch

        nprocs = torch.cuda.device_count()
        if not nprocs:
            raise ValueError("No GPU is visible, so launch has no default for the number of processes: pass nprocs.")
    return check_whole_number("nprocs", nprocs, at_least=1, or_else="None for one per visible GPU")


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise ValueError(
            f"{fn!r} was defined in a notebook or an interactive session, which new processes cannot import. Put it "
            f"into a file and import it from there."
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"launch cannot send {fn!r} and its arguments to new processes: {error}. It takes a function at module "
            f"level (no lambda, none within a function) and arguments that can be pickled."
        ) from error


PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TICK = 1.0  # seconds until a signal is handled that arrived just before a wait began

logger = logging.getLogger("heliograph")


class Job:
    """Ranks that run a call, and then end or wait for the next one.

    Args:
        count: the number of ranks.
        grace: seconds that the other ranks have when one has failed.
    """

    def __init__(self, count: int, grace: float) -> None:
        self._count, self._grace = count, grace
        self._events: SimpleQueue[Frame] = SimpleQueue()  # reentrant: a signal handler may put into it
        self._processes: list[RankProcess] = []
        self._ranks = ExitStack()  # their processes, and the store of their rendezvous
        self._keeps = False
        self._failures: list[ProcessFailure] = []
        self._killed: list[int] = []
        self._sent: set[int] = set()
        self._deadline: float | None = None
        self._on_message: Callable[[int, Any], object]

    @property
    def is_ready(self) -> bool:
        """True if all ranks wait for a call."""
        return bool(self._processes) and all(process.is_alive for process in self._processes)

    @property
    def has_begun(self) -> bool:
        """True if any rank has called the function."""
        return any(process.began for process in self._processes)

    def run(self, call: bytes, on_message: Callable[[int, Any], object], *, keep: bool = False) -> list[Any]:
        """Run a call on the ranks; return their values, by rank.

        Args:
            call: the function and its arguments, pickled.
            on_message: called with rank and object for each object put into a rank's queue.
            keep: whether the ranks wait for another call, unless one of them fails.

        Raises:
            BaseException: an error of a rank.
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
        reports = [process.report for process in self._processes]
        return [pickle.loads(report.payload) for report in reports if report is not None]  # noqa: S301  # our own child

    def close(self) -> None:
        """End waiting ranks, and wait for their end; kill ranks that do not end."""
        for process in self._processes:
            process.acknowledge()
        self._hurry()
        while not all(process.ended for process in self._processes):
            self._wait()
        self._ranks.close()

    def _close_unless_kept(self) -> None:
        if not (self._keeps and self._is_done):  # also after a second Ctrl-C
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
        # Signals that this process ignores are not passed on.
        signals = [signum for signum in PASSED_ON if signal.getsignal(signum) not in (signal.SIG_IGN, None)]
        if signals and threading.current_thread() is threading.main_thread():
            hook = SignalHook(signals, lambda signum: self._events.put(Frame("signal", signum=signum)))
            stack.callback(hook.restore)
            hook.install()

    def _wait(self) -> None:
        # Only the main thread reaps the process, so that its PID is not reused before.
        if self._deadline is not None and monotonic() >= self._deadline:
            self._deadline = None
            self._give_up()
        timeout = TICK if self._deadline is None else max(0.0, min(TICK, self._deadline - monotonic()))
        try:
            event = self._events.get(timeout=timeout)
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
                self._fail(silent_death(process.rank, process.status, began=process.began))
        else:
            process.report = event
            if not self._keeps:
                process.acknowledge()
            if event.kind == "error":
                carried = pickle.loads(event.payload)  # noqa: S301  # from our own child
                self._fail(ProcessFailure(carried.rebuild(), carried.text, process.rank))
            if not self._keeps and all(rank.report is not None for rank in self._processes):
                self._hurry()

    def _deliver(self, rank: int, payload: bytes) -> None:
        if any(failure.rank is None for failure in self._failures):
            return
        try:
            self._on_message(rank, pickle.loads(payload))  # noqa: S301  # from our own child
        except Exception as error:  # noqa: BLE001  # raised after the ranks have ended
            error.add_note(f"heliograph: on_message failed for a message of rank {rank}")
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
        # The grace begins with the first reason to end.
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
        # After a second Ctrl-C the remaining ranks are killed.
        if signum == signal.SIGINT and signum in self._sent:
            raise KeyboardInterrupt
        self._sent.add(signum)
        for process in self._processes:
            process.pass_on(signum)
