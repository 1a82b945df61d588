"""What comparing two runs has shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heliograph.spi import printable_lines

Kind = Literal[
    "draw", "order", "data", "loss", "gradients", "learning_rate", "options", "weights", "request", "plugin", "metric",
    "counters", "event", "length", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        kind: what differs: a `draw` of random numbers, the `order` of samples, the `data`, the `loss` of an equal
            batch, the `gradients` of an equal loss, the `learning_rate`, other `options` of an optimizer, the `weights`
            after an equal step, a `request`, a toggled `plugin`, a `metric`, the `counters`, an `event`, the `length`;
            or `unknown`, where digests are missing.
        epoch: where: the epoch, from 0.
        batch: the batches of it that were done, with the one that differs.
        step: the optimizer steps that were done, with the one that differs.
        text: what it means, in words.
    """

    kind: Kind
    epoch: int
    batch: int
    step: int
    text: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}, step {self.step}: {self.text}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """What comparing two recorded runs has shown; `print` it.

    Attributes:
        names: of the recordings.
        first: the first difference of the trainings, None if none was found.
        aside: the first request that does not act on the training and that only one of them has, in words; or empty.
        batches: how many batches are equal, from the first one on.
        digested: of how many both have digests.
        compared: of how many both have digests or losses: of others only counters, requests and metrics are known.
        settings: in what the runs were called differently, in words.
        damage: what could not be read of the recordings, in words.
    """

    names: tuple[str, str]
    first: Difference | None
    aside: str = ""
    batches: int = 0
    digested: int = 0
    compared: int = 0
    settings: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the trainings are equal, as far as their digests or losses say; False where they have none."""
        return self.first is None and self.compared > 0

    def __str__(self) -> str:
        known = "all of them compared by digests" if self.digested >= max(1, self.batches) else self._partly
        count = f"{self.batches:,} batch{'es' if self.batches != 1 else ''}"
        if self.first is None and not self.batches:
            lines = ["Nothing was compared: there is no batch that both have."]
        elif self.first is None and not self.compared:
            lines = [
                f"These runs cannot be compared: of {count}, neither digests nor losses are in both recordings. Record",
                "both with Recorder(digests=True). Their counters, requests and metrics do not differ.",
            ]
        elif self.first is None:
            lines = [f"No difference in {count}, {known}."]
        else:
            before = f"Equal before it: {count}, {known}." if self.batches else self._no_batch
            lines = [f"The first difference: {self.first}.", before]
        lines += [f"Not of the training: {self.aside}."] * bool(self.aside)
        lines += ["Called differently:", *(f"  {each}" for each in self.settings)] if self.settings else []
        lines += ["Not everything could be read:", *(f"  {each}" for each in self.damage)] if self.damage else []
        return printable_lines("\n".join(lines))

    @property
    def _no_batch(self) -> str:
        is_bare = self.first is not None and self.first.kind == "loss" and not self.digested
        return (
            "No batch comes before it." + " There are no digests of it: Recorder(digests=True) records these." * is_bare
        )

    @property
    def _partly(self) -> str:
        return f"{self.digested:,} of them compared by digests (Recorder(digests=True) records these)"
