"""What must be the same on all ranks; what each rank asks of all, and what they do then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from torch import Tensor

from ....events import Request
from ....events.control import Verb

# Optimizer steps, with those that were skipped; micro-batches; a checksum of which optimizers were stepped; one of how
# the conditions of plugins changed.
Place = tuple[float, ...]


@dataclass(slots=True)
class Ballot:
    """What one rank asks of all, and what the others must know of it."""

    place: Place
    judges: bool
    requests: dict[str, Request]
    vetoes: bool
    interrupted: bool
    save_veto: Request | None
    withdrawn: dict[Verb, Request]
    goes_back_to: str  # the file of the state that a roll-back is to apply, empty where there is no file


def check_places(places: Sequence[Sequence[float]]) -> None:
    """Raise RuntimeError unless all ranks are at the same place.

    Args:
        places: for each part of a `Place`, its values on all ranks.
    """
    steps, batches, optimizers, conditions = places
    if len(set(steps)) > 1 or len(set(batches)) > 1:
        raise RuntimeError(
            f"The ranks are at different positions: {min(steps):.0f} to {max(steps):.0f} steps, "
            f"{min(batches):.0f} to {max(batches):.0f} batches. What a handler decides about a batch must be "
            f"decided in the same way on all ranks."
        )
    if len(set(optimizers)) > 1:
        raise RuntimeError(
            "The ranks stepped different optimizers: training_step must yield the same names on all ranks, in one "
            "order."
        )
    if len(set(conditions)) > 1:
        raise RuntimeError(
            "The condition of a plugin held on some ranks only: what plugin.when(...) is given must say the same "
            "on all of them. Let it read run.progress or the metrics of a validation, not the rank, a clock or a "
            "loss; a plugin that is for one rank says so with ranks = 'main'."
        )


def merge_requests(ballots: Sequence[Ballot]) -> dict[str, Request]:
    """Return what any rank asks, in the name of the lowest rank that asks it, unless all of them do.

    The order is that of the lowest rank, then of the next: on all ranks the same.
    """
    merged: dict[str, Request] = {}
    for rank, ballot in enumerate(ballots):
        for what, request in ballot.requests.items():
            everybody = all(what in each.requests and each.requests[what].by == request.by for each in ballots)
            merged.setdefault(what, request if everybody else replace(request, rank=rank))
            merged[what].required |= request.required
    return merged


def merge_vetoes(ballots: Sequence[Ballot]) -> Request | None:
    """Return the veto of a save by the lowest rank that has one, as one request."""
    for rank, ballot in enumerate(ballots):
        if (veto := ballot.save_veto) is not None:
            return replace(veto, rank=rank if veto.rank is None else veto.rank, times=1)
    return None


def merge_withdrawals(ballots: Sequence[Ballot]) -> dict[Verb, Request]:
    """Return what any rank takes back, in the name of the lowest rank that does."""
    merged: dict[Verb, Request] = {}
    for rank, ballot in enumerate(ballots):
        for verb, request in ballot.withdrawn.items():
            merged.setdefault(verb, replace(request, rank=rank))
    return merged


def check_alike(what: str, of_ranks: Sequence[Sequence[str]], mend: str) -> None:
    """Raise ValueError unless all ranks have the same.

    Args:
        what: it is.
        of_ranks: what each rank has, part by part, in words.
        mend: how to make it the same.
    """
    for rank, parts in enumerate(of_ranks):
        for first, other in zip_longest(of_ranks[0], parts, fillvalue="nothing more"):
            if first != other:
                raise ValueError(
                    f"{what} not the same on all ranks: rank 0 has {first}, and rank {rank} has {other}. {mend}"
                )


def settings_in_words(settings: Any) -> list[str]:
    """Return what a run is called with and no rank may have alone: lengths, sets, limits and optimizers."""
    return [
        f"epochs={settings.epochs}",
        f"steps={settings.steps}",
        f"max_skipped_steps={settings.max_skipped_steps}",
        ", ".join(_sets(settings)) or "no sets to validate on",
        *_optimizers(settings),
    ]


def _sets(settings: Any) -> Iterator[str]:
    for phase, sets in settings.evaluations.items():
        for name in sets:
            which = f"{phase} set {name!r}" if name else f"{phase} set"
            limit, every = settings.limits.get(name), settings.every.get(name, 1)
            yield f"the {which}" + f" with limit {limit}" * (limit is not None) + f" with every={every}" * (every != 1)


def _optimizers(settings: Any) -> Iterator[str]:
    for name, optimizer in settings.optimizers.items():
        which, groups = f"optimizer {name!r}" if settings.several else "optimizer", optimizer.param_groups
        scheduler = settings.schedulers.get(name)
        by = "no scheduler" if scheduler is None else f"the scheduler {type(scheduler).__name__}"
        several = f"{len(groups)} parameter group" + "s" * (len(groups) > 1)
        yield f"the {which} {type(optimizer).__name__} with {several}, {by}"
        for number, group in enumerate(groups):
            for key, value in group.items():
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                if isinstance(plain, int | float | tuple):
                    yield f"{key}={plain} in parameter group {number} of the {which}"
