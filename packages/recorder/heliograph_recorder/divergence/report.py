"""The result of a comparison of two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heliograph.spi import printable_lines

Kind = Literal[
    "draw", "order", "data", "loss", "gradients", "learning_rate", "options", "weights", "request", "plugin", "metric",
    "counters", "event", "length", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference between two runs.

    Attributes:
        kind: a `draw` of random numbers, the `order` of samples, the `data`, the `loss` of an equal batch, the
            `gradients` of an equal loss, the `learning_rate`, other `options` of an optimizer, the `weights` after an
            equal step, a `request`, an enabled or disabled `plugin`, a `metric`, the `counters`, an `event`, the
            `length`, or `unknown` if digests are missing.
        epoch: from 0.
        batch: in the epoch, from 1.
        step: the number of optimizer steps, including this batch.
        text: the description.
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
    """The comparison of two recorded runs; `print` it.

    Attributes:
        names: of the recordings.
        first: the first difference of the trainings; None if none was found, see `is_equal`.
        aside: the first save, log or stop, or withdrawal of one, that only one of them has; empty if there is none.
        batches: the number of equal batches before the difference.
        digested: the number of compared batches with digests in both.
        compared: the number of compared batches with digests or losses in both; for others, only counters, requests and
            metrics are compared.
        settings: the different settings of the runs.
        damage: the unreadable parts of the recordings.
    """

    names: tuple[str, str]
    first: FirstDifference | None
    aside: str = ""
    batches: int = 0
    digested: int = 0
    compared: int = 0
    settings: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if the trainings have no difference, and digests or losses were compared."""
        return self.first is None and self.compared > 0

    def __str__(self) -> str:
        extent = "all of them compared by digests"
        if self.digested < max(1, self.batches):
            extent = f"{self.digested:,} of them compared by digests (Recorder(digests=True) records these)"
        count = f"{self.batches:,} batch{'es' if self.batches != 1 else ''}"
        if self.first is None and not self.batches:
            lines = ["Nothing was compared: the runs have no batch in common."]
        elif self.first is None and not self.compared:
            lines = [
                f"These runs cannot be compared: for {count}, not both recordings have digests or losses. Record both",
                "with Recorder(digests=True). Their counters, requests and metrics do not differ.",
            ]
        elif self.first is None:
            lines = [f"No difference in {count}, {extent}."]
        else:
            before = f"Equal before it: {count}, {extent}."
            if not self.batches:
                hint = " Without digests, the cause is unknown: use Recorder(digests=True)."
                before = "No batch comes before it." + hint * (self.first.kind == "loss" and not self.digested)
            lines = [f"The first difference: {self.first}.", before]
        lines += [f"No effect on the training: {self.aside}."] * bool(self.aside)
        lines += ["Different settings:", *(f"  {setting}" for setting in self.settings)] if self.settings else []
        lines += ["Unreadable parts:", *(f"  {part}" for part in self.damage)] if self.damage else []
        return printable_lines("\n".join(lines))
