"""Processes that stay alive between tests, to run a test's function as the ranks of one group.

A process that has imported torch is dear, so one server imports it, and the ranks are forks of the server. The pool
keeps them for the session. When one dies, hangs or is left with a process group, all of them are replaced before the
next call.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import pickle
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
GRACE = 20.0  # seconds that a call has left when one of its ranks has failed
SINGLE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
IMPORTED = ["torch._dynamo", "heliograph.tests.kit"]  # by the server; an optimizer imports the first


Way = Literal["board", "gloo"]  # of the messages between ranks


@contextmanager
def travelling(way: Way) -> Iterator[None]:
    """Let messages travel by gloo within, as between machines; or as they do on one."""
    with patch("heliograph.core.distributed.group.open_board", return_value=None) if way == "gloo" else nullcontext():
        yield


def warm_context() -> ForkServerContext:
    """Return a context of multiprocessing whose processes have imported torch."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class LostRankError(RuntimeError):
    """A rank died, hung, or raised what cannot be pickled."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    value: bytes | None = None
    error: bytes | None = None
    text: str = ""
    clean: bool = True


class Child:
    """A process of the pool, as its parent sees it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.dump = folder / f"{number}.txt"
        context = warm_context()
        self.pipe, theirs = context.Pipe()
        # No daemon: those may not have children, such as the workers of a loader.
        self.process = context.Process(target=serve, args=(theirs, str(self.dump)), name=f"rank-{number}")
        with _environment(SINGLE):
            self.process.start()
        theirs.close()

    def end(self) -> None:
        """Let it leave; one that does not is killed."""
        self.pipe.close()
        self.process.join(10)
        self.kill()

    def kill(self) -> str:
        """Kill it if it lives; return where it stood, thread by thread."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGABRT)  # it writes its tracebacks and dies
            self.process.join(10)
            self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.dump.read_text(encoding="utf-8", errors="replace") if self.dump.exists() else ""


class Pool:
    """Makes processes when they are first needed; `pool(2).run(function, *args)` runs a function on two of them."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="ranks-")
        self._children: list[Child] = []
        self._made = 0

    def __call__(self, count: int) -> Ranks:
        """Return the first `count` of the processes."""
        return Ranks(self, count)

    def children(self, count: int) -> list[Child]:
        """Return so many living processes."""
        if not all(child.process.is_alive() for child in self._children):
            self.kill()
        while len(self._children) < count:
            self._children.append(Child(self._made, Path(self._folder.name)))
            self._made += 1
        return self._children[:count]

    def kill(self) -> list[str]:
        """Throw all processes away; return where each stood."""
        children, self._children = self._children, []
        return [child.kill() for child in children]

    def close(self) -> None:
        """Let the processes leave in peace (what they measured for coverage is written then)."""
        for child in self._children:
            child.end()
        self._folder.cleanup()


class Ranks:
    """A group of processes: `run` calls a function on each of them."""

    def __init__(self, pool: Pool, count: int) -> None:
        self.pool, self.count = pool, count

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call a module-level function with the same arguments on every rank; return the values, by rank.

        The environment is that of `heliograph.launch`, with a store of its own for every call; the global generators
        are seeded; warnings are errors; the current folder and the environment are put back afterwards.

        Args:
            function: of a test's file or of any module that can be imported; pickled by its name.
            args: pickled.
            timeout: seconds after which the processes are killed. When one rank has failed, the others have 20 s left.
            kwargs: pickled.

        Raises:
            LostRankError: a rank died or did not return in time; it reports where each rank stood.
            BaseException: a rank's own error: an AssertionError first, else that of the lowest rank. The tracebacks of
                all ranks are its notes.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not for strict checkers

        call = pickle.dumps((function, args, kwargs))
        children = self.pool.children(self.count)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, child in enumerate(children):
            child.pipe.send_bytes(pickle.dumps((_variables(rank, self.count, store.port), call)))
        outcomes = self._collect(children, timeout)
        if not all(outcome.clean for outcome in outcomes):
            self.pool.kill()
        _raise_errors(outcomes)
        left = [rank for rank, outcome in enumerate(outcomes) if not outcome.clean]
        if left:
            raise LostRankError(f"ranks {left} returned with a process group that was not destroyed.")
        return [pickle.loads(outcome.value or b"") for outcome in outcomes]

    def _collect(self, children: Sequence[Child], timeout: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        end = monotonic() + timeout
        while len(outcomes) < len(children):
            waiting = {child.pipe: rank for rank, child in enumerate(children) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, end - monotonic()))
            if not ready:
                return self._give_up(children, outcomes, f"did not return in time ({timeout:g} s, or {GRACE:g} s more)")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    children[rank].process.join(10)
                    code = children[rank].process.exitcode
                    return self._give_up(children, outcomes, f"ended: rank {rank} died with exit code {code}")
                if outcomes[rank].error is not None:
                    end = min(end, monotonic() + GRACE)
        return [outcomes[rank] for rank in range(len(children))]

    def _give_up(self, children: Sequence[Child], outcomes: dict[int, Outcome], why: str) -> list[Outcome]:
        """Throw the pool away; a rank without an outcome gets one that reports where it stood."""
        places = self.pool.kill()
        missing = [rank for rank in range(len(children)) if rank not in outcomes]
        for rank in missing:
            error = LostRankError(f"ranks {missing} {why}.")
            outcomes[rank] = Outcome(error=pickle.dumps(error), text=f"It stood at:\n{places[rank]}")
        return [outcomes[rank] for rank in range(len(children))]


def _raise_errors(outcomes: Sequence[Outcome]) -> None:
    failed = {rank: pickle.loads(each.error) for rank, each in enumerate(outcomes) if each.error is not None}
    if not failed:
        return

    def precedence(rank: int) -> tuple[bool, bool, int]:
        return not isinstance(failed[rank], AssertionError), isinstance(failed[rank], LostRankError), rank

    error = failed[min(failed, key=precedence)]
    for rank in sorted(failed):
        error.add_note(f"\nOn rank {rank}:\n{outcomes[rank].text}")
    raise error


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    former = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(former)


def serve(pipe: Connection, dump: str) -> None:
    """In the child: answer calls until the parent hangs up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_start_method(None, force=True)  # the platform's default, for the workers of a loader
    for folder in ("tests", "packages"):  # pytest names the modules of tests by their paths below the root
        module = sys.modules[folder] = ModuleType(folder)
        module.__path__ = [str(ROOT / folder)]
    with open(dump, "w", encoding="utf-8") as file:  # noqa: PTH123  # faulthandler keeps its number
        faulthandler.enable(file)
        warnings.simplefilter("error")
        with suppress(EOFError):
            while True:
                variables, call = pickle.loads(pipe.recv_bytes())
                here = Path.cwd()
                with _environment(variables), warnings.catch_warnings():
                    outcome = _answer(call)
                os.chdir(here)
                pipe.send_bytes(pickle.dumps(outcome))
        faulthandler.disable()
    atexit._run_exitfuncs()  # coverage writes what it has measured
    os._exit(0)  # gloo may abort a process that exits as usual


def _answer(call: bytes) -> Outcome:
    import numpy as np
    import torch
    from heliograph.core.objects import run_state

    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        function, args, kwargs = pickle.loads(call)
        # A run keeps the variables of the user's modules. A rank has imported the modules of many tests.
        own = {name: module for name, module in run_state.user_modules().items() if name == function.__module__}
        gc.collect()
        gc.freeze()  # the end of every run collects garbage: spared what was imported, it takes a tenth of the time
        with patch.object(run_state, "user_modules", lambda: own):
            value = pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001  # raised in the parent
        return Outcome(error=_packed(error), text=traceback.format_exc(), clean=_is_clean())
    return Outcome(value=value, clean=_is_clean())


def _is_clean() -> bool:
    import torch.distributed

    return not torch.distributed.is_initialized()


def _packed(error: BaseException) -> bytes:
    """Pickle an error; one that does not survive that becomes a `LostRankError` that names it."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  # whatever a class of the user's does when it is pickled
        return pickle.dumps(LostRankError(f"{type(error).__name__}: {error}"))
    return packed
