"""One training that is killed and resumed until it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep

from heliograph.packages.tests.torture.checks import first_difference, newest_whole
from heliograph.packages.tests.torture.plans import Plan, Planner
from heliograph.packages.tests.torture.process import Process

MOST_KILLS = 60
SIGKILLED = -9


class Story:
    """Trains in a folder of its own.

    Args:
        folder: where.
        planner: of its attempts.
        kills: where the kills of all stories fell, in words; this one's are added.

    Attributes:
        groups: the process groups of its attempts.
    """

    def __init__(self, folder: Path, planner: Planner, kills: list[str]) -> None:
        folder.mkdir()
        self.groups: list[int] = []
        self._folder, self._planner, self._kills = folder, planner, kills
        self._newest = self._stuck = 0

    def run(self, wants_more: Callable[[], bool]) -> None:
        """Train until the end, and hold the end against the undisturbed one.

        Args:
            wants_more: whether there is to be another kill.

        Raises:
            AssertionError: something is not as it must be; names it.
        """
        while not self._attempt(wants_more()):
            assert len(self.groups) < MOST_KILLS, f"{MOST_KILLS} kills, and no end"
        newest_whole(self._folder)
        difference = first_difference(self._folder, self._planner.folder)
        assert difference is None, f"{self._folder.name} ended otherwise than the undisturbed training: {difference}"

    def _attempt(self, kills: bool) -> bool:
        """Let an attempt run, and kill it if that is its plan; return whether it came to its end."""
        attempt = len(self.groups)
        plan = self._planner.last(self._folder, attempt)
        if kills:
            plan = self._planner.killed(self._folder, len(self._kills), attempt, self._stuck)
        with Process(plan.orders, self._folder / "output.txt", fresh=plan.fresh) as process:
            self.groups.append(process.pid)
            runs = process.wait(plan.seconds)
            sleep(plan.grace)
            ended = process.kill()
        self._check_beginning(process)
        if ended != SIGKILLED:
            self._check_end(process, ended)
            return True
        assert not (plan.lives and runs), f"an attempt that nobody killed did not end within {plan.seconds:g} s"
        self._take_stock(plan, process)
        return False

    def _check_beginning(self, process: Process) -> None:
        for began in process.reported("began"):
            assert not began["passed_over"], f"the resume passed something over: {began['passed_over']}"
            assert began["sequence"] in (self._newest, self._newest + 1), (
                f"the resume took checkpoint {began['sequence']}, where {self._newest} was the newest whole one"
            )

    def _check_end(self, process: Process, status: int) -> None:
        output = (self._folder / "output.txt").read_text()
        assert status == 0, f"an attempt failed with exit status {status}; all output so far:\n{output}"
        [ended] = process.reported("ended")
        assert (ended["status"], ended["reasons"]) == ("completed", []), f"the last attempt reports {ended}"

    def _take_stock(self, plan: Plan, process: Process) -> None:
        """See what the kill left behind, and print a line about it."""
        newest = newest_whole(self._folder)
        durable = max([self._newest, *(saved["sequence"] for saved in process.reported("saved"))])
        assert newest >= durable, f"checkpoint {durable} was durable, and {newest} is the newest after a kill"
        self._stuck = 0 if newest > self._newest else self._stuck + 1
        self._newest = newest
        self._kills.append(process.place)
        kind = "fresh" if plan.fresh else "forked"
        ways = f"{plan.orders.workers} workers  {'background' if plan.orders.background else 'in the loop'}"
        where = f"{self._folder.name} attempt {len(self.groups):>2}  {kind:<6}  {ways}  {process.seconds:5.2f} s"
        print(f"kill {len(self._kills):>3}  {where}  newest {newest:>2}  {process.place}", flush=True)
