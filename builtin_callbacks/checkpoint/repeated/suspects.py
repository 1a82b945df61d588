"""The likely causes of a difference after a resume, in words that say what to do."""

from __future__ import annotations

from collections.abc import Sequence

from ....events import Bus, EpochStart, Run
from ....plugins import Plugins
from ....plugins.first_party import is_first_party

HIDDEN_STATE = (
    "the task or a plugin has state that no checkpoint holds: give it state_dict and load_state_dict; or the data have "
    "changed"
)


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
