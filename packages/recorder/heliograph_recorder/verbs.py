"""The scope of the verbs of the control, and their names in reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from heliograph.events import Verb


@dataclass(frozen=True, slots=True)
class VerbFacts:
    """The scope and the names of one verb.

    Attributes:
        about: the scope of a request.
        noun: the noun for a count of one.
        plural: the plural of the noun: `3 early ends of epochs`.
        mark: the label in a timeline.
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
    "veto_save": VerbFacts("boundary", "veto of a save", "vetoes of saves", "save vetoed"),
    "withdraw_stop": VerbFacts("run", "withdrawn stop", "withdrawn stops", "stop withdrawn"),
    "withdraw_end_epoch": VerbFacts(
        "epoch", "withdrawn end of an epoch", "withdrawn ends of epochs", "end of the epoch withdrawn"
    ),
    "withdraw_log": VerbFacts("boundary", "withdrawn log", "withdrawn logs", "log withdrawn"),
    "withdraw_validation": VerbFacts(
        "boundary", "withdrawn validation", "withdrawn validations", "validation withdrawn"
    ),
    "withdraw_save": VerbFacts("boundary", "withdrawn save", "withdrawn saves", "save withdrawn"),
    "set_learning_rate": VerbFacts(
        "run", "change of the learning rate", "changes of the learning rate", "learning rate set"
    ),
    "enable_plugin": VerbFacts("run", "plugin enabled", "plugins enabled", "plugin enabled"),
    "disable_plugin": VerbFacts("run", "plugin disabled", "plugins disabled", "plugin disabled"),
}
SERVED: Final[Mapping[str, Verb]] = {
    "log": "log",
    "validation_start": "validation",
    "save_point": "save",
    "epoch_end": "end_epoch",
    "train_end": "stop",
}  # the verb of the requests that an event serves, except changes of the run
COUNTED: Final = ("hold_step", "scale_loss", "veto_stop", "veto_save")  # repetitions increase a count
LOADED: Final = "the loaded state"  # the requester if a loaded state enables or disables plugins
# Events during a batch, before the counter is increased.
WITHIN_A_BATCH: Final = ("batch_start", "forward_end", "backward_end", "gradients_ready", "step_end")
TAKEN_BACK: Final[Mapping[Verb, Verb]] = {
    "withdraw_stop": "stop",
    "withdraw_end_epoch": "end_epoch",
    "withdraw_log": "log",
    "withdraw_validation": "validation",
    "withdraw_save": "save",
    "veto_save": "save",
}  # the verb that is withdrawn or vetoed
EVALUATION_VERB: Final[Verb] = next(verb for verb, facts in VERBS.items() if facts.about == "evaluation")
