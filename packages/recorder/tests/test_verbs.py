"""What the verbs of the control are called in reports."""

from __future__ import annotations

from typing import get_args

from heliograph.events import Verb, control
from heliograph_recorder.verbs import COUNTED, EVALUATION_VERB, LOADED, VERBS


def test_the_facts_of_every_verb_are_known() -> None:
    assert sorted(VERBS) == sorted(get_args(Verb))
    assert VERBS[EVALUATION_VERB].mark == "validation cut short"
    about = {
        facts.about: {verb for verb, each in VERBS.items() if each.about == facts.about} for facts in VERBS.values()
    }
    assert (about["batch"], about["step"]) == ({"skip_batch", "hold_step", "scale_loss"}, {"skip_step"})


def test_what_the_kernel_counts_and_names_is_the_same_here() -> None:
    assert (COUNTED, LOADED) == (control.COUNTED, control.LOADED)
