"""A plan of faults, drawn by a seed from what an undisturbed training has emitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from .fault import DISK, KINDS, Fault

OPERATIONS = 24  # on files, from the event of a fault on
JUMPS = (-86400.0, -3600.0, -1.0, 3600.0, 86400.0)  # seconds
AT_SAVES = 3  # every so many-th kill falls among the operations of a save
TRIES = 20  # draws, to find an emission at which there is no fault yet: of two that end the process, one cannot act


def draw_faults(
    seed: int | str, number: int, counts: Mapping[str, int], kinds: Sequence[str], *, ranks: int = 1
) -> list[Fault]:
    """Return faults, spread over a training and over its events; the same ones for the same arguments.

    Args:
        seed: of all choices.
        number: how many.
        counts: how often the undisturbed training has emitted each event, by name.
        kinds: of faults; each is drawn equally often.
        ranks: how many processes train together.

    Raises:
        ValueError: the training has emitted no event at which a fault of some kind can be.
    """
    random = Random(seed)
    faults: list[Fault] = []
    taken: set[tuple[str, int, int]] = set()
    for each in range(number):
        kind, saves = kinds[each % len(kinds)], each // len(kinds) % AT_SAVES == 0
        for _ in range(TRIES):
            fault = _draw(random, kind, counts, ranks, saves=saves)
            if (place := (fault.at, fault.count, fault.rank)) not in taken:
                break
        taken.add(place)
        faults.append(fault)
    random.shuffle(faults)
    return faults


def _draw(random: Random, kind: str, counts: Mapping[str, int], ranks: int, *, saves: bool) -> Fault:
    known = KINDS[kind]
    at_save = kind in DISK or (kind == "kill" and saves)
    events = ["save_point"] if at_save and counts.get("save_point") else sorted(known.only or counts)
    events = [event for event in events if counts.get(event)]
    if kind == "bit-in-weight":
        events = [event for event in events if event in ("step_end", "batch_end")]
    if not events:
        raise ValueError(f"A fault {kind!r} can be at {', '.join(known.only)}, and the training has none of these.")
    event = random.choice(events)
    operation = random.randint(1, OPERATIONS) if at_save else 0
    seconds = random.choice(JUMPS) if kind == "clock-jump" else 0.05
    last = counts[event] - 1 if at_save or kind.startswith("lost") else counts[event]  # something is to come after it
    rank = random.randrange(ranks) if kind not in DISK and not operation else 0  # the main rank writes
    return Fault(
        kind,
        event,
        random.randint(1, max(1, last)),
        rank,
        operation,
        random.choice((1, 2, 5)) if kind in DISK else 1,
        seconds,
    )
