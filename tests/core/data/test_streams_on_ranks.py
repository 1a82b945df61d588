"""Several streams on two ranks: shares, the same stream on all of them, resumes."""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.data.streams import MODES
from heliograph.tests.core.data.test_streams import Flow, Samples, Two, check_report, class_of, named
from heliograph.tests.kit import counters, sgd
from heliograph.tests.ranks_pool import Pool
from torch.utils.data import DataLoader, TensorDataset

Reported = dict[str, Any]
PARAMS: dict[str, Any] = {"global_batch_size": 4, "shuffle": True, "draws_per": "sample"}


def made(mode: Any, *, unsized: bool = False) -> h.Streams:
    length: Any = {"length": 6} if unsized and mode in ("cycle", "weighted") else {}
    weights: Any = {"weights": {"a": 2, "b": 1}} if mode == "weighted" else {}
    other: Any = DataLoader(Flow(5 + int(unsized), 100), 2) if unsized else Samples(6, 100)
    return h.Streams({"a": Samples(18), "b": other}, mode=mode, **length, **weights)


def trained(mode: Any, *, saved: bytes | None = None, unsized: bool = False, **options: Any) -> Reported:
    """Train for two epochs; report what this rank had, and a save after each batch."""
    seen: list[Any] = []
    streams: list[Any] = []
    cuts: dict[tuple[int, int], bytes] = {}
    saves = [h.SaveSchedule(h.Every(batches=1), at_end=False), h.SaveSchedule(h.Every(epochs=1)).named("epochs")]
    trainer = h.Trainer([h.RNGCapture(6691), *saves], device="cpu")

    def note(run: h.Run, event: h.BatchEnd) -> None:
        seen.append(named(run))
        streams.append(run.data.stream)

    def keep(run: h.Run, event: h.SavePoint) -> None:
        file = BytesIO()
        torch.save(run.state_dict(), file)
        cuts[run.progress.epoch, run.progress.batch] = file.getvalue()

    trainer.bus.on(h.BatchEnd, note)
    trainer.bus.on(h.SavePoint, keep, lane=h.Lane.PERSIST)
    if saved is not None:
        state = torch.load(BytesIO(saved), weights_only=True)
        trainer.bus.on(h.TrainStart, lambda run, event: run.resume(state))
    task = Two()
    given: dict[str, Any] = {"loader_params": PARAMS, "optimizer": sgd(0.01, momentum=0.9), "epochs": 2} | options
    result = trainer.fit(task, given.pop("train", None) or made(mode, unsized=unsized), **given)
    weights = [each.tolist() for each in task.model.state_dict().values()]
    reported = {"seen": seen, "streams": streams, "cuts": cuts, "weights": weights, "resume": result.resume}
    return {**reported, "counts": counters(result), "notes": result.notes}


def resumed_everywhere(mode: Any, *, unsized: bool, **options: Any) -> Reported:
    """Compare a run on this rank with one that is resumed from each of its saves; of some, one in two."""
    whole = trained(mode, unsized=unsized, **options)
    for (epoch, batch), saved in list(whole["cuts"].items())[::2]:
        place = torch.load(BytesIO(saved), weights_only=True)["progress"]
        done = place["earlier_batches"] + place["batch"]
        resumed = trained(mode, saved=saved, unsized=unsized, **options)
        assert resumed["seen"] == whole["seen"][done:], (epoch, batch)
        assert resumed["streams"] == whole["streams"][done:], (epoch, batch)
        assert resumed["weights"] == whole["weights"], (epoch, batch)
        assert resumed["counts"] == whole["counts"], (epoch, batch)
        check_report(resumed["resume"], "replayed" if unsized else "seeked", (epoch, batch))
    return whole


@pytest.mark.sample(1)
@pytest.mark.parametrize("unsized", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_share_each_stream_and_resume(mode: Any, unsized: bool, ranks: Pool) -> None:
    first, second = ranks(2).run(resumed_everywhere, mode, unsized=unsized)

    assert first["streams"] == second["streams"]
    assert first["weights"] == second["weights"]
    assert first["counts"] == second["counts"]
    own, others = ([sample for batch in each["seen"] for sample in batch.get("a") or ()] for each in (first, second))
    rows = [len(part) for each in (first, second) for batch in each["seen"] for part in batch.values() if part]
    assert first["counts"]["samples"] == sum(rows)
    if mode in ("cycle", "max") and not unsized:
        assert sorted(sample[0] for sample in [*own[:9], *others[:9]]) == list(range(18))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_one_process_continues_what_two_have_begun(mode: Any, ranks: Pool) -> None:
    """With as many samples of each stream in a global batch, every batch is of the same samples."""
    two = ranks(2).run(trained, mode)
    (alone,) = ranks(1).run(trained, mode, saved=two[0]["cuts"][0, 2])
    together = [
        {
            name: None if part is None else [row for pair in zip(part, other[name], strict=True) for row in pair]
            for name, part in batch.items()
        }
        for batch, other in zip(two[0]["seen"][2:], two[1]["seen"][2:], strict=True)
    ]
    full = [(one, other) for one, other in zip(alone["seen"], together, strict=True) if one == other]
    assert len(alone["seen"]) == len(together)
    assert len(full) >= len(together) - 4  # the last round of a pass is filled up on two ranks
    assert alone["counts"]["streams"] == two[0]["counts"]["streams"]
    assert alone["resume"].reasons


def differing(what: str) -> str:
    is_first = os.environ["RANK"] == "0"
    trains: dict[str, Any] = {
        "mode": h.Streams({"a": Samples(8)}, mode="cycle" if is_first else "max"),
        "streams": {"a" if is_first else "b": Samples(8)},
        "data": {"a": Samples(8), "b": Samples(8 if is_first else 10)},
        "limit": {"a": Samples(8)},
    }
    limit = 2 if is_first and what == "limit" else None
    with pytest.raises(ValueError) as caught:  # returned, to be compared
        trained("", train=trains[what], limit_train=limit)
    return str(caught.value)


DIFFERENCES = {
    "mode": "mode is 'cycle' and 'max'",
    "streams": "streams is ['a'] and ['b']",
    "data": "samples is 8 and 10",
    "limit": "limit is 2 and None",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_with_other_streams_are_refused(what: str, ranks: Pool) -> None:
    for text in ranks(2).run(differing, what):
        assert DIFFERENCES[what] in text, text


def validated(limit: Any) -> tuple[dict[str, float], int, int]:
    trainer = h.Trainer([h.RNGCapture(1)], device="cpu")
    own = []
    trainer.bus.on(h.ValidationBatchEnd, lambda run, event: own.append(event.dataset))
    numbers = TensorDataset(torch.linspace(-3, 3, 56).reshape(14, 4))
    sets = {
        "a": DataLoader(numbers, 2, collate_fn=lambda rows: torch.stack([row for (row,) in rows])),
        "b": class_of(3),
    }
    result = trainer.validate(Two(), sets, limit=limit)
    return result.metrics, result.progress.evaluated, len(own)


@pytest.mark.parametrize(("limit", "batches"), [(3, 6), ({"a": 0.5, "b": 1}, 4)])
def test_a_limit_of_validation_sets_is_that_of_all_ranks_together(limit: Any, batches: int, ranks: Pool) -> None:
    (alone,) = ranks(1).run(validated, limit)
    first, second = ranks(2).run(validated, limit)
    assert alone[1] == first[1] == second[1] == batches
    assert first[2] + second[2] == batches
    assert first[0] == second[0] == pytest.approx(alone[0], rel=1e-5)
