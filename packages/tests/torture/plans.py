"""What becomes of each attempt: which operation or which instant kills it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from random import Random

from heliograph.packages.tests.torture.attempt import Orders
from heliograph.packages.tests.torture.process import Process

EPOCHS = 16  # from the 10th on, gradients are accumulated
BLIND = 3  # every so many kills falls at any instant
PARTS = 5  # and that within this part of a training, counted from where the attempt begins
BEGINNING = 0.2  # seconds until the first batch
NEXT_SAVES = 3  # an aimed one falls into one of so many
GROWTH = 1.5  # of an attempt's life after one that came no further
FRESH = 10  # every so many kills, an attempt is a fresh interpreter
FRESH_SECONDS = 3.0  # which takes longer to begin
LONGEST = 120.0  # seconds of an attempt that is let live


@dataclass(frozen=True, slots=True)
class Plan:
    """What an attempt does, and what is done to it.

    Attributes:
        orders: what it does.
        seconds: when it is killed at the latest.
        grace: how long it lives on after it reported that the time has come.
        fresh: whether it is a fresh interpreter.
        lives: whether it is to come to its end by itself.
    """

    orders: Orders
    seconds: float = LONGEST
    grace: float = 0.0
    fresh: bool = False
    lives: bool = True


class Planner:
    """Plans attempts, by what an undisturbed training showed.

    Args:
        folder: where that one trains; what all others are compared with.
        random: decides.

    Raises:
        AssertionError: it failed.
    """

    def __init__(self, folder: Path, random: Random) -> None:
        folder.mkdir()
        self.folder, self._random = folder, random
        with Process(Orders(str(folder), EPOCHS, workers=0), folder / "output.txt") as process:
            process.wait(LONGEST)
            process.kill()
            assert process.reported("ended"), f"the undisturbed training failed:\n{(folder / 'output.txt').read_text()}"
            self.seconds = process.seconds
            self._saves = len(process.reported("saved"))
            self._operations = Counter(message["name"] for message in process.reported("operation"))

    def last(self, folder: Path, attempt: int) -> Plan:
        """Return the plan of an attempt that is let live."""
        return Plan(Orders(str(folder), EPOCHS, workers=2 * (attempt % 2), background=attempt % 4 < 2))

    def blind(self, folder: Path, attempt: int, stuck: int) -> Plan:
        """Return the plan of an attempt that is killed at any instant."""
        seconds = self._random.uniform(0, self._life(stuck))
        return replace(self.last(folder, attempt), seconds=seconds, lives=False)

    def aimed(self, folder: Path, attempt: int, stuck: int) -> Plan:
        """Return the plan of an attempt that is killed in a save: stopped before an operation, or running on."""
        random = self._random
        operation = random.choice(sorted(self._operations))
        each_save = ceil(self._operations[operation] / self._saves)
        freezes = random.random() < 0.6
        plan = self.last(folder, attempt)
        orders = replace(
            plan.orders,
            operation=operation,
            occurrence=random.randint(1, NEXT_SAVES * each_save),
            freezes=freezes,
        )
        grace = random.uniform(0, 0.03 if freezes else 0.002)
        return replace(plan, orders=orders, seconds=4 * self._life(stuck), grace=grace, lives=False)

    def killed(self, folder: Path, number: int, attempt: int, stuck: int) -> Plan:
        """Return the plan of an attempt that is killed: blindly or aimed, now and then a fresh interpreter."""
        plan = (self.aimed if number % BLIND else self.blind)(folder, attempt, stuck)
        if number % FRESH == FRESH - 1:
            return replace(plan, seconds=plan.seconds + FRESH_SECONDS, fresh=True)
        return plan

    def _life(self, stuck: int) -> float:
        return (BEGINNING + self.seconds / PARTS) * GROWTH**stuck
