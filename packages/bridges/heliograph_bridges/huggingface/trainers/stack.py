"""The Trainer that calls a callback. It gives callbacks no reference to itself, so it is looked for on the stack."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

from transformers import Trainer

RESUMED, TRIAL = "resume_from_checkpoint", "trial"


class Caller(NamedTuple):
    """A Trainer that is calling.

    Attributes:
        trainer: the Trainer.
        checkpoint: the checkpoint that it resumes, None where it resumes none.
        trial: the trial of a search for hyper-parameters that it trains for, None outside of one.
    """

    trainer: Any
    checkpoint: str | None
    trial: Any


def caller() -> Caller:
    """Return the Trainer whose method is running.

    Raises:
        RuntimeError: there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), Trainer):
            return Caller(owner, frame.f_locals.get(RESUMED), frame.f_locals.get(TRIAL))
        frame = frame.f_back
    raise RuntimeError(
        "HeliographCallback is for the Trainer of transformers, and was called by something else: give it to "
        "Trainer(..., callbacks=[HeliographCallback([...])])."
    )
