"""What the verbs of the control are about, and their names in words: for code that reports requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from .control import Verb


@dataclass(frozen=True, slots=True)
class VerbFacts:
    """The facts of one verb.

    Attributes:
        about: what a request with it is about.
        noun: what is counted: `3 early ends of epochs`.
        plural: of the noun.
        mark: what happened, as on a drawing.
    """

    about: Literal["run", "epoch", "boundary", "evaluation", "batch", "step"]
    noun: str
    plural: str
    mark: str


VERBS: Final[Mapping[Verb, VerbFacts]] = {
    "log": VerbFacts("boundary", "log", "logs", "log"),
    "validation": VerbFacts("boundary", "validation", "validations", "validation"),
    "save": VerbFacts("boundary", "save", "saves", "save"),
    "stop": VerbFacts("run", "stop", "stops", "stop"),
    "veto_stop": VerbFacts("run", "veto", "vetoes", "stop postponed"),
    "end_epoch": VerbFacts("epoch", "early end of an epoch", "early ends of epochs", "end of the epoch"),
    "skip_batch": VerbFacts("batch", "skipped batch", "skipped batches", "batch skipped"),
    "skip_step": VerbFacts("step", "skipped step", "skipped steps", "step skipped"),
    "hold_step": VerbFacts("batch", "held step", "held steps", "step held"),
    "scale_loss": VerbFacts("batch", "scaled loss", "scaled losses", "loss scaled"),
    "next_phase": VerbFacts("epoch", "next phase", "next phases", "next phase"),
    "cut_validation": VerbFacts("evaluation", "cut validation", "cut validations", "validation cut short"),
    "roll_back": VerbFacts("run", "roll-back", "roll-backs", "roll-back"),
}
EVALUATION_VERB: Final[Verb] = next(verb for verb, facts in VERBS.items() if facts.about == "evaluation")
