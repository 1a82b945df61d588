"""What ranks compute when they accumulate, beside another run and beside one process; what they exchange for it.

Without accumulation, and on fewer ranks: `core/engines/test_ddp.py`. Metrics: `core/data/test_on_ranks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from heliograph import DDPEngine, GradientAccumulation, Run, Supervised, Task, Trainer
from heliograph.tests.core.engines.test_ddp import (
    assert_equal,
    difference,
    micro_batches,
    trained,
)
from heliograph.tests.kit import sgd
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

STEPS = 50


@pytest.mark.whole
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["mlp", "conv", "norm"])
def test_four_ranks_give_the_same_bits_in_every_run_and_stay_close_to_one_process(ranks: Pool, kind: str) -> None:
    once = ranks(4).run(trained, kind, STEPS, batches_per_step=8, window=2)
    again = ranks(4).run(trained, kind, STEPS, batches_per_step=8, window=2)
    for state in (*once[1:], *again):
        assert_equal(state, once[0])
    if kind != "norm":  # whose statistics are those of whole batches in one process
        alone = ranks(1).run(trained, kind, STEPS, batches_per_step=8, merged=8)[0]
        assert 0.0 < difference(once[0], alone) <= 2e-6


# What is exchanged.


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30))


class Several(Task):
    """Two models with a loss each."""

    def __init__(self) -> None:
        self.one, self.other = net(), nn.Linear(6, 30)

    def training_step(self, run: Run, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, model in run.modules.items():
            yield name, cross_entropy(model(batch[0]), batch[1])


def exchanged(window: int, several: bool, **options: Any) -> tuple[int, Counter[int]]:
    """Return the steps taken, and how many all-reduces of gradients gloo did, by their numbers of elements."""
    task: Any = Several() if several else Supervised(net(), cross_entropy)
    optimizer: Any = {"one": sgd(), "other": sgd()} if several else sgd()
    trainer = Trainer([GradientAccumulation(window)], engine=DDPEngine(**options))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        result = trainer.fit(task, micro_batches(12), optimizer=optimizer, epochs=1)
    sizes = [each.input_shapes[0][0] for each in profiler.events() if each.name == "gloo:all_reduce"]
    return result.progress.steps, Counter(size for size in sizes if size > 25)  # votes are of a few numbers


@pytest.mark.sample(1)
@pytest.mark.parametrize(("window", "steps"), [(1, 6), (3, 2), (4, 2)])
def test_gradients_are_exchanged_once_for_each_window_and_bucket(ranks: Pool, window: int, steps: int) -> None:
    """Not for the micro-batches in between."""
    whole = 6 * 40 + 40 + 40 * 30 + 30
    for buckets, several, options in (
        ([whole], False, {}),
        ([1200, 240 + 30, 40], False, {"bucket_cap_mb": 1e-3}),
        ([whole + 4, 6 * 30 + 30 + 2], True, {}),  # with each, whether the parameters have a gradient
    ):
        counted = steps, Counter(dict.fromkeys(buckets, steps))
        assert ranks(2).run(exchanged, window, several, **options) == [counted] * 2
