"""The saved position in the training data, and its conversion for a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...events import Engine
from ..system.extras import kind_of
from .batch_size import prefer_saved
from .sizes import Layout
from .source import Source, nested

Report = Callable[[str], None]
UNCOMPARED = "the order of the loader was not compared: no batch is read again at the end of an epoch"


def resumed_progress(
    progress: Mapping[str, Any],
    before: tuple[Mapping[str, Any], Layout],
    now: tuple[Mapping[str, Any], Layout],
    report: Report,
) -> dict[str, Any]:
    """Return the saved progress in batches of this run, after comparing the data.

    Args:
        progress: the saved counters.
        before: the kind and layout of the data at the save.
        now: the kind and layout of the data of this run.
        report: called with a sentence for each difference.

    Raises:
        ValueError: the position is within an epoch of different data, or within a batch.
    """
    (kind_before, layout_before), (kind, layout) = before, now
    kind_before, kind = _without_limit(kind_before, kind, report)
    if layout_before.world_size == layout.world_size:
        prefer_saved(layout_before.batch_size, layout.batch_size)
        if not layout_before.shares_order(layout):
            kind_before = {**kind_before, "batch_size": layout_before.batch_size}
            kind = {**kind, "batch_size": layout.batch_size}
    if kind_before != kind:
        _check_change(kind_before, kind, report, is_within_epoch=progress["batch"] > 0)
    elif not layout_before.deals_alike(layout):
        _report_batches(layout_before, layout, kind, report)
    return convert_progress(progress, layout_before, layout)


def _without_limit(
    before: Mapping[str, Any], now: Mapping[str, Any], report: Report
) -> tuple[dict[str, Any], dict[str, Any]]:
    # A changed limit only moves the end of an epoch.
    limits = before.get("limit"), now.get("limit")
    if limits[0] != limits[1]:
        old, new = ("none" if limit is None else str(limit) for limit in limits)
        report(f"the limit of an epoch was {old} and is {new}, so the epoch ends at another batch")
        return {**before, "limit": None}, {**now, "limit": None}
    return dict(before), dict(now)


def _report_batches(before: Layout, now: Layout, kind: Mapping[str, Any], report: Report) -> None:
    # The same samples in the same order, but in other batches.
    if kind.get("draws_per") == "batch":
        report(
            f"random draws of loading, such as augmentation, are keyed by batch and rank and differ now: "
            f"{_describe(before)} before, {_describe(now)} now; to avoid that, start a training with "
            f"loader_params={{'draws_per': 'sample'}}"
        )
    if before.world_size == now.world_size:
        report(f"the batch size was {before.batch_size} and is {now.batch_size}: values computed over a batch differ")
    ends = [None if layout.batches is None else layout.batches * _taken(layout) for layout in (before, now)]
    if (kind.get("drop_last") or kind.get("limit")) and ends[0] != ends[1]:
        reason = "drop_last" if kind.get("drop_last") else "the limit"
        report(f"{reason} drops other samples: an epoch ended after {ends[0]}, now after {ends[1]}")


def _check_change(before: Mapping[str, Any], now: Mapping[str, Any], report: Report, *, is_within_epoch: bool) -> None:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = ", ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names)
    if is_within_epoch:
        raise ValueError(
            f"The checkpoint was written within an epoch of different data ({changes}), so its position would mean "
            f"other samples. Resume with the same data, or from a checkpoint at the end of an epoch."
        )
    report(f"the data changed at the resume: {changes}")


def convert_progress(progress: Mapping[str, Any], before: Layout, now: Layout) -> dict[str, Any]:
    """Convert saved counters to another layout.

    The position stays the same to the sample. Batches of earlier epochs are counted as in the new layout, approximately
    if they are unknown.

    Raises:
        ValueError: no batch of the new layout begins at the position.
    """
    counters = dict(progress)
    if before.deals_alike(now) or (before.world_size == now.world_size and not before.shares_order(now)):
        return counters
    if not (before.common and now.common):
        if progress["batch"]:
            raise ValueError(
                f"The checkpoint was written within an epoch by {before.world_size} processes with separate orders, "
                f"which {now.world_size} processes cannot continue. Resume with {before.world_size} processes, or from "
                f"a checkpoint at the end of an epoch."
            )
        return counters
    counters["batch"] = _place(progress["batch"], before, now)
    epochs, factor = progress["epoch"], _taken(before) / _taken(now)
    if before.batches and now.batches and progress["earlier_batches"] == epochs * before.batches:
        counters["earlier_batches"] = epochs * now.batches
    else:
        counters["earlier_batches"] = round(progress["earlier_batches"] * factor)
    counters["skipped_batches"] = round(progress["skipped_batches"] * factor)
    if "streams" in progress:
        counters["streams"] = {name: round(batches * factor) for name, batches in progress["streams"].items()}
    return counters


def _taken(layout: Layout) -> int:
    # The samples (or batches) of the order in the batches of all processes.
    return layout.world_size * (layout.batch_size or 1)


def _place(batch: int, before: Layout, now: Layout) -> int:
    if before.batches is not None and now.batches is not None and batch >= before.batches:
        return now.batches
    position = batch * _taken(before)
    if position % _taken(now):
        raise ValueError(
            f"The checkpoint is {position} samples into the epoch, which is within a batch of {_describe(now)}. It was "
            f"written with {_describe(before)}. Choose numbers whose product is the same or divides {position}, or "
            f"resume from a checkpoint at the end of an epoch."
        )
    return position // _taken(now)


def _describe(layout: Layout) -> str:
    processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    return f"{processes} x batch_size {layout.batch_size}"


class LoaderFacts(NamedTuple):
    """The facts of a loader on one rank."""

    kind: dict[str, Any]
    length: int | None
    even: bool
    as_it_is: bool


def agree(sources: Sequence[Source], engine: Engine, note: Callable[[str], None]) -> None:
    """Set the length of an epoch to the length on the shortest rank. A collective.

    A batch size that differs between the ranks becomes unknown.

    Args:
        sources: one for each phase.
        engine: connects the ranks.
        note: called with lines about loaders that every rank reads completely, and about unequal lengths.

    Raises:
        ValueError: data that are divided among the ranks differ between them.
    """
    phases = [list(nested(source)) for source in sources]
    of_ranks: list[list[list[LoaderFacts]]] = engine.gather_objects([list(map(_facts, phase)) for phase in phases])
    for phase, facts_of_ranks in zip(phases, zip(*of_ranks, strict=True), strict=True):
        if len(phase) > 1 or len({len(facts) for facts in facts_of_ranks}) > 1:
            _check_same([facts[0] for facts in facts_of_ranks])
        _agree_on_phase(list(zip(phase, zip(*facts_of_ranks, strict=True), strict=True)), engine, note)


def _agree_on_phase(
    sources: Sequence[tuple[Source, Sequence[LoaderFacts]]], engine: Engine, note: Callable[[str], None]
) -> None:
    for source, facts in reversed(sources):  # parts before their compound
        if source.parts:
            _check_same(facts)
            source.combine()
            continue
        if not all(fact.as_it_is for fact in facts):
            _check_same(facts)
        else:
            note(
                f"all {engine.world_size} ranks read all of {kind_of(source.loader)}: select a part by "
                f"run.engine.rank, or every rank trains on all of the data"
            )
        lengths = {fact.length for fact in facts}
        if len(lengths) > 1:
            listed = ", ".join("unknown" if fact.length is None else str(fact.length) for fact in facts)
            note(f"the train loaders of the ranks have {listed} batches: an epoch ends with the shortest")
        source.length = None if None in lengths else min(fact.length or 0 for fact in facts)
        source.even = all(fact.even for fact in facts)
        if any(fact.kind["batch_size"] != source.batch_size for fact in facts):
            source.batch_size = None


def _facts(source: Source) -> LoaderFacts:
    facts, size = (source.facts, None) if source.parts else (source.kind, source.batch_size)
    kind = {**facts, "parts": sum(1 for _ in nested(source)) - 1, "batch_size": size}
    return LoaderFacts(kind, source.length, source.even, source.as_it_is)


def _check_same(facts: Sequence[LoaderFacts]) -> None:
    main = facts[0].kind
    for rank, rank_facts in enumerate(facts):
        kind = rank_facts.kind
        names = [name for name in {**main, **kind} if main.get(name) != kind.get(name)]
        if names:
            differences = ", ".join(f"{name} is {main.get(name)!r} and {kind.get(name)!r}" for name in names)
            raise ValueError(
                f"The train loaders of rank 0 and rank {rank} differ: {differences}. The run divides the data itself: "
                f"give every rank the same data in batches of one size, or an iterable dataset with a part per rank."
            )


def load(data: Any, state: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    # See `TrainingData.load_state_dict`.
    if not 0 <= state["phase"] < max(1, len(data.lengths)):
        raise ValueError(
            f"The checkpoint is of training phase {state['phase']}, but there are {len(data.lengths)} phases. Resume "
            f"with the original phases."
        )
    data.phase, data.advances, before = state["phase"], state["advances"], state["source"]
    data.seed = data.seed if state["seed"] is None else state["seed"]
    for text in state["facts"]["differences"]:  # they persist in later resumes
        data.report_difference(text)
    for text in state["facts"]["hidden"]:  # a later attempt may not detect it
        data.report_hidden(text)
    if data.source is None:
        return dict(progress)
    counters, data.expected = dict(progress), None
    if before is None:
        data.report_difference("the order of samples: the checkpoint is of Helios, which does not save it")
    else:
        layout = Layout(**state["layout"])
        now = data.source.kind, data.source.layout
        counters = resumed_progress(progress, (before, layout), now, data.report_difference)
        if layout == data.source.layout:  # otherwise the position is of another process or batch
            data.expected = state["last_batch"]
            data.last.set_position(progress["batch"], data.expected)
    if progress["epoch"] and not progress["batch"] and data.is_replayed:
        data.report_hidden(UNCOMPARED)
    if before is not None and before["source"] == data.source.kind["source"]:
        data.source.load_state_dict(state["state"])
    return counters
