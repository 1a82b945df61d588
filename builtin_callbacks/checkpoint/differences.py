"""What two rows of the steps file do not have in common, in words, and the likely causes of it."""

from __future__ import annotations

import struct

from ...events import Run
from .ring_buffer import Row

COUNTED = (("batch", "batch of the epoch"), ("steps", "optimizer steps"), ("samples", "samples"))
HIDDEN_STATE = (
    "the task or a plugin has state that no checkpoint holds: give it state_dict and load_state_dict; or the data have "
    "changed"
)


def difference(expected: Row, got: Row, rank: int | None = None) -> str:
    """Return where two rows of the same batch differ: `DIVERGED at step 253: loss 0.4512, was 0.4513`.

    Args:
        expected: what the killed run had.
        got: what the resumed one has.
        rank: where it was found, None where there is one process only.
    """
    where = "" if rank is None else f" (rank {rank})"
    return f"DIVERGED at step {got.steps}: {what_differs(expected, got)}{where}"


def distinguish(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to distinguish them."""
    pair = repr(one), repr(other)
    for digits in (4, 6, 9, 17):
        pair = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if pair[0] != pair[1]:
            break
    return pair


def what_differs(expected: Row, got: Row) -> str:
    """Return what two rows do not have in common: `loss 0.4512, was 0.4513`."""
    for field, name in COUNTED:
        before, now = getattr(expected, field), getattr(got, field)
        if before != now:
            return f"{name} {now:,}, was {before:,}"
    if expected.is_left_out != got.is_left_out:
        return "the batch was " + ("left out, not trained on" if got.is_left_out else "trained on, not left out")
    if struct.pack("d", expected.loss) == struct.pack("d", got.loss):
        return "the loss of another optimizer than the first"
    several = " of the first optimizer" if expected.others or got.others else ""
    return f"loss{several} {', was '.join(distinguish(got.loss, expected.loss))}"


def likely_causes(run: Run) -> tuple[str, ...]:
    """Return what makes a resumed run differ: what the run reports, else that something is hidden."""
    return run.data.resume_facts().sentences or (HIDDEN_STATE,)
