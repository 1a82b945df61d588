"""What the caller does while Ray runs the workers: hear them, and pass on what they are to do."""

from __future__ import annotations

import logging
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from ....core.distributed.launch.exceptions import rebuild
from ....core.distributed.ranks.failure import chain
from ....core.errors import SEEN, RankFailed
from ....core.system.signals import SignalHook
from ..session import LAUNCHER, Notice
from .attempts import Group, Journal
from .mailbox import Desk, Failed, Left, Letter, Orders, Reported, Told, Value
from .room import Waiting
from .sizes import Sizes

TICK = 0.2  # seconds until a signal is heard, or that Ray's run has ended
ENDING = 30.0  # seconds for Ray's run to end when its workers are gone
ENDS = "the process that called RayLauncher.run is to end"
HEARD = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger("heliograph")

OnMessage = Callable[[int, Any], object]
OnReport = Callable[[Reported], tuple[str, str] | None]


class Hearing:
    """The caller's ear for workers and signals.

    Args:
        desk: the way to the workers.
        journal: where the workers' letters are entered.
        grace: seconds that the workers have to end when they are asked to.
        on_message: called with rank and object for what is put into a rank's queue.
        on_report: called with what is reported; returns who stops the runs and why, or None.

    Attributes:
        own: what `on_message` or `on_report` raised, or a look at the cluster.
        heard: the signals that came.
    """

    def __init__(
        self, desk: Desk, journal: Journal, grace: float, on_message: OnMessage, on_report: OnReport | None
    ) -> None:
        self._desk, self._journal, self._grace = desk, journal, grace
        self._on_message, self._on_report = on_message, on_report
        self._orders = Orders()
        self._deadline: float | None = None
        self._resizes = False  # whether the workers are to leave for another number of them to go on
        self.own: Exception | None = None
        self.heard: set[int] = set()

    @property
    def is_stopping(self) -> bool:
        """Whether the workers were asked to end, so that it is no surprise when they do."""
        return self._orders.stop is not None or (self._orders.leave is not None and not self._resizes)

    @property
    def is_over(self) -> bool:
        """Whether this process has a reason to wait no longer than for the workers' end."""
        return bool(self.heard) or self.own is not None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Hear the signals that ask this process to end, but for those that it was told to ignore."""
        wanted = [each for each in HEARD if signal.getsignal(each) not in (signal.SIG_IGN, None)]
        if not wanted or threading.current_thread() is not threading.main_thread():
            yield
            return
        hook = SignalHook(wanted, self._hear_signal)
        hook.install()
        try:
            yield
        finally:
            hook.restore()

    def during(self, fit: Callable[[], object], sizes: Sizes) -> BaseException | None:
        """Run Ray's trainer to its end, hear the workers meanwhile, and look for room; return what it raised."""
        if self._resizes:
            self._resizes = False
            self._order(replace(self._orders, leave=None))
        errors: list[BaseException] = []
        waiting = Waiting(sizes)
        thread = threading.Thread(target=_run, args=(fit, errors), name="heliograph-ray", daemon=True)
        thread.start()  # in the main thread, Ray would take Ctrl-C for itself, and keep it
        while thread.is_alive() and not self._is_late():
            self._hear(self._desk.take(TICK))
            self._look_for_room(sizes)
            if self._journal.group is None:
                self._call(waiting.look)
        if thread.is_alive():
            self._desk.close()  # ends the workers, and with them the run
            if self._journal.group is not None:  # without any, Ray goes on waiting for room, until this process ends
                thread.join(ENDING)
        else:
            self._hear(self._desk.take(0))
        return errors[0] if errors else None

    def pause(self, seconds: float) -> None:
        """Wait, but not upon a signal."""
        limit = monotonic() + seconds
        while not self.is_over and (left := limit - monotonic()) > 0:
            threading.Event().wait(min(TICK, left))

    def _is_late(self) -> bool:
        """Return whether the workers were asked to end, and have not in time, or there are none."""
        if self.is_over and self._deadline is None:
            self._deadline, self._resizes = monotonic() + self._grace, False
            self._order(replace(self._orders, leave=Notice(LAUNCHER, ENDS)))
        return self._deadline is not None and (self._journal.group is None or monotonic() >= self._deadline)

    def _look_for_room(self, sizes: Sizes) -> None:
        """Ask the workers to save and leave where more of them could go on."""
        group = self._journal.group
        if group is None or self._orders.leave is not None or self._orders.stop is not None:
            return
        if (reason := self._call(partial(sizes.room, group.world_size))) is not None:
            logger.warning("%s in place of %d: the run saves, and goes on with them", reason, group.world_size)
            self._resizes = True
            self._order(replace(self._orders, leave=Notice(LAUNCHER, reason)))

    def _hear_signal(self, signum: int) -> None:
        if signum == signal.SIGINT and signum in self.heard:
            raise KeyboardInterrupt
        self.heard.add(signum)

    def _hear(self, letters: Iterable[Letter]) -> None:
        for letter in letters:
            message = self._journal.take(letter)
            if isinstance(message, Told):
                self._call(partial(self._deliver, letter.rank, message.payload))
            elif isinstance(message, Reported) and self._on_report is not None:
                if asked := self._call(partial(self._on_report, message)):
                    self._order(replace(self._orders, stop=Notice(*asked)))
            elif isinstance(message, Value | Failed | Left):
                self._release()

    def _deliver(self, rank: int, payload: bytes) -> None:
        try:
            self._on_message(rank, pickle.loads(payload))  # noqa: S301  # from our own worker
        except Exception as error:
            error.add_note(f"heliograph: while a message of rank {rank} was taken")
            raise

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call what the caller gave us; after an error there, only wait for the workers' end."""
        if self.own is None:
            try:
                return function()
            except Exception as error:  # noqa: BLE001  # raised when the workers have ended
                self.own = error
        return None

    def _release(self) -> None:
        """Let failed workers go when all that can have told how they ended."""
        group, name = self._journal.group, self._journal.incarnation
        if group is not None and group.failed and not _awaited(group) and name not in self._orders.released:
            self._order(replace(self._orders, released=self._orders.released | {name}))

    def _order(self, orders: Orders) -> None:
        self._orders = orders
        self._desk.order(orders)


def _run(fit: Callable[[], object], errors: list[BaseException]) -> None:
    try:
        fit()
    except BaseException as error:  # noqa: BLE001  # judged by who waits for it
        errors.append(error)


def _awaited(group: Group) -> set[int]:
    """Return the ranks that have not told how they ended, but for those that the others say are gone, or hang."""
    errors = [rebuild(each.error) for each in group.failed.values() if each.follows]
    seen = [each for error in errors for each in chain(error) if isinstance(each, RankFailed)]
    missing = {each.rank for each in seen if each.kind in SEEN}
    return set(range(group.world_size)) - group.values.keys() - group.failed.keys() - group.left.keys() - missing
