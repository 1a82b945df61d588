"""Predictions and what is collected, on several ranks: all samples once, in the order of the data, on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    DDPEngine,
    DeviceEngine,
    Plugin,
    PredictBatchEnd,
    PredictionWriter,
    RankFailed,
    Run,
    Supervised,
    Trainer,
    ValidationEnd,
    on,
    read_prediction_batches,
    read_predictions,
)
from heliograph.tests.kit import EventRecorder
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = ["predict_batch_start", "predict_batch_end"]


class Rows(Supervised):
    """Returns the inputs with their names; collects them in validations."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), nn.functional.mse_loss)

    def predict_step(self, run: Run, batch: Any) -> Any:
        rows = batch[0] if isinstance(batch, list | tuple) else batch
        return {"rows": rows, "names": [str(int(each)) for each in rows[:, 0]]}

    def validation_step(self, run: Run, batch: Any) -> Any:
        run.collect("rows", batch[0])
        return super().validation_step(run, batch)


def trainer(*plugins: Any) -> Trainer:
    return Trainer(plugins, engine=DDPEngine(device="cpu") if "RANK" in os.environ else DeviceEngine("cpu"))


def rows(samples: int) -> Tensor:
    return torch.arange(float(samples)).reshape(-1, 1)


def data(form: str, samples: int) -> Any:
    whole = rows(samples)
    if form == "list":
        return list(torch.split(whole, 3))
    if form == "empty":  # the last batch, of the second rank
        return [*torch.split(whole, 3), torch.empty(0, 1)]
    return DataLoader(TensorDataset(whole), 3, num_workers=0)


def predicted(form: str, samples: int, named: bool) -> tuple[Any, list[str], int]:
    own, task = trainer(), Rows()
    trace = EventRecorder(own.bus).trace
    given = data(form, samples)
    result = own.predict(task, {"a": given, "b": data(form, 2)} if named else given)
    return result.predictions, trace, result.progress.samples


@pytest.mark.parametrize(("form", "samples"), [("list", 14), ("loader", 17), ("loader", 2), ("empty", 9)])
def test_every_rank_has_all_outputs_in_order(ranks: Pool, form: str, samples: int) -> None:
    """Of 14 samples in threes, rank 0 has three batches and rank 1 two; of 2 samples, rank 1 has no batch."""
    alone, _, counted = predicted(form, samples, named=False)
    of_ranks = ranks(2).run(predicted, form, samples, False)
    for predictions, _, together in of_ranks:
        assert predictions["rows"].tolist() == alone["rows"].tolist() == rows(samples).tolist()
        assert predictions["names"] == alone["names"] == [str(number) for number in range(samples)]
        assert together == counted == samples


def test_the_traces_of_two_ranks_and_two_sets(ranks: Pool) -> None:
    of_ranks = ranks(2).run(predicted, "list", 7, True)
    for predictions, _, _ in of_ranks:
        assert {name: each["names"] for name, each in predictions.items()} == {"a": [*"0123456"], "b": ["0", "1"]}
    assert [trace for _, trace, _ in of_ranks] == [
        ["predict_start", *BATCH, *BATCH, *BATCH, "predict_end", "run_closed"],
        ["predict_start", *BATCH, "predict_end", "run_closed"],
    ]


def refused(kind: str) -> list[str]:
    """Return what is said of loaders that every rank reads as it is; and what the batches of each are."""
    dataset = TensorDataset(rows(4))

    def loader() -> Any:
        if kind == "iterable":
            return iter([rows(3)])
        return DataLoader(dataset, 2, sampler=DistributedSampler(dataset, 2, int(os.environ["RANK"]), shuffle=False))

    with pytest.raises(ValueError, match="All 2 ranks read the whole loader") as caught:
        trainer().predict(Rows(), loader())
    return [str(caught.value), str([batch["names"] for batch in trainer().predict_batches(Rows(), loader())])]


def test_without_a_known_order_only_batches_are_yielded(ranks: Pool) -> None:
    for said, batches in ranks(2).run(refused, "iterable"):
        assert "All 2 ranks read" in said
        assert batches == "[['0', '1', '2']]"
    (said, one), (_, other) = ranks(2).run(refused, "sampler")
    assert "without a distributed sampler" in said
    assert (one, other) == ("[['0', '2']]", "[['1', '3']]")


def yielded() -> list[str]:
    return [name for outputs in trainer().predict_batches(Rows(), data("list", 7)) for name in outputs["names"]]


def test_each_rank_is_yielded_its_own_batches(ranks: Pool) -> None:
    assert ranks(2).run(yielded) == [["0", "1", "2", "6"], ["3", "4", "5"]]


def left(leaving: int) -> tuple[int, list[str]]:
    """Leave the loop on one rank; the other one's ends, too."""
    own, count = trainer(), 0
    trace = EventRecorder(own.bus).trace
    for _ in own.predict_batches(Rows(), data("list", 300)):
        count += 1
        if own.engine.rank == leaving:
            break
    return count, trace[-2:]


def test_leaving_on_one_rank_ends_it_for_all(ranks: Pool) -> None:
    (one, trace), (other, others) = ranks(2).run(left, 0)
    assert one == 1
    assert 1 <= other <= 50
    assert trace == others == ["validation_cut", "run_closed"]


class Failing(Rows):
    """Fails on the second rank, at its second batch."""

    def predict_step(self, run: Run, batch: Any) -> Any:
        if run.engine.rank == 1 and run.progress.evaluated:
            raise ArithmeticError("no")
        return super().predict_step(run, batch)


def failing() -> tuple[str, list[str]]:
    own = trainer()
    trace = EventRecorder(own.bus).trace
    try:
        own.predict(Failing(), data("list", 300))
    except (ArithmeticError, RankFailed) as error:
        return type(error).__name__, trace[-2:]
    return "", trace


def test_a_failure_of_one_rank_ends_all(ranks: Pool) -> None:
    assert ranks(2).run(failing) == [
        ("RankFailed", ["run_failed", "run_closed"]),
        ("ArithmeticError", ["run_failed", "run_closed"]),
    ]


class Keep(Plugin):
    """Keeps what was collected."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    @on(ValidationEnd)
    def keep(self, run: Run, event: ValidationEnd) -> None:
        self.found = {name: each.flatten().tolist() for name, each in run.collected.items()}


def collected(samples: int) -> dict[str, Any]:
    keep, whole = Keep(), rows(samples)
    loader = DataLoader(TensorDataset(whole, whole), 3)
    trainer(keep).validate(Rows(), {"a": loader, "b": [(whole[:2], whole[:2])]})
    return keep.found


@pytest.mark.parametrize("samples", [3, 14])
def test_what_is_collected_is_whole_on_every_rank(ranks: Pool, samples: int) -> None:
    expected = {"a/rows": [float(number) for number in range(samples)], "b/rows": [0.0, 1.0]}
    assert collected(samples) == expected
    assert ranks(2).run(collected, samples) == [expected, expected]


def written(folder: str) -> Any:
    result = trainer(PredictionWriter(folder, batches=2)).predict(Rows(), data("list", 23), gather=False)
    assert result.predictions is None
    return read_predictions(folder)["names"]


def test_each_rank_writes_its_part_and_all_are_read_in_order(ranks: Pool, tmp_path: Path) -> None:
    names = [str(number) for number in range(23)]
    assert ranks(2).run(written, str(tmp_path)) == [names, names]
    assert [name for batch in read_prediction_batches(tmp_path) for name in batch["names"]] == names
    assert len(list(tmp_path.glob("part-00000-*.pt"))) == len(list(tmp_path.glob("part-00001-*.pt"))) == 2
    (tmp_path / "part-00001-000000.pt").unlink()
    with pytest.raises(ValueError, match=r"2 batches: part-00001-000000\.pt"):
        read_predictions(tmp_path)


def taken() -> int:
    """Count with a plugin of one's own, without gathering."""
    count = 0

    def take(run: Run, event: PredictBatchEnd) -> None:
        nonlocal count
        count += len(run.outputs["names"])

    own = trainer()
    own.bus.on(PredictBatchEnd, take)
    own.predict(Rows(), data("list", 7), gather=False)
    return count


def test_a_handler_takes_the_outputs_of_its_rank(ranks: Pool) -> None:
    assert ranks(2).run(taken) == [4, 3]
