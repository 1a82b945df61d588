"""Workers of a Ray cluster that stay alive between calls."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from uuid import uuid4

from heliograph.core.distributed.launcher import environment

from ..cluster import KEEPERS, connected_address
from .attempts import RayValues
from .calls import Setup, pickle_call
from .driver_loop import END_TIMEOUT, Fit
from .mailbox import DriverChannel, WorkerCall
from .worker import serve_calls


class KeptWorkers:
    """Workers that stay alive between calls; the first call starts them.

    They end when a call fails, after `idle` seconds without a call, when this process starts other workers, on `close`,
    and when this process ends. The next call replaces workers of a lost machine. A cluster that was started for them
    ends on `close`, on a failure, or with this process.

    Args:
        setup: the arguments of their launcher.
        idle: seconds without a call after which they end.
    """

    def __init__(self, setup: Setup, idle: float) -> None:
        self._setup, self._idle = setup, idle
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._connection = ExitStack()
        self._cluster: str | None = None  # its address
        self._run_config: Any = None
        self._channel: DriverChannel | None = None
        self._fit: Fit | None = None
        self._fit_id = ""

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_message: Callable[[int, Any], object] | None = None,
        **kwargs: Any,
    ) -> RayValues:
        """Call `fn(*args, **kwargs)` on every worker; see `RayLauncher.run`, also for its exceptions."""
        payload = pickle_call(fn, args, kwargs, on_message)
        with self._lock:
            self._stop_timer()
            try:
                values = self._run(payload, on_message)
            except BaseException:  # also on Ctrl-C: workers are not reused after a failure
                try:
                    self._end_workers(at_once=True)
                finally:
                    self._disconnect()
                raise
            self._timer = threading.Timer(self._idle, self._give_up)
            self._timer.daemon = True
            self._timer.start()
            return values

    def close(self) -> None:
        """End the workers and wait for their end; the next call starts new ones."""
        with self._lock:
            self._close()

    def close_if_idle(self) -> None:
        """End the workers unless a call is running."""
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def _run(self, payload: bytes, on_message: Callable[[int, Any], object] | None) -> RayValues:
        if self._fit is not None and (self._is_lost() or not self._fit.is_alive()):
            self._end_workers()
        if self._fit is None:
            self._run_config = self._run_config or self._setup.new_run_config()
            self._connection.enter_context(self._setup.connect())
            self._cluster = connected_address()
            KEEPERS.add(self)
            atexit.register(self.close)  # runs before Ray's own handler
        channel = self._channel = self._channel or DriverChannel()
        channel.reset()
        with environment(self._setup.variables):
            values = self._setup.run(channel, payload, self._run_config, self._start, on_message, keeps=True)
        channel.assign(self._fit_id, None)
        return values

    def _is_lost(self) -> bool:
        """Return whether this process has disconnected from the cluster: any call of Ray would then start a new one."""
        return connected_address() != self._cluster

    def _start(self, call: WorkerCall) -> Fit:
        channel = self._channel
        assert channel is not None
        if self._fit is not None and self._fit.is_alive():
            channel.assign(self._fit_id, call)
            self._fit.is_reused = True
            return self._fit
        self._fit_id = uuid4().hex
        channel.assign(self._fit_id, call)
        function = partial(serve_calls, channel.mailbox, self._fit_id)
        self._fit = Fit(self._setup.trainer(function, self._run_config).fit)
        return self._fit

    def _end_workers(self, *, at_once: bool = False) -> None:
        fit, channel = self._fit, self._channel
        self._fit = self._channel = None
        if channel is None or fit is None or not (fit.is_alive() or at_once):
            return
        if self._is_lost():
            fit.join(END_TIMEOUT)  # about one in ten never returns from Ray's `get`
            return
        if not at_once:
            channel.dismiss()
            fit.join(END_TIMEOUT)
        channel.close()

    def _disconnect(self) -> None:
        KEEPERS.discard(self)
        atexit.unregister(self.close)
        self._connection.close()

    def _give_up(self) -> None:
        with self._lock:
            self._end_workers()

    def _close(self) -> None:
        self._stop_timer()
        self._end_workers()
        self._disconnect()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
