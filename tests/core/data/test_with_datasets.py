"""Datasets of Hugging Face's `datasets`, read, killed and resumed: what is continued, and what is untracked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from heliograph import BatchEnd, DDPEngine, Every, Trainer
from heliograph.tests import kit
from heliograph.tests.ranks_pool import Pool
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
SAMPLES, SIZE = 96, 4
BATCHES = SAMPLES // SIZE
Make = Callable[[], Any]


def rows() -> Any:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SAMPLES, 4, generator=generator).tolist()
    return Dataset.from_dict({"x": values, "y": [number % 2 for number in range(SAMPLES)], "number": range(SAMPLES)})


def stream(buffer: int = 0) -> Any:
    """Return an iterable dataset of 4 shards, shuffled with a buffer of so many samples."""
    found = rows().to_iterable_dataset(num_shards=4)
    return (found.shuffle(seed=3, buffer_size=buffer) if buffer else found).with_format("torch")


def fit(folder: Path, data: Any, **options: Any) -> tuple[list[list[int]], Any]:
    """Train for two epochs, saving in each; return the samples of each batch, and the result."""
    seen: list[list[int]] = []
    steps = Every(steps=BATCHES // 2 - 1)
    params = {} if isinstance(data, DataLoader) or hasattr(data, "load_state_dict") else {"batch_size": SIZE}
    trainer = Trainer(kit.saving(folder, steps, keep_last=None, **options), device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.batch["number"].tolist()))
    task = kit.linear_classifier(inputs="x", targets="y")
    result = kit.fit(trainer, task=task, train=data, epochs=2, **({"loader_params": params} if params else {}))
    return seen, result


ITS_OWN = r"keeps its own position|was not checked for hidden state"
KINDS: dict[str, tuple[Make, str, str]] = {
    "rows": (lambda: rows().with_format("torch"), "seeked", ""),
    "rows, shuffled": (lambda: DataLoader(rows().with_format("torch"), SIZE, shuffle=True), "seeked", ""),
    "stream": (lambda: DataLoader(stream(buffer=20), SIZE), "replayed", ""),
    "stream, 2 workers": (lambda: DataLoader(stream(buffer=20), SIZE, num_workers=2), "replayed", ""),
    "by its state": (lambda: StatefulDataLoader(stream(), SIZE), "seeked", ITS_OWN),
    "by its state, 2 workers": (lambda: StatefulDataLoader(stream(), SIZE, num_workers=2), "seeked", ITS_OWN),
    "by its state, alone": (lambda: stream().batch(SIZE), "seeked", ITS_OWN),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_reads_what_the_other_would_have(kind: str, tmp_path: Path) -> None:
    make, position, reason = KINDS[kind]
    whole, _ = fit(tmp_path, make())
    half = len(whole) // 2
    assert sorted(number for batch in whole[:half] for number in batch) == list(range(SAMPLES))
    for step in (BATCHES // 2 - 1, 3 * (BATCHES // 2 - 1)):  # within the first epoch, and within the second
        again, result = fit(tmp_path / str(step), make(), resume=next(tmp_path.glob(f"*_iter_{step}.pth")))
        assert again == whole[step:]
        assert result.resume.position == position
        assert bool(result.resume.reasons) == bool(reason)
        assert all(re.search(reason, each) for each in result.resume.reasons)


@pytest.mark.parametrize("make", [lambda: StatefulDataLoader(stream(20), SIZE), lambda: stream(20).batch(SIZE)])
def test_a_state_without_the_shuffle_buffer_is_not_believed(make: Make, tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, make())
    step = BATCHES // 2 - 1
    again, result = fit(tmp_path / "again", make(), resume=next(tmp_path.glob(f"*_iter_{step}.pth")))
    assert again != whole[step:]
    assert result.resume.reasons
    assert "samples in its shuffle" in result.resume.reasons[0]


# On ranks.


def read_together(folder: str, resume: str | None) -> list[list[int]]:
    """Train on this rank's part of the stream; return the samples of each batch."""
    seen: list[list[int]] = []
    engine = DDPEngine(device="cpu")
    plugins = kit.saving(Path(folder), Every(steps=7), keep_last=None, resume=resume)
    trainer = Trainer(plugins, engine=engine)
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.batch["number"].tolist()))
    data = DataLoader(split_dataset_by_node(stream(buffer=10), engine.rank, engine.world_size), SIZE)
    task = kit.linear_classifier(inputs="x", targets="y")
    trainer.fit(task, data, optimizer=kit.sgd(), epochs=1)
    return seen


@pytest.mark.whole  # every rank imports `datasets`
def test_a_stream_is_split_by_node_and_resumed(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks(2).run(read_together, str(tmp_path), None)
    assert sorted(number for of_rank in whole for batch in of_rank for number in batch) == list(range(SAMPLES))
    middle = tmp_path / "run_epoch_0_iter_7.pth"
    assert ranks(2).run(read_together, str(tmp_path / "again"), str(middle)) == [each[7:] for each in whole]
