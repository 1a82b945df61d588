"""What a saved position means in the data of a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...events import Engine, Progress
from ..system.extras import kind_of
from .order.shares import Layout
from .sources.contract import Compound, Source, nested

Report = Callable[[str], None]
UNCOMPARED = "nothing is read again between two epochs, so whether the loader repeats its order was not compared"


def resumed_progress(
    progress: Mapping[str, Any],
    before: tuple[Mapping[str, Any], Layout, int],
    now: tuple[Mapping[str, Any], Layout, bool],
    report: Report,
) -> tuple[dict[str, Any], int]:
    """Return the saved progress in batches of this run, after comparing the data.

    Args:
        progress: the saved counters.
        before: the kind and the layout of the data that they were counted in, and how many samples of the batch at the
            position were consumed.
        now: the kind and the layout of the data of this run, and whether these can be read from within a batch.
        report: takes each difference, in a sentence.

    Returns:
        The counters, and how many samples of the batch at the position are consumed.

    Raises:
        ValueError: the position is within an epoch of other data, or within a batch.
    """
    (kind_before, layout_before, within), (kind, layout, cuts_batches) = before, now
    kind_before, kind = _without_limit(kind_before, kind, report)
    if layout_before.world_size == layout.world_size:
        from .batch_size import prefer_saved  # needed at a resume only: each save loads this module

        prefer_saved(layout_before.batch_size, layout.batch_size)
        if not layout_before.shares_order(layout):
            kind_before = {**kind_before, "batch_size": layout_before.batch_size}
            kind = {**kind, "batch_size": layout.batch_size}
    if kind_before != kind:
        _check_change(kind_before, kind, report, is_within_epoch=progress["batch"] > 0)
    elif not layout_before.deals_alike(layout):
        _report_batches(layout_before, layout, kind, report)
    counters, within = convert_progress(progress, layout_before, layout, within, cuts_batches=cuts_batches)
    if within:
        report(f"the checkpoint is {within} samples into a batch of now: its rest is the first batch")
    return counters, within


def _without_limit(
    before: Mapping[str, Any], now: Mapping[str, Any], report: Report
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both kinds, without the limit of an epoch if it changed, which says only where one ends."""
    limits = before.get("limit"), now.get("limit")
    if limits[0] != limits[1]:
        was, now_is = ("none" if limit is None else str(limit) for limit in limits)
        report(f"the limit of an epoch was {was} and is {now_is}, so it ends elsewhere")
    left_out = {"limit"} if limits[0] != limits[1] else set[str]()
    one, other = ({name: value for name, value in kind.items() if name not in left_out} for kind in (before, now))
    return one, other


def _report_batches(before: Layout, now: Layout, kind: Mapping[str, Any], report: Report) -> None:
    """Say what differs where the same samples in the same order meet in other batches."""
    is_alone = before.world_size == now.world_size == 1
    if kind.get("draws_per") == "batch":
        key = "batch" if is_alone else "batch and the rank"
        was, is_now = (_read_by(each, is_alone=is_alone) for each in (before, now))
        report(
            f"random draws of loading, such as augmentation, go by the {key} and differ now: {was} before, {is_now} "
            f"now; a training that begins with loader_params={{'draws_per': 'sample'}} avoids that",
        )
    if before.world_size == now.world_size:
        report(
            f"batches of {before.batch_size} were read, now of {now.batch_size}: what is computed over a batch differs",
        )
    ends = [None if each.batches is None else each.batches * _taken(each) for each in (before, now)]
    if (kind.get("drop_last") or kind.get("limit")) and ends[0] != ends[1]:
        what = "drop_last" if kind.get("drop_last") else "the limit"
        report(f"{what} leaves out other samples: an epoch ended after {ends[0]}, now after {ends[1]}")


def _read_by(layout: Layout, *, is_alone: bool) -> str:
    ranks = "" if is_alone else f"{layout.world_size} {'rank' if layout.world_size == 1 else 'ranks'} with "
    return f"{ranks}batches of {layout.batch_size}"


def _check_change(before: Mapping[str, Any], now: Mapping[str, Any], report: Report, *, is_within_epoch: bool) -> None:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = ", ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names)
    if is_within_epoch:
        raise ValueError(
            f"The checkpoint was written within an epoch of other data ({changes}), so its position would mean other "
            f"samples: resume with the same data, or from a checkpoint at an epoch's end."
        )
    report(f"the data changed at the resume: {changes}")


def convert_progress(
    progress: Mapping[str, Any], before: Layout, now: Layout, within: int = 0, *, cuts_batches: bool = False
) -> tuple[dict[str, Any], int]:
    """Return the counters of a saved run as those of a run in another layout, and the samples into a batch.

    The position is the same to the sample. Batches of earlier epochs are counted as if these had been read in the
    layout of now; where these cannot be known, to the nearest.

    Args:
        progress: the saved counters.
        before: the layout that they were counted in.
        now: the layout of the resumed run.
        within: how many samples of the batch at the position were consumed.
        cuts_batches: whether the data can be read from within a batch, for one rank.

    Raises:
        ValueError: no batch of the present layout begins at the position, and none can be cut.
    """
    counters = dict(progress)
    if before.deals_alike(now) or (before.world_size == now.world_size and not before.shares_order(now)):
        return counters, within
    if not (before.common and now.common):
        if progress["batch"]:
            raise ValueError(
                f"{before.world_size} processes wrote the checkpoint within an epoch, each at a position in its own "
                f"order, which {now.world_size} cannot continue: resume with as many, or from a checkpoint at an "
                f"epoch's end."
            )
        return counters, 0
    place = progress["batch"], within
    counters["batch"], within = _place(place, before, now, cuts_batches=cuts_batches and now.world_size == 1)
    epochs, factor = progress["epoch"], _taken(before) / _taken(now)
    if before.batches and now.batches and progress["earlier_batches"] == epochs * before.batches:
        counters["earlier_batches"] = epochs * now.batches
    else:
        counters["earlier_batches"] = round(progress["earlier_batches"] * factor)
    counters["skipped_batches"] = round(progress["skipped_batches"] * factor)
    if "streams" in progress:
        counters["streams"] = {name: round(batches * factor) for name, batches in progress["streams"].items()}
    return counters, within


def _taken(layout: Layout) -> int:
    """Return what the batches of all processes take of the order."""
    return layout.world_size * (layout.batch_size or 1)


def _place(place: tuple[int, int], before: Layout, now: Layout, *, cuts_batches: bool) -> tuple[int, int]:
    """Return the batch at a position, and how many samples of it are consumed."""
    batch, within = place
    if before.batches is not None and now.batches is not None and batch >= before.batches:
        return now.batches, 0
    position = batch * _taken(before) + within
    count, rest = divmod(position, _taken(now))
    if rest and not cuts_batches:
        raise ValueError(
            f"The checkpoint is {position} samples into the epoch, within a batch of now: {_describe(now)}. It was "
            f"written by {_describe(before)}. Choose numbers whose product is the same or divides {position}, or "
            f"resume from a checkpoint at an epoch's end."
        )
    return min((count, rest), (now.batches, 0)) if cuts_batches and now.batches is not None else (count, rest)


def _describe(layout: Layout) -> str:
    processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    return f"{processes} x batch_size {layout.batch_size}"


class Facts(NamedTuple):
    """What a rank says of a loader."""

    kind: dict[str, Any]
    length: int | None
    even: bool
    as_it_is: bool


def agree(sources: Sequence[Source], engine: Engine, note: Callable[[str], None]) -> None:
    """Let the shortest rank set the length of an epoch for all; unlike batch sizes nobody knows. A collective.

    Args:
        sources: one for each phase, which may be made of others.
        engine: connects the ranks.
        note: is given lines about loaders that every rank reads whole, and about unequal lengths.

    Raises:
        ValueError: the data that are dealt out are not the same on all ranks.
    """
    phases = [list(nested(source)) for source in sources]
    of_ranks: list[list[list[Facts]]] = engine.gather_objects([list(map(_facts, each)) for each in phases])
    if len({len(each) for each in of_ranks}) > 1:
        raise ValueError(f"The ranks train in {', '.join(str(len(each)) for each in of_ranks)} phases.")
    for phase, facts_of_ranks in zip(phases, zip(*of_ranks, strict=True), strict=True):
        if len(phase) > 1 or len({len(facts) for facts in facts_of_ranks}) > 1:
            _check_same([facts[0] for facts in facts_of_ranks])
        _agree_on_phase(list(zip(phase, zip(*facts_of_ranks, strict=True), strict=True)), engine, note)


def _agree_on_phase(
    sources: Sequence[tuple[Source, Sequence[Facts]]], engine: Engine, note: Callable[[str], None]
) -> None:
    for source, facts in reversed(sources):  # what is made of others comes after them
        if isinstance(source, Compound):
            _check_same(facts)
            source.combine()
            continue
        if not all(each.as_it_is for each in facts):
            _check_same(facts)
        else:
            note(
                f"{kind_of(source.loader)} is read as it is on each of {engine.world_size} ranks: share its "
                f"data out by run.engine.rank, or every rank trains on all of it"
            )
        lengths = {each.length for each in facts}
        if len(lengths) > 1:
            listed = ", ".join("unknown" if each.length is None else str(each.length) for each in facts)
            note(f"the train loaders of the ranks have {listed} batches: an epoch ends when the first of them does")
        source.length = None if None in lengths else min(each.length or 0 for each in facts)
        source.even = all(each.even for each in facts)
        if any(each.kind["batch_size"] != source.batch_size for each in facts):
            source.batch_size = None


def _facts(source: Source) -> Facts:
    own, size = (source.own, None) if isinstance(source, Compound) else (source.kind, source.batch_size)
    kind = {**own, "parts": sum(1 for _ in nested(source)) - 1, "batch_size": size}
    return Facts(kind, source.length, source.even, source.as_it_is)


def _check_same(facts: Sequence[Facts]) -> None:
    main = facts[0].kind
    for rank, each in enumerate(facts):
        names = [name for name in {**main, **each.kind} if main.get(name) != each.kind.get(name)]
        if names:
            differences = ", ".join(f"{name} is {main.get(name)!r} and {each.kind.get(name)!r}" for name in names)
            raise ValueError(
                f"The train loaders of rank 0 and rank {rank} differ: {differences}. A run deals the data out itself: "
                f"give every rank all of them, in batches of one size, or an iterable dataset that shares them out."
            )


def load(data: Any, state: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    """Let training data continue from a saved position; see `TrainingData.load_state_dict`."""
    if not 0 <= state["phase"] < max(1, len(data.lengths)):
        raise ValueError(
            f"The checkpoint is of training phase {state['phase']}, there are {len(data.lengths)}: resume with "
            f"the phases that it was written with."
        )
    data.phase, data.advances, before = state["phase"], state["advances"], state["source"]
    data.seed = data.seed if state["seed"] is None else state["seed"]
    for text in state["facts"]["differences"]:  # a run that continues a changed one differs, too
        data.report_difference(text)
    for text in state["facts"]["hidden"]:  # another attempt may begin at a batch that does not show it
        data.report_hidden(text)
    if data.source is None:
        return dict(progress)
    counters, data.expected = dict(progress), None
    if before is None:
        data.report_difference("the order of samples: the checkpoint is of Helios, which saves none")
    else:
        layout = Layout(**state["layout"])
        now = data.source.kind, data.source.layout, data.source.cuts_batches
        counters, within = resumed_progress(
            progress, (before, layout, state.get("within", 0)), now, data.report_difference
        )
        data.within = counters["epoch"], counters["batch"], within
        if layout == data.source.layout:  # else the position is another process's, or another batch
            data.expected = state["last_batch"]
            data.last.set_position(progress["batch"], data.expected)
    if progress["epoch"] and not progress["batch"] and data.is_replayed:
        data.report_hidden(UNCOMPARED)
    if before is not None and before["source"] == data.source.kind["source"]:
        data.source.load_state_dict(state["state"])
    return counters


def save(data: Any, progress: Progress) -> dict[str, Any]:
    """Return the position of training data, as plain types; see `TrainingData.state_dict`."""
    data.collect()
    facts = {"hidden": list(data.hidden), "differences": list(data.differences)}
    place = {"seed": data.seed, "phase": data.phase, "advances": data.advances, "facts": facts}
    if data.source is None:
        return {**place, "source": None, "layout": None, "state": {}}
    own = data.source.state_dict(progress.batch)
    last = data.last.digest(progress.batch) if data.is_replayed and progress.batch else None
    kind, layout = dict(data.source.kind), data.source.layout.state_dict()
    within = {"within": consumed} if (consumed := data.consumed_of(progress)) else {}
    return {**place, "source": kind, "layout": layout, "state": own, "last_batch": last, **within}
