"""What a loop of another framework can do for our plugins, and what it does already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heliograph.events import Event, Verb

# What can be used in place of what no loop but ours does; a host may know better.
MENDS: Mapping[str, str] = {
    "skip_batch": "leave the batch out of the data, or train with heliograph.Trainer",
    "skip_step": "train with heliograph.Trainer",
    "hold_step": "set the gradient accumulation of the loop itself",
    "scale_loss": "scale the loss where it is computed",
    "veto_stop": "set the limits of the loop itself",
    "veto_save": "set when the loop itself saves",
    "end_epoch": "set the length of the loop's epochs",
    "validation": "set when the loop itself validates",
    "save": "set when the loop itself saves",
    "next_phase": "train once for each phase",
    "roll_back": "resume from an earlier checkpoint of the loop, or train with heliograph.Trainer",
    "scheduler": "give the scheduler to the loop, which steps it",
    "batches": "transform batches in the dataset, or where the loader collates them",
    "checkpoints": "let the loop write checkpoints: they hold the states of these plugins, too",
    "rng": "set the seed of the loop itself, whose checkpoints hold its generators",
    "length": "set the length of the loop itself in steps",
}


@dataclass(frozen=True)
class Host:
    """A loop of another framework, as our plugins need to know it.

    Attributes:
        name: what people call it, such as `transformers.Trainer`.
        verbs: what plugins may ask of it, of the verbs of the control.
        lacks: events of our loop that it has no place for.
        mends: what to use in place of a verb or another word of `MENDS`, where the host knows better.
        cannot: what most loops do and this one does not: `end_epoch`, `log`, `validation` or `save`.
    """

    name: str
    verbs: frozenset[Verb]
    lacks: frozenset[type[Event]] = frozenset()
    mends: Mapping[str, str] = field(default_factory=dict)
    cannot: frozenset[str] = frozenset()

    def mend(self, word: str) -> str:
        """Return what to use in place of a verb, or of another word."""
        return {**MENDS, **self.mends}[word]
