"""What two rows of the steps file do not have in common, in words, and the likely causes of it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...events import Bus, EpochStart, Run
from ...plugins import Plugins
from ...plugins.first_party import is_first_party
from .ring_buffer import Row

COUNTED = (("batch", "batch of the epoch"), ("steps", "optimizer steps"), ("samples", "samples"))
HIDDEN_STATE = (
    "the task or a plugin has state that no checkpoint holds: give it state_dict and load_state_dict; or the data have "
    "changed"
)


def difference(expected: Row, got: Row, rank: int | None = None) -> str:
    """Return where two rows of the same batch differ: `differs first at step 253: loss 0.4512 instead of 0.4513`.

    Args:
        expected: what the killed run had.
        got: what the resumed one has.
        rank: where it was found, None where there is one process only.
    """
    where = "" if rank is None else f" (rank {rank})"
    return f"differs first at step {got.steps}: {what_differs(expected, got)}{where}"


def distinguish(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to distinguish them."""
    pair = repr(one), repr(other)
    for digits in (4, 6, 9, 17):
        pair = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if pair[0] != pair[1]:
            break
    return pair


def what_differs(expected: Row, got: Row) -> str:
    """Return what two rows do not have in common: `loss 0.4512 instead of 0.4513`."""
    for field, name in COUNTED:
        before, now = getattr(expected, field), getattr(got, field)
        if before != now:
            return f"{name} {now:,} instead of {before:,}"
    if expected.is_left_out != got.is_left_out:
        return "the batch was " + ("left out, not trained on" if got.is_left_out else "trained on, not left out")
    if struct.pack("d", expected.loss) == struct.pack("d", got.loss):
        return "the loss of another optimizer than the first"
    several = " of the first optimizer" if expected.others or got.others else ""
    return f"loss{several} {' instead of '.join(distinguish(got.loss, expected.loss))}"


def likely_causes(run: Run) -> tuple[str, ...]:
    """Return what makes a resumed run differ, the likeliest first: what the run says of itself, then what it hides."""
    reasons = run.data.guarantee()[1]
    in_epoch = run.resumed_at is not None and run.resumed_at.batch > 0
    again = describe_repeats(listeners_to_epoch_start(run.plugins, run.bus)) if in_epoch else ()
    return (*reasons, *again) or (HIDDEN_STATE,)


def describe_repeats(names: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence on who received `EpochStart` twice in one epoch, since the run was resumed within it."""
    if not names:
        return ()
    return (
        f"{', '.join(names)} received EpochStart twice in one epoch, since the run was resumed within it: do "
        f"what belongs to an epoch's beginning only where event.resumed is False",
    )


def listeners_to_epoch_start(plugins: Plugins, bus: Bus) -> tuple[str, ...]:
    """Return, in words, the plugins and functions of the user's own that listen to `EpochStart`."""
    names = set(plugins.names())
    owners = dict.fromkeys(seat.owner for _, seat in bus.signal(EpochStart).listeners())
    return tuple(
        f"plugin {str(owner)!r}" if owner in names else str(owner)
        for owner in owners
        if owner not in names or is_own(plugins[owner])
    )


def is_own(thing: object) -> bool:
    """Return whether something is neither heliograph's nor torch's."""
    module = type(thing).__module__
    return not is_first_party(module) and module.partition(".")[0] != "torch"
