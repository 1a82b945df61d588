"""`launch`: several processes on one machine that train together, from their start to their end."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from ....events.checks import check_number, check_whole_number
from ...system.errors import RankFailed
from ...system.signals import SignalHook
from .exceptions import ProcessFailure, died
from .processes import LAUNCHED, RankProcess, hosting, variables
from .queue import Frame


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
            (`run.queue`), while the ranks run; when it raises, they get a SIGTERM. By default, messages are kept.
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
