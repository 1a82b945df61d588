"""What the verbs of the control are called in reports."""

from __future__ import annotations

from typing import get_args

from heliograph.events import Verb
from heliograph_recorder.verbs import EVALUATION_VERB, VERBS


def test_the_facts_of_every_verb_are_known() -> None:
    assert sorted(VERBS) == sorted(get_args(Verb))
    assert VERBS[EVALUATION_VERB].mark == "validation cut short"
    about = {
        facts.about: {verb for verb, each in VERBS.items() if each.about == facts.about} for facts in VERBS.values()
    }
    assert (about["batch"], about["step"]) == ({"skip_batch", "hold_step", "scale_loss"}, {"skip_step"})
