"""People who ask a run from outside, at random instants: what `Remote` does with their commands, without a socket."""

from __future__ import annotations

import random
from typing import Any

import heliograph as h
from heliograph_recorder.remote.messages import Command
from heliograph_recorder.remote.outcomes import Outcomes
from heliograph_recorder.remote.server import ClientCommand

SWITCHED = ("gradient_clipping", "learning_rate", "mutator", "ema")
NOBODY: Any = None  # takes no answers


class People(h.Plugin):
    """Ask for something after some batches, of a validation, too. No program has it: what it asks comes from outside.

    Args:
        seed: of what they ask, and when.
        until: they are silent after so many steps.
        often: the share of batches after which somebody asks.

    Attributes:
        accepted: what was accepted, as words.
    """

    policy = "observer"
    draws = False
    ranks = "main"

    def __init__(self, seed: int, until: int = 10**9, often: float = 0.3) -> None:
        self._random, self._until, self._often = random.Random(f"people {seed}"), until, often
        self._outcomes = Outcomes(self.name)
        self.accepted: list[str] = []

    @h.on(h.BatchEnd)
    def look(self, run: h.Run, event: h.BatchEnd) -> None:
        """Ask."""
        self._ask(run, ["log", "validate", "save", "end-epoch", "set-lr", "set-lr", "enable", "disable"])

    @h.on(h.ValidationBatchEnd)
    def look_in_validation(self, run: h.Run, event: h.ValidationBatchEnd) -> None:
        """Ask."""
        self._ask(run, ["log", "save", "set-lr", "disable"])

    def _ask(self, run: h.Run, words: list[str]) -> None:
        draws = self._random
        if draws.random() > self._often or run.progress.steps > self._until:
            return
        word, who = draws.choice(words), draws.choice(["ann@home", "somebody (by their own account, from 127.0.0.1)"])
        known = [name for name in SWITCHED if name in run.plugins]
        target = draws.choice(known) if word in ("enable", "disable") and known else ""
        value = draws.uniform(0.001, 0.02) if word == "set-lr" else 0.0
        command = Command(word, f"reason {draws.random():.3f}", target, value)
        answer = self._outcomes.accept(run, ClientCommand(command, who, NOBODY))
        if answer["state"] == "accepted":
            self.accepted.append(word)
