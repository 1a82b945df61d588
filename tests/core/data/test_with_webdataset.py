"""Pipelines of webdataset: which shuffles a resumed run repeats, and what it says of those that it does not."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from heliograph import BatchEnd, Every, Trainer
from heliograph.tests import kit

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*shard-:ResourceWarning")  # webdataset closes none
BATCHES = 6
SHUFFLES: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "by a generator": (lambda: {"rng": random.Random(1)}, True),
    "by the time of day": (dict, False),
}


def write_shards(folder: Path) -> list[str]:
    """Write two shards of 12 samples; return their paths."""
    paths = [str(folder / f"shard-{shard}.tar") for shard in range(2)]
    for shard, path in enumerate(paths):
        with wds.TarWriter(path) as tar:
            for number in range(12 * shard, 12 * shard + 12):
                values = np.full(4, number, dtype=np.float32)
                tar.write({"__key__": f"{number:02}", "values.npy": values, "label.cls": number % 2})
    return paths


def fit(folder: Path, paths: list[str], shuffle: dict[str, Any], **options: Any) -> tuple[list[list[float]], Any]:
    """Train for two epochs; return the samples of each batch, and the result."""
    data = wds.WebDataset(paths, shardshuffle=False).shuffle(12, initial=12, **shuffle).decode()
    data = data.to_tuple("values.npy", "label.cls").map_tuple(torch.from_numpy, torch.tensor).batched(4)
    seen: list[list[float]] = []
    trainer = Trainer(kit.saving(folder, Every(steps=4), keep_last=None, **options), device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.batch[0][:, 0].tolist()))
    return seen, kit.fit(trainer, train=data, epochs=2)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Free what webdataset leaves open while its warnings are expected."""
    yield
    gc.collect()


@pytest.mark.parametrize("kind", SHUFFLES)
@pytest.mark.parametrize("step", [4, 8])
def test_a_resumed_run_repeats_the_order_or_says_that_it_does_not(kind: str, step: int, tmp_path: Path) -> None:
    make, repeats = SHUFFLES[kind]
    paths = write_shards(tmp_path)
    whole, _ = fit(tmp_path / "whole", paths, make())
    saved = next((tmp_path / "whole").glob(f"*_iter_{step}.pth"))
    again, result = fit(tmp_path / "again", paths, make(), resume=saved)
    assert sorted(number for batch in whole[:BATCHES] for number in batch) == list(range(24))
    assert whole[:BATCHES] != whole[BATCHES:]
    assert (again == whole[step:]) is repeats
    assert result.resume.position == "replayed"
    assert (result.resume.reasons == ()) is repeats
