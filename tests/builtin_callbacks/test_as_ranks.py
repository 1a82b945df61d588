"""One process that adds gradients up as several ranks would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heliograph import (
    BatchStart,
    DeviceEngine,
    GradientAccumulation,
    GradientsReady,
    Phases,
    Plugin,
    Run,
    Supervised,
    Trainer,
    on,
)
from heliograph.tests.kit import Batch, random_batches, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def batches(count: int) -> list[Batch]:
    return random_batches(count, 3, inputs=2, outputs=1, seed=1)


def model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def by_hand(data: list[Batch], ranks: int, n: int) -> list[Any]:
    """Accumulate on each of some ranks, average over these, and step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, len(data), ranks * n):
        window = data[start : start + ranks * n]
        totals: list[Tensor] = []
        for rank in range(ranks):
            own = window[rank::ranks]
            optimizer.zero_grad()
            for inputs, targets in own:
                loss = nn.functional.mse_loss(net(inputs), targets)
                loss.backward(torch.tensor(1 / len(own)))  # type: ignore[no-untyped-call]  # torch has no annotation
            means = [parameter.grad * (1 / ranks) for parameter in net.parameters() if parameter.grad is not None]
            totals = [total + mean for total, mean in zip(totals, means, strict=True)] if rank else means
        for parameter, total in zip(net.parameters(), totals, strict=True):
            parameter.grad = total
        optimizer.step()
    return [value.tolist() for value in net.state_dict().values()]


def trained(data: Any, *plugins: Any, trainer: Trainer | None = None, **options: Any) -> list[Any]:
    net = model()
    trainer = trainer or Trainer(plugins, device="cpu")
    options = {"optimizer": sgd(momentum=0.9), "epochs": 1, **options}
    trainer.fit(Supervised(net, nn.functional.mse_loss), data, **options)
    return [value.tolist() for value in net.state_dict().values()]


@pytest.mark.parametrize(("ranks", "n", "count"), [(2, 1, 6), (2, 2, 8), (3, 2, 12), (2, 3, 10), (2, 2, 6)])
def test_sums_of_each_rank_are_kept_apart(ranks: int, n: int, count: int) -> None:
    """To the last bit; also where the last window is a shorter one."""
    data = batches(count)
    assert trained(data, GradientAccumulation(ranks * n, as_ranks=ranks)) == by_hand(data, ranks, n)


def test_without_a_length_too() -> None:
    data = batches(8)
    assert trained(iter(data), GradientAccumulation(4, as_ranks=2)) == by_hand(data, 2, 2)


def test_a_schedule_counts_the_batches_of_all_ranks() -> None:
    accumulation = GradientAccumulation({0: 2, 3: 4}, as_ranks=2)
    assert [accumulation.number(epoch) for epoch in (0, 2, 3)] == [2, 2, 4]


class Skip(Plugin):
    """Leaves the third batch out."""

    asks = ("skip_batch",)

    @on(BatchStart)
    def skip(self, run: Run, event: BatchStart) -> None:
        if run.progress.batch == 2:
            run.control.skip_batch("no good")


def test_what_is_skipped_weighs_nothing() -> None:
    """A window of three of four batches: each of them counts for a third, as without ranks."""
    data = batches(4)
    plain = trained(data, Skip(), GradientAccumulation(4))
    for one, other in zip(trained(data, Skip(), GradientAccumulation(4, as_ranks=2)), plain, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def test_a_parameter_that_one_rank_does_not_use() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other, self.never = (nn.Parameter(torch.zeros(())) for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.sum() * (self.other if inputs[0, 0] > 0 else self.used)

    seen: list[list[float | None]] = []
    net = Half()
    trainer = Trainer([GradientAccumulation(2, as_ranks=2)], device="cpu")
    trainer.bus.on(
        GradientsReady,
        lambda run, event: seen.append([None if p.grad is None else p.grad.item() for p in net.parameters()]),
    )
    data = [(torch.tensor([[value]]), torch.zeros(())) for value in (3.0, -5.0)]
    task = Supervised(net, lambda outputs, targets: outputs)
    trainer.fit(task, data, optimizer=sgd(), epochs=1)

    assert seen == [[-2.5, 1.5, None]]


class AsTheyAre:
    """Data that are read as they are."""

    def reads_as(self, ranks: int) -> bool:
        return True


def test_processes_that_are_as_many_accumulate_as_ever() -> None:
    """Two processes with as_ranks=2 take half of the micro-batches each; four ranks on two of them, two each."""
    for as_ranks, n, number in ((2, 4, 2), (4, 4, 2), (2, 2, 1)):
        accumulation = GradientAccumulation(n, as_ranks=as_ranks)
        run: Any = type(
            "R", (), {"engine": type("E", (), {"world_size": 2})(), "data": AsTheyAre(), "optimizers": {}}
        )()
        accumulation.begin(run, None)  # type: ignore[arg-type]
        assert accumulation.number(0) == number
        assert accumulation._sums is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"n": 3, "as_ranks": 2}, "With as_ranks=2, n counts the micro-batches of all ranks: a multiple, got 3"),
        ({"n": {0: 2, 4: 5}, "as_ranks": 2}, "a multiple, got 5"),
        ({"n": 2, "as_ranks": 0}, "as_ranks= must be a whole number of ranks, at least 1; got 0"),
        ({"n": 2, "as_ranks": "2"}, "as_ranks= must be a whole number of ranks, at least 1; got '2'"),
    ],
)
def test_what_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientAccumulation(**how)


def test_what_is_refused_when_a_run_begins() -> None:
    accumulation = GradientAccumulation(6, as_ranks=3)
    run: Any = type("R", (), {"engine": type("E", (), {"world_size": 2})()})()
    with pytest.raises(ValueError, match="as_ranks=3 is not a multiple of the 2 processes"):
        accumulation.begin(run, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as_ranks= is for one optimizer"):
        run = type("R", (), {"engine": DeviceEngine("cpu"), "data": AsTheyAre(), "optimizers": {"a": 1, "b": 2}})()
        accumulation.begin(run, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as_ranks= is not for precision='fp16'"):
        scaled = type("E", (), {"world_size": 1, "precision": type("P", (), {"scaling": object()})()})()
        run = type("R", (), {"engine": scaled, "data": AsTheyAre(), "optimizers": {"a": 1}})()
        accumulation.begin(run, None)  # type: ignore[arg-type]


def test_samples_are_to_be_read_as_the_ranks_would() -> None:
    data = TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
    reported = r"GradientAccumulation\(as_ranks=2\) is for data that are read as by so many ranks: give fit a dataset"
    for train, params in (
        (data, {"batch_size": 3}),
        (data, {"batch_size": 3, "as_ranks": 4}),
        (DataLoader(data, batch_size=3), None),
        (Phases(batches(2), DataLoader(data, batch_size=3)), None),
    ):
        with pytest.raises(ValueError, match=reported):
            trained(train, GradientAccumulation(2, as_ranks=2), loader_params=params)
    trained(data, GradientAccumulation(2, as_ranks=2), loader_params={"batch_size": 3, "as_ranks": 2})
    whole = DataLoader(data, batch_sampler=[[0, 1, 2], [3, 4, 5]])  # whole batches are dealt out in turn
    trained(whole, GradientAccumulation(2, as_ranks=2))
